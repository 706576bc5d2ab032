"""Constraints of `trainer.elastic` and its host memory."""

import copy
import json
from pathlib import Path

import pytest

from orrery.manifest.budget.run import plan_run
from orrery.manifest.check import check, lookup, parse_path
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import run_id

GOOD = json.loads((Path(__file__).parents[2] / "manifests/elastic_text.json").read_text())
ELASTIC = "trainer.elastic"
DEMONSTRATIONS = {
    "kind": "demonstrations",
    "num_problems": 8,
    "task": {**GOOD["tasks"]["train"][0], "seed": 9},
}
SENTENCES = [
    (f"{ELASTIC}.min_sites", 7, "min_sites 7 exceeds max_sites 6; set it to at most that"),
    (f"{ELASTIC}.quorum", 4, "quorum 4 exceeds min_sites 3; set it to at most that"),
    (f"{ELASTIC}.dead_after_s", 2.0, "heartbeat_s 2 is not below dead_after_s 2"),
    (f"{ELASTIC}.codec", "int7", 'codec = "int7": '),
    (f"{ELASTIC}.fragments", 4, "must divide inner_steps 10 and be at most model.num_layers 2"),
    (f"{ELASTIC}.delay_steps", 10, "10 is not below inner_steps / fragments 10; set it to at most"),
    ("trainer.mesh.dp_replicate", 2, "replicas would exchange the same weights twice; set it to 1"),
    ("stages.sft.num_steps", 119, "119 is not a multiple of trainer.elastic.inner_steps 10; set"),
    ("trainer.checkpoint.interval_steps", 5, "interval_steps 5 is not a multiple of"),
    ("stages.sft.data", DEMONSTRATIONS, "every site would train the same examples"),
    ("orchestrator.evaluation.stop_at", 0.5, "would end RL at another step, with other weights"),
    ("stages.sft.data", GOOD["stages"]["sft"]["data"] | {"shard_by": "row"}, 'shard_by = "row"'),
    ("stages.sft.data.num_shards", 5, "num_shards 5 is below trainer.elastic.max_sites 6"),
]


GUESTS = {
    "max_sites": 8, "lease_s": 10.0, "max_versions_behind": 1, "verified_share": 0.1,
    "tolerance": 4.0, "min_logprob_difference": 1e-3, "block_bytes": 1 << 20,
}  # fmt: skip
SENTENCES += [
    ("orchestrator.guests", GUESTS, "trainer.elastic with orchestrator.guests: engines of other"),
    ("orchestrator.guests", GUESTS | {"max_versions_behind": 9}, "exceeds max_off_policy_steps"),
]


@pytest.mark.parametrize(("path", "value", "sentence"), SENTENCES, ids=[s[0] for s in SENTENCES])
def test_a_wrong_field_gives_one_sentence(path, value, sentence):
    data = copy.deepcopy(GOOD)
    *inside, field = parse_path(path)
    lookup(data, tuple(inside), "here")[field] = value
    with pytest.raises(OrreryError) as caught:
        check(data, "here")
    assert sentence in str(caught.value) and "\n" not in str(caught.value)


def test_the_rule_of_shards_is_written_only_where_it_is_set():
    assert check(GOOD, "here").model_dump(mode="json") == GOOD
    data = copy.deepcopy(GOOD)
    data["stages"]["sft"]["data"]["shard_by"] = "file"
    assert check(data, "here").model_dump(mode="json") == data
    assert run_id(check(data, "here")) != run_id(check(GOOD, "here"))


def test_sites_need_host_memory_for_the_outer_state_and_snapshots():
    def trainer_bytes(data):
        return plan_run(check(data, "here")).roles[0].host_bytes

    alone = copy.deepcopy(GOOD)
    alone["trainer"]["elastic"] = None
    blocks = 2 * (256 * 64 * (8 + 4 + 4) + 8 * 64 * 256 + 3 * 256 * 512 + 2 * 256 + 2 * 64)
    num_parameters = blocks + GOOD["model"]["vocab_size"] * 256 + 256
    assert GOOD["trainer"]["elastic"]["snapshots"]["keep"] == 2
    num_bytes = 12 + 3 * (8 + 8)  # a snapshot has outer state and AdamW's
    assert trainer_bytes(GOOD) - trainer_bytes(alone) == num_bytes * num_parameters
    fed = copy.deepcopy(GOOD)
    fed["trainer"]["elastic"]["error_feedback"] = True
    assert trainer_bytes(fed) - trainer_bytes(GOOD) == 8 * num_parameters
