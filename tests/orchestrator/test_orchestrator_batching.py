"""From samples to what each rank of the trainer gets."""

from dataclasses import replace

import numpy as np
import orchestrator_fakes as fakes
from replaced import replaced

from orrery.orchestrator.batching import packed, row
from orrery.orchestrator.dispatch import GroupRequest, Request
from orrery.orchestrator.scheduler import Tally, TrainBatch
from orrery.wire.columns import Columns


def document(length: int) -> Columns:
    token = {"token_id": np.full(length, length, dtype=np.int32), "trained": np.arange(length) > 0}
    return Columns(np.array([0, length], dtype=np.int64), token)


def test_the_ranks_of_a_context_parallel_group_get_the_same_documents_and_groups_share_none():
    spec = fakes.manifest()
    mesh = {"dp_replicate": 2, "dp_shard": 2, "cp": 2, "cp_style": "ring"}
    spec = replaced(spec, "trainer.mesh", **mesh)
    lengths = [5, 9, 30, 2, 17, 64, 11, 40, 3]
    batch = packed(1, [document(length) for length in lengths], spec, {})
    batch.check(8, None)
    of_rank = [
        [[part.num_tokens for part in micro_batch] for micro_batch in of_rank]
        for of_rank in batch.micro_batches
    ]
    assert [of_rank[0], of_rank[2], of_rank[4], of_rank[6]] == [
        of_rank[1],
        of_rank[3],
        of_rank[5],
        of_rank[7],
    ]
    once = [
        length
        for rank in (0, 2, 4, 6)
        for micro_batch in of_rank[rank]
        for length in micro_batch
        if length
    ]
    assert sorted(once) == sorted(lengths)
    assert batch.totals["num_tokens"] == sum(lengths) and batch.totals["rl"] == sum(lengths) - len(
        lengths
    )


def test_the_row_of_a_batch_has_each_tasks_reward_and_the_share_of_truncated_samples():
    group = GroupRequest("train", 0, 0, 0, 4)
    rollouts = [fakes.rollout(Request(group, member, 2), [2, 2], member % 2) for member in range(4)]
    rollouts[2] = replace(rollouts[2], truncated=True)
    samples = [
        replace(each, advantage=0.5 if member else 0.0) for member, each in enumerate(rollouts)
    ]
    # From more groups than the batch has, and no group of the task `between`.
    tally = Tally(
        [(0, 1.0, True), (2, 0.25, True), (0, 0.5, False), (0, 0.0, True), (2, 0.5, False)]
    )
    found = row(TrainBatch(4, samples, tally), fakes.manifest(weights=(1.0, 1.0, 1.0)), 0.0)
    assert {name: value for name, value in found.items() if name.startswith("reward/")} == {
        "reward/task0": 0.5,
        "reward/task2": 0.375,
    }
    assert (found["reward_mean"], found["batch_reward_mean"], found["truncated_share"]) == (
        0.45,
        0.5,
        0.25,
    )
    assert (found["num_sampled"], found["num_without_signal"], found["num_zero_advantage"]) == (
        5,
        2,
        1,
    )
    assert (found["staleness_mean"], found["staleness_counts"]) == (1.0, [0, 8])
