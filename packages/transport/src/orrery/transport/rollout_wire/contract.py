"""What every rollout wire carries and does; `rollout_wire/__init__.py` has the protocol in words."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from orrery.manifest.errors import OrreryError
from orrery.transport.column_bytes import MicroBatch
from orrery.transport.columns import Columns


@dataclass(frozen=True)
class Batch:
    """One optimizer step's data. `totals` (counts for the loss) and `info` hold JSON values and reach every rank.

    `micro_batches` is `[rank][micro_step]`; each rank's sequence may be lazy (`packing.LazyMicroBatches`), is read by
    index, possibly twice, and has the same length on all ranks. Its arrays must not change until the batch is acknowledged.
    Ranks that need the same micro-batches may share one sequence; each of them acknowledges for itself.
    """

    step: int
    micro_batches: Sequence[Sequence[MicroBatch]]
    totals: dict[str, int | float] = field(default_factory=dict)
    info: dict[str, Any] = field(default_factory=dict)

    def check(self, num_ranks: int, after_step: int | None) -> None:
        """Raises `OrreryError` where the wire cannot take this batch."""
        counts = [len(of_rank) for of_rank in self.micro_batches]
        if len(counts) != num_ranks or len(set(counts)) != 1:
            raise OrreryError(
                f"batch {self.step}: micro-batches a rank {counts}; expected {num_ranks} ranks with equal counts"
            )
        if after_step is not None and self.step <= after_step:
            raise OrreryError(
                f"batch {self.step}: the wire already took batch {after_step}; steps only rise"
            )


@dataclass(frozen=True)
class ReceivedBatch:
    """One rank's share of a batch. Iterate over it once: micro-batches arrive as they are asked for."""

    step: int
    rank: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]
    micro_batches: Iterator[Columns]

    def __iter__(self) -> Iterator[Columns]:
        return self.micro_batches


class RolloutSender(Protocol):
    """The orchestrator's end; asyncio, one event loop."""

    url: str

    async def send(self, batch: Batch) -> None:
        """Take the batch over; waits while an earlier batch is unacknowledged by some rank."""

    async def wanted(self, at_least: int = -1) -> int:
        """The newest step that any rank has asked for (−1: none yet), once it is `at_least` that."""

    async def drained(self, deadline_s: float | None) -> None:
        """Returns when all ranks have acknowledged everything; `RunFailed` after `deadline_s`, or never where it is None."""

    def close(self) -> None:
        """Stop serving; what is unacknowledged is dropped."""


class RolloutReceiver(Protocol):
    """A trainer rank's end; synchronous."""

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        """This rank's share of batch `step`. `RunFailed` when nothing arrives for `deadline_s`, here or between micro-batches."""

    def close(self) -> None: ...
