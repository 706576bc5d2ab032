"""One vLLM server in this process: start, say where it listens, end with everything it started.

- In: vLLM's own arguments. Out: the rendezvous endpoint, published once /health answers and the weight receiver is set up.
- Engine cores (one a data-parallel rank) and their workers (one a further GPU) are processes below this one; they die with it (`plugin`),
  and it ends within WATCH_S of an engine core's death, with a sentence. A worker's death is its engine core's.
- SIGTERM ends both; whatever is not gone after STOP_S is killed. What the engine kept on disk goes too; after a failure it stays, for its
  next start.
- Composed from the pieces of vLLM's `run_server`, to hold the engine client between "engine is up" and "serving".
"""

import asyncio
import gc
import os
import signal
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.protocol import EngineClient
from vllm.utils.argparse_utils import FlexibleArgumentParser

from orrery.inference import plugin, releases
from orrery.inference.kv_offload import disk_folder, forget
from orrery.inference.kv_transfer import handover
from orrery.inference.patches import vllm_shared_memory
from orrery.inference.root_cause import root_cause
from orrery.manifest.errors import RunFailed
from orrery.runtime import scratch
from orrery.runtime.health import beating_loop
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.transport import rendezvous

WATCH_S = 0.25
STOP_S = 2.0  # after SIGTERM, until what is left is killed
HANG_UP_S = 0.3  # for answers on their way out, once the engine has stopped
START_DEADLINE_S = 300.0


def serve(ctx: RoleContext, arguments: Sequence[str]) -> None:
    """Serve until SIGTERM. Raises RunFailed if the engine cannot start or dies."""
    left = Left.by(ctx)
    left.remove()  # of a start that was killed
    log = ctx.run_dir / "logs" / f"{ctx.name}.log"
    log_begin = log.stat().st_size if log.exists() else 0  # earlier starts have written to it too
    os.environ[plugin.SHARED] = left.shared
    plugin.register()
    releases.correct(ctx.manifest)
    from vllm.entrypoints.launchers.api_server import (
        entry,
    )  # after the corrections, because it binds their names
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(arguments))
    validate_parsed_serve_args(args)
    signal.signal(signal.SIGTERM, partial(_stop_early, left))
    # For the sockets and rendezvous files that vLLM makes under TMPDIR and leaves there. Directly under the system's: a socket's path may
    # have 107 characters.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=left.start, dir=left.scratch)
    try:
        uvloop.run(_serve(ctx, entry, args, left))
    except RuntimeError as error:  # vLLM's word for an engine core that died while starting
        cause = root_cause(error, log, log_begin)
        raise RunFailed(
            f"inference {ctx.index}: vLLM did not start ({cause}); read logs/{ctx.name}.log"
        ) from error
    finally:
        _kill_children()
        left.remove()
    forget(left.disk)


@dataclass(frozen=True)
class Left:
    """What an engine that is killed leaves on its node, by names that are this role's alone."""

    scratch: Path  # the system's folder
    start: str  # what names of folders there begin with, one a start
    shared: str  # what names in shared memory have in them
    disk: Path  # blocks of cache, which the next start finds again: they go at an orderly end alone
    pid: int  # of the server: a fork that inherits its handlers removes nothing

    @staticmethod
    def by(ctx: RoleContext) -> "Left":
        """Call it before TMPDIR is another."""
        tempfile.tempdir = None
        names = (
            scratch.start_prefix(ctx.run_dir, ctx.index),
            scratch.role_memory_prefix(ctx.run_dir, ctx.name),
        )
        return Left(Path(tempfile.gettempdir()), *names, disk_folder(ctx), os.getpid())

    def remove(self, *, ended: bool = False) -> None:
        """With the blocks on disk where the engine has `ended` in order, last: they may be many, and the launcher does not wait long."""
        if os.getpid() != self.pid:
            return
        scratch.remove_folders(self.start, self.scratch)
        scratch.remove_memory(self.shared)
        if ended:
            forget(self.disk)


def _stop_early(left: Left, _signal: int, _frame: object) -> None:
    """SIGTERM before vLLM's own handler is in place: nothing is in flight, so nothing needs winding down."""
    _exit_now(left)


def _exit_now(left: Left) -> None:
    _kill_children()
    left.remove(ended=True)
    os._exit(128 + signal.SIGTERM)


async def _serve(ctx: RoleContext, entry: Any, args: Namespace, left: Left) -> None:
    address, socket = entry.setup_server(args, reuse_port=False)
    args.port = socket.getsockname()[1]  # where 0 was asked for, the one that the kernel chose
    os.register_at_fork(
        after_in_child=socket.close
    )  # an engine core that is a fork would hold the port, and vLLM ask about it at the end
    ctx.health.doing("starting the engine")
    gc.freeze()  # what was imported stays: vLLM collects several times, here and in the engine core, our fork
    async with (
        entry.build_async_engine_client(args) as engine,
        beating_loop(ctx.health),
    ):  # before, vLLM waits for its core in the loop
        num_ranks = args.data_parallel_size * args.tensor_parallel_size
        stopping = _announce_stop(engine, left)
        watching = asyncio.ensure_future(_engine_death(engine, stopping))
        request = WeightTransferInitRequest(init_info={"num_ranks": num_ranks})
        setting_up = asyncio.ensure_future(engine.init_weight_transfer_engine(request))
        await asyncio.wait({setting_up, watching}, return_when=asyncio.FIRST_COMPLETED)
        if engine.errored:  # vLLM never answers a call whose core has died
            setting_up.cancel()
            raise _died(ctx)
        setting_up.result()
        serving = asyncio.ensure_future(entry.build_and_serve(engine, address, socket, args))
        announcing = asyncio.ensure_future(_announce(ctx, args, left))
        awaited = {serving, announcing, watching}
        while {serving, watching} <= awaited:
            done, awaited = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if announcing in done:
                announcing.result()  # raises what kept it: nobody would ever find this server
        announcing.cancel()
        watching.cancel()
        if serving.done():
            serving.result()  # raises what it ended by
        if not stopping.is_set():
            raise _died(ctx)
        winding_down = serving.result()
    try:
        await asyncio.wait_for(winding_down, HANG_UP_S)
    except TimeoutError:
        ctx.log.info("hanging up on requests that were in flight")
    finally:
        socket.close()


def _died(ctx: RoleContext) -> RunFailed:
    """Report at once that the engine core died: callers fail before the server has ended."""
    died = RunFailed(f"inference {ctx.index}: the engine core died; read logs/{ctx.name}.log")
    ctx.health.failed(str(died))
    return died


def _announce_stop(engine: EngineClient, left: Left) -> threading.Event:
    """An event that is set when vLLM's SIGTERM handler begins to stop the engine: afterwards a dead engine core is no failure.

    From then on the end is also certain: a timer kills what hangs.
    """
    stopping = threading.Event()
    shutdown = engine.shutdown

    def announced(*args: object, **kwargs: object) -> None:
        if not stopping.is_set():
            stopping.set()
            threading.Thread(
                target=_end_by_force, args=(left,), name="end-by-force", daemon=True
            ).start()
        shutdown(*args, **kwargs)

    engine.shutdown = announced  # type: ignore[method-assign]
    return stopping


def _end_by_force(left: Left) -> None:
    time.sleep(STOP_S)
    _exit_now(left)


def _kill_children() -> None:
    for child in psutil.Process().children(recursive=True):
        try:
            child.kill()
        except psutil.NoSuchProcess:
            continue


async def _engine_death(engine: EngineClient, stopping: threading.Event) -> None:
    """Return when the engine core has died of itself."""
    while stopping.is_set() or not engine.errored:
        await asyncio.sleep(WATCH_S)


async def _announce(ctx: RoleContext, args: Namespace, left: Left) -> None:
    """Publish this server's address as soon as /health answers 200."""
    host, port = args.host, args.port
    deadline_s = scaled(START_DEADLINE_S)
    end = time.monotonic() + deadline_s
    while not await _healthy(host, port):
        if time.monotonic() > end:
            raise RunFailed(
                f"inference {ctx.index}: /health did not answer within {deadline_s:g} s of the engine being up"
            )
        await asyncio.sleep(0.02)
    vllm_shared_memory.without_name(left.shared)
    gc.collect()
    gc.freeze()  # what start-up made stays; later collections need not look at it again
    gc.enable()
    rendezvous.publish(ctx, f"http://{host}:{port}", **handover(args.kv_transfer_config, host))
    ctx.health.doing("serving")


async def _healthy(host: str, port: int) -> bool:
    try:
        reader, writer = await asyncio.open_connection(host, port)
    except OSError:
        return False
    try:
        writer.write(f"GET /health HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n\r\n".encode())
        return b" 200 " in await reader.readline()
    except OSError:
        return False
    finally:
        writer.close()
