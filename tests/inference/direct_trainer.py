"""The trainer of a direct wire, and a second engine that ends in a transfer, as threads of a test.

Also a wire that damages weights, and the trainer's log-probs.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, patch

import numpy as np
import torch

from orrery.orchestrator.engines.messages import Generation
from orrery.trainer.publish import DirectPublisher
from orrery.wire.weight_wire import Published
from orrery.wire.weight_wire.coordinator import PartTimer, fail_transfer
from orrery.wire.weight_wire.leases import LeaseClient
from orrery.wire.weight_wire.plan import Box, TensorInfo
from orrery.wire.weight_wire.transfer import WeightReceiver, WeightSender, _SendLoop

CPU = torch.device("cpu")
BUCKET_BYTES = 1 << 14  # so that there are many rounds


class DirectTrainer:
    """Publishes versions: the weights of a module. `leases` is the orchestrator's end."""

    def __init__(self, source: WeightSender) -> None:
        self._source = source
        self.leases = LeaseClient(lambda request: self.leases.reported(source.apply(request)))

    def __call__(self, version: int, module: torch.nn.Module) -> Published:
        context: Any = Mock()
        policy: Any = SimpleNamespace(network=module)
        published = DirectPublisher(policy, self._source, torch.float32, context).publish(version)
        assert published is not None
        return published


@contextmanager
def direct_trainer(folder: Path, kind: str = "nccl") -> Iterator[DirectTrainer]:
    """Yield a trainer. At the end it waits for leased versions."""
    folder.mkdir(mode=0o700)
    source = WeightSender(kind, folder, "127.0.0.1", 0, 1, CPU, BUCKET_BYTES)
    try:
        yield DirectTrainer(source)
        source.settle()
    finally:
        source.close()


@contextmanager
def damaged_on_its_way(tensor: str) -> Iterator[None]:
    """Every take of a `direct_trainer` carries one value of `tensor` with its lowest bit turned
    over: after it was fingerprinted and put
    into the bucket, before it is sent."""
    send_all = _SendLoop._send

    def send_damaged(self: _SendLoop, parts: PartTimer) -> None:
        assert self._plan is not None and self._link is not None
        send, rounds, turned = self._link.send, dict(self._plan.of_source(0)), []

        def turn_over(side: int, number: int, target: int, *where: int) -> Any:
            message = rounds[number][target]
            for name, _, offset in message.slices:
                if name == tensor and not turned:
                    self.buckets[side][message.source_offset + offset] ^= (
                        1  # the machine is little-endian
                    )
                    turned.append(number)
            return send(side, number, target, *where)

        with patch.object(self._link, "send", turn_over):
            send_all(self, parts)
        assert turned, tensor

    with patch.object(_SendLoop, "_send", send_damaged):
        yield


def end_half_way(claimed: Published, engine: str) -> None:
    """Take part as `engine`, of one rank that needs everything, and end with the first slices in
    its hands.
    """

    def whole(tensors: list[TensorInfo]) -> dict[str, tuple[Box, ...]]:
        return {tensor.name: (tuple((0, size) for size in tensor.shape),) for tensor in tensors}

    other = WeightReceiver(engine, 0, 1, CPU)
    other.join(claimed.folder, whole)
    rounds = other.receive(claimed.transfer, PartTimer())
    for _ in range(3):
        next(rounds)
    rounds.close()
    fail_transfer(claimed.folder, claimed.transfer)


def our_logprobs(
    module: torch.nn.Module, prompt: Sequence[int], generation: Generation, temperature: float
) -> np.ndarray:
    """log p of the generated tokens under our own model."""
    ids = torch.tensor([*prompt, *generation.token_ids.tolist()])
    hidden = module(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
    logits = (hidden @ module.lm_head_weight.T).float() / temperature
    rows = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
    return rows.gather(1, ids[len(prompt) :, None]).squeeze(1).detach().numpy()
