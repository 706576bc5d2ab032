"""Tokenise SFT chats shortly before a step trains them.

- Batches follow one permutation an epoch, drawn from (manifest.seed, epoch).
- A thread tokenises the next batch during training. The first KEPT_TOKENS are kept, so a small set
  is tokenised once.
- At start each rank checks about CHECKED_TOKENS of its share.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, SftData
from orrery.tasks.chat import Example, Renderer
from orrery.tasks.task import Role
from orrery.trainer.chats import Chats, open_chats
from orrery.wire.columns import Columns

CHECKED_TOKENS = 2_000_000
CHECKED_AT_ONCE = 64
KEPT_TOKENS = 32_000_000  # of 5 bytes


class Examples:
    """Chats as token columns, with all weight on cross-entropy."""

    def __init__(
        self,
        chats: Chats,
        renderer: Renderer,
        trained_roles: Sequence[Role],
        max_tokens: int,
        max_positions: int,
    ):
        self.chats, self._renderer, self._trained_roles = chats, renderer, trained_roles
        self._max_tokens, self._max_positions = max_tokens, max_positions
        self._kept: dict[int, Example] = {}
        self._num_kept_tokens = 0

    def __len__(self) -> int:
        return len(self.chats)

    def check(self, indices: Sequence[int]) -> None:
        """Tokenise about CHECKED_TOKENS. Raise as `columns`."""
        num_tokens = 0
        for begin in range(0, len(indices), CHECKED_AT_ONCE):
            num_tokens += self.columns(indices[begin : begin + CHECKED_AT_ONCE]).num_tokens
            if num_tokens >= CHECKED_TOKENS:
                return

    def columns(self, indices: Iterable[int]) -> Columns:
        """Tokenise these examples. Raise OrreryError for an untrainable chat."""
        indices = list(indices)
        new = [index for index in dict.fromkeys(indices) if index not in self._kept]
        made = self._tokenise(new)
        tokens = [made[index] if index in made else self._kept[index] for index in indices]
        offsets = np.cumsum([0, *(len(ids) for ids, _ in tokens)], dtype=np.int64)
        token = {
            "token_id": np.concatenate([ids for ids, _ in tokens]),
            "trained": np.concatenate([trained for _, trained in tokens]),
            "rl_weight": np.zeros(offsets[-1], dtype=np.float32),
            "cross_entropy_weight": np.ones(offsets[-1], dtype=np.float32),
        }
        return Columns(offsets, token)

    def _tokenise(self, indices: list[int]) -> dict[int, Example]:
        chats = [self.chats[index] for index in indices]
        rows = [(chat.where, chat.messages, chat.tools) for chat in chats]
        made = self._renderer.examples(rows, self._trained_roles)
        for index, chat, example in zip(indices, chats, made, strict=True):
            num_tokens = len(example[0])
            if num_tokens > self._max_positions:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit model.max_positions "
                    f"{self._max_positions}; cut the chat or leave it out"
                )
            if num_tokens > self._max_tokens:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit "
                    f"trainer.memory.max_tokens_per_micro_batch {self._max_tokens}; "
                    f"raise it or leave the chat out"
                )
            if self._num_kept_tokens + num_tokens <= KEPT_TOKENS:
                self._kept[index] = example
                self._num_kept_tokens += num_tokens
        return dict(zip(indices, made, strict=True))


def load_examples(manifest: Manifest, tokenizer: Path, share: tuple[int, int] = (0, 1)) -> Examples:
    """Open `stages.sft.data`, and check the share (rank, ranks)."""
    examples = open_examples(manifest, manifest.sft.data, "stages.sft.data", tokenizer)
    examples.check(range(share[0], len(examples), share[1]))
    return examples


def open_examples(manifest: Manifest, data: SftData, field: str, tokenizer: Path) -> Examples:
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    limits = manifest.trainer.memory.max_tokens_per_micro_batch, manifest.model.max_positions
    return Examples(open_chats(data, field), renderer, manifest.sft.trained_roles, *limits)


def batches(examples: Examples, manifest: Manifest, num_done: int) -> Iterator[Columns]:
    """Yield batches, without the first `num_done`."""
    spec = manifest.sft
    order = endless_order(len(examples), manifest.seed, num_done * spec.examples_per_batch)
    for _ in range(num_done, spec.num_steps):
        yield examples.columns(islice(order, spec.examples_per_batch))


def endless_order(num_examples: int, seed: int, start: int = 0) -> Iterator[int]:
    """Yield example indices from position `start` on."""
    epoch, begin = divmod(start, num_examples)
    while True:
        yield from map(int, np.random.default_rng([seed, epoch]).permutation(num_examples)[begin:])
        epoch, begin = epoch + 1, 0


@contextmanager
def prefetch(items: Iterator[Columns]) -> Iterator[Callable[[], Columns]]:
    """Yield a function that returns the next item. A thread makes items ahead."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as thread:
        made = thread.submit(next, items)

        def take() -> Columns:
            nonlocal made
            item = made.result()
            made = thread.submit(next, items)
            return item

        yield take
