"""Measure how long an update stops generation and training, on every weight wire.

    W=benchmarks/transport/weight_update.py
    python $W                       a tiny mixture on a CPU, two trainer ranks
    python $W --manifest qwen3_30b_a3b_16k --trainers 4 --devices 0,1,2,3/4,5,6,7 --wires nccl
    python $W --manifest smollm2_smoke --trainers 1 --wires files adapters

- Trainer ranks have the trainer's own policy and publisher. Weights are scaled instead of trained.
- The engine is `orrery.inference` with random weights, and requests are in flight. Each must
  complete, and its tokens' versions must never fall.
- `paused_s` is the time without generation. `blocked_s` is the time that the trainer waits.
"""

import argparse
import asyncio
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, nullcontext
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "benchmarks"))
GOAL = 0.5  # seconds for paused_s and blocked_s; Qwen3-30B-A3B, four GPUs to four others
FINGERPRINTS_GOAL = 0.05  # of a pause, on GPUs
ANSWER = "answer: "  # a rank's messages to the driver, because libraries write to standard output


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("role", nargs="?", choices=("trainer", "inference"), help=argparse.SUPPRESS)
    parser.add_argument("rest", nargs="*", help=argparse.SUPPRESS)
    parser.add_argument("--manifest", default="reverse_text_direct")
    parser.add_argument("--trainers", type=int, default=2)
    parser.add_argument(
        "--devices",
        default="/",
        help="of the trainer ranks, and of the engine, as in 0,1/2,3; none on a CPU",
    )
    parser.add_argument("--wires", nargs="+", default=["files", "nccl", "nixl"])
    parser.add_argument(
        "--updates", type=int, default=6, help="the first forms the group and is not counted"
    )
    parser.add_argument("--requests", type=int, default=8, help="in flight")
    return parser.parse_args()


# A trainer rank


def trainer(
    run_dir: Path, kind: str, rank: int, size: int, port: int, folder: Path, control: str
) -> None:
    """Run a trainer rank. Execute commands from standard input, and answer with seconds."""
    import torch
    import torch.distributed as dist

    from orrery.manifest.identity import load
    from orrery.models.placement import local_tensor
    from orrery.models.weights import initialize_on_device
    from orrery.trainer.parallel import build_policy
    from orrery.trainer.parallel.world import device_for, init_world
    from orrery.trainer.publish import AdapterPublisher, DirectPublisher, Publisher
    from orrery.wire.weight_wire import WeightPublisher
    from orrery.wire.weight_wire.transfer import WeightSender

    manifest = load(run_dir / "manifest.json")
    device = device_for(manifest.hardware.accelerator, rank)
    world = init_world(
        manifest.trainer.mesh,
        rank,
        device,
        dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False),
    )
    policy = build_policy(manifest.model, manifest.trainer, world)
    initialize_on_device(policy.network, 0.02, 0)
    dtype = getattr(torch, manifest.inference.dtype)
    parts: list[dict[str, float]] = []
    ctx: Any = SimpleNamespace(
        health=SimpleNamespace(waiting=lambda *_, **__: nullcontext()),
        metrics=SimpleNamespace(write=lambda *_, **row: parts.append(row)),
        log=logging.getLogger("trainer"),
    )
    publisher: Publisher
    if kind == "files":
        publisher = Publisher(policy, WeightPublisher(folder) if rank == 0 else None)
    elif kind == "adapters":
        publisher = AdapterPublisher(policy, WeightPublisher(folder) if rank == 0 else None, dtype)
    else:
        source = WeightSender(kind, folder, "127.0.0.1", rank, size, device)
        publisher = direct = DirectPublisher(policy, source, dtype, ctx)
        direct.listen(control)
    version = -1
    print(ANSWER + json.dumps("ready"), flush=True)
    for line in sys.stdin:
        begin = time.perf_counter()
        if line.strip() == "publish":
            version += 1
            publisher.publish(version)
            answer: object = time.perf_counter() - begin
        elif line.strip() == "step":
            publisher.settle()
            answer = [time.perf_counter() - begin, parts[-1] if parts else {}]
            with torch.no_grad():
                for parameter in policy.parameters():
                    local_tensor(parameter).mul_(1.001)
        else:
            break
        print(ANSWER + json.dumps(answer), flush=True)
    publisher.close()


# The engine


def inference(run_dir: Path) -> None:
    """Run like `python -m orrery.inference`, but with weights never written to disk."""
    from orrery.inference.assemble import blank_adapter, engine_environment, server_arguments
    from orrery.runtime.role_context import role_process

    with role_process("inference", ["--run-dir", str(run_dir), "--stage", "rl"]) as ctx:
        engine_environment(ctx.manifest, ctx.host)
        adapter = blank_adapter(run_dir, ctx.manifest, "rl", ctx.name)
        options = server_arguments(
            ctx.manifest, run_dir / "weights" / "init", 0, ctx.host, 0, adapter
        )
        from orrery.inference.server import serve

        serve(ctx, [*options, "--load-format", "dummy"])


# The driver


class Trainers:
    """The processes of all trainer ranks."""

    def __init__(
        self, run_dir: Path, kind: str, size: int, devices: str, folder: Path, control: str
    ) -> None:
        from orrery.runtime.network import free_ports

        [port] = free_ports(1)
        shown = devices.split(",") if devices else []
        self.ranks = []
        for rank in range(size):
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": shown[rank]} if shown else {})
            command = [
                sys.executable,
                __file__,
                "trainer",
                *map(str, (run_dir, kind, rank, size, port, folder, control)),
            ]
            self.ranks.append(
                subprocess.Popen(
                    command,
                    env=environment,
                    text=True,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    cwd=ROOT,
                )
            )
        self._answers()

    def tell(self, word: str) -> list:
        for rank in self.ranks:
            assert rank.stdin is not None
            print(word, file=rank.stdin, flush=True)
        return self._answers()

    def _answers(self) -> list:
        answers = []
        for index, rank in enumerate(self.ranks):
            assert rank.stdout is not None
            while not (line := rank.stdout.readline()).startswith(ANSWER):
                if not line:
                    raise SystemExit(
                        f"trainer {index} ended with exit code {rank.wait()}; its words are above"
                    )
            answers.append(json.loads(line.removeprefix(ANSWER)))
        return answers

    def end(self) -> None:
        for rank in self.ranks:
            assert rank.stdin is not None
            rank.stdin.close()
        for rank in self.ranks:
            rank.wait(60)


async def measure(run_dir: Path, url: str, kind: str, args: argparse.Namespace) -> dict:
    """Measure one weight wire."""
    from orrery.orchestrator.engines.client import EngineClient, update_engine
    from orrery.wire.sockets import ControlSocket
    from orrery.wire.weight_wire import ADAPTER, DIRECT_KINDS, WeightWatch
    from orrery.wire.weight_wire.leases import LeaseClient

    with tempfile.TemporaryDirectory(prefix="orrery-weights-", dir="/dev/shm") as made:
        folder, control = Path(made), ControlSocket("127.0.0.1", 0)
        leases = LeaseClient.over(control)
        control.start()
        trainers = await asyncio.to_thread(
            Trainers, run_dir, kind, args.trainers, args.devices.split("/")[0], folder, control.url
        )
        rows, number, stop = [], 0, False
        taken, begun, num_spanning = (
            -1,
            -1,
            0,
        )  # versions, and requests that span several
        async with EngineClient(
            url, name="engine 0", model=ADAPTER if kind == "adapters" else None
        ) as engine:

            async def keep_generating(lane: int) -> int:
                nonlocal number, num_spanning
                tokens = 0
                while not stop:
                    number += 1
                    before = taken
                    found = await engine.generate(
                        [3, 4, 5, 6],
                        max_tokens=48,
                        temperature=1.0,
                        cache_salt=str(lane),
                        request_id=f"{kind}.{number}",
                        ignore_eos=True,
                    )
                    assert len(found.token_ids) == 48, "a request was cut short"
                    versions = found.versions.tolist()
                    if (
                        versions != sorted(versions)
                        or not before <= versions[0] <= versions[-1] <= begun
                    ):
                        raise SystemExit(
                            f"error: tokens say versions {versions} between {before}, "
                            f"which was taken, and {begun}, which was begun"
                        )
                    num_spanning += versions[0] < versions[-1]
                    tokens += 48
                return tokens

            flight: list[asyncio.Task[int]] = []
            for version in range(args.updates):
                publish_s = max(await asyncio.to_thread(trainers.tell, "publish"))
                published = WeightWatch(folder).latest()
                assert published is not None and published.version == version
                file_bytes = sum(
                    file.stat().st_size for file in published.folder.glob("*.safetensors")
                )
                leased = published
                if kind in DIRECT_KINDS:
                    granted = await leases.start_transfer(published, ["engine 0"])
                    assert granted is not None
                    leased = granted
                begun = version
                report = await update_engine(engine, leased)
                taken = version
                leases.release()
                if (
                    not flight
                ):  # from the first version on, because earlier weights may be of another wire
                    flight = [
                        asyncio.create_task(keep_generating(lane)) for lane in range(args.requests)
                    ]
                answers = await asyncio.to_thread(trainers.tell, "step")
                sent = {part: value for part, value in answers[0][1].items() if part.endswith("_s")}
                settle_s = max(answer[0] for answer in answers)
                rows.append({
                    "version": version, "paused_s": report.paused_s,
                    "pause_s": report.pause_s, "update_s": report.update_s,
                    "attest_s": report.attest_s, "publish_s": publish_s,
                    "settle_s": settle_s, "blocked_s": publish_s + settle_s,
                    "engine": await engine.update_parts(), "trainer": sent,
                })  # fmt: skip
                print(json.dumps({"wire": kind, **rows[-1]}), flush=True)
            stop = True
            tokens = sum(await asyncio.gather(*flight))
        await asyncio.to_thread(trainers.end)
        control.close()
    counted = rows[1:]
    return {
        "variant": kind,
        "value": median(row["paused_s"] for row in counted),
        "blocked_s": median(row["blocked_s"] for row in counted),
        "tokens_generated_meanwhile": tokens,
        "requests_of_several_versions": num_spanning,
        "file_bytes": file_bytes,
        "updates": rows,
    }


def prepare(folder: Path, args: argparse.Namespace, adapters: bool) -> Path:
    """Make a run directory for an engine and trainer ranks, with weights or `adapters`."""
    from orrery.manifest.identity import load
    from orrery.models.families import hf_config
    from roles import ALONE

    manifest = json.loads((ROOT / "manifests" / f"{args.manifest}.json").read_text())
    engine_devices = [each for each in args.devices.partition("/")[2].split(",") if each]
    mesh = {"dp_replicate": 1, "dp_shard": args.trainers, "cp": 1}
    manifest["trainer"]["mesh"] |= mesh | (
        {"ep": args.trainers} if manifest["model"]["moe"] else {}
    )
    manifest["trainer"]["memory"] |= {"optimizer_offload": False, "optimizer_offload_resident": 0.0}
    manifest["inference"] |= ALONE | {
        "kv_cache_bytes": 2**32
    }  # more than the requests in flight need
    if adapters:
        manifest["transport"]["weights"] = "adapters"
        manifest["trainer"]["lora"] = {
            "rank": 16,
            "alpha": 32.0,
            "targets": ["attention"],
            "seed": 1,
        }
    if engine_devices:
        is_mixture = manifest["model"]["moe"] is not None
        manifest["inference"] |= {
            "tensor_parallel": len(engine_devices),
            "data_parallel": 1,
            "expert_parallel": is_mixture and len(engine_devices) > 1,
        }
        manifest["hardware"] |= {"num_nodes": 1}
    run_dir = folder / "run"
    (run_dir / "weights" / "init").mkdir(parents=True)
    (run_dir / "manifest.json").write_text(json.dumps(manifest))
    model, inference_dtype = load(run_dir / "manifest.json").model, manifest["inference"]["dtype"]
    (run_dir / "weights" / "init" / "config.json").write_text(
        json.dumps({**hf_config(model), "dtype": inference_dtype})
    )
    return run_dir


def goal_of(args: argparse.Namespace) -> float | None:
    """Return the goal for Qwen3-30B-A3B from four GPUs to four others, otherwise None."""
    trainers, engines = (
        {each for each in side.split(",") if each} for side in args.devices.split("/")
    )
    is_meant = (
        args.manifest.startswith("qwen3_30b_a3b_")
        and args.trainers == len(trainers) == len(engines) == 4
    )
    return GOAL if is_meant and not trainers & engines else None


def beside(row: dict, goal: float | None, on_gpus: bool) -> list[dict]:
    """Return the row's other measurements: the trainer's wait, and the fingerprints' share."""
    found = [
        {
            "variant": f"{row['variant']}: trainer waits",
            "value": row["blocked_s"],
            "unit": "s",
            "goal": goal,
            "better": "lower",
        }
    ]
    counted = row["updates"][1:]
    if all(
        "fingerprint_s" in update["engine"] for update in counted
    ):  # engines that read files compute none
        share = median(update["engine"]["fingerprint_s"] / update["paused_s"] for update in counted)
        goal = FINGERPRINTS_GOAL if on_gpus else None
        found.append(
            {
                "variant": f"{row['variant']}: fingerprints",
                "value": share,
                "unit": "share",
                "goal": goal,
                "better": "lower",
            }
        )
    return found


def measure_all(wires: list[str], args: argparse.Namespace) -> list[dict]:
    """Measure these wires, one after another, with one engine."""
    with ExitStack() as stack:
        run_dir = prepare(
            Path(stack.enter_context(tempfile.TemporaryDirectory())),
            args,
            adapters=wires == ["adapters"],
        )
        shown = args.devices.partition("/")[2]
        environment = (
            os.environ
            | {"OMP_NUM_THREADS": "1"}
            | ({"CUDA_VISIBLE_DEVICES": shown} if shown else {})
        )
        server = subprocess.Popen(
            [sys.executable, __file__, "inference", str(run_dir)],
            env=environment,
            cwd=ROOT,
            start_new_session=True,
        )
        stack.callback(server.wait, 30)
        stack.callback(server.terminate)
        endpoint = run_dir / "stages" / "rl" / "endpoints" / "inference.0.json"
        while not endpoint.exists():
            if server.poll() is not None:
                raise SystemExit(
                    f"the engine ended with exit code {server.returncode}; its words are above"
                )
            time.sleep(0.2)
        url = json.loads(endpoint.read_text())["url"]
        return [asyncio.run(measure(run_dir, url, kind, args)) for kind in wires]


def main() -> None:
    args = arguments()
    if args.role == "inference":
        inference(Path(args.rest[0]))
        return
    if args.role == "trainer":
        run_dir, kind, rank, size, port, folder, control = args.rest
        trainer(Path(run_dir), kind, int(rank), int(size), int(port), Path(folder), control)
        return
    from record import record

    rows = []
    for wires in (
        [kind for kind in args.wires if kind != "adapters"],
        [kind for kind in args.wires if kind == "adapters"],
    ):
        rows += measure_all(wires, args) if wires else []
    best = min(rows, key=lambda row: row["value"])
    shape = "" if args.manifest == "reverse_text_direct" else f"_{args.manifest}"
    trainers, engines = (
        [each for each in side.split(",") if each] for side in args.devices.split("/")
    )
    if engines:
        shape += f"_{args.trainers}_to_{len(engines)}" + (
            "_shared" if {*trainers} & {*engines} else ""
        )
    goal = goal_of(args)
    record(
        Path(__file__).with_name(f"weight_update{shape}.json"),
        figure=f"update of {args.manifest}, {args.trainers} trainer ranks → one engine, "
        "requests in flight: engine paused",
        value=best["value"],
        unit="s",
        goal=goal,
        better="lower",
        details={
            "wire": best["variant"],
            "requests_in_flight": args.requests,
            "trainers": args.trainers,
            "devices": args.devices,
        },
        rows=[each for row in rows for each in (row, *beside(row, goal, bool(engines)))],
    )


if __name__ == "__main__":
    main()
