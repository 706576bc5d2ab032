"""The trainer's end of a direct wire: every rank sends the slices that it owns.

- `publish` fingerprints this rank's part, and rank 0 announces the version. It sends no slice.
- A thread sends slices while the weights stay unchanged. Just before the optimizer's step, `settle`
  withdraws the version and waits for its leases (`leases.py`), which rank 0 grants in another
  thread.
- A failed transfer closes its process group. The lease holds the version for a retry. Rank 0 raises
  the trainer's own failures at the next `publish` or `settle`.
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
from orrery.runtime.timing import scaled
from orrery.wire.fingerprint import MASK, digest
from orrery.wire.weight_wire.buckets import (
    Copy,
    HeldTensor,
    RankFingerprints,
    allocate,
    fill,
    joined,
)
from orrery.wire.weight_wire.coordinator import (
    CURRENT,
    Arrival,
    Coordinator,
    PartTimer,
    StoreConnection,
    TransferOrder,
    TransferResult,
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
    WireFailed,
)
from orrery.wire.weight_wire.links import InFlight, SenderLink, make_sender_link
from orrery.wire.weight_wire.plan import (
    Holding,
    Location,
    Member,
    SliceMessage,
    TensorInfo,
    TransferPlan,
)

BUCKET_BYTES = 1 << 28
SETTLE_S = (
    600.0  # for leased versions to be sent, longer than the wait for a hanging engine, scaled
)

Report = Callable[[int, str, dict[str, float]], None]


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
        """Rank 0 opens the wire at `host`, in its existing `folder`."""
        self.folder, self.rank, self.num_ranks, self.device = folder, rank, num_ranks, device
        self._server = None
        if rank == 0:
            self._server, self.address = serve_store(folder, host, kind, num_ranks, bucket_bytes)
        else:
            self.address = find_wire(folder)
        self._store = connect(self.address)
        self.leases = LeaseTable()  # rank 0's
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
        """Grant the orchestrator's leases, over its control socket at `url`. Call it at rank 0."""
        self._listener = LeaseListener(url, self.apply, self.leases.report)

    def apply(self, request: LeaseRequest) -> LeaseReport:
        """Apply a lease request, and tell all ranks the current transfer. One thread calls this."""
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
        """Announce `version`. Return it at rank 0.

        All ranks call this, but never between `settle` and the optimizer step.

        - `held` returns every tensor of the checkpoint, with an empty box if this rank has no part
          of it. It is called again only if the storage of a weight in `standing` has changed.
        - `report` is called after every transfer with the version, the error or "", and the seconds
          of each part.
        """
        self.check()
        if self._version is not None and version <= self._version:
            raise OrreryError(
                f"weight wire: version {version} after version {self._version}; versions only rise"
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
        self._store.forget(f"settled/{self._settled}")  # every rank here has read it
        path, summary = str(self.folder), digest(fingerprints)
        published = Published(version, path, fingerprints, summary, tuple(canary))
        self.leases.open(version)
        write_atomic(self.folder / f"version_{version}.json", msgspec.json.encode(published))
        return published

    def settle(self) -> float:
        """Withdraw the version and wait for its leases. Return the seconds waited.

        All ranks call this before the optimizer steps.
        """
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
        """End the sending thread. Rank 0 must close last, because it serves the store."""
        if self._listener is not None:
            self._listener.close()
        if self._sending is not None:
            self._sending.close()

    def check(self) -> None:
        """Raise WireFailed if a thread has failed."""
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
                f"weight wire: trainer {self.rank} holds other slices of the weights than before; "
                "restart the stage"
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
    """The sending thread. Rank 0's also coordinates the transfers."""

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
                # Engines are paused meanwhile, so this stream precedes the trainer's queued work.
                # The weights are complete, because `publish` has waited for the step's end.
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
        except BaseException as error:  # `check` raises it in the main thread
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
        members = [
            store.get(f"member/{name}", Member, "an engine rank's list of needed slices")
            for name in order.members
        ]
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
        in_flight: list[list[InFlight]] = [[], []]
        assert self._link is not None
        for index, (number, messages, copies) in enumerate(self._rounds):
            side = index % 2
            for message in in_flight[side]:
                message.wait()
            begin = parts.add("send_s", begin)
            fill(self.buckets[side], copies)
            begin = parts.add("convert_s", begin)
            in_flight[side] = [
                self._link.send(side, number, target, message.source_offset, message.num_bytes)
                for target, message in messages.items()
            ]
        for message in (*in_flight[0], *in_flight[1]):
            message.wait()
        parts.add("send_s", begin)
