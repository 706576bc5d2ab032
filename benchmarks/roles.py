"""Start role processes as the launcher does, for a benchmark in the orchestrator's place."""

import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

ENGINE = ("-m", "orrery.inference")
ROUTER = ("-m", "orrery.inference.router")
# Fields of `inference` for one engine without replicas, cache transfer or restarts.
ALONE = {
    "num_replicas": 1,
    "prefill_replicas": 0,
    "nodes_per_replica": 1,
    "prefill": None,
    "kv_transfer": {"kind": "none"},
    "kv_offload": {"kind": "none"},
    "max_restarts": 0,
    "router": {"kind": "none"},
}


@contextmanager
def roles(
    run_dir: Path, commands: Mapping[str, Sequence[str]]
) -> Iterator[list["subprocess.Popen[bytes]"]]:
    """Run Python `commands` by role, each as number 0 of stage rl, until the block ends.

    Their output goes to `<run_dir>/<role>.log`. If the block raises, the end of each log is shown.
    A process that ends before the block interrupts it.
    """
    arguments = [
        "--run-dir",
        str(run_dir),
        "--stage",
        "rl",
        "--index",
        "0",
        "--attempt",
        "1",
        "--port",
        "0",
    ]
    processes: list[subprocess.Popen[bytes]] = []
    is_over = threading.Event()

    def watch() -> None:
        while not is_over.wait(0.5):
            ended = [
                role
                for role, process in zip(commands, processes, strict=False)
                if process.poll() is not None
            ]
            if ended:
                print(f"error: {ended[0]} ended before the measurement did", file=sys.stderr)
                signal.raise_signal(signal.SIGINT)
                return

    try:
        for role, command in commands.items():
            with open(run_dir / f"{role}.log", "wb") as log:
                processes.append(
                    subprocess.Popen([sys.executable, *command, *arguments], stdout=log, stderr=log)
                )
        threading.Thread(target=watch, daemon=True).start()
        yield processes
    except BaseException:
        for role in commands:
            if (written := run_dir / f"{role}.log").exists():
                print(f"{role}: {written.read_text(errors='replace')[-4000:]}", file=sys.stderr)
        raise
    finally:
        is_over.set()
        for process in processes:
            process.terminate()
        for process in processes:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
