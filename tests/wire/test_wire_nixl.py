"""The patch of NIXL makes an idle agent on a CPU free. And the devices that UCX may use."""

import os
import time
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip(
    "nixl", reason="NOT TESTED: NIXL, which is not installed here", exc_type=ImportError
)

from orrery.runtime import network
from orrery.wire.weight_wire.links import RegisteredBuckets

IDLE_S = 0.5


def test_an_idle_agent_leaves_the_core_to_others():
    registered = RegisteredBuckets("idle", [torch.zeros(8)])
    began_s = time.process_time()  # of all threads
    time.sleep(IDLE_S)
    used_s = time.process_time() - began_s
    registered.close()
    assert used_s < 0.1 * IDLE_S, f"{used_s:.2f} s of {IDLE_S} s"


@pytest.mark.parametrize(("device", "devices"), [("cpu", "lo"), ("cuda", "lo,mlx5_0:1")])
def test_ucx_uses_no_interface_but_the_runs_and_on_a_gpu_what_has_rdma(
    monkeypatch, tmp_path, device, devices
):
    said = []

    def agent(*_):
        said.append(os.environ["UCX_NET_DEVICES"])
        return SimpleNamespace(register_memory=lambda *_: None)

    (tmp_path / "mlx5_0" / "ports" / "1").mkdir(parents=True)
    monkeypatch.setattr("os.environ", dict(os.environ))
    for name in ("UCX_NET_DEVICES", "ORRERY_INTERFACE"):
        os.environ.pop(name, None)
    monkeypatch.setattr(network, "RDMA_DEVICES", tmp_path)
    monkeypatch.setattr("nixl._api.nixl_agent", agent)
    RegisteredBuckets(
        "any",
        [
            SimpleNamespace(
                device=SimpleNamespace(type=device, index=0), data_ptr=lambda: 0, nbytes=8
            )
        ],
    )
    assert said == [devices]
