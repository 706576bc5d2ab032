"""The front's proxy before a stand-in for vllm-router."""

import asyncio
import logging
from contextlib import asynccontextmanager, suppress

import aiohttp
import pytest

from orrery.inference import router
from orrery.inference.router import MAX_HEAD_BYTES, Front
from orrery.runtime.network import Purpose, authorization

TOKEN = "of-this-run"
GENERATE = "/inference/v1/generate"
KEY = authorization(TOKEN, Purpose.GENERATE)
HEAD = f"POST {GENERATE} HTTP/1.1\r\nHost: x\r\nAuthorization: {KEY['Authorization']}\r\n"
ANSWER = b"HTTP/1.1 200 OK\r\nX-Secret: 1\r\nContent-Encoding: gzip\r\nX-Orrery-Engine: 3\r\n"


@asynccontextmanager
async def serving(answer):
    """Yield the address of a front; `answer(reader, writer)` serves each of its connections."""
    tasks = []

    async def handle(reader, writer):
        tasks.append(asyncio.current_task())
        try:
            await answer(reader, writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            pass  # the front hung up
        finally:
            await close(writer)

    server = await asyncio.start_server(handle, "127.0.0.1", 0)
    try:
        async with Front(TOKEN, "http://{}:{}".format(*server.sockets[0].getsockname())) as front:
            yield await front.listen("127.0.0.1", 0)
        for task in tasks:
            task.cancel()
        for each in await asyncio.gather(*tasks, return_exceptions=True):
            assert not isinstance(each, AssertionError), each
    finally:
        server.close()


async def close(writer):
    writer.close()
    with suppress(ConnectionError):
        await writer.wait_closed()


async def request_of(reader):
    head = (await reader.readuntil(b"\r\n\r\n")).decode()
    length = int(head.lower().partition("content-length: ")[2].partition("\r\n")[0])
    return head, await reader.readexactly(length)


async def unasked(reader, writer):
    raise AssertionError("the front passed a request on")


async def say(url, sent):
    """Send bytes as they are; return all that comes back until the front closes."""
    host, port = url.removeprefix("http://").split(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(sent)
    received = b""
    try:
        while piece := await asyncio.wait_for(reader.read(1 << 16), 10):
            received += piece
    except ConnectionResetError:
        pass
    await close(writer)
    return received


async def test_a_request_passes_with_the_fronts_credential_and_the_answer_with_few_headers():
    seen = []

    async def answer(reader, writer):
        while True:
            seen.append(await request_of(reader))
            writer.write(ANSWER + b"Transfer-Encoding: chunked\r\n\r\n2\r\nab\r\n")
            await asyncio.sleep(0.01)
            writer.write(b"3\r\ncde\r\n0\r\n\r\n")

    async def body():
        yield b"first, "
        yield b"second"

    async with (
        serving(answer) as url,
        aiohttp.ClientSession(auto_decompress=False, headers=KEY) as session,
    ):
        for _ in range(2):
            headers = {"X-Session-ID": "7", "X-Other": "1", "Content-Type": "text/x"}
            async with session.post(url + GENERATE, data=body(), headers=headers) as said:
                assert (said.status, await said.read()) == (200, b"abcde")
                assert said.headers["X-Orrery-Engine"] == "3" and "X-Secret" not in said.headers
                assert said.headers["Content-Encoding"] == "gzip"
    for head, content in seen:
        assert content == b"first, second"
        names = {line.partition(":")[0].lower() for line in head.splitlines()[1:] if line}
        assert names == {"host", "authorization", "x-session-id", "content-type", "content-length"}
    assert len(seen) == 2


@pytest.mark.parametrize(
    "sent",
    [
        b"garbage\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost : x\r\nContent-Length: a\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    ],
)
def test_a_malformed_request_is_refused_with_one_line_in_the_log(sent, caplog):
    async def scenario():
        async with serving(unasked) as url:
            return await say(url, sent)

    with caplog.at_level(logging.INFO):
        assert asyncio.run(scenario()).startswith(b"HTTP/1.1 400 ")
    [record] = [each for each in caplog.records if each.levelno >= logging.INFO]
    assert record.exc_info is None and "\n" not in record.getMessage()
    assert "refused a malformed request of 127.0.0.1" in record.getMessage()


async def test_heads_and_bodies_have_a_limit_and_other_protocols_are_refused(monkeypatch):
    monkeypatch.setattr(router, "MAX_BODY_BYTES", 10)

    async with serving(unasked) as url:
        endless = b"GET / HTTP/1.1\r\nX: " + b"x" * (MAX_HEAD_BYTES + 1)
        assert (await say(url, endless)).startswith(b"HTTP/1.1 431 ")
        body = f"{HEAD}Content-Length: 11\r\n\r\n12345678901"
        assert (await say(url, body.encode())).startswith(b"HTTP/1.1 413 ")
        upgrade = f"{HEAD}Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n"
        assert (await say(url, upgrade.encode())).startswith(b"HTTP/1.1 400 ")
        old = HEAD.replace("HTTP/1.1", "HTTP/1.0") + "\r\n"
        assert (await say(url, old.encode())).startswith(b"HTTP/1.1 400 ")
        unknown = HEAD.replace(GENERATE, GENERATE + "/") + "\r\n"
        assert (await say(url, unknown.encode())).startswith(b"HTTP/1.1 401 ")


async def test_a_refused_request_hides_no_second_one():
    async with serving(unasked) as url:
        stranger = HEAD.replace(KEY["Authorization"], "Bearer x") + "Content-Length: 2\r\n\r\n{}"
        said = await say(url, (stranger + HEAD + "Content-Length: 2\r\n\r\n{}").encode())
        assert said.startswith(b"HTTP/1.1 401 ") and said.count(b"HTTP/1.1 ") == 1


async def test_a_request_before_the_last_answer_ends_both():
    came, ended = asyncio.Event(), asyncio.Event()

    async def hold(reader, writer):
        await request_of(reader)
        came.set()
        await reader.read()
        ended.set()

    async with serving(hold) as url:
        host, port = url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        for _ in range(2):
            writer.write(f"{HEAD}Content-Length: 2\r\n\r\n{{}}".encode())
            await asyncio.wait_for(came.wait(), 10)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        await asyncio.wait_for(ended.wait(), 10)
        await close(writer)


@pytest.mark.parametrize("is_begun", [False, True])
def test_half_an_answer_does_not_look_like_a_whole_one(is_begun):
    async def die(reader, writer):
        await request_of(reader)
        if is_begun:
            writer.write(ANSWER + b"Content-Length: 10\r\n\r\n12345")
            await writer.drain()

    async def scenario():
        async with (
            serving(die) as url,
            aiohttp.ClientSession(headers=KEY) as session,
            session.post(url + GENERATE, data=b"{}") as said,
        ):
            return said.status, await said.read()

    if is_begun:
        with pytest.raises(aiohttp.ClientError):
            asyncio.run(scenario())
    else:
        status, text = asyncio.run(scenario())
        assert status == 502 and text == b"vllm-router did not answer (ConnectionResetError)\n"


def test_a_router_that_is_not_there_is_a_502():
    async def scenario():
        async with Front(TOKEN, "http://127.0.0.1:1") as front:
            url = await front.listen("127.0.0.1", 0)
            async with (
                aiohttp.ClientSession(headers=KEY) as session,
                session.post(url + GENERATE, data=b"{}") as said,
            ):
                return said.status, await said.text()

    assert asyncio.run(scenario()) == (
        502,
        "vllm-router did not answer (ConnectionRefusedError)\n",
    )


def test_a_caller_that_reads_slowly_slows_the_router_down():
    size, sent = 64 << 20, []

    async def answer(reader, writer):
        await request_of(reader)
        writer.write(ANSWER + b"Content-Length: %d\r\n\r\n" % size)
        for _ in range(64):
            writer.write(bytes(size // 64))
            await writer.drain()
            sent.append(1)

    async def scenario():
        async with (
            serving(answer) as url,
            aiohttp.ClientSession(headers=KEY, auto_decompress=False) as session,
            session.post(url + GENERATE, data=b"{}") as said,
        ):
            before = -1
            while before != len(sent):  # until the buffers on the way are full
                before = len(sent)
                await asyncio.sleep(0.2)
            assert before < 64
            return len(await said.read())

    assert asyncio.run(scenario()) == size
