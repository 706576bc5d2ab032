"""Checkpoints: bitwise resume, other world sizes, and what a kill leaves behind."""

import json
import multiprocessing
import shutil
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import make_learner, manifest, run_ranks, whole_weights, write_start_weights
from trainer_rank import die_in_the_middle, train

from orrery.manifest.errors import RunFailed
from orrery.trainer import checkpoint
from orrery.transport import checkpoints


@pytest.fixture
def start(tmp_path):
    return write_start_weights(manifest(), tmp_path / "start")


def state_of(learner) -> dict[str, torch.Tensor]:
    state = {name: weight.detach() for name, weight in learner.weights.items()}
    for name, weight in learner.weights.items():
        state |= {f"{key}/{name}": value for key, value in learner.optimizer.state[weight].items()}
    return state


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(start, tmp_path):
    straight, stopped, resumed = (make_learner(manifest(), start) for _ in range(3))
    train(straight, [1, 2, 3, 4])
    train(stopped, [1, 2])
    checkpoint.save(stopped, tmp_path / "step_2" / "trainer")
    drawn = torch.rand(3)
    checkpoint.load(resumed, tmp_path / "step_2" / "trainer")
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.step == 2
    train(resumed, [3, 4])
    expected = state_of(straight)
    for name, value in state_of(resumed).items():
        assert torch.equal(value, expected[name]), name


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder in which two ranks trained straight, stopped, resumed, and read what one rank had written in `by_one`."""
    folder = tmp_path_factory.mktemp("two_ranks")
    alone = make_learner(manifest(), write_start_weights(manifest(), folder / "start"))
    train(alone, [1, 2])
    checkpoint.save(alone, folder / "by_one")
    shards, replicas = {"mesh": {"dp_shard": 2}}, {"mesh": {"dp_replicate": 2}}
    by_one, by_two = {"resume": folder / "by_one", "steps": []}, folder / "step_2" / "trainer"
    jobs = [
        {"name": "straight", "manifest": shards, "steps": [1, 2, 3, 4]},
        {"name": "stopped", "manifest": shards, "steps": [1, 2], "save": by_two},
        {"name": "resumed", "manifest": shards, "steps": [3, 4], "resume": by_two},
        {"name": "shards_again", "manifest": shards, "save": folder / "shards_again", **by_one},
        {"name": "replicas_again", "manifest": replicas, "save": folder / "replicas_again", **by_one},
    ]
    run_ranks(2, folder, jobs)
    return folder


def test_two_ranks_resume_to_the_same_bits(two_ranks):
    straight = load_file(two_ranks / "straight.safetensors")
    for name, weight in load_file(two_ranks / "resumed.safetensors").items():
        assert torch.equal(weight, straight[name]), name


def test_one_rank_reads_what_two_wrote(two_ranks):
    alone = make_learner(manifest(), two_ranks / "start")
    checkpoint.load(alone, two_ranks / "step_2" / "trainer")
    stopped = load_file(two_ranks / "stopped.safetensors")
    for name, weight in whole_weights(alone).items():
        assert torch.equal(weight, stopped[name]), name
    train(alone, [3, 4])
    straight = load_file(two_ranks / "straight.safetensors")
    for name, weight in whole_weights(alone).items():
        torch.testing.assert_close(weight, straight[name], rtol=0, atol=2e-5)  # test_trainer_learner.py says why


@pytest.mark.parametrize("name", ["shards_again", "replicas_again"])
def test_two_ranks_read_what_one_wrote_and_write_the_same(two_ranks, name):
    one, again = (make_learner(manifest(), two_ranks / "start") for _ in range(2))
    checkpoint.load(one, two_ranks / "by_one")
    checkpoint.load(again, two_ranks / name)
    expected = state_of(one)
    for key, value in state_of(again).items():
        assert torch.equal(value, expected[key]), key


def test_a_checkpoint_of_another_model_is_refused_by_tensor(start, tmp_path):
    learner = make_learner(manifest(), start)
    train(learner, [1])
    checkpoint.save(learner, tmp_path / "trainer")
    model = {"intermediate_size": 64}
    other = make_learner(manifest(model=model), write_start_weights(manifest(model=model), tmp_path / "other"))
    with pytest.raises(RunFailed, match=r"weight/network.layers.0.mlp.gate_proj.weight has shape \[48, 32\], the model's has \[64, 32\]"):
        checkpoint.load(other, tmp_path / "trainer")
    model = {"num_layers": 1}
    other = make_learner(manifest(model=model), write_start_weights(manifest(model=model), tmp_path / "shallow"))
    with pytest.raises(RunFailed, match=r"network.layers.1\S+ is only in the checkpoint"):
        checkpoint.load(other, tmp_path / "trainer")


def test_a_lost_rank_file_and_a_torn_one_are_named(start, tmp_path):
    learner = make_learner(manifest(), start)
    train(learner, [1])
    checkpoint.save(learner, tmp_path / "whole")
    breakages = {"rank_0.safetensors": lambda path: path.write_bytes(b"torn"), "rank_0.json": Path.unlink, "state.json": Path.unlink}
    for name, breakage in breakages.items():
        shutil.copytree(tmp_path / "whole", tmp_path / "trainer", dirs_exist_ok=True)
        breakage(tmp_path / "trainer" / name)
        with pytest.raises(RunFailed, match=name):
            checkpoint.load(learner, tmp_path / "trainer")


@pytest.mark.parametrize("after_file", ["half", "rank_0.safetensors", "state.json", "step_3"])
def test_a_checkpoint_killed_while_it_was_written_is_not_seen_and_can_be_written_again(start, tmp_path, after_file):
    learner = make_learner(manifest(), start)
    train(learner, [1, 2])
    checkpoint.save(learner, checkpoints.checkpoint_dir(tmp_path, 2) / "trainer")
    checkpoints.complete(checkpoints.checkpoint_dir(tmp_path, 2))
    process = multiprocessing.get_context("spawn").Process(target=die_in_the_middle, args=(start, tmp_path, after_file))
    process.start()
    process.join(60)
    assert process.exitcode == -signal.SIGKILL
    torn = checkpoints.checkpoint_dir(tmp_path, 3)
    assert (torn / "trainer").exists() == (after_file == "step_3")
    if after_file == "half":
        whole = checkpoints.checkpoint_dir(tmp_path, 2) / "trainer" / "rank_0.safetensors"
        assert 0 < (torn / "trainer.partial" / "rank_0.safetensors").stat().st_size < whole.stat().st_size
    assert checkpoints.latest(tmp_path) == 2
    checkpoints.verify(checkpoints.checkpoint_dir(tmp_path, 2))
    checkpoint.load(learner, checkpoints.checkpoint_dir(tmp_path, 2) / "trainer")
    train(learner, [3])
    checkpoint.save(learner, checkpoints.checkpoint_dir(tmp_path, 3) / "trainer")
    checkpoints.complete(checkpoints.checkpoint_dir(tmp_path, 3))
    assert checkpoints.latest(tmp_path) == 3
    assert json.loads((checkpoints.checkpoint_dir(tmp_path, 3) / "trainer" / "state.json").read_text())["step"] == 3
    assert sorted(path.name for path in checkpoints.checkpoint_dir(tmp_path, 3).iterdir()) == ["COMPLETE", "files.json", "trainer"]
