"""How a rank comes to its place among others, and how it leaves."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import manifest

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.schema.manifest import AdaptiveAdmission, FixedAdmission
from orrery.models.weights import write_initial
from orrery.runtime.process_control import Preempted
from orrery.runtime.timing import scaled
from orrery.trainer import assemble
from orrery.trainer.parallel.world import World


@pytest.mark.parametrize(
    ("error", "dissolves"),
    [(None, True), (Preempted(3), True), (RunFailed("alone"), False), (SystemExit(1), False)],
)
def test_a_rank_that_fails_waits_for_no_other(monkeypatch, error, dissolves):
    dissolved = []
    monkeypatch.setattr(assemble, "heartbeat", lambda ctx, device: nullcontext())
    monkeypatch.setattr(
        assemble,
        "init_world",
        lambda mesh, rank, device, store: World(rank, 1, torch.device("cpu"), None),
    )
    monkeypatch.setattr(assemble, "destroy_world", dissolved.append)
    ctx = SimpleNamespace(
        manifest=manifest(),
        index=0,
        health=SimpleNamespace(doing=lambda what: None, waiting=lambda *_, **__: nullcontext()),
    )
    with (
        pytest.raises(type(error)) if error is not None else nullcontext(),
        assemble.assemble_world(ctx) as world,
    ):
        world.at_end.append(lambda: dissolved.append("waited"))
        if error is not None:
            raise error
    assert dissolved == [world, "waited"][: 0 if not dissolves else 2 if error is None else 1]


def test_the_deadline_of_a_batch_grows_with_its_waves_of_rollouts():
    spec = manifest()
    evaluation = {"num_problems": 10, "rollouts_per_problem": 2}
    orchestrator = spec.orchestrator.model_copy(
        update={
            "evaluation": spec.orchestrator.evaluation.model_copy(update=evaluation),
            "admission": FixedAdmission(kind="fixed", max_in_flight=20),
            "rollouts_per_batch": 4096,
            "drop_zero_advantage_groups": False,
            "max_sampled_ratio": 2.0,
            "rollout_timeout_s": 300.0,
        }
    )

    def num_waves(num_tasks, **edits):
        edited = orchestrator.model_copy(update=edits)
        tasks = spec.tasks.model_copy(update={"evaluation": spec.tasks.evaluation[:1] * num_tasks})
        run = spec.model_copy(update={"orchestrator": edited, "tasks": tasks})
        limit_s = assemble.batch_deadline_s(run) - scaled(assemble.STEP_DEADLINE_S)
        return limit_s / 300 - assemble.SPARE_WAVES

    assert num_waves(1) == 206  # (4096 + 20) / 20, rounded up
    assert num_waves(2) == 207
    assert num_waves(1, drop_zero_advantage_groups=True) == 411
    adaptive = AdaptiveAdmission(kind="adaptive", min_in_flight=10, max_in_flight=4096)
    assert num_waves(1, admission=adaptive) == 412


class Loads(Exception):
    """The stage has come to its weights."""


@pytest.mark.parametrize(
    ("wire", "rank", "num_steps", "room_for", "is_refused"),
    [
        ("files", 0, 9, 5, False),  # max_batches_ahead + 3, and the unfinished version
        ("files", 0, 9, 4, True),
        ("files", 0, 2, 3, False),  # no more than the stage makes
        ("files", 0, 2, 2, True),
        ("files", 1, 9, 0, False),
        ("nccl", 0, 9, 0, False),
    ],
)
def test_versions_that_do_not_fit_end_the_rl_stage_before_it_loads_weights(
    tmp_path, monkeypatch, wire, rank, num_steps, room_for, is_refused
):
    def loads(*_):
        raise Loads

    transport = {"rollouts": "zmq", "weights": wire, "routed_experts": False}
    spec = manifest(stages={"rl": {"num_steps": num_steps}}, transport=transport)
    assert spec.orchestrator.max_batches_ahead == 1
    write_initial(spec.model, tmp_path, torch.float32)
    free_bytes = room_for * sum(
        tensor.nbytes for tensor in load_file(tmp_path / "model.safetensors").values()
    )
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes))
    monkeypatch.setattr(assemble, "assemble_learner", loads)
    ctx = SimpleNamespace(manifest=spec, stage="rl", run_dir=tmp_path)
    refused = (
        pytest.raises(OrreryError, match=r"transport\.weights: 'files'")
        if is_refused
        else pytest.raises(Loads)
    )
    with refused, assemble.assemble_rl(ctx, World(rank, 2, torch.device("cpu"), None)):
        pass
    if rank == 0 and not is_refused:
        assert assemble._check_room(ctx) == free_bytes
