"""Type the quickstart's commands in order, and train its task until a held-out reward ends it."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from orrery.manifest.identity import load, run_dir
from orrery.runtime.metrics import read
from workspace import linked

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent
PAGE = (ROOT / "docs/quickstart.md").read_text()
INSTALL = "uv pip install --no-deps --no-build-isolation -e examples/count_vowels"
COPY = (
    "sed 's/reverse_text/count_vowels/' jsonnet/runs/reverse_text.jsonnet "
    "> jsonnet/runs/count_vowels.jsonnet"
)
LOOK = ["orrery status", "orrery logs reverse_text trainer"]
CHANGE = [
    "orrery explain reverse_text trainer.optimizer.lr",
    "orrery render reverse_text",
    "orrery plan reverse_text",
]
# Commands that the test skips: `make demo` would run `make setup`, the environment is active, and
# tensorboard and the server never end.
START = ["snakemake --profile local reverse_text", "make demo RUN=count_vowels"]
OTHERWISE = [". .venv/bin/activate", "tensorboard --logdir runs", "orrery stop reverse_text"]
OTHERWISE += ["orrery serve reverse_text"]
# Smaller than the page's run: a shorter warm start, and RL ends at its first evaluation.
SMALLER = (
    ("sft+: {\n          num_steps: 25", "sft+: {\n          num_steps: 15"),
    ("interval_steps: 10, num_problems: 128", "stop_at: 0.0, interval_steps: 10, num_problems: 16"),
    ("evaluate+: { num_problems: 256 }", "evaluate+: { num_problems: 16 }"),
)


def commands() -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [
        line.split(" #")[0].strip()
        for language, block in blocks
        if not language
        for line in block.splitlines()
        if line.strip()
    ]


def test_every_command_of_the_page_is_one_that_the_test_below_types():
    assert sorted(commands()) == sorted(
        [*LOOK, *CHANGE, *START, *OTHERWISE, INSTALL, COPY, "orrery render count_vowels"]
    )


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(400)
def test_the_pages_own_task_is_trained_by_its_commands_and_ends_early(tmp_path):
    linked(tmp_path, "locks", "local", "Snakefile", "packages", "pyproject.toml", "examples")
    for name in ("jsonnet", "manifests"):
        shutil.copytree(ROOT / name, tmp_path / name)
    path = os.pathsep.join(filter(None, [str(tmp_path / "site"), os.environ.get("PYTHONPATH")]))
    env = {
        **os.environ,
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "PYTHONPATH": path,
        "VIRTUAL_ENV": str(BIN.parent),
    }

    def type_in(command: str) -> str:
        done = subprocess.run(
            command, shell=True, cwd=tmp_path, env=env, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout

    for command in CHANGE:
        type_in(command)
    type_in(INSTALL.replace("-e ", "--target site "))  # not into the environment of other tests
    (axis,) = re.findall(r"^```jsonnet\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    (tmp_path / "jsonnet/tasks/count_vowels.libsonnet").write_text(axis)
    type_in(COPY)
    spec = tmp_path / "jsonnet/runs/count_vowels.jsonnet"
    for whole, smaller in SMALLER:
        assert whole in spec.read_text()
        spec.write_text(spec.read_text().replace(whole, smaller))
    type_in("orrery render count_vowels")
    type_in("snakemake --profile local count_vowels")
    assert "RL ended early after step" in type_in("orrery report count_vowels --summary")
    for command in LOOK:
        assert type_in(command.replace("reverse_text", "count_vowels"))

    manifest = load(tmp_path / "manifests/count_vowels.json")
    folder = run_dir(tmp_path / "runs", manifest)
    assert all(
        (folder / "stages" / stage / "DONE").exists()
        for stage in ("init", "sft", "rl", "evaluate", "report")
    )
    (ended,) = [
        row
        for row in read(folder / "metrics/orchestrator.0.jsonl")
        if row.get("event") == "stopped_early"
    ]
    compared = [
        row["version"]
        for row in read(folder / "metrics/trainer.0.jsonl")
        if row.get("event") == "compare"
    ]
    assert compared == [ended["version"]] and ended["version"] < manifest.stages.rl.num_steps
    assert (folder / "weights/rl/model.safetensors").exists()
    if ended["version"]:
        assert (
            len(list((folder / "checkpoints").glob(f"step_{ended['version']}.attempt_1/COMPLETE")))
            == 1
        )
    lines = [
        json.loads(line) for line in (folder / "rollouts/evaluate.jsonl").read_text().splitlines()
    ]
    assert {line["task"] for line in lines} == {"count_vowels"} and len(lines) == 2 * 16
