"""Components, steps and command lines of a manifest and a site; golden texts of whole plans."""

import os
import re
import shlex
from collections import Counter
from pathlib import Path

import pytest

from orrery.launcher.pipeline import describe_stage
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.job import components, sbatch_options, step_plans
from orrery.manifest.identity import Workspace, load
from orrery.manifest.plan import plan, stage

ROOT = Path(__file__).parents[2]
GOLDEN = Path(__file__).parent / "golden"
SLURM = Slurm(
    partition="gpu",
    account="lab",
    time_limit_min=1440,
    gpu_type="h200",
    cpus_per_node=192,
    memory_per_node_mb=2_000_000,
)
NAMES = sorted(path.stem for path in (ROOT / "manifests").glob("*.json"))


def manifest(name):
    return load(ROOT / "manifests" / f"{name}.json")


@pytest.mark.parametrize("name", NAMES)
def test_every_process_is_in_exactly_one_step_and_steps_fill_their_nodes(name):
    one = manifest(name)
    for each in plan(one):
        steps = step_plans(each, components(one.hardware, each, SLURM), SLURM)
        assert sorted((p.role, p.index) for step in steps for p in step.processes) == sorted(
            (p.role, p.index) for p in each.processes
        )
        for step in steps:
            assert len(step.processes) == step.tasks_per_node * step.num_nodes
            assert [p.index for p in step.processes] == list(
                range(step.processes[0].index, step.processes[0].index + len(step.processes))
            )
            for rank, process in enumerate(step.processes):
                assert (
                    process.node
                    == step.group.first_node + step.first_node + rank // step.tasks_per_node
                )


@pytest.mark.parametrize("name", NAMES)
def test_a_stage_asks_for_the_nodes_and_devices_that_its_plan_has_and_no_more(name):
    one = manifest(name)
    for each in plan(one):
        parts = [part.split() for part in sbatch_options(one.hardware, each, SLURM).split(" : ")]
        nodes = [
            int(word.removeprefix("--nodes="))
            for part in parts
            for word in part
            if word.startswith("--nodes=")
        ]
        assert sum(nodes) == each.num_nodes
        gpus = [
            [int(word.rpartition(":")[2]) for word in part if word.startswith("--gres=")]
            for part in parts
        ]
        if one.hardware.accelerator == "cpu":
            assert not any(gpus)
        else:
            assert all(
                count <= one.hardware.devices_per_node for counts in gpus for count in counts
            )
            asked = sum(number * sum(counts) for number, counts in zip(nodes, gpus, strict=True))
            by_role = Counter()
            for process in each.processes:
                by_role[process.role] += process.num_devices
            needed = max(by_role.values()) if one.hardware.shared_devices else by_role.total()
            assert asked == needed
        assert sum("--requeue" in part for part in parts) == 1 and "--requeue" in parts[0]


def test_servers_come_first_and_the_first_component_has_the_orchestrator():
    one = manifest("glm5_run")
    each = stage(one, "rl")
    steps = step_plans(each, components(one.hardware, each, SLURM), SLURM)
    assert [(step.role, step.component, step.num_nodes, step.tasks_per_node) for step in steps] == [
        *[("inference", 0, 1, 1)] * 8, *[("inference", 1, 1, 1)] * 8, ("orchestrator", 0, 1, 1),
        ("trainer", 2, 12, 8),
    ]  # fmt: skip
    assert [step.first_node for step in steps] == [*range(8), *range(8), 0, 0], (
        "an engine is a step of its own"
    )


@pytest.mark.parametrize("name", ["glm5_run", "glm5_run_32", "glm5_shape_smoke", "reverse_text"])
def test_what_a_dry_run_shows_is_what_was_reviewed(name, tmp_path):
    """The plan of every stage. `ORRERY_GOLDEN=1 pytest …` writes the files anew."""
    site = Site.model_validate(
        {
            "slurm": SLURM.model_dump(),
            "containers": {"images": "images", "mounts": ["/scratch"]},
            "network": {"interface": "ib0"},
        }
    )
    one = manifest(name)
    lines = [
        line
        for each in plan(one)
        for line in describe_stage(one, each.name, site, Workspace(tmp_path))
    ]
    text = "".join(_without_id(line, name) + "\n" for line in lines)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("ORRERY_GOLDEN"):
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
    assert text == path.read_text()


def _without_id(line, name):
    """The id moves with every lock; that the folder carries it is tested elsewhere."""
    return re.sub(rf"\b{name}-[0-9a-f]{{12}}\b", f"{name}-<id>", line)


def test_no_secret_and_no_address_stands_on_a_command_line(tmp_path):
    one = manifest("glm5_run")
    site = Site.model_validate(
        {
            "slurm": SLURM.model_dump(),
            "containers": {"images": "images"},
            "network": {"interface": "ib0"},
        }
    )
    for line in describe_stage(one, "rl", site, Workspace(tmp_path)):
        assert "TOKEN" not in line and "0.0.0.0" not in line
        if not line.startswith("  note: "):
            shlex.split(line)
