"""Checkpoints: bitwise resume, other world sizes, and what a kill leaves behind."""

import errno
import json
import os
import re
import resource
import shutil
import threading
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from optim_cases import MUON
from replaced import replaced
from safetensors.torch import load_file, save_file
from trainer_cases import (
    HOSTED,
    MOE,
    OFFLOADED,
    SaverHere,
    make_learner,
    manifest,
    run_ranks,
    save_checkpoint,
    whole_weights,
    write_start_weights,
)
from trainer_rank import train

from orrery.manifest.errors import RunFailed
from orrery.manifest.identity import canonical_json
from orrery.manifest.publish import sha256
from orrery.runtime.role_context import parse_role
from orrery.runtime.run_directory import SHARED_MEMORY, inputs_path, saves_prefix
from orrery.trainer import checkpoint, checkpoint_writer, heartbeat, saver
from orrery.trainer.assemble import assemble_learner
from orrery.trainer.checkpoint_writer import CheckpointWriter, StageCheckpoints
from orrery.trainer.export import export_checkpoint
from orrery.trainer.parallel.world import World
from orrery.wire import checkpoints


@pytest.fixture
def start(tmp_path):
    return write_start_weights(manifest(), tmp_path / "start")


def state_of(learner) -> dict[str, torch.Tensor]:
    """Copies of all that training changes, on one rank."""
    return {name: held.local.clone() for name, held in checkpoint.state_of(learner).items()}


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        assert torch.equal(value, expected[name]), name


def test_a_run_that_began_on_cpus_goes_on_on_gpus_though_they_had_no_state_of_chance():
    state = torch.get_rng_state()
    checkpoint._restore_rng(
        SimpleNamespace(keys=lambda: ["rng/cpu"], get_tensor={"rng/cpu": state}.__getitem__),
        torch.device("cuda", 0),
    )


def test_a_resumed_run_has_the_bits_of_one_that_was_never_stopped(start, tmp_path):
    straight, stopped, resumed = (make_learner(manifest(), start) for _ in range(3))
    train(straight, [1, 2, 3, 4])
    train(stopped, [1, 2])
    save_checkpoint(stopped, tmp_path / "step_2" / "trainer")
    drawn = torch.rand(3)
    checkpoint.load(resumed, tmp_path / "step_2" / "trainer")
    assert torch.equal(torch.rand(3), drawn)
    assert resumed.step == 2
    train(resumed, [3, 4])
    assert_same(state_of(resumed), state_of(straight))


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory):
    """A folder of two ranks that trained, stopped, resumed, and read one rank's `by_one`."""
    folder = tmp_path_factory.mktemp("two_ranks")
    alone = make_learner(manifest(), write_start_weights(manifest(), folder / "start"))
    train(alone, [1, 2])
    save_checkpoint(alone, folder / "by_one")
    shards, replicas = {"mesh": {"dp_shard": 2}}, {"mesh": {"dp_replicate": 2}}
    by_one, by_two = {"resume": folder / "by_one", "steps": []}, folder / "step_2" / "trainer"
    jobs = [
        {"name": "straight", "manifest": shards, "steps": [1, 2, 3, 4]},
        {"name": "stopped", "manifest": shards, "steps": [1, 2], "save": by_two},
        {"name": "resumed", "manifest": shards, "steps": [3, 4], "resume": by_two},
        {"name": "shards_again", "manifest": shards, "save": folder / "shards_again", **by_one},
        {
            "name": "replicas_again",
            "manifest": replicas,
            "save": folder / "replicas_again",
            **by_one,
        },
        {
            "name": "replicas_apart",
            "manifest": replicas,
            "save": folder / "replicas_apart",
            "bit_flipped_on": 1,
            **by_one,
        },
        {
            "name": "not_finite",
            "manifest": shards,
            "save": folder / "not_finite",
            "moment_lost_on": 1,
            **by_one,
        },
    ]
    (folder / "answers.json").write_text(json.dumps(run_ranks(2, folder, jobs)))
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
        torch.testing.assert_close(
            weight, straight[name], rtol=0, atol=2e-5
        )  # test_trainer_learner.py says why


@pytest.mark.parametrize("name", ["shards_again", "replicas_again"])
def test_two_ranks_read_what_one_wrote_and_write_the_same(two_ranks, name):
    one, again = (make_learner(manifest(), two_ranks / "start") for _ in range(2))
    checkpoint.load(one, two_ranks / "by_one")
    checkpoint.load(again, two_ranks / name)
    assert_same(state_of(again), state_of(one))


def test_replicas_that_differ_in_one_bit_are_named_and_nothing_of_them_is_stored(two_ranks):
    for answers in json.loads((two_ranks / "answers.json").read_text()):
        assert (
            "step 2: rank 1 and rank 0 must have equal weights (dp_replicate 2), but they differ"
            in answers["replicas_apart"]["error"]
        )
        assert "error" not in answers["replicas_again"]
    assert not (two_ranks / "replicas_apart").exists()


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
@pytest.mark.parametrize("key", ["weight", "exp_avg_sq"])
def test_what_is_not_finite_is_named_and_the_checkpoint_before_stays(start, tmp_path, key, value):
    learner, again = (make_learner(manifest(), start) for _ in range(2))
    name = f"{key}/network.layers.1.mlp.up_proj.weight"
    with CheckpointWriter(learner.world, saver=SaverHere) as writer:
        for step in (1, 2):
            train(learner, [step])
            folder = checkpoints.checkpoint_dir(tmp_path, step, 1)
            if step == 2:
                checkpoint.state_of(learner)[name].local[3, 4] = value
                with pytest.raises(
                    RunFailed,
                    match=rf"^step 2: after its update {name} is not finite on rank 0, so no "
                    rf"checkpoint is written",
                ):
                    writer.copy(learner, folder / "trainer")
            else:
                writer.copy(learner, folder / "trainer")
                writer.write(lambda folder=folder: checkpoints.complete(folder))
    assert (
        checkpoints.steps(tmp_path)[-1] == 1
        and not checkpoints.checkpoint_dir(tmp_path, 2, 1).exists()
    )
    checkpoint.load(again, checkpoints.checkpoint_dir(tmp_path, 1, 1) / "trainer")
    train(again, [2])


def test_every_rank_hears_whose_part_is_not_finite(two_ranks):
    for answers in json.loads((two_ranks / "answers.json").read_text()):
        assert re.match(
            r"step 2: after its update exp_avg/network\.\S+ is not finite on rank 1, so no "
            r"checkpoint is written",
            answers["not_finite"]["error"],
        )
    assert not (two_ranks / "not_finite").exists()


def test_a_fingerprint_tells_bits_and_places():
    one, other = torch.tensor([1.0, 2.0]), torch.tensor([3.0], dtype=torch.bfloat16)
    assert checkpoint_writer.fingerprint([one, other]) == checkpoint_writer.fingerprint(
        [one.clone(), other.clone()]
    )
    assert checkpoint_writer.fingerprint([one, other]) != checkpoint_writer.fingerprint(
        [other, one]
    )
    assert checkpoint_writer.fingerprint([-torch.zeros(1)]) != checkpoint_writer.fingerprint(
        [torch.zeros(1)]
    )
    assert checkpoint_writer.fingerprint([]) == checkpoint_writer.fingerprint([torch.empty(0)]) == 0


MIXTURE = {"family": "qwen3_moe", "moe": {**MOE, "expert_intermediate_size": 20}}
MESHES = {
    "shards": {"dp_shard": 4},
    "replicas_of_experts": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
    "context": {"dp_shard": 2, "cp": 2, "ep": 4},
    "experts": {"dp_shard": 4, "ep": 2},
    "replicas": {"dp_replicate": 4},
}
ADAPTERS = {"rank": 6, "alpha": 8.0, "targets": ["attention", "experts"], "seed": 1}
HERE: dict = {}
ROUTES = {  # what is trained, and where its state lies on each of the meshes
    "adamw": ({}, (HERE, HERE, HERE, OFFLOADED, HERE)),
    "adamw_away": ({}, (HOSTED, OFFLOADED, HOSTED, HOSTED, OFFLOADED)),
    "muon": ({"optimizer": MUON}, (HERE, HERE, HERE, HERE, HERE)),
    "muon_away": ({"optimizer": MUON}, (OFFLOADED, HOSTED, OFFLOADED, HOSTED, HOSTED)),
    "adapters": ({"optimizer": MUON, "lora": ADAPTERS}, (HOSTED, OFFLOADED, HERE, HOSTED, HERE)),
}


@pytest.fixture(scope="module")
def travelled(tmp_path_factory):
    """A folder of states that went from mesh to mesh, and {route: (state, a step later)}."""
    folder, states, jobs = tmp_path_factory.mktemp("travelled"), {}, []
    write_start_weights(manifest(model=MIXTURE), folder / "start")
    for route, (trainer, places) in ROUTES.items():
        alone = make_learner(manifest(model=MIXTURE, trainer=trainer), folder / "start")
        train(alone, [1, 2])
        save_checkpoint(alone, before := folder / route)
        for (mesh, axes), place in zip(MESHES.items(), places, strict=True):
            job = {
                "name": f"{route}_{mesh}",
                "manifest": {"model": MIXTURE, "mesh": axes, "trainer": {**trainer, **place}},
            }
            jobs.append(
                {**job, "resume": before, "steps": [], "save": (before := folder / job["name"])}
            )
        fields = {"model": MIXTURE, "mesh": MESHES["experts"], "trainer": {**trainer, **places[-2]}}
        jobs.append(
            {"name": f"{route}_onwards", "manifest": fields, "resume": before, "steps": [3]}
        )
        here = state_of(alone)
        train(alone, [3])
        states[route] = here, state_of(alone)
    run_ranks(4, folder, jobs)
    return folder, states


def stored_bytes(folder: Path) -> int:
    """All that the files of a checkpoint hold, but for random-number state."""
    tensors = [
        item for path in folder.glob("rank_*.safetensors") for item in load_file(path).items()
    ]
    return sum(tensor.nbytes for name, tensor in tensors if not name.startswith("rng/"))


@pytest.mark.parametrize("route", ROUTES)
def test_every_mesh_reads_what_every_other_wrote(travelled, route):
    """A state passes through meshes of four ranks, keeps its bits, and can be trained on."""
    folder, states = travelled
    expected, onwards = states[route]
    for mesh in MESHES:
        again = make_learner(manifest(model=MIXTURE, trainer=ROUTES[route][0]), folder / "start")
        checkpoint.load(again, folder / f"{route}_{mesh}")
        assert_same(state_of(again), expected)
        train(again, [3])
        assert_same(state_of(again), onwards)
        assert stored_bytes(folder / f"{route}_{mesh}") == stored_bytes(folder / route), (
            "nothing is there twice"
        )
    for name, weight in load_file(folder / f"{route}_onwards.safetensors").items():
        torch.testing.assert_close(
            weight, onwards[f"weight/{name}"], rtol=0, atol=2e-5
        )  # test_trainer_learner.py says why


def test_a_checkpoint_of_another_model_is_refused_by_tensor(start, tmp_path):
    learner = make_learner(manifest(), start)
    train(learner, [1])
    save_checkpoint(learner, tmp_path / "trainer")
    model = {"intermediate_size": 64}
    other = make_learner(
        manifest(model=model), write_start_weights(manifest(model=model), tmp_path / "other")
    )
    with pytest.raises(
        RunFailed,
        match=r"weight/network.layers.0.mlp.gate_proj.weight has shape \[48, 32\], but in "
        r"the model \[64, 32\]",
    ):
        checkpoint.load(other, tmp_path / "trainer")
    model = {"num_layers": 1}
    other = make_learner(
        manifest(model=model), write_start_weights(manifest(model=model), tmp_path / "shallow")
    )
    with pytest.raises(RunFailed, match=r"network.layers.1\S+ is only in the checkpoint"):
        checkpoint.load(other, tmp_path / "trainer")


def test_a_lost_rank_file_and_a_torn_one_are_named(start, tmp_path):
    learner = make_learner(manifest(), start)
    train(learner, [1])
    save_checkpoint(learner, tmp_path / "whole")
    breakages = {
        "rank_0.safetensors": lambda path: path.write_bytes(b"torn"),
        "rank_0.json": Path.unlink,
        "state.json": Path.unlink,
    }
    for name, breakage in breakages.items():
        shutil.copytree(tmp_path / "whole", tmp_path / "trainer", dirs_exist_ok=True)
        breakage(tmp_path / "trainer" / name)
        with pytest.raises(RunFailed, match=name):
            checkpoint.load(learner, tmp_path / "trainer")


class Gate:
    """Holds back the saver until it is opened."""

    def __init__(self):
        self.opened = threading.Event()

    def saver(self, memory: Path) -> SaverHere:
        one = SaverHere(memory)
        save = one.save
        one.save = lambda: self.opened.wait(60) and save()
        return one


def test_a_checkpoint_holds_the_state_that_was_copied_while_training_goes_on(start, tmp_path):
    learner, again = (make_learner(manifest(), start) for _ in range(2))
    gate, waits, completed = Gate(), [], []

    @contextmanager
    def waiting(what, deadline_s, behind_s):
        waits.append(what)
        if "step_2" in what:
            gate.opened.set()
        yield

    train(learner, [1, 2])
    expected = state_of(learner)
    with CheckpointWriter(learner.world, waiting, saver=gate.saver) as writer:
        writer.reserve(learner)
        assert writer.copy(learner, tmp_path / "step_2" / "trainer", {"more.json": b"{}"}) > 0
        writer.write(lambda: completed.append(2))
        train(learner, [3])
        writer.check()
        assert not completed and not (tmp_path / "step_2" / "trainer").exists()
        writer.copy(learner, tmp_path / "step_3" / "trainer")
        assert completed == [2], "one at a time"
        assert waits[-1] == "the checkpoint in step_2"
        writer.write(lambda: completed.append(3))
    assert completed == [2, 3]
    checkpoint.load(again, tmp_path / "step_2" / "trainer")
    assert again.step == 2 and (tmp_path / "step_2" / "trainer" / "more.json").read_bytes() == b"{}"
    assert_same(state_of(again), expected)
    checkpoint.load(again, tmp_path / "step_3" / "trainer")
    assert_same(state_of(again), state_of(learner))


def test_a_full_disk_ends_the_run_by_file_and_leaves_the_checkpoint_before(start, tmp_path):
    learner, again = (make_learner(manifest(), start) for _ in range(2))
    train(learner, [1, 2])
    two, three = (checkpoints.checkpoint_dir(tmp_path, step, 1) for step in (2, 3))
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with CheckpointWriter(learner.world, saver=SaverHere) as writer:
        writer.copy(learner, two / "trainer")
        writer.write(lambda: checkpoints.complete(two, [f"trainer/{saver.checksum_file(0)}"]))
        train(learner, [3])
        writer.copy(learner, three / "trainer")
        try:
            resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, before[1]))
            writer.write(lambda: checkpoints.complete(three))
            with pytest.raises(
                RunFailed,
                match=r"rank_0\.safetensors: File too large; the run goes on from its newest "
                r"whole checkpoint",
            ):
                while True:
                    writer.check()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, before)
        assert checkpoints.steps(tmp_path)[-1] == 2
        checkpoints.verify(two)
        checkpoint.load(again, two / "trainer")
        assert again.step == 2
        writer.copy(
            learner, three / "trainer"
        )  # what is left of the first attempt is not in the way
        writer.write(lambda: checkpoints.complete(three, [f"trainer/{saver.checksum_file(0)}"]))
    assert checkpoints.steps(tmp_path)[-1] == 3
    checkpoints.verify(three)
    assert not list(three.glob("*.partial"))


def test_a_run_that_fails_or_is_ended_leaves_the_copied_checkpoint_to_its_saver(start, tmp_path):
    learner, again = (make_learner(manifest(), start) for _ in range(2))

    def ended(what, deadline_s, behind_s):
        if "step_" in what:
            raise SystemExit(143)  # as SIGTERM does
        return nullcontext()

    for step, error, work in [
        (1, ZeroDivisionError, lambda writer: 1 / 0),
        (2, SystemExit, CheckpointWriter.wait),
    ]:
        train(learner, [step])
        memory = SHARED_MEMORY / f"{saves_prefix(tmp_path / 'run-1')}{step}"
        folder = checkpoints.checkpoint_dir(tmp_path, step, 1)
        with pytest.raises(error), CheckpointWriter(learner.world, ended, memory) as writer:
            writer.copy(learner, folder / "trainer")
            writer.write(completion=saver.Completion(str(tmp_path), "rl", 1, 2))
            work(writer)
        if (process := writer._saver._process) is not None:
            saver._end(process)
        assert not memory.exists()
        checkpoints.verify(folder)
    checkpoint.load(again, folder / "trainer")
    assert_same(state_of(again), state_of(learner))


def test_a_host_without_memory_for_the_copy_ends_the_run_at_its_first_step(start, monkeypatch):
    learner = make_learner(manifest(), start)
    monkeypatch.setattr(checkpoint, "available_bytes", lambda: 1000)
    with (
        pytest.raises(
            RunFailed,
            match=r"in this rank's copy take 0\.0 GB of host memory, of which 0\.0 GB are left",
        ),
        CheckpointWriter(learner.world) as writer,
    ):
        writer.reserve(learner)
        while True:
            writer.check()


@pytest.mark.parametrize(("hosts", "fits"), [([7, 7, 8], False), ([7, 9, 8], True)])
def test_the_copies_of_all_ranks_of_a_host_must_fit_together(hosts, fits):
    """Three ranks ask for 60 bytes each; their hosts have 100, and the second sees less of it."""
    told = iter([hosts, [100, 90, 100], [200, 200, 200], [9, 0, 0], [60, 60, 60]])
    world = SimpleNamespace(rank=0, all_gather=lambda value: next(told))
    copy = checkpoint.SharedCopy(Path("copy"), torch.device("cpu"))
    if fits:
        copy.check_room(60, world)
    else:
        with pytest.raises(
            RunFailed,
            match=r"in the copies of the 2 ranks on this host take 0\.0 GB of host memory, of "
            r"which 0\.0",
        ):
            copy.check_room(60, world)


@pytest.mark.parametrize(
    ("num_steps", "interval_steps", "keep", "num_held", "count"),
    [(12, 2, 2, 0, 3), (12, 2, 2, 2, 1), (12, 2, 2, 5, 1), (3, 2, 4, 0, 2), (12, 2, 4, 3, 2)],
)
def test_checkpoints_that_the_disk_cannot_hold_end_the_stage_at_its_start(
    start, tmp_path, monkeypatch, num_steps, interval_steps, keep, num_held, count
):
    saved = {"interval_steps": interval_steps, "keep": keep}
    spec = manifest(stages={"rl": {"num_steps": num_steps}}, trainer={"checkpoint": saved})
    learner = make_learner(spec, start)
    ctx = SimpleNamespace(
        manifest=spec,
        run_dir=tmp_path,
        attempt=1,
        health=SimpleNamespace(waiting=lambda *_: nullcontext()),
    )
    for step in range(num_held):
        folder = checkpoints.checkpoint_dir(tmp_path, step, 1)
        folder.mkdir(parents=True)
        (folder / checkpoints.MARKER).touch()
    save_checkpoint(learner, tmp_path / "one/trainer")
    each = (tmp_path / "one/trainer/rank_0.safetensors").stat().st_size
    disk = {"free": count * each}
    monkeypatch.setattr(checkpoint_writer.shutil, "disk_usage", lambda _: SimpleNamespace(**disk))
    with StageCheckpoints(ctx, learner, "rl"):
        pass
    disk["free"] -= 1
    refused = (
        rf"the next {count} checkpoints .* on the disk of {tmp_path}, .*checkpoint\.keep \({keep}\)"
    )
    with pytest.raises(RunFailed, match=refused), StageCheckpoints(ctx, learner, "rl"):
        pass


@pytest.mark.parametrize(
    ("free", "spared", "is_taken"),
    [(1000, 0, False), (1 << 40, 1 << 40, False), (1 << 40, 0, True)],
)
def test_copies_without_room_in_shared_memory_are_saved_by_a_saver_that_outlives_the_trainer(
    start, tmp_path, monkeypatch, free, spared, is_taken
):
    learner, again = (make_learner(manifest(), start) for _ in range(2))
    monkeypatch.setattr(checkpoint, "disk_usage", lambda _: SimpleNamespace(free=free))
    fallocate = os.posix_fallocate

    def full(file: int, begin: int, size: int) -> None:
        if is_taken and "memfd" not in os.readlink(f"/proc/self/fd/{file}"):
            raise OSError(errno.ENOSPC, "full")
        fallocate(file, begin, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    memory = SHARED_MEMORY / f"{saves_prefix(tmp_path / 'run-1')}0"
    folders = [checkpoints.checkpoint_dir(tmp_path, step, 1) for step in (1, 2)]
    with pytest.raises(ZeroDivisionError), CheckpointWriter(learner.world, memory=memory) as writer:
        writer._host.check_room(1 << 20, learner.world, spared)
        writer._host.reserve(5000)  # and it grows
        for step, folder in enumerate(folders, 1):
            train(learner, [step])
            writer.copy(learner, folder / "trainer")
            assert (memory / saver.COPY).is_symlink()
            writer.write(completion=saver.Completion(str(tmp_path), "rl", 1, 2))
        os.close(writer._host._nameless)  # as its end does
        1 / 0  # noqa: B018
    writer._saver.wait()
    assert not memory.exists()
    for folder in folders:
        checkpoints.verify(folder)
    checkpoint.load(again, folder / "trainer")
    assert_same(state_of(again), state_of(learner))


def test_the_wait_for_the_saver_comes_after_all_collectives(start, tmp_path):
    learner = make_learner(manifest(), start)
    with CheckpointWriter(learner.world) as writer:
        writer.copy(learner, tmp_path / "trainer")
        writer.write()
        assert not learner.world.at_end
    [wait] = learner.world.at_end
    wait()
    assert writer._saver._process.returncode == 0


def test_a_checkpoint_in_another_precision_is_refused_by_tensor(start, tmp_path):
    learner = make_learner(manifest(), start)
    save_checkpoint(learner, tmp_path / "trainer")
    spec = manifest()
    dtypes = dict.fromkeys(
        ("param_dtype", "compute_dtype", "reduce_dtype"), "bfloat16"
    )  # which a manifest may not say
    half = make_learner(replaced(spec, "trainer", **dtypes), start)
    with pytest.raises(
        RunFailed, match=r"weight/network\.\S+ is float32, in the model bfloat16.* export the"
    ):
        checkpoint.load(half, tmp_path / "trainer")


class OfTwo:
    """The world of the second of two replicas. `said` lists its collectives in order."""

    rank, size, replica, is_first, device = 1, 2, 1, False, torch.device("cpu")

    def __init__(self):
        self.said = []

    def axis_size(self, axis):
        return 2

    def all_gather(self, value):
        self.said.append("each")
        return [value, value]

    def barrier(self):
        self.said.append("barrier")


@pytest.fixture
def second(start, tmp_path):
    """A learner, the second rank's world, and its writer, which has written step 0."""
    learner, world = make_learner(manifest(), start), OfTwo()
    writer = CheckpointWriter(world, memory=tmp_path / "memory", saver=SaverHere)
    (tmp_path / "step_0" / "trainer.partial").mkdir(parents=True)  # as the first rank does
    writer.copy(learner, tmp_path / "step_0" / "trainer")
    writer.write(marker=tmp_path / "step_0" / "COMPLETE")
    writer.wait()
    world.said.clear()
    return learner, world, writer


def test_a_rank_looks_for_the_whole_checkpoint_before_it_meets_the_first_in_a_collective(
    second, tmp_path
):
    _, world, writer = second

    @contextmanager
    def waiting(what, deadline_s, behind_s):
        world.said.append((what, deadline_s, behind_s))
        (tmp_path / "step_0" / "COMPLETE").touch()
        yield

    writer._waiting = waiting
    writer.finish()
    writer.finish()
    assert world.said == [
        ("the checkpoint in step_0", checkpoint_writer.WRITE_DEADLINE_S, heartbeat.IO_STALL_S),
        "barrier",
        "barrier",
    ]


@pytest.mark.parametrize("call", ["finish", "copy"])
def test_a_rank_that_waits_too_long_for_the_first_says_so_and_meets_nobody(
    second, tmp_path, monkeypatch, call
):
    learner, world, writer = second
    monkeypatch.setattr(checkpoint_writer, "WRITE_DEADLINE_S", 0.0)
    with pytest.raises(
        RunFailed,
        match=r"^the checkpoint in step_0: not done after 0 s; is the disk of this run "
        r"reachable, and fast",
    ):
        writer.finish() if call == "finish" else writer.copy(
            learner, tmp_path / "step_2" / "trainer"
        )
    assert not world.said


def test_a_file_that_another_rank_renames_meanwhile_does_not_end_the_checkpoint(
    tmp_path, monkeypatch
):
    note, listed = tmp_path / saver.checksum_file(0), []

    def listdir(folder):
        listed.append(folder)
        if len(listed) > 1:
            note.touch()
        return [note.name if note.exists() else f".{note.name}.tmp"]

    monkeypatch.setattr(saver.os, "listdir", listdir)
    saver._await_checksums(tmp_path, 1, lambda: True)
    assert len(listed) == 2


def test_a_rank_that_does_not_write_its_part_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "WRITE_DEADLINE_S", 0.0)
    (tmp_path / saver.checksum_file(0)).touch()
    with pytest.raises(
        RunFailed, match=r"has no files of rank 1 after 0 s; see logs/trainer\.1\.log"
    ):
        saver._await_checksums(tmp_path, 3, lambda: True)


def test_a_file_written_in_chunks_has_the_bytes_of_save_file(tmp_path, monkeypatch):
    monkeypatch.setattr(saver, "CHUNK_BYTES", 64)
    monkeypatch.setattr(saver, "SYNC_BYTES", 128)
    tensors = {
        "b": torch.randn(3, 5),
        "a": torch.randn(7).bfloat16(),
        'ü "quoted"': torch.arange(5),
        "scalar": torch.tensor(2.0),
        "empty": torch.empty(0, 3),
        "bytes": torch.arange(200, dtype=torch.uint8),
        "flag": torch.tensor([True, False]),
    }
    save_file(tensors, tmp_path / "one")
    copy = checkpoint.SharedCopy(tmp_path / "memory" / "copy", torch.device("cpu"))
    num_bytes = copy.fill(tensors)
    content = (tmp_path / "memory" / "copy").read_bytes()
    assert len(content) == num_bytes
    found = saver.write(tmp_path / "other", [content])
    assert (tmp_path / "other").read_bytes() == (tmp_path / "one").read_bytes()
    checkpoints.note_digests(tmp_path / "note", [tmp_path / "one"])
    assert json.loads((tmp_path / "note").read_text()) == {
        "one": {"bytes": found[0], "sha256": found[1]}
    }


def test_under_adapters_only_they_are_stored_and_the_rest_is_named(tmp_path):
    lora = {"rank": 2, "alpha": 4.0, "targets": ["attention", "feed_forward"], "seed": 1}
    adapted = manifest(trainer={"lora": lora})
    straight, stopped, resumed = (
        make_learner(adapted, write_start_weights(adapted, tmp_path / "start")) for _ in range(3)
    )
    train(straight, [1, 2, 3])
    train(stopped, [1, 2])
    save_checkpoint(stopped, tmp_path / "trainer")
    checkpoint.load(resumed, tmp_path / "trainer")
    train(resumed, [3])
    assert_same(state_of(resumed), state_of(straight))
    stored = json.loads((tmp_path / "trainer" / "rank_0.json").read_text())
    assert stored and all(".lora." in name for name in stored)
    assert (
        "network.layers.0.self_attn.q_proj.weight"
        in json.loads((tmp_path / "trainer" / "state.json").read_text())["frozen"]
    )
    plain = make_learner(manifest(), tmp_path / "start")
    with pytest.raises(RunFailed, match="is only in the"):
        checkpoint.load(plain, tmp_path / "trainer")


def test_adapters_go_on_over_the_weights_that_they_were_trained_on_alone(tmp_path):
    """Without the base's digest, another base of the same shapes would be accepted silently."""
    adapted = manifest(
        trainer={"lora": {"rank": 2, "alpha": 4.0, "targets": ["attention"], "seed": 1}},
        stages={"sft": None},
    )
    (tmp_path / "manifest.json").write_bytes(canonical_json(adapted))
    ctx = parse_role("trainer", ["--run-dir", str(tmp_path), "--stage", "rl"])
    start = write_start_weights(adapted, tmp_path / "weights" / "init")

    def begun():
        return assemble_learner(
            ctx, World(0, 1, torch.device("cpu"), None), start, adapted.trainer.optimizer, 1.0
        )

    train(first := begun(), [1, 2])
    save_checkpoint(first, checkpoints.checkpoint_dir(tmp_path, 2, 1) / "trainer")
    checkpoints.complete(checkpoints.checkpoint_dir(tmp_path, 2, 1))
    checkpoint.load(begun(), checkpoints.checkpoint_dir(tmp_path, 2, 1) / "trainer")
    tensors = load_file(start / "model.safetensors")
    tensors["model.norm.weight"][0] += 1
    save_file(tensors, start / "model.safetensors", {"format": "pt"})
    with pytest.raises(
        RunFailed,
        match=r"its adapters were trained on weights with sha256 [0-9a-f]{64}, but this stage "
        r"began with ",
    ):
        checkpoint.load(begun(), checkpoints.checkpoint_dir(tmp_path, 2, 1) / "trainer")
    with pytest.raises(
        RunFailed,
        match=r"init: its weights have sha256 [0-9a-f]{64}, but the adapters of .* were trained on",
    ):
        export_checkpoint(tmp_path)
    assert not list((tmp_path / "weights").glob("step*"))


def test_the_digest_of_the_base_is_the_launchers_where_it_has_hashed_the_files(
    tmp_path, monkeypatch
):
    start = write_start_weights(manifest(), tmp_path / "weights" / "init")
    found = checkpoint.base_sha256(tmp_path, "rl", start)
    path = inputs_path(tmp_path, "rl")
    path.parent.mkdir(parents=True)
    path.write_text(
        json.dumps({"weights/init/model.safetensors": sha256(start / "model.safetensors")})
    )
    monkeypatch.setattr(checkpoint, "sha256", lambda path: pytest.fail("hashed twice"))
    assert checkpoint.base_sha256(tmp_path, "rl", start) == found
