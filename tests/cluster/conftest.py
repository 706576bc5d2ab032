"""Tests on the simulated cluster. `make test-cluster` collects them, `make test` does not."""

import os
from collections.abc import Iterator

import pytest
from simulated import Cluster

collect_ignore_glob = [] if os.environ.get("ORRERY_TEST_CLUSTER") else ["test_*.py"]


@pytest.fixture
def cluster() -> Iterator[Cluster]:
    """The running cluster; idle and whole before and after every test."""
    one = Cluster()
    one.restore()
    yield one
    one.restore()
