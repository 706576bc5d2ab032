"""Choose the data-parallel rank with the lowest cost for a request.

- Cost: prompt tokens that the rank must compute, for this request and the rank's requests in
  flight.
- Cache contents are estimated from the requests sent to each rank.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np

BLOCK_TOKENS = 64
MAX_BLOCKS = 1 << 20

TokenIds = Sequence[int] | np.ndarray


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
        """Choose a rank. In the `with` body, the rank's load includes the request."""
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
    """Return one hash per whole block, over the salt and all tokens up to the block's end."""
    tokens = np.ascontiguousarray(token_ids, dtype=np.int32)
    key, keys = hash(salt), []
    for start in range(0, len(tokens) - BLOCK_TOKENS + 1, BLOCK_TOKENS):
        key = hash((key, tokens[start : start + BLOCK_TOKENS].tobytes()))
        keys.append(key)
    return keys
