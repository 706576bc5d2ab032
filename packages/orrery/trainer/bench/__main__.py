"""Measure a manifest's trainer: `python -m orrery.trainer.bench MANIFEST [options]`.

MANIFEST is a file, or a name in the checkout's `manifests/`. The run's row in `ROWS` replaces
default options.
"""

import argparse
import gzip
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import find_workspace, load
from orrery.manifest.schema import Manifest
from orrery.trainer.bench import ROWS, BenchRequest, Options, given_options, make_request


def main() -> None:
    arguments = parser().parse_args()
    try:
        measure(arguments)
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def measure(arguments: argparse.Namespace) -> None:
    manifest = find_manifest(arguments.manifest)
    options, row = resolve_options(manifest.name, arguments)
    request = make_request(manifest, options)
    check_devices(request)
    check_outputs(arguments.json, arguments.profile)
    from orrery.trainer.bench import report

    given = given_options(options)
    from_row = f" (its row: {as_arguments(row)})" if row else ""
    print(f"{manifest.name}: measured with {as_arguments(given)}{from_row}", flush=True)
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orrery-bench-") as folder:
        answers = run_ranks(request, Path(folder), arguments.deadline_s)
        result = report.result(request, answers, given, time.monotonic() - begin_s)
        report.show(result)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        if arguments.profile is not None:
            keep_trace(Path(folder) / "trace.json", arguments.profile, request)


def parser() -> argparse.ArgumentParser:
    default = Options()
    one = argparse.ArgumentParser(
        prog="orrery bench trainer", description=__doc__, argument_default=argparse.SUPPRESS
    )
    add = one.add_argument

    def add_number(option: str, metavar: str, text: str) -> None:
        add(option, type=positive, metavar=metavar, help=text)

    add("manifest", metavar="MANIFEST")
    add("--device", choices=["cpu"], help="measure on the CPU, in float32")
    text = "number of devices (default: the mesh's), to which dp_shard is fitted"
    add_number("--devices", "N", text)
    add_number("--steps", "N", f"measured steps (default {default.steps})")
    add_number(
        "--warmup", "N", f"unmeasured steps before the measured steps (default {default.warmup})"
    )
    text = "lengths of documents (default fixed: all as long as the longest)"
    add("--lengths", choices=["fixed", "variable"], help=text)
    text = f"experts: chosen by the router, or all in turn (default {default.routing})"
    add("--routing", choices=["natural", "balanced"], help=text)
    add("--loss", choices=["sft", "rl"], help=f"loss to train (default {default.loss})")
    add_number("--micro-batches", "M", "micro-batches per rank and step (default 1)")
    text = "replaces trainer.memory.max_tokens_per_micro_batch"
    add_number("--tokens-per-micro-batch", "T", text)
    add_number("--document-tokens", "T", "longest document (default: the engines' context)")
    add_number("--layers", "L", "number of layers, instead of the model's")
    text = 'fields to change in trainer.memory, such as {"activation_offload": true}'
    add("--memory", metavar="JSON", help=text)
    add("--fsdp", metavar="JSON", help="fields to change in trainer.fsdp")
    add("--mesh", metavar="JSON", help='fields to change in trainer.mesh, such as {"ep": 4}')
    text = 'fields to change in the trainer, such as {"optimizer": {"kind": "muon", …}}'
    add("--trainer", metavar="JSON", help=text)
    add("--compile", action=argparse.BooleanOptionalAction, help="replaces trainer.compile")
    add("--json", type=Path, default=None, metavar="FILE", help="write all measurements to FILE")
    text = "keep the trace of the profiled step in FOLDER"
    add("--profile", type=Path, default=None, metavar="FOLDER", help=text)
    text = "time limit in seconds (default 1800)"
    add("--deadline-s", type=float, default=1800.0, metavar="S", help=text)
    return one


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def find_manifest(word: str) -> Manifest:
    path = Path(word)
    if path.suffix == ".json" or path.exists():
        return load(path)
    workspace = find_workspace()
    path = workspace.manifest_path(word)
    if not path.exists():
        near = nearest(word, [one.stem for one in path.parent.glob("*.json")])
        hint = f"did you mean {near!r}?" if near else "`orrery check` lists the runs"
        raise OrreryError(f"run {word!r}: there is no {workspace.shown(path)}; {hint}")
    return load(path)


def resolve_options(name: str, arguments: argparse.Namespace) -> tuple[Options, dict[str, Any]]:
    fields = Options.__dataclass_fields__
    given = {field: getattr(arguments, field) for field in fields if hasattr(arguments, field)}
    row = {field: value for field, value in ROWS.get(name, {}).items() if field not in given}
    return Options(**given, **row), row


def as_arguments(options: dict[str, Any]) -> str:
    words = []
    for field, value in options.items():
        if isinstance(value, bool):
            words.append(f"--{'' if value else 'no-'}{field}")
        else:
            words += [f"--{field.replace('_', '-')}", str(value)]
    return shlex.join(words)


def check_outputs(file: Path | None, folder: Path | None) -> None:
    if file is not None:
        if file.is_dir():
            example = file / "result.json"
            raise OrreryError(f"--json: {file} is a folder; name a file in it, such as {example}")
        if not file.exists():
            check_folder("--json", file.parent, "name a file in a writable folder")
        elif not os.access(file, os.W_OK):
            raise OrreryError(f"--json: {file} cannot be written; name a writable file")
    if folder is not None:
        check_folder("--profile", folder, "name a writable folder")


def check_folder(option: str, folder: Path, instead: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OrreryError(
            f"{option}: nothing can be written in {folder} ({error.strerror}); {instead}"
        ) from None


def check_devices(request: BenchRequest) -> None:
    import torch

    if request.accelerator == "cpu":
        from orrery.trainer.host_memory import available_bytes

        needed, free = float32_bytes(request), available_bytes()
        if needed > free:
            raise OrreryError(
                f"{request.name}: its weights, gradients and optimizer state take "
                f"{needed / 2**30:,.0f} GiB in float32 and this machine has "
                f"{free / 2**30:,.0f} GiB free; add --devices 1 --layers 1, "
                "or measure a smaller run, such as reverse_text"
            )
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise OrreryError(
            f"{request.name}: is for {request.accelerator} and this machine has no GPU; "
            "add --device cpu to measure on the CPU"
        )
    if found < request.num_devices:
        raise OrreryError(
            f"{request.name}: is for {request.num_devices} devices and this machine has {found}; "
            f"add --devices {found}"
        )


def float32_bytes(request: BenchRequest) -> int:
    from orrery.manifest.budget.trainer_memory import num_states
    from orrery.models.families import count_parameters

    counted = count_parameters(request.model, request.trainer.lora)
    values = sum(2 * unit.trained + unit.frozen for unit in counted.units)
    values += num_states(request.trainer.optimizer, counted)
    return 4 * request.trainer.mesh.dp_replicate * values


def keep_trace(trace: Path, folder: Path, request: BenchRequest) -> None:
    kept = folder / f"{request.name}.trace.json.gz"
    with trace.open("rb") as source, gzip.open(kept, "wb", compresslevel=4) as target:
        shutil.copyfileobj(source, target)


def run_ranks(request: BenchRequest, folder: Path, deadline_s: float) -> list[dict[str, Any]]:
    """Run a process per device. Return their results.

    After a failure or `deadline_s`, kill all processes and raise RunFailed.
    """
    import torch.distributed as dist

    from orrery.trainer import ALLOCATOR, EXPANDABLE

    request.write(folder / "request.json")
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    server = dist.TCPStore(
        "127.0.0.1", port, None, True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    environment = {ALLOCATOR: EXPANDABLE, "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1", **os.environ}
    environment["ORRERY_BENCH_PORT"] = str(port)
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, sys.path))
    command = [sys.executable, "-m", "orrery.trainer.bench.rank", str(folder)]
    ranks: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(request.num_devices):
            own = {**environment, "RANK": str(rank)}
            with (folder / f"rank.{rank}.log").open("w") as log:
                ranks.append(
                    subprocess.Popen(command, env=own, stdout=log, stderr=subprocess.STDOUT)
                )
        _watch(ranks, folder, time.monotonic() + deadline_s)
    finally:
        for process in ranks:
            if process.poll() is None:
                process.kill()
                process.wait()
        del server
    return [json.loads(_answer_path(folder, rank).read_text()) for rank in range(len(ranks))]


def _answer_path(folder: Path, rank: int) -> Path:
    return folder / f"rank.{rank}.json"


def _watch(ranks: list[subprocess.Popen[bytes]], folder: Path, deadline_s: float) -> None:
    while True:
        codes = [process.poll() for process in ranks]
        failed = [rank for rank, code in enumerate(codes) if code]
        if failed:
            time.sleep(1.0)
            raise RunFailed(_error(ranks, folder, failed[0]))
        if all(code == 0 for code in codes):
            return
        if time.monotonic() > deadline_s:
            silent = [r for r in range(len(ranks)) if not _answer_path(folder, r).exists()]
            tails = [f"rank {rank} last wrote: {_tail(folder, rank, 8)}" for rank in silent[:4]]
            raise RunFailed(
                "the measurement took longer than its deadline, "
                f"and ranks {silent} have no result yet\n" + "\n".join(tails)
            )
        time.sleep(0.05)


def _error(ranks: list[subprocess.Popen[bytes]], folder: Path, first: int) -> str:
    paths = [_answer_path(folder, rank) for rank in range(len(ranks))]
    answers = [json.loads(path.read_text()) for path in paths if path.exists()]
    full = [answer["out_of_memory"] for answer in answers if "out_of_memory" in answer]
    if full:
        return full[0] + (f" ({len(full)} of {len(ranks)} ranks ran out)" if len(full) > 1 else "")
    for answer in answers:
        if "error" in answer:
            return answer["error"]
    return f"rank {first} ended with code {ranks[first].returncode}: {_tail(folder, first)}"


def _tail(folder: Path, rank: int, num_lines: int = 30) -> str:
    lines = (folder / f"rank.{rank}.log").read_text(errors="replace").strip().splitlines()
    return "\n".join(lines[-num_lines:]) or "nothing"


if __name__ == "__main__":
    main()
