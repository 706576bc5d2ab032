"""HTTP requests to engines, their answers and their errors.

OrreryError
├── GenerationFailed            the engine is up, but did not finish this request
└── RunFailed
    ├── OutOfConnections        this host cannot open a connection for a control call
    ├── EngineGone              no answer, broken connection, or control timeout
    └── UpdateFailed            the engine is up, but did not load the weights
        ├── UpdateInterrupted   another process of the transfer was lost
        │   └── VersionGone     the trainer has dropped the version
        └── WeightsDiffer       the engine reports success, but holds other weights
"""

import asyncio
import errno
import random
import re
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp
import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.runtime.network import Purpose, authorization
from orrery.wire.rendezvous import ENGINE_HEADER, KEEPALIVE_S, RANK_HEADER, SESSION_HEADER
from orrery.wire.routed_experts import Routes, split
from orrery.wire.sockets import NOT_OF_THE_PROTOCOL

START_VERSION = -1  # version before the first update. vLLM calls it "default".
UNKNOWN_ENGINE = -1


class GenerationFailed(OrreryError):
    exit_code = 1


class OutOfConnections(RunFailed):
    pass


class EngineGone(RunFailed):
    pass


class UpdateFailed(RunFailed):
    pass


class UpdateInterrupted(UpdateFailed):
    pass


class VersionGone(UpdateInterrupted):
    pass


class WeightsDiffer(UpdateFailed):
    pass


@dataclass(frozen=True)
class Generation:
    """One sample. Arrays have one entry per generated token."""

    request_id: str
    token_ids: np.ndarray  # i32 [n]
    logprobs: np.ndarray  # f32 [n], at the sampling temperature
    versions: np.ndarray  # i32 [n], policy versions
    finish_reason: str  # "stop" | "length" | "abort"
    cached_tokens: int
    routes: tuple[Routes, ...] = ()  # routed experts of every token but the last
    kv_transfer: dict[str, Any] | None = None  # address of a prefill request's KV blocks
    engine: int = UNKNOWN_ENGINE
    sample: int = 0  # index among the request's samples


@dataclass(frozen=True)
class TensorAttestation:
    """A tensor's fingerprint.

    `how`: "resident" or "as_consumed", defined in `inference/receiver.py`.
    """

    fingerprint: int  # 64 bits
    how: str


class Attested(msgspec.Struct):
    digest: str
    how: dict[str, int]


@dataclass(frozen=True)
class EngineMetrics:
    """One engine's load. Totals count from its start."""

    running: int
    waiting: int
    kv_usage: float  # fraction of KV blocks in use, 0 to 1
    kv_tokens: int  # tokens that the KV caches of all ranks hold, 0 if unknown
    preemptions_total: int
    generation_tokens_total: int
    loading: int = 0  # waiting requests that load KV blocks
    prompt_tokens_total: int = 0
    external_hit_tokens_total: int = 0  # prompt tokens cached outside GPU memory


# Response of /inference/v1/generate
class _Cached(msgspec.Struct):
    cached_tokens: int | None = None


class _Usage(msgspec.Struct):
    prompt_tokens_details: _Cached | None = None


class _TokenLogprob(msgspec.Struct):
    logprob: float


class _Logprobs(msgspec.Struct):
    content: list[_TokenLogprob]


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


class _Choice(msgspec.Struct):
    token_ids: list[int]
    finish_reason: str | None = None
    logprobs: _Logprobs | None = None
    weight_versions: list[_Span] | None = None
    index: int = 0


class _PromptLogprobs(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


class _Error(msgspec.Struct):
    message: str


class _Generated(msgspec.Struct):
    choices: list[_Choice] = []
    error: _Error | None = None
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decode_generated = msgspec.json.Decoder(_Generated).decode


def parse_generation(
    request_id: str, answer: bytes, engine: str, prompt_tokens: int, routes_from: int | None
) -> Generation:
    """Raise GenerationFailed if the answer is malformed or incomplete."""
    try:
        answer, routes = split(answer, routes_from or 0)
        generated = _decode_generated(answer)
        if generated.error is not None:
            raise GenerationFailed(
                f"{engine} failed request {request_id!r}: {shortened(generated.error.message)}"
            )
        choice = generated.choices[0]
        token_ids = np.asarray(choice.token_ids, dtype=np.int32)
        content = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = np.array([each.logprob for each in content], dtype=np.float32)
        unset = START_VERSION - 1
        versions = np.full(len(token_ids), unset, dtype=np.int32)
        for span in choice.weight_versions or ():
            version = START_VERSION if span.version == "default" else int(span.version)
            versions[span.start : span.end] = version
    except (*NOT_OF_THE_PROTOCOL, IndexError, OverflowError) as error:
        raise GenerationFailed(
            f"{engine} gave an answer to request {request_id!r} that is not a generation: {error}"
        ) from error
    num_unversioned = int((versions <= unset).sum())
    if len(logprobs) != len(token_ids) or num_unversioned:
        raise GenerationFailed(
            f"{engine} gave request {request_id!r} {len(token_ids)} tokens, "
            f"{len(logprobs)} log-probs, {num_unversioned} tokens without a version"
        )
    if routes_from is not None and choice.finish_reason != "abort":
        expected = prompt_tokens + len(token_ids) - 1 - routes_from
        if routes is None or routes.num_rows != expected:
            found = "no routes" if routes is None else f"routes of {routes.num_rows}"
            raise GenerationFailed(
                f"{engine} must return routes of {expected} tokens for request "
                f"{request_id!r}, but returned {found}"
            )
    details = generated.usage.prompt_tokens_details if generated.usage else None
    return Generation(
        request_id,
        token_ids,
        logprobs,
        versions,
        finish_reason=choice.finish_reason or "",
        cached_tokens=(details.cached_tokens if details else None) or 0,
        routes=(routes,) if routes is not None and routes_from is not None else (),
        kv_transfer=generated.kv_transfer_params,
        sample=choice.index,
    )


def parse_prompt_logprobs(answer: bytes, token_ids: Sequence[int]) -> np.ndarray:
    """Raise ValueError, KeyError or msgspec.MsgspecError if a log-prob is missing."""
    rows = msgspec.json.decode(answer, type=_PromptLogprobs).prompt_logprobs or []
    pairs = zip(rows[1:], token_ids[1:], strict=True)
    return np.array([(row or {})[str(token)].logprob for row, token in pairs], np.float32)


METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:prompt_tokens_total": "prompt_tokens_total",
    "vllm:external_prefix_cache_hits_total": "external_hit_tokens_total",
}
_CACHE_SIZES = re.compile(r'[{,](num_gpu_blocks|block_size)="(\d+)"')


def parse_metrics(page: str) -> EngineMetrics:
    """Return the `METRICS` of a Prometheus page, summed over label sets. `kv_usage` is a mean."""
    values = dict.fromkeys([*METRICS.values(), "kv_tokens", "loading"], 0.0)
    num_caches = 0
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in METRICS:
            values[METRICS[name]] += float(line.rpartition(" ")[2])
            num_caches += METRICS[name] == "kv_usage"
        elif name == "vllm:num_requests_waiting_by_reason" and 'reason="deferred"' in line:
            values["loading"] += float(line.rpartition(" ")[2])
        elif name == "vllm:cache_config_info":  # the sizes are label values
            sizes = {key: int(size) for key, size in _CACHE_SIZES.findall(line)}
            values["kv_tokens"] += sizes.get("num_gpu_blocks", 0) * sizes.get("block_size", 0)
    usage = values.pop("kv_usage") / max(1, num_caches)
    return EngineMetrics(kv_usage=usage, **{name: int(value) for name, value in values.items()})


def error_sentence(status: int, answer: bytes) -> str:
    text = answer.decode(errors="replace")
    try:
        content = msgspec.json.decode(answer)
        if isinstance(content, dict):
            content = content.get("error", content.get("detail", content))
        if isinstance(content, dict):
            content = content.get("message", content)
        text = str(content)
    except msgspec.MsgspecError:
        pass
    return f"{shortened(text)} (HTTP {status})"


def shortened(text: str) -> str:
    return text.strip()[:600] or "no reason given"


CONNECT_TIMEOUT_S = 10.0
# This host lacks file descriptors, memory or ports. No byte was sent, so retry.
NO_ROOM = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS, errno.EADDRNOTAVAIL}
NO_ROOM_PAUSE_S, NO_ROOM_LONGEST_S = 0.1, 5.0


class HttpServer:
    def __init__(self, url: str, name: str, token: str | None) -> None:
        self.url, self.name, self._token = url, name, token
        self._sessions: dict[bool, aiohttp.ClientSession] = {}

    async def close(self) -> None:
        while self._sessions:
            await self._sessions.popitem()[1].close()

    def _session(self, keep_connection: bool) -> aiohttp.ClientSession:
        """Return a session. Control calls connect anew, because idle connections may close."""
        if keep_connection not in self._sessions:
            kept = {"keepalive_timeout": KEEPALIVE_S} if keep_connection else {"force_close": True}
            purpose = Purpose.GENERATE if keep_connection else Purpose.ADMINISTER
            self._sessions[keep_connection] = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=0, **kept),  # type: ignore[arg-type]
                headers=authorization(self._token, purpose),
            )
        return self._sessions[keep_connection]

    async def call(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
        on_timeout: type[OrreryError],
        what: str,
        keep_connection: bool = False,
        session: str | None = None,
        rank: int | None = None,
        on_line: Callable[[bytes, int], None] | None = None,
    ) -> tuple[int, bytes, int]:
        """Send one request. Return the answer's status and body, and the engine's index.

        - `what`: the request's name in errors.
        - `on_timeout`: error type after `timeout_s`.
        - `on_line`: called with each line and the engine's index if the status is 200. The returned
          body is then empty.

        Raise EngineGone if the server does not answer. If this host has no free socket until the
        timeout, raise `on_timeout`, but OutOfConnections instead of EngineGone.
        """
        http = self._session(keep_connection)
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if session is not None:
            headers[SESSION_HEADER] = session
        if rank is not None:
            headers[RANK_HEADER] = str(rank)
        end_s, pause_s = time.monotonic() + timeout_s, NO_ROOM_PAUSE_S
        while True:
            left_s = max(end_s - time.monotonic(), 1e-3)
            timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_TIMEOUT_S)
            try:
                async with http.request(
                    method, self.url + path, data=data, headers=headers, timeout=timeout
                ) as response:
                    name = response.headers.get(ENGINE_HEADER, "")
                    engine = int(name) if name.isdecimal() and len(name) < 6 else UNKNOWN_ENGINE
                    if on_line is None or response.status != 200:
                        return response.status, await response.read(), engine
                    async for line in lines(response.content):
                        on_line(line, engine)
                    return response.status, b"", engine
            except aiohttp.ServerTimeoutError as error:
                raise EngineGone(
                    f"{self.name} did not accept a connection within {CONNECT_TIMEOUT_S:g} s "
                    f"({what}); see its log"
                ) from error
            except TimeoutError as error:
                raise on_timeout(
                    f"{self.name} did not finish {what} within {timeout_s:g} s"
                ) from error
            except aiohttp.ClientConnectorError as error:
                if error.errno not in NO_ROOM:
                    raise self._gone(what, error) from error
                if time.monotonic() + pause_s > end_s:
                    kind = OutOfConnections if issubclass(on_timeout, EngineGone) else on_timeout
                    raise kind(
                        f"this host could not open a connection to {self.name} for {what} within "
                        f"{timeout_s:g} s ({error}); raise `ulimit -n`"
                    ) from error
            except (aiohttp.ClientError, OSError) as error:
                raise self._gone(what, error) from error
            # Random pauses spread thousands of retries.
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
            pause_s = min(2 * pause_s, NO_ROOM_LONGEST_S)

    def _gone(self, what: str, error: Exception) -> EngineGone:
        kind = type(error).__name__
        return EngineGone(f"{self.name} is gone ({what}: {kind}: {error}); see its log")


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield non-empty lines of any length, without newlines."""
    pieces: list[bytes] = []
    async for data in content.iter_any():
        *ends, rest = data.split(b"\n")
        for end in ends:
            if line := b"".join([*pieces, end]):
                yield line
            pieces.clear()
        pieces.append(rest)
    if line := b"".join(pieces):
        yield line
