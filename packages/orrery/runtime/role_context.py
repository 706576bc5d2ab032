"""Run a role's process: its command line, logs, signals and exit code.

- `OrreryError` prints `error: …` and exits with its code. `Preempted` exits with EXIT_PREEMPTED.
- SIGTERM raises `Terminated` in the main thread, so `finally` blocks run. The exit code is 143.
- Other exceptions, even `SystemExit(0)`, print a traceback and exit with 1.
- SIGUSR1 writes all threads' stacks to stderr.
- A process's incarnation is its number of restarts.
"""

import argparse
import faulthandler
import logging
import os
import resource
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from orrery.manifest.errors import OrreryError, RunFailed, explain_os_error
from orrery.runtime import network, run_directory
from orrery.runtime.health import HealthFile
from orrery.runtime.metrics import MetricsFile, UsageRows
from orrery.runtime.process_control import EXIT_PREEMPTED, ParentWatch, Preempted
from orrery.runtime.run_directory import MANIFEST
from orrery.runtime.timing import scaled

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest

TERMINATED = 128 + signal.SIGTERM
OPEN_FILES = 1 << 20
STDERR = 2  # `sys.stderr` may have no file descriptor
PROGRAM_S = 60.0
POLL_S = 0.05
LOG_LEVEL = "ORRERY_LOG_LEVEL"
LEVELS = ("debug", "info", "warning", "error")
CHATTY = ("httpx", "httpcore", "urllib3", "asyncio")


class Terminated(SystemExit):
    pass


class RoleContext:
    def __init__(
        self,
        role: str,
        run_dir: Path,
        stage: str,
        index: int,
        attempt: int,
        port: int,
        incarnation: int = 0,
    ):
        self.role, self.run_dir, self.stage = role, run_dir, stage
        self.index, self.attempt, self.incarnation, self.port = index, attempt, incarnation, port
        self.log = logging.getLogger(self.name)
        self.metrics = MetricsFile(run_dir, stage, role, index, attempt)
        self.health = HealthFile(run_dir, stage, role, index, attempt)
        self.parent_watch = ParentWatch()
        # A role started by hand must not remove a stage's shared memory.
        if self.parent_watch.is_launched:
            self.on_orphaned(
                lambda: run_directory.remove_memory(run_directory.memory_prefix(run_dir))
            )

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    @cached_property
    def host(self) -> str:
        return network.address()

    @cached_property
    def manifest(self) -> "Manifest":
        from orrery.manifest.identity import load

        return load(self.run_dir / MANIFEST)

    def on_orphaned(self, callback: Callable[[], object]) -> None:
        self.parent_watch.on_orphaned(callback)

    def await_program(
        self,
        process: "subprocess.Popen[bytes]",
        program: str,
        what: str,
        answers: Callable[[], bool],
    ) -> None:
        """Wait until `answers()` is true. Raise RunFailed if `process` ends, or after PROGRAM_S."""
        limit_s = scaled(PROGRAM_S)
        end = time.monotonic() + limit_s
        with self.health.waiting(f"{program} to {what}", deadline_s=limit_s):
            while True:
                if (code := process.poll()) is not None:
                    reason = f"did not start (exit code {code})"
                    break
                if answers():
                    return
                if time.monotonic() > end:
                    reason = f"did not {what} within {limit_s:g} s"
                    break
                time.sleep(POLL_S)
        raise RunFailed(f"{self.role}: {program} {reason}. Read logs/{self.name}.log")


def parse_role(role: str, argv: Sequence[str] | None = None) -> RoleContext:
    parser = argparse.ArgumentParser(
        prog=role, description=f"The {role} role; `orrery run` starts it."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument("--port", type=int, default=0, help="a free port; 0: choose one")
    args = parser.parse_args(argv)
    args.run_dir = args.run_dir.resolve()
    return RoleContext(role, **vars(args))


@contextmanager
def role_process(role: str, argv: Sequence[str] | None = None) -> Iterator[RoleContext]:
    # Handle signals first: the launcher may send SIGUSR1 once the health file exists.
    faulthandler.enable(file=STDERR)
    stacks_on_signal()
    log_to_stderr()
    _allow_open_files()
    ctx = parse_role(role, argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    ctx.parent_watch.start()
    usage = UsageRows(ctx.name, ctx.metrics)
    if ctx.parent_watch.is_launched:
        usage.start()
    try:
        set_level()
        network.take_token()  # read it before a child inherits standard input
        yield ctx
    except Preempted as end:
        ctx.health.preempted(end.step)
        ctx.log.info("%s", end)
        raise SystemExit(EXIT_PREEMPTED) from None
    except OrreryError as error:
        ctx.health.failed(str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    except Terminated:
        ctx.health.terminated()
        raise
    except SystemExit as leave:
        traceback.print_exc()
        ctx.health.failed(f"exit({leave.code!r}) was called before the role's work was done")
        raise SystemExit(1) from None
    except BaseException as error:
        traceback.print_exc()
        text = f"{type(error).__name__}: {error}"
        ctx.health.failed(explain_os_error(error) if isinstance(error, OSError) else text)
        raise SystemExit(1) from None
    else:
        ctx.health.done()
    finally:
        usage.stop()
        ctx.metrics.close()


def _allow_open_files() -> None:
    """Raise the open-file limit, because each rollout in flight needs a connection."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(ValueError, OSError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated(TERMINATED)


# Signals


def stacks_on_signal(chain: bool = False) -> None:
    faulthandler.register(signal.SIGUSR1, file=STDERR, all_threads=True, chain=chain)


def call_on_signal(answer: Callable[[], object]) -> None:
    """Let SIGUSR1 write stacks and run `answer` in a thread. Needs the main thread."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
    faulthandler.unregister(signal.SIGUSR1)
    signal.signal(signal.SIGUSR1, lambda *_: None)
    stacks_on_signal(chain=True)

    def listen() -> None:
        while numbers := os.read(reader, 64):
            if signal.SIGUSR1 in numbers:
                answer()

    threading.Thread(target=listen, name="signal listener", daemon=True).start()


# Logs


def log_level() -> str | None:
    level = os.environ.get(LOG_LEVEL, "").lower()
    if level and level not in LEVELS:
        raise OrreryError(f"{LOG_LEVEL}: {level!r} is not a level; choose from {', '.join(LEVELS)}")
    return level or None


def log_to_stderr() -> None:
    handler = logging.StreamHandler(sys.stderr)
    text = "%(asctime)s %(levelname)s %(name)s: %(message)s"
    handler.setFormatter(logging.Formatter(text, datefmt="%Y-%m-%d %H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.INFO)
    for chatty in CHATTY:
        logging.getLogger(chatty).setLevel(logging.WARNING)


def set_level() -> None:
    if level := log_level():
        logging.getLogger().setLevel(level.upper())
