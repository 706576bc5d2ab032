"""The heartbeat of one rank: its counts and flight recorder. Several: tests/launcher."""

import logging
import pickle
import threading
import time
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch._dynamo.callback import callback_handler
from trainer_cases import make_learner, manifest, save_checkpoint, write_start_weights

from orrery.models.weights import hf_tensors
from orrery.observe.hang_detector import STILL_S
from orrery.trainer import assemble, checkpoint, heartbeat, saver
from orrery.trainer.checkpoint_writer import StageCheckpoints
from orrery.trainer.loop import RlLoop
from orrery.wire import checkpoints

CPU = torch.device("cpu")


def test_a_step_may_stand_still_for_long_only_where_it_is_the_first_or_nobody_waits_for_it(
    monkeypatch,
):
    compiled = manifest(trainer={"compile": True}).trainer
    one, two = (SimpleNamespace(size=size, device=CPU) for size in (1, 2))
    assert [
        heartbeat.step_stall_s(world, compiled, is_first)
        for world, is_first in ((two, False), (two, True), (one, False))
    ] == [STILL_S, heartbeat.WARM_UP_STALL_S, heartbeat.WARM_UP_STALL_S]
    monkeypatch.setenv("ORRERY_DEADLINE_SCALE", "3")
    assert heartbeat.step_stall_s(two, compiled) == 3 * STILL_S


def test_a_first_step_takes_no_longer_where_nothing_is_compiled():
    eager, compiled = (manifest(trainer={"compile": compile}).trainer for compile in (False, True))
    cuda = torch.device("cuda")
    assert [
        heartbeat.warms_up(*each) for each in ((eager, CPU), (compiled, CPU), (eager, cuda))
    ] == [
        False,
        True,
        True,
    ]
    assert [
        heartbeat.step_stall_s(SimpleNamespace(size=size, device=CPU), eager, is_first=True)
        for size in (1, 2)
    ] == [heartbeat.WARM_UP_STALL_S, STILL_S]


def deeds():
    """Return (ctx, the time that each reported activity may stand still)."""
    said = {}
    health = SimpleNamespace(
        doing=lambda what, step=None, still_s=None: said.update({what: still_s}),
        waiting=lambda *_, **__: nullcontext(),
    )
    metrics = SimpleNamespace(span=lambda *_, **__: nullcontext())
    return SimpleNamespace(
        health=health,
        metrics=metrics,
        manifest=manifest(),
        run_dir=Path("run"),
        attempt=1,
        log=logging.getLogger(),
    ), said


@pytest.mark.parametrize(
    ("kind", "num_nodes", "limit_s"),
    [("files", 1, STILL_S), ("files", 2, heartbeat.IO_STALL_S), ("nccl", 1, heartbeat.IO_STALL_S)],
)
def test_what_ranks_do_between_steps_says_how_long_it_may_stand_still(kind, num_nodes, limit_s):
    ctx, said = deeds()
    world = SimpleNamespace(size=2, rank=0, device=CPU)
    learner = SimpleNamespace(
        step=7, world=world, logprobs=lambda token_ids: (0.0,) * len(token_ids)
    )
    spec = SimpleNamespace(transport=SimpleNamespace(weights=kind), trainer=None)
    may_stand_s = assemble._publish_still_s(spec, world, num_nodes)
    publisher = SimpleNamespace(publish=lambda version, canary: None)
    RlLoop(ctx, world, learner, publisher, None, None, 9.0, 9.0, may_stand_s).publish()
    saving = StageCheckpoints(ctx, learner, "rl")
    saving._writer = SimpleNamespace(copy=lambda *_: 0.0)
    saving.copy()
    assert said == {"publishing version 7": limit_s, "copying a checkpoint": STILL_S}


@pytest.mark.parametrize(("devices", "limit_s"), [(2, STILL_S), (1, heartbeat.IO_STALL_S)])
def test_the_wait_for_a_batch_says_how_long_a_rank_may_wait_that_the_others_do_not_wait_any_more(
    devices, limit_s
):
    ctx, said = deeds()
    ctx.health.waiting = lambda what, deadline_s, behind_s: nullcontext(
        said.update({what: (deadline_s, behind_s)})
    )
    hardware = SimpleNamespace(devices_per_node=devices)
    spec, world = (
        SimpleNamespace(hardware=hardware, trainer=None),
        SimpleNamespace(size=2, is_first=False),
    )
    receiver = SimpleNamespace(receive=lambda step, deadline_s: SimpleNamespace(info={}))
    behind_s = assemble._batch_behind_s(spec, world)
    learner = SimpleNamespace(step=4)
    RlLoop(ctx, world, learner, None, receiver, None, 9.0, behind_s, 9.0).receive(5)
    assert said == {"batch 5 from orchestrator": (9.0, limit_s)}


def test_every_part_of_what_goes_through_files_is_progress(tmp_path, monkeypatch):
    def parts(work):
        before = heartbeat._PROGRESS.count
        work()
        return heartbeat._PROGRESS.count - before

    spec = manifest()
    start = write_start_weights(spec, tmp_path / "start")
    learner = make_learner(spec, start)
    num_weights = len(list(learner.policy.named_parameters()))
    assert parts(
        lambda: assemble.load_policy(spec.model, spec.trainer, learner.world, start)
    ) == len(hf_tensors(learner.policy.network))
    folder = checkpoints.checkpoint_dir(tmp_path, 0, 1)
    assert parts(lambda: save_checkpoint(learner, folder / "trainer")) > num_weights
    assert parts(lambda: checkpoint.load(learner, folder / "trainer")) >= num_weights
    checkpoints.complete(folder, [f"trainer/{saver.checksum_file(0)}"])
    monkeypatch.setattr(checkpoints, "CHUNK_BYTES", 1000)
    num_bytes = (folder / "trainer" / "rank_0.safetensors").stat().st_size
    assert parts(lambda: checkpoints.verify(folder, each=heartbeat.mark_part)) >= num_bytes / 1000


def test_a_micro_batch_on_the_host_is_marked_at_once_and_one_on_a_device_when_it_gets_there():
    class Event(threading.Event):
        """Waited for outside of Python's lock, as `torch.cuda.Event.synchronize` does."""

        synchronize = threading.Event.wait

    def comes_to(number):
        limit_s = time.monotonic() + 20
        while marks.count < number:
            assert time.monotonic() < limit_s
            time.sleep(0.01)
        return marks.count == number

    marks, events = heartbeat._Progress(), [Event(), Event()]
    marks.add(CPU)
    marks.follow(CPU)
    for event in events:
        marks._ahead.put(event)
    assert marks.count == 1
    events[1].set()  # the device gets nowhere out of order
    assert marks.count == 1
    events[0].set()
    assert comes_to(3)


def test_what_torch_recorded_is_kept_as_it_writes_it_itself(tmp_path):
    heartbeat.dump_flight_recorder(tmp_path / "rank_0", CPU)
    assert {"entries", "pg_config", "pg_status", "version"} <= pickle.loads(
        (tmp_path / "rank_0").read_bytes()
    ).keys()


@pytest.mark.parametrize(("device", "kind"), [(CPU, "fr"), (torch.device("cuda"), "nccl")])
def test_a_torch_without_a_recorder_counts_nothing_and_keeps_nothing(
    tmp_path, monkeypatch, device, kind
):
    for name in (f"_dump_{kind}_trace", f"_dump_{kind}_trace_json"):
        monkeypatch.delattr(torch._C._distributed_c10d, name, raising=False)
    assert heartbeat.count_collectives(device) == (0, 0)
    heartbeat.dump_flight_recorder(tmp_path / "rank_0", device)
    assert not list(tmp_path.iterdir())


def test_compiling_is_a_wait_of_its_own_in_whatever_step_it_comes():
    said = []

    @contextmanager
    def waiting(what, deadline_s):
        said.append(what)
        yield
        said.append("goes on")

    def backend(graph, _):
        assert said[-1] == "the compiler"
        return graph.forward

    callbacks = callback_handler.start_callbacks, callback_handler.end_callbacks
    before = [list(each) for each in callbacks]
    heartbeat._report_compilation(SimpleNamespace(health=SimpleNamespace(waiting=waiting)))
    try:
        double = torch.compile(lambda x: x * 2, backend=backend, dynamic=False)
        for num_compilations, length in ((1, 2), (1, 2), (2, 3)):
            assert double(torch.ones(length)).sum() == 2 * length
            assert said == ["the compiler", "goes on"] * num_compilations
    finally:
        for each, kept in zip(callbacks, before, strict=True):
            each[:] = kept
