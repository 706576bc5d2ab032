"""Run one vLLM server in this process: start it, publish its address, end its processes.

- vLLM's processes end with this process, which ends within WATCH_S of an engine core's death.
- In the role `headless`, it runs engine cores for a server on another node.
- SIGTERM ends all processes within STOP_S and deletes KV blocks on disk. Failures keep the blocks.
"""

import asyncio
import gc
import os
import re
import signal
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import uvloop
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
from vllm.engine.protocol import EngineClient
from vllm.utils.argparse_utils import FlexibleArgumentParser

from orrery.inference import plugin
from orrery.inference.kv_connectors import handover, remove_disk
from orrery.inference.patches.vllm import unlink_host_tiers
from orrery.manifest.errors import OutOfMemory, RunFailed
from orrery.manifest.schema import Inference, Manifest
from orrery.manifest.schema.inference import longest_blocks, longest_device_bytes
from orrery.runtime import run_directory
from orrery.runtime.health import beating_loop
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import log_path
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous

WATCH_S = 0.25
STOP_S = 2.0  # time from SIGTERM to SIGKILL
HANG_UP_S = 0.3  # time for answers after the engine stops
START_DEADLINE_S = 300.0

POINTER = "root cause"  # vLLM's error "See root cause above." refers to its log
HANDLED = "During handling of the above exception, another exception occurred:"
END_BYTES = 1 << 18
PREFIX = re.compile(r"((?:\([^()]* pid=\d+\) )+)(ERROR \S+ \S+ \[\S+\] )?")
EXCEPTION = re.compile(r"([\w.]+)(?:: \S.*)?")
CONSEQUENCE = re.compile(  # another process's end causes these errors
    r"(?:DistNetwork|Cancelled|EOF|BrokenPipe|ConnectionReset)Error|KeyboardInterrupt|SystemExit"
    r"|: cancelled$"
    r"|Connection (?:closed|reset) by peer|remote process exit"
)

RESERVE = 0.06  # fraction of device memory to leave for other uses
CPU_RESERVE = 0.1  # fraction of free host memory to leave for other uses
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GIB, ROUND = 1 << 30, 1 << 20

CPU_CACHE = re.compile(
    r"Available memory on node \S+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation"
)
TOO_LONG = re.compile(r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV")
NO_CACHE = "No available memory for the cache blocks"
SAMPLER = re.compile(r"out of memory occurred when warming up sampler with (\d+) dummy requests")
CPU_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+)"
)
DEVICE = "out of memory"
WHERE = "set it in the hardware axis or the run file"


def serve(
    ctx: RoleContext,
    arguments: Sequence[str],
    disk: Path | None = None,
    explain: Callable[[str], str | None] = lambda _: None,
) -> None:
    """Serve until SIGTERM. `disk`: folder of KV blocks.

    Raise RunFailed if the engine dies or does not start. `explain` turns the cause of a failed
    start into advice or None. With advice, raise OutOfMemory instead.
    """
    left = Left.by(ctx, disk)
    left.remove()
    log = log_path(ctx.run_dir, ctx.name)
    log_begin = log.stat().st_size if log.exists() else 0
    os.environ[plugin.SHARED] = left.shared
    plugin.register()
    from vllm.entrypoints.launchers.api_server import entry
    from vllm.entrypoints.launchers.cli_args import make_arg_parser, validate_parsed_serve_args

    args = make_arg_parser(FlexibleArgumentParser(prog="vllm serve")).parse_args(list(arguments))
    validate_parsed_serve_args(args)
    signal.signal(signal.SIGTERM, partial(_stop_early, left))
    # vLLM puts sockets in TMPDIR. Their paths must have at most 107 bytes.
    os.environ["TMPDIR"] = tempfile.tempdir = tempfile.mkdtemp(prefix=left.start, dir=left.scratch)

    def death() -> str | None:
        return explain(root_cause(RuntimeError(POINTER), log, log_begin))

    try:
        if ctx.role == "headless":
            asyncio.run(_run_ranks(ctx, args, death))
        uvloop.run(_serve(ctx, entry, args, left, death))
    except RuntimeError as error:
        cause = root_cause(error, log, log_begin)
        explained = explain(cause)
        kind = RunFailed if explained is None else OutOfMemory
        text = explained or f"vLLM did not start ({cause})"
        raise kind(f"{ctx.role} {ctx.index}: {text}. Read logs/{ctx.name}.log") from error
    finally:
        _kill_children()
        left.remove()
    left.remove_disk()


@dataclass(frozen=True)
class Left:
    """Files and shared memory that a killed engine leaves."""

    scratch: Path
    start: str
    shared: str
    disk: Path | None
    pid: int  # the server's, because forks must not remove files

    @staticmethod
    def by(ctx: RoleContext, disk: Path | None) -> "Left":
        """Call this before TMPDIR changes."""
        tempfile.tempdir = None
        name = ctx.index if ctx.role == "inference" else ctx.name
        start = run_directory.start_prefix(ctx.run_dir, name)
        shared = run_directory.role_memory_prefix(ctx.run_dir, ctx.name)
        return Left(Path(tempfile.gettempdir()), start, shared, disk, os.getpid())

    def remove(self, *, ended: bool = False) -> None:
        if os.getpid() != self.pid:
            return
        run_directory.remove_folders(self.start, self.scratch)
        run_directory.remove_memory(self.shared)
        if ended:
            self.remove_disk()

    def remove_disk(self) -> None:
        if self.disk is not None:
            remove_disk(self.disk)


def _stop_early(left: Left, _signal: int, _frame: object) -> None:
    _exit_now(left)


def _exit_now(left: Left) -> None:
    _kill_children()
    left.remove(ended=True)
    os._exit(128 + signal.SIGTERM)


async def _serve(
    ctx: RoleContext, entry: Any, args: Namespace, left: Left, death: Callable[[], str | None]
) -> None:
    address, socket = entry.setup_server(args, reuse_port=False)
    args.port = socket.getsockname()[1]
    os.register_at_fork(after_in_child=socket.close)  # otherwise forks hold the port
    ctx.health.doing("starting the engine")
    gc.freeze()
    # Building the client blocks the event loop, so the heartbeat starts afterwards.
    async with entry.build_async_engine_client(args) as engine, beating_loop(ctx.health):
        num_ranks = args.data_parallel_size * args.tensor_parallel_size
        stopping = _announce_stop(engine, left)
        watching = asyncio.ensure_future(_engine_death(engine, stopping))
        if args.weight_transfer_config is not None:
            request = WeightTransferInitRequest(init_info={"num_ranks": num_ranks})
            setting_up = asyncio.ensure_future(engine.init_weight_transfer_engine(request))
            await asyncio.wait({setting_up, watching}, return_when=asyncio.FIRST_COMPLETED)
            if engine.errored:  # vLLM never answers a call to a dead engine core
                setting_up.cancel()
                raise _died(ctx, death)
            setting_up.result()
        serving = asyncio.ensure_future(entry.build_and_serve(engine, address, socket, args))
        announcing = asyncio.ensure_future(_announce(ctx, args, left))
        awaited = {serving, announcing, watching}
        while {serving, watching} <= awaited:
            done, awaited = await asyncio.wait(awaited, return_when=asyncio.FIRST_COMPLETED)
            if announcing in done:
                announcing.result()
        announcing.cancel()
        watching.cancel()
        if serving.done():
            serving.result()
        if not stopping.is_set():
            raise _died(ctx, death)
        winding_down = serving.result()
    try:
        await asyncio.wait_for(winding_down, HANG_UP_S)
    except TimeoutError:
        ctx.log.info("hanging up on requests that were in flight")
    finally:
        socket.close()


async def _run_ranks(ctx: RoleContext, args: Namespace, death: Callable[[], str | None]) -> None:
    from vllm import AsyncEngineArgs
    from vllm.utils.network_utils import get_tcp_uri
    from vllm.v1.engine.utils import CoreEngineProcManager
    from vllm.v1.executor import Executor

    ctx.health.doing("starting the engine's ranks")
    gc.freeze()
    config = AsyncEngineArgs.from_cli_args(args).create_engine_config(headless=True)
    parallel = config.parallel_config
    manager = CoreEngineProcManager(
        local_engine_count=parallel.data_parallel_size_local,
        start_index=parallel.data_parallel_rank,
        local_start_index=0,
        vllm_config=config,
        local_client=False,
        handshake_address=get_tcp_uri(args.data_parallel_address, args.data_parallel_rpc_port),
        executor_class=Executor.get_class(config),
        log_stats=not args.disable_log_stats,
    )
    async with beating_loop(ctx.health):
        ctx.health.doing("serving")
        await asyncio.to_thread(manager.monitor_engine_liveness)
    raise _died(ctx, death)


def _died(ctx: RoleContext, death: Callable[[], str | None]) -> RunFailed:
    why = f" ({reason})" if (reason := death()) else ""
    died = RunFailed(f"{ctx.role} {ctx.index}: the engine core died{why}. Read logs/{ctx.name}.log")
    ctx.health.failed(str(died))
    return died


def _announce_stop(engine: EngineClient, left: Left) -> threading.Event:
    """Return an event that is set when vLLM shuts down. STOP_S later, kill all processes."""
    stopping = threading.Event()
    shutdown = engine.shutdown

    def announced(*args: object, **kwargs: object) -> None:
        if not stopping.is_set():
            stopping.set()
            options: dict[str, Any] = {"name": "end-by-force", "daemon": True}
            threading.Thread(target=_end_by_force, args=(left,), **options).start()
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
    while stopping.is_set() or not engine.errored:
        await asyncio.sleep(WATCH_S)


async def _announce(ctx: RoleContext, args: Namespace, left: Left) -> None:
    host, port = args.host, args.port
    deadline_s = scaled(START_DEADLINE_S)
    end = time.monotonic() + deadline_s
    while not await _healthy(host, port):
        if time.monotonic() > end:
            raise RunFailed(
                f"inference {ctx.index}: /health did not answer within {deadline_s:g} s after "
                "the engine had started"
            )
        await asyncio.sleep(0.02)
    unlink_host_tiers(left.shared)
    gc.collect()
    gc.freeze()
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


def root_cause(error: Exception, log: Path, begin: int) -> str:
    """Return the cause of an engine failure: `error`, or the exception in `log` that it refers to.

    Read `log` from byte `begin`. Prefer, in order: unhandled exceptions, handled exceptions,
    exceptions caused by another process's exit. Among equals, prefer log level ERROR.
    """
    if POINTER not in str(error):
        return str(error)
    try:
        with open(log, "rb") as file:
            file.seek(max(begin, file.seek(0, os.SEEK_END) - END_BYTES))
            lines = file.read().decode(errors="replace").splitlines()
    except FileNotFoundError:
        return str(error)
    said: list[tuple[int, bool, str]] = []
    in_stack: dict[str, bool] = {}
    for line in lines:
        prefix = PREFIX.match(line)
        process, text = (prefix[1], line[prefix.end() :]) if prefix else ("", line)
        found = EXCEPTION.fullmatch(text.rstrip())
        is_named = found is not None and found[1].endswith(("Error", "Exception"))
        ends_stack = found is not None and "." in found[1] and process and in_stack.get(process)
        if found and (is_named or ends_stack):
            rank = 2 if CONSEQUENCE.search(found[0]) else 0
            said.append((rank, not (prefix and prefix[2]), found[0]))
        elif text == HANDLED and said:
            said[-1] = max(1, said[-1][0]), *said[-1][1:]
        in_stack[process] = text.startswith(" ")
    causes = [one for one in said if POINTER not in one[2]]
    return min(causes, key=lambda one: one[:2])[2] if causes else str(error)


def explain_memory(cause: str, manifest: Manifest, weights: Path) -> str | None:
    """Return advice on vLLM's memory error (a field and its new value), or None.

    KV cache memory = device capacity − other processes' memory − weights − reserve.
    """
    inference = manifest.inference
    if found := CPU_CACHE.search(cause):
        free = int(float(found[1]) * GIB)
        head = f"{_size(free)} of host memory were free"
        engines = -(-inference.num_replicas // manifest.hardware.num_nodes)
        if engines > 1:
            head += f", to be shared by {engines} engines"
        return _lower_cache(manifest, int(free * (1 - CPU_RESERVE)) // engines, head)
    if found := TOO_LONG.search(cause):
        least = -(-int((float(found[1]) + 0.01) * GIB) // ROUND) * ROUND
        return (
            f"inference.kv_cache_bytes {inference.kv_cache_bytes} cannot hold one sequence of "
            f"inference.max_model_len_tokens {inference.max_model_len_tokens}; type at least "
            f"{least}, and {WHERE}"
        )
    if found := SAMPLER.search(cause):
        fits = max(1, int(found[1]) // 2)
        return _lower("max_num_sequences", inference.max_num_sequences, fits, "no room to sample")
    if found := CPU_ALLOCATOR.search(cause):
        fits = inference.kv_cache_bytes - 2 * int(found[1])
        head = f"{_size(int(found[1]))} of host memory could not be allocated"
        return _lower_cache(manifest, min(fits, inference.kv_cache_bytes // 2), head)
    if DEVICE not in cause and NO_CACHE not in cause:
        return None
    return _explain_device(cause, manifest, weights)


def _explain_device(cause: str, manifest: Manifest, weights: Path) -> str:
    inference = manifest.inference
    capacity, free = _bytes(cause, "total capacity of"), _bytes(cause, "of which")
    own, asked = _bytes(cause, "this process has"), _bytes(cause, "Tried to allocate")
    if capacity is None or free is None or own is None or asked is None:
        return _lower_cache(manifest, inference.kv_cache_bytes // 2, "the device is full")
    held = weight_bytes(weights, inference)
    reserve = int(RESERVE * capacity)
    others = capacity - free - own
    head = f"{_size(asked)} more were asked for, {_size(free)} of {_size(capacity)} were free"
    if others > reserve // 2:
        head += f" and other processes held {_size(others)}"
    fits = capacity - others - held - reserve
    if fits <= 0:
        twice = 2 * inference.tensor_parallel
        return (
            f"the device ran out of memory: {head}; the weights alone take {_size(held)}; "
            f"inference.tensor_parallel: {twice} instead of {inference.tensor_parallel} halves them"
        )
    return _lower_cache(manifest, min(fits, inference.kv_cache_bytes - asked - reserve // 2), head)


def weight_bytes(weights: Path, inference: Inference) -> int:
    total = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    config = (weights / "config.json").read_text()
    found = re.search(r'"(?:torch_)?dtype": "(\w+)"', config)
    stored = 4 if found is not None and found[1] == "float32" else 2
    width = 1 if inference.quantization == "fp8" else 4 if inference.dtype == "float32" else 2
    return total * width // stored // inference.tensor_parallel


def _lower_cache(manifest: Manifest, fits: int, head: str) -> str:
    inference = manifest.inference
    least = longest_device_bytes(manifest.model, inference)
    fits = max(0, fits) // ROUND * ROUND or max(0, fits)
    if fits >= least:
        return _lower("kv_cache_bytes", inference.kv_cache_bytes, fits, head)
    block = least // (1 + longest_blocks(inference))
    tokens = (fits // block - 1) * inference.kv_block_tokens
    if tokens <= 0:
        return (
            f"the engine ran out of memory: {head}; at most {fits} bytes are left for "
            "inference.kv_cache_bytes, which hold no sequence; take a smaller model or another "
            "device"
        )
    return (
        f"inference.kv_cache_bytes {inference.kv_cache_bytes} does not fit: {head}; at most {fits} "
        f"bytes fit, enough for sequences of {tokens} tokens; type "
        f"inference.kv_cache_bytes: {fits} and inference.max_model_len_tokens: {tokens}"
    )


def _lower(field: str, value: int, fits: int, head: str) -> str:
    return (
        f"inference.{field} {value} does not fit: {head}; type inference.{field}: {fits}, "
        f"and {WHERE}"
    )


def _bytes(text: str, before: str) -> int | None:
    found = re.search(rf"{re.escape(before)} ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB // 10:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
