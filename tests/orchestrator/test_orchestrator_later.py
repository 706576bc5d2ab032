"""The state of a wind-down, `later.attempt_<k>/`: damage to it leaves the checkpoint usable."""

import errno
import os
import shutil

import pytest

from orrery.manifest.errors import OrreryError
from orrery.orchestrator import snapshot
from orrery.orchestrator.scheduler import Snapshot
from orrery.wire import checkpoints


def scheduler(next_batch: int, evaluated: int) -> Snapshot:
    return Snapshot(next_batch, [1], [], [], [], 0, evaluated, 0, {}, 9, [])


@pytest.fixture
def wound_down(tmp_path):
    """A run directory whose step 2 has its checkpoint, and a newer state of the orchestrator."""
    snapshot.write(tmp_path, 2, 1, scheduler(3, 1), 1.0)
    checkpoints.complete(checkpoints.checkpoint_dir(tmp_path, 2, 1))
    snapshot.write_now(tmp_path, 2, 1, scheduler(3, 2), 1.0, is_resumed=False)
    return tmp_path


def damage_a_file(later):
    (later / "orchestrator" / "queue.safetensors").write_bytes(b"torn")


def write_what_cannot_be_read(later):
    (later / "orchestrator" / "state.json").write_text("{}")
    checkpoints.complete(later)


@pytest.mark.parametrize("damage", [damage_a_file, write_what_cannot_be_read])
def test_the_remedy_for_a_damaged_later_state_is_to_remove_that_alone(wound_down, damage):
    step = checkpoints.checkpoint_dir(wound_down, 2, 1)
    assert snapshot.read(checkpoints.checkpoint_dir(wound_down, 2, 1), 2).evaluated == 2
    damage(step / "later.attempt_1")
    with pytest.raises(OrreryError) as refused:
        snapshot.read(checkpoints.checkpoint_dir(wound_down, 2, 1), 2)
    expected = f"remove {step / 'later.attempt_1'} to resume from the state before batch 2 was sent"
    assert expected in str(refused.value)
    shutil.rmtree(step / "later.attempt_1")
    assert snapshot.read(checkpoints.checkpoint_dir(wound_down, 2, 1), 2).evaluated == 1
    (step / "orchestrator" / "state.json").write_text("{}")
    with pytest.raises(OrreryError, match=f"remove {step} to go on from the checkpoint before it"):
        snapshot.read(checkpoints.checkpoint_dir(wound_down, 2, 1), 2)


def test_an_older_later_state_that_will_not_go_does_not_keep_the_newer_from_its_place(
    wound_down, monkeypatch
):
    def will_not_go(folder, ignore_errors=False):
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    monkeypatch.setattr(shutil, "rmtree", will_not_go)
    snapshot.write_now(wound_down, 2, 1, scheduler(3, 3), 1.0, is_resumed=False)
    assert snapshot.read(checkpoints.checkpoint_dir(wound_down, 2, 1), 2).evaluated == 3
