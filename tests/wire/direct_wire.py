"""Trainers and engines of a direct wire, as threads of one process."""

import asyncio
import contextlib
import threading
from contextlib import contextmanager

import torch

from orrery.wire.weight_wire.coordinator import PartTimer
from orrery.wire.weight_wire.files import WeightWatch
from orrery.wire.weight_wire.leases import LeaseClient
from orrery.wire.weight_wire.plan import HeldTensor, dtype_of, in_bucket, shape_of
from orrery.wire.weight_wire.transfer import WeightReceiver, WeightSender

CPU = torch.device("cpu")
BUCKET_BYTES = 512  # so that there are many rounds
SHAPES = {
    "embed": (24, 8),
    "norm": (8,),
    "q": (16, 8),
    "o": (8, 16),
    "bias": (16,),
    **{f"expert.{e}.{part}": (6, 8) for e in range(4) for part in ("gate", "up")},
    "scale": (),
}


def weights(version):
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def trainer_box(name, shape, rank, num_ranks):
    """Experts whole by rank, scalars on every rank, the rest in rows as FSDP2 does."""
    if name.startswith("expert"):
        owner = int(name.split(".")[1]) * num_ranks // 4
        return tuple((0, size if owner == rank else 0) for size in shape)
    if not shape:
        return ()
    rows = -(-shape[0] // num_ranks)
    return (
        (min(rows * rank, shape[0]), min(rows * (rank + 1), shape[0])),
        *((0, size) for size in shape[1:]),
    )


def engine_boxes(tensors, rank, world_size):
    """Tensor parallel: q and embed in rows, o in columns, experts by rank, the rest everywhere."""
    needs = {}
    for tensor in tensors:
        name, shape = tensor.name, tuple(tensor.shape)
        whole = tuple((0, size) for size in shape)
        dim = {"q": 0, "embed": 0, "bias": 0, "o": 1}.get(name)
        if name.startswith("expert"):
            needs[name] = (whole,) if int(name.split(".")[1]) * world_size // 4 == rank else ()
        elif dim is None:
            needs[name] = (whole,)
        else:
            part = shape[dim] // world_size
            needs[name] = (
                tuple(
                    (part * rank, part * (rank + 1)) if d == dim else side
                    for d, side in enumerate(whole)
                ),
            )
    return needs


class Trainer:
    """One rank: a master copy in float32, sent as bfloat16."""

    def __init__(self, kind, folder, rank, num_ranks, replicas=1):
        self.shard, self.num_shards = rank % (num_ranks // replicas), num_ranks // replicas
        self.source = WeightSender(kind, folder, "127.0.0.1", rank, num_ranks, CPU, BUCKET_BYTES)
        self.local = {
            name: torch.empty(
                [
                    stop - start
                    for start, stop in trainer_box(name, shape, self.shard, self.num_shards)
                ]
            )
            for name, shape in SHAPES.items()
        }
        self.takes = []

    def load(self, version):
        for name, whole in weights(version).items():
            box = trainer_box(name, whole.shape, self.shard, self.num_shards)
            self.local[name].copy_(whole[tuple(slice(*side) for side in box)])

    def held(self):
        return [
            HeldTensor(
                name,
                shape,
                torch.bfloat16,
                trainer_box(name, shape, self.shard, self.num_shards),
                self.local[name],
            )
            for name, shape in SHAPES.items()
        ]

    def publish(self, version):
        self.load(version)
        return self.source.publish(
            version, self.held, list(self.local.values()), lambda *take: self.takes.append(take)
        )


class Engine:
    """One engine rank; `got` has the arrived slices by name and box."""

    def __init__(self, name, rank, world_size):
        self.target, self.needs = (
            WeightReceiver(name, rank, world_size, CPU),
            lambda tensors: engine_boxes(tensors, rank, world_size),
        )
        self.got, self.parts, self.damage = {}, None, None

    def take(self, published, arriving=lambda: None, at_the_last_round=lambda: None):
        self.target.join(published.folder, self.needs)
        arriving()
        self.got, self.parts = {}, PartTimer()
        needs = self.needs(list(self.target.tensors.values()))
        missing = sum(
            torch.Size(shape_of(box)).numel() for boxes in needs.values() for box in boxes
        )
        with contextlib.closing(self.target.receive(published.transfer, self.parts)) as rounds:
            for one, bucket in rounds:
                for name, box, offset in one.slices:
                    assert (name, box) not in self.got
                    tensor = in_bucket(
                        bucket, offset, shape_of(box), dtype_of(self.target.tensors[name])
                    ).clone()
                    self.got[name, box], missing = tensor, missing - tensor.numel()
                if not missing:
                    at_the_last_round()
        return self.target.attest()


class Leases:
    """The orchestrator's end, in this process."""

    def __init__(self, source):
        self.client = LeaseClient(lambda request: self.client.reported(source.apply(request)))
        self.abandon, self.release = self.client.abandon, self.client.release

    def start(self, published, *engines):
        return asyncio.run(self.client.start_transfer(published, engines))


def together(*calls):
    """Return the results or exceptions of the calls, each in a thread."""
    results = [None] * len(calls)

    def run(index):
        try:
            results[index] = calls[index]()
        except BaseException as error:
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    return results


@contextmanager
def trainers(kind, folder, num_ranks, replicas=1):
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    first = Trainer(kind, folder, 0, num_ranks, replicas)
    ranks = [
        first,
        *(Trainer(kind, folder, rank, num_ranks, replicas) for rank in range(1, num_ranks)),
    ]
    try:
        yield ranks, WeightWatch(folder)
    finally:
        for rank in ranks:
            rank.source.close()
