"""Makes `inference_servers` importable (with `--import-mode=importlib` a test's own folder is not
on the path), and what files share.
"""

import os
import sys
from pathlib import Path

import pytest

from orrery.wire.weight_wire import WeightPublisher

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture(scope="module")
def publisher(request):
    """The wire `files` of one file's tests."""
    publisher = WeightPublisher(
        Path(f"/dev/shm/orrery-test-{os.getpid()}-{Path(request.node.path).stem}")
    )
    yield publisher
    publisher.close()
