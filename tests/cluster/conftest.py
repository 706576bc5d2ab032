"""Tests on the simulated cluster. `make test-cluster` collects them, `make test` does not."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from simulated import Cluster

collect_ignore_glob = [] if os.environ.get("ORRERY_TEST_CLUSTER") else ["test_*.py"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The running cluster; idle and whole before and after every test."""
    one = Cluster()
    one.restore()
    yield one
    one.restore()
