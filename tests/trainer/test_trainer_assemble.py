"""How a rank comes to its place among others, and how it leaves."""

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from trainer_cases import manifest

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.models.weights import write_initial
from orrery.runtime.preemption import Preempted
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
