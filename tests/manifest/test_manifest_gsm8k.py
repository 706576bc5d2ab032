"""The specs of examples/gsm8k render once model and data are fetched, and say so before."""

import shutil
from pathlib import Path

import pytest

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.render import render_file

ROOT = Path(__file__).parents[2]
SPECS = sorted((ROOT / "examples/gsm8k").glob("*.jsonnet"))
INIT = """
(import 'models/SHAPE.libsonnet') + {
  model+: {
    init: { kind: 'pretrained', path: 'weights/x', revision: 'main', sha256: 'DIGEST' },
    tokenizer: { kind: 'pretrained', path: 'weights/x', sha256: 'DIGEST' },
  },
}
""".replace("DIGEST", "1" * 64)
SIDE = "{ kind: 'source', path: 'datasets/gsm8k-main', sha256: 'DIGEST', split: 'SPLIT' }"
SIDE = SIDE.replace("DIGEST", "3" * 64)
DATA = f"{{ source: {SIDE.replace('SPLIT', 'train')}, held_out: {SIDE.replace('SPLIT', 'test')} }}"


@pytest.fixture(params=SPECS, ids=lambda path: path.stem)
def spec(request, tmp_path):
    """A copy of the library with one spec among its runs."""
    for folder in ("jsonnet", "locks", "examples/gsm8k"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=shutil.ignore_patterns("runs"))
    (tmp_path / "jsonnet/runs").mkdir()
    return Path(shutil.copy(request.param, tmp_path / "jsonnet/runs"))


def fetched_model(spec: Path) -> None:
    shape = spec.stem.removeprefix("gsm8k_")
    axis = spec.parents[1] / f"models/{shape}_pretrained.libsonnet"
    axis.write_text(INIT.replace("SHAPE", shape))


def test_a_spec_without_its_data_names_the_command(spec):
    fetched_model(spec)
    with pytest.raises(
        OrreryError, match=r"fetched.libsonnet.* type `orrery fetch dataset NAME`, such as op"
    ):
        render_file(Workspace(spec.parents[2]), spec)


def test_a_spec_without_its_model_names_the_axis(spec):
    with pytest.raises(OrreryError, match=r"_pretrained.libsonnet': no such file"):
        render_file(Workspace(spec.parents[2]), spec)


def test_a_spec_renders_once_model_and_data_are_there(spec):
    fetched_model(spec)
    (spec.parents[1] / "tasks/gsm8k_main_fetched.libsonnet").write_text(DATA)
    for run in render_file(Workspace(spec.parents[2]), spec):
        [use] = run.manifest.tasks.evaluation
        assert use.args["held_out"]["split"] == "test" and use.args["split"] == "held_out"
        assert run.manifest.name.startswith(spec.stem)
