"""A role's process: everything that all roles do alike, so that a role's `__main__` starts with its own work.

- In: the launcher's argv, `--run-dir R --stage S --index I --attempt K --incarnation N --port P`.
- Out: `ctx`, with the manifest, a logger on stderr, metrics, health and the lifeline; `host` is where it listens (`network.py`).
- An `OrreryError` ends the process with one line `error: …`, health `failed` and the error's exit code; any other exception adds its
  traceback and exits 1, also `SystemExit(0)`: what ends well returns. SIGTERM raises `Terminated` where the main thread is, so `finally`
  blocks run.
- A launched role writes rows of its own processor time and memory (`usage.py`).
- `WoundDown` ends it with its own exit code and health `wound down`: neither failed nor done (`wind_down.py`).
- SIGUSR1 writes the stacks of all threads to stderr (the launcher keeps stderr in `logs/`): it asks for them on a stall (`asked.py`).
"""

import argparse
import faulthandler
import logging
import resource
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from orrery.manifest.errors import OrreryError
from orrery.observe import network, shared_memory
from orrery.observe.asked import STDERR, stacks_on_signal
from orrery.observe.health import HealthFile
from orrery.observe.lifeline import Lifeline
from orrery.observe.logs import log_to_stderr, set_level
from orrery.observe.metrics import MetricsFile
from orrery.observe.system_error import explain
from orrery.observe.token import take
from orrery.observe.usage import UsageRows
from orrery.observe.wind_down import WOUND_DOWN, WoundDown

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest

TERMINATED = 128 + signal.SIGTERM
OPEN_FILES = 1 << 20


class Terminated(SystemExit):
    """SIGTERM has asked this process to end."""


class RoleContext:
    """This process as the run knows it."""

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
        """`incarnation` counts how often the launcher has started this process again within the attempt."""
        self.role, self.run_dir, self.stage, self.index, self.attempt, self.port = (
            role,
            run_dir,
            stage,
            index,
            attempt,
            port,
        )
        self.incarnation = incarnation
        self.log = logging.getLogger(self.name)
        self.metrics = MetricsFile(run_dir, stage, role, index, attempt)
        self.health = HealthFile(run_dir, stage, role, index, attempt)
        self.lifeline = Lifeline()
        if (
            self.lifeline.is_launched
        ):  # a report that a person draws must leave a live run its weights
            self.on_orphaned(lambda: shared_memory.remove(shared_memory.prefix(run_dir)))

    @property
    def name(self) -> str:
        return f"{self.role}.{self.index}"

    @cached_property
    def host(self) -> str:
        """The IPv4 address that this process listens on and publishes. Raises `OrreryError` where the interface is not there."""
        return network.address()

    @cached_property
    def manifest(self) -> "Manifest":
        from orrery.manifest.identity import load  # here, so that roles in tests need no manifest

        return load(self.run_dir / "manifest.json")

    def on_orphaned(self, callback: Callable[[], object]) -> None:
        """Run `callback` when the launcher has died, just before this process kills its process group."""
        self.lifeline.on_orphaned(callback)


def parse_role(role: str, argv: Sequence[str] | None = None) -> RoleContext:
    """The launcher's command line as a `RoleContext`, with nothing started yet."""
    parser = argparse.ArgumentParser(
        prog=role, description=f"The {role} role; `orrery run` starts it."
    )
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--stage", required=True)
    parser.add_argument("--index", type=int, default=0)
    parser.add_argument("--attempt", type=int, default=1)
    parser.add_argument("--incarnation", type=int, default=0)
    parser.add_argument(
        "--port",
        type=int,
        default=0,
        help="a free port that is this process's own; 0: it takes one itself",
    )
    args = parser.parse_args(argv)
    return RoleContext(
        role,
        args.run_dir.resolve(),
        args.stage,
        args.index,
        args.attempt,
        args.port,
        args.incarnation,
    )


@contextmanager
def role_process(role: str, argv: Sequence[str] | None = None) -> Iterator[RoleContext]:
    """`with role_process("trainer") as ctx:` around a role's whole life."""
    # Before the health file is there: whoever reads it may send SIGUSR1, which ends a process that does not handle it.
    faulthandler.enable(file=STDERR)
    stacks_on_signal()
    log_to_stderr()
    _allow_open_files()
    ctx = parse_role(role, argv)
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, _terminate)
    ctx.lifeline.start()
    usage = UsageRows(ctx.name, ctx.metrics)
    if ctx.lifeline.is_launched:
        usage.start()
    try:
        set_level()
        take()  # before any child could inherit it
        yield ctx
    except WoundDown as end:
        ctx.health.wound_down(end.step)
        ctx.log.info("%s", end)
        raise SystemExit(WOUND_DOWN) from None
    except OrreryError as error:
        ctx.health.failed(str(error))
        print(f"error: {error}", file=sys.stderr, flush=True)
        raise SystemExit(error.exit_code) from None
    except Terminated:
        ctx.health.terminated()
        raise
    except SystemExit as leave:
        traceback.print_exc()
        ctx.health.failed(f"exit({leave.code!r}) was called before its work was done")
        raise SystemExit(1) from None
    except BaseException as error:
        traceback.print_exc()
        ctx.health.failed(
            explain(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        )
        raise SystemExit(1) from None
    else:
        ctx.health.done()
    finally:
        usage.stop()
        ctx.metrics.close()


def _allow_open_files() -> None:
    """As many as we may have: a rollout in flight is a connection, and shells often give 1,024."""
    now, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if most == resource.RLIM_INFINITY else min(most, OPEN_FILES)
    if now != resource.RLIM_INFINITY and now < wanted:
        with suppress(
            ValueError, OSError
        ):  # where the kernel allows less by now, what there is must do
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, most))


def _terminate(_signal: int, _frame: FrameType | None) -> None:
    raise Terminated(TERMINATED)
