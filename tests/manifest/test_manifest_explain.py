"""Explain, diff and plan of runs."""

import manifest_specs
import pytest
from replaced import replaced

from orrery.manifest.check import leaves, lookup, parse_path, spelled
from orrery.manifest.diff import diff
from orrery.manifest.errors import OrreryError
from orrery.manifest.explain import explain, line_of
from orrery.manifest.plan import plan, stage
from orrery.manifest.render import render, run_files

RUN_OF_EACH_SPEC = {file: run for run, file in run_files(manifest_specs.REPOSITORY).items()}


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    return manifest_specs.checkout(tmp_path_factory.mktemp("checkout"))


@pytest.fixture(scope="module")
def why(workspace):
    def why(run, field):
        (one,) = explain(workspace, run, field)
        return one

    return why


@pytest.fixture(scope="module")
def spells(workspace):
    """The line that a place names really has that field on it."""
    return lambda place, name: (
        f"{name}:" in (workspace.root / place.file).read_text().splitlines()[place.line - 1]
    )


def test_explain_names_the_file_line_and_axis_that_set_a_field(why, spells):
    one = why("words_sparse", "model.moe.num_experts")
    assert (one.how, one.value, one.place.axis, one.place.file) == (
        "axis",
        4,
        "models",
        "jsonnet/models/sparse.libsonnet",
    )
    assert spells(one.place, "num_experts")
    assert (
        why("sums", "trainer.optimizer.beta2").place.file == "jsonnet/algorithms/groups.libsonnet"
    )


def test_explain_says_when_the_run_file_overrides_an_axis(why, spells):
    one = why("words_wide", "orchestrator.admission.max_in_flight")
    assert (one.how, one.value, one.place.file) == (
        "run file",
        8,
        "jsonnet/runs/words_wide.jsonnet",
    )
    assert spells(one.place, "max_in_flight")
    assert one.overrides == 16 and one.sources[0].axis == "hardware"
    assert "over 16 of jsonnet/hardware/two_cores.libsonnet" in str(one)
    assert why("words", "orchestrator.admission.max_in_flight").how == "axis"


def test_explain_cites_no_line_of_another_run_or_of_another_value(workspace):
    (workspace.root / "jsonnet/runs/words_many.jsonnet").write_text(
        "local words = (import 'runs/words.jsonnet').words {\n"
        "  orchestrator+: { rollouts_per_batch: 12, admission+: { max_in_flight: 8 } },\n"
        "};\n"
        "(import 'lib/named.libsonnet')({\n"
        "  words_a: words { orchestrator+: { rollouts_per_batch: 16 } },\n"
        "  words_b: words { trainer+: { optimizer+: { lr: 1e-6 } } },\n"
        "  words_c: words { seed: 2, orchestrator+: { rollouts_per_batch: 4 * 3 } },\n"
        "})\n"
    )

    def of(name, field):
        (one,) = explain(workspace, name, field)
        return one.value, one.how, one.place.file.removeprefix("jsonnet/"), one.place.line

    batch = "orchestrator.rollouts_per_batch"
    assert of("words_a", batch) == (16, "run file", "runs/words_many.jsonnet", 5)
    assert of("words_b", batch) == (12, "run file", "runs/words_many.jsonnet", 2)
    assert of("words_c", batch) == (12, "run file", "runs/words_many.jsonnet", None)
    assert of("words_c", "seed") == (2, "run file", "runs/words_many.jsonnet", 7)
    assert of("words_a", "seed") == (1, "run file", "runs/words.jsonnet", 9)
    assert of("words_b", "trainer.optimizer.lr")[1:] == ("run file", "runs/words_many.jsonnet", 6)
    assert of("words_a", "trainer.optimizer.lr")[1:3] == ("axis", "algorithms/groups.libsonnet")
    (workspace.root / "jsonnet/runs/words_many.jsonnet").unlink()


def test_explain_says_from_what_a_value_is_derived(why):
    one = why("words_sparse", "inference.num_replicas")
    assert (one.how, one.place.file, [s.axis for s in one.sources]) == (
        "derived",
        "jsonnet/lib/run.libsonnet",
        ["hardware"],
    )
    both = why("words_wide", "inference.num_replicas")
    assert [s.file for s in both.sources] == [
        "jsonnet/hardware/two_cores.libsonnet",
        "jsonnet/runs/words_wide.jsonnet",
    ]
    assert [s.axis for s in why("words", "tasks.train[0].args.max_length").sources] == ["tasks"]
    assert (
        why("words_seed_2", "model.init.seed").sources[0].file == "jsonnet/runs/words_seeds.jsonnet"
    )


def test_explain_says_from_what_the_shape_over_nodes_follows(why):
    prefill = why("words_nodes", "inference.prefill_replicas")
    assert (prefill.how, prefill.value) == ("derived", 2)
    assert [s.file for s in prefill.sources] == [
        "jsonnet/hardware/two_cores.libsonnet",
        "jsonnet/runs/words_nodes.jsonnet",
    ]
    nodes = why("words_nodes", "hardware.num_nodes")
    assert (nodes.how, nodes.value, nodes.overrides, nodes.place.file) == (
        "run file",
        5,
        1,
        "jsonnet/runs/words_nodes.jsonnet",
    )


def test_explain_knows_the_fields_of_a_run_on_gpus():
    def of(field):
        (one,) = explain(manifest_specs.REPOSITORY, "glm5_run", field)
        return one.value, one.how, one.place.axis or [source.axis for source in one.sources]

    assert of("hardware.num_nodes") == (28, "run file", ["hardware"])
    assert of("inference.max_model_len_tokens")[:2] == (131072, "derived")
    assert of("model.mla.indexer.top_k") == (2048, "axis", "models")
    assert of("trainer.mesh.cp") == (8, "axis", "memory")
    assert of("trainer.mesh.dp_shard") == (12, "derived", ["hardware", "memory"])
    assert of("python_lock_sha256")[1:] == ("derived", ["hardware"])


@pytest.mark.parametrize("name", ["words", "words_wide", "words_nodes", "words_seed_2", "sums"])
def test_every_leaf_of_a_run_can_be_explained(name, workspace):
    found = {
        e.field: e.value
        for part in ("trainer", "inference", "transport", "stages.rl")
        for e in explain(workspace, name, part)
    }
    data = render(workspace, name).manifest.model_dump(mode="json")
    assert found and all(
        lookup(data, parse_path(field), "") == value for field, value in found.items()
    )


@pytest.mark.parametrize("name", sorted(RUN_OF_EACH_SPEC.values()))
def test_every_setting_of_a_checked_in_run_can_be_explained(name):
    found = {e.field: e.value for e in explain(manifest_specs.REPOSITORY, name, "orchestrator")}
    data = render(manifest_specs.REPOSITORY, name).manifest.model_dump(mode="json")
    assert found == {
        spelled(("orchestrator", *path)): value for path, value in leaves(data["orchestrator"])
    }


def test_an_unknown_field_is_met_with_the_nearest(workspace):
    with pytest.raises(
        OrreryError,
        match=r"there is no field 'trainer.optimiser'; did you mean 'trainer.optimizer'",
    ):
        explain(workspace, "words", "trainer.optimiser.lr")


def test_lines_are_found_by_braces_and_not_by_text(tmp_path):
    file = tmp_path / "a.libsonnet"
    file.write_text(
        "// a: { lr: 1 }\n{\n  other+: { lr: '{' },\n  trainer+: {\n"
        "    # lr: 2\n    text: 'lr: {',\n    opt+: { lr: 3 },\n  },\n}\n"
    )
    assert line_of(file, ("trainer", "opt", "lr")) == 7
    assert line_of(file, ("other", "lr")) == 3
    assert line_of(file, ("trainer", "lr")) is None


def test_diff_lists_what_differs_and_nothing_else(workspace):
    one, two = (render(workspace, f"words_seed_{n}").manifest for n in (1, 2))
    assert [d.field for d in diff(one, two)] == [
        "model.init.seed",
        "name",
        "seed",
        "stages.sft.data.task.seed",
        "tasks.train[0].seed",
    ]
    assert str(diff(one, two)[2]) == "seed: 1 → 2"
    assert diff(one, one) == []
    router = {
        d.field: d
        for d in diff(render(workspace, "words").manifest, render(workspace, "words_wide").manifest)
    }
    assert router["inference.router.policy"].before == "absent"


def test_fields_are_spelled_and_parsed_alike():
    for text in ("a", "a.b[0].c", "tasks.train[12].args"):
        assert spelled(parse_path(text)) == text
    assert parse_path("a.0.b") == ("a", 0, "b")


def test_the_plan_of_a_run_is_the_table_of_stages_and_processes(workspace):
    manifest = render(workspace, "words_wide").manifest
    stages = {s.name: s for s in plan(manifest)}
    assert {name: s.after for name, s in stages.items()} == {
        "init": (),
        "sft": ("init",),
        "rl": ("sft",),
        "evaluate": ("rl",),
        "report": ("evaluate",),
    }
    roles = [(p.role, p.index, p.ends) for p in stages["rl"].processes]
    assert roles == [
        ("inference", 0, "with_stage"),
        ("inference", 1, "with_stage"),
        ("router", 0, "with_stage"),
        ("orchestrator", 0, "itself"),
        ("trainer", 0, "itself"),
        ("trainer", 1, "itself"),
    ]
    assert [p.role for p in stages["init"].processes] == ["trainer"]
    assert [p.role for p in stages["evaluate"].processes] == [
        "inference",
        "inference",
        "router",
        "orchestrator",
    ]


def test_without_a_warm_start_rl_follows_init_and_without_a_router_there_is_none(workspace):
    manifest = render(workspace, "words").manifest
    bare = replaced(manifest, "stages", sft=None)
    assert [s.name for s in plan(bare)] == ["init", "rl", "evaluate", "report"]
    assert stage(bare, "rl").after == ("init",)
    assert "router" not in [p.role for p in stage(bare, "rl").processes]
    with pytest.raises(OrreryError, match=r"has no such stage. Choose from init, rl"):
        stage(bare, "sft")
