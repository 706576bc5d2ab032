"""The correction to NIXL: an agent on CPU costs nothing while nothing comes."""

import time

import pytest
import torch

pytest.importorskip("nixl", reason="NOT TESTED: NIXL, which is not installed here", exc_type=ImportError)

from orrery.transport.weight_wire.nixl import Registered

IDLE_S = 0.5


def test_an_idle_agent_leaves_the_core_to_others():
    registered = Registered("idle", [torch.zeros(8)])
    began_s = time.process_time()  # of all threads
    time.sleep(IDLE_S)
    used_s = time.process_time() - began_s
    registered.close()
    assert used_s < 0.1 * IDLE_S, f"{used_s:.2f} s of {IDLE_S} s"
