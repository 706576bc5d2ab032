"""Advise on vLLM's memory errors: name the manifest field to change and a value that fits.

KV cache memory = device capacity − other processes' memory − weights − reserve.
"""

import re
from pathlib import Path

from orrery.manifest.schema import Inference, Manifest
from orrery.manifest.schema.inference import longest_blocks, longest_device_bytes

RESERVE = 0.06  # fraction of device memory
CPU_RESERVE = 0.1  # fraction of free host memory
UNITS = {"bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}
GIB, ROUND = 1 << 30, 1 << 20

CPU_CACHE = re.compile(
    r"Available memory on node \S+ \(([\d.]+)/[\d.]+ GiB\) on kv cache allocation"
)
TOO_LONG = re.compile(r"\(([\d.]+) GiB KV cache is needed, which is larger than the available KV")
NO_CACHE = "No available memory for the cache blocks"
SAMPLER = re.compile(r"out of memory occurred when warming up sampler with (\d+) dummy requests")
CPU_ALLOCATOR = re.compile(
    r"DefaultCPUAllocator: can't allocate memory: you tried to allocate (\d+)"
)
DEVICE = "out of memory"
WHERE = "set it in the hardware axis or the run file"


def explain(cause: str, manifest: Manifest, weights: Path) -> str | None:
    inference = manifest.inference
    if found := CPU_CACHE.search(cause):
        free = int(float(found[1]) * GIB)
        head = f"{_size(free)} of host memory were free for it"
        engines = -(-inference.num_replicas // manifest.hardware.num_nodes)
        if engines > 1:
            head += f", to be shared by {engines} engines"
        return _lower_cache(manifest, int(free * (1 - CPU_RESERVE)) // engines, head)
    if found := TOO_LONG.search(cause):
        least = -(-int((float(found[1]) + 0.01) * GIB) // ROUND) * ROUND
        return (
            f"inference.kv_cache_bytes {inference.kv_cache_bytes} cannot hold one sequence of "
            f"inference.max_model_len_tokens {inference.max_model_len_tokens}; type at least "
            f"{least}, and {WHERE}"
        )
    if found := SAMPLER.search(cause):
        fits = max(1, int(found[1]) // 2)
        return _lower("max_num_sequences", inference.max_num_sequences, fits, "no room to sample")
    if found := CPU_ALLOCATOR.search(cause):
        fits = inference.kv_cache_bytes - 2 * int(found[1])
        head = f"{_size(int(found[1]))} of host memory could not be allocated"
        return _lower_cache(manifest, min(fits, inference.kv_cache_bytes // 2), head)
    if DEVICE not in cause and NO_CACHE not in cause:
        return None
    return _device(cause, manifest, weights)


def _device(cause: str, manifest: Manifest, weights: Path) -> str:
    inference = manifest.inference
    capacity, free = _bytes(cause, "total capacity of"), _bytes(cause, "of which")
    own, asked = _bytes(cause, "this process has"), _bytes(cause, "Tried to allocate")
    if capacity is None or free is None or own is None or asked is None:
        return _lower_cache(manifest, inference.kv_cache_bytes // 2, "the device is full")
    held = weight_bytes(weights, inference)
    reserve = int(RESERVE * capacity)
    others = capacity - free - own
    head = f"{_size(asked)} more were asked for, {_size(free)} of {_size(capacity)} were free"
    if others > reserve // 2:
        head += f" and {_size(others)} other processes'"
    fits = capacity - others - held - reserve
    if fits <= 0:
        twice = 2 * inference.tensor_parallel
        return (
            f"the device ran out of memory: {head}; the weights alone take {_size(held)}; "
            f"inference.tensor_parallel: {twice} instead of {inference.tensor_parallel} halves them"
        )
    return _lower_cache(manifest, min(fits, inference.kv_cache_bytes - asked - reserve // 2), head)


def weight_bytes(weights: Path, inference: Inference) -> int:
    total = sum(file.stat().st_size for file in weights.glob("*.safetensors"))
    config = (weights / "config.json").read_text()
    found = re.search(r'"(?:torch_)?dtype": "(\w+)"', config)
    stored = 4 if found is not None and found[1] == "float32" else 2
    width = 1 if inference.quantization == "fp8" else 4 if inference.dtype == "float32" else 2
    return total * width // stored // inference.tensor_parallel


def _lower_cache(manifest: Manifest, fits: int, head: str) -> str:
    inference = manifest.inference
    least = longest_device_bytes(manifest.model, inference)
    fits = max(0, fits) // ROUND * ROUND or max(0, fits)
    if fits >= least:
        return _lower("kv_cache_bytes", inference.kv_cache_bytes, fits, head)
    block = least // (1 + longest_blocks(inference))
    tokens = (fits // block - 1) * inference.kv_block_tokens
    if tokens <= 0:
        return (
            f"the engine ran out of memory: {head}; at most {fits} bytes are left for "
            "inference.kv_cache_bytes, which hold no sequence; take a smaller model or another "
            "device"
        )
    return (
        f"inference.kv_cache_bytes {inference.kv_cache_bytes} does not fit: {head}; at most {fits} "
        f"do, which hold sequences of {tokens} tokens; type inference.kv_cache_bytes: {fits} and "
        f"inference.max_model_len_tokens: {tokens}"
    )


def _lower(field: str, value: int, fits: int, head: str) -> str:
    return (
        f"inference.{field} {value} does not fit: {head}; type inference.{field}: {fits}, "
        f"and {WHERE}"
    )


def _bytes(text: str, before: str) -> int | None:
    found = re.search(rf"{re.escape(before)} ([\d.]+) (bytes|KiB|MiB|GiB)", text)
    return None if found is None else int(float(found[1]) * UNITS[found[2]])


def _size(num_bytes: int) -> str:
    if num_bytes >= GIB // 10:
        return f"{num_bytes / GIB:.1f} GiB"
    return f"{num_bytes / 2**20:.1f} MiB"
