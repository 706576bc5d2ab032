"""Lets the tests of this room import the fakes that they share, and gives each a run directory of which nothing may be left."""

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launcher_stages import alive

from orrery.observe import shared_memory


@pytest.fixture
def run_dir(tmp_path):
    path = tmp_path / f"fake-{os.urandom(6).hex()}"
    path.mkdir()
    yield path
    for pid in (path / "children").read_text().split() if (path / "children").exists() else ():
        assert not alive(int(pid)), f"{pid} outlived the launcher"
    assert not list(Path("/dev/shm").glob(f"{shared_memory.prefix(path)}*"))
