"""Disaggregated prefill: one engine computes the prompt's KV cache, another reads it and samples.

    prompt ──▶ prefill engine: whole prompt, one discarded token ──▶ address of its KV blocks
    prompt, address ──▶ decode engine: reads the blocks, recomputes the last token, samples

- The prompt's KV cache may be of an older policy version than the sampled tokens. `cache_salt`
  names the oldest version allowed.
- A router would drop request ids and credentials, so none is used.
- A decode engine also reads the KV blocks of a cancelled prefill, because reading frees them.
"""

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Collection, Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.client import EngineClient
from orrery.orchestrator.engines.messages import EngineGone, Generation, GenerationFailed
from orrery.orchestrator.engines.requests import Address, Chosen, EngineChoice, TokenIds
from orrery.runtime.timing import scaled

# Salt suffixes: ARRIVED for blocks of ended requests, COMPUTED for blocks computed locally.
ARRIVED, COMPUTED = " arrived", " computed"
GIVE_BACK_S = 60.0
CLOSE_S = 10.0
ABORT_AGAIN_S = 0.5


@dataclass(frozen=True)
class Peer:
    address: Address
    client: EngineClient
    handover: Mapping[str, Any]

    @property
    def index(self) -> int:
        return self.address.engine

    def at_rank(self, choice: EngineChoice) -> dict[str, int]:
        is_wide = any(each.rank for each in choice.addresses if each.engine == self.index)
        return {"rank": self.address.rank} if is_wide else {}


async def _do_not_look() -> None:
    pass


class DisaggregatedEngines:
    def __init__(
        self,
        engines: Sequence[EngineClient],
        handovers: Sequence[Mapping[str, Any]],
        admitted: Collection[int] | None = None,
        look: Callable[[], Awaitable[None]] = _do_not_look,
        num_ranks: Sequence[int] = (),
        max_local_prefill_tokens: int = 0,
    ):
        """Keep references to `engines` and `admitted`, which the pool changes.

        - `engines`: prefill engines, in the order of `handovers`, then decode engines.
        - `handovers`: each prefill engine's `kv_engine_id` and `kv_bootstrap`, but {} with NIXL.
        """
        self.engines, self.handovers = engines, list(handovers)
        self._admitted = range(len(engines)) if admitted is None else admitted
        self._look, self._max_local_tokens = look, max_local_prefill_tokens
        self.producers, self.consumers = range(len(handovers)), range(len(handovers), len(engines))
        ranks = num_ranks or [1] * len(engines)
        self._prefill_of = EngineChoice(ranks)
        self._decode_of = EngineChoice(ranks, is_decoding=True)
        self._prompts: dict[Any, asyncio.Future[None]] = {}
        self._prefilling: dict[str, bool] = {}
        self._unwanted: dict[EngineClient, list[str]] = {}  # ids of unread blocks, to be freed
        self._background: set[asyncio.Task[None]] = set()

    @property
    def is_serving(self) -> bool:
        return bool(self._serving(self.producers) and self._serving(self.consumers))

    async def generate(
        self,
        token_ids: TokenIds,
        *,
        request_id: str,
        max_tokens: int,
        session: str | None = None,
        routes_from: int | None = None,
        timeout_s: float = 600.0,
        **options: Any,
    ) -> Generation:
        """Run `EngineClient.generate` on two engines, or on one that caches most of the prompt.

        `cached_tokens` is counted where the prompt is computed. `session` is ignored.
        """
        if not self.is_serving:
            raise EngineGone(
                f"request {request_id!r}: no prefill engine or no decode engine is left"
            )
        options |= {"request_id": request_id, "max_tokens": max_tokens}
        salt, prompt = options["cache_salt"], np.asarray(token_ids)
        with self._decode_of.using(prompt, salt, self._serving(self.consumers)) as decode:
            consumer = self.peer(decode.address)
            if self._is_local(prompt, salt, decode, routes_from):
                options |= consumer.at_rank(self._decode_of)
                limits = {"routes_from": routes_from, "timeout_s": timeout_s}
                found = await consumer.client.generate(token_ids, **options, **limits)
            else:
                with self._prefill_of.using(prompt, salt, self._serving(self.producers)) as prefill:
                    peers = self.peer(prefill.address), consumer
                    found = await self._generate(*peers, token_ids, routes_from, timeout_s, options)
        # The last sampled token is not cached.
        tokens = np.append(prompt, found.token_ids[:-1])
        for record in (salt, salt + ARRIVED):
            self._decode_of.holds(tokens, record, decode.address)
        return found

    def _is_local(
        self, prompt: np.ndarray, salt: str, decode: Chosen, routes_from: int | None
    ) -> bool:
        """Return whether the decode engine computes the prompt's uncached tokens.

        Return False if the request needs routed experts of tokens that a prefill engine computed,
        because the decode engine lacks them.
        """
        if not self._max_local_tokens:
            return False
        address, cached = decode
        arrived, computed = (
            self._decode_of.cached_tokens(prompt, salt + kind, address)
            for kind in (ARRIVED, COMPUTED)
        )
        if len(prompt) - arrived > self._max_local_tokens:
            return False
        if routes_from is not None and cached > max(routes_from, computed):
            return False
        if cached <= computed:
            self._decode_of.holds(prompt, salt + COMPUTED, address)
        return True

    async def _generate(
        self,
        producer: Peer,
        consumer: Peer,
        token_ids: TokenIds,
        routes_from: int | None,
        timeout_s: float,
        options: dict[str, Any],
    ) -> Generation:
        end = asyncio.get_running_loop().time() + timeout_s
        request_id, salt = options["request_id"], options["cache_salt"]
        prefilling = asyncio.create_task(
            self._prefill(producer, token_ids, request_id, timeout_s, salt, routes_from)
        )
        self._prefilling[request_id] = False
        try:
            prefilled, where = await asyncio.shield(prefilling)
        except asyncio.CancelledError:
            self._give_back(producer, consumer, prefilling, token_ids, request_id, salt)
            raise
        finally:
            aborted = self._prefilling.pop(request_id)
        if aborted:
            self._give_back(producer, consumer, prefilling, token_ids, request_id, salt)
            empty = prefilled.token_ids[:0], prefilled.logprobs[:0], prefilled.versions[:0]
            return Generation(request_id, *empty, "abort", prefilled.cached_tokens)
        left_s = end - asyncio.get_running_loop().time()
        if left_s <= 0:  # aiohttp takes a timeout of 0 as no limit
            self._give_back(producer, consumer, prefilling, token_ids, request_id, salt)
            raise GenerationFailed(
                f"request {request_id!r}: {producer.client.name} used all {timeout_s:g} s for the "
                "prompt, so no time is left to decode"
            )
        options["routes_from"] = None if routes_from is None else len(token_ids) - 1
        decoding = asyncio.create_task(
            self._decode(producer, consumer, where, token_ids, timeout_s=left_s, **options)
        )
        try:
            decoded = await asyncio.shield(decoding)
        except asyncio.CancelledError:
            self._abort_decode(consumer, decoding, request_id)
            raise
        routes = (*prefilled.routes, *decoded.routes)
        return replace(decoded, cached_tokens=prefilled.cached_tokens, routes=routes)

    def abort(self, request_ids: Sequence[str]) -> None:
        """End requests after their prefill. The caller aborts requests in decode engines."""
        for request_id in self._prefilling.keys() & set(request_ids):
            self._prefilling[request_id] = True

    async def close(self) -> None:
        if self._background:
            _, left = await asyncio.wait(self._background, timeout=scaled(CLOSE_S))
            for task in left:
                task.cancel()

    def peer(self, address: Address) -> Peer:
        index = address.engine
        handover = self.handovers[index] if index in self.producers else {}
        return Peer(address, self.engines[index], handover)

    def ended(self, index: int) -> None:
        """Tell the decode engines that a Mooncake prefill engine's process has ended.

        Until then, they reserve the blocks that it might write.
        """
        if index not in self.producers:
            return
        kv_engine_id = self.handovers[index].get("kv_engine_id")
        if kv_engine_id is None:
            return
        self.handovers[index] = {}

        async def tell(client: EngineClient) -> None:
            with suppress(OrreryError):
                await client.read_no_more(kv_engine_id)

        for consumer in self.consumers:
            name = f"tell engine {consumer} that engine {index} has ended"
            self._run_in_background(tell(self.engines[consumer]), name)

    def returned(self, index: int, handover: Mapping[str, Any]) -> None:
        self.ended(index)
        for choice in (self._prefill_of, self._decode_of):
            choice.forget(index)
        if index in self.producers:
            self.handovers[index] = handover

    def _serving(self, indices: Collection[int]) -> list[int]:
        return [index for index in indices if index in self._admitted]

    def _is_up(self, peer: Peer) -> bool:
        return peer.index in self._admitted and self.engines[peer.index] is peer.client

    async def _prefill(
        self,
        producer: Peer,
        token_ids: TokenIds,
        request_id: str,
        timeout_s: float,
        cache_salt: str,
        routes_from: int | None = None,
    ) -> tuple[Generation, dict[str, Any]]:
        client, handover = producer.client, producer.handover
        transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        where: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}
        if handover:  # with Mooncake, but not with NIXL
            transfer["transfer_id"] = where["transfer_id"] = f"{request_id}-{uuid.uuid4()}"
            where["remote_engine_id"] = handover["kv_engine_id"]
            where["remote_bootstrap_addr"] = handover["kv_bootstrap"]
        prefilled = await self._once_computed(
            (producer.address, cache_salt, np.asarray(token_ids).tobytes()),
            client.generate,
            token_ids,
            request_id=request_id,
            max_tokens=1,
            temperature=0.0,
            cache_salt=cache_salt,
            ignore_eos=True,
            timeout_s=timeout_s,
            kv_transfer=transfer,
            routes_from=routes_from,
            **producer.at_rank(self._prefill_of),
        )
        if handover:
            return prefilled, where
        if prefilled.kv_transfer is None:
            raise GenerationFailed(
                f"{client.name} gave no KV cache address for request {request_id!r}"
            )
        return prefilled, prefilled.kv_transfer

    async def _once_computed(
        self, key: Any, generate: Callable[..., Awaitable[Generation]], *args: Any, **options: Any
    ) -> Generation:
        """Call `generate` after any running call with this `key`, to hit the prefix cache."""
        if (first := self._prompts.get(key)) is not None:
            await asyncio.wait({first})
            return await generate(*args, **options)
        first = self._prompts[key] = asyncio.get_running_loop().create_future()
        try:
            return await generate(*args, **options)
        finally:
            del self._prompts[key]
            first.set_result(None)

    async def _decode(
        self,
        producer: Peer,
        consumer: Peer,
        where: Mapping[str, Any],
        token_ids: TokenIds,
        **options: Any,
    ) -> Generation:
        """Return the decode engine's answer. If it is lost, free the prompt's KV blocks."""
        try:
            for peer in (producer, consumer):
                if not self._is_up(peer):
                    raise EngineGone(
                        f"{peer.client.name} was lost while the cache of request "
                        f"{options['request_id']!r} was handed over"
                    )
            options |= consumer.at_rank(self._decode_of)
            return await consumer.client.generate(token_ids, kv_transfer=where, **options)
        except OrreryError:
            await self._look()
            if not self._is_up(consumer) and self._is_up(producer):
                name = str(where.get("transfer_id") or where.get("remote_request_id"))
                self._keep_no_longer(producer.client, name)
            raise

    def _keep_no_longer(self, client: EngineClient, name: str) -> None:
        names = self._unwanted.setdefault(client, [])
        names.append(name)
        if len(names) > 1:
            return

        async def tell() -> None:
            with suppress(OrreryError):
                await client.keep_no_longer(self._unwanted.pop(client))

        self._run_in_background(tell(), f"{client.name} keeps no longer")

    def _give_back(
        self,
        producer: Peer,
        consumer: Peer,
        prefilling: "asyncio.Task[Any]",
        token_ids: TokenIds,
        request_id: str,
        salt: str,
    ) -> None:
        options = {
            "request_id": f"{request_id}-given-back",
            "max_tokens": 1,
            "temperature": 0.0,
            "cache_salt": salt,
            "timeout_s": GIVE_BACK_S,
        }

        async def give_back() -> None:
            with suppress(OrreryError):
                _, where = await prefilling
                await self._decode(producer, consumer, where, token_ids, **options)

        self._run_in_background(give_back(), f"give back {request_id}")

    def _abort_decode(self, consumer: Peer, decoding: "asyncio.Task[Any]", request_id: str) -> None:
        """Repeat the abort until the request ends, because an abort may overtake the request."""

        async def abort() -> None:
            while not decoding.done():
                with suppress(OrreryError):
                    await consumer.client.abort([request_id])
                await asyncio.wait({decoding}, timeout=ABORT_AGAIN_S)
            with suppress(OrreryError):
                await decoding

        self._run_in_background(abort(), f"end {request_id}")

    def _run_in_background(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._background.add(task)
        task.add_done_callback(self._background.discard)
