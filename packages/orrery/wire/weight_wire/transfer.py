"""Send weight slices directly from trainer ranks to engine ranks.

On the trainer, `publish` announces a version, and a thread sends it on request. `settle` withdraws
it before the optimizer step. On an engine, `receive` yields the slices.
"""

import contextlib
import secrets
import threading
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import numpy as np
import torch

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.timing import scaled
from orrery.wire.fingerprint import MASK, SliceFingerprints, SliceSpec, digest
from orrery.wire.weight_wire.coordinator import (
    ARRIVAL_S,
    CURRENT,
    Arrival,
    Coordinator,
    PartTimer,
    StoreConnection,
    TransferOrder,
    TransferResult,
    WireAddress,
    connect,
    find_wire,
    serve_store,
    this_host,
)
from orrery.wire.weight_wire.leases import (
    LeaseListener,
    LeaseReport,
    LeaseRequest,
    LeaseTable,
    Published,
    TransferFailed,
    WireFailed,
)
from orrery.wire.weight_wire.links import (
    ReceiverLink,
    SenderLink,
    Wait,
    make_receiver_link,
    make_sender_link,
)
from orrery.wire.weight_wire.plan import (
    Box,
    Copy,
    HeldTensor,
    Holding,
    Location,
    Member,
    RankFingerprints,
    Slice,
    SliceMessage,
    TensorInfo,
    TransferPlan,
    allocate,
    dtype_of,
    fill,
    intersection,
    joined,
    pieces,
    shape_of,
    starts_of,
)

BUCKET_BYTES = 1 << 28
SETTLE_S = 600.0

Report = Callable[[int, str, dict[str, float]], None]
Needs = dict[str, tuple[Box, ...]]


class WeightSender:
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
        """Connect to the TCPStore named in `folder`. Rank 0 serves it on `host`."""
        self.folder, self.rank, self.num_ranks, self.device = folder, rank, num_ranks, device
        self._server = None
        if rank == 0:
            self._server, self.address = serve_store(folder, host, kind, num_ranks, bucket_bytes)
        else:
            self.address = find_wire(folder)
        self._store = connect(self.address)
        self.leases = LeaseTable()  # used by rank 0 only
        self._listener: LeaseListener | None = None
        if rank == 0:
            self._lease_store = connect(self.address)
            self._lease_store.put(CURRENT, 0)
        self._version: int | None = None
        self._settled = -1
        self._held: dict[str, HeldTensor] = {}
        self._pointers: list[int] = []
        self._sending: _SendLoop | None = None

    def listen(self, url: str) -> None:
        """Answer lease requests of the orchestrator at `url`. Rank 0 only."""
        self._listener = LeaseListener(url, self.apply, self.leases.report)

    def apply(self, request: LeaseRequest) -> LeaseReport:
        """Answer a lease request. Not thread-safe."""
        before, report = self.leases.report, self.leases.apply(request)
        if report.transfer != before.transfer:
            self._lease_store.put(CURRENT, report.transfer)
            if before.transfer:
                self._lease_store.forget(f"failed/{before.transfer}")
        return report

    def publish(
        self,
        version: int,
        held: Callable[[], Sequence[HeldTensor]],
        standing: Sequence[torch.Tensor],
        report: Report = lambda *_: None,
        canary: Sequence[float] = (),
    ) -> Published | None:
        """Announce a version. On rank 0, return the announcement.

        All ranks call this, but never between `settle` and the optimizer step. Raise WireFailed if
        the sending thread failed.

        - `held` returns all checkpoint tensors. Tensors without a part on this rank are empty.
        - `standing`: this rank's parameters and buffers. `held` reruns if their storage changes.
        - Rank 0 calls `report(version, error or "", seconds by phase)` after each transfer.
        """
        self.check()
        if self._version is not None and version <= self._version:
            raise OrreryError(
                f"weight wire: cannot publish version {version} after version {self._version}; "
                "versions must increase"
            )
        pointers = [tensor.data_ptr() for tensor in standing]
        if not self._held or pointers != self._pointers:
            self._hold(held(), pointers)
        assert self._sending is not None
        self._version = version
        shares = self._fingerprints.of(self._sending.buckets[0])
        self._store.put_raw(f"share/{version}/{self.rank}", shares.tobytes())
        self._sending.report = report
        if self.rank:
            return None
        total = np.zeros(len(self._tensors), np.uint64)
        for rank in range(self.num_ranks):
            key = f"share/{version}/{rank}"
            what = f"trainer {rank}'s fingerprints of version {version}"
            total += np.frombuffer(self._store.raw(key, what), np.uint64)
            self._store.forget(key)
        names = [tensor.name for tensor in self._tensors]
        fingerprints = {n: int(share) & MASK for n, share in zip(names, total, strict=True)}
        self._store.forget(f"settled/{self._settled}")
        path, summary = str(self.folder), digest(fingerprints)
        published = Published(version, path, fingerprints, summary, tuple(canary))
        self.leases.open(version)
        write_atomic(self.folder / f"version_{version}.json", msgspec.json.encode(published))
        return published

    def settle(self) -> float:
        """Withdraw the version. Return the seconds waited for its lease."""
        begin, version = time.perf_counter(), self._version
        if version is None or self._sending is None:
            return 0.0
        key = f"settled/{version}"
        if self.rank:
            self._store.get(key, bool, f"the notice that version {version} is sent", SETTLE_S)
        else:
            (self.folder / f"version_{version}.json").unlink()
            self.leases.settle(version, scaled(SETTLE_S), self.check)
            self._store.put(key, True)
            self._settled = version
        return time.perf_counter() - begin

    def close(self) -> None:
        """End the sending thread. Rank 0 serves the store, so it must close last."""
        if self._listener is not None:
            self._listener.close()
        if self._sending is not None:
            self._sending.close()

    def check(self) -> None:
        for thread in (self._sending, self._listener):
            if thread is not None and thread.failure is not None:
                raise WireFailed(
                    f"weight wire: trainer {self.rank} cannot send weights ({thread.failure})"
                ) from thread.failure

    def _hold(self, held: Sequence[HeldTensor], pointers: list[int]) -> None:
        own = {one.name: one for one in held if one.local.numel()}
        boxes = {name: one.box for name, one in own.items()}
        if self._held and boxes != {name: one.box for name, one in self._held.items()}:
            raise WireFailed(
                f"weight wire: the weight slices of trainer {self.rank} have changed. "
                "Restart the stage"
            )
        first, self._held, self._pointers = not self._held, own, pointers
        if first:
            if self.rank == 0:
                dtypes = [str(one.dtype).removeprefix("torch.") for one in held]
                infos = [TensorInfo(o.name, o.shape, d) for o, d in zip(held, dtypes, strict=True)]
                self._store.put("tensors", infos)
            place = Location(this_host(), self.device.type)
            self._store.put(f"holding/{self.rank}", Holding(place, boxes))
        self._tensors = self._store.tensors()
        holdings = self._store.holdings()
        names = [tensor.name for tensor in self._tensors]
        before = [holding.boxes for holding in holdings[: self.rank]]
        self._fingerprints = RankFingerprints(
            list(own.values()), names, before, self.address.bucket_bytes, self.device
        )
        if self._sending is None:
            self._sending = _SendLoop(self, holdings)
            self._sending.start()
        self._sending.hold(own)


class _SendLoop:
    """The sending thread. On rank 0, it also coordinates."""

    def __init__(self, sender: WeightSender, holdings: Sequence[Holding]) -> None:
        self._sender, self._holdings = sender, holdings
        self.report: Report = lambda *_: None
        self.buckets = allocate(sender.address.bucket_bytes, sender.device)
        self.failure: BaseException | None = None
        self._held: dict[str, HeldTensor] = {}
        self._generation = -1
        self._plan: TransferPlan | None = None
        self._link: SenderLink | None = None
        self._rounds: list[tuple[int, dict[int, SliceMessage], list[Copy]]] | None = None
        self._store: StoreConnection | None = None
        self._thread = threading.Thread(target=self._run, name="weight-wire", daemon=True)
        self.start = self._thread.start

    def hold(self, held: dict[str, HeldTensor]) -> None:
        self._held, self._rounds = held, None

    def close(self) -> None:
        if self._sender.rank == 0:
            connect(self._sender.address).arrive(Arrival(-1, "", 0, 0, "", -1))
        self._thread.join(scaled(10.0))

    def _run(self) -> None:
        sender = self._sender
        try:
            if sender.device.type == "cuda":
                torch.cuda.set_device(sender.device)
                # High priority, because engines wait. `publish` has waited for the optimizer step.
                torch.cuda.set_stream(torch.cuda.Stream(sender.device, priority=-1))
            store = self._store = connect(sender.address)
            coordinator = None
            if sender.rank == 0:
                coordinator = Coordinator(store, sender.leases)
            number = 0
            while True:
                order = coordinator.next() if coordinator is not None else store.order(number)
                if coordinator is not None:
                    store.put(f"order/{number}", order)
                if order.end:
                    break
                result = self._carry_out(order)
                if coordinator is not None:
                    result = coordinator.gather(order, result, sender.num_ranks)
                    store.forget(f"order/{number}")
                    self.report(order.version, result.error, result.parts)
                else:
                    store.put(f"done/{order.transfer}/{sender.rank}", result)
                number += 1
                sender.leases.finish(order.transfer, is_sent=not result.error)
        except BaseException as error:
            self.failure = error
        finally:
            self._drop()
            sender.leases.finish()

    def _carry_out(self, order: TransferOrder) -> TransferResult:
        if order.error:
            return TransferResult(order.error)
        assert self._store is not None
        parts, begin = PartTimer(), time.perf_counter()
        try:
            with self._store.during(order.transfer):
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
        assert self._store is not None
        sender, store = self._sender, self._store
        members = store.members(order)
        bucket_bytes = sender.address.bucket_bytes
        plan = self._plan = TransferPlan.of(store.tensors(), self._holdings, members, bucket_bytes)
        self._link = make_sender_link(
            sender.address.kind,
            store,
            order.generation,
            sender.rank,
            plan,
            self.buckets,
            sender.device,
        )
        self._generation, self._rounds = order.generation, None

    def _drop(self) -> None:
        if self._link is not None:
            self._link.close()
        self._generation, self._plan, self._link, self._rounds = -1, None, None, None

    def _copies(self) -> list[tuple[int, dict[int, SliceMessage], list[Copy]]]:
        assert self._plan is not None
        rounds = []
        for number, messages in self._plan.of_source(self._sender.rank):
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
        begin = time.perf_counter()
        if self._rounds is None:
            self._rounds = self._copies()
        begin = parts.add("plan_s", begin)
        in_flight: list[list[Wait]] = [[], []]
        assert self._link is not None
        for index, (number, messages, copies) in enumerate(self._rounds):
            side = index % 2
            for wait in in_flight[side]:
                wait()
            begin = parts.add("send_s", begin)
            fill(self.buckets[side], copies)
            begin = parts.add("convert_s", begin)
            in_flight[side] = [
                self._link.send(side, number, target, message.source_offset, message.num_bytes)
                for target, message in messages.items()
            ]
        for wait in (*in_flight[0], *in_flight[1]):
            wait()
        parts.add("send_s", begin)


# Engine ranks


@dataclass
class Round:
    number: int
    messages: dict[int, SliceMessage]
    slices: list[Slice]
    fingerprints: SliceFingerprints
    piece: torch.Tensor  # i64 [slices], index in `Pieces`


@dataclass
class Pieces:
    """Distinct boxes that one engine's ranks need."""

    tensor_of: np.ndarray  # i64 [pieces], index of the tensor
    of_rank: dict[int, np.ndarray]  # rank → indices of its pieces, in the order of `needs`

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], members: Sequence[Member]) -> "Pieces":
        position = {name: index for index, name in enumerate(tensors)}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        found = pieces(list(tensors), shapes, [member.needs for member in members])
        number = {piece: index for index, piece in enumerate(found)}
        of_rank = {}
        for member in members:
            held = [number[name, box] for name, boxes in member.needs.items() for box in boxes]
            of_rank[member.rank] = np.array(held, np.int64)
        return cls(np.array([position[name] for name, _ in found], np.int64), of_rank)


class WeightReceiver:
    def __init__(self, engine: str, rank: int, world_size: int, device: torch.device) -> None:
        self.engine, self.rank, self.world_size, self.device = engine, rank, world_size, device
        self._address: WireAddress | None = None
        self._generation = -1
        self._link: ReceiverLink | None = None
        self._ahead: list[Sequence[Wait]] = []
        self.tensors: dict[str, TensorInfo] = {}

    def join(self, folder: Path, needs: Callable[[list[TensorInfo]], Needs]) -> None:
        """Connect to the trainer, unless connected. `needs` returns the boxes to receive."""
        address = find_wire(folder)
        if address == self._address:
            return
        self.drop()
        self._store: StoreConnection = connect(address)
        self.tensors = {tensor.name: tensor for tensor in self._store.tensors()}
        self._needs = needs(list(self.tensors.values()))
        own = ((name, box) for name, boxes in self._needs.items() for box in boxes)
        self._pieces = {piece: position for position, piece in enumerate(own)}
        self._member = secrets.token_hex(8)
        place = Location(this_host(), self.device.type)
        member = Member(self.engine, self.rank, place, self._needs)
        self._store.put(f"member/{self._member}", member)
        self._attested = "attest"
        self._buckets = allocate(address.bucket_bytes, self.device)
        self._address = address

    def receive(
        self, transfer: int, parts: PartTimer
    ) -> Generator[tuple[Round, torch.Tensor], None, None]:
        """Yield each round and its bucket, valid until the next round.

        Raise TransferFailed on failure.
        """
        begin = time.perf_counter()
        self._store.forget(f"{self._attested}/{self.rank}")
        self._transfer, self._attested = transfer, f"attest/{transfer}/{self.engine}"
        try:
            with self._store.during(transfer):
                this = self.engine, self.rank, self.world_size, self._member, self._generation
                self._store.arrive(Arrival(transfer, *this))
                what = f"trainer 0's order of transfer {transfer}"
                order = self._store.get(f"go/{transfer}", TransferOrder, what, 2 * ARRIVAL_S)
                begin = parts.add("meet_s", begin)
                if order.error:
                    raise WireFailed(order.error)
                if order.generation != self._generation:
                    self._form(order)
                begin = parts.add("form_s", begin)
                yield from self._receive(parts)
        except BaseException as error:
            self.fail()
            if isinstance(error, WireFailed):
                raise TransferFailed(transfer, error) from error
            raise

    def fail(self) -> None:
        """Close the link, and make `attest` fail on the engine's other ranks."""
        self.drop()
        with contextlib.suppress(RuntimeError):
            self._store.put_raw(f"{self._attested}/{self.rank}", b"")

    def attest(self) -> dict[str, int]:
        """Add up the engine ranks' shares. Return fingerprints by tensor name.

        Raise TransferFailed if a rank lacks slices, WireFailed if two ranks' bits differ.
        """
        shares = self._shares.cpu().numpy().tobytes()
        self._store.put_raw(f"{self._attested}/{self.rank}", shares)
        held = np.zeros(len(self._engine.tensor_of), np.uint64)
        holder = np.full(len(held), -1)
        for rank, pieces_of in self._engine.of_rank.items():
            shares_of = self._shares_of(rank)
            differ = (holder[pieces_of] >= 0) & (held[pieces_of] != shares_of)
            if differ.any():
                piece = pieces_of[differ.argmax()]
                name = list(self.tensors)[self._engine.tensor_of[piece]]
                raise WireFailed(
                    f"weight wire: ranks {holder[piece]} and {rank} of {self.engine} received "
                    f"different bits of {name!r}"
                )
            holder[pieces_of] = np.where(holder[pieces_of] < 0, rank, holder[pieces_of])
            held[pieces_of] = shares_of
        total = np.zeros(len(self.tensors), np.uint64)
        np.add.at(total, self._engine.tensor_of, held)
        return dict(zip(self.tensors, total.tolist(), strict=True))

    def _shares_of(self, rank: int) -> np.ndarray:
        name = f"{self.engine} (rank {rank})"
        try:
            shares = self._store.raw(f"{self._attested}/{rank}", f"the fingerprints of {name}")
        except WireFailed as error:
            raise TransferFailed(self._transfer, error) from error
        if not shares:
            raise TransferFailed(self._transfer, f"{name} did not receive all slices")
        return np.frombuffer(shares, np.uint64)

    def drop(self) -> None:
        if self._link is not None:
            self._link.close()
        # Clear `_ahead`, because pending receives keep connections open and block peers.
        self._generation, self._link, self._ahead = -1, None, []

    def _form(self, order: TransferOrder) -> None:
        self.drop()
        assert self._address is not None
        store = self._store
        members = store.members(order)
        tensors, bucket_bytes = list(self.tensors.values()), self._address.bucket_bytes
        plan = TransferPlan.of(tensors, store.holdings(), members, bucket_bytes)
        own_engine = [member for member in members if member.engine == self.engine]
        self._engine = Pieces.of(self.tensors, own_engine)
        target = order.members.index(self._member)
        self._rounds = [self._round(*each) for each in plan.of_target(target)]
        self._link = make_receiver_link(
            self._address.kind, store, order.generation, target, plan, self._buckets, self.device
        )
        self._generation = order.generation

    def _round(self, number: int, messages: dict[int, SliceMessage]) -> Round:
        slices = [
            Slice(name, box, message.target_offset + offset)
            for message in messages.values()
            for name, box, offset in message.slices
        ]
        specs, owner = [], []
        for name, box, offset in slices:
            shape, itemsize = self.tensors[name].shape, dtype_of(self.tensors[name]).itemsize
            specs.append(SliceSpec(offset, shape_of(box), shape, starts_of(box), itemsize))
            need = next(need for need in self._needs[name] if intersection(need, box) == box)
            owner.append(self._pieces[name, need])
        fingerprints = SliceFingerprints(specs, self.device)
        piece = torch.tensor(owner, device=self.device)
        return Round(number, messages, slices, fingerprints, piece)

    def _receive(self, parts: PartTimer) -> Generator[tuple[Round, torch.Tensor], None, None]:
        self._shares = torch.zeros(len(self._pieces), dtype=torch.int64, device=self.device)
        self._ahead = [self._post(index) for index in range(min(2, len(self._rounds)))]
        for index, one in enumerate(self._rounds):
            bucket = self._await_round(index, parts)
            begin = time.perf_counter()
            self._shares.index_add_(0, one.piece, one.fingerprints.of(bucket))
            parts.add("fingerprint_s", begin)
            yield one, bucket
            if index + 2 < len(self._rounds):
                self._ahead[index % 2] = self._post(index + 2)

    def _await_round(self, index: int, parts: PartTimer) -> torch.Tensor:
        begin = time.perf_counter()
        for wait in self._ahead[index % 2]:
            wait()
        parts.add("receive_s", begin)
        return self._buckets[index % 2]

    def _post(self, index: int) -> Sequence[Wait]:
        one, bucket = self._rounds[index], self._buckets[index % 2]
        assert self._link is not None
        posted = []
        for source, message in one.messages.items():
            first = message.target_offset
            into = bucket[first : first + message.num_bytes]
            posted.append(self._link.receive(one.number, source, into))
        return posted
