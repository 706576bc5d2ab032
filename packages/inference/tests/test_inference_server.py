"""How a server ends: with the words of whoever kept it from serving. The engine and vLLM's server are stand-ins."""

import asyncio
import socket
from argparse import Namespace
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from orrery.inference import server
from orrery.inference.releases import ApiServer
from orrery.manifest.errors import RunFailed


def serve(monkeypatch, tmp_path, announce, serving):
    """What `_serve` raises."""

    async def initialize(_request):
        pass

    @asynccontextmanager
    async def engine(_args):
        yield SimpleNamespace(errored=False, init_weight_transfer_engine=initialize, shutdown=lambda: None)

    def bound(_args, reuse_port):
        listening = socket.socket()
        listening.bind(("127.0.0.1", 0))
        return "address", listening

    async def build_and_serve(*_):
        return await serving()

    vllm = ApiServer(None, None, bound, engine, build_and_serve)
    me = SimpleNamespace(index=0, name="inference.0", health=SimpleNamespace(doing=lambda _: None))
    args = Namespace(data_parallel_size=1, tensor_parallel_size=1)
    monkeypatch.setattr(server, "_announce", announce)
    monkeypatch.setattr(server.gc, "freeze", lambda: None)
    return asyncio.run(asyncio.wait_for(server._serve(me, vllm, args, tmp_path), 10))


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

    with pytest.raises(RunFailed, match=r"the engine core died; read logs/inference\.0\.log"):
        serve(monkeypatch, tmp_path, for_ever, ended)
