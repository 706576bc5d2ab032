"""The loop with a fake engine and a fake trainer: whole runs, and what they leave behind."""

import asyncio
import dataclasses
import json
import logging
import shutil
import signal
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import orchestrator_fakes as fakes
import pytest
from replaced import replaced

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import canonical_json
from orrery.manifest.schema import Evaluate
from orrery.orchestrator import assemble, dispatch, evaluate, rollout, snapshot
from orrery.orchestrator import loop as loop_module
from orrery.orchestrator.dispatch import GroupRequest, Request
from orrery.orchestrator.loop import Loop, update_engines
from orrery.orchestrator.rollout import Notifier
from orrery.orchestrator.scheduler import Scheduler
from orrery.runtime.health import read_health
from orrery.runtime.process_control import Preempted, request_path
from orrery.tasks.chat import write_tokenizer
from orrery.tasks.task import Judgement, Message
from orrery.wire import checkpoints, columns


def loop_of(ctx, manifest, pool, trainer, scheduler=None, task=None, held_out=None):
    tasks = {
        "train": [task or fakes.FakeTask() for _ in manifest.tasks.train],
        "evaluation": [held_out or fakes.FakeTask()],
    }
    return Loop(
        ctx, scheduler or Scheduler(manifest), tasks, fakes.FakeRenderer(), pool, trainer, trainer
    )


def run(
    tmp_path,
    manifest,
    pool=None,
    trainer=None,
    scheduler=None,
    task=None,
    limit_s=20,
    attempt=1,
    held_out=None,
):
    ctx, pool, trainer = (
        fakes.FakeContext(tmp_path, manifest, attempt=attempt),
        pool or fakes.FakePool(),
        trainer or fakes.FakeTrainer(),
    )
    loop = loop_of(ctx, manifest, pool, trainer, scheduler, task, held_out)
    asyncio.run(asyncio.wait_for(loop.run(), limit_s))
    return ctx, pool, trainer, loop


@pytest.fixture
def at_close(monkeypatch):
    """Record aborted requests, and requests in flight when the runner begins to close."""
    seen, close = SimpleNamespace(), rollout.RolloutRunner.close

    async def noting(self):
        seen.aborted, seen.in_flight = list(self.engine.aborted), dict(self.engine.in_flight)
        await close(self)

    monkeypatch.setattr(rollout.RolloutRunner, "close", noting)
    return seen


def trained(batch):
    """The batch's micro-batches, as one `Columns` each part."""
    return [part for rank in batch.micro_batches for micro in rank for part in micro]


def test_a_run_sends_every_batch_once_and_ends_when_the_last_policy_is_evaluated(tmp_path):
    ctx, pool, trainer, loop = run(tmp_path, fakes.manifest())
    assert [batch.step for batch in trainer.batches] == [1, 2, 3, 4, 5, 6]
    assert all(batch.totals["num_samples"] == 8 for batch in trainer.batches)
    evaluated = [row["version"] for row in ctx.events("evaluation")]
    assert evaluated[0] == 0 and evaluated[-1] == 6
    assert pool.updates == sorted(set(pool.updates)) and pool.updates[-1] == 6
    versions = np.concatenate(
        [part.token["version"][part.token["trained"]] for part in trained(trainer.compared)]
    )
    assert (versions == 6).all() and trainer.compared.totals["num_samples"] == ctx.events(
        "evaluation"
    )[-1]["num_rollouts"]
    assert not pool.in_flight and loop.scheduler.dispatch.admission.taken == 0


def test_an_evaluation_asks_again_for_what_was_lost_with_an_engine_and_training_counts_it(tmp_path):
    script = {
        f"{name}-0": "gone once" for name in ("evaluation-0-0", "evaluation-2-1", "train-1-2")
    }
    ctx, pool, _, loop = run(
        tmp_path, fakes.manifest(max_in_flight=4), fakes.FakePool(script=script)
    )
    first = ctx.events("evaluation")[0]
    assert (first["num_rollouts"], first["num_failed"]) == (6, 0)
    asked = [request for request in pool.requests if request["request_id"] == "evaluation-2-1-0"]
    assert (
        len(asked) == 2
        and asked[0]["seed"] == asked[1]["seed"] is not None
        and asked[0]["cache_salt"] == asked[1]["cache_salt"]
    )
    assert (
        loop.scheduler.buffer.dropped["engine_gone"] == 1
        and loop.scheduler.dispatch.admission.taken == 0
    )


def test_an_evaluation_rollout_has_its_own_seed_at_every_version_and_training_has_none(tmp_path):
    _, pool, _, _ = run(tmp_path, fakes.manifest())
    seeds = {}
    for request in pool.requests:
        purpose, group, member, _ = request["request_id"].split("-")
        if purpose == "train":
            assert request["seed"] is None
        else:
            seeds.setdefault((int(group) % 3, int(member)), {})[request["version"]] = request[
                "seed"
            ]
    assert len(seeds) == 3 * 2 and all(of.keys() >= {0, 6} for of in seeds.values())
    assert all(len(set(of.values())) == 1 and None not in of.values() for of in seeds.values())
    assert len({of[0] for of in seeds.values()}) == 3 * 2


def test_the_seed_of_an_evaluation_rollout_depends_on_run_seed_task_problem_and_member():
    def seed(run, task, problem, member, group_id=0, version=0):
        return rollout.evaluation_seed(
            run, Request(GroupRequest("evaluation", group_id, task, problem, 4), member, version)
        )

    assert len({seed(*each) for each in np.ndindex(3, 3, 3, 3)}) == 3**4
    assert seed(0, 1, 2, 3, group_id=5, version=6) == seed(0, 1, 2, 3)


def test_what_an_evaluation_asks_again_for_is_in_flight_until_it_ends_and_is_timed_out_like_any(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(rollout, "GONE_PAUSE_S", 0.01)
    manifest, pool = (
        fakes.manifest(rollout_timeout_s=0.2),
        fakes.FakePool(script={"evaluation-2-1-0": "gone, then hang"}),
    )
    ctx = fakes.FakeContext(tmp_path, manifest)

    async def main():
        await asyncio.wait_for(loop_of(ctx, manifest, pool, fakes.FakeTrainer()).run(), 20)
        return list(pool.aborted), dict(pool.in_flight)  # before asyncio ends remaining tasks

    assert asyncio.run(main()) == (["evaluation-2-1-0"], {})
    assert ctx.events("evaluation")[0]["failures"] == {"timeout": 1}


def test_every_batch_row_has_the_numbers_that_readers_take(tmp_path):
    ctx, _, _, _ = run(tmp_path, fakes.manifest(weights=(1.0, 2.0)))
    rows = ctx.events("batch")
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, 6]
    for row in rows:
        assert row.keys() >= {
            "reward_mean", "staleness_mean", "staleness_max", "staleness_counts", "num_versions",
            "num_mixed_rollouts", "num_in_flight", "num_queued_rollouts", "dropped", "num_sampled",
            "num_without_signal", "num_zero_advantage", "completion_tokens_mean",
            "truncated_share", "generated_tokens_per_s", "version", "digests",
        }  # fmt: skip
        assert row["staleness_max"] <= 2 and sum(row["staleness_counts"]) == 8 * 4
    assert any("reward/task1" in row for row in rows)
    assert {span["name"] for span in ctx.spans} >= {
        "batch",
        "pack",
        "send",
        "update",
        "evaluation",
        "generate",
    }


def test_a_task_that_is_learned_trains_every_batch_and_is_warned_of_once(tmp_path, caplog):
    class Learned(fakes.FakeTask):
        def judge(self, problem, messages):
            return Judgement(1.0, {})

    with caplog.at_level(logging.WARNING):
        ctx, _, trainer, loop = run(tmp_path, fakes.manifest(max_sampled_ratio=2.0), task=Learned())
    assert len(trainer.batches) == 6 and all(
        not part.token["advantage"].any() for batch in trainer.batches for part in trained(batch)
    )
    assert all(batch.totals["rl"] == 8 * 4 for batch in trainer.batches), (
        "ordinary members of the loss"
    )
    rows = ctx.events("batch")
    assert [row["num_zero_advantage"] for row in rows] == [8] * 6 and [
        row["num_without_signal"] for row in rows
    ] == [row["num_sampled"] for row in rows]
    assert (
        sum(row["num_sampled"] for row in rows) <= 6 * 2 * 8
        and loop.scheduler.dispatch.admission.taken == 0
    )
    (warning,) = [message for message in caplog.messages if "signal" in message]
    assert (
        warning.startswith("batch 1: 16 of 16 sampled rollouts carry no signal")
        and "make the task harder or easier" in warning
    )


class Failed(fakes.FakeTask):
    def judge(self, problem, messages):
        return Judgement(0.0, {})


def test_the_warning_of_no_reward_does_not_advise_a_harder_task(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        run(tmp_path, fakes.manifest(max_sampled_ratio=2.0), task=Failed())
    (warning,) = [message for message in caplog.messages if "signal" in message]
    assert "the mean reward is 0; make the task easier" in warning and "harder" not in warning


def test_the_warning_of_no_signal_names_the_turn_that_cuts_replies_off(tmp_path, caplog):
    manifest = fakes.manifest(max_sampled_ratio=2.0)
    turn = manifest.orchestrator.sampling.max_tokens_per_turn
    with caplog.at_level(logging.WARNING):
        run(tmp_path, manifest, fakes.FakePool(num_tokens=turn + 1), task=Failed())
    (warning,) = [message for message in caplog.messages if "signal" in message]
    assert "are equal; 100% of the replies were cut off at a length limit" in warning
    assert f"max_tokens_per_turn ({turn}) to {4 * turn}, and raise inference.max_" in warning
    assert "harder or easier" not in warning


def test_what_is_sent_obeys_the_staleness_bound_and_is_kept_on_disk(tmp_path):
    manifest = fakes.manifest(max_off_policy_steps=1)
    _, _, trainer, _ = run(tmp_path, manifest, fakes.FakePool(yields=9))
    for batch in trainer.batches:
        parts = trained(batch)
        versions = np.concatenate([part.token["version"][part.token["trained"]] for part in parts])
        assert versions.min() >= batch.step - 1 - 1 and versions.max() <= batch.step - 1
        kept, _ = columns.read_batch(tmp_path, batch.step)
        assert sorted(kept.sample["group_id"].tolist()) == sorted(
            int(part.sample["group_id"][0]) for part in parts
        )
        assert (
            sum(part.num_tokens for part in parts) == kept.num_tokens == batch.totals["num_tokens"]
        )
    lines = [
        json.loads(line)
        for line in (tmp_path / "rollouts" / "samples.jsonl").read_text().splitlines()
    ]
    assert {line["step"] for line in lines} == {1, 2, 3, 4, 5, 6}
    assert lines[0].keys() >= {"step", "version", "task", "messages", "reward"}


def test_the_newest_batches_stay_on_disk_and_samples_of_all(tmp_path):
    run(tmp_path, fakes.manifest(keep_batches=4))
    assert columns.batch_steps(tmp_path) == [3, 4, 5, 6]
    lines = [
        json.loads(line)
        for line in (tmp_path / "rollouts" / "samples.jsonl").read_text().splitlines()
    ]
    assert {line["step"] for line in lines} == {1, 2, 3, 4, 5, 6}


def test_every_batch_carries_the_digests_of_its_versions_also_out_of_a_restored_queue(tmp_path):
    manifest = fakes.manifest(checkpoint_steps=2)
    ctx, _, first, _ = run(tmp_path, manifest, fakes.FakePool(yields=9))
    kept = snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4)
    request = Request(GroupRequest("train", 99, 0, 99, 8), 0, 3)
    sample = dataclasses.replace(fakes.rollout(request, [3, 3]), advantage=1.0)
    # A whole batch, taken before any engine is updated.
    resumed = Scheduler(
        manifest, dataclasses.replace(kept, queue=[[sample] * 8], digests={3: f"{3:016x}"})
    )
    again, _, second, _ = run(
        tmp_path, manifest, trainer=fakes.FakeTrainer(first_version=4), scheduler=resumed
    )
    assert (
        second.batches[0].info["digests"] == {"3": f"{3:016x}"}
        and again.events("batch")[0]["version"] == 3
    )
    for batch, row in zip(
        [*first.batches, *second.batches],
        [*ctx.events("batch"), *again.events("batch")],
        strict=True,
    ):
        versions = {
            int(version)
            for part in trained(batch)
            for version in part.token["version"][part.token["trained"]]
        }
        assert (
            batch.info["digests"]
            == row["digests"]
            == {str(version): f"{version:016x}" for version in sorted(versions)}
        )
    assert first.compared.info["digests"] == {"6": f"{6:016x}"}
    assert columns.read_batch(tmp_path, 5)[1]["digests"] == {"3": f"{3:016x}"}


@pytest.mark.parametrize("num_yields", range(4))
async def test_a_cancellation_that_meets_a_ring_is_not_lost(num_yields):
    changed = Notifier()
    waiting = asyncio.create_task(changed.wait(60))
    await asyncio.sleep(0.01)
    changed.notify_all()
    for _ in range(num_yields):
        await asyncio.sleep(0)
    if not waiting.done():
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting


def test_a_batch_is_written_down_before_it_is_sent(tmp_path):
    class Dying(fakes.FakeTrainer):
        async def send(self, batch):
            if batch.step == 2:
                raise RunFailed("the trainer is gone")
            await super().send(batch)

    manifest = fakes.manifest()
    ctx, trainer = fakes.FakeContext(tmp_path, manifest), Dying()
    loop = loop_of(ctx, manifest, fakes.FakePool(), trainer)
    with pytest.raises(RunFailed, match="the trainer is gone"):
        asyncio.run(asyncio.wait_for(loop.run(), 20))
    assert [row["step"] for row in ctx.events("batch")] == columns.batch_steps(tmp_path) == [1, 2]


def test_an_error_while_engines_are_watched_ends_the_run(tmp_path):
    class Odd(fakes.FakePool):
        async def metrics(self):
            raise ValueError("a page that is no numbers")

    with pytest.raises(ValueError, match="a page that is no numbers"):
        run(
            tmp_path,
            fakes.manifest(rollout_timeout_s=60.0),
            Odd(script={f"train-{i}-0-0": "hang" for i in range(99)}),
        )


@pytest.mark.parametrize("max_batches_ahead", [0, 1])
def test_while_engines_load_a_version_the_trainer_makes_no_more_versions_than_are_kept(
    tmp_path, max_batches_ahead
):
    """The trainer keeps `max_batches_ahead` + 3 versions, from the loaded version on."""
    newer = []

    class Slow(fakes.FakePool):
        async def update(self, published, on_resumed):
            # While engines are paused, the trainer gets only batches made before.
            await asyncio.sleep(0.1)
            newer.append(trainer.version - published.version)
            return await super().update(published, on_resumed)

    class Trainer(fakes.FakeTrainer):
        async def send(self, batch):
            self.batches.append(batch)
            if not batch.info.get("compare"):
                asyncio.get_running_loop().call_later(
                    0.002 * (batch.step - self.version), self._trained, batch.step
                )

    trainer = Trainer()
    manifest = fakes.manifest(
        max_batches_ahead=max_batches_ahead,
        max_off_policy_steps=9,
        num_steps=12,
        interval_steps=4,
        max_in_flight=64,
    )
    run(tmp_path, manifest, Slow(yields=0), trainer)
    assert 0 < max(newer) <= max_batches_ahead + 2


def test_what_an_earlier_attempt_left_half_written_is_removed_when_the_stage_begins(tmp_path):
    torn = checkpoints.checkpoint_dir(tmp_path, 3, 1) / "trainer"
    torn.mkdir(parents=True)
    assemble.scheduler(
        SimpleNamespace(run_dir=tmp_path, manifest=fakes.manifest(), log=logging.getLogger())
    )
    assert not torn.parent.exists()


def test_the_checkpoints_of_sft_are_removed_when_the_stage_begins(tmp_path, caplog):
    for step in (2, 4):
        folder = checkpoints.checkpoint_dir(tmp_path, step, 1, "sft")
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "rank_0.json").touch()
        checkpoints.complete(folder)
    with caplog.at_level(logging.INFO):
        for _ in range(2):
            assemble.scheduler(
                SimpleNamespace(
                    run_dir=tmp_path, manifest=fakes.manifest(), log=logging.getLogger()
                )
            )
    assert checkpoints.steps(tmp_path, "sft") == [] and not list(
        (tmp_path / "checkpoints").rglob("rank_0.json")
    )
    assert caplog.messages == ["removed checkpoints of the finished stage sft: steps 2, 4"]


def test_a_prompt_with_a_token_that_the_model_has_no_row_for_is_refused_here(tmp_path):
    manifest = fakes.manifest()
    tokenizer = manifest.model.tokenizer.model_copy(update={"alphabet": "abcd"})
    write_tokenizer(
        manifest.model.model_copy(update={"tokenizer": tokenizer, "vocab_size": 12}),
        tmp_path / "weights" / "init",
    )
    renderer = assemble.renderer(fakes.FakeContext(tmp_path, manifest), "sft", "init")
    assert renderer.prompt([Message("user", "abc")])
    with pytest.raises(
        OrreryError, match=r"model\.vocab_size 11: the tokenizer gives 'd' the id 11"
    ):
        renderer.prompt([Message("user", "abcd")])


def test_evaluation_rollouts_hold_one_version_each_time(tmp_path):
    _, pool, _, _ = run(tmp_path, fakes.manifest(interval_steps=1), fakes.FakePool(yields=5))
    salts = {}
    for request in pool.requests:
        if request["request_id"].startswith("evaluation"):
            salts.setdefault(request["cache_salt"], set()).add(request["version"])
    assert salts and all(versions == {int(salt)} for salt, versions in salts.items())


def test_failures_are_counted_by_reason_and_do_not_stop_the_run(tmp_path):
    script = {
        "train-0-0-0": "fail",
        "train-1-1-0": "empty",
        "train-2-0-0": "fail",
        "train-2-1-0": "fail",
        "train-2-2-0": "fail",
    }
    ctx, _, _, loop = run(tmp_path, fakes.manifest(), fakes.FakePool(script=script))
    dropped = loop.scheduler.buffer.dropped
    assert dropped["engine"] == 4 and dropped["empty"] == 1 and dropped["too_few_survivors"] == 1
    assert ctx.events("batch")[-1]["dropped"]["engine"] == 4


def test_a_rollout_that_never_ends_is_timed_out_and_aborted_in_the_engine(tmp_path, at_close):
    # Never stale, so only the time limit can end it.
    manifest = fakes.manifest(rollout_timeout_s=0.2, max_off_policy_steps=8)
    _, _, trainer, loop = run(tmp_path, manifest, fakes.FakePool(script={"train-0-3-0": "hang"}))
    assert loop.scheduler.buffer.dropped["timeout"] == 1 and "train-0-3-0" in at_close.aborted
    assert len(trainer.batches) == 6


@pytest.fixture
def looks_often(monkeypatch):
    monkeypatch.setattr(loop_module, "ENGINE_POLL_S", 0.02)
    monkeypatch.setattr(evaluate, "ENGINE_POLL_S", 0.02)


def test_a_timeout_is_a_reward_of_zero_in_evaluations_and_baselines_where_the_manifest_says_so(
    tmp_path, looks_often
):
    manifest = fakes.manifest(rollout_timeout_s=0.2, max_off_policy_steps=8, on_timeout="zero")
    script = {"train-0-3-0": "hang", "evaluation-0-1-0": "hang"}
    ctx, _, trainer, loop = run(tmp_path, manifest, fakes.FakePool(script=script))
    assert loop.scheduler.buffer.dropped["timeout"] == 1, "counted as one that does not train"
    first, second = ctx.events("evaluation")[:2]
    assert (
        first["num_rollouts"],
        first["num_failed"],
        first["failures"],
        first["num_timeouts"],
    ) == (6, 0, {}, 1)
    assert second["num_timeouts"] == 0
    members = {
        int(part.sample["group_id"][0]): [] for batch in trainer.batches for part in trained(batch)
    }
    for batch in trainer.batches:
        for part in trained(batch):
            advantage = part.token["advantage"][part.token["trained"]][0]
            members[int(part.sample["group_id"][0])].append(
                (float(part.sample["reward"][0]), float(advantage))
            )
    assert len(members[0]) == 3, "the one that timed out has no answer to train"
    mean = sum(reward for reward, _ in members[0]) / 4
    assert all(advantage == pytest.approx(reward - mean) for reward, advantage in members[0])


def test_a_rollout_that_a_still_engine_holds_is_no_timeout(tmp_path, looks_often, monkeypatch):
    monkeypatch.setattr(dispatch, "PROOF_S", 0.2)
    manifest = fakes.manifest(rollout_timeout_s=0.2, max_off_policy_steps=8, on_timeout="zero")
    pool = fakes.FakePool(script={"train-0-3-0": "hang", "evaluation-0-1-0": "hang"}, is_still=True)
    ctx, _, _, loop = run(tmp_path, manifest, pool)
    assert (
        loop.scheduler.buffer.dropped["engine_still"],
        loop.scheduler.buffer.dropped["timeout"],
    ) == (1, 0)
    first = ctx.events("evaluation")[0]
    assert (first["num_rollouts"], first["failures"], first["num_timeouts"]) == (
        5,
        {"engine_still": 1},
        0,
    )


def test_a_rollout_whose_judge_hangs_is_no_timeout(tmp_path, looks_often):
    class Hanging(fakes.FakeTask):
        async def judge(self, problem, messages):
            if problem.index == 0:
                await asyncio.Event().wait()
            return super().judge(problem, messages)

    manifest = fakes.manifest(rollout_timeout_s=0.2, max_off_policy_steps=8, on_timeout="zero")
    _, _, trainer, loop = run(tmp_path, manifest, task=Hanging())
    assert (
        loop.scheduler.buffer.dropped["no_answer"],
        loop.scheduler.buffer.dropped["timeout"],
    ) == (4, 0) and len(trainer.batches) == 6


@pytest.mark.parametrize(
    ("on_timeout", "counts"), [("zero", (4, {}, 2)), ("failure", (2, {"timeout": 2}, 2))]
)
def test_the_evaluate_stage_counts_timeouts_as_the_manifest_says(
    tmp_path, looks_often, on_timeout, counts
):
    manifest = fakes.manifest(rollout_timeout_s=0.2, on_timeout=on_timeout)
    manifest = replaced(
        manifest, "stages", evaluate=Evaluate(num_problems=2, rollouts_per_problem=2)
    )
    script = {f"evaluation-1-{member}-0": "hang" for member in (0, 1)}
    ctx, pool = (
        fakes.FakeContext(tmp_path, manifest, stage="evaluate"),
        fakes.FakePool(script=script, version=3),
    )
    held_out = evaluate.EvaluationLoop(
        ctx,
        pool,
        fakes.FakeRenderer(),
        {"train": [], "evaluation": [fakes.FakeTask()]},
        last_step=3,
    )
    result = asyncio.run(asyncio.wait_for(held_out.run(3), 20))
    (row,) = result.rows
    assert (row["num_rollouts"], row["failures"], row["num_timeouts"]) == counts
    finished = [rollout.reward for rollout in result.rollouts]
    assert len(finished) == 2 and row["reward_mean"] == sum(finished) / row["num_rollouts"]
    assert evaluate.summary({"after": result})["after"]["num_timeouts"] == 2


@pytest.mark.parametrize("set_by_s", [180.0, -3600.0])
def test_a_wall_clock_that_is_set_expires_no_rollout_and_keeps_none(
    tmp_path, monkeypatch, set_by_s
):
    class Setting(fakes.FakePool):
        async def generate(self, token_ids, **options):
            if options["request_id"] == "train-2-0-0":
                offset.append(set_by_s)
            return await super().generate(token_ids, **options)

    offset, wall = [], time.time
    monkeypatch.setattr(time, "time", lambda: wall() + sum(offset))
    manifest = fakes.manifest(rollout_timeout_s=2.0, max_off_policy_steps=8)
    _, _, trainer, loop = run(tmp_path, manifest, Setting(script={"train-0-3-0": "hang"}))
    assert offset == [set_by_s] and len(trainer.batches) == 6
    assert loop.scheduler.buffer.dropped["timeout"] == 1, "the one that never ends"


def test_what_no_batch_to_come_may_hold_is_aborted_before_the_engines_are_updated(tmp_path):
    class Noting(fakes.FakePool):
        async def update(self, published, on_resumed):
            known = {group.key for group in scheduler.dispatch.open_train_groups()}
            others = {name for name in self.in_flight if name.rsplit("-", 2)[0] not in known}
            left.append(
                (scheduler.buffer.dropped["stale_in_flight"], "train-0-3-0" in self.aborted, others)
            )
            return await super().update(published, on_resumed)

    left, manifest = [], fakes.manifest(max_off_policy_steps=1)
    scheduler = Scheduler(manifest)
    run(tmp_path, manifest, Noting(script={"train-0-3-0": "hang"}), scheduler=scheduler)
    assert all(
        bool(num_stale) == is_aborted and not others for num_stale, is_aborted, others in left
    ), left
    assert {is_aborted for _, is_aborted, _ in left} == {False, True}


def test_after_the_last_cut_training_leaves_the_engine(tmp_path, at_close):
    class Noting(fakes.FakePool):
        async def abort(self, request_ids):  # the last cut may fall into an update
            self.aborted.extend(request_ids)

    # Never stale, so only the end of training can end it.
    manifest = fakes.manifest(max_off_policy_steps=8)
    scheduler, names = Scheduler(manifest), [f"train-99-{member}-0" for member in range(4)]
    # A group that no batch needs, and that the scheduler would not start.
    scheduler.dispatch.offer(GroupRequest("train", 99, 0, 99, 4))
    run(tmp_path, manifest, Noting(script=dict.fromkeys(names, "hang")), scheduler=scheduler)
    assert scheduler.buffer.dropped["run_over"] == 4
    assert sorted(at_close.aborted) == names and at_close.in_flight == {}


def test_a_run_in_which_every_rollout_fails_ends_with_the_reasons(tmp_path):
    with pytest.raises(RunFailed, match=r"judge \d+.*the judge is gone"):
        run(tmp_path, fakes.manifest(), task=fakes.FakeTask(broken="judge"))


def test_no_batch_is_cut_while_an_engine_has_to_prove_itself(tmp_path):
    ctx, pool, trainer = (
        fakes.FakeContext(tmp_path, fakes.manifest()),
        fakes.FakePool(),
        fakes.FakeTrainer(),
    )
    loop = loop_of(ctx, ctx.manifest, pool, trainer)
    group = GroupRequest("train", 0, 0, 0, 8)
    queued = [
        dataclasses.replace(fakes.rollout(Request(group, member, 0), [0, 0]), advantage=1.0)
        for member in range(8)
    ]

    async def scenario():
        loop.scheduler.updated(0)
        loop.scheduler.digests[0] = "of version 0"
        loop.scheduler.buffer.queue.append(queued)
        pool.is_proving = True
        training = asyncio.create_task(loop.train())
        for _ in range(5):  # it looks each time
            loop.changed.notify_all()
            await asyncio.sleep(0.001)
        looked = (
            loop.scheduler.wanted,
            loop.scheduler.clock.next_batch,
            loop.scheduler.buffer.num_queued,
        )
        pool.is_proving = False
        loop.changed.notify_all()
        while not trainer.batches:
            await asyncio.sleep(0.001)
        training.cancel()
        await asyncio.gather(training, return_exceptions=True)
        return looked

    assert asyncio.run(asyncio.wait_for(scenario(), 20)) == (1, 1, 8), (
        "the trainer wants batch 1, and there is enough for it"
    )
    assert [batch.step for batch in trainer.batches] == [1]


def test_an_engine_that_does_not_attest_ends_the_run_by_its_sentence(tmp_path):
    class Corrupt(fakes.FakePool):
        async def update(self, published, on_resumed):
            if published.version >= 2:
                raise RunFailed(
                    "engine 0: tensor 'lm_head.weight' differs from published version 2"
                )
            return await super().update(published, on_resumed)

    with pytest.raises(RunFailed, match=r"lm_head\.weight"):
        run(tmp_path, fakes.manifest(), Corrupt())


def test_a_checkpoint_is_written_before_its_batch_is_sent_and_a_resumed_run_goes_on_after_it(
    tmp_path,
):
    manifest = fakes.manifest(checkpoint_steps=2)

    class Checking(fakes.FakeTrainer):
        async def send(self, batch):
            if batch.step % 2 == 0:
                assert snapshot.folder(tmp_path, batch.step, 1).exists(), (
                    f"batch {batch.step} was sent before its checkpoint"
                )
            await super().send(batch)

    _, _, first, _ = run(tmp_path, manifest, trainer=Checking())
    resumed = Scheduler(manifest, snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4))
    _, pool, second, _ = run(
        tmp_path, manifest, trainer=fakes.FakeTrainer(first_version=4), scheduler=resumed
    )
    assert [batch.step for batch in second.batches] == [5, 6] and pool.updates[0] == 4

    def samples_of(batches):
        return [
            (int(part.sample["group_id"][0]), part.token["token_id"].tobytes())
            for batch in batches
            for part in trained(batch)
        ]

    done = {group for group, _ in samples_of(batch for batch in first.batches if batch.step <= 4)}
    queue = {
        sample.group_id
        for group in snapshot.read(checkpoints.checkpoint_dir(tmp_path, 4, 1), 4).queue
        for sample in group
    }
    again = {group for group, _ in samples_of(second.batches)}
    assert not (done - queue) & again, (
        "a group that was trained before the checkpoint was trained again"
    )


class WindingDown(fakes.FakeTrainer):
    """A trainer preempted after batch `after` (0: before any). It completes checkpoints."""

    def __init__(self, run_dir, manifest, after, first_version=0):
        super().__init__(first_version)
        self.run_dir, self.interval, self.after = (
            run_dir,
            manifest.trainer.checkpoint.interval_steps,
            after,
        )
        self.first_version, self.scheduler, self.attempt = first_version, None, 1
        self.ask_if(first_version)

    def ask_if(self, step):
        if step == self.after:
            file = request_path(self.run_dir, "rl")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.touch()

    def complete(self, step):
        folder = checkpoints.checkpoint_dir(self.run_dir, step, self.attempt)
        assert (folder / "orchestrator").is_dir(), "the orchestrator's half stands there before"
        (folder / "trainer").mkdir()
        (folder / "trainer" / "weights").write_text(str(step))
        checkpoints.complete(folder)

    async def wanted(self, at_least=-1):
        result = await super().wanted(at_least)
        if at_least > 0:  # it winds down: the state of now is what must be kept
            self.queued = {
                sample.group_id for group in self.scheduler.buffer.queue for sample in group
            }
        return result

    async def send(self, batch):
        if (
            batch.info.get("wind_down")
            and self.version != self.first_version
            and self.version % self.interval
        ):
            self.complete(self.version)
        await super().send(batch)
        self.ask_if(batch.step)

    def _trained(self, step):
        if step % self.interval == 0:
            self.complete(step)
        super()._trained(step)


@pytest.mark.parametrize("after", [0, 1, 2, 3, 4, 5])
def test_a_run_that_winds_down_anywhere_goes_on_with_all_that_had_ended(
    tmp_path, monkeypatch, after
):
    """Checkpoints are due after 2, 4 and 6: preempt before, between, and just after them."""
    monkeypatch.setattr(loop_module, "PREEMPTION_POLL_S", 0.0)
    manifest = fakes.manifest(checkpoint_steps=2, max_off_policy_steps=6, max_in_flight=16)
    first, scheduler = WindingDown(tmp_path, manifest, after), Scheduler(manifest)
    first.scheduler = scheduler
    with pytest.raises(Preempted) as ended:
        run(tmp_path, manifest, fakes.FakePool(yields=3), first, scheduler)
    step = ended.value.step
    assert step == first.wound_down_at == len(first.batches) and after <= step <= after + 1
    assert max(checkpoints.steps(tmp_path), default=0) == step
    assert (checkpoints.checkpoint_dir(tmp_path, step, 1) / "later.attempt_1").exists() == (
        step in (2, 4)
    )
    request_path(tmp_path, "rl").unlink()

    resumed = assemble.scheduler(fakes.FakeContext(tmp_path, manifest, attempt=2))
    kept = {sample.group_id for group in resumed.buffer.queue for sample in group}
    assert resumed.clock.next_batch == step + 1 and (not step or kept == first.queued)
    second = fakes.FakeTrainer(first_version=step)
    run(tmp_path, manifest, trainer=second, scheduler=resumed)
    assert [batch.step for batch in [*first.batches, *second.batches]] == [1, 2, 3, 4, 5, 6]
    trained_tokens = [
        (int(part.sample["group_id"][0]), part.token["token_id"].tobytes())
        for batch in [*(first.batches if step else []), *second.batches] for part in trained(batch)
    ]  # fmt: skip
    assert len(set(trained_tokens)) == len(trained_tokens) == 6 * 8, "a rollout was trained twice"


def test_a_run_that_winds_down_again_before_it_has_sent_anything_keeps_what_has_ended_since(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(loop_module, "PREEMPTION_POLL_S", 0.0)
    manifest = fakes.manifest(checkpoint_steps=2)
    for attempt in (1, 2):
        trainer = WindingDown(tmp_path, manifest, after=2, first_version=2 * (attempt - 1))
        trainer.scheduler = scheduler = assemble.scheduler(
            fakes.FakeContext(tmp_path, manifest, attempt=attempt)
        )
        with pytest.raises(Preempted):
            run(tmp_path, manifest, fakes.FakePool(yields=3), trainer, scheduler, attempt=attempt)
    [step] = checkpoints.steps(tmp_path)
    assert step == trainer.wound_down_at and trainer.batches == []
    checkpoint = checkpoints.whole_dir(tmp_path, step)
    checkpoints.verify(checkpoint)
    assert sorted(path.name for path in checkpoint.glob("later*")) == [
        "later.attempt_1",
        "later.attempt_2",
    ]
    newest = snapshot.read(checkpoint, step)
    for attempt in (2, 1):  # attempt 2's state is removed first
        shutil.rmtree(checkpoint / f"later.attempt_{attempt}")
        assert snapshot.read(checkpoint, step).next_batch == newest.next_batch == step + 1


class Ending(WindingDown):
    """A trainer that completes the last checkpoint like the real one, without winding down."""

    def __init__(self, run_dir, manifest, first_version=0, attempt=1):
        super().__init__(run_dir, manifest, after=-1, first_version=first_version)
        self.attempt = attempt

    async def send(self, batch):
        if (
            batch.info.get("compare")
            and self.version != self.first_version
            and self.version % self.interval
        ):
            self.complete(self.version)
        await super().send(batch)


def improving(pool, from_version):
    """Return a held-out task that the policy solves from `from_version` on."""

    class Improving(fakes.FakeTask):
        def judge(self, problem, messages):
            return Judgement(float(pool.version >= from_version), {})

    return Improving()


@pytest.mark.parametrize(("from_version", "checkpoint_steps"), [(2, 1), (2, 100), (0, 100)])
def test_the_stage_ends_early_once_the_held_out_reward_is_reached_and_resumes_to_that_end(
    tmp_path, from_version, checkpoint_steps
):
    manifest = fakes.manifest(
        num_steps=40, interval_steps=2, stop_at=0.9, checkpoint_steps=checkpoint_steps
    )
    pool, trainer = fakes.FakePool(yields=3), Ending(tmp_path, manifest)
    ctx, _, _, loop = run(tmp_path, manifest, pool, trainer, held_out=improving(pool, from_version))
    last = trainer.version
    assert from_version <= last <= from_version + 4 and [
        batch.step for batch in trainer.batches
    ] == list(range(1, last + 1))
    evaluated = {row["version"]: row["reward_mean"] for row in ctx.events("evaluation")}
    assert (
        max(evaluated) == last
        and evaluated[last] == 1.0
        and loop.scheduler.dispatch.admission.taken == 0
    )
    versions = np.concatenate(
        [part.token["version"][part.token["trained"]] for part in trained(trainer.compared)]
    )
    assert (versions == last).all(), "the last version is compared"
    (ended,) = ctx.events("stopped_early")
    assert (ended["version"], ended["step"], ended["num_steps"], ended["stop_at"]) == (
        last,
        last,
        40,
        0.9,
    )
    assert max(checkpoints.steps(tmp_path), default=0) == last
    if last:  # killed while the trainer compares or exports
        resumed = assemble.scheduler(fakes.FakeContext(tmp_path, manifest, attempt=2))
        assert resumed.stopped_early and resumed.clock.num_batches == last
        pool, second = fakes.FakePool(), Ending(tmp_path, manifest, last, attempt=2)
        again, _, _, _ = run(
            tmp_path, manifest, pool, second, resumed, held_out=improving(pool, 99), attempt=2
        )
        assert second.batches == [] and second.compared is not None
        assert [row["version"] for row in again.events("evaluation")] == [last] and len(
            again.events("stopped_early")
        ) == 1


def test_a_stage_that_was_killed_before_its_early_end_was_kept_decides_again(tmp_path):
    manifest = fakes.manifest(num_steps=40, interval_steps=3, stop_at=0.9, checkpoint_steps=2)
    pool, trainer = fakes.FakePool(yields=3), Ending(tmp_path, manifest)

    async def dies(*_):
        raise RunFailed("killed")

    loop_write = Loop._write_now
    Loop._write_now = dies
    try:
        with pytest.raises(RunFailed, match="killed"):
            run(tmp_path, manifest, pool, trainer, held_out=improving(pool, 3))
    finally:
        Loop._write_now = loop_write
    step = max(checkpoints.steps(tmp_path))
    resumed = assemble.scheduler(fakes.FakeContext(tmp_path, manifest, attempt=2))
    assert step % 2 == 0 and not resumed.stopped_early
    pool, second = fakes.FakePool(), Ending(tmp_path, manifest, step, attempt=2)
    ctx, _, _, _ = run(
        tmp_path, manifest, pool, second, resumed, held_out=improving(pool, 3), attempt=2
    )
    assert (
        second.version < 12
        and second.compared is not None
        and len(ctx.events("stopped_early")) == 1
    )


def test_a_request_to_wind_down_after_the_last_cut_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(loop_module, "PREEMPTION_POLL_S", 0.0)
    manifest = fakes.manifest(checkpoint_steps=2)
    _, _, trainer, _ = run(tmp_path, manifest, trainer=WindingDown(tmp_path, manifest, after=6))
    assert [batch.step for batch in trainer.batches] == [
        1,
        2,
        3,
        4,
        5,
        6,
    ] and trainer.compared is not None


@pytest.mark.parametrize("known", [{3: "of before the resume"}, {}])
def test_an_update_that_comes_too_late_forgets_no_digest_that_queued_rollouts_have(tmp_path, known):
    async def none(*_):
        return None

    # The trainer has made the next version, and the engines that took this one have died since.
    gone_on = SimpleNamespace(update=none)
    evaluations = SimpleNamespace(pinned=None)
    scheduler = SimpleNamespace(
        digests=dict(known),
        evaluations=evaluations,
        may_update=lambda _: True,
        drain=list,
        updating=False,
        dispatch=SimpleNamespace(num_in_flight=0),
    )
    watch = SimpleNamespace(
        latest=lambda: SimpleNamespace(version=3, digest="of before the resume")
    )
    updated = update_engines(
        fakes.FakeContext(tmp_path, fakes.manifest()),
        scheduler,
        SimpleNamespace(cancel=none),
        gone_on,
        watch,
        Notifier(),
    )
    assert not asyncio.run(updated)
    assert (scheduler.digests, scheduler.updating) == ({3: "of before the resume"}, False)


@pytest.mark.parametrize("stage", ["rl", "evaluate"])
def test_sigterm_ends_the_wait_for_engines_in_order(tmp_path, stage):
    (tmp_path / "manifest.json").write_bytes(canonical_json(fakes.manifest()))
    argv = [
        sys.executable,
        "-m",
        "orrery.orchestrator",
        "--run-dir",
        str(tmp_path),
        "--stage",
        stage,
    ]
    with subprocess.Popen(
        argv, stderr=subprocess.PIPE, text=True, start_new_session=True
    ) as process:
        try:
            while (
                "orchestrator.0" not in (found := read_health(tmp_path, stage))
                or found["orchestrator.0"].wait is None
            ):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.05)
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 128 + signal.SIGTERM
        finally:
            process.kill()
    assert read_health(tmp_path, stage)["orchestrator.0"].doing == "terminated"
