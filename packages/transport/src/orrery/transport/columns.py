"""Training data as columns: one numpy array a column over the concatenated tokens, plus offsets.

- A sample is one packed document (one rollout, or one SFT example); sample i owns tokens `offsets[i]:offsets[i + 1]`.
- Token columns have shape `[num_tokens, ...]`; sample columns have shape `[num_samples, ...]`.
- The entry of a column at token t speaks of token t itself: `logprob[t]` is log p(token t | the tokens before it), and
  `trained[t]` says that the loss counts it. The first token of a sample has nothing before it and is never trained.
- Columns that `TOKEN_COLUMNS` / `SAMPLE_COLUMNS` name have those dtypes; any other column is opaque and only carried along.
- `routed_experts` is opaque here (`orrery.transport.routed_experts` says what it holds): at token t, what the engine's routers chose while
  t was the input, which is what `logprob[t + 1]` comes from.
- Absent weight columns mean: `rl_weight` 1, `cross_entropy_weight` 0, `reference_kl_weight` 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

TOKEN_COLUMNS = {
    "token_id": np.dtype("int32"),
    "trained": np.dtype("bool"),
    "logprob": np.dtype(
        "float32"
    ),  # the engine's, of the distribution that was sampled from (temperature applied)
    "version": np.dtype(
        "int32"
    ),  # policy version that sampled the token; −1 where no policy did (prompt, tool output)
    "advantage": np.dtype("float32"),
    "rl_weight": np.dtype("float32"),
    "cross_entropy_weight": np.dtype("float32"),
    "reference_kl_weight": np.dtype("float32"),
    "reference_logprob": np.dtype("float32"),
}
SAMPLE_COLUMNS = {
    "temperature": np.dtype("float32"),
    "dispatch_version": np.dtype(
        "int32"
    ),  # policy version when the group was dispatched = its cache salt
    "engine": np.dtype(
        "int32"
    ),  # index of the engine that sampled all of it; −1: unknown or several
    "reward": np.dtype("float32"),
    "group_id": np.dtype("int64"),
    "task_index": np.dtype("int32"),  # position in manifest.tasks.train
}


@dataclass(frozen=True)
class Columns:
    """`num_samples` documents as columns. Treat the arrays as read-only: they may be views of a received frame."""

    offsets: np.ndarray  # int64 [num_samples + 1], offsets[0] == 0
    token: dict[str, np.ndarray] = field(default_factory=dict)
    sample: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if (
            self.offsets.ndim != 1
            or len(self.offsets) < 1
            or self.offsets[0] != 0
            or (np.diff(self.offsets) < 0).any()
        ):
            raise ValueError(f"offsets must rise from 0, got {self.offsets[:8]}…")
        for kind, columns, length, dtypes in (
            ("token", self.token, self.num_tokens, TOKEN_COLUMNS),
            ("sample", self.sample, self.num_samples, SAMPLE_COLUMNS),
        ):
            for name, column in columns.items():
                if len(column) != length:
                    raise ValueError(
                        f"{kind} column {name!r} has {len(column)} rows, expected {length}"
                    )
                if name in dtypes and column.dtype != dtypes[name]:
                    raise ValueError(
                        f"{kind} column {name!r} is {column.dtype}, expected {dtypes[name]}"
                    )

    @property
    def num_samples(self) -> int:
        return len(self.offsets) - 1

    @property
    def num_tokens(self) -> int:
        return int(self.offsets[-1])

    @property
    def lengths(self) -> np.ndarray:
        """Tokens a sample, int64 [num_samples]."""
        return np.diff(self.offsets)

    def select(self, samples: Sequence[int] | np.ndarray) -> "Columns":
        """The given samples, in the given order, copied into new arrays."""
        samples = np.asarray(samples, dtype=np.int64)
        lengths = self.lengths[samples]
        offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
        shift = np.repeat(self.offsets[samples] - offsets[:-1], lengths)
        rows = np.arange(offsets[-1], dtype=np.int64) + shift
        return Columns(
            offsets,
            {name: column[rows] for name, column in self.token.items()},
            {name: column[samples] for name, column in self.sample.items()},
        )

    @classmethod
    def concatenate(cls, parts: Iterable["Columns"]) -> "Columns":
        """All samples of `parts`, in order. Raises ValueError where the parts do not have the same columns."""
        parts = list(parts)
        if not parts:
            return cls(np.zeros(1, dtype=np.int64))
        for part in parts[1:]:
            if (
                part.token.keys() != parts[0].token.keys()
                or part.sample.keys() != parts[0].sample.keys()
            ):
                odd = (part.token.keys() ^ parts[0].token.keys()) | (
                    part.sample.keys() ^ parts[0].sample.keys()
                )
                raise ValueError(f"columns {sorted(odd)} are in some parts only")
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {name: np.concatenate([part.token[name] for part in parts]) for name in parts[0].token},
            {
                name: np.concatenate([part.sample[name] for part in parts])
                for name in parts[0].sample
            },
        )
