"""Fixtures: run folders that check for leftovers, and checkouts. Tests may import the fakes."""

import os
import shutil
import tempfile
from contextlib import contextmanager
from pathlib import Path

import pytest
from launcher_stages import alive

from orrery.runtime import run_directory

ROOT = Path(__file__).parents[2]


@contextmanager
def new_run_dir(tmp_path):
    path = tmp_path / f"fake-{os.urandom(6).hex()}"
    path.mkdir()
    yield path
    for pid in (path / "children").read_text().split() if (path / "children").exists() else ():
        assert not alive(int(pid)), f"{pid} outlived the launcher"
    assert not list(Path("/dev/shm").glob(f"*{run_directory.memory_prefix(path)}*"))
    for name in (f"orrery-kv-{path.name}-", run_directory.start_prefix(path)):
        assert not list(Path(tempfile.gettempdir()).glob(f"{name}*"))


@pytest.fixture
def run_dir(tmp_path):
    with new_run_dir(tmp_path) as path:
        yield path


@pytest.fixture
def other_run_dir(tmp_path):
    with new_run_dir(tmp_path) as path:
        yield path


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """The specs and manifests, to be changed at will, as the working directory."""
    for name in ("manifests", "jsonnet", "locks"):
        shutil.copytree(ROOT / name, tmp_path / name)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("ORRERY_RESUME", raising=False)
    return tmp_path
