"""The engine's end of a direct wire: one engine rank receives the slices that it needs.

- `join` declares the needed boxes. `receive` yields a version's slices round by round, in a bucket.
  There are two buckets, so round n must be used before round n + 2 is requested.
- Every slice is fingerprinted on arrival. `attest` adds up the shares of the engine's ranks. Each
  rank then knows the whole tensors' fingerprints, and that replicated parts agree bit for bit.
- A failure closes the group, so no process waits for this rank. It raises TransferFailed if another
  process is at fault. `attest` tells the failure to the engine's other ranks.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from orrery.wire.fingerprint import SliceFingerprints, SliceSpec
from orrery.wire.weight_wire.buckets import allocate
from orrery.wire.weight_wire.coordinator import (
    ARRIVAL_S,
    Arrival,
    PartTimer,
    StoreConnection,
    TransferOrder,
    WireAddress,
    connect,
    find_wire,
    this_host,
)
from orrery.wire.weight_wire.leases import TransferFailed, WireFailed
from orrery.wire.weight_wire.links import InFlight, ReceiverLink, make_receiver_link
from orrery.wire.weight_wire.plan import (
    Box,
    Location,
    Member,
    Slice,
    SliceMessage,
    TensorInfo,
    TransferPlan,
    dtype_of,
    intersection,
    pieces,
    shape_of,
    starts_of,
)

Needs = dict[str, tuple[Box, ...]]


@dataclass
class Round:
    """Slices that arrive together, at fixed offsets of a bucket."""

    number: int
    messages: dict[int, SliceMessage]
    slices: list[Slice]
    fingerprints: SliceFingerprints
    piece: torch.Tensor  # i64 [slices]


@dataclass
class Pieces:
    """The distinct boxes of one engine's ranks. They tile every tensor."""

    tensor_of: np.ndarray  # i64 [pieces]
    of_rank: dict[int, np.ndarray]  # i64, in the order of a rank's fingerprints

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], members: Sequence[Member]) -> "Pieces":
        """Raise OrreryError, naming a tensor, if the ranks do not hold it whole."""
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
    """One engine rank's end, for its process's lifetime."""

    def __init__(self, engine: str, rank: int, world_size: int, device: torch.device) -> None:
        self.engine, self.rank, self.world_size, self.device = engine, rank, world_size, device
        self._address: WireAddress | None = None
        self._generation = -1
        self._link: ReceiverLink | None = None
        self._ahead: list[Sequence[InFlight]] = []
        self.tensors: dict[str, TensorInfo] = {}

    def join(self, folder: Path, needs: Callable[[list[TensorInfo]], Needs]) -> None:
        """Connect to the wire in `folder`, unless connected. `needs` returns this rank's boxes."""
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
        """Yield (slices, their bucket) until all slices have arrived. Raises TransferFailed."""
        begin = time.perf_counter()
        self._store.forget(f"{self._attested}/{self.rank}")  # other ranks have read it
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
        """Make `attest` fail at the engine's other ranks."""
        self.drop()
        with contextlib.suppress(RuntimeError):  # the store itself may have failed
            self._store.put_raw(f"{self._attested}/{self.rank}", b"")

    def attest(self) -> dict[str, int]:
        """Return the fingerprints of the engine's whole tensors, by name.

        Raises TransferFailed if another rank has not received everything, and WireFailed, naming
        the tensor, if two ranks received different bits.
        """
        shares = self._shares.cpu().numpy().tobytes()
        self._store.put_raw(f"{self._attested}/{self.rank}", shares)
        held = np.zeros(len(self._engine.tensor_of), np.uint64)  # by piece
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
        np.add.at(total, self._engine.tensor_of, held)  # modulo 2^64
        return dict(zip(self.tensors, total.tolist(), strict=True))

    def _shares_of(self, rank: int) -> np.ndarray:
        """Return the fingerprints u64 [pieces of `rank`]. A failed rank publishes empty bytes."""
        name = f"{self.engine} (rank {rank})"
        try:
            shares = self._store.raw(f"{self._attested}/{rank}", f"the fingerprints of {name}")
        except WireFailed as error:
            raise TransferFailed(self._transfer, error) from error
        if not shares:
            raise TransferFailed(self._transfer, f"{name} did not receive everything")
        return np.frombuffer(shares, np.uint64)

    def drop(self) -> None:
        if self._link is not None:
            self._link.close()
        # Drop messages in flight: they would keep connections open, on which peers would wait.
        self._generation, self._link, self._ahead = -1, None, []

    def _form(self, order: TransferOrder) -> None:
        self.drop()
        assert self._address is not None
        store = self._store
        members = [
            store.get(f"member/{name}", Member, "an engine rank's list of needed slices")
            for name in order.members
        ]
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
        for message in self._ahead[index % 2]:
            message.wait()
        parts.add("receive_s", begin)
        return self._buckets[index % 2]

    def _post(self, index: int) -> Sequence[InFlight]:
        one, bucket = self._rounds[index], self._buckets[index % 2]
        assert self._link is not None
        posted = []
        for source, message in one.messages.items():
            first = message.target_offset
            into = bucket[first : first + message.num_bytes]
            posted.append(self._link.receive(one.number, source, message, into))
        return posted
