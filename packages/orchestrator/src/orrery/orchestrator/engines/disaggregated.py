"""Prefill and decode apart, client end: a prompt's cache is made by one engine and read by the one that samples.

    prompt ──▶ prefill engine: whole prompt, one token that nobody keeps ──▶ where its blocks are
    prompt, where the blocks are ──▶ decode engine: reads them, computes the prompt's last token again, samples

- Every sampled token is the decode engine's, with its version. The prompt's cache may be of an older version, as that of a request which an
  update overtakes: never older than the salt, under which both engines cache.
- `session` (a rollout) stays with its engines, where its earlier turns are cached; a new one goes to those with fewest requests.
- Blocks are given back, also where nobody wants the answer any more: a prefill runs to its end and the decode engine reads its blocks for
  one token; a request on its way to the decode engine arrives and is aborted there. Neither connection is cut: a cut that crosses an end,
  or a beginning, would leave blocks that nobody reads until their lease runs out.
- Routes of the prompt are the prefill engine's, from the prompt's last token on the decode engine's, which computes it and samples.
- Which two engines talk is decided here and not by a router, which would rewrite request ids and drop the run's token.
- An engine that is lost takes along what it has of a request, and nothing of it is asked twice: EngineGone. Who is left is told: a prefill
  engine keeps no blocks for a reader that is gone, a decode engine waits for none of an engine that has ended.
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.client import EngineClient
from orrery.orchestrator.engines.messages import EngineGone, Generation, GenerationFailed
from orrery.runtime.timing import scaled

SESSIONS_AT_MOST = 65_536  # that are remembered; an older one is placed anew
GIVE_BACK_S = 60.0
CLOSE_S = 10.0
ABORT_AGAIN_S = 0.5


class SessionAffinity:
    """Which of `num_engines` serves a session."""

    def __init__(self, num_engines: int):
        self.in_flight = [0] * num_engines
        self._homes: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: str, among: Collection[int]) -> int:
        """The engine that had the session before, where it is `among` those that serve, else the one with fewest requests in flight."""
        home = self._homes.pop(session, None)
        if home is None or home not in among:
            home = min(among, key=self.in_flight.__getitem__)
        self._homes[session] = home
        if len(self._homes) > SESSIONS_AT_MOST:
            self._homes.popitem(last=False)
        return home


@dataclass(frozen=True)
class Peer:
    """An engine as it was when a request was given to it: its next incarnation has another client, and none of its blocks."""

    index: int
    client: EngineClient
    handover: Mapping[str, Any]


async def _nobody_is_lost() -> None:
    """Where engines are not started again, the first loss ends the run."""


class DisaggregatedEngines:
    """Generation over engines that prefill and engines that decode."""

    def __init__(
        self,
        engines: Sequence[EngineClient],
        handovers: Sequence[Mapping[str, Any]],
        admitted: Collection[int] | None = None,
        look: Callable[[], Awaitable[None]] = _nobody_is_lost,
    ):
        """`engines`: first those that prefill, as many as there are `handovers`, then those that decode; `handovers`: what each of the
        first published of itself (`kv_engine_id` and `kv_bootstrap` with Mooncake, else nothing).

        `admitted`: the indices of those that get requests, all where not given; `look` takes those out that are gone. `engines` and
        `admitted` belong to the fleet, which changes them as engines go and come back.
        """
        self.engines, self.handovers = engines, list(handovers)
        self._admitted = range(len(engines)) if admitted is None else admitted
        self._look = look
        self.producers, self.consumers = range(len(handovers)), range(len(handovers), len(engines))
        self._prefill_of, self._decode_of = (
            SessionAffinity(len(engines)),
            SessionAffinity(len(engines)),
        )
        self._prefilling: dict[str, bool] = {}  # request id → whether it was aborted meanwhile
        self._unwanted: dict[
            EngineClient, list[str]
        ] = {}  # caches of lost readers, which their engine is about to be told of
        self._behind_us: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        """Whether a request would find both of its engines."""
        return bool(self._serving(self.producers) and self._serving(self.consumers))

    async def generate(
        self,
        token_ids: Sequence[int] | np.ndarray,
        *,
        request_id: str,
        max_tokens: int,
        session: str = "",
        routes_from: int | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> Generation:
        """`EngineClient.generate`; `cached_tokens` is what the prefill engine found in its prefix cache."""
        end = asyncio.get_running_loop().time() + timeout_s
        session = session or request_id
        if not self.is_serving:
            raise EngineGone(
                f"request {request_id!r}: no engine that prefills, or none that decodes, is there"
            )
        producer = self.peer(self._prefill_of.choose(session, self._serving(self.producers)))
        consumer = self.peer(self._decode_of.choose(session, self._serving(self.consumers)))
        self._prefill_of.in_flight[producer.index] += 1
        self._decode_of.in_flight[consumer.index] += 1
        try:
            prefilling = asyncio.create_task(
                self._prefill(
                    producer, token_ids, request_id, timeout_s, options["cache_salt"], routes_from
                )
            )
            self._prefilling[request_id] = False
            try:
                prefilled, where = await asyncio.shield(prefilling)
            except asyncio.CancelledError:
                self._give_back(
                    producer, consumer, prefilling, token_ids, request_id, options["cache_salt"]
                )
                raise
            finally:
                aborted = self._prefilling.pop(request_id)
            if aborted:
                self._give_back(
                    producer, consumer, prefilling, token_ids, request_id, options["cache_salt"]
                )
                nothing = prefilled.token_ids[:0], prefilled.logprobs[:0], prefilled.versions[:0]
                return Generation(request_id, *nothing, "abort", prefilled.cached_tokens)
            left_s = end - asyncio.get_running_loop().time()
            if left_s <= 0:  # which a connection would take for no limit at all
                self._give_back(
                    producer, consumer, prefilling, token_ids, request_id, options["cache_salt"]
                )
                raise GenerationFailed(
                    f"request {request_id!r}: {producer.client.name} took all {timeout_s:g} s for the prompt; none are left to decode"
                )
            decoding = asyncio.create_task(
                self._decode(
                    producer, consumer, where, token_ids, request_id=request_id, max_tokens=max_tokens, timeout_s=left_s,
                    routes_from=None if routes_from is None else len(token_ids) - 1, **options,
                )
            )  # fmt: skip
            try:
                decoded = await asyncio.shield(decoding)
            except asyncio.CancelledError:
                self._end(consumer, decoding, request_id)
                raise
            return replace(
                decoded,
                cached_tokens=prefilled.cached_tokens,
                routes=(*prefilled.routes, *decoded.routes),
            )
        finally:
            self._prefill_of.in_flight[producer.index] -= 1
            self._decode_of.in_flight[consumer.index] -= 1

    def abort(self, request_ids: Sequence[str]) -> None:
        """Have requests that are being prefilled come to nothing; the decode engines are told by whoever calls this."""
        for request_id in self._prefilling.keys() & set(request_ids):
            self._prefilling[request_id] = True

    async def close(self) -> None:
        """Wait until all blocks are given back, a moment and no longer: a paused engine takes none, and is about to end anyway."""
        if self._behind_us:
            _, left = await asyncio.wait(self._behind_us, timeout=scaled(CLOSE_S))
            for task in left:
                task.cancel()

    def peer(self, index: int) -> Peer:
        """This engine as it is now."""
        return Peer(
            index, self.engines[index], self.handovers[index] if index in self.producers else {}
        )

    def ended(self, index: int) -> None:
        """The process of this engine has ended, for certain: whoever waits for blocks out of it waits in vain, and is told so.

        Never before: Mooncake's producer writes into its reader's blocks, which must not be anybody else's while it may.
        """
        if (
            index not in self.producers
            or (kv_engine_id := self.handovers[index].get("kv_engine_id")) is None
        ):
            return  # a reader of NIXL's sees the connection break
        self.handovers[index] = {}

        async def tell(client: EngineClient) -> None:
            with suppress(
                OrreryError
            ):  # an engine that is lost too reads nothing; another gives up by itself when the lease runs out
                await client.read_no_more(kv_engine_id)

        for consumer in self.consumers:
            self._behind(
                tell(self.engines[consumer]),
                f"tell engine {consumer} that engine {index} has ended",
            )

    def returned(self, index: int, handover: Mapping[str, Any]) -> None:
        """The next incarnation of an engine listens, and has published this of itself."""
        self.ended(index)
        if index in self.producers:
            self.handovers[index] = handover

    def _serving(self, indices: Collection[int]) -> list[int]:
        return [index for index in indices if index in self._admitted]

    def _is_there(self, peer: Peer) -> bool:
        return peer.index in self._admitted and self.engines[peer.index] is peer.client

    async def _prefill(
        self,
        producer: Peer,
        token_ids: Sequence[int] | np.ndarray,
        request_id: str,
        timeout_s: float,
        cache_salt: str,
        routes_from: int | None = None,
    ) -> tuple[Generation, dict[str, Any]]:
        """The prefill engine's answer and what the decode engine needs to find the blocks."""
        client, handover = producer.client, producer.handover
        transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        where: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}
        if handover:  # Mooncake: both are told a name for the transfer
            transfer["transfer_id"] = where["transfer_id"] = f"{request_id}-{uuid.uuid4()}"
            where |= {
                "remote_engine_id": handover["kv_engine_id"],
                "remote_bootstrap_addr": handover["kv_bootstrap"],
            }
        prefilled = await client.generate(
            token_ids, request_id=request_id, max_tokens=1, temperature=0.0, cache_salt=cache_salt, ignore_eos=True,
            timeout_s=timeout_s, kv_transfer=transfer, routes_from=routes_from,
        )  # fmt: skip
        if not handover:
            if prefilled.kv_transfer is None:
                raise GenerationFailed(
                    f"{client.name} did not say where the cache of request {request_id!r} is"
                )
            where = prefilled.kv_transfer
        return prefilled, where

    async def _decode(
        self,
        producer: Peer,
        consumer: Peer,
        where: Mapping[str, Any],
        token_ids: Sequence[int] | np.ndarray,
        **options: Any,
    ) -> Generation:
        """The decode engine's answer. Where that engine is lost, the prefill engine is told to keep the blocks no longer."""
        try:
            for peer in (producer, consumer):
                if not self._is_there(peer):
                    raise EngineGone(
                        f"{peer.client.name} was lost while the cache of request {options['request_id']!r} was handed over"
                    )
            return await consumer.client.generate(token_ids, kv_transfer=where, **options)
        except OrreryError:
            await self._look()
            # Only then: an engine that is there may read them yet, and would take another request's blocks for these.
            if not self._is_there(consumer) and self._is_there(producer):
                self._keep_no_longer(
                    producer.client, str(where.get("transfer_id") or where.get("remote_request_id"))
                )
            raise

    def _keep_no_longer(self, client: EngineClient, name: str) -> None:
        """Have a prefill engine free the blocks that it keeps under this name; without, it would when their lease runs out."""
        names = self._unwanted.setdefault(client, [])
        names.append(name)
        if len(names) > 1:
            return

        async def tell() -> None:
            with suppress(OrreryError):
                await client.keep_no_longer(self._unwanted.pop(client))

        self._behind(tell(), f"{client.name} keeps no longer")

    def _give_back(
        self,
        producer: Peer,
        consumer: Peer,
        prefilling: "asyncio.Task[Any]",
        token_ids: Any,
        request_id: str,
        salt: str,
    ) -> None:
        """Nobody wants this answer any more: have the decode engine read the blocks and sample one token, which frees them everywhere."""

        async def give_back() -> None:
            with suppress(OrreryError):  # an engine that is gone holds nothing
                _, where = await prefilling
                await self._decode(
                    producer, consumer, where, token_ids, request_id=f"{request_id}-given-back", max_tokens=1, temperature=0.0,
                    cache_salt=salt, timeout_s=GIVE_BACK_S,
                )  # fmt: skip

        self._behind(give_back(), f"give back {request_id}")

    def _end(self, consumer: Peer, decoding: "asyncio.Task[Any]", request_id: str) -> None:
        """Abort a request in the decode engine; an abort that comes before the request is ignored there, so it is said until it holds."""

        async def end() -> None:
            while not decoding.done():
                with suppress(OrreryError):
                    await consumer.client.abort([request_id])
                await asyncio.wait({decoding}, timeout=ABORT_AGAIN_S)
            with suppress(OrreryError):
                await decoding

        self._behind(end(), f"end {request_id}")

    def _behind(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._behind_us.add(task)
        task.add_done_callback(self._behind_us.discard)
