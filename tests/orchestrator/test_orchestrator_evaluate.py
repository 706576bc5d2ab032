"""The evaluate stage judges only the last version that the trainer published."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from orrery.manifest.errors import RunFailed
from orrery.orchestrator.evaluate import check_last
from orrery.wire import checkpoints
from orrery.wire.weight_wire.files import WeightPublisher


def stage(run_dir, weights="files", fp8=None):
    transport, model = SimpleNamespace(weights=weights), SimpleNamespace(fp8=fp8)
    return SimpleNamespace(
        run_dir=run_dir, manifest=SimpleNamespace(transport=transport, model=model)
    )


def published(run_dir, digest, step=4):
    folder = checkpoints.checkpoint_dir(run_dir, step, 1)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / checkpoints.PUBLISHED).write_text(
        json.dumps({"3": "other", str(step): digest})
    )
    checkpoints.complete(folder)
    return folder


@pytest.fixture
def rl(tmp_path):
    """Return a run directory with `weights/rl`, and the digest of these weights."""
    folder = tmp_path / "weights" / "rl"
    folder.mkdir(parents=True)
    save_file({"w": np.arange(4, dtype=np.float32)}, folder / "model.safetensors")
    return tmp_path, folder, WeightPublisher(tmp_path / "wire").publish_folder(4, folder).digest


def test_weights_that_the_trainer_did_not_publish_last_are_not_evaluated(rl):
    run_dir, folder, digest = rl
    checkpoint = published(run_dir, digest)
    check_last(stage(run_dir), 4, folder, digest)
    save_file({"w": np.arange(1, 5, dtype=np.float32)}, folder / "model.safetensors")
    other = WeightPublisher(run_dir / "wire").publish_folder(5, folder).digest
    with pytest.raises(
        RunFailed,
        match=f"weights/rl: has weights {other}, but the trainer published {digest} "
        "as its last version; remove",
    ):
        check_last(stage(run_dir), 4, folder, other)
    (checkpoint / "trainer" / checkpoints.PUBLISHED).write_text("{}")
    with pytest.raises(RunFailed, match="has no digest of version 4"):
        check_last(stage(run_dir), 4, folder, digest)


def test_where_the_two_are_not_of_the_same_tensors_nothing_is_compared(rl):
    run_dir, folder, digest = rl
    check_last(stage(run_dir), 4, folder, digest)  # no checkpoint
    published(run_dir, "other")
    check_last(stage(run_dir, "nccl"), 4, folder, digest)
    check_last(stage(run_dir, fp8=["experts"]), 4, folder, digest)  # the wire carries FP8
    check_last(stage(run_dir), 6, folder, digest)
