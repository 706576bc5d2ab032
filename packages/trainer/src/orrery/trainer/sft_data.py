"""Examples: chats as columns, tokenised when a step needs them, in an order that anybody can compute.

- Batch n takes the n-th run of `examples_per_batch` examples of an endless order: one permutation an epoch, drawn from
  (manifest.seed, epoch). So the position in the data is the number of steps done.
- Tokenised are the examples of the batch that comes next, on a thread of its own, while a batch is trained: data may be larger than memory.
  The first KEPT_TOKENS tokens stay, so that a small set is tokenised once.
- At start, ranks share out CHECKED_TOKENS tokens a rank of examples among them: mistakes of a small set, and most of a large one, are
  found before the first step. Any other is found before the step that would train it.
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
from orrery.transport.columns import Columns

CHECKED_TOKENS = 2_000_000
CHECKED_AT_ONCE = 64
KEPT_TOKENS = 32_000_000  # of 5 bytes


class Examples:
    """Chats as token columns, with all weight on the cross-entropy component; the rest of the trainer sees no difference to RL."""

    def __init__(
        self,
        chats: Chats,
        renderer: Renderer,
        trained_roles: Sequence[Role],
        max_tokens: int,
        max_positions: int,
    ):
        """A chat is refused beyond `max_tokens`, those of a micro-batch, and beyond `max_positions`, those that the model knows."""
        self.chats, self._renderer, self._trained_roles = chats, renderer, trained_roles
        self._max_tokens, self._max_positions = max_tokens, max_positions
        self._kept: dict[int, Example] = {}
        self._num_kept_tokens = 0

    def __len__(self) -> int:
        return len(self.chats)

    def check(self, indices: Sequence[int]) -> None:
        """Tokenise some, up to CHECKED_TOKENS. Raises OrreryError for one that cannot be trained on."""
        num_tokens = 0
        for begin in range(0, len(indices), CHECKED_AT_ONCE):
            num_tokens += self.columns(indices[begin : begin + CHECKED_AT_ONCE]).num_tokens
            if num_tokens >= CHECKED_TOKENS:
                return

    def columns(self, indices: Iterable[int]) -> Columns:
        """These examples, in this order. Raises OrreryError for a chat that cannot be trained on, naming it."""
        indices = list(indices)
        made = self._tokenise(
            [index for index in dict.fromkeys(indices) if index not in self._kept]
        )
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
        made = self._renderer.examples(
            [(chat.where, chat.messages, chat.tools) for chat in chats], self._trained_roles
        )
        for index, chat, example in zip(indices, chats, made, strict=True):
            num_tokens = len(example[0])
            if num_tokens > self._max_positions:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit model.max_positions {self._max_positions}; cut the chat or leave it out"
                )
            if num_tokens > self._max_tokens:
                raise OrreryError(
                    f"{chat.where}: {num_tokens} tokens do not fit trainer.memory.max_tokens_per_micro_batch {self._max_tokens}; "
                    f"raise it or leave the chat out"
                )
            if self._num_kept_tokens + num_tokens <= KEPT_TOKENS:
                self._kept[index] = example
                self._num_kept_tokens += num_tokens
        return dict(zip(indices, made, strict=True))


def load_examples(manifest: Manifest, tokenizer: Path, share: tuple[int, int] = (0, 1)) -> Examples:
    """The examples of `stages.sft.data`, after a look at this rank's of them: `share` is (rank, ranks)."""
    examples = open_examples(manifest, manifest.stages.sft.data, "stages.sft.data", tokenizer)
    examples.check(range(share[0], len(examples), share[1]))
    return examples


def open_examples(manifest: Manifest, data: SftData, field: str, tokenizer: Path) -> Examples:
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    limits = manifest.trainer.memory.max_tokens_per_micro_batch, manifest.model.max_positions
    return Examples(open_chats(data, field), renderer, manifest.stages.sft.trained_roles, *limits)


def batches(examples: Examples, manifest: Manifest, num_done: int) -> Iterator[Columns]:
    """What the steps after the first `num_done` train, one batch a step."""
    spec = manifest.stages.sft
    order = endless_order(len(examples), manifest.seed, num_done * spec.examples_per_batch)
    for _ in range(num_done, spec.num_steps):
        yield examples.columns(islice(order, spec.examples_per_batch))


def endless_order(num_examples: int, seed: int, start: int = 0) -> Iterator[int]:
    """Numbers of examples from position `start` on."""
    epoch, begin = divmod(start, num_examples)
    while True:
        yield from map(int, np.random.default_rng([seed, epoch]).permutation(num_examples)[begin:])
        epoch, begin = epoch + 1, 0


@contextmanager
def prefetch(items: Iterator[Columns]) -> Iterator[Callable[[], Columns]]:
    """A function that gives the next of `items`; the one after it is then made on a thread, and raises where it is asked for."""
    with ThreadPoolExecutor(1, thread_name_prefix="tokenise") as thread:
        made = thread.submit(next, items)

        def take() -> Columns:
            nonlocal made
            item = made.result()
            made = thread.submit(next, items)
            return item

        yield take
