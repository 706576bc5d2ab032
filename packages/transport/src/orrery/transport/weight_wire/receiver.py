"""A direct wire, engine's end: one rank of an engine receives the slices that it needs, and tells what it got.

- `join` says once what this rank needs. `take` meets the trainer for one version and gives the slices, round by round, in the bucket that
  they came in; they must be used before the next but one round is asked for.
- Every slice is fingerprinted as it came. `attest` adds the shares of all ranks of the engine up: every rank then knows the whole
  tensors' fingerprints, and that ranks which hold the same part hold the same bits.
- Whatever fails gives the group up, so that nobody waits for this rank, and raises; `TransferFailed` where it was not this rank's doing. The
  other ranks of the engine hear of it where they add up.
"""

import contextlib
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from orrery.transport.fingerprint import SliceFingerprints, SliceSpec
from orrery.transport.weight_wire import coordinator
from orrery.transport.weight_wire.buckets import allocate, shape_of, starts_of
from orrery.transport.weight_wire.coordinator import (
    ARRIVAL_S,
    Arrival,
    PartTimer,
    StoreConnection,
    TransferOrder,
)
from orrery.transport.weight_wire.leases import Transfer, TransferFailed, WireFailed, transfer_path
from orrery.transport.weight_wire.links import InFlight, ReceiverLink, make_receiver_link
from orrery.transport.weight_wire.plan import (
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
)

Needs = dict[str, tuple[Box, ...]]


@dataclass
class Round:
    """What arrives together: slices, at these offsets of a bucket. The same objects at every take of a group."""

    number: int
    messages: dict[int, SliceMessage]
    slices: list[Slice]
    fingerprints: SliceFingerprints
    piece: torch.Tensor  # i64 [slices], which of this rank's pieces each belongs to


@dataclass
class Pieces:
    """What the ranks of one engine hold: distinct boxes that tile every tensor, numbered."""

    tensor_of: np.ndarray  # i64 [pieces], position of the tensor that each is a box of
    of_rank: dict[
        int, np.ndarray
    ]  # i64, the pieces that a rank holds, in the order in which it fingerprints them

    @classmethod
    def of(cls, tensors: Mapping[str, TensorInfo], members: Sequence[Member]) -> "Pieces":
        """Raises OrreryError naming a tensor that the ranks do not hold whole."""
        position = {name: index for index, name in enumerate(tensors)}
        shapes = {name: tensor.shape for name, tensor in tensors.items()}
        number = {
            piece: index
            for index, piece in enumerate(
                pieces(list(tensors), shapes, [member.needs for member in members])
            )
        }
        held = {
            member.rank: [
                number[name, box] for name, boxes in member.needs.items() for box in boxes
            ]
            for member in members
        }
        tensor_of = np.array([position[name] for name, _ in number], np.int64)
        return cls(tensor_of, {rank: np.array(each, np.int64) for rank, each in held.items()})


class WeightReceiver:
    """One engine rank's end, as long as its process lives."""

    def __init__(self, engine: str, rank: int, world_size: int, device: torch.device) -> None:
        self.engine, self.rank, self.world_size, self.device = engine, rank, world_size, device
        self._address: coordinator.WireAddress | None = None
        self._generation = -1
        self._link: ReceiverLink | None = None
        self._ahead: list[Sequence[InFlight]] = []
        self.tensors: dict[str, TensorInfo] = {}

    def join(self, folder: Path, needs: Callable[[list[TensorInfo]], Needs]) -> None:
        """Meet the wire in `folder`, unless met already; `needs` says what of the trainer's tensors this rank takes."""
        address = coordinator.find(folder)
        if address == self._address:
            return
        self.drop()
        self._meeting: StoreConnection = coordinator.join(address)
        self.tensors = {tensor.name: tensor for tensor in self._meeting.tensors()}
        self._needs = needs(list(self.tensors.values()))
        own = ((name, box) for name, boxes in self._needs.items() for box in boxes)
        self._pieces = {piece: position for position, piece in enumerate(own)}
        self._member = secrets.token_hex(8)
        self._meeting.put(
            f"member/{self._member}",
            Member(
                self.engine,
                self.rank,
                Location(coordinator.this_host(), self.device.type),
                self._needs,
            ),
        )
        self._folder, self._attested = folder, "attest"
        self._buckets = allocate(address.bucket_bytes, self.device)
        self._address = address

    def take(
        self, taking: Transfer, parts: PartTimer
    ) -> Generator[tuple[Round, torch.Tensor], None, None]:
        """(slices, the bucket that they are in), until all have come. Raises TransferFailed."""
        begin = time.perf_counter()
        self._meeting.forget(
            f"{self._attested}/{self.rank}"
        )  # whoever wanted it has had it, or has failed
        self._taking, self._attested = taking, f"attest/{taking.take}/{self.engine}"
        try:
            with self._meeting.during(transfer_path(self._folder, taking.take, taking.claim)):
                who = self.engine, self.rank, self.world_size, self._member, self._generation
                self._meeting.arrive(Arrival(taking.take, taking.claim, *who))
                order = self._meeting.get(
                    f"go/{taking.take}",
                    TransferOrder,
                    f"trainer 0, that take {taking.take} may begin",
                    2 * ARRIVAL_S,
                )
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
                raise TransferFailed(taking.take, error) from error
            raise

    def fail(self) -> None:
        """This rank has not received everything: the others of its engine hear so where they add up."""
        self.drop()
        with contextlib.suppress(RuntimeError):  # the store may be what failed
            self._meeting.put_raw(f"{self._attested}/{self.rank}", b"")

    def attest(self) -> dict[str, int]:
        """Fingerprint by name of the whole tensors that the ranks of this engine hold.

        Raises TransferFailed where another of them has not received everything, WireFailed naming what they disagree about.
        """
        self._meeting.put_raw(f"{self._attested}/{self.rank}", self._shares.cpu().numpy().tobytes())
        held = np.zeros(len(self._engine.tensor_of), np.uint64)  # by piece
        holder = np.full(len(held), -1)
        for rank, pieces_of in self._engine.of_rank.items():
            shares = self._shares_of(rank)
            differ = (holder[pieces_of] >= 0) & (held[pieces_of] != shares)
            if differ.any():
                piece = pieces_of[differ.argmax()]
                name = list(self.tensors)[self._engine.tensor_of[piece]]
                raise WireFailed(
                    f"weight wire: ranks {holder[piece]} and {rank} of {self.engine} received different bits of {name!r}"
                )
            holder[pieces_of] = np.where(holder[pieces_of] < 0, rank, holder[pieces_of])
            held[pieces_of] = shares
        total = np.zeros(len(self.tensors), np.uint64)
        np.add.at(total, self._engine.tensor_of, held)  # modulo 2^64
        return dict(zip(self.tensors, total.tolist(), strict=True))

    def _shares_of(self, rank: int) -> np.ndarray:
        """u64 [pieces of that rank]; one that has failed has nothing to say but that."""
        who = f"{self.engine} (rank {rank})"
        try:
            shares = self._meeting.raw(f"{self._attested}/{rank}", f"{who}, its fingerprints")
        except WireFailed as error:
            raise TransferFailed(self._taking.take, error) from error
        if not shares:
            raise TransferFailed(self._taking.take, f"{who} did not receive everything")
        return np.frombuffer(shares, np.uint64)

    def drop(self) -> None:
        """Give the group up."""
        if self._link is not None:
            self._link.close()
        # Messages on their way keep connections open, and with them whoever waits at the other end.
        self._generation, self._link, self._ahead = -1, None, []

    def _form(self, order: TransferOrder) -> None:
        self.drop()
        assert self._address is not None
        members = [
            self._meeting.get(f"member/{name}", Member, "an engine, what it needs")
            for name in order.members
        ]
        plan = self._plan = TransferPlan.of(
            list(self.tensors.values()),
            self._meeting.holdings(),
            members,
            self._address.bucket_bytes,
        )
        self._engine = Pieces.of(
            self.tensors, [member for member in members if member.engine == self.engine]
        )
        target = order.members.index(self._member)
        self._rounds = [
            self._round(number, messages) for number, messages in plan.of_target(target)
        ]
        self._link = make_receiver_link(
            self._address.kind,
            self._meeting,
            order.generation,
            target,
            plan,
            self._buckets,
            self.device,
        )
        self._generation = order.generation

    def _round(self, number: int, messages: dict[int, SliceMessage]) -> Round:
        slices = [
            Slice(name, box, message.target_offset + offset)
            for message in messages.values()
            for name, box, offset in message.slices
        ]
        where = [
            SliceSpec(
                offset,
                shape_of(box),
                self.tensors[name].shape,
                starts_of(box),
                dtype_of(self.tensors[name]).itemsize,
            )
            for name, box, offset in slices
        ]
        owner = [
            next(
                self._pieces[name, need]
                for need in self._needs[name]
                if intersection(need, box) == box
            )
            for name, box, _ in slices
        ]
        return Round(
            number,
            messages,
            slices,
            SliceFingerprints(where, self.device),
            torch.tensor(owner, device=self.device),
        )

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
        """The bucket that this round is in, once it is."""
        begin = time.perf_counter()
        for message in self._ahead[index % 2]:
            message.wait()
        parts.add("receive_s", begin)
        return self._buckets[index % 2]

    def _post(self, index: int) -> Sequence[InFlight]:
        """Ask for a round's messages, into the bucket that is its turn."""
        one, bucket = self._rounds[index], self._buckets[index % 2]
        assert self._link is not None
        return [
            self._link.receive(
                one.number,
                source,
                message,
                bucket[message.target_offset : message.target_offset + message.num_bytes],
            )
            for source, message in one.messages.items()
        ]
