"""Run ranks as threads of one process on one device, with queues in place of torch.distributed.

All ranks queue their kernels on one stream, so a received tensor is complete for every later
kernel. Each thread runs its own backward pass. autograd's single thread per device would deadlock
between the collectives of two ranks.
"""

import queue
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import torch
import torch.distributed as dist

DEADLINE_S = 120.0  # per message; kernels may be compiled before it is sent


class Group:
    """The methods of `dist.ProcessGroup` that the code under test calls."""

    def __init__(self, boxes, rank, size):
        self.boxes, self._rank, self._size = boxes, rank, size

    def rank(self):
        return self._rank

    def size(self):
        return self._size

    def send(self, target, tag, tensor):
        self.boxes[self._rank, target, tag].put(tensor.clone())

    def receive(self, source, tag, into):
        into.copy_(self.boxes[source, self._rank, tag].get(timeout=DEADLINE_S))


class Later:
    """The handle of a collective whose `wait` receives."""

    def __init__(self, finish):
        self.wait = finish


def _all_to_all_single(
    output, tensor, output_sizes=None, input_sizes=None, group=None, async_op=False
):
    size = group.size()
    leaving, arriving = (
        x.split(sizes or [len(x) // size] * size)
        for x, sizes in ((tensor, input_sizes), (output, output_sizes))
    )
    for target, part in enumerate(leaving):
        group.send(target, "all_to_all", part)

    def finish():
        for source, part in enumerate(arriving):
            group.receive(source, "all_to_all", part)

    if async_op:
        return Later(finish)
    finish()


def _batch_isend_irecv(operations):
    works = []
    for one in operations:
        if one.is_send:
            one.group.send(one.peer, one.tag, one.tensor)
        else:
            works.append(Later(lambda one=one: one.group.receive(one.peer, one.tag, one.tensor)))
    return works


def install(monkeypatch):
    """Replace torch.distributed's calls by versions that take a `Group`."""
    isend = dist.isend

    def operation(call, tensor, peer, group, tag):
        return SimpleNamespace(
            is_send=call is isend, tensor=tensor, peer=peer, group=group, tag=tag
        )

    monkeypatch.setattr(dist, "P2POp", operation)
    monkeypatch.setattr(dist, "batch_isend_irecv", _batch_isend_irecv)
    monkeypatch.setattr(dist, "all_to_all_single", _all_to_all_single)
    monkeypatch.setattr(dist, "get_process_group_ranks", lambda group: list(range(group.size())))


def on_ranks(size, work):
    """Run `work(group)` on each of `size` ranks; return the results."""
    keys = [
        (source, target, tag)
        for source in range(size)
        for target in range(size)
        for tag in ("all_to_all", 0, 1)
    ]
    boxes = {key: queue.SimpleQueue() for key in keys}

    def run(rank):
        with torch.autograd.set_multithreading_enabled(False):
            return work(Group(boxes, rank, size))

    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(run, range(size)))
