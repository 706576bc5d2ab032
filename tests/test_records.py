"""Every figure under benchmarks/ names a commit that holds the code that was measured."""

import importlib.util
import json
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
RECORDS = sorted((ROOT / "benchmarks").glob("*/*.json"))
# Measured on eight GPUs, or before dirty trees were refused. New measurements leave this list.
DIRTY = {
    "cluster/overhead",
    "demo/wall_time",
    "trainer/qwen3_30b_a3b_131k",
    "trainer/qwen3_30b_a3b_16k",
    "trainer/qwen3_8b_8k",
}


def git(*words: str, folder: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *words], cwd=folder, capture_output=True, text=True)


def commit_of(path: Path) -> str:
    return json.loads(path.read_text())["commit"]


def test_no_record_is_of_a_dirty_tree():
    dirty = {
        f"{path.parent.name}/{path.stem}" for path in RECORDS if commit_of(path).endswith("-dirty")
    }
    assert len(RECORDS) > 40 and dirty == DIRTY


@pytest.mark.skipif(
    git("rev-parse", "--is-shallow-repository").stdout.strip() != "false",
    reason="no git checkout with its whole history",
)
def test_every_commit_that_a_record_names_is_in_the_history():
    history = set(git("rev-list", "HEAD").stdout.split())
    assert len(history) > 100
    assert [
        f"{path.parent.name}/{path.stem}"
        for path in RECORDS
        if commit_of(path).removesuffix("-dirty") not in history
    ] == []


@pytest.fixture
def record(tmp_path):
    """Return `record` of a copy of benchmarks/record.py in a new checkout, and the checkout."""
    (tmp_path / "benchmarks" / "area").mkdir(parents=True)
    (tmp_path / "benchmarks" / "record.py").write_text(
        (ROOT / "benchmarks" / "record.py").read_text()
    )
    git("init", "-q", folder=tmp_path)
    git("add", ".", folder=tmp_path)
    git("-c", "user.name=a", "-c", "user.email=a@b.c", "commit", "-qm", "Begin", folder=tmp_path)
    spec = importlib.util.spec_from_file_location(
        "record_of_a_copy", tmp_path / "benchmarks" / "record.py"
    )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return lambda: module.record(
        tmp_path / "benchmarks/area/figure.json",
        figure="a figure",
        value=1.0,
        unit="s",
        goal=None,
        better="lower",
    )


def test_a_clean_tree_is_recorded(record, tmp_path):
    assert record()["commit"] == git("rev-parse", "HEAD", folder=tmp_path).stdout.strip()
    assert (tmp_path / "benchmarks/area/figure.json").exists()


def test_a_dirty_tree_is_refused_and_nothing_is_written(record, tmp_path):
    (tmp_path / "benchmarks" / "record.py").write_text("")
    with pytest.raises(
        SystemExit,
        match=r"a figure: measured 1 s, and not recorded: "
        r"tracked files differ from the commit; commit them",
    ):
        record()
    assert not (tmp_path / "benchmarks/area/figure.json").exists()


def test_a_folder_without_history_is_refused(record, tmp_path):
    (tmp_path / ".git").rename(tmp_path / "history")
    with pytest.raises(
        SystemExit, match=r"this folder is no git checkout; measure in one, or name the commit"
    ):
        record()
