"""Documents to send and store, and what it means that two batches are the same."""

import numpy as np

from orrery.wire.columns import Columns


def documents(lengths, seed=0, opaque=3):
    """One single-sample Columns a length, with a column of every kind."""
    rng = np.random.default_rng(seed)
    return [
        Columns(
            np.array([0, n]),
            {
                "token_id": rng.integers(0, 1000, n, dtype=np.int32),
                "trained": rng.random(n) < 0.5,
                "logprob": rng.standard_normal(n).astype(np.float32),
                "routed_experts": rng.integers(0, 256, (n, opaque, 2), dtype=np.uint8),
            },
            {"group_id": np.array([i], np.int64), "reward": rng.random(1).astype(np.float32)},
        )
        for i, n in enumerate(lengths)
    ]


def same(left: Columns, right: Columns) -> bool:
    return (
        np.array_equal(left.offsets, right.offsets)
        and left.token.keys() == right.token.keys()
        and left.sample.keys() == right.sample.keys()
        and all(
            np.array_equal(left.token[n], right.token[n])
            and left.token[n].dtype == right.token[n].dtype
            for n in left.token
        )
        and all(np.array_equal(left.sample[n], right.sample[n]) for n in left.sample)
    )
