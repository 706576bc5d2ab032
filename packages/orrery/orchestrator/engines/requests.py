"""Decide which calls share an engine request, and which data-parallel rank gets it.

- `SharedRequests` saves CPU time: calls with equal `share` in one pass of the event loop become one
  request, aborted once no call waits for it.
- `EngineChoice` chooses the rank with the lowest load, including the new request. Load: uncached
  prompt tokens of requests in flight. A rank's cache is estimated from its requests.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.messages import Generation

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 20

TokenIds = Sequence[int] | np.ndarray
Sample = asyncio.Future[Generation]


@dataclass
class _Request:
    token_ids: TokenIds
    options: dict[str, Any]
    calls: list[tuple[str, Sample]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        first = self.calls[0][0]
        return first if len(self.calls) == 1 else f"{first}+{len(self.calls) - 1}"

    @property
    def is_wanted(self) -> bool:
        return not all(sample.done() for _, sample in self.calls)

    def deliver(self, generation: Generation) -> None:
        _, sample = self.calls[generation.sample]
        if not sample.done():
            sample.set_result(generation)

    def fail(self, error: BaseException) -> None:
        for _, sample in self.calls:
            if not sample.done():
                sample.set_exception(error)


class SharedRequests:
    def __init__(
        self,
        generate_each: Callable[..., Awaitable[None]],
        abort: Callable[[list[str]], Awaitable[None]],
        max_samples: int,
    ):
        self._generate_each, self._abort, self._max_samples = generate_each, abort, max_samples
        self._open: dict[str, _Request] = {}

    async def generate(
        self, share: str, token_ids: TokenIds, *, request_id: str, **options: Any
    ) -> Generation:
        request, loop = self._open.get(share), asyncio.get_running_loop()
        if request is None or len(request.calls) == self._max_samples:
            request = self._open[share] = _Request(token_ids, options)
            loop.call_soon(self._close, share, request)
        sample: Sample = loop.create_future()
        request.calls.append((request_id, sample))
        try:
            return await sample
        except asyncio.CancelledError:
            sending = request.sending
            if sending is not None and not request.is_wanted:
                request.sending = None  # so that other cancelled calls do not abort again
                sending.cancel()
                if len(request.calls) > 1:  # a single call's caller aborts the request
                    with suppress(OrreryError):
                        await asyncio.shield(self._abort([request.name]))
            raise

    def _close(self, share: str, request: _Request) -> None:
        if self._open.get(share) is request:
            del self._open[share]
        request.calls = [call for call in request.calls if not call[1].done()]
        if request.calls:
            request.sending = asyncio.ensure_future(self._send(request))

    async def _send(self, request: _Request) -> None:
        num_samples, options = len(request.calls), request.options
        try:
            await self._generate_each(
                request.token_ids, num_samples, request.deliver, request_id=request.name, **options
            )
        except BaseException as error:
            request.fail(error)
            if not isinstance(error, Exception):
                raise


class Address(NamedTuple):
    engine: int
    rank: int


class Chosen(NamedTuple):
    address: Address
    cached_tokens: int


class EngineChoice:
    def __init__(self, num_ranks: Sequence[int], is_decoding: bool = False):
        """If `is_decoding`, count cached tokens as load, because each decoding step reads them."""
        self.addresses = [Address(e, r) for e, ranks in enumerate(num_ranks) for r in range(ranks)]
        self.owed_tokens = [0] * len(self.addresses)
        self._is_decoding = is_decoding
        self._holders: OrderedDict[int, int] = OrderedDict()  # block hash → bit set of ranks

    @contextmanager
    def using(self, token_ids: TokenIds, salt: str, among: Collection[int]) -> Iterator[Chosen]:
        """Choose a rank. In the `with` body, its load includes the request."""
        blocks = _blocks(token_ids, salt)
        cached = self._cached_tokens(blocks)
        lacking = [len(token_ids) - tokens for tokens in cached]
        places = (i for i, address in enumerate(self.addresses) if address.engine in among)
        place = min(places, key=lambda i: (lacking[i] + self.owed_tokens[i], lacking[i]))
        owed = len(token_ids) if self._is_decoding else lacking[place]
        self.owed_tokens[place] += owed
        self._hold(blocks, place)
        try:
            yield Chosen(self.addresses[place], cached[place])
        finally:
            self.owed_tokens[place] -= owed

    def cached_tokens(self, token_ids: TokenIds, salt: str, address: Address) -> int:
        return self._cached_tokens(_blocks(token_ids, salt))[self.addresses.index(address)]

    def holds(self, token_ids: TokenIds, salt: str, address: Address) -> None:
        self._hold(_blocks(token_ids, salt), self.addresses.index(address))

    def forget(self, engine: int) -> None:
        lost = sum(1 << i for i, address in enumerate(self.addresses) if address.engine == engine)
        for block, holders in self._holders.items():
            self._holders[block] = holders & ~lost

    def _cached_tokens(self, blocks: list[int]) -> list[int]:
        found, left = [0] * len(self.addresses), (1 << len(self.addresses)) - 1
        for number, block in enumerate(blocks, 1):
            left &= self._holders.get(block, 0)
            if not left:
                break
            for place in range(len(found)):
                if left >> place & 1:
                    found[place] = number * BLOCK_TOKENS
        return found

    def _hold(self, blocks: list[int], place: int) -> None:
        for block in blocks:
            self._holders[block] = self._holders.pop(block, 0) | 1 << place
        while len(self._holders) > MAX_BLOCKS:
            self._holders.popitem(last=False)


def _blocks(token_ids: TokenIds, salt: str) -> list[int]:
    """Return each whole block's hash of the salt and all tokens up to its end."""
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    key, keys = hash(salt), []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tokens[start : start + BLOCK_TOKENS].tobytes()))
        keys.append(key)
    return keys
