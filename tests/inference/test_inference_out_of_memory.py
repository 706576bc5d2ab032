"""vLLM's errors about memory name a field and a value that fits. The texts are real."""

import json
import re

import psutil
import pytest
from inference_servers import DENSE, make_run, start_role

from orrery.inference.server import explain_memory, weight_bytes
from orrery.manifest.errors import OutOfMemory
from orrery.manifest.identity import load
from orrery.manifest.schema.inference import longest_device_bytes

GIB = 1 << 30
CPU_CACHE = (
    "ValueError: Available memory on node 0 (20.5/23.43 GiB) on kv cache allocation is less than "
    "requested memory for kv (1024.0 GiB). Decrease --kv-cache-memory-bytes, "
    "VLLM_CPU_KVCACHE_SPACE, or reduce CPU memory used by other processes."
)
TOO_LONG = (
    "ValueError: To serve at least one request with the model's max seq len (512), (0.25 GiB KV "
    "cache is needed, which is larger than the available KV cache memory (0.03 GiB). Based on the "
    "available memory, the estimated maximum model length is 64. Try increasing "
    "`gpu_memory_utilization` (which also controls CPU memory on the CPU backend) or decreasing "
    "`max_model_len` when initializing the engine."
)
NO_CACHE = (
    "ValueError: No available memory for the cache blocks. Try increasing "
    "`gpu_memory_utilization` when initializing the engine (this flag also controls CPU memory "
    "reservation on the CPU backend, despite its name)."
)
SAMPLER = (
    "RuntimeError: CUDA out of memory occurred when warming up sampler with 256 dummy requests. "
    "Please try lowering `max_num_seqs` or `gpu_memory_utilization` when initializing the engine."
)
TORCH = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate {asked} GiB. GPU 0 has a total "
    "capacity of 79.10 GiB of which {free} GiB is free. Including non-PyTorch memory, this process "
    "has {own} GiB memory in use. Of the allocated memory {own} GiB is allocated by PyTorch, and "
    "1.00 MiB is reserved by PyTorch but unallocated."
)
CPU_ALLOCATOR = (
    "RuntimeError: [enforce fail at alloc_cpu.cpp:124] err == 0. DefaultCPUAllocator: can't "
    "allocate memory: you tried to allocate 1073741824 bytes. Error code 12 (Cannot allocate "
    "memory)"
)


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("run") / "engine", DENSE)


def explained(run_dir, cause, **inference):
    """Return the sentence, and the manifest with the fields that it tells to type."""
    spec = json.loads((run_dir / "manifest.json").read_text())
    spec["inference"] |= {"kv_cache_bytes": 64 * GIB, **inference}
    path = run_dir / "other.json"
    path.write_text(json.dumps(spec))
    said = explain_memory(cause, load(path), run_dir / "weights" / "init")
    typed = re.findall(r"inference\.(\w+): (\d+)", said or "")
    spec["inference"] |= {field: int(value) for field, value in typed}
    path.write_text(json.dumps(spec))
    return said, load(path).inference


def test_a_cache_larger_than_the_memory_names_the_size_that_fits(run_dir):
    said, changed = explained(run_dir, CPU_CACHE)
    assert said.startswith(
        f"inference.kv_cache_bytes {64 * GIB} does not fit: 20.5 GiB of host memory were free"
    )
    assert 18 * GIB < changed.kv_cache_bytes <= 20.5 * GIB * 0.9
    said, shared = explained(run_dir, CPU_CACHE, num_replicas=2)
    assert "shared by 2 engines" in said
    assert 2 * shared.kv_cache_bytes <= 20.5 * GIB * 0.9 < 2 * shared.kv_cache_bytes + (4 << 20)
    for cause in (NO_CACHE, "torch.OutOfMemoryError: CUDA out of memory.", CPU_ALLOCATOR):
        said, changed = explained(run_dir, cause)
        assert said and changed.kv_cache_bytes == 32 * GIB, cause


def test_a_full_gpu_leaves_what_weights_and_other_processes_do_not_take(run_dir):
    said, alone = explained(run_dir, TORCH.format(asked="2.00", free="1.00", own="78.10"))
    assert "2.0 GiB more were asked for, 1.0 GiB of 79.1 GiB were free; type " in said
    said, shared = explained(run_dir, TORCH.format(asked="2.00", free="1.00", own="38.10"))
    assert "and other processes held 40.0 GiB" in said
    assert (
        alone.kv_cache_bytes == (64 * GIB - 2 * GIB - int(0.06 * int(79.1 * GIB)) // 2) >> 20 << 20
    )
    assert shared.kv_cache_bytes < 39.1 * GIB - 0.06 * 79 * GIB
    assert shared.kv_cache_bytes > 33 * GIB


def test_weights_that_fill_the_device_ask_for_more_devices(run_dir, tmp_path, monkeypatch):
    monkeypatch.setattr("orrery.inference.server.weight_bytes", lambda *_: 78 * GIB)
    said, changed = explained(run_dir, TORCH.format(asked="2.00", free="1.00", own="78.10"))
    assert "inference.tensor_parallel: 2 instead of 1 halves them" in said
    assert changed.tensor_parallel == 2


def test_weights_are_counted_in_the_engines_dtype(run_dir):
    weights = run_dir / "weights" / "init"
    stored = (weights / "model.safetensors").stat().st_size
    inference = load(run_dir / "manifest.json").inference

    def counted(**fields):
        return weight_bytes(weights, inference.model_copy(update=fields))

    assert counted() == stored
    assert counted(dtype="bfloat16") == stored // 2
    assert counted(dtype="bfloat16", tensor_parallel=2) == stored // 4
    assert counted(dtype="bfloat16", quantization="fp8") == stored // 4


def test_a_cache_that_cannot_hold_a_sequence_names_the_shorter_one_that_it_can(run_dir):
    spec = load(run_dir / "manifest.json")
    least = longest_device_bytes(spec.model, spec.inference)
    free = least / GIB / 2 / 0.9
    said, changed = explained(run_dir, CPU_CACHE.replace("20.5/", f"{free:.6f}/"))
    assert "enough for sequences of" in said and changed.max_model_len_tokens < 512
    assert longest_device_bytes(spec.model, changed) <= changed.kv_cache_bytes <= least // 2
    said, _ = explained(run_dir, CPU_CACHE.replace("20.5/", "0.0/"))
    assert "which hold no sequence; take a smaller model" in said


def test_other_limits_name_their_fields(run_dir):
    said, _ = explained(run_dir, TOO_LONG)
    assert "type at least 279969792, and" in said and 279969792 / GIB >= 0.255
    said, changed = explained(run_dir, SAMPLER, max_num_sequences=256)
    assert said.startswith("inference.max_num_sequences 256 does not fit")
    assert changed.max_num_sequences == 128
    assert explained(run_dir, "ValueError: something else")[0] is None


@pytest.mark.engine
@pytest.mark.slow
def test_an_engine_whose_cache_exceeds_this_machine_ends_with_a_value_that_fits(tmp_path):
    run_dir = make_run(tmp_path / "run", DENSE, inference={"kv_cache_bytes": 1 << 44})
    log = run_dir / "logs" / "orrery.inference.0.log"
    log.parent.mkdir()
    log.with_name("inference.0.log").symlink_to(log)  # the launcher's name
    assert start_role("orrery.inference", run_dir, 0).wait(90) == OutOfMemory.exit_code
    last = log.read_text().splitlines()[-1]
    assert last.startswith(
        f"error: inference 0: inference.kv_cache_bytes {1 << 44} does not fit: "
    ) and last.endswith(". Read logs/inference.0.log")
    [value] = map(int, re.findall(r"type inference\.kv_cache_bytes: (\d+), ", last))
    assert GIB // 8 < value < psutil.virtual_memory().total
