"""Host memory: registration with a fake CUDA runtime, and the memory left by control groups."""

import gc
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from orrery.trainer.checkpoint import SharedCopy
from orrery.trainer.host_memory import available_bytes, host_block

GPU = torch.device("cuda", 0)


@pytest.fixture
def registered(monkeypatch):
    """{address: bytes} of what the stand-in holds."""
    held = {}

    def register(address, num_bytes, flags):
        if any(
            address < begin + size and begin < address + num_bytes for begin, size in held.items()
        ):
            return 712
        held[address] = num_bytes
        return 0

    def unregister(address):
        assert any(begin <= address < end for begin, end in mappings()), (
            "freed before it was let go of"
        )
        del held[address]

    runtime = SimpleNamespace(cudaHostRegister=register, cudaHostUnregister=unregister)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    return held


def mappings() -> list[list[int]]:
    """Begin and end of all memory of this process."""
    return [
        [int(number, 16) for number in line.split()[0].split("-")]
        for line in Path("/proc/self/maps").read_text().splitlines()
    ]


def test_a_block_is_registered_until_its_last_tensor_goes_and_freed_after_that(registered):
    for _ in range(20):  # the same addresses come again
        block, error = host_block(100_000, GPU)
        assert (
            error == 0
            and registered == {block.data_ptr(): 100_000}
            and block.data_ptr() % 4096 == 0
            and not block.any()
        )
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


def test_a_checkpoints_copy_that_grows_or_goes_leaves_nothing_registered(registered, tmp_path):
    copy = SharedCopy(tmp_path / "memory" / "copy", GPU)
    copy.reserve(5000)
    copy.reserve(50_000)
    assert list(registered.values()) == [50_000]
    del copy
    gc.collect()
    assert not registered


def group(folder: Path, version: int, limit: str, used: int, files: int) -> None:
    """Write the files of a control group; a third of its `files` pages are active."""
    names = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes")
        if version == 1
        else ("memory.max", "memory.current")
    )
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in zip(names, (limit, used), strict=True):
        (folder / name).write_text(f"{content}\n")
    whose, active = "total_" if version == 1 else "", files // 3
    (folder / "memory.stat").write_text(
        f"anon 5\n{whose}active_file {active}\n"
        f"{whose}inactive_file {files - active}\ninactive_anon 9\n"
    )


@pytest.fixture
def machine(tmp_path):
    """A machine's proc/ and sys/ with 1000 KiB left. `machine(lines)` writes the groups."""
    (tmp_path / "proc" / "self").mkdir(parents=True)
    (tmp_path / "proc" / "meminfo").write_text(
        "MemTotal: 4000 kB\nMemFree: 10 kB\nMemAvailable: 1000 kB\n"
    )

    def write(lines: str) -> Path:
        (tmp_path / "proc" / "self" / "cgroup").write_text(lines)
        return tmp_path

    return write


def test_a_job_has_what_its_group_and_those_above_it_leave(machine):
    root = machine("0::/slurm/job_7/step_0\n")
    groups = root / "sys" / "fs" / "cgroup"
    group(groups / "slurm" / "job_7" / "step_0", 2, "max", 10_000, 0)
    group(groups / "slurm" / "job_7", 2, "500000", 400_000, 30_000)
    assert available_bytes(root) == 130_000
    group(groups / "slurm", 2, "500000", 450_000, 0)
    assert available_bytes(root) == 50_000
    group(groups / "slurm" / "job_7" / "step_0", 2, "500000", 500_001, 0)
    assert available_bytes(root) == 0


def test_a_job_of_control_groups_of_version_1_has_what_they_leave(machine):
    root = machine("9:name=systemd:/elsewhere\n4:cpu,memory:/slurm/job_7\n0::/\n")
    groups = root / "sys" / "fs" / "cgroup" / "memory"
    group(groups, 1, "9223372036854771712", 3_000_000, 0)
    group(groups / "slurm" / "job_7", 1, "500000", 400_000, 30_000)
    assert available_bytes(root) == 130_000


@pytest.mark.parametrize("path", ["/docker/7f", "/../7f"])
def test_a_container_that_sees_its_own_group_as_the_root_has_what_that_leaves(machine, path):
    for version, line, mount in ((2, f"0::{path}\n", ""), (1, f"4:memory:{path}\n", "memory")):
        group(
            (root := machine(line)) / "sys" / "fs" / "cgroup" / mount,
            version,
            "500000",
            400_000,
            version,
        )
        assert available_bytes(root) == 100_000 + version


def test_without_a_limit_it_is_the_kernels_that_counts(machine, tmp_path):
    assert available_bytes(machine("0::/user.slice\n")) == 1000 * 1024
    (tmp_path / "proc" / "self" / "cgroup").unlink()
    assert available_bytes(tmp_path) == 1000 * 1024
    group(tmp_path / "sys" / "fs" / "cgroup", 2, "3000000", 5, 0)
    assert available_bytes(machine("0::/\n")) == 1000 * 1024, (
        "the kernel has less than the group may take"
    )
    assert 0 < available_bytes() < 1 << 50
