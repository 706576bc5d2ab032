"""The engine wire, client end: token ids go to a vLLM server, sampled tokens and control calls come back.

- In: token ids and sampling numbers; published weights. Out: `Generation`, one entry an array a sampled token.
- Always: every call has a deadline. Every generated token carries the policy version that sampled it.
- Generation may pass a router; control calls (pause, update, abort, fingerprints) go to each engine itself, because a router forwards
  them to one.
- Never: retries of what has left this process. A failed generation is data for the caller; what a failed update means
  `orrery.transport.fleet` decides.

    OrreryError
    ├── GenerationFailed      the engine is there and did not finish this request (refused it, died over it, or took too long)
    └── RunFailed
        ├── NoRoom            this process could not open a connection for a control call
        ├── EngineGone        nobody answers at the address, the connection broke, or a control call took too long
        └── UpdateFailed      the engine is there and did not take these weights; names engine and tensor
            ├── TakenAlong    another's loss on a direct wire made it fail, and it may try again
            │   └── TooLate   the version that it tried again can no longer be had
            └── WeightsDiffer it says that it did, and holds others
"""

import asyncio
import errno
import random
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self, TypeVar

import aiohttp
import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.observe.deadline import scaled
from orrery.transport.route_bytes import Routes, split
from orrery.transport.token import Purpose, authorization
from orrery.transport.weight_wire.contract import ELSEWHERE, GONE

if TYPE_CHECKING:
    from orrery.transport.weight_wire import Published

T = TypeVar("T")

START_VERSION = (
    -1
)  # what the engine's label "default" stands for: weights loaded at start, before the first update
CONNECT_TIMEOUT_S = 10.0
NO_ROOM = {
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ENOBUFS,
    errno.EADDRNOTAVAIL,
}  # of a connect: nothing has left yet
NO_ROOM_PAUSE_S, NO_ROOM_LONGEST_S = 0.1, 5.0
CONTROL_TIMEOUT_S = 120.0  # pause, resume, start and end of an update, fingerprints; scaled
LOAD_TIMEOUT_S = (
    300.0  # beyond what a wire waits for a peer that does not come: its own sentence says more
)
QUERY_TIMEOUT_S = 10.0  # health, metrics, abort
# Ours to close, before the server does (uvicorn's default is 5 s): a request on a connection that the server is just closing is lost.
KEEPALIVE_S = 3.0
# vLLM's /inference/v1/generate puts it before our ids; aborting a bare id aborts nothing, with status 200.
REQUEST_ID_PREFIX = "generate-tokens-"
ENGINE_HEADER = "X-Orrery-Engine"  # the index of the answering engine, as it says itself
UNKNOWN_ENGINE = -1
SESSION_HEADER = "X-Session-ID"  # what vllm-router's consistent_hash goes by


class GenerationFailed(OrreryError):
    """One request came to nothing; other requests are not affected."""

    exit_code = 1


class NoRoom(RunFailed):
    """This process, or its host, could not open one more connection, for as long as the call may take."""


class EngineGone(RunFailed):
    """No engine (or router) answers at its address."""


class UpdateFailed(RunFailed):
    """An engine did not take the weights that were published."""


class TakenAlong(UpdateFailed):
    """Who sends, or who was to receive together with this engine, did not come through: nothing is wrong with this one."""


class TooLate(TakenAlong):
    """The trainer had sent the version, and has stepped since: the next one will do."""


class WeightsDiffer(UpdateFailed):
    """The weights inside an engine are not those that were published: nobody may sample from them, whatever else happens."""


@dataclass(frozen=True)
class Generation:
    """What one request produced. The arrays have one entry a generated token."""

    request_id: str
    token_ids: np.ndarray  # i32 [n]
    logprobs: np.ndarray  # f32 [n], log p of each token under the distribution it was sampled from (temperature applied)
    versions: (
        np.ndarray
    )  # i32 [n], policy version that sampled the token; START_VERSION before the first update
    finish_reason: str  # "stop" | "length" | "abort"
    cached_tokens: int  # prompt tokens whose KV came from the prefix cache
    routes: tuple[
        Routes, ...
    ] = ()  # of prompt and sampled tokens, the last one not, where they were asked for
    kv_transfer: dict[str, Any] | None = (
        None  # of a request that prefills for another engine: where its blocks are
    )
    engine: int = UNKNOWN_ENGINE  # index of the engine that sampled it


@dataclass(frozen=True)
class TensorAttestation:
    """One tensor as an engine holds it.

    `how`: "resident" (read back from the processed model) or "as_consumed" (taken on its way in; repacked since).
    """

    fingerprint: int  # 64 bits, as `orrery.transport.fingerprint` computes them
    how: str


class Attested(msgspec.Struct):
    """All tensors as an engine holds them: the digest of their names and fingerprints, and how many were attested how."""

    digest: str
    how: dict[str, int]


@dataclass(frozen=True)
class EngineMetrics:
    """The few numbers of an engine's Prometheus page that admission and the report use. Totals count from the engine's start."""

    running: int
    waiting: int
    kv_usage: float  # share of KV blocks in use, 0 to 1; of several data-parallel caches the mean
    kv_tokens: int  # that the KV blocks of all caches hold; 0 where the page does not say
    preemptions_total: int
    generation_tokens_total: int
    loading: int = (
        0  # of those that wait, whose cache is on its way into blocks that they hold already
    )
    external_hit_tokens_total: int = 0  # of new requests, found in caches outside the device: host, disk, a store, another engine


# The response of /inference/v1/generate, as far as it is read here; msgspec skips the rest without building objects.
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


class _PromptLogprobs(msgspec.Struct):
    prompt_logprobs: list[dict[str, _TokenLogprob] | None] | None = None


class _Generated(msgspec.Struct):
    choices: list[_Choice]
    usage: _Usage | None = None
    kv_transfer_params: dict[str, Any] | None = None


_decode_generated = msgspec.json.Decoder(_Generated).decode


class EngineClient:
    """One vLLM server (or a router before several): `async with EngineClient(url) as engine`, or `close()` it."""

    def __init__(
        self, url: str, token: str | None = None, name: str | None = None, model: str | None = None
    ) -> None:
        """`url` without a path. `token` is the run's, of which requests carry credentials; `name` is what error sentences call this engine.

        `model` is what requests are for where the server has more than its weights (`orrery.transport.weight_wire.served_model`).
        """
        self.url = url.rstrip("/")
        self.name = name or f"engine at {self.url}"
        self._token, self._model = token, model
        self._sessions: dict[bool, aiohttp.ClientSession] = {}  # by whether connections are kept

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close connections; requests in flight are aborted by the engine."""
        while self._sessions:
            await self._sessions.popitem()[1].close()

    async def generate(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        max_tokens: int,
        temperature: float,
        cache_salt: str,
        request_id: str,
        stop_token_ids: Sequence[int] = (),
        seed: int | None = None,
        ignore_eos: bool = False,
        routes_from: int | None = None,
        timeout_s: float = 600.0,
        session: str | None = None,
        kv_transfer: Mapping[str, Any] | None = None,
    ) -> Generation:
        """Sample a continuation of `token_ids` (plain temperature sampling; 0 is greedy).

        Prefix-cache blocks are shared only among requests of one `cache_salt`. A stop token is part of the result.
        `routes_from`: the position of the first token whose experts are wanted; an engine that returns none of them has failed.
        `session` names the conversation, for a router that keeps its turns on one engine. `kv_transfer` is vLLM's `kv_transfer_params`:
        where a cache comes from or goes to (`prefill_decode`).
        `request_id` is what `abort` takes; it must be unique among requests in flight.
        Raises GenerationFailed, or EngineGone. Cancelling the coroutine aborts the request in the engine.
        """
        sampling: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "logprobs": 0,  # of the sampled token alone
            "detokenize": False,
            "skip_special_tokens": False,
        }
        if stop_token_ids:
            sampling["stop_token_ids"] = [int(token) for token in stop_token_ids]
        if seed is not None:
            sampling["seed"] = seed
        if ignore_eos:
            sampling["ignore_eos"] = True
        if routes_from:
            sampling["routed_experts_prompt_start"] = routes_from
        prompt = (
            token_ids.tolist()
            if isinstance(token_ids, np.ndarray)
            else [int(token) for token in token_ids]
        )
        body = {
            "request_id": request_id,
            "token_ids": prompt,
            "cache_salt": cache_salt,
            "sampling_params": sampling,
        }
        if kv_transfer is not None:
            body["kv_transfer_params"] = kv_transfer
        if self._model is not None:
            body["model"] = self._model
        what = f"request {request_id!r}"
        try:
            status, answer, engine = await self._call(
                "POST",
                "/inference/v1/generate",
                body,
                timeout_s,
                GenerationFailed,
                what,
                keep_connection=True,
                session=session,
            )
        except EngineGone as error:
            # A kept connection may break without harm to the server: it closes one whenever it answers 500.
            if await self.health():
                raise GenerationFailed(
                    f"{self.name} hung up on {what} and is well otherwise"
                ) from error
            raise
        if status != 200:
            raise GenerationFailed(
                f"{self.name} refused request {request_id!r} ({len(prompt)} prompt tokens): {_sentence(status, answer)}"
            )
        return replace(
            _generation(request_id, answer, self.name, len(prompt), routes_from), engine=engine
        )

    async def prompt_logprobs(
        self, token_ids: Sequence[int], request_id: str, timeout_s: float
    ) -> np.ndarray:
        """Return log p of each token after the first, f32 [n − 1], at temperature 1.

        The prefix cache is not used. Raises GenerationFailed or EngineGone.
        """
        sampling = {
            "max_tokens": 1,
            "temperature": 1.0,
            "prompt_logprobs": 0,
            "output_kind": 2,
            "detokenize": False,
        }
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": list(token_ids),
            "cache_salt": request_id,
        }
        body["sampling_params"] = sampling
        if self._model is not None:
            body["model"] = self._model
        what, path = f"request {request_id!r}", "/inference/v1/generate"
        status, answer, _ = await self._call(
            "POST", path, body, timeout_s, GenerationFailed, what, keep_connection=True
        )
        if status != 200:
            raise GenerationFailed(f"{self.name} refused {what}: {_sentence(status, answer)}")
        try:
            rows = msgspec.json.decode(answer, type=_PromptLogprobs).prompt_logprobs or []
            return np.array(
                [
                    (row or {})[str(token)].logprob
                    for row, token in zip(rows[1:], token_ids[1:], strict=True)
                ],
                np.float32,
            )
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise GenerationFailed(
                f"{self.name} gave an answer to {what} without the log-probs of its prompt: {error!r}"
            ) from error

    async def abort(self, request_ids: Sequence[str]) -> None:
        """End these requests; their `generate` returns with finish_reason "abort", but for the last tokens. Unknown ids are ignored."""
        if request_ids:
            await self._control(
                "/abort_requests",
                {"request_ids": [REQUEST_ID_PREFIX + each for each in request_ids]},
                QUERY_TIMEOUT_S,
            )

    async def pause(self) -> None:
        """Freeze running requests where they are, keeping their KV and the prefix cache; new requests wait."""
        await self._control("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        """Go on after `pause`."""
        await self._control("/resume")

    async def start_update(self) -> None:
        """Make the model ready to be loaded again."""
        await self._control("/start_weight_update", error=UpdateFailed)

    async def load(self, published: "Published") -> None:
        """Have the engine read what was published; raises UpdateFailed with the tensor's name where it is damaged or incomplete.

        The engine has it when each of its workers has. Where one has not, all of them give up what they have of it.
        """
        body = {
            "update_info": {
                "path": str(published.path),
                "version": published.version,
                "engine": self.name,
            }
        }
        await self._control("/update_weights", body, scaled(LOAD_TIMEOUT_S), error=UpdateFailed)
        reasons = [reason for reason in await self._ask_workers("untaken") if reason is not None]
        if not reasons:
            return
        await self._ask_workers("give_up_update")
        reason = min(
            reasons, key=lambda each: ELSEWHERE in each
        )  # a worker that is at fault says more
        kind = (
            UpdateFailed if ELSEWHERE not in reason else TooLate if GONE in reason else TakenAlong
        )
        raise kind(f"{self.name} did not take version {published.version}: {_shortened(reason)}")

    async def finish_update(self, version: int) -> None:
        """Put the loaded weights in place; tokens sampled from now on carry `version`."""
        await self._control(
            "/finish_weight_update", {"weight_version": str(version)}, error=UpdateFailed
        )

    async def update_weights(self, published: "Published") -> None:
        """Start, load, finish. The engine should be paused; it is not resumed, nor attested: `orrery.transport.update` does all."""
        await self.start_update()
        await self.load(published)
        await self.finish_update(published.version)

    async def fingerprints(self) -> dict[str, TensorAttestation]:
        """Fingerprint of every tensor (HF names) as this engine holds it since its last update; empty before the first."""
        workers = await self._ask_workers("fingerprints")
        for other in workers[1:]:
            if other != workers[0]:
                names = sorted(
                    name
                    for name in workers[0].keys() | other.keys()
                    if workers[0].get(name) != other.get(name)
                )
                raise WeightsDiffer(
                    f"{self.name}: its workers hold different weights in {names[0]!r} ({len(names)} tensors)"
                )
        return {
            name: TensorAttestation(int(value, 16), how)
            for name, (value, how) in workers[0].items()
        }

    async def attested(self) -> Attested | None:
        """What `fingerprints` would say, in short; None where the engine's workers hold different weights."""
        workers = msgspec.convert(await self._ask_workers("attested"), list[Attested])
        return workers[0] if all(other == workers[0] for other in workers) else None

    async def update_parts(self) -> dict[str, float]:
        """Seconds of the last update by part, the longest over this engine's workers; empty where it read files."""
        workers = await self._ask_workers("update_parts")
        return {
            part: max(worker.get(part, 0.0) for worker in workers)
            for worker in workers
            for part in worker
        }

    async def keep_no_longer(self, names: Sequence[str]) -> None:
        """Free the blocks that this engine keeps under these names for readers that are gone (`prefill_decode`). Unknown ones are ignored;
        raises EngineGone."""
        await self._ask_workers("keep_no_longer", list(names))

    async def read_no_more(self, kv_engine_id: str) -> None:
        """Fail the requests that wait for blocks out of this engine, which has ended (`prefill_decode`), now and from now on."""
        await self._ask_workers("read_no_more", kv_engine_id)

    async def _ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        """What each of this engine's workers answers to a call of `orrery.inference.attestation`."""
        body = {"method": method, **({"args": list(arguments)} if arguments else {})}
        return list(msgspec.json.decode(await self._control("/collective_rpc", body))["results"])

    async def metrics(self) -> EngineMetrics:
        """Numbers of /metrics, summed over label sets."""
        status, answer, _ = await self._call(
            "GET", "/metrics", None, QUERY_TIMEOUT_S, EngineGone, "GET /metrics"
        )
        if status != 200:
            raise EngineGone(f"{self.name} does not give metrics: {_sentence(status, answer)}")
        return _metrics(answer.decode())

    async def health(self) -> bool:
        """True if the server answers that it is well; False if it answers anything else, or not at all."""
        try:
            status, *_ = await self._call(
                "GET", "/health", None, QUERY_TIMEOUT_S, EngineGone, "GET /health"
            )
        except (EngineGone, NoRoom):
            return False
        return status == 200

    async def death(self) -> str | None:
        """Why this server will not answer any more: it cannot be reached, or says that it is not well. None where it is well, or slow."""
        try:
            status, *_ = await self._call(
                "GET", "/health", None, QUERY_TIMEOUT_S, GenerationFailed, "GET /health"
            )
        except EngineGone as error:
            return str(error)
        except GenerationFailed:
            return None
        return (
            None
            if status == 200
            else f"{self.name} says that it is not well (/health: HTTP {status}); see its log"
        )

    async def _control(
        self,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        error: type[RunFailed] = RunFailed,
    ) -> bytes:
        """POST that must succeed; raises `error` with the engine's own words."""
        limit_s = scaled(CONTROL_TIMEOUT_S) if timeout_s is None else timeout_s
        status, answer, _ = await self._call(
            "POST", path, {} if body is None else body, limit_s, EngineGone, path
        )
        if status != 200:
            raise error(f"{self.name}: {path} failed: {_sentence(status, answer)}")
        return answer

    async def _call(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
        on_timeout: type[OrreryError],
        what: str,
        keep_connection: bool = False,
        session: str | None = None,
    ) -> tuple[int, bytes, int]:
        """Status, body and engine of one HTTP exchange; EngineGone where there is no server, `on_timeout` where it is too slow.

        Where this process, or its host, has no room for one more connection, that is not the server's doing: it waits for room, and fails
        by `on_timeout`, or NoRoom where that would blame the server.
        Generation keeps connections. Control calls open one each: they are few, and must not meet one that the server is just closing.
        Only control calls carry the `administer` credential.
        """
        connections = self._sessions.get(keep_connection)
        if connections is None:
            kept = {"keepalive_timeout": KEEPALIVE_S} if keep_connection else {"force_close": True}
            connector = aiohttp.TCPConnector(limit=0, **kept)  # type: ignore[arg-type]
            carried = authorization(
                self._token, Purpose.GENERATE if keep_connection else Purpose.ADMINISTER
            )
            connections = self._sessions[keep_connection] = aiohttp.ClientSession(
                connector=connector, headers=carried
            )
        data = None if body is None else msgspec.json.encode(body)
        headers = {"Content-Type": "application/json"} if body is not None else {}
        if session is not None:
            headers[SESSION_HEADER] = session
        end_s, pause_s = time.monotonic() + timeout_s, NO_ROOM_PAUSE_S
        while True:
            left_s = max(end_s - time.monotonic(), 1e-3)
            timeout = aiohttp.ClientTimeout(total=left_s, sock_connect=CONNECT_TIMEOUT_S)
            try:
                async with connections.request(
                    method, self.url + path, data=data, headers=headers, timeout=timeout
                ) as response:
                    name = response.headers.get(ENGINE_HEADER, "")
                    return (
                        response.status,
                        await response.read(),
                        int(name) if name.isdecimal() and len(name) < 6 else UNKNOWN_ENGINE,
                    )
            except aiohttp.ServerTimeoutError as error:
                raise EngineGone(
                    f"{self.name} did not accept a connection within {CONNECT_TIMEOUT_S:g} s ({what}); see its log"
                ) from error
            except TimeoutError as error:
                raise on_timeout(
                    f"{self.name} did not finish {what} within {timeout_s:g} s"
                ) from error
            except (aiohttp.ClientError, OSError) as error:
                if (
                    not isinstance(error, aiohttp.ClientConnectorError)
                    or error.errno not in NO_ROOM
                ):
                    raise EngineGone(
                        f"{self.name} is gone ({what}: {type(error).__name__}: {error}); see its log"
                    ) from error
                if time.monotonic() + pause_s > end_s:
                    raise (NoRoom if issubclass(on_timeout, EngineGone) else on_timeout)(
                        f"no room here to ask {self.name} for {what} within {timeout_s:g} s ({error}); see `ulimit -n`"
                    ) from error
            await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))  # thousands may wait
            pause_s = min(2 * pause_s, NO_ROOM_LONGEST_S)


def _generation(
    request_id: str, answer: bytes, engine: str, prompt_tokens: int, routes_from: int | None
) -> Generation:
    """Arrays out of the response; GenerationFailed where it lacks what was asked for."""
    try:
        answer, routes = split(answer, routes_from or 0)
        generated = _decode_generated(answer)
        choice = generated.choices[0]
        token_ids = np.asarray(choice.token_ids, dtype=np.int32)
        content = choice.logprobs.content if choice.logprobs is not None else []
        logprobs = np.fromiter(
            (each.logprob for each in content), dtype=np.float32, count=len(content)
        )
        versions = np.full(len(token_ids), START_VERSION - 1, dtype=np.int32)
        for span in choice.weight_versions or ():
            versions[span.start : span.end] = (
                START_VERSION if span.version == "default" else int(span.version)
            )
    except (msgspec.MsgspecError, ValueError, IndexError) as error:
        raise GenerationFailed(
            f"{engine} gave an answer to request {request_id!r} that is not a generation: {error}"
        ) from error
    if len(logprobs) != len(token_ids) or (versions < START_VERSION).any():
        unversioned = int((versions < START_VERSION).sum())
        raise GenerationFailed(
            f"{engine} gave request {request_id!r} {len(token_ids)} tokens, {len(logprobs)} log-probs, "
            f"{unversioned} tokens without a version"
        )
    parts = (routes,) if routes is not None and routes_from is not None else ()
    expected = prompt_tokens + len(token_ids) - 1 - (routes_from or 0)
    if (
        routes_from is not None
        and choice.finish_reason != "abort"
        and (routes is None or routes.num_rows != expected)
    ):
        found = "none" if routes is None else f"those of {routes.num_rows}"
        raise GenerationFailed(
            f"{engine} was asked for the routes of {expected} tokens by request {request_id!r}, and returned {found}"
        )
    details = generated.usage.prompt_tokens_details if generated.usage else None
    cached = (details.cached_tokens if details else None) or 0
    return Generation(
        request_id,
        token_ids,
        logprobs,
        versions,
        choice.finish_reason or "",
        cached,
        parts,
        generated.kv_transfer_params,
    )


_METRICS = {
    "vllm:num_requests_running": "running",
    "vllm:num_requests_waiting": "waiting",
    "vllm:kv_cache_usage_perc": "kv_usage",
    "vllm:num_preemptions_total": "preemptions_total",
    "vllm:generation_tokens_total": "generation_tokens_total",
    "vllm:external_prefix_cache_hits_total": "external_hit_tokens_total",
}


_CACHE_SIZES = re.compile(r'[{,](num_gpu_blocks|block_size)="(\d+)"')


def _metrics(page: str) -> EngineMetrics:
    """Pick `_METRICS` out of a Prometheus text page; a series that is not there counts 0."""
    values = dict.fromkeys([*_METRICS.values(), "kv_tokens", "loading"], 0.0)
    num_caches = 0
    for line in page.splitlines():
        name = line.partition("{")[0].partition(" ")[0]
        if name in _METRICS:
            values[_METRICS[name]] += float(line.rpartition(" ")[2])
            num_caches += _METRICS[name] == "kv_usage"
        elif name == "vllm:num_requests_waiting_by_reason" and 'reason="deferred"' in line:
            values["loading"] += float(line.rpartition(" ")[2])
        elif name == "vllm:cache_config_info":  # its numbers are labels
            sizes = dict(_CACHE_SIZES.findall(line))
            values["kv_tokens"] += int(sizes.get("num_gpu_blocks", 0)) * int(
                sizes.get("block_size", 0)
            )
    usage = values.pop("kv_usage") / max(1, num_caches)
    return EngineMetrics(kv_usage=usage, **{name: int(value) for name, value in values.items()})


def _sentence(status: int, answer: bytes) -> str:
    """The server's own words for an error, shortened."""
    text = answer.decode(errors="replace")
    try:
        content = msgspec.json.decode(answer)
        error = (
            content.get("error", content.get("detail", content))
            if isinstance(content, dict)
            else content
        )
        text = str(error.get("message", error)) if isinstance(error, dict) else str(error)
    except msgspec.MsgspecError:
        pass
    return f"{_shortened(text)} (HTTP {status})"


def _shortened(text: str) -> str:
    return text.strip()[:600] or "no words"
