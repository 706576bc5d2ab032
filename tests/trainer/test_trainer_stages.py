"""The trainer's stages as real processes. The test acts as launcher and orchestrator."""

import asyncio
import hashlib
import json
import shutil
import signal
import time
from contextlib import nullcontext
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from trainer_cases import GLM5, SaverHere, batch_columns, forked_rank, fresh_rank, manifest

from orrery.launcher.stage import finish_saves
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import canonical_json
from orrery.models import build, weights
from orrery.runtime.health import read_health
from orrery.runtime.metrics import read
from orrery.runtime.metrics import rows as rows_of
from orrery.runtime.process_control import Preempted
from orrery.runtime.role_context import parse_role
from orrery.tasks.chat import Renderer
from orrery.trainer.__main__ import initialize
from orrery.trainer.assemble import assemble_rl, assemble_world
from orrery.trainer.export import export_checkpoint
from orrery.trainer.learner import count_totals
from orrery.trainer.loop import RlLoop
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy, micro_batch
from orrery.trainer.publish import Publisher
from orrery.trainer.saver import Saver
from orrery.trainer.sft_data import endless_order, load_examples
from orrery.wire import checkpoints, rendezvous
from orrery.wire.packing import pack
from orrery.wire.rollout_wire import Batch, RolloutSender
from orrery.wire.weight_wire import (
    Published,
    WeightWatch,
    read_weights,
    remove_weight_dir,
    weight_dir,
)
from orrery.wire.weight_wire.files import WeightPublisher

pytestmark = pytest.mark.timeout(180)
DEADLINE_S = 120.0


class Stage:
    """The trainer ranks of one stage of one attempt: forks, or `fresh` interpreters."""

    def __init__(
        self, run_dir: Path, stage: str, num_ranks: int = 1, attempt: int = 1, fresh: bool = False
    ):
        self.run_dir, start = run_dir, fresh_rank if fresh else forked_rank
        options = ["--run-dir", str(run_dir), "--stage", stage, "--attempt", str(attempt)]
        self.outputs = [
            run_dir.with_name(f"{run_dir.name}.{stage}.{attempt}.{rank}.log")
            for rank in range(num_ranks)
        ]
        self.ranks = [
            start(output, [*options, "--index", str(rank)])
            for rank, output in enumerate(self.outputs)
        ]

    def end(self) -> list[tuple[int, str]]:
        """(exit code, stderr) of every rank, once all have ended."""
        try:
            codes = [rank.wait(DEADLINE_S) for rank in self.ranks]
        finally:
            self.kill()
        return [(code, log.read_text()) for code, log in zip(codes, self.outputs, strict=True)]

    def kill(self) -> None:
        for rank in self.ranks:
            if rank.poll() is None:
                rank.kill()
                rank.wait()
        finish_saves(self.run_dir, "", lambda: False)  # as the launcher does


def start_run(folder: Path, spec, stages=()) -> Path:
    """A run directory after init, made in this process to save time, and after `stages`."""
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(canonical_json(spec))
    initialize(parse_role("trainer", ["--run-dir", str(folder), "--stage", "init"]))
    for stage in stages:
        for code, error in Stage(folder, stage, spec.trainer.mesh.world_size).end():
            assert code == 0, error
    return folder


def final_weights(run_dir: Path, stage: str) -> bytes:
    return (run_dir / "weights" / stage / "model.safetensors").read_bytes()


async def compare_columns(run_dir: Path, spec, attempt: int, version: int):
    """A batch to compare: log-probs of an engine with the last published weights."""
    watch = WeightWatch(weight_dir(run_dir, attempt))
    while (published := watch.latest()) is None or published.version < version:
        await asyncio.sleep(0.02)
    shutil.copytree(run_dir / "weights" / "init", run_dir / "published", dirs_exist_ok=True)
    save_file(dict(read_weights(published.path)), run_dir / "published" / "model.safetensors")
    network = build(spec.model)
    weights.load(network, run_dir / "published")
    columns = batch_columns(version + 1)
    columns.sample["dispatch_version"][:] = version
    batch = micro_batch(columns, version + 1, torch.device("cpu"))
    with torch.no_grad():
        logprob, _ = Policy(network, 64)(batch)
    columns.token["logprob"][columns.token["trained"]] = logprob.numpy()
    return columns


async def digest_of(version: int, run_dir: Path, attempt: int) -> str:
    watch = WeightWatch(weight_dir(run_dir, attempt))
    while (published := watch.version(version)) is None:
        await asyncio.sleep(0.02)
    return published.digest


async def orchestrate(
    run_dir: Path, spec, steps: range, attempt: int, change=None, winds_down=False, ends_early=False
) -> None:
    """Send random batches, then the batch to compare. Return when the trainer has them all.

    With `ends_early` the batch to compare comes after `steps`, with the orchestrator's half of the
    step before it. With `winds_down` the wind-down message comes there, with that half too.
    """
    argv = ["--run-dir", str(run_dir), "--stage", "rl", "--attempt", str(attempt)]
    ctx = parse_role("orchestrator", argv)
    mesh = spec.trainer.mesh
    ranks = mesh.world_size
    sender = RolloutSender(ctx.host, ctx.port, ranks)
    rendezvous.publish(ctx, sender.url)
    try:
        last = steps.stop - 1 if ends_early else spec.stages.rl.num_steps
        if ends_early:
            write_half(run_dir, last, attempt)
        for step in [*steps, *([last + 1] if last in steps or ends_early else [])]:
            columns = (
                batch_columns(step)
                if step <= last
                else await compare_columns(run_dir, spec, attempt, last)
            )
            digests = {str(step - 1): await digest_of(step - 1, run_dir, attempt)}
            if change is not None:
                change(step, columns, digests)
            if (
                step % spec.trainer.checkpoint.interval_steps == 0
                or step == spec.stages.rl.num_steps
            ):
                write_half(run_dir, step, attempt)
            plan = pack(
                columns.lengths, mesh.num_data_ranks, spec.trainer.memory.max_tokens_per_micro_batch
            )
            totals = count_totals([columns], World(0, 1, torch.device("cpu"), None))
            parts = [
                [[columns.select(samples)] for samples in plan[mesh.data_rank(rank)]]
                for rank in range(ranks)
            ]
            await asyncio.wait_for(
                sender.send(
                    Batch(step, parts, totals, {"compare": step > last, "digests": digests})
                ),
                DEADLINE_S,
            )
        if winds_down:
            if steps:
                await sender.wanted(steps[-1] + 1)
                write_half(run_dir, steps[-1], attempt)
            await sender.send(
                Batch(steps.stop, [[] for _ in range(ranks)], {}, {"wind_down": True})
            )
        await sender.drained(DEADLINE_S)
    finally:
        sender.close()


def write_half(run_dir: Path, step: int, attempt: int) -> None:
    """The orchestrator's half of a checkpoint, unless it stands there already."""
    half = checkpoints.checkpoint_dir(run_dir, step, attempt) / "orchestrator"
    if not half.exists():
        half.mkdir(parents=True)
        (half / "state.json").write_text("{}")


def await_checkpoint(run_dir: Path, step: int, stage: str = "rl") -> None:
    """Until it, or a later one, is whole: that comes some time after its step."""
    end_s = time.monotonic() + DEADLINE_S
    while max(checkpoints.steps(run_dir, stage), default=0) < step:
        assert time.monotonic() < end_s, f"no checkpoint of step {step}"
        time.sleep(0.02)


def run_rl(
    run_dir: Path,
    spec,
    steps: range,
    attempt: int = 1,
    change=None,
    winds_down=False,
    ends_early=False,
    fresh=False,
) -> list[tuple[int, str]]:
    """(exit code, stderr) of every rank. A trainer that fails is not waited for."""
    stage = Stage(run_dir, "rl", spec.trainer.mesh.world_size, attempt, fresh)

    async def both() -> list[tuple[int, str]]:
        orchestrator = asyncio.create_task(
            orchestrate(run_dir, spec, steps, attempt, change, winds_down, ends_early)
        )
        ended = asyncio.create_task(asyncio.to_thread(stage.end))
        try:
            await asyncio.wait({orchestrator, ended}, return_when=asyncio.FIRST_COMPLETED)
            if not orchestrator.done() and not {code for code, _ in ended.result()} <= {0, 75}:
                # Repeatedly, because `wait_for` loses a cancellation that comes with its result.
                while not orchestrator.done():
                    orchestrator.cancel()
                    await asyncio.wait({orchestrator}, timeout=0.1)
                return ended.result()
            await orchestrator
            return await ended
        finally:
            stage.kill()

    return asyncio.run(both())


@pytest.fixture
def in_shared_memory():
    """Frees the weight folders that a test's attempts leave, as the launcher does."""
    used = []
    yield lambda run_dir, attempt: used.append((run_dir, attempt)) or weight_dir(run_dir, attempt)
    for run_dir, attempt in used:
        remove_weight_dir(run_dir, attempt)


@pytest.fixture(scope="module", params=[1, 2], ids=["1-rank", "2-ranks"])
def whole(request, tmp_path_factory):
    """(manifest, run directory) of five steps in one go, with a checkpoint every second step."""
    num_ranks = request.param
    spec = manifest(
        mesh={"dp_shard": num_ranks},
        stages={"sft": None, "rl": {"num_steps": 5}},
        transport={"rollouts": "zmq", "weights": "files", "routed_experts": False},
    )
    straight = start_run(tmp_path_factory.mktemp("whole") / "straight", spec)
    ends = run_rl(straight, spec, range(1, 6))
    assert [code for code, _ in ends] == [0] * num_ranks, ends[0][1]
    yield spec, straight
    remove_weight_dir(straight, 1)


def test_rl_publishes_every_version_and_a_killed_stage_resumes_to_the_same_bits(
    tmp_path, in_shared_memory, whole
):
    spec, straight = whole
    num_ranks, published = spec.trainer.mesh.world_size, weight_dir(straight, 1)
    *rows, compared = [
        row for row in read(straight / "metrics" / "trainer.0.jsonl") if row["stage"] == "rl"
    ]
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5]
    assert (
        compared["event"] == "compare"
        and compared["version"] == 5
        and compared["num_trained_tokens"] > 0
    )
    assert 0 <= compared["logprob_max_abs_diff_same_weights"] <= 1e-5
    names = {
        "loss",
        "loss_rl",
        "loss_cross_entropy",
        "entropy",
        "mismatch_kl",
        "masked_share",
        "grad_norm",
        "learning_rate",
        "tokens_per_s",
    }
    names |= {
        "step_time_s",
        "wait_s",
        "forward_backward_s",
        "optimizer_s",
        "publish_s",
        "num_samples",
        "num_tokens",
        "num_trained_tokens",
    }
    assert names <= rows[0].keys()
    assert [row["step"] for row in rows if row["checkpoint_blocked_s"]] == [2, 4, 5]
    assert [row["learning_rate"] for row in rows] == [0.005, 0.01, 0.01, 0.01, 0.01]
    assert [row["num_tokens"] for row in rows] == [
        batch_columns(step).num_tokens for step in range(1, 6)
    ]
    spans = [row["name"] for row in read(straight / "metrics" / "trainer.0.spans.jsonl")]
    expected = {
        "publish": 6,
        "wait": 6,
        "forward_backward": 5,
        "optimizer": 5,
        "checkpoint": 3,
        "checkpoint_write": 3,
    }
    assert {name: spans.count(name) for name in set(spans)} == expected
    newest = WeightWatch(published).latest()
    assert newest.version == 5
    kept = [version for version in range(6) if WeightWatch(published).version(version)]
    # max_batches_ahead 1, and three more: as many as can be made while engines load the oldest.
    assert kept == [
        2,
        3,
        4,
        5,
    ]
    stamped = json.loads(
        (checkpoints.checkpoint_dir(straight, 5, 1) / "trainer" / "published.json").read_text()
    )
    assert list(stamped) == ["0", "1", "2", "3", "4", "5"] and stamped["5"] == newest.digest
    exported = load_file(straight / "weights" / "rl" / "model.safetensors")
    assert newest.fingerprints.keys() == exported.keys()
    assert checkpoints.steps(straight) == [4, 5]  # keep 2
    publisher = WeightPublisher(tmp_path / "evaluate")
    written = publisher.publish_folder(5, straight / "weights" / "rl")
    assert written.digest == stamped["5"], "the evaluate stage compares the two"
    checkpoints.verify(checkpoints.checkpoint_dir(straight, 5, 1))
    assert Renderer(straight / "weights" / "rl").stop_token_ids
    export_checkpoint(straight, to=tmp_path / "exported")
    files = {file.name: file.read_bytes() for file in (tmp_path / "exported").iterdir()}
    assert files == {
        file.name: file.read_bytes() for file in (straight / "weights" / "rl").iterdir()
    }

    killed = start_run(tmp_path / "killed", spec)
    in_shared_memory(killed, 1)
    stage = Stage(killed, "rl", num_ranks)
    try:
        # With three batches the trainer finishes step 3, one past its checkpoint, and waits.
        asyncio.run(orchestrate(killed, spec, range(1, 4), 1))
        await_checkpoint(killed, 2)
    finally:
        stage.kill()
    assert checkpoints.steps(killed)[-1] == 2
    in_shared_memory(killed, 2)
    ends = run_rl(killed, spec, range(3, 6), attempt=2, fresh=True)
    assert [code for code, _ in ends] == [0] * num_ranks, ends[0][1]
    assert "resuming after step 2" in ends[0][1]
    assert final_weights(killed, "rl") == final_weights(straight, "rl")
    rows = [
        row
        for row in read(killed / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "rl" and row["step"]
    ]
    assert [(row["step"], row["attempt"]) for row in rows] == [
        (1, 1),
        (2, 1),
        (3, 2),
        (4, 2),
        (5, 2),
    ]


def test_a_stage_that_winds_down_at_any_step_goes_on_to_the_same_bits(
    tmp_path, in_shared_memory, whole
):
    """Before any batch, after a step with and without a checkpoint, or right after resuming."""
    spec, straight = whole
    num_ranks = spec.trainer.mesh.world_size
    run_dir = start_run(tmp_path / "run", spec)
    # Few attempts, since starting processes takes seconds.
    starts = [1, 1, 4, 5, 6] if num_ranks == 1 else [1, 4, 4, 6]
    attempts = [range(first, following) for first, following in pairwise(starts)]
    expected = [(step, attempt) for attempt, steps in enumerate(attempts, 1) for step in steps]
    for attempt, steps in enumerate(attempts, 1):
        in_shared_memory(run_dir, attempt)
        winds_down = attempt < len(attempts)
        ends = run_rl(run_dir, spec, steps, attempt, winds_down=winds_down)
        assert [code for code, _ in ends] == [75 if winds_down else 0] * num_ranks, ends[0][1]
        assert "Traceback" not in ends[0][1]
        if winds_down:
            step = steps.stop - 1
            said = read_health(run_dir, "rl", attempt)
            assert [said[f"trainer.{rank}"].sentence() for rank in range(num_ranks)] == [
                f"wound down at step {step}"
            ] * num_ranks
            assert max(checkpoints.steps(run_dir), default=0) == step
            if step:
                checkpoints.verify(checkpoints.whole_dir(run_dir, step))
    assert final_weights(run_dir, "rl") == final_weights(straight, "rl")
    rows = [
        row
        for row in rows_of(run_dir / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "rl" and row["step"]
    ]
    assert [(row["step"], row["attempt"]) for row in rows] == expected, "no batch is trained twice"


def test_a_stage_that_ends_early_leaves_its_last_checkpoint_and_weights_also_after_a_kill(
    tmp_path, in_shared_memory, whole
):
    """Step 3 of 5 is the last, and no checkpoint is due. The second attempt resumes from step 3."""
    spec, straight = whole
    run_dir = start_run(tmp_path / "run", spec)
    num_ranks = spec.trainer.mesh.world_size
    # Starting processes takes seconds.
    attempts = [range(1, 4), range(4, 4)][: 2 if num_ranks == 1 else 1]
    for attempt, steps in enumerate(attempts, 1):
        shutil.rmtree(run_dir / "weights" / "rl", ignore_errors=True)
        in_shared_memory(run_dir, attempt)
        ends = run_rl(run_dir, spec, steps, attempt, ends_early=True)
        assert [code for code, _ in ends] == [0] * num_ranks, ends[0][1]
        assert checkpoints.steps(run_dir) == [2, 3]
        checkpoints.verify(checkpoints.whole_dir(run_dir, 3))
        export_checkpoint(run_dir, to=tmp_path / f"exported_{attempt}")
        assert (
            tmp_path / f"exported_{attempt}" / "model.safetensors"
        ).read_bytes() == final_weights(run_dir, "rl")
    assert final_weights(run_dir, "rl") != final_weights(straight, "rl")
    rows = [row for row in rows_of(run_dir / "metrics" / "trainer.0.jsonl") if row["stage"] == "rl"]
    assert [(row["step"], row["attempt"]) for row in rows if row["step"]] == [
        (1, 1),
        (2, 1),
        (3, 1),
    ]
    assert [row["version"] for row in rows if row.get("event") == "compare"] == [3] * len(attempts)


@pytest.mark.parametrize(("at", "what"), [(1, "step 1"), (2, "version 1")])
def test_log_probs_that_differ_on_the_same_weights_end_the_run(
    tmp_path, in_shared_memory, at, what
):
    # A trainer that ends at step 1 makes no comparison.
    spec = manifest(stages={"sft": None, "rl": {"num_steps": 3 - at}})
    run_dir = start_run(tmp_path / "run", spec)
    in_shared_memory(run_dir, 1)

    def differ(step, columns, digests):
        if step == at:
            columns.sample["dispatch_version"][:] = step - 1
            columns.token["logprob"][columns.token["trained"]] -= 2e-4

    [(code, error)] = run_rl(run_dir, spec, range(1, 2), change=differ)
    assert code == 1
    assert f"error: {what}: log-probs of trainer and engine differ by" in error
    assert "Traceback" not in error


def test_a_batch_of_other_log_probs_is_not_trained(tmp_path, in_shared_memory):
    """A process forges answers with log-probs of 0."""
    spec = manifest(stages={"sft": None, "rl": {"num_steps": 2}})
    run_dir = start_run(tmp_path / "run", spec)
    in_shared_memory(run_dir, 1)

    def forge(step, columns, digests):
        columns.sample["engine"] = np.zeros(columns.num_samples, dtype=np.int32)
        columns.token["logprob"][columns.token["trained"]] = 0.0

    [(code, error)] = run_rl(run_dir, spec, range(1, 2), change=forge)
    assert code == 1 and "Traceback" not in error
    assert (
        "error: step 1: log-probs of " in error
        and "tokens of engine 0 differ " in error
        and ", so the batch is not trained" in error
    )
    rows = [row for row in read(run_dir / "metrics" / "trainer.0.jsonl") if row["stage"] == "rl"]
    assert not [row for row in rows if row["step"] == 1 and "loss" in row], "no step was made of it"


def test_rollouts_of_other_weights_than_were_published_end_the_run(tmp_path, in_shared_memory):
    run_dir = start_run(
        tmp_path / "run", spec := manifest(stages={"sft": None, "rl": {"num_steps": 2}})
    )
    in_shared_memory(run_dir, 1)

    def stamp(step, columns, digests):
        digests["0"] = "ab"

    [(code, error)] = run_rl(run_dir, spec, range(1, 2), change=stamp)
    assert code == 1 and "Traceback" not in error
    assert (
        "error: batch 1: its rollouts carry version 0 with digest ab, but the trainer "
        "published it with " in error
    )


def test_a_resumed_trainer_knows_the_digests_of_versions_before_its_checkpoint(tmp_path):
    class Wire:
        def publish(self, version, tensors, canary):
            return Published(version, "", {}, f"{version:016x}")

    policy = SimpleNamespace(network=build(manifest().model))
    before, after = Publisher(policy, Wire()), Publisher(policy, Wire())
    before.publish(1)
    before.publish(2)
    for name, content in before.checkpoint_files().items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises(RunFailed, match="batch 3: lacks digests of the engines' weights"):
        before.check(3, None)
    with pytest.raises(RunFailed, match="published no such version"):
        after.check(3, {"1": f"{1:016x}"})
    after.restore(tmp_path)
    after.check(3, {"1": f"{1:016x}", "2": f"{2:016x}"})
    with pytest.raises(RunFailed, match=r"published\.json: cannot be read"):
        after.restore(tmp_path / "elsewhere")


async def test_a_steps_row_is_written_before_its_checkpoint_counts(
    tmp_path, in_shared_memory, monkeypatch
):
    """A checkpointed step is never repeated, so a kill after the marker must find its row."""
    # Step 3's checkpoint waits for step 2's.
    spec = manifest(stages={"sft": None, "rl": {"num_steps": 3}})
    run_dir = start_run(tmp_path / "run", spec)
    in_shared_memory(run_dir, 1)
    ctx = parse_role("trainer", ["--run-dir", str(run_dir), "--stage", "rl"])
    found = []

    def complete(folder, notes):
        found.extend(
            row["step"]
            for row in read(run_dir / "metrics" / "trainer.0.jsonl")
            if row["stage"] == "rl"
        )
        raise RunFailed("killed")

    monkeypatch.setattr(checkpoints, "complete", complete)
    monkeypatch.setattr(Saver, "save", SaverHere.save)

    def train():
        with assemble_world(ctx) as world, assemble_rl(ctx, world) as loop:
            loop.run()

    orchestrator = asyncio.create_task(orchestrate(run_dir, spec, range(1, 4), 1))
    with pytest.raises(RunFailed, match="killed"):
        await asyncio.to_thread(train)
    # Repeatedly, because `wait_for` loses a cancellation that comes with its result.
    while not orchestrator.done():
        orchestrator.cancel()
        await asyncio.wait({orchestrator}, timeout=0.1)
    assert found == [1, 2]


def test_mistakes_in_tasks_end_the_init_stage_before_anything_is_written(tmp_path):
    task = manifest().tasks.evaluation[0].model_dump()
    for change, sentence in [
        ({"kind": "reverse_txt"}, r"tasks\.evaluation\[0\].*there is no 'reverse_txt'"),
        (
            {"args": task["args"] | {"instruction": "Z"}},
            r"tasks\.evaluation\[0\].*alphabet has no 'Z'",
        ),
    ]:
        spec = manifest(tasks={"train": [task | {"seed": 1}], "evaluation": [task | change]})
        (run_dir := tmp_path / sentence[-4:-1]).mkdir()
        (run_dir / "manifest.json").write_bytes(canonical_json(spec))
        with pytest.raises(OrreryError, match=sentence):
            initialize(parse_role("trainer", ["--run-dir", str(run_dir), "--stage", "init"]))
        assert not (run_dir / "weights").exists()


def test_the_init_stage_gives_the_same_bytes_again(tmp_path):
    here, there = start_run(tmp_path / "a", manifest()), tmp_path / "b"
    there.mkdir()
    (there / "manifest.json").write_bytes(canonical_json(manifest()))
    [(code, error)] = Stage(there, "init", fresh=True).end()
    assert code == 0, error
    for name in ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"):
        assert (here / "weights" / "init" / name).read_bytes() == (
            there / "weights" / "init" / name
        ).read_bytes()
    assert [path.name for path in (there / "weights").iterdir()] == ["init"]


def sft_spec(num_steps: int, **mesh: int):
    sft = manifest().stages.sft.model_dump() | {"num_steps": num_steps}
    return manifest(mesh=mesh, stages={"sft": sft})


def test_sft_learns_to_reverse_and_repeats_to_the_bit(tmp_path):
    spec = sft_spec(40)
    runs = [start_run(tmp_path / name, spec) for name in "ab"]
    for stage in [Stage(run_dir, "sft", fresh=run_dir is runs[1]) for run_dir in runs]:
        [(code, error)] = stage.end()
        assert code == 0, error
    losses = [
        row["loss"]
        for row in read(runs[0] / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "sft"
    ]
    assert len(losses) == 40
    assert losses[0] > 2.3  # about log 16, the size of the vocabulary
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    assert final_weights(runs[0], "sft") == final_weights(runs[1], "sft")
    # The exported weights have the final training loss.
    network = build(spec.model)
    weights.load(network, runs[0] / "weights" / "sft")
    examples = load_examples(spec, runs[0] / "weights" / "sft").columns(range(64))
    tokens = torch.from_numpy(examples.token["token_id"].astype(np.int64))
    positions = torch.from_numpy(
        np.arange(len(tokens)) - np.repeat(examples.offsets[:-1], examples.lengths)
    )
    logits = network.logits(tokens, positions, torch.from_numpy(examples.offsets.astype(np.int32)))
    logprob = torch.log_softmax(logits[:-1], -1).gather(1, tokens[1:, None]).squeeze(1)
    loss = -logprob[torch.from_numpy(examples.token["trained"][1:])].mean().item()
    # A batch's loss is that of the weights before its step, and losses still fall.
    assert 0 < loss < np.mean(losses[-5:])


def test_a_tiny_glm5_learns_from_demonstrations(tmp_path):
    sft = manifest().stages.sft.model_dump() | {"num_steps": 40}
    trainer = {"indexer": "train"}
    run = start_run(tmp_path / "run", manifest(model=GLM5, trainer=trainer, stages={"sft": sft}))
    [(code, error)] = Stage(run, "sft").end()
    assert code == 0, error
    rows = read(run / "metrics" / "trainer.0.jsonl")
    losses = [row["loss"] for row in rows if row["stage"] == "sft"]
    assert len(losses) == 40 and losses[0] > 2.3, "about log 16, the size of the vocabulary"
    assert np.mean(losses[-5:]) < 0.6 * losses[0]
    assert all(row["indexer_kl"] > 0 for row in rows if row["stage"] == "sft")
    before, after = (
        load_file(run / "weights" / stage / "model.safetensors") for stage in ("init", "sft")
    )
    indexers = [name for name in after if ".indexer." in name]
    assert len(indexers) == 5 * 2, "two of three layers have one"
    assert not any(torch.equal(before[name], after[name]) for name in indexers)


def test_sft_that_is_killed_goes_on_from_its_checkpoint_to_the_same_bits(tmp_path):
    straight = start_run(tmp_path / "straight", sft_spec(20), ("sft",))
    killed = start_run(tmp_path / "killed", sft_spec(20))
    stage = Stage(killed, "sft")
    try:
        await_checkpoint(killed, 4, "sft")
    finally:
        stage.kill()
    assert stage.ranks[0].returncode == -signal.SIGKILL
    reached = checkpoints.steps(killed, "sft")[-1]
    assert 4 <= reached < 20
    torn = checkpoints.checkpoint_dir(killed, reached + 2, 1, "sft")  # a kill left it half-written
    torn.mkdir(exist_ok=True)
    [(code, error)] = Stage(killed, "sft", attempt=2, fresh=True).end()
    assert code == 0, error
    assert f"resuming after step {reached}" in error
    assert final_weights(killed, "sft") == final_weights(straight, "sft")
    rows = {
        row["step"]: row
        for row in read(killed / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "sft"
    }
    expected = {
        row["step"]: row
        for row in read(straight / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "sft"
    }
    assert [rows[step]["loss"] for step in range(1, 21)] == [
        expected[step]["loss"] for step in range(1, 21)
    ]
    assert [step for step in rows if rows[step]["checkpoint_blocked_s"]] == list(range(2, 20, 2))
    assert checkpoints.steps(killed, "sft") == [16, 18] and not checkpoints.steps(killed)


@pytest.mark.parametrize(
    ("before", "after"),
    [({"dp_shard": 2}, {}), ({}, {"cp": 2})],
    ids=["two ranks to one", "one to two that share"],
)
def test_sft_goes_on_at_another_mesh_with_the_examples_that_come_next(tmp_path, before, after):
    straight = start_run(tmp_path / "straight", sft_spec(8), ("sft",))
    moved = start_run(tmp_path / "moved", sft_spec(8, **before))
    stage = Stage(moved, "sft", sft_spec(8, **before).trainer.mesh.world_size)
    try:
        await_checkpoint(moved, 4, "sft")
    finally:
        stage.kill()
    reached, spec = checkpoints.steps(moved, "sft")[-1], sft_spec(8, **after)
    # As `orrery adopt` does in a new folder.
    (moved / "manifest.json").write_bytes(canonical_json(spec))
    for code, error in Stage(moved, "sft", spec.trainer.mesh.world_size, attempt=2).end():
        assert code == 0 and f"resuming after step {reached}" in error, error
    of = {
        run: {
            row["step"]: row
            for row in read(run / "metrics" / "trainer.0.jsonl")
            if row["stage"] == "sft"
        }
        for run in (straight, moved)
    }
    assert list(of[moved]) == list(of[straight]) == list(range(1, 9))
    for step in of[straight]:
        assert of[moved][step]["loss"] == pytest.approx(of[straight][step]["loss"], rel=1e-4), step
    expected = load_file(straight / "weights" / "sft" / "model.safetensors")
    for name, weight in load_file(moved / "weights" / "sft" / "model.safetensors").items():
        # Twice the steps of the test below.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=1e-4)


def test_sft_on_two_ranks_makes_the_weights_of_one(tmp_path):
    one = start_run(tmp_path / "one", sft_spec(4), ("sft",))
    two = start_run(tmp_path / "two", sft_spec(4, dp_shard=2), ("sft",))
    expected = load_file(one / "weights" / "sft" / "model.safetensors")
    for name, weight in load_file(two / "weights" / "sft" / "model.safetensors").items():
        # Summation order; test_trainer_learner.py says more.
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=5e-5)


def test_examples_train_the_assistants_tokens_by_cross_entropy_only(tmp_path):
    spec = manifest()
    run_dir = start_run(tmp_path / "run", spec)
    loaded = load_examples(spec, run_dir / "weights" / "init")
    examples = loaded.columns(range(len(loaded)))
    assert examples.num_samples == 64
    renderer = Renderer(run_dir / "weights" / "init")
    first = examples.select([0])
    trained = renderer.decode(first.token["token_id"][first.token["trained"]].tolist())
    whole = renderer.decode(first.token["token_id"].tolist())
    assert whole.endswith(trained) and trained.endswith("<|end|>") and "user" not in trained
    assert not first.token["rl_weight"].any() and first.token["cross_entropy_weight"].all()


def test_the_order_of_examples_is_every_example_once_an_epoch_and_another_order_each_time():
    order = endless_order(10, seed=3)
    epochs = [[next(order) for _ in range(10)] for _ in range(3)]
    assert all(sorted(epoch) == list(range(10)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    again = endless_order(10, seed=3)
    assert [next(again) for _ in range(10)] == epochs[0]
    later = endless_order(10, seed=3, start=17)
    assert [next(later) for _ in range(13)] == [*epochs[1][7:], *epochs[2]]


def chat_spec(path: Path, content: str, digest: str | None = None):
    path.write_text(content)
    data = {
        "kind": "chat_file",
        "path": str(path),
        "sha256": digest or hashlib.sha256(content.encode()).hexdigest(),
    }
    return manifest(stages={"sft": manifest().stages.sft.model_dump() | {"data": data}})


def test_chats_from_a_file_are_examples_and_mistakes_name_their_line(tmp_path):
    tokenizer = start_run(tmp_path / "run", manifest()) / "weights" / "init"
    asked, answered = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
    chat = json.dumps({"messages": [asked, answered]})
    good = load_examples(chat_spec(tmp_path / "good.jsonl", f"{chat}\n\n{chat}\n"), tokenizer)
    assert len(good) == 2
    cases = {
        "not json": "broken.jsonl:2: not a chat",
        json.dumps({"messages": [asked]}): "broken.jsonl:2: chat of roles",
        json.dumps(
            {"messages": [asked | {"content": "a" * 80}, answered]}
        ): "broken.jsonl:2: 86 tokens do not fit",
        json.dumps(
            {"messages": [asked | {"content": "Z"}, answered]}
        ): "broken.jsonl:2: .*alphabet has no 'Z'",
    }
    for line, sentence in cases.items():
        with pytest.raises(OrreryError, match=sentence):
            load_examples(chat_spec(tmp_path / "broken.jsonl", f"{chat}\n{line}\n"), tokenizer)
    note = json.dumps({"messages": [asked, answered], "note": "one\u2028line"}, ensure_ascii=False)
    assert (
        len(load_examples(chat_spec(tmp_path / "lines.jsonl", f"{note}\r\n{chat}\n"), tokenizer))
        == 2
    )
    (tmp_path / "latin.jsonl").write_bytes(latin := chat.encode() + b'\n{"messages": "\xe9"}\n')
    data = {
        "kind": "chat_file",
        "path": str(tmp_path / "latin.jsonl"),
        "sha256": hashlib.sha256(latin).hexdigest(),
    }
    with pytest.raises(OrreryError, match=r"latin\.jsonl:2: not a chat"):
        load_examples(
            manifest(stages={"sft": manifest().stages.sft.model_dump() | {"data": data}}), tokenizer
        )
    with pytest.raises(OrreryError, match=r"stages.sft.data.sha256: .*good.jsonl has"):
        load_examples(chat_spec(tmp_path / "good.jsonl", chat, "0" * 64), tokenizer)
    with pytest.raises(OrreryError, match="has no chats"):
        load_examples(chat_spec(tmp_path / "empty.jsonl", "\n"), tokenizer)


def test_an_unknown_stage_is_one_sentence(tmp_path):
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    (run_dir / "manifest.json").write_text(canonical_json(manifest()).decode())
    [(code, error)] = Stage(run_dir, "evaluate", fresh=True).end()
    assert (code, error.strip()) == (
        2,
        "error: --stage: the trainer has no stage 'evaluate'; choose from init, sft, rl",
    )


def test_a_run_that_is_asked_to_wind_down_after_its_last_step_winds_down():
    """The orchestrator may be asked to end before there are engines to compare with."""
    ended, spec = [], manifest(stages={"rl": {"num_steps": 3}})
    saving = SimpleNamespace(
        copy=lambda *_: pytest.fail("the last step has its checkpoint"),
        finish=lambda: ended.append("finished"),
        is_due=lambda step: checkpoints.is_due(step, spec),
    )
    batch = SimpleNamespace(info={"wind_down": True})
    receiver = SimpleNamespace(
        receive=lambda step, _: batch if step == 4 else pytest.fail(f"asked for batch {step}")
    )
    ctx = SimpleNamespace(
        manifest=spec, metrics=SimpleNamespace(span=lambda *_, **__: nullcontext())
    )
    ctx.health = SimpleNamespace(waiting=lambda *_, **__: nullcontext())
    for first_step in (3, 1):  # begun after its last step, or before it
        learner = SimpleNamespace(step=first_step)
        loop = RlLoop(ctx, None, learner, None, receiver, saving, 1.0, 1.0, 1.0)
        learner.step = 3
        with pytest.raises(Preempted) as wound_down:
            loop.receive(4)
        assert (wound_down.value.step, ended) == (3, ["finished"])
        ended.clear()
