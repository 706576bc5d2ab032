"""Whole small runs with router replay, caches outside the device, and adapters as weights."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from network_alone import alone_in_a_network
from safetensors.torch import load_file
from two_turns import put_on_path

from orrery.manifest.identity import canonical_json, run_dir
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import read
from orrery.runtime.run_directory import begin
from orrery.wire.columns import read_batch
from orrery.wire.routed_experts import COLUMN, route_shape
from workspace import linked

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
pytestmark = [pytest.mark.engine, pytest.mark.slow, pytest.mark.timeout(300)]
# `kv_tiers`: one engine with a cache too small for a batch. Others: prefill apart, a shared store,
# two ranks that divide the experts, two ranks that divide the tokens.
TIERS = {
    "kv_offload": {"kind": "tiers", "host_bytes": 1 << 20, "disk_bytes": 1 << 28},
    "kv_cache_bytes": 1 << 21,
}
ROUTER = {
    "kind": "vllm_router",
    "policy": "round_robin",
    "balance_abs_threshold": None,
    "balance_rel_threshold": None,
}
# A prompt of 77 tokens, so a first turn fills a third block of 32 that no other rollout has.
TURNS = {"median_tokens": 20, "sigma": 0.0, "max_tokens": 20, "prompt_words": 15}
APART = {
    "num_replicas": 2,
    "prefill_replicas": 1,
    "kv_transfer": {"kind": "nixl"},
    "router": {"kind": "none"},
}

SHARED = {
    "num_replicas": 2,
    "kv_offload": {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 1 << 26},
    "router": ROUTER,
}


def manifest(
    inference: dict, mesh: dict, base: str = "reverse_text_moe", **fields: object
) -> Manifest:
    content = json.loads((ROOT / "manifests" / f"{base}.json").read_text()) | fields
    content["inference"] |= inference
    content["trainer"]["mesh"] |= mesh
    content["hardware"]["devices_per_node"] = 4
    content["transport"]["routed_experts"] = content["model"]["moe"] is not None
    # So both sides have the same weights.
    content["orchestrator"] |= {
        "rollouts_per_batch": 64,
        "max_off_policy_steps": 0,
        "max_batches_ahead": 0,
    }
    content["orchestrator"]["evaluation"] |= {"interval_steps": 3, "num_problems": 4}
    for task in [*content["tasks"]["train"], *content["tasks"]["evaluation"]]:
        task |= {"kind": "two_turns", "args": TURNS, "max_turns": 2}
    content["stages"] |= {"sft": None}
    content["stages"]["rl"] |= {"num_steps": 3}
    return Manifest.model_validate(content)


def blocks(folder: Path) -> list[str]:
    """Return the files of blocks. Folders may disappear meanwhile."""
    return [name for _, _, names in os.walk(folder) for name in names if name.endswith(".bin")]


def play(
    tmp_path: Path,
    spec: Manifest,
    look: Callable[[str], None] = lambda name: None,
    stages: tuple[str, ...] = ("init", "rl"),
    start: Path | None = None,
) -> Path:
    """Run `stages` and return the run's folder. Meanwhile call `look` with the run's name.

    `start`: folder of a run of the same model, with finished earlier stages.
    """
    folder = run_dir(linked(tmp_path) / "runs", spec)
    if start is None:
        begin(folder)
    else:
        shutil.copytree(start, folder)
    (folder / "manifest.json").write_bytes(canonical_json(spec))
    put_on_path(tmp_path / "site")
    path = os.pathsep.join([str(tmp_path / "site"), *filter(None, [os.environ.get("PYTHONPATH")])])
    for stage in stages:
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}", "PYTHONPATH": path}
        with open(tmp_path / "said", "w") as said:
            process = subprocess.Popen(
                ["orrery", "run", folder.name, stage],
                cwd=tmp_path,
                env=env,
                stdout=said,
                stderr=said,
            )
            while process.poll() is None:
                look(folder.name)
                time.sleep(0.5)
        assert process.returncode == 0, (tmp_path / "said").read_text()
    return folder


def found_outside(folder: Path, spec: Manifest) -> list[int]:
    """Return by engine the prompt tokens that it found in caches outside its device."""
    rows = [
        row
        for row in read(folder / "metrics" / "orchestrator.0.jsonl")
        if row.get("event") == "engine"
    ]
    return [
        max(row["external_hit_tokens"] for row in rows if row["engine"] == index)
        for index in range(spec.inference.num_replicas)
    ]


def trained(folder: Path) -> list[dict]:
    """Return the rows of RL steps."""
    return [
        row
        for row in read(folder / "metrics" / "trainer.0.jsonl")
        if row.get("stage") == "rl" and row.get("event") is None
    ]


@pytest.fixture(scope="module")
def initialized(tmp_path_factory) -> Path:
    """Return the folder of a run after init."""
    spec = manifest({}, {}, name="initialized")
    return play(tmp_path_factory.mktemp("initialized"), spec, stages=("init",))


@pytest.mark.parametrize(
    ("inference", "mesh"),
    [(TIERS, {"dp_shard": 2, "ep": 2}), (APART, {"cp": 2})],
    ids=["cache on disk, ep", "prefill apart, cp"],
)
def test_every_trained_token_has_the_route_that_its_engine_took(
    tmp_path, inference, mesh, initialized
):
    spec = manifest(inference, mesh, name="routed")
    on_disk: set[str] = set()

    def look(name: str) -> None:
        on_disk.update(
            file
            for kept in Path(tempfile.gettempdir()).glob(f"orrery-kv-{name}-*")
            for file in blocks(kept)
        )

    folder = play(tmp_path, spec, look, ("rl",), initialized)
    assert not (folder / "logs" / "kv_store.0.log").exists()
    assert bool(on_disk) == (inference is TIERS), "blocks were to leave the engine, or none were"
    assert not list(Path(tempfile.gettempdir()).glob(f"orrery-kv-{folder.name}-*"))
    # Prefill engines use no outside cache.
    hits = found_outside(folder, spec)
    assert [tokens > 0 for tokens in hits] == [
        index >= spec.inference.prefill_replicas for index in range(len(hits))
    ], hits
    steps = trained(folder)
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


def test_the_launcher_starts_a_store_in_which_engines_find_blocks(tmp_path):
    """The network is dense. The store keeps no routes, and engines round routers differently."""
    spec = manifest(SHARED, {}, base="reverse_text", name="shared")
    with alone_in_a_network("Mooncake listens on every interface"):
        folder = play(tmp_path, spec)
    assert (folder / "logs" / "kv_store.0.log").exists()
    assert sum(found_outside(folder, spec)) > 0  # either engine may find them
    steps = trained(folder)
    assert [row["step"] for row in steps] == [1, 2, 3]
    assert all(row["logprob_max_abs_diff_same_weights"] <= 1e-4 for row in steps)


def small(name: str) -> Manifest:
    """Run three steps of a checked-in run without its warm start, on the same weights."""
    content = json.loads((ROOT / "manifests" / f"{name}.json").read_text())
    content["orchestrator"] |= {
        "rollouts_per_batch": 32,
        "max_off_policy_steps": 0,
        "max_batches_ahead": 0,
    }
    content["orchestrator"]["evaluation"] |= {"interval_steps": 3, "num_problems": 4}
    content["stages"] |= {"sft": None}
    content["stages"]["rl"] |= {"num_steps": 3}
    return Manifest.model_validate(content)


def test_second_turns_find_in_host_memory_and_on_disk_what_has_left_the_device(tmp_path):
    content = json.loads((ROOT / "manifests" / "calculator_kv_tiers.json").read_text())
    content["stages"]["rl"] |= {"num_steps": 1}
    spec = Manifest.model_validate(content)
    folder = play(tmp_path, spec, stages=("init", "sft", "rl"))
    (tokens,) = found_outside(folder, spec)
    assert tokens > 0


def test_adapters_are_all_that_engines_get_and_they_compute_what_the_trainer_does(tmp_path):
    folder = play(tmp_path, small("reverse_text_adapters"))
    steps, updates = (
        trained(folder),
        [
            row
            for row in read(folder / "metrics" / "orchestrator.0.jsonl")
            if row.get("event") == "update"
        ],
    )
    assert [row["version"] for row in updates if row["stage"] == "rl"] == [0, 1, 2, 3]
    assert all(sum(row["attested"].values()) > 0 for row in updates)
    assert max(row["logprob_max_abs_diff_same_weights"] for row in steps) <= 1e-4
    before, after = (
        load_file(folder / "weights" / stage / "model.safetensors") for stage in ("init", "rl")
    )
    assert before.keys() == after.keys(), "what leaves the run is merged"
    changed = {name.split(".")[-2] for name in after if not torch.equal(before[name], after[name])}
    assert changed == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
