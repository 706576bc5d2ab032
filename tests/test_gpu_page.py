"""Test the Jsonnet blocks of docs/gpu.md, datasets.md and sft.md, and the run to copy."""

import re
from pathlib import Path

import pytest

from orrery.manifest.check import check
from orrery.manifest.identity import find_workspace
from orrery.manifest.plan import notes
from orrery.manifest.render import Evaluator, render
from orrery.manifest.schema import Manifest
from orrery.tasks import make

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/gpu.md").read_text()
JSONNET = re.compile(r"^```jsonnet\n(.*?)^```", re.MULTILINE | re.DOTALL)
BLOCKS = re.findall(JSONNET, PAGE)
DATASETS = (ROOT / "docs/datasets.md").read_text()
COPIED = ROOT / "examples/problems/mine.jsonnet"
DEMO = "(import 'runs/smollm2_demo.jsonnet').smollm2_demo"


def evaluated(snippet: str) -> Manifest:
    return check(Evaluator(find_workspace(ROOT))(snippet)["mine"], "mine")


def rendered(fields: str) -> Manifest:
    return evaluated(f"(import 'lib/named.libsonnet')({{ mine: {DEMO} + {{ {fields} }} }})")


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_of_the_page_changes_a_run_and_renders(block):
    assert rendered(block) != rendered("")


def test_the_pages_lines_for_more_gpus_place_the_roles_apart():
    (block,) = [block for block in BLOCKS if "layout" in block]
    found = rendered(block)
    assert found.trainer.mesh.world_size == found.inference.num_replicas == 4
    assert not found.hardware.shared_devices


def test_the_run_to_copy_has_the_task_of_the_measured_run_and_starts():
    found = evaluated(COPIED.read_text())
    measured = render(find_workspace(ROOT), "smollm2_problems_seed_1").manifest
    renamed = measured.tasks.model_dump_json().replace("problem_file", "mine")
    assert found.tasks.model_dump_json() == renamed
    assert (found.model, found.hardware) == (measured.model, measured.hardware)
    assert notes(found) == []


def test_the_pages_data_replaces_that_of_the_copied_run():
    (block,) = [one for one in re.findall(JSONNET, DATASETS) if one.startswith("local data")]
    text = COPIED.read_text()
    begin, end = text.index("local data"), text.index("(import 'lib/named")
    mine = "examples/problems/arithmetic.jsonl"  # instead of the user's file data/mine.jsonl
    swapped = text[:begin] + block.replace("data/mine.jsonl", mine) + text[end:]
    assert evaluated(swapped) == evaluated(text)


def test_the_spec_of_the_page_on_sft_renders():
    block = re.findall(JSONNET, (ROOT / "docs/sft.md").read_text())[0]
    some = "examples/problems/arithmetic.jsonl"  # instead of the user's chats
    text = re.sub(r"importstr 'data/\w+\.jsonl'", f"importstr '{some}'", block)
    found = check(Evaluator(find_workspace(ROOT))(text)["my_run"], "my_run")
    assert found.sft.validation.data.path == "data/held_out.jsonl"
    assert found.stages.rl.num_steps == 10


def test_the_pages_few_shot_wraps_the_task_of_the_copied_run(monkeypatch):
    (line,) = [one for one in re.findall(JSONNET, DATASETS) if "few_shot" in one]
    text = COPIED.read_text()
    begin, end = text.index("kind: 'dataset',"), text.index("          weight: 1")
    args = text[text.index("data + {", begin) : end].strip().rstrip(",")
    found = evaluated(text[:begin] + line.replace("data + { … }", args) + text[end:])
    (use,) = found.tasks.train
    monkeypatch.chdir(ROOT)
    messages = make(use).problem(0).messages
    assert [message.role for message in messages] == ["user", "assistant"] * 3 + ["user"]
    (held,) = found.tasks.evaluation
    assert held.args["args"]["split"] == "held_out"
