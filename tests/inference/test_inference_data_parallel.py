"""The stores of an engine's data-parallel ranks, opened by vLLM or by torch."""

import importlib
import os
import socket

import psutil
import pytest
import vllm.distributed.utils as stores
from torch.distributed import DistNetworkError

from orrery.inference.patches.vllm import meet_at_one_address
from orrery.runtime.network import LOOPBACK, free_ports

RENDEZVOUS = importlib.import_module("torch.distributed.rendezvous")


@pytest.fixture(autouse=True)
def corrected(monkeypatch):
    for module in (stores, RENDEZVOUS):
        monkeypatch.setattr(module, "TCPStore", module.TCPStore)  # as it is, again after the test
    meet_at_one_address()


def listening(port: int) -> set[str]:
    every = psutil.Process(os.getpid()).net_connections("inet")
    return {
        each.laddr.ip
        for each in every
        if each.status == psutil.CONN_LISTEN and each.laddr.port == port
    }


def through_vllm():
    store = stores.create_tcp_store(
        LOOPBACK, 0, is_master=True, world_size=-1, wait_for_workers=False
    )
    return store, store.port


def through_torch():
    [port] = free_ports(1)
    store, rank, world_size = next(stores.rendezvous(f"tcp://{LOOPBACK}:{port}", 0, 1))
    assert (rank, world_size) == (0, 1)
    return store, port


@pytest.mark.parametrize("open_store", [through_vllm, through_torch], ids=["vLLM", "torch"])
def test_a_store_listens_at_its_own_address_and_is_found_there(open_store):
    store, port = open_store()
    assert listening(port) == {LOOPBACK}
    store.set("key", "value")
    reader = stores.create_tcp_store(LOOPBACK, port, is_master=False, wait_for_workers=False)
    assert reader.get("key") == b"value"


def test_a_store_at_a_port_that_is_taken_says_so_as_torch_does():
    with (
        socket.create_server((LOOPBACK, 0)) as taken,
        pytest.raises(DistNetworkError, match="EADDRINUSE"),
    ):
        stores.create_tcp_store(
            LOOPBACK, taken.getsockname()[1], is_master=True, wait_for_workers=False
        )
