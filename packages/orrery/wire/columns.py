"""Training data as columns: one numpy array per column over all tokens, plus the samples' offsets.

- A sample is one document (a rollout or an SFT example) with tokens
  `offsets[i]:offsets[i + 1]`.
- Token columns have shape `[num_tokens, ...]`, sample columns `[num_samples, ...]`.
- Entry t describes token t: `logprob[t]` is log p(token t | earlier tokens), `trained[t]` says that
  the loss counts it. A sample's first token is never trained.
- `TOKEN_COLUMNS` and `SAMPLE_COLUMNS` fix the dtypes. Other columns have any dtype. Row t of
  `routed_experts` has the experts that computed `logprob[t + 1]`.
- Absent weights have defaults: `rl_weight` 1, `cross_entropy_weight` 0, `reference_kl_weight` 0.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

TOKEN_COLUMNS = {
    "token_id": np.dtype("int32"),
    "trained": np.dtype("bool"),
    "logprob": np.dtype("float32"),  # by the engine, at the sampling temperature
    "version": np.dtype("int32"),  # policy version that sampled the token, or −1
    "advantage": np.dtype("float32"),
    "rl_weight": np.dtype("float32"),
    "cross_entropy_weight": np.dtype("float32"),
    "reference_kl_weight": np.dtype("float32"),
    "reference_logprob": np.dtype("float32"),
}
SAMPLE_COLUMNS = {
    "temperature": np.dtype("float32"),
    "dispatch_version": np.dtype("int32"),  # version at the group's dispatch, the cache salt
    "engine": np.dtype("int32"),  # index of the sampling engine, −1 if unknown or several
    "reward": np.dtype("float32"),
    "group_id": np.dtype("int64"),
    "task_index": np.dtype("int32"),  # position in manifest.tasks.train
}


@dataclass(frozen=True)
class Columns:
    """The columns of `num_samples` documents. Arrays are read-only and may be views of a buffer."""

    offsets: np.ndarray  # int64 [num_samples + 1], offsets[0] == 0
    token: dict[str, np.ndarray] = field(default_factory=dict)
    sample: dict[str, np.ndarray] = field(default_factory=dict)

    def __post_init__(self) -> None:
        offsets = self.offsets
        is_list = offsets.ndim == 1 and len(offsets) >= 1
        if not is_list or offsets[0] != 0 or (np.diff(offsets) < 0).any():
            raise ValueError(f"offsets must rise from 0, got {offsets[:8]}…")
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
        """Number of tokens of each sample, int64 [num_samples]."""
        return np.diff(self.offsets)

    def select(self, samples: Sequence[int] | np.ndarray) -> "Columns":
        """Return copies of the samples, in the given order."""
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
        """Return all samples of `parts`, in order. Raises ValueError if their columns differ."""
        parts = list(parts)
        if not parts:
            return cls(np.zeros(1, dtype=np.int64))
        token, sample = parts[0].token, parts[0].sample
        for part in parts[1:]:
            odd = (part.token.keys() ^ token.keys()) | (part.sample.keys() ^ sample.keys())
            if odd:
                raise ValueError(f"columns {sorted(odd)} are in some parts only")
        lengths = np.concatenate([part.lengths for part in parts])
        return cls(
            np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
            {name: np.concatenate([part.token[name] for part in parts]) for name in token},
            {name: np.concatenate([part.sample[name] for part in parts]) for name in sample},
        )
