"""Checked-in manifests and specs: rendered = checked in, axes commute, a leaf has one owner."""

import hashlib
import itertools
import json
import random
import re

import pytest

from orrery.manifest.check import check, leaves, spelled
from orrery.manifest.errors import OrreryError
from orrery.manifest.explain import axes
from orrery.manifest.identity import (
    canonical_json,
    find_workspace,
    id12,
    load,
    pretty_json,
    run_dir,
    run_id,
)
from orrery.manifest.render import (
    Evaluator,
    closure,
    import_of,
    quoted,
    render,
    render_all,
    run_files,
)

WORKSPACE = find_workspace()
RUNS = sorted(run_files(WORKSPACE))


@pytest.fixture(scope="module")
def rendered():
    """Every run, its file rendered whole."""
    return render_all(WORKSPACE)


@pytest.mark.parametrize("name", RUNS)
def test_a_checked_in_manifest_is_what_its_spec_renders_to(name):
    assert WORKSPACE.manifest_path(name).read_text() == pretty_json(
        render(WORKSPACE, name).manifest
    )


def test_every_checked_in_manifest_has_a_run_and_every_run_a_manifest(rendered):
    assert sorted(p.stem for p in (WORKSPACE.root / "manifests").glob("*.json")) == RUNS
    assert [r.manifest.name for r in rendered] == RUNS


@pytest.mark.parametrize("name", RUNS)
def test_a_file_rendered_whole_and_a_run_rendered_alone_agree(rendered, name):
    whole = {r.manifest.name: r for r in rendered}[name]
    assert canonical_json(whole.manifest) == canonical_json(render(WORKSPACE, name).manifest)


@pytest.mark.parametrize(
    "name",
    [
        "reverse_text",
        "reverse_text_moe",
        "calculator",
        "reasoning_gym",
        "reverse_text_smoke",
        "glm5_run",
    ],
)
def test_every_order_of_the_axes_gives_the_same_manifest(name):
    run = render(WORKSPACE, name)
    files = list(axes(WORKSPACE, closure(WORKSPACE, run)))
    assert sorted(axes(WORKSPACE, closure(WORKSPACE, run)).values()) == [
        "algorithms",
        "hardware",
        "memory",
        "models",
        "tasks",
    ]
    expression = f"{import_of(WORKSPACE, run.file)}[{quoted(name)}]"
    for order in itertools.permutations(files):
        # the run file adds imports in order, so swapping their contents swaps the axes
        evaluate = Evaluator(
            WORKSPACE, {place: file.read_bytes() for place, file in zip(files, order, strict=True)}
        )
        assert check(evaluate(expression), name) == run.manifest


def test_an_order_that_mattered_would_be_seen(tmp_path):
    run = render(WORKSPACE, "reverse_text")
    first, last = (p for p in closure(WORKSPACE, run) if p.parent.name in ("models", "memory"))
    loud = {first: b"{ trainer+: { compile: false } }", last: b"{ trainer: { compile: true } }"}
    constraints = WORKSPACE.root / "jsonnet/lib/constraints.libsonnet"
    evaluate = Evaluator(WORKSPACE, {**loud, constraints: b"{}"})
    other = Evaluator(
        WORKSPACE,
        {
            first: loud[last],
            last: loud[first],
            WORKSPACE.root / "jsonnet/lib/constraints.libsonnet": b"{}",
        },
    )
    expression = f"{import_of(WORKSPACE, run.file)}.reverse_text.trainer.compile"
    assert evaluate(expression) != other(expression)


def test_no_leaf_is_owned_by_two_axes():
    root = WORKSPACE.root / "jsonnet"
    kinds = {
        kind: sorted((root / kind).glob("*.libsonnet"))
        for kind in ("models", "hardware", "algorithms", "tasks", "memory", "elastic")
    }
    assert all(kinds.values())
    owned = {
        kind: {
            path
            for file in files
            for path, _ in leaves(Evaluator(WORKSPACE)(import_of(WORKSPACE, file)))
        }
        for kind, files in kinds.items()
    }
    for a, b in itertools.combinations(owned, 2):
        for x, y in itertools.product(owned[a], owned[b]):
            assert x[: len(y)] != y[: len(x)], f"{a} and {b} both write {spelled(x)}"


def test_hidden_settings_belong_to_one_kind_of_axis():
    root = WORKSPACE.root / "jsonnet"
    owners: dict[str, set[str]] = {}
    for file in root.glob("*/*.libsonnet"):
        if file.parent.name != "lib":
            hidden = Evaluator(WORKSPACE)(
                f"local a = {import_of(WORKSPACE, file)}; std.setDiff(std.objectFieldsAll(a), "
                "std.objectFields(a))"
            )
            for name in hidden:
                owners.setdefault(name, set()).add(file.parent.name)
    assert owners == {
        "layout": {"hardware"},
        "problems": {"tasks"},
        "context_tokens": {"tasks"},
        "answer_tokens": {"tasks"},
    }


def test_the_id_is_stable_under_key_order_and_number_spelling():
    manifest = render(WORKSPACE, "reverse_text").manifest
    data = json.loads(canonical_json(manifest))

    def shuffled(value):
        if isinstance(value, dict):
            keys = list(value)
            random.Random(1).shuffle(keys)
            return {k: shuffled(value[k]) for k in keys}
        return [shuffled(v) for v in value] if isinstance(value, list) else value

    assert run_id(check(shuffled(data), "shuffled")) == run_id(manifest)
    data["orchestrator"]["sampling"]["temperature"] = 1  # not 1.0
    assert run_id(check(data, "spelled")) == run_id(manifest)
    data["orchestrator"]["sampling"]["temperature"] = 1.5
    assert run_id(check(data, "changed")) != run_id(manifest)


def test_the_id_is_the_hash_of_the_canonical_bytes_and_names_the_folder(tmp_path):
    manifest = load(WORKSPACE.manifest_path("reverse_text"))
    digest = hashlib.sha256(canonical_json(manifest)).hexdigest()
    assert run_id(manifest) == digest and id12(manifest) == digest[:12]
    assert run_dir(tmp_path, manifest) == tmp_path / f"reverse_text-{digest[:12]}"


def test_a_run_carries_the_digest_of_the_python_lock_of_its_hardware(rendered):
    locks = {"cpu": "cpu.txt", "h100": "cuda.txt", "h200": "cuda.txt"}
    runs = [run.manifest for run in rendered]
    assert {manifest.hardware.accelerator for manifest in runs} == set(locks)
    for manifest in runs:
        lock = (WORKSPACE.root / "locks" / locks[manifest.hardware.accelerator]).read_bytes()
        assert manifest.python_lock_sha256 == hashlib.sha256(lock).hexdigest()


def test_what_follows_from_a_setting_of_a_run_file_does_so_where_another_sets_it():
    run = render(WORKSPACE, "reverse_text_smoke")

    def changed(how: str):
        return check(
            Evaluator(WORKSPACE)(
                f"{import_of(WORKSPACE, run.file)}[{quoted(run.manifest.name)}] + {how}"
            ),
            "test",
        )

    router = changed("{ inference+: { router+: { policy: 'round_robin' } } }").inference.router
    assert (router.balance_abs_threshold, router.balance_rel_threshold) == (None, None)
    assert (
        changed("{ orchestrator+: { max_off_policy_steps: 0 } }").orchestrator.max_batches_ahead
        == 0
    )


def test_the_kitchen_sink_is_a_recipe_in_one_axis_and_the_laws_say_where_its_mesh_does_not_fit():
    def made(run, how="{}"):
        run_of = f"{import_of(WORKSPACE, run.file)}[{quoted(run.manifest.name)}]"
        axis = f"{run_of} + (import 'memory/kitchen_sink.libsonnet') + {how}"
        return check(Evaluator(WORKSPACE)(axis), "test").trainer

    mixture, dense, small = (
        render(WORKSPACE, name) for name in ("qwen3_30b_a3b_16k", "qwen3_4b_16k", "reverse_text")
    )
    pulled = made(mixture)
    assert pulled == render(WORKSPACE, "qwen3_30b_a3b_16k_kitchen_sink").manifest.trainer
    assert (pulled.mesh.dp_shard, pulled.mesh.cp, pulled.mesh.ep, pulled.compile) == (4, 2, 8, True)
    memory = pulled.memory
    assert (
        memory.activation_checkpointing.kind,
        memory.activation_offload,
        memory.optimizer_offload,
    ) == ("full", True, True)
    assert memory.lm_head_chunk_tokens == 1024
    assert (
        made(
            mixture, "{ layout+:: { trainer_ranks: 16 }, hardware+: { num_nodes: 3 } }"
        ).mesh.dp_shard
        == 8
    )
    with pytest.raises(
        OrreryError,
        match=r"trainer\.mesh\.ep 8 does not divide dp_shard·cp = 4; choose from \[1, 2, 4\]",
    ):
        made(mixture, "{ layout+:: { trainer_ranks: 4, engines: 4 }, hardware+: { num_nodes: 1 } }")
    with pytest.raises(
        OrreryError, match=r"trainer\.mesh: dp_replicate·cp = 2 does not divide 1 trainer ranks"
    ):
        made(mixture, "{ layout+:: { trainer_ranks: 1 } }")
    with pytest.raises(
        OrreryError,
        match=r"trainer\.mesh\.ep 8: family 'qwen3' has no experts to spread; set",
    ):
        made(dense)
    assert made(dense, "{ trainer+: { mesh+: { ep: 1 } } }").mesh.cp == 2
    assert not small.manifest.trainer.compile
    assert made(small, "{ trainer+: { mesh+: { cp: 1, ep: 1 } } }").compile


def test_seeds_change_training_and_keep_held_out_problems():
    one, two = (render(WORKSPACE, f"reverse_text_seed_{n}").manifest for n in (1, 2))
    assert one.model.init != two.model.init and one.tasks.train[0].seed != two.tasks.train[0].seed
    assert one.tasks.evaluation == two.tasks.evaluation


def test_nothing_reaches_a_spec_from_outside():
    for path in (WORKSPACE.root / "jsonnet").rglob("*sonnet"):
        text = path.read_text()
        assert not re.search(r"std\.(extVar|native)|\.\./", text), path


def test_no_lock_holds_an_address():
    for path in (WORKSPACE.root / "locks").glob("*.txt"):
        lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
        assert not any(
            "://" in line or "--find-links" in line or "index-url" in line for line in lines
        ), path
