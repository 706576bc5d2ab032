"""Host memory that is registered with CUDA, by a stand-in for the CUDA runtime that knows what is registered."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orrery.trainer.host_copy import HostCopy
from orrery.trainer.host_memory import host_block

GPU = torch.device("cuda", 0)


@pytest.fixture
def registered(monkeypatch):
    """{address: bytes} of what the stand-in holds."""
    held = {}

    def register(address, num_bytes, flags):
        if any(address < begin + size and begin < address + num_bytes for begin, size in held.items()):
            return 712
        held[address] = num_bytes
        return 0

    def unregister(address):
        assert any(begin <= address < end for begin, end in mappings()), "freed before it was let go of"
        del held[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return held


def mappings() -> list[list[int]]:
    """Begin and end of all memory of this process."""
    return [[int(number, 16) for number in line.split()[0].split("-")] for line in Path("/proc/self/maps").read_text().splitlines()]


def test_a_block_is_registered_until_its_last_tensor_goes_and_freed_after_that(registered):
    for _ in range(20):  # the same addresses come again
        block, error = host_block(100_000, GPU)
        assert error == 0 and registered == {block.data_ptr(): 100_000} and block.data_ptr() % 4096 == 0 and not block.any()
        window = block.view(torch.float32)[7:9]
        del block
        assert registered
        del window
        gc.collect()
        assert not registered


def test_small_blocks_share_no_page_and_an_empty_one_is_none(registered):
    blocks = [host_block(10, GPU)[0] for _ in range(5)]
    assert len({block.data_ptr() >> 12 for block in blocks}) == len(registered) == 5
    assert host_block(0, GPU)[0].numel() == 0 and len(registered) == 5


def test_what_cannot_be_registered_says_the_error_and_is_not_let_go_of(registered, monkeypatch):
    monkeypatch.setattr(torch.cuda.cudart(), "cudaHostRegister", lambda *_: 2)
    block, error = host_block(10, GPU)
    assert error == 2 and block.numel() == 10
    del block


def test_a_checkpoints_copy_that_grows_or_goes_leaves_nothing_registered(registered):
    copy = HostCopy(GPU)
    copy.reserve(5000)
    copy.reserve(50_000)
    assert list(registered.values()) == [50_000]
    del copy
    gc.collect()
    assert not registered
