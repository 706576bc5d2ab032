"""The interface of every rollout wire. `rollout_wire/__init__.py` has the protocol."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.wire.columns import Columns, MicroBatch
from orrery.wire.control_socket import ControlSocket


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data.

    - `micro_batches` is `[rank][micro_step]`, equally long on all ranks. A rank's sequence may be
      lazy or shared, and the wire may read an index twice. Arrays must not change until the batch
      is acknowledged.
    - `totals` (the loss's token counts) and `info` hold JSON values. Every rank receives both.
    """

    step: int
    micro_batches: Sequence[Sequence[MicroBatch]]
    totals: dict[str, int | float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, num_ranks: int, after_step: int | None) -> None:
        counts = [len(of_rank) for of_rank in self.micro_batches]
        if len(counts) != num_ranks or len(set(counts)) != 1:
            raise OrreryError(
                f"batch {self.step}: the ranks have {counts} micro-batches; "
                f"expected {num_ranks} ranks with equal counts"
            )
        if after_step is not None and self.step <= after_step:
            raise OrreryError(
                f"batch {self.step}: the wire already took batch {after_step}; steps only rise"
            )


@dataclass(frozen=True)
class ReceivedBatch:
    """One rank's share of a batch. Iterate once: micro-batches are fetched on demand."""

    step: int
    rank: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]
    micro_batches: Iterator[Columns]

    def __iter__(self) -> Iterator[Columns]:
        return self.micro_batches


class RolloutSender(Protocol):
    """The orchestrator's end, in one event loop."""

    url: str

    @property
    def control(self) -> ControlSocket:
        """The socket to the trainer, which also carries leases of weights."""
        ...

    async def send(self, batch: Batch) -> None:
        """Send the batch in the background. Wait while `keep` batches are unacknowledged."""

    async def wanted(self, at_least: int = -1) -> int:
        """Wait until a rank asks for step `at_least` or later. Return the newest step asked for."""

    async def drained(self, deadline_s: float | None) -> None:
        """Wait for all acknowledgements. Raises RunFailed after `deadline_s` (None: never)."""

    def close(self) -> None:
        pass


class RolloutReceiver(Protocol):
    """A trainer rank's end. Synchronous."""

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        """Return this rank's share of batch `step`.

        Raises RunFailed if no data arrives for `deadline_s`, now or between two micro-batches.
        """

    def close(self) -> None: ...


def not_drained(deadline_s: float | None, missing: Mapping[int, set[int]]) -> RunFailed:
    """Return the error of `drained`. `missing` maps a step to the ranks that lack it."""
    late = "; ".join(
        f"batch {step} by trainer rank {', '.join(map(str, sorted(ranks)))}"
        for step, ranks in missing.items()
    )
    return RunFailed(
        f"rollout wire: waited {deadline_s:g} s for batches to be received: {late}. "
        "Read logs/trainer.*.log"
    )
