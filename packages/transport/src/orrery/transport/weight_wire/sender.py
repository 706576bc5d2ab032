"""A direct wire, trainer's end: every rank sends the slices that it owns, from the weights that it trains.

- `publish` fingerprints this rank's own part, in the dtype that it travels in, and rank 0 makes the version known. Nothing is sent yet.
- A thread sends while the trainer waits for its next batch, or works on it: until the optimizer steps the weights stand still. `settle`,
  called just before the step, takes the version away and waits until whoever has claimed it has it.
- Beside its shards a rank holds two buckets, and never a whole tensor that is not its own.
- A take begins only while its version is open: from `publish` until `settle` has found that nobody has a claim to it. Both are decided
  under one lock, so no take that comes late reads weights that change.
- A take that fails (an engine has died, a deadline has passed) is over with a sentence, and its group is given up; its claim holds the
  version for another take without that engine. Rank 0 raises what fails on the trainer's own side at the next `publish` or `settle`.
"""

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np
import torch

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.observe.deadline import scaled
from orrery.transport.fingerprint import MASK, digest
from orrery.transport.weight_wire import coordinator
from orrery.transport.weight_wire.buckets import (
    Copy,
    HeldTensor,
    RankFingerprints,
    allocate,
    fill,
    joined,
)
from orrery.transport.weight_wire.coordinator import (
    Coordinator,
    PartTimer,
    StoreConnection,
    TransferOrder,
    TransferResult,
)
from orrery.transport.weight_wire.leases import (
    GONE,
    Published,
    Transfer,
    WireFailed,
    is_leased,
    open_leases,
    transfer_path,
)
from orrery.transport.weight_wire.links import SenderLink, make_sender_link
from orrery.transport.weight_wire.plan import (
    Holding,
    Location,
    Member,
    SliceMessage,
    TensorInfo,
    TransferPlan,
)

BUCKET_BYTES = 1 << 28
SETTLE_S = 600.0  # for what was claimed to be sent: longer than an engine that hangs in a take is waited for

Report = Callable[[int, str, dict[str, float]], None]


class WeightSender:
    """One trainer rank's end."""

    def __init__(
        self,
        kind: str,
        folder: Path,
        host: str,
        rank: int,
        num_ranks: int,
        device: torch.device,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        """Rank 0 opens the wire at `host`, in `folder`, which must be there and its own."""
        self.folder, self.rank, self.num_ranks, self.device = folder, rank, num_ranks, device
        self._server = None
        if rank == 0:
            self._server, self.address = coordinator.serve(
                folder, host, kind, num_ranks, bucket_bytes
            )
        else:
            self.address = coordinator.find(folder)
        self._meeting = coordinator.join(self.address)
        self._version: int | None = None
        self._settled = -1
        self._held: dict[str, HeldTensor] = {}
        self._pointers: list[int] = []
        self._sending: _SendLoop | None = None

    def publish(
        self,
        version: int,
        held: Callable[[], Sequence[HeldTensor]],
        standing: Sequence[torch.Tensor],
        report: Report = lambda *_: None,
        canary: Sequence[float] = (),
    ) -> Published | None:
        """Make `version` known; rank 0 gets what was published. All ranks call it, and not between `settle` and the step.

        `held` gives every tensor of the checkpoint, with an empty box where this rank has nothing of it; it is asked again only where a
        tensor of `standing` (where the weights stand) has moved. `report` hears of every take: version, error or "", seconds by part.
        """
        if self._sending is not None:
            self._sending.check()
        if self._version is not None and version <= self._version:
            raise OrreryError(
                f"weight wire: version {version} after version {self._version}; versions only rise"
            )
        pointers = [tensor.data_ptr() for tensor in standing]
        if not self._held or pointers != self._pointers:
            self._hold(held(), pointers)
        assert self._sending is not None
        self._version = version
        self._meeting.put_raw(
            f"share/{version}/{self.rank}", self._shares.of(self._sending.buckets[0]).tobytes()
        )
        self._sending.report = report
        if self.rank:
            return None
        total = np.zeros(len(self._tensors), np.uint64)
        for rank in range(self.num_ranks):
            key = f"share/{version}/{rank}"
            total += np.frombuffer(
                self._meeting.raw(key, f"trainer {rank}, its fingerprints of version {version}"),
                np.uint64,
            )
            self._meeting.forget(key)
        fingerprints = {
            tensor.name: int(share) & MASK
            for tensor, share in zip(self._tensors, total, strict=True)
        }
        self._meeting.forget(
            f"settled/{self._settled}"
        )  # all ranks have read it, since all are here
        published = Published(
            version, str(self.folder), fingerprints, digest(fingerprints), tuple(canary)
        )
        self._sending.open(version)
        write_atomic(self.folder / f"version_{version}.json", msgspec.json.encode(published))
        return published

    def settle(self) -> float:
        """Nobody reads the weights any more, nor will: the optimizer may step. Seconds waited. All ranks call it."""
        begin, version = time.perf_counter(), self._version
        if version is None or self._sending is None:
            return 0.0
        key = f"settled/{version}"
        if self.rank:
            self._meeting.get(key, bool, f"trainer 0, that version {version} is sent", SETTLE_S)
        else:
            marker, closed = (
                self.folder / f"{word}_{version}.json" for word in ("version", "closed")
            )
            marker.rename(closed)  # no claim can be made from here on
            self._sending.settle(version, scaled(SETTLE_S))
            closed.unlink()
            self._meeting.put(key, True)
            self._settled = version
        return time.perf_counter() - begin

    def close(self) -> None:
        """No more takes. Rank 0 closes last: in its store the others hear of it."""
        if self._sending is not None:
            self._sending.close()

    def _hold(self, held: Sequence[HeldTensor], pointers: list[int]) -> None:
        mine = {one.name: one for one in held if one.local.numel()}
        if self._held and {name: one.box for name, one in mine.items()} != {
            name: one.box for name, one in self._held.items()
        }:
            raise WireFailed(
                f"weight wire: trainer {self.rank} holds other parts of the weights than before; restart the stage"
            )
        first, self._held, self._pointers = not self._held, mine, pointers
        if first:
            if self.rank == 0:
                self._meeting.put(
                    "tensors",
                    [
                        TensorInfo(one.name, one.shape, str(one.dtype).removeprefix("torch."))
                        for one in held
                    ],
                )
            own = Holding(
                Location(coordinator.this_host(), self.device.type),
                {name: one.box for name, one in mine.items()},
            )
            self._meeting.put(f"holding/{self.rank}", own)
        self._tensors = self._meeting.tensors()
        holdings = self._meeting.holdings()
        names, before = (
            [tensor.name for tensor in self._tensors],
            [holding.boxes for holding in holdings[: self.rank]],
        )
        self._shares = RankFingerprints(
            list(mine.values()), names, before, self.address.bucket_bytes, self.device
        )
        if self._sending is None:
            self._sending = _SendLoop(self, holdings)
            self._sending.start()
        self._sending.hold(mine)


class _SendLoop:
    """The thread that answers takes. Rank 0's also decides about them."""

    def __init__(self, source: WeightSender, holdings: Sequence[Holding]) -> None:
        self._source, self._holdings = source, holdings
        self.report: Report = lambda *_: None
        size, device = source.address.bucket_bytes, source.device
        self.buckets = allocate(size, device)
        self._changed = threading.Condition()
        self._busy = False
        self._failure: BaseException | None = None
        self._open: int | None = None  # the version that takes may begin of
        self._sent: set[int] = set()  # claims
        self._held: dict[str, HeldTensor] = {}
        self._generation = -1
        self._plan: TransferPlan | None = None
        self._link: SenderLink | None = None
        self._rounds: list[tuple[int, dict[int, SliceMessage], list[Copy]]] | None = None
        self._meeting: StoreConnection | None = None
        self._thread = threading.Thread(target=self._run, name="weight-wire", daemon=True)
        self.start = self._thread.start

    def hold(self, held: dict[str, HeldTensor]) -> None:
        """The weights stand elsewhere now."""
        self._held, self._rounds = held, None

    def check(self) -> None:
        if self._failure is not None:
            raise WireFailed(
                f"weight wire: trainer {self._source.rank} answers no take any more ({self._failure})"
            ) from self._failure

    def open(self, version: int) -> None:
        with self._changed:
            self._open = version
            self._sent.clear()

    def admit(self, taking: Transfer) -> str:
        """Why this take may not begin; "" where it has begun, and the weights stand still until it is over."""
        with self._changed:
            if taking.version != self._open:
                return f"version {taking.version} {GONE}"
            if not is_leased(self._source.folder, taking.version, taking.claim):
                return "it was given up"
            self._busy = True
            return ""

    def settle(self, version: int, limit_s: float) -> None:
        """Wait for whoever has claimed the version, and close it."""
        begin = time.perf_counter()
        with self._changed:
            while self._busy or set(open_leases(self._source.folder, version)) - self._sent:
                self.check()
                if time.perf_counter() - begin > limit_s:
                    raise WireFailed(
                        f"weight wire: version {version} was claimed and is not taken after {limit_s:g} s; read logs/orchestrator.0.log"
                    )
                self._changed.wait(
                    0.01
                )  # a claim may also be given back, which only the folder tells
            self._open = None

    def close(self) -> None:
        if self._source.rank == 0:
            coordinator.join(self._source.address).arrive(
                coordinator.Arrival(-1, -1, "", 0, 0, "", -1)
            )
        self._thread.join(scaled(10.0))

    def _run(self) -> None:
        try:
            if self._source.device.type == "cuda":
                torch.cuda.set_device(self._source.device)
                # Of its own, ahead of what the trainer has queued: engines stand paused. `publish` has waited for the step's end.
                torch.cuda.set_stream(torch.cuda.Stream(self._source.device, priority=-1))
            self._meeting = coordinator.join(self._source.address)
            reception = (
                Coordinator(self._meeting, self._source.folder, self.admit)
                if self._source.rank == 0
                else None
            )
            number = 0
            while True:
                order = reception.next() if reception is not None else self._meeting.order(number)
                if reception is not None:
                    self._meeting.put(f"order/{number}", order)
                if order.end:
                    break
                done = self._carry_out(order)
                if reception is not None:
                    done = reception.gather(order, done, self._source.num_ranks)
                    self._meeting.forget(f"order/{number}")
                    self.report(order.version, done.error, done.parts)
                else:
                    self._meeting.put(f"done/{order.take}/{self._source.rank}", done)
                number += 1
                with self._changed:
                    self._busy = False
                    if not done.error:
                        self._sent.add(order.claim)
                    self._changed.notify_all()
        except BaseException as error:  # the main thread is where a trainer fails
            self._failure = error
        finally:
            self._drop()
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    def _carry_out(self, order: TransferOrder) -> TransferResult:
        if order.error:
            return TransferResult(order.error)
        assert self._meeting is not None
        parts, begin = PartTimer(), time.perf_counter()
        try:
            with self._meeting.during(transfer_path(self._source.folder, order.take, order.claim)):
                if order.generation != self._generation:
                    self._form(order)
                begin = parts.add("form_s", begin)
                self._send(parts)
        except (OrreryError, RuntimeError) as error:
            self._drop()
            return TransferResult(str(error) or type(error).__name__, parts.seconds)
        return TransferResult("", parts.seconds)

    def _form(self, order: TransferOrder) -> None:
        self._drop()
        assert self._meeting is not None
        members = [
            self._meeting.get(f"member/{name}", Member, "an engine, what it needs")
            for name in order.members
        ]
        self._plan = TransferPlan.of(
            self._meeting.tensors(), self._holdings, members, self._source.address.bucket_bytes
        )
        self._link = make_sender_link(
            self._source.address.kind,
            self._meeting,
            order.generation,
            self._source.rank,
            self._plan,
            self.buckets,
            self._source.device,
        )
        self._generation, self._rounds = order.generation, None

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._generation, self._plan, self._link, self._rounds = -1, None, None, None

    def _copies(self) -> list[tuple[int, dict[int, SliceMessage], list[Copy]]]:
        assert self._plan is not None
        rounds = []
        for number, messages in self._plan.of_source(self._source.rank):
            copies = [
                (held.part(box), message.source_offset + offset, held.dtype)
                for message in messages.values()
                for name, box, offset in message.slices
                for held in (self._held[name],)
            ]
            rounds.append((number, messages, joined(copies)))
        return rounds

    @torch.no_grad()
    def _send(self, parts: PartTimer) -> None:
        """Fill one bucket while the other is on its way."""
        begin = time.perf_counter()
        if self._rounds is None:
            self._rounds = self._copies()
        begin = parts.add("plan_s", begin)
        on_their_way: list[list] = [[], []]
        assert self._link is not None
        for index, (number, messages, copies) in enumerate(self._rounds):
            side = index % 2
            for message in on_their_way[side]:
                message.wait()
            begin = parts.add("send_s", begin)
            fill(self.buckets[side], copies)
            begin = parts.add("convert_s", begin)
            on_their_way[side] = [
                self._link.send(side, number, target, message.source_offset, message.num_bytes)
                for target, message in messages.items()
            ]
        for message in (*on_their_way[0], *on_their_way[1]):
            message.wait()
        parts.add("send_s", begin)
