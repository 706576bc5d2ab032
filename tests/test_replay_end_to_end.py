"""Router replay from a real engine to the trainer, in whole small runs of a mixture: every token that is trained has its route."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from orrery.manifest.identity import canonical_json, run_dir
from orrery.manifest.schema import Manifest
from orrery.observe.metrics import read
from orrery.transport.rollout_store import read_batch
from orrery.transport.routed_experts import COLUMN, route_shape

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]
# One engine whose cache is too small for a batch, so that blocks go to host memory and disk and come back; one that computes prompts for
# another; two trainer ranks that divide the experts, and two that divide the tokens.
TIERS = {"kv_offload": {"kind": "tiers", "host_bytes": 1 << 20, "disk": True}, "kv_cache_bytes": 1 << 21}
APART = {"num_replicas": 2, "prefill_replicas": 1, "kv_transfer": {"kind": "nixl"}, "router": {"kind": "none"}}


def manifest(inference: dict, mesh: dict, **fields) -> Manifest:
    content = json.loads((ROOT / "manifests" / "reverse_text_moe.json").read_text()) | fields
    content["inference"] |= inference
    content["trainer"]["mesh"] |= mesh
    content["hardware"]["devices_per_node"] = 4
    content["transport"]["routed_experts"] = True
    content["orchestrator"] |= {
        "rollouts_per_batch": 64,
        "max_off_policy_steps": 0,
        "max_batches_ahead": 0,
    }  # so both sides have the same weights
    content["orchestrator"]["evaluation"] |= {"interval_steps": 3, "num_problems": 4}
    for task in [*content["tasks"]["train"], *content["tasks"]["evaluation"]]:  # a question of more than one block of cache
        task["args"]["instruction"] = "write the letters of this word from last to first: "
    content["stages"] |= {"sft": None}
    content["stages"]["rl"] |= {"num_steps": 3}
    return Manifest.model_validate(content)


def blocks(folder: Path) -> list[str]:
    """Files of blocks, where folders may go while one looks."""
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".bin")]


@pytest.mark.parametrize(
    ("inference", "mesh"), [(TIERS, {"dp_shard": 2, "ep": 2}), (APART, {"cp": 2})], ids=["cache on disk, ep", "prefill apart, cp"]
)
def test_every_trained_token_has_the_route_that_its_engine_took(tmp_path, inference, mesh):
    spec = manifest(inference, mesh, name="routed")
    for name in ("jsonnet", "manifests", "locks", "local", "Snakefile"):
        (tmp_path / name).symlink_to(ROOT / name)
    folder = run_dir(tmp_path / "runs", spec)
    folder.mkdir(parents=True)
    (folder / "manifest.json").write_bytes(canonical_json(spec))
    on_disk: set[str] = set()
    for stage in ("init", "rl"):
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
        with open(tmp_path / "said", "w") as said:
            process = subprocess.Popen(["orrery", "run", folder.name, stage], cwd=tmp_path, env=env, stdout=said, stderr=said)
            while process.poll() is None:
                on_disk |= {file for kept in Path(tempfile.gettempdir()).glob(f"orrery-kv-{folder.name}-*") for file in blocks(kept)}
                time.sleep(0.5)
        assert process.returncode == 0, (tmp_path / "said").read_text()
    assert bool(on_disk) == (inference is TIERS), "blocks were to leave the engine, or none were"
    steps = [row for row in read(folder / "metrics" / "trainer.0.jsonl") if row.get("stage") == "rl" and row.get("event") is None]
    assert [row["step"] for row in steps] == [1, 2, 3]
    shape = route_shape(spec.model)
    for row in steps:
        assert row["routes_missing"] == 0
        assert row["routes_differ"] <= 1e-3, "the trainer's own routers would choose others"
        batch, _ = read_batch(folder, row["step"])
        routes = batch.token[COLUMN]
        assert routes.shape == (batch.num_tokens, shape.num_layers, shape.top_k)
        ends = batch.offsets[1:] - 1  # the last token of a rollout was never computed
        assert (routes[ends] == shape.no_route).all() and routes.sum() > 0
        assert row["logprob_max_abs_diff_same_weights"] <= 1e-4
