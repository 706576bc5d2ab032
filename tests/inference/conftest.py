"""Fixtures of this room."""

import os
from pathlib import Path

import pytest

from orrery.wire.weight_wire import WeightPublisher


@pytest.fixture(scope="module")
def publisher(request):
    """The wire `files` of one file's tests."""
    publisher = WeightPublisher(
        Path(f"/dev/shm/orrery-test-{os.getpid()}-{Path(request.node.path).stem}")
    )
    yield publisher
    publisher.close()
