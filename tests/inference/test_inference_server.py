"""Ends of a server, with the sentence of the failed part. Engine and server are stand-ins."""

import asyncio
import socket
from argparse import Namespace
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from orrery.inference import server
from orrery.inference.server import root_cause
from orrery.manifest.errors import RunFailed


async def done(_request):
    pass


def serve(
    monkeypatch, tmp_path, announce, serving, initialize=done, errored=False, death=lambda: None
):
    """Run `_serve`; return the exception that it raises."""

    @asynccontextmanager
    async def engine(_args):
        yield SimpleNamespace(
            errored=errored, init_weight_transfer_engine=initialize, shutdown=lambda: None
        )

    def bound(_args, reuse_port):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        return "address", listening

    async def build_and_serve(*_):
        return await serving()

    entry = SimpleNamespace(
        setup_server=bound, build_async_engine_client=engine, build_and_serve=build_and_serve
    )
    health = SimpleNamespace(doing=lambda _: None, beat_loop=lambda _: None, failed=lambda _: None)
    ctx = SimpleNamespace(role="inference", index=0, name="inference.0", health=health)
    args = Namespace(data_parallel_size=1, tensor_parallel_size=1, weight_transfer_config={})
    monkeypatch.setattr(server, "_announce", announce)
    monkeypatch.setattr(server.gc, "freeze", lambda: None)
    return asyncio.run(asyncio.wait_for(server._serve(ctx, entry, args, tmp_path, death), 10))


async def for_ever(*_):
    await asyncio.Event().wait()


def test_a_server_that_cannot_be_announced_ends_with_the_reason(monkeypatch, tmp_path):
    async def refused(*_):
        raise RunFailed("/health did not answer")

    with pytest.raises(RunFailed, match="/health did not answer"):
        serve(monkeypatch, tmp_path, refused, for_ever)


def test_what_the_server_ends_by_is_not_taken_for_the_engines_death(monkeypatch, tmp_path):
    async def broken():
        raise OSError("the socket is gone")

    async def at_once(*_):
        pass

    for announce in (for_ever, at_once):
        with pytest.raises(OSError, match="the socket is gone"):
            serve(monkeypatch, tmp_path, announce, broken)


def test_a_server_that_ends_though_nobody_asked_it_to_has_lost_its_engine(monkeypatch, tmp_path):
    async def ended():
        return None

    with pytest.raises(RunFailed, match=r"the engine core died\. Read logs/inference\.0\.log"):
        serve(monkeypatch, tmp_path, for_ever, ended)


def test_an_engine_whose_core_dies_before_it_serves_does_not_wait_for_its_answer(
    monkeypatch, tmp_path
):
    with pytest.raises(RunFailed, match=r"the engine core died\. Read logs/inference\.0\.log"):
        serve(monkeypatch, tmp_path, for_ever, for_ever, initialize=for_ever, errored=True)


POINTS = RuntimeError(
    "Engine core initialization failed. See root cause above. Failed core proc(s): {}"
)
CORE = "(EngineCore pid=7) ERROR 11-23 10:10:57 [core.py:1510] "
WORKER = "(Worker_TP1 pid=8) ERROR 11-23 10:10:56 [multiproc_executor.py:772] "
FULL = "RuntimeError: Insufficient space in /dev/shm: 1048576 MiB required, 24099 MiB free."
OTHER = "(Worker_TP0 pid=9) ERROR 11-23 10:10:56 [multiproc_executor.py:772] "
PEER = "RuntimeError: [gloo/transport/tcp/pair.cc:547] Connection closed by peer [127.0.0.1]:1234"
RESOURCES = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, "
    "Required: 262144, Hardware limit: 232448."
)
UNSUPPORTED = "torch._dynamo.exc.Unsupported: call_function BuiltinVariable(id)"
HANDLED = "During handling of the above exception, another exception occurred:"


@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (
            [f"{CORE}EngineCore failed to start.", f"{CORE}    raise RuntimeError(", CORE + FULL],
            FULL,
        ),
        (
            ["Traceback (most recent call last):", "    raise RuntimeError(", FULL, "nothing more"],
            FULL,
        ),
        (
            [
                f"{WORKER}torch.OutOfMemoryError: CUDA out of memory.",
                f"{CORE}Exception: WorkerProc initialization failed. See stack trace for root "
                "cause.",
            ],
            "torch.OutOfMemoryError: CUDA out of memory.",
        ),
        (
            [
                f"{WORKER}    assert rank == 0",
                f"{WORKER}           ^^^^^^^^^",
                f"{WORKER}AssertionError",
            ],
            "AssertionError",
        ),
        (
            [
                f"{WORKER}    raise OutOfResources(",
                f"{OTHER}  File",
                WORKER + RESOURCES,
                CORE + FULL,
            ],
            RESOURCES,
        ),
        (
            ["(EngineCore pid=7)     raise Unsupported(", f"(EngineCore pid=7) {UNSUPPORTED}"],
            UNSUPPORTED,
        ),
        (
            [
                f"{WORKER}Loading: 3 of 4",
                f"{WORKER}Traceback",
                "    raise Unsupported(",
                UNSUPPORTED,
            ],
            str(POINTS),
        ),
        (
            [
                f"{WORKER}    raise ValueError",
                f"{CORE}  raise KeyError: of a source line",
                f"{CORE}  KeyError: x",
            ],
            str(POINTS),
        ),
        (
            [
                WORKER + PEER,
                f"{OTHER}ValueError: the cause",
                f"{CORE}asyncio.exceptions.CancelledError",
            ],
            "ValueError: the cause",
        ),
        (
            [WORKER + FULL, f"{OTHER}torch.distributed.DistNetworkError: Broken pipe", CORE + PEER],
            FULL,
        ),
        ([f"{CORE}EOFError", f"{CORE}RuntimeError: cancelled", WORKER + PEER], "EOFError"),
        (
            [
                f"{CORE}KeyError: 'mtp'",
                CORE,
                CORE + HANDLED,
                CORE + FULL,
                f"{CORE}ValueError: later",
            ],
            FULL,
        ),
        (
            [
                f"{CORE}ValueError: the cause",
                CORE,
                CORE + HANDLED,
                CORE + PEER,
                f"{CORE}{HANDLED}",
                WORKER + PEER,
            ],
            "ValueError: the cause",
        ),
        (
            [
                "(EngineCore pid=7)   warnings.warn(",
                "(EngineCore pid=7) Autotuning: 3 kernels",
                CORE + FULL,
            ],
            FULL,
        ),
        (["(EngineCore pid=7) ImportError: no flash_attn", CORE + FULL], FULL),
        ([f"(EngineCore_DP0 pid=7) {WORKER}{FULL}"], FULL),
        (
            ["(EngineCore pid=7) INFO 11-23 10:10:57 [core.py:9] ValueError: of no account"],
            str(POINTS),
        ),
        ([], str(POINTS)),
    ],
    ids=[
        "logged",
        "raised",
        "of a worker",
        "without text",
        "of any name",
        "raised with a prefix",
        "no end of a traceback",
        "source lines",
        "a consequence before it",
        "consequences after it",
        "consequences alone",
        "handled",
        "handled before a consequence",
        "a word after an indented line",
        "printed and gone on from",
        "a worker's below its core's name",
        "no error",
        "an empty log",
    ],
)
def test_an_engine_that_does_not_start_says_the_cause_that_its_log_has(tmp_path, lines, cause):
    log, earlier = tmp_path / "inference.0.log", f"{CORE}ValueError: of an earlier start\n"
    log.write_text(earlier + "".join(f"{line}\n" for line in lines))
    assert root_cause(POINTS, log, len(earlier)) == cause
    assert root_cause(RuntimeError("told at once"), log, 0) == "told at once"
    assert root_cause(POINTS, tmp_path / "no.log", 0) == str(POINTS)


def test_what_the_launcher_is_told_of_such_an_engine_has_the_cause(monkeypatch, tmp_path):
    ctx = SimpleNamespace(
        role="inference", index=0, name="inference.0", run_dir=tmp_path, manifest=None
    )
    log = tmp_path / "logs" / "inference.0.log"
    log.parent.mkdir()
    log.write_text(f"{CORE}ValueError: of an earlier start\n")

    async def start(*_):
        with open(log, "a") as file:
            file.write(f"{CORE}{FULL}\n")
        raise POINTS

    parser = SimpleNamespace(parse_args=lambda _: None)
    monkeypatch.setattr(server, "_serve", start)
    monkeypatch.setattr(server.plugin, "register", lambda: None)
    monkeypatch.setattr("vllm.entrypoints.launchers.cli_args.make_arg_parser", lambda _: parser)
    monkeypatch.setattr(
        "vllm.entrypoints.launchers.cli_args.validate_parsed_serve_args", lambda _: None
    )
    monkeypatch.setattr(server.signal, "signal", lambda *_: None)
    monkeypatch.setattr(server, "_kill_children", lambda: None)
    monkeypatch.setattr(
        server.Left, "by", lambda *_: server.Left(tmp_path, "start", "shared", None, 0)
    )
    monkeypatch.setattr(server.tempfile, "tempdir", None)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setenv(server.plugin.SHARED, "")
    with pytest.raises(
        RunFailed,
        match=(
            r"^inference 0: vLLM did not start \(RuntimeError: Insufficient space .*\)\. Read "
            r"logs"
        ),
    ):
        server.serve(ctx, [])
