"""Components, steps and command lines of a manifest and a site; golden texts of whole plans."""

import os
import re
import shlex
import subprocess
from collections import Counter
from pathlib import Path

import pytest

from orrery.launcher.pipeline import describe_stage
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.allocation import step_plans
from orrery.launcher.slurm.queue import batch_job, components, sbatch_options, script_facts
from orrery.manifest.errors import OrreryError
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
        *[("inference", 0, 1, 1)] * 4, ("inference", 1, 1, 1),
        *[("headless", 0, 1, 1)] * 4, ("headless", 1, 7, 1),
        ("orchestrator", 0, 1, 1), ("trainer", 2, 12, 8),
    ]  # fmt: skip
    first_nodes = [step.first_node for step in steps]
    assert first_nodes == [0, 2, 4, 6, 0, 1, 3, 5, 7, 1, 0, 0], "an engine has its own nodes"


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


def job_of(tmp_path, **changes):
    site = Site(slurm=SLURM.model_copy(update=changes))
    one = manifest("glm5_run")
    options = sbatch_options(one.hardware, stage(one, "rl"), site.slurm)
    run = tmp_path / "runs" / "glm5_run-0123456789ab"
    return batch_job(run, "rl", options, "touch started", site, tmp_path)


def started(command, tmp_path, **env):
    return subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={**os.environ, **env}, capture_output=True
    ).returncode


def test_lines_of_the_site_run_before_the_launcher_and_a_failing_one_ends_the_job(tmp_path):
    command, script = job_of(tmp_path, pre_run=('echo "$ORRERY_WORD" >before', "export A=1"))
    assert script is None and command[-1].startswith("--wrap=")
    assert started(command[-1].removeprefix("--wrap="), tmp_path, ORRERY_WORD="it's") == 0
    assert (tmp_path / "before").read_text() == "it's\n" and (tmp_path / "started").exists()
    (tmp_path / "started").unlink()
    command, _ = job_of(tmp_path, pre_run=("false",))
    assert started(command[-1].removeprefix("--wrap="), tmp_path) == 1
    assert not (tmp_path / "started").exists()


def test_a_percent_sign_in_the_checkouts_path_reaches_slurm_escaped(tmp_path):
    command, _ = job_of(tmp_path / "50%j")
    [output] = [word for word in command if word.startswith("--output=")]
    assert output == f"--output={tmp_path}/50%%j/runs/glm5_run-0123456789ab/logs/slurm.%j.log"


def test_a_template_makes_the_job_script_with_every_component(tmp_path):
    (tmp_path / "site.j2").write_text((ROOT / "docs" / "sbatch.example.j2").read_text())
    command, script = job_of(tmp_path, template="site.j2", pre_run=("true",))
    assert not [word for word in command if word.startswith(("--wrap", "--nodes"))]
    lines = script.splitlines()
    assert lines[0] == "#!/bin/bash" and lines.count("#SBATCH hetjob") == 2
    nodes = [line for line in lines if "--nodes=" in line]
    assert nodes == ["#SBATCH --nodes=8", "#SBATCH --nodes=8", "#SBATCH --nodes=12"]
    assert "#SBATCH --comment=glm5_run-0123456789ab" in lines
    assert started(script, tmp_path) == 0 and (tmp_path / "started").exists()
    facts = script_facts(SLURM.model_copy(update={"template": "site.j2"}), tmp_path)
    assert facts["template"]["file"] == "site.j2" and len(facts["template"]["sha256"]) == 64


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("#!/bin/bash\n{{ comand }}\n", "'comand' is undefined; the fields are run, stage"),
        ("#!/bin/bash\n{% if %}{{ command }}", "Expected an expression"),
        (
            "#!/bin/bash\n{{ stage + 1 }}{{ command }}",
            'can only concatenate str (not "int") to str',
        ),
        ("#!/bin/bash\n{{ 1 // 0 }}{{ command }}", "integer division or modulo by zero"),
        ("#!/bin/bash\n{{ sbatch }}\n", "lacks {{ command }}; write"),
        ("{{ command }}", "begins without '#!'"),
        (None, "cannot be read"),
    ],
)
def test_a_wrong_template_is_one_sentence(text, sentence, tmp_path):
    if text is not None:
        (tmp_path / "site.j2").write_text(text)
    with pytest.raises(OrreryError, match=re.escape(sentence)) as caught:
        job_of(tmp_path, template="site.j2")
    assert str(caught.value).startswith("slurm.template: site.j2: ")
