"""Publishing: the policy's weights go out after every step, under Hugging Face names.

- Every rank takes part. On the wire `files` tensors are gathered and rank 0 writes, one tensor at a time, so no rank ever holds two whole
  tensors because of this. On a direct wire each rank answers for its own part, and sends it when engines ask (`DirectPublisher`).
- On a direct wire weights travel in the dtype that engines compute in; buffers, such as a bias of choice, in their own. On the wire
  `adapters` nothing travels but adapters, in that dtype too.
- Version n is what batch n made; the version that a stage starts from is published before the first batch is asked for.
- Rank 0 remembers the digest of every version, over resumes too (`published.json` in a checkpoint), and compares what a batch says of the
  weights that sampled it.
"""

import json
import shutil
from collections import deque
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from orrery.manifest.errors import RunFailed
from orrery.manifest.publish import make_folder, publish_folder
from orrery.manifest.schema import Model
from orrery.models.hf_folder import INDEX_FILE
from orrery.models.hf_tensors import HfTensor, hf_tensors, named_peft_tensors
from orrery.models.lora import adapters, merged_shard
from orrery.models.placement import local_tensor
from orrery.models.weights import named_hf_slices, named_hf_tensors, save
from orrery.observe.deadline import scaled
from orrery.observe.process import RoleContext
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy
from orrery.trainer.stored import REMEDY
from orrery.transport.checkpoints import PUBLISHED
from orrery.transport.weight_wire import Published, WeightPublisher
from orrery.transport.weight_wire.buckets import Held
from orrery.transport.weight_wire.source import SETTLE_S, Source


class Publisher:
    """The trainer's end of the wire `files`.

    It never closes the wire: engines may still be loading the last version when the trainer is done. The launcher frees the shared memory
    when the stage has ended, or where it has died the lifeline of any role.
    """

    def __init__(self, policy: Policy, wire: WeightPublisher | None):
        self._policy, self._wire = policy, wire
        self.digests: dict[int, str] = {}  # by version; rank 0 only

    def publish(self, version: int, canary: Sequence[float] = ()) -> Published | None:
        """Publish `version` with its log-probs of the canary; return it on rank 0."""
        tensors = self._named_tensors()
        if self._wire is not None:
            published = self._wire.publish(version, tensors, canary)
            self.digests[version] = published.digest
            return published
        deque(tensors, maxlen=0)
        return None

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_hf_tensors(self._policy.network)

    def settle(self) -> float:
        """Called by all ranks just before the weights change; seconds that this took."""
        return 0.0

    def close(self) -> None:
        """Called once, when nothing more is published."""

    def check(self, step: int, stamped: dict[str, str] | None) -> None:
        """Raises RunFailed where batch `step` was not sampled by what was published. `stamped` are digests by version."""
        if not stamped:
            raise RunFailed(
                f"batch {step}: does not say which weights sampled it; see logs/orchestrator.0.log"
            )
        for version, digest in stamped.items():
            published = self.digests.get(int(version))
            if digest != published:
                raise RunFailed(
                    f"batch {step}: its rollouts carry version {version} with digest {digest}, but the trainer published "
                    f"{f'it with {published}' if published else 'no such version'}; the engines sampled from other weights"
                )

    def record(self) -> dict[str, bytes]:
        """The file, by its name, that a checkpoint of now needs."""
        return {PUBLISHED: (json.dumps(self.digests) + "\n").encode()}

    def restore(self, folder: Path) -> None:
        """Go on from the `record` in `folder`. Raises RunFailed where it is not there."""
        try:
            self.digests = {
                int(version): digest
                for version, digest in json.loads((folder / PUBLISHED).read_text()).items()
            }
        except (OSError, ValueError, AttributeError) as error:
            raise RunFailed(f"{folder / PUBLISHED}: cannot be read ({error}); {REMEDY}") from error


class AdapterPublisher(Publisher):
    """The trainer's end of the wire `adapters`."""

    def __init__(self, policy: Policy, wire: WeightPublisher | None, dtype: torch.dtype):
        super().__init__(policy, wire)
        self._dtype = dtype

    def _named_tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        return named_peft_tensors(self._policy.network, self._dtype)


class DirectPublisher(Publisher):
    """The trainer's end of a direct wire, on every rank. It sends from the weights themselves, until `settle`.

    Of weights under adapters it keeps each shard merged, in the engines' dtype, and sends from there.
    """

    def __init__(self, policy: Policy, source: Source, dtype: torch.dtype, ctx: RoleContext):
        super().__init__(policy, None)
        self._source, self._dtype, self._ctx = source, dtype, ctx
        self._merged: dict[str, torch.Tensor] = {}  # by name of our parameter

    def publish(self, version: int, canary: Sequence[float] = ()) -> Published | None:
        network = self._policy.network
        self._merge()
        standing = [local_tensor(tensor) for tensor in (*network.parameters(), *network.buffers())]
        published = self._source.publish(version, self._held, standing, self._sent, canary)
        if published is not None:
            self.digests[version] = published.digest
        return published

    def settle(self) -> float:
        with self._ctx.health.waiting(
            "engines that have asked for these weights", deadline_s=scaled(SETTLE_S)
        ):
            return self._source.settle()

    def close(self) -> None:
        self._source.close()

    def _merge(self) -> None:
        weights = dict(self._policy.network.named_parameters())
        for name, adapter in adapters(self._policy.network):
            shard = merged_shard(weights[name], adapter)
            self._merged.setdefault(name, torch.empty_like(shard, dtype=self._dtype)).copy_(shard)

    def _held(self) -> list[Held]:
        network = self._policy.network
        trained = {name for name, _ in network.named_parameters()}
        here = {hf.name: (box, local) for hf, box, local in named_hf_slices(network, self._merged)}

        def held(hf: HfTensor) -> Held:
            dtype = self._dtype if hf.parameter_name in trained else hf.dtype
            box, local = here.get(
                hf.name, (tuple((0, 0) for _ in hf.shape), torch.empty(0, dtype=hf.dtype))
            )
            return Held(hf.name, hf.shape, dtype, box, local)

        return [held(hf) for hf in hf_tensors(network)]

    def _sent(self, version: int, error: str, parts: dict[str, float]) -> None:
        if self._source.rank == 0:
            self._ctx.metrics.write(
                version, event="weights_sent", version=version, error=error or None, **parts
            )
            if error:
                self._ctx.log.warning("version %d was not sent: %s", version, error)


def export(policy: Policy, world: World, model: Model, tokenizer: Path, folder: Path) -> None:
    """Write the policy and the files of the folder `tokenizer` as the Hugging Face folder `folder`.

    The folder appears whole, and is durable when this returns.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
    world.barrier()
    save(policy.network, model, partial)
    if world.is_first:
        copy_tokenizer(tokenizer, partial)
        publish_folder(partial, folder)
    world.barrier()


def copy_tokenizer(start: Path, folder: Path) -> None:
    """What the Hugging Face folder `start` holds beside weights goes to `folder` too, where there is nothing of that name."""
    for file in start.iterdir():
        if (
            file.is_file()
            and file.suffix != ".safetensors"
            and file.name != INDEX_FILE
            and not (folder / file.name).exists()
        ):
            shutil.copyfile(file, folder / file.name)
