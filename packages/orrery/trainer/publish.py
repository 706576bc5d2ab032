"""Publish the policy's weights after every step, under Hugging Face names.

- Over nccl and nixl, every rank sends its shards. Otherwise rank 0 writes gathered tensors.
- The transport `files` keeps the trained dtype. Others cast to the engines' dtype.
"""

import json
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from orrery.manifest.errors import RunFailed
from orrery.models.fp8 import SentWeights, scale_tensor
from orrery.models.hf_folder import HfTensor
from orrery.models.lora import adapters, merged_shard
from orrery.models.placement import local_tensor
from orrery.models.weights import (
    hf_tensors,
    named_hf_slices,
    named_hf_tensors,
    named_peft_tensors,
)
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.trainer.checkpoint import REMEDY
from orrery.trainer.policy import Policy
from orrery.wire.checkpoints import PUBLISHED
from orrery.wire.weight_wire import Published, WeightPublisher
from orrery.wire.weight_wire.fp8_blocks import DTYPE
from orrery.wire.weight_wire.plan import HeldTensor
from orrery.wire.weight_wire.transfer import SETTLE_S, WeightSender


class Publisher:
    """Publish weights as files. `wire` is None except on rank 0."""

    def __init__(self, policy: Policy, wire: WeightPublisher | None):
        self._policy, self._wire, self._fp8 = policy, wire, SentWeights(policy.network)
        self.digests: dict[int, str] = {}  # by version, on rank 0

    def publish(self, version: int, canary: Sequence[float] = ()) -> Published | None:
        tensors = self._named_tensors()
        if self._wire is not None:
            published = self._wire.publish(version, tensors, canary)
            self.digests[version] = published.digest
            return published
        deque(tensors, maxlen=0)
        return None

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._fp8.encoded(named_hf_tensors(self._policy.network))

    def settle(self) -> float:
        return 0.0

    def close(self) -> None:
        pass

    def check(self, step: int, stamped: dict[str, str] | None) -> None:
        """Raise RunFailed unless the batch's digests (`stamped`, by version) were published."""
        if not stamped:
            raise RunFailed(
                f"batch {step}: lacks digests of the engines' weights; see logs/orchestrator.0.log"
            )
        for version, digest in stamped.items():
            published = self.digests.get(int(version))
            if digest != published:
                found = f"it with {published}" if published else "no such version"
                raise RunFailed(
                    f"batch {step}: its rollouts carry version {version} with digest {digest}, but "
                    f"the trainer published {found}; the engines sampled from other weights"
                )

    def checkpoint_files(self) -> dict[str, bytes]:
        return {PUBLISHED: (json.dumps(self.digests) + "\n").encode()}

    def restore(self, folder: Path) -> None:
        path = folder / PUBLISHED
        try:
            rows = json.loads(path.read_text()).items()
            self.digests = {int(version): digest for version, digest in rows}
        except (OSError, ValueError, AttributeError) as error:
            raise RunFailed(f"{path}: cannot be read ({error}); {REMEDY}") from error


class AdapterPublisher(Publisher):
    def __init__(self, policy: Policy, wire: WeightPublisher | None, dtype: torch.dtype):
        super().__init__(policy, wire)
        self._dtype = dtype

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_peft_tensors(self._policy.network, self._dtype)


class DirectPublisher(Publisher):
    def __init__(self, policy: Policy, source: WeightSender, dtype: torch.dtype, ctx: RoleContext):
        super().__init__(policy, None)
        self._source, self._dtype, self._ctx = source, dtype, ctx
        self._merged: dict[str, torch.Tensor] = {}

    def publish(self, version: int, canary: Sequence[float] = ()) -> Published | None:
        network = self._policy.network
        self._merge()
        self._fp8.refresh()
        standing = [local_tensor(tensor) for tensor in (*network.parameters(), *network.buffers())]
        published = self._source.publish(version, self._held, standing, self._sent, canary)
        if published is not None:
            self.digests[version] = published.digest
        return published

    def settle(self) -> float:
        what = "engines that have asked for these weights"
        with self._ctx.health.waiting(what, deadline_s=scaled(SETTLE_S)):
            return self._source.settle()

    def listen(self, url: str) -> None:
        if self._source.rank == 0:
            self._source.listen(url)

    def close(self) -> None:
        self._source.close()

    def _merge(self) -> None:
        weights = dict(self._policy.network.named_parameters())
        for name, adapter in adapters(self._policy.network):
            shard = merged_shard(weights[name], adapter)
            self._merged.setdefault(name, torch.empty_like(shard, dtype=self._dtype)).copy_(shard)

    def _held(self) -> list[HeldTensor]:
        network = self._policy.network
        trained = {name for name, _ in network.named_parameters()}
        shards = self._merged | self._fp8.values
        slices = [*named_hf_slices(network, shards), *self._fp8.scales()]
        here = {hf.name: (box, local) for hf, box, local in slices}
        scales = [scale_tensor(hf) for hf in hf_tensors(network) if self._fp8.is_sent(hf)]

        def held(hf: HfTensor, is_scale: bool = False) -> HeldTensor:
            dtype = self._dtype if hf.parameter_name in trained else hf.dtype
            if self._fp8.is_sent(hf):
                dtype = hf.dtype if is_scale else DTYPE
            nothing = tuple((0, 0) for _ in hf.shape), torch.empty(0, dtype=hf.dtype)
            box, local = here.get(hf.name, nothing)
            return HeldTensor(hf.name, hf.shape, dtype, box, local)

        # FP8 scales come first, because engines decode values as they arrive.
        return [held(hf, True) for hf in scales] + [held(hf) for hf in hf_tensors(network)]

    def _sent(self, version: int, error: str, parts: dict[str, float]) -> None:
        if self._source.rank == 0:
            self._ctx.metrics.write(
                version, event="weights_sent", version=version, error=error or None, **parts
            )
            if error:
                self._ctx.log.warning("version %d was not sent: %s", version, error)
