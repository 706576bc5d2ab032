"""Train and held-out problems that cannot meet: the text of a problem itself says on which side it stands.

- A text is held out iff the first byte of its BLAKE2b digest is below 32 (one text of eight), whatever the seed.
- A task draws until the text stands on the side that its `split` argument names.
"""

import hashlib
import random
from collections.abc import Callable
from typing import Literal

from orrery.manifest.errors import OrreryError

Split = Literal["train", "held_out"]

MAX_DRAWS = 10_000


def split_of(text: str) -> Split:
    """The side on which `text` stands."""
    return "held_out" if hashlib.blake2b(text.encode()).digest()[0] < 32 else "train"


def draw(
    split: Split, kind: str, seed: int, index: int, sample: Callable[[random.Random], str]
) -> str:
    """The first text of `sample` that stands in `split`; a pure function of (split, kind, seed, index)."""
    rng = random.Random(f"{kind}/{seed}/{index}")
    for _ in range(MAX_DRAWS):
        text = sample(rng)
        if split_of(text) == split:
            return text
    raise OrreryError(
        f"task {kind}: no {split} text in {MAX_DRAWS} draws; the args allow too few texts: widen the lengths or the alphabet"
    )
