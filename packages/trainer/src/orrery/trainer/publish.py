"""Publishing: the policy's weights go out after every step, whole, under Hugging Face names.

- Every rank takes part (gathering a sharded tensor is a collective); rank 0 writes, one tensor at a time, so no rank ever holds
  two whole tensors because of this.
- Version n is what batch n made; the version that a stage starts from is published before the first batch is asked for.
- Rank 0 remembers the digest of every version, over resumes too (`published.json` in a checkpoint), and compares what a batch says of the
  weights that sampled it.
"""

import json
import shutil
from collections import deque
from pathlib import Path

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Model
from orrery.models.hf_folder import INDEX_FILE
from orrery.models.weights import named_hf_tensors, save
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy
from orrery.trainer.stored import REMEDY
from orrery.transport.weight_wire import Published, WeightPublisher

PUBLISHED = "published.json"  # {version: digest}


class Publisher:
    """The trainer's end of the weight wire.

    It never closes the wire: engines may still be loading the last version when the trainer is done. The launcher frees the shared memory
    when the stage has ended, or where it has died the lifeline of any role.
    """

    def __init__(self, policy: Policy, wire: WeightPublisher | None):
        self._policy, self._wire = policy, wire
        self.digests: dict[int, str] = {}  # by version; rank 0 only

    def publish(self, version: int) -> Published | None:
        """Put version `version` out; what was published, on rank 0."""
        tensors = named_hf_tensors(self._policy.network, full=True)
        if self._wire is not None:
            published = self._wire.publish(version, tensors)
            self.digests[version] = published.digest
            return published
        deque(tensors, maxlen=0)
        return None

    def check(self, step: int, stamped: dict[str, str] | None) -> None:
        """Raises RunFailed where batch `step` was not sampled by what was published. `stamped` are digests by version."""
        if not stamped:
            raise RunFailed(f"batch {step}: does not say which weights sampled it; see logs/orchestrator.0.log")
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
            self.digests = {int(version): digest for version, digest in json.loads((folder / PUBLISHED).read_text()).items()}
        except (OSError, ValueError, AttributeError) as error:
            raise RunFailed(f"{folder / PUBLISHED}: cannot be read ({error}); {REMEDY}") from error


def export(policy: Policy, world: World, model: Model, tokenizer: Path, folder: Path) -> None:
    """Write the policy as the Hugging Face folder `folder`, with the tokenizer files of the folder `tokenizer`. It appears whole."""
    partial = folder.with_name(f"{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
    world.barrier()
    save(policy.network, model, partial)
    if world.is_first:
        copy_tokenizer(tokenizer, partial)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    world.barrier()


def copy_tokenizer(start: Path, folder: Path) -> None:
    """What the Hugging Face folder `start` holds beside weights goes to `folder` too, where there is nothing of that name."""
    for file in start.iterdir():
        if file.is_file() and file.suffix != ".safetensors" and file.name != INDEX_FILE and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)
