"""Real servers: run directories with tiny random models, and roles as the launcher starts them."""

import asyncio
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
from forked_roles import ForkedRole, import_before

from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.orchestrator.engines.messages import EngineGone
from orrery.orchestrator.engines.pool import EnginePool
from orrery.runtime.network import handed_over

Process = subprocess.Popen | ForkedRole
REPOSITORY = Path(__file__).resolve().parents[2]
STAGE = "rl"
START_S = 120.0
# An engine's imports. vLLM reads its environment at use, but the log level during import.
PRELOADED = (
    "torch.distributed.fsdp",
    "torch._inductor.compile_fx",
    "transformers.models.auto.auto_factory",
    "openai.types.responses",
    "fastapi",
    "aiohttp",
    "vllm.entrypoints.launchers.api_server",
    "vllm.entrypoints.launchers.cli_args",
    "vllm.v1.engine.core",
    "vllm.v1.worker.cpu_worker",
    "vllm.v1.worker.cpu_model_runner",
    "vllm.model_executor.models.qwen3",
    "vllm.model_executor.models.qwen3_moe",
)

# Fields of an engine's shape as most engines have them.
EXCHANGE = {
    "all2all_backend": "allgather_reducescatter",
    "dual_batch_overlap": False,
}
DENSE = {
    "family": "qwen3",
    "vocab_size": 48,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 32,
    "max_positions": 1024,
    "tie_embeddings": True,
    "moe": None,
    "init": {"kind": "random", "seed": 7, "std": 0.3},
}
MIXTURE = DENSE | {
    "family": "qwen3_moe",
    "tie_embeddings": False,
    "moe": {
        "num_experts": 4,
        "num_experts_per_token": 2,
        "expert_intermediate_size": 64,
        "normalize_top_k": True,
        "num_dense_layers": 0,
        "num_shared_experts": 0,
        "score": "softmax",
        "routed_scale": 1.0,
    },
}


def make_run(
    folder: Path,
    model: dict[str, object],
    num_replicas: int = 1,
    inference: dict[str, object] | None = None,
    routed_experts: bool = False,
) -> Path:
    """Make a run directory with a manifest and `weights/init`, as after the init stage.

    `inference`: fields of the manifest's part of that name.
    """
    from orrery.models.weights import save

    manifest = json.loads((REPOSITORY / "manifests/reverse_text_smoke.json").read_text())
    manifest["model"] |= model
    manifest["stages"]["sft"] = None
    manifest["transport"]["routed_experts"] = routed_experts
    manifest["inference"] |= {
        "num_replicas": num_replicas,
        "dtype": "float32",
        "max_model_len_tokens": 512,
        "kv_block_tokens": 32,
        "kv_cache_bytes": 1 << 25,
        "max_num_sequences": 32,
        "max_batched_tokens": 1024,
        "enforce_eager": True,
        "router": {
            "kind": "vllm_router",
            "policy": "cache_aware",
            "balance_abs_threshold": 2,
            "balance_rel_threshold": 1.1,
        },
        **(inference or {}),
    }
    manifest["trainer"]["memory"]["max_tokens_per_micro_batch"] = manifest["inference"][
        "max_model_len_tokens"
    ]
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_text(json.dumps(manifest))
    checked = load(folder / "manifest.json")
    save(make_module(checked, seed=7), checked.model, folder / "weights" / "init")
    return folder


def make_module(manifest: Manifest, seed: int):  # type: ignore[no-untyped-def]
    """Return the model with random weights of another seed, as another policy version."""
    import torch

    from orrery.models import build
    from orrery.models.weights import initialize

    module = build(manifest.model, torch.float32, "cpu")
    init = manifest.model.init.model_copy(update={"seed": seed})
    initialize(module, manifest.model.model_copy(update={"init": init}))
    return module


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def start_role(
    module: str,
    run_dir: Path,
    index: int,
    token: str = "",
    interface: str = "lo",
    stage: str = STAGE,
    incarnation: int = 0,
) -> Process:
    """Start a role process in a new process group. It writes to `logs/`."""
    # A test with one end of a wire names an interface for gloo in its own process.
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("SOCKET_IFNAME")
    } | {
        "PYTHONPATH": os.pathsep.join(
            map(str, [*sorted(REPOSITORY.glob("packages")), Path(__file__).parent])
        ),
        "OMP_NUM_THREADS": "1",
        **({"ORRERY_TOKEN_FILE": "-"} if token else {}),
        "ORRERY_INTERFACE": interface,
    }
    logs = run_dir / "logs"
    logs.mkdir(exist_ok=True)
    log = logs / f"{module}.{index}.log"
    if not incarnation:
        log.unlink(missing_ok=True)
    options = {
        "--run-dir": run_dir,
        "--stage": stage,
        "--index": index,
        "--attempt": 1,
        "--port": 0,
        "--incarnation": incarnation,
    }
    words = [str(word) for option in options.items() for word in option]
    if module == "orrery.inference.router":  # it does without torch
        with log.open("ab") as output, handed_over(token) as stdin:
            return subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdin=stdin,
                stdout=output,
                stderr=subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
    import_before(
        *PRELOADED, TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1", VLLM_LOGGING_LEVEL="WARNING"
    )
    return ForkedRole(module, words, log, environment, token)


def await_published(
    run_dir: Path, role: str, index: int, process: Process, stage: str = STAGE
) -> str:
    """Return the role's published address. Fail with the end of its log if it ends first."""
    path = run_dir / "stages" / stage / "endpoints" / f"{role}.{index}.json"
    end = time.monotonic() + START_S
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            logs = "\n".join(
                log.read_text(errors="replace")[-3000:]
                for log in (run_dir / "logs").glob(f"*.{index}.log")
            )
            raise AssertionError(f"{role} {index} did not start (exit {process.poll()}):\n{logs}")
        time.sleep(0.05)
    return str(json.loads(path.read_text())["url"])


@contextmanager
def engine(run_dir: Path, index: int = 0) -> Iterator[tuple[Process, str]]:
    """Yield a server's process and address, then end it."""
    process = start_role("orrery.inference", run_dir, index)
    try:
        yield process, await_published(run_dir, "inference", index, process)
    finally:
        stop(process)


def with_fleet(scenario, *arguments, **options):  # type: ignore[no-untyped-def]
    """Return the result of the async `scenario(pool)` in a new event loop.

    The `EnginePool` has these arguments.
    """

    async def main():  # type: ignore[no-untyped-def]
        async with EnginePool(*arguments, **options) as fleet:
            return await scenario(fleet)

    return asyncio.run(main())


async def in_flight(fleet, *requests):  # type: ignore[no-untyped-def]
    """Return tasks of `requests` once all run at the same time.

    Each of `requests` returns a long request's coroutine for the last part of its id. If one has
    ended before the engines report all as running, all are sent again.
    """
    end = time.monotonic() + 60
    for attempt in itertools.count():
        tasks = [
            asyncio.ensure_future(request(f"{i}-{attempt}")) for i, request in enumerate(requests)
        ]
        loads = []
        while not any(task.done() for task in tasks):
            with suppress(EngineGone):  # slow to answer, on a busy machine
                loads = list((await fleet.metrics()).values())
                if sum(load.running for load in loads) >= len(tasks) and not any(
                    task.done() for task in tasks
                ):
                    return tasks
            assert time.monotonic() < end, f"requests neither run nor end: {loads}"
            await asyncio.sleep(0.005)
        await asyncio.gather(*tasks)
    raise AssertionError


def stop(process: Process) -> float:
    """Send SIGTERM, then after 10 s SIGKILL. Return the seconds until the end."""
    begin = time.monotonic()
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    return time.monotonic() - begin


def family(process: Process) -> list[psutil.Process]:
    """Return the process and all its descendants."""
    top = psutil.Process(process.pid)
    return [top, *top.children(recursive=True)]


def listening(process: Process) -> set[str]:
    """Return the addresses on which a server and its children listen."""
    every = (
        connection for member in family(process) for connection in member.net_connections("inet")
    )
    return {connection.laddr.ip for connection in every if connection.status == psutil.CONN_LISTEN}


def in_shared_memory(members: list[psutil.Process]) -> set[Path]:
    """Return the files of `/dev/shm` that these processes have mapped, without semaphores."""
    paths = {
        Path(each.path)
        for member in members
        for each in member.memory_maps()
        if each.path.startswith("/dev/shm/")
    }
    return {path for path in paths if path.exists()}


def get(url: str) -> bytes:
    with urllib.request.urlopen(url, timeout=10) as answer:
        return answer.read()
