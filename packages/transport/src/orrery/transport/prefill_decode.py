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
"""

import asyncio
import uuid
from collections import OrderedDict
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.observe.deadline import scaled
from orrery.transport.engine import EngineClient, Generation, GenerationFailed

SESSIONS_AT_MOST = 65_536  # that are remembered; an older one is placed anew
GIVE_BACK_S = 60.0
CLOSE_S = 10.0
ABORT_AGAIN_S = 0.5


class Sticky:
    """Which of `num_engines` serves a session."""

    def __init__(self, num_engines: int):
        self.in_flight = [0] * num_engines
        self._homes: OrderedDict[str, int] = OrderedDict()

    def choose(self, session: str) -> int:
        """The engine that had the session before, else the one with fewest requests in flight."""
        home = self._homes.pop(session, None)
        if home is None:
            home = min(range(len(self.in_flight)), key=self.in_flight.__getitem__)
        self._homes[session] = home
        if len(self._homes) > SESSIONS_AT_MOST:
            self._homes.popitem(last=False)
        return home


class PrefillDecode:
    """Generation over engines that prefill and engines that decode."""

    def __init__(self, prefill: Sequence[EngineClient], decode: Sequence[EngineClient], handovers: Sequence[Mapping[str, Any]]):
        """`handovers`: what each prefill engine published of itself (`kv_engine_id` and `kv_bootstrap` with Mooncake, else nothing)."""
        self.prefill, self.decode, self.handovers = prefill, decode, handovers
        self._prefill_of, self._decode_of = Sticky(len(prefill)), Sticky(len(decode))
        self._prefilling: dict[str, bool] = {}  # request id → whether it was aborted meanwhile
        self._giving_back: set[asyncio.Task[None]] = set()

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
        producer, consumer = self._prefill_of.choose(session), self._decode_of.choose(session)
        self._prefill_of.in_flight[producer] += 1
        self._decode_of.in_flight[consumer] += 1
        try:
            prefilling = asyncio.create_task(self._prefill(producer, token_ids, request_id, timeout_s, options["cache_salt"], routes_from))
            self._prefilling[request_id] = False
            try:
                prefilled, where = await asyncio.shield(prefilling)
            except asyncio.CancelledError:
                self._give_back(consumer, prefilling, token_ids, request_id, options["cache_salt"])
                raise
            finally:
                aborted = self._prefilling.pop(request_id)
            if aborted:
                self._give_back(consumer, prefilling, token_ids, request_id, options["cache_salt"])
                nothing = prefilled.token_ids[:0], prefilled.logprobs[:0], prefilled.versions[:0]
                return Generation(request_id, *nothing, "abort", prefilled.cached_tokens)
            left_s = end - asyncio.get_running_loop().time()
            decoding = asyncio.create_task(
                self.decode[consumer].generate(
                    token_ids, request_id=request_id, max_tokens=max_tokens, timeout_s=left_s, kv_transfer=where,
                    routes_from=None if routes_from is None else len(token_ids) - 1, **options,
                )
            )  # fmt: skip
            try:
                decoded = await asyncio.shield(decoding)
            except asyncio.CancelledError:
                self._end(consumer, decoding, request_id)
                raise
            return replace(decoded, cached_tokens=prefilled.cached_tokens, routes=(*prefilled.routes, *decoded.routes))
        finally:
            self._prefill_of.in_flight[producer] -= 1
            self._decode_of.in_flight[consumer] -= 1

    def abort(self, request_ids: Sequence[str]) -> None:
        """Have requests that are being prefilled come to nothing; the decode engines are told by whoever calls this."""
        for request_id in self._prefilling.keys() & set(request_ids):
            self._prefilling[request_id] = True

    async def close(self) -> None:
        """Wait until all blocks are given back, a moment and no longer: a paused engine takes none, and is about to end anyway."""
        if self._giving_back:
            _, left = await asyncio.wait(self._giving_back, timeout=scaled(CLOSE_S))
            for task in left:
                task.cancel()

    async def _prefill(
        self,
        index: int,
        token_ids: Sequence[int] | np.ndarray,
        request_id: str,
        timeout_s: float,
        cache_salt: str,
        routes_from: int | None = None,
    ) -> tuple[Generation, dict[str, Any]]:
        """The prefill engine's answer and what the decode engine needs to find the blocks."""
        handover = self.handovers[index]
        transfer: dict[str, Any] = {"do_remote_decode": True, "do_remote_prefill": False}
        where: dict[str, Any] = {"do_remote_decode": False, "do_remote_prefill": True}
        if handover:  # Mooncake: both are told a name for the transfer
            transfer["transfer_id"] = where["transfer_id"] = f"{request_id}-{uuid.uuid4()}"
            where |= {"remote_engine_id": handover["kv_engine_id"], "remote_bootstrap_addr": handover["kv_bootstrap"]}
        prefilled = await self.prefill[index].generate(
            token_ids, request_id=request_id, max_tokens=1, temperature=0.0, cache_salt=cache_salt, ignore_eos=True,
            timeout_s=timeout_s, kv_transfer=transfer, routes_from=routes_from,
        )  # fmt: skip
        if not handover:
            if prefilled.kv_transfer is None:
                raise GenerationFailed(f"{self.prefill[index].name} did not say where the cache of request {request_id!r} is")
            where = prefilled.kv_transfer
        return prefilled, where

    def _give_back(self, consumer: int, prefilling: "asyncio.Task[Any]", token_ids: Any, request_id: str, salt: str) -> None:
        """Nobody wants this answer any more: have the decode engine read the blocks and sample one token, which frees them everywhere."""

        async def give_back() -> None:
            with suppress(OrreryError):  # an engine that is gone holds nothing
                _, where = await prefilling
                await self.decode[consumer].generate(
                    token_ids, request_id=f"{request_id}-given-back", max_tokens=1, temperature=0.0, cache_salt=salt,
                    timeout_s=GIVE_BACK_S, kv_transfer=where,
                )  # fmt: skip

        self._behind(give_back(), f"give back {request_id}")

    def _end(self, consumer: int, decoding: "asyncio.Task[Any]", request_id: str) -> None:
        """Abort a request in the decode engine; an abort that comes before the request is ignored there, so it is said until it holds."""

        async def end() -> None:
            with suppress(OrreryError):
                while not decoding.done():
                    await self.decode[consumer].abort([request_id])
                    await asyncio.wait({decoding}, timeout=ABORT_AGAIN_S)
                await decoding

        self._behind(end(), f"end {request_id}")

    def _behind(self, coroutine: Coroutine[Any, Any, None], name: str) -> None:
        task = asyncio.create_task(coroutine, name=name)
        self._giving_back.add(task)
        task.add_done_callback(self._giving_back.discard)
