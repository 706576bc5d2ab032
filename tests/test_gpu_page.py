"""The lines that docs/gpu.md shows for a run file, added to the run of `make demo`."""

import re
from pathlib import Path

import pytest

from orrery.manifest.check import check
from orrery.manifest.identity import find_workspace
from orrery.manifest.render import Evaluator
from orrery.manifest.schema import Manifest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/gpu.md").read_text()
BLOCKS = re.findall(r"^```jsonnet\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
DEMO = "(import 'runs/smollm2_demo.jsonnet').smollm2_demo"


def rendered(fields: str) -> Manifest:
    snippet = f"(import 'lib/named.libsonnet')({{ mine: {DEMO} + {{ {fields} }} }})"
    return check(Evaluator(find_workspace(ROOT))(snippet)["mine"], "docs/gpu.md")


@pytest.mark.parametrize("block", BLOCKS)
def test_every_block_of_the_page_changes_a_run_and_renders(block):
    assert rendered(block) != rendered("")


def test_the_pages_lines_for_more_gpus_place_the_roles_apart():
    (block,) = [block for block in BLOCKS if "layout" in block]
    found = rendered(block)
    assert found.trainer.mesh.world_size == found.inference.num_replicas == 4
    assert not found.hardware.shared_devices
