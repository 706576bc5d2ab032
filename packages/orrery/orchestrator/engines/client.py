"""Call a vLLM server or a router, and update a server's weights.

- Every call has a deadline. A sent request is never retried.
- Control calls bypass the router, which would forward them to one engine.
- In an update, requests in flight wait, then continue with new weights on their old KV cache.
- An engine stays paused until its weights have the published digest.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self
from urllib.parse import quote

import msgspec
import numpy as np

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.orchestrator.engines.messages import (
    Attested,
    EngineGone,
    EngineMetrics,
    Generation,
    GenerationFailed,
    HttpServer,
    OutOfConnections,
    TensorAttestation,
    UpdateFailed,
    UpdateInterrupted,
    VersionGone,
    WeightsDiffer,
    error_sentence,
    parse_generation,
    parse_metrics,
    parse_prompt_logprobs,
    shortened,
)
from orrery.orchestrator.engines.requests import EngineChoice
from orrery.runtime.timing import scaled
from orrery.wire.rendezvous import canary_tokens
from orrery.wire.weight_wire.leases import ELSEWHERE, GONE

if TYPE_CHECKING:
    from orrery.manifest.schema import Manifest
    from orrery.wire.weight_wire import Published

CONTROL_TIMEOUT_S = 120.0  # for control calls except weight loads and aborts
LOAD_TIMEOUT_S = 300.0  # exceeds a weight transfer's wait for a peer
QUERY_TIMEOUT_S = 10.0
# vLLM's prefix of request ids. Without it, an abort returns 200 and has no effect.
REQUEST_ID_PREFIX = "generate-tokens-"
GENERATE = "/inference/v1/generate"
SAMPLING: dict[str, Any] = {
    "logprobs": 0,  # only the sampled token's log-prob
    "detokenize": False,
    "skip_special_tokens": False,
}


class EngineClient:
    def __init__(
        self,
        url: str,
        token: str | None = None,
        name: str | None = None,
        model: str | None = None,
        num_ranks: int = 1,
    ) -> None:
        self._ranks = EngineChoice([num_ranks])
        self.url = url.rstrip("/")
        self.name = name or f"engine at {self.url}"
        self._model = model
        self._server = HttpServer(self.url, self.name, token)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        await self._server.close()

    async def generate(self, token_ids: Sequence[int] | np.ndarray, **options: Any) -> Generation:
        samples: list[Generation] = []
        await self.generate_each(token_ids, 1, samples.append, **options)
        return samples[0]

    async def generate_each(
        self,
        token_ids: Sequence[int] | np.ndarray,
        num_samples: int,
        deliver: Callable[[Generation], None],
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
        rank: int | None = None,
    ) -> None:
        """Sample `num_samples` continuations of `token_ids` at `temperature` (0 is greedy).

        - `deliver`: called with each sample when it ends, in any order.
        - `cache_salt`: requests with equal salts share prefix-cache blocks.
        - `request_id`: unique among requests in flight.
        - `stop_token_ids`: tokens that end a sample and belong to it.
        - `routes_from`: position of the first token whose routed experts are returned.
        - `session`: conversation id. A router keeps it on one engine.
        - `rank`: data-parallel rank, by default the client's choice.

        Raise EngineGone if the engine is lost, or GenerationFailed for other failures.
        Earlier samples are delivered. Cancelling this call aborts the request.
        """
        sampling = SAMPLING | {"max_tokens": max_tokens, "temperature": temperature}
        if stop_token_ids:
            sampling["stop_token_ids"] = [int(token) for token in stop_token_ids]
        if seed is not None:
            sampling["seed"] = seed
        if ignore_eos:
            sampling["ignore_eos"] = True
        if routes_from:
            sampling["routed_experts_prompt_start"] = routes_from
        prompt = np.asarray(token_ids).tolist()
        body = self._body(request_id, prompt, cache_salt, sampling)
        if kv_transfer is not None:
            body["kv_transfer_params"] = kv_transfer
        if num_samples > 1:
            sampling["n"], body["stream"] = num_samples, True
        what, missing = f"request {request_id!r}", set(range(num_samples))

        def take(line: bytes, engine: int) -> None:
            found = parse_generation(request_id, line, self.name, len(prompt), routes_from)
            if found.sample not in missing:
                raise GenerationFailed(
                    f"{self.name} gave an unexpected sample {found.sample} of {what}"
                )
            missing.remove(found.sample)
            deliver(replace(found, engine=engine))

        try:
            with self._at_rank(rank, token_ids, cache_salt) as chosen:
                status, answer, _ = await self._server.call(
                    *("POST", GENERATE, body, timeout_s, GenerationFailed, what, True, session),
                    *(chosen, take),
                )
        except EngineGone as error:
            # A healthy server also closes connections after an error 500.
            if await self.health():
                raise GenerationFailed(
                    f"{self.name} closed the connection of {what}, but is healthy"
                ) from error
            raise
        if status != 200:
            raise GenerationFailed(
                f"{self.name} refused {what} ({len(prompt)} prompt tokens): "
                f"{error_sentence(status, answer)}"
            )
        if missing:
            lacking = sorted(missing)
            raise GenerationFailed(f"{self.name} did not return samples {lacking} of {what}")

    @contextmanager
    def _at_rank(
        self, rank: int | None, token_ids: Sequence[int] | np.ndarray, salt: str
    ) -> Iterator[int | None]:
        if rank is not None or len(self._ranks.addresses) == 1:
            yield rank
            return
        with self._ranks.using(token_ids, salt, [0]) as chosen:
            yield chosen.address.rank

    async def prompt_logprobs(
        self, token_ids: Sequence[int], request_id: str, timeout_s: float
    ) -> np.ndarray:
        """Return the log-prob of each token after the first, f32 [n − 1], at temperature 1.

        Use no prefix cache. Raise GenerationFailed or EngineGone.
        """
        sampling = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "output_kind": 2}
        sampling["detokenize"] = False
        body = self._body(request_id, list(token_ids), request_id, sampling)
        what = f"request {request_id!r}"
        status, answer, _ = await self._server.call(
            "POST", GENERATE, body, timeout_s, GenerationFailed, what, True
        )
        if status != 200:
            raise GenerationFailed(f"{self.name} refused {what}: {error_sentence(status, answer)}")
        try:
            return parse_prompt_logprobs(answer, token_ids)
        except (msgspec.MsgspecError, KeyError, ValueError) as error:
            raise GenerationFailed(
                f"{self.name} gave an answer to {what} without the log-probs of its prompt: "
                f"{error!r}"
            ) from error

    def _body(
        self, request_id: str, token_ids: list[int], cache_salt: str, sampling: dict[str, Any]
    ) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": request_id,
            "token_ids": token_ids,
            "cache_salt": cache_salt,
            "sampling_params": sampling,
        }
        if self._model is not None:
            body["model"] = self._model
        return body

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Abort requests. Their answers have finish_reason "abort" and may lack the last tokens."""
        if request_ids:
            prefixed = [REQUEST_ID_PREFIX + each for each in request_ids]
            await self._control("/abort_requests", {"request_ids": prefixed}, QUERY_TIMEOUT_S)

    async def pause(self) -> None:
        await self._control("/pause?mode=keep&clear_cache=false")

    async def resume(self) -> None:
        await self._control("/resume")

    async def update_weights(self, published: "Published") -> None:
        """Load the published weights in all workers.

        If one fails, discard the weights in all, and raise UpdateFailed.
        """
        version = published.version
        await self._control("/start_weight_update", error=UpdateFailed)
        await self._load(published)
        body = {"weight_version": str(version)}
        await self._control("/finish_weight_update", body, error=UpdateFailed)

    async def _load(self, published: "Published") -> None:
        version = published.version
        update: dict[str, Any] = {"path": published.path, "version": version, "engine": self.name}
        if published.transfer:
            update["transfer"] = published.transfer
        await self._control(
            "/update_weights", {"update_info": update}, scaled(LOAD_TIMEOUT_S), UpdateFailed
        )
        reasons = [reason for reason in await self._ask_workers("untaken") if reason is not None]
        if not reasons:
            return
        await self._ask_workers("give_up_update")
        # Prefer a reason that does not only name another worker's failure.
        reason = min(reasons, key=lambda each: ELSEWHERE in each)
        kind: type[UpdateFailed] = UpdateFailed
        if ELSEWHERE in reason:
            kind = VersionGone if GONE in reason else UpdateInterrupted
        raise kind(f"{self.name} did not take version {version}: {shortened(reason)}")

    async def fingerprints(self) -> dict[str, TensorAttestation]:
        """Return {tensor name: fingerprint}. Raise WeightsDiffer if the workers disagree."""
        first, *others = await self._ask_workers("fingerprints")
        for other in others:
            names = sorted(n for n in first.keys() | other.keys() if first.get(n) != other.get(n))
            if names:
                raise WeightsDiffer(
                    f"{self.name}: its workers hold different weights in {names[0]!r} "
                    f"({len(names)} tensors)"
                )
        return {
            name: TensorAttestation(int(value, 16), how) for name, (value, how) in first.items()
        }

    async def attested(self) -> Attested | None:
        """Return the digest of the workers' weights, or None if workers disagree."""
        workers = msgspec.convert(await self._ask_workers("attested"), list[Attested])
        return workers[0] if all(other == workers[0] for other in workers) else None

    async def update_parts(self) -> dict[str, float]:
        """Return {part of the last update: seconds of the slowest worker}."""
        longest: dict[str, float] = {}
        for worker in await self._ask_workers("update_parts"):
            for part, seconds in worker.items():
                longest[part] = max(longest.get(part, 0.0), seconds)
        return longest

    async def keep_no_longer(self, names: Sequence[str]) -> None:
        await self._ask_workers("keep_no_longer", list(names))

    async def read_no_more(self, kv_engine_id: str) -> None:
        await self._ask_workers("read_no_more", kv_engine_id)

    async def _ask_workers(self, method: str, *arguments: Any) -> list[Any]:
        body = {"method": method, **({"args": list(arguments)} if arguments else {})}
        return list(msgspec.json.decode(await self._control("/collective_rpc", body))["results"])

    async def metrics(self) -> EngineMetrics:
        status, answer, _ = await self._get("/metrics", EngineGone)
        if status != 200:
            raise EngineGone(f"{self.name} does not give metrics: {error_sentence(status, answer)}")
        return parse_metrics(answer.decode())

    async def health(self) -> bool:
        try:
            status, *_ = await self._get("/health", EngineGone)
        except (EngineGone, OutOfConnections):
            return False
        return status == 200

    async def death(self) -> str | None:
        """Return why the server is gone or unhealthy, or None if it is healthy or slow."""
        try:
            status, *_ = await self._get("/health", GenerationFailed)
        except EngineGone as error:
            return str(error)
        except GenerationFailed:
            return None
        if status == 200:
            return None
        return f"{self.name} is unhealthy (/health: HTTP {status}); see its log"

    async def _get(self, path: str, on_timeout: type[OrreryError]) -> tuple[int, bytes, int]:
        return await self._server.call(
            "GET", path, None, QUERY_TIMEOUT_S, on_timeout, f"GET {path}"
        )

    async def _control(
        self,
        path: str,
        body: object = None,
        timeout_s: float | None = None,
        error: type[RunFailed] = RunFailed,
    ) -> bytes:
        limit_s = scaled(CONTROL_TIMEOUT_S) if timeout_s is None else timeout_s
        body = {} if body is None else body
        status, answer, _ = await self._server.call("POST", path, body, limit_s, EngineGone, path)
        if status != 200:
            raise error(f"{self.name}: {path} failed: {error_sentence(status, answer)}")
        return answer


class RouterClient(EngineClient):
    async def admit(self, url: str) -> None:
        await self._control(f"/add_worker?url={quote(url, safe='')}")

    async def dismiss(self, url: str) -> None:
        """Remove an engine from the router. Its running requests continue."""
        await self._control(f"/remove_worker?url={quote(url, safe='')}")


CANARY_S = 120.0


@dataclass(frozen=True)
class Canary:
    """A prompt that tests whether an engine uses the published weights.

    `bound` limits the mean |log-prob difference| from the trainer. Tokens are random, because
    log-probs of unlikely text react to any change of weights.
    """

    token_ids: tuple[int, ...]
    bound: float

    @classmethod
    def of(cls, manifest: "Manifest") -> "Canary | None":
        bound = manifest.trainer.mismatch.canary_logprob_difference
        return None if bound is None else cls(canary_tokens(manifest), bound)


@dataclass(frozen=True)
class UpdateReport:
    version: int
    digest: str
    pause_s: float
    update_s: float
    attest_s: float
    paused_s: float
    attested: dict[str, int]  # {`TensorAttestation.how`: number of tensors}
    canary_s: float = 0.0
    canary_difference: float | None = None


async def update_engine(
    engine: EngineClient,
    published: "Published",
    canary: Canary | None = None,
    proving: AbstractContextManager[object] | None = None,
    on_resumed: Callable[[], None] = lambda: None,
) -> UpdateReport:
    """Update one engine, resume it, call `on_resumed`, and check the `canary` if given.

    Raise EngineGone, UpdateFailed or WeightsDiffer.
    """
    begin = time.perf_counter()
    await engine.pause()
    paused = time.perf_counter()
    await engine.update_weights(published)
    updated = time.perf_counter()
    found = await engine.attested()
    if found is None or found.digest != published.digest:
        compare(published.version, published.fingerprints, await engine.fingerprints(), engine.name)
        raise WeightsDiffer(
            f"{engine.name}: its weights do not have the digest {published.digest} "
            f"of version {published.version}"
        )
    attested = time.perf_counter()
    difference, canary_s = None, 0.0
    with nullcontext() if proving is None else proving:
        await engine.resume()
        resumed = time.perf_counter()
        on_resumed()
        if canary is not None and published.canary:
            difference = await check_canary(engine, canary, published.version, published.canary)
            canary_s = time.perf_counter() - resumed
    return UpdateReport(
        version=published.version,
        digest=published.digest,
        pause_s=paused - begin,
        update_s=updated - paused,
        attest_s=attested - updated,
        paused_s=resumed - begin,
        attested=found.how,
        canary_s=canary_s,
        canary_difference=difference,
    )


async def check_canary(
    engine: EngineClient, canary: Canary, version: int, known: Sequence[float]
) -> float:
    """Return the mean |difference| of the engine's canary log-probs from the trainer's (`known`).

    Above the canary's bound, pause the engine and raise WeightsDiffer. Without an answer, raise
    UpdateFailed or EngineGone.
    """
    try:
        found = await engine.prompt_logprobs(
            canary.token_ids, f"canary-{version}", scaled(CANARY_S)
        )
    except GenerationFailed as error:
        raise UpdateFailed(
            f"{engine.name} did not answer the canary of version {version}: {error}"
        ) from error
    if len(found) != len(known):
        raise UpdateFailed(
            f"{engine.name} gave {len(found)} log-probs of the canary of version {version}, "
            f"instead of {len(known)}"
        )
    difference = float(np.abs(np.asarray(found) - np.asarray(known)).mean())
    if not difference <= canary.bound:  # also true for NaN
        with suppress(OrreryError):
            await engine.pause()
        raise WeightsDiffer(
            f"{engine.name}: with version {version} its log-probs of the canary are "
            f"{difference:.3g} from the trainer's on average, more than "
            f"trainer.mismatch.canary_logprob_difference = {canary.bound:g}; "
            "it computes a different model, so the run stops"
        )
    return difference


def compare(
    version: int, published: Mapping[str, int], held: Mapping[str, TensorAttestation], engine: str
) -> None:
    common = published.keys() & held.keys()
    different = {name for name in common if held[name].fingerprint != published[name]}
    for names, verb in (
        (different, "differs from"),
        (published.keys() - held.keys(), "is missing after"),
        (held.keys() - published.keys(), "is not part of"),
    ):
        if names:
            name = min(names)
            how = f" (attested {held[name].how})" if name in held else ""
            more = f" ({len(names) - 1} more like it)" if len(names) > 1 else ""
            raise WeightsDiffer(
                f"{engine}: tensor {name!r}{how} {verb} published version {version}{more}; "
                "the run stops"
            )
