"""From samples to what each rank of the trainer gets."""

import numpy as np
import orchestrator_fakes as fakes

from orrery.orchestrator.cut import packed
from orrery.transport.columns import Columns


def document(length: int) -> Columns:
    token = {"token_id": np.full(length, length, dtype=np.int32), "trained": np.arange(length) > 0}
    return Columns(np.array([0, length], dtype=np.int64), token)


def test_the_ranks_of_a_context_parallel_group_get_the_same_documents_and_groups_share_none():
    spec = fakes.manifest()
    mesh = spec.trainer.mesh.model_copy(update={"dp_replicate": 2, "dp_shard": 2, "cp": 2, "cp_style": "ring"})
    spec = spec.model_copy(update={"trainer": spec.trainer.model_copy(update={"mesh": mesh})})
    lengths = [5, 9, 30, 2, 17, 64, 11, 40, 3]
    batch = packed(1, [document(length) for length in lengths], spec, {})
    batch.check(8, None)
    of_rank = [[[part.num_tokens for part in micro_batch] for micro_batch in of_rank] for of_rank in batch.micro_batches]
    assert [of_rank[0], of_rank[2], of_rank[4], of_rank[6]] == [of_rank[1], of_rank[3], of_rank[5], of_rank[7]]
    once = [length for rank in (0, 2, 4, 6) for micro_batch in of_rank[rank] for length in micro_batch if length]
    assert sorted(once) == sorted(lengths)
    assert batch.totals["num_tokens"] == sum(lengths) and batch.totals["rl"] == sum(lengths) - len(lengths)
