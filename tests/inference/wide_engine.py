"""An engine of several ranks on a CPU, each a process as on GPUs: `python -m wide_engine`.

A run would refuse this shape on a CPU. A file in the run directory makes a rank fail in its next
transfer: `absent.<rank>` before it arrives, `fault.<rank>` after it received everything. The file
holds the error's text, or "another's" for a lost peer, or "dies" for a killed rank.
"""

import multiprocessing
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from orrery.inference import __main__, assemble
from orrery.inference.patches import registry
from orrery.wire.weight_wire import WireFailed
from orrery.wire.weight_wire.transfer import WeightReceiver

server_arguments, correct, take, receive = (
    __main__.server_arguments,
    registry.correct_server,
    WeightReceiver.receive,
    WeightReceiver._receive,
)


def wide_arguments(manifest: Any, weights: Path, *where: Any) -> list[str]:
    inference = manifest.inference
    narrow = manifest.model_copy(
        update={
            "inference": inference.model_copy(update={"tensor_parallel": 1, "data_parallel": 1})
        }
    )
    arguments = server_arguments(narrow, weights, *where)
    arguments[arguments.index("--distributed-executor-backend") + 1] = "mp"
    return [*arguments, *(part for pair in assemble._spread(manifest).items() for part in pair)]


def correct_and_fork(manifest: Any) -> None:
    """Fork workers from the server, to save imports. Keep their signals from the server's loop."""
    correct(manifest)
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
    from vllm.v1.executor import multiproc_executor

    multiproc_executor.get_mp_context = lambda: multiprocessing.get_context("fork")


def take_or_fail(self: WeightReceiver, taking: Any, parts: Any) -> Iterator[Any]:
    fail(self, "absent")
    yield from take(self, taking, parts)


def receive_and_fail(self: WeightReceiver, parts: Any) -> Iterator[Any]:
    yield from receive(self, parts)
    fail(self, "fault")


def fail(target: WeightReceiver, when: str) -> None:
    fault = Path(sys.argv[sys.argv.index("--run-dir") + 1], f"{when}.{target.rank}")
    if fault.exists():
        words = fault.read_text()
        fault.unlink()
        if words == "dies":
            os.kill(os.getpid(), signal.SIGKILL)
        raise WireFailed("trainer 0 is gone") if words == "another's" else ValueError(words)


if __name__ == "__main__":
    os.environ["VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS"] = (
        "1"  # until the rest of an engine that lost a worker is killed
    )
    __main__.server_arguments, registry.correct_server = wide_arguments, correct_and_fork
    WeightReceiver.receive, WeightReceiver._receive = take_or_fail, receive_and_fail
    __main__.main()
