"""The observer: a thread of the launcher that reads what roles append and hands it on, so that roles stay light.

- In: `metrics/*.jsonl` of the run, from where they stood when the stage began. Out: TensorBoard, W&B when configured, and `Progress`.
- A sink that breaks, at its start too, is reported once and dropped: looking at a run must not end it.
- A look that fails, as it may on a network file system, is reported once; the next one takes in what it has missed.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

from orrery.manifest.errors import explain_os_error
from orrery.observe.progress import Progress
from orrery.observe.sinks import TensorBoardSink, WandbSink, configured
from orrery.runtime.metrics import MetricsTail, Row

LOOK_S = 0.5


class Sink(Protocol):
    def write(self, process: str, row: Row) -> None: ...

    def close(self) -> None: ...


class Observer:
    """Started and closed by the launcher's main thread."""

    def __init__(self, run_dir: Path, progress: Progress):
        self._progress, self._tail = progress, MetricsTail(run_dir, from_end=True)
        self._sinks: list[Sink] = []
        kinds: list[type[TensorBoardSink] | type[WandbSink]] = [
            TensorBoardSink,
            *([WandbSink] if configured() else []),
        ]
        for kind in kinds:
            with self._dropping(kind):
                self._sinks.append(kind(run_dir))
        self._has_failed = False
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="observer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Take in what is there, then close the sinks; gives up on a sink that hangs."""
        self._stop.set()
        self._thread.join(timeout=10)

    def _run(self) -> None:
        while True:
            last = self._stop.wait(LOOK_S)
            self._look()
            if last:
                for sink in self._sinks:
                    with self._dropping(sink):
                        sink.close()
                return

    def _look(self) -> None:
        try:
            for process, row in self._tail.new_rows():
                for sink in self._sinks:
                    with self._dropping(sink):
                        sink.write(process, row)
                self._progress.add(process, row)
        except OSError as error:
            if not self._has_failed:
                print(
                    f"warning: metrics cannot be read ({explain_os_error(error)}); tried again every {LOOK_S:g} s",
                    file=sys.stderr,
                    flush=True,
                )
            self._has_failed = True

    @contextmanager
    def _dropping(self, sink: Sink | type) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # the boundary: any trouble of a sink is its own
            self._sinks = [one for one in self._sinks if one is not sink]
            name = sink.__name__ if isinstance(sink, type) else type(sink).__name__
            print(f"warning: {name} is dropped: {error}", file=sys.stderr, flush=True)
