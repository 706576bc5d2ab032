"""List the devices that `hardware.accelerator` may name, and their rates.

A device outside `DEVICES` has a name such as `l40g_sm89_44gb`: an L40G of compute capability 8.9
with 44 GiB. It gets the lowest rates in `DEVICES` of GPUs with its or the next lower capability.

`rates/` has measured rates. Other devices have data sheet rates, scaled by the H200's ratio of
measured to data sheet rates.
"""

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_as

GB, T = 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """A type of device, with its data sheet's rates per second.

    `names`: as the driver reports them. `capability`: compute capability (major, minor).
    `memory_bytes`: without memory that GDDR6 uses for error correction.
    `bf16_flops`, `fp8_flops`: dense operations. `fp8_flops` is 0 without FP8 units.
    `link_bytes_per_s`: one-way rate to another device. `is_estimated`: not in `DEVICES`.
    """

    names: tuple[str, ...]
    memory_bytes: int
    capability: tuple[int, int]
    bf16_flops: float
    fp8_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float
    is_estimated: bool = False


HOPPER, AMPERE, AMPERE_RTX, ADA = (9, 0), (8, 0), (8, 6), (8, 9)
BLACKWELL, BLACKWELL_RTX = (10, 0), (12, 0)

DEVICES = {
    "h100": Device(
        ("NVIDIA H100 80GB HBM3",), 80 * GB, HOPPER, 989 * T, 1979 * T, 3350 * GB, 450 * GB
    ),
    "h100_pcie": Device(
        ("NVIDIA H100 PCIe",), 80 * GB, HOPPER, 756 * T, 1513 * T, 2000 * GB, 300 * GB
    ),
    "h100_nvl": Device(
        ("NVIDIA H100 NVL",), 94 * GB, HOPPER, 835 * T, 1671 * T, 3900 * GB, 300 * GB
    ),
    "h200": Device(
        ("NVIDIA H200",), 141 * GB, HOPPER, 989 * T, 1979 * T, 4800 * GB, 450 * GB,
    ),
    "h200_nvl": Device(
        ("NVIDIA H200 NVL",), 141 * GB, HOPPER, 835 * T, 1671 * T, 4800 * GB, 450 * GB
    ),
    "gh200": Device(
        ("NVIDIA GH200 480GB",), 96 * GB, HOPPER, 989 * T, 1979 * T, 4000 * GB, 450 * GB
    ),
    "h800": Device(("NVIDIA H800",), 80 * GB, HOPPER, 989 * T, 1979 * T, 3350 * GB, 200 * GB),
    "h20": Device(("NVIDIA H20",), 96 * GB, HOPPER, 148 * T, 296 * T, 4000 * GB, 450 * GB),
    "a100_40gb": Device(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        40 * GB, AMPERE, 312 * T, 0, 1555 * GB, 300 * GB,
    ),
    "a100_80gb": Device(
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        80 * GB, AMPERE, 312 * T, 0, 2039 * GB, 300 * GB,
    ),
    "a800_80gb": Device(
        ("NVIDIA A800-SXM4-80GB", "NVIDIA A800 80GB PCIe"),
        80 * GB, AMPERE, 312 * T, 0, 2039 * GB, 200 * GB,
    ),
    "a10": Device(("NVIDIA A10",), 22 * GB, AMPERE_RTX, 125 * T, 0, 600 * GB, 32 * GB),
    "a10g": Device(("NVIDIA A10G",), 22 * GB, AMPERE_RTX, 70 * T, 0, 600 * GB, 32 * GB),
    "a40": Device(("NVIDIA A40",), 45 * GB, AMPERE_RTX, 150 * T, 0, 696 * GB, 32 * GB),
    "rtx_a6000": Device(
        ("NVIDIA RTX A6000",), 48 * GB, AMPERE_RTX, 155 * T, 0, 768 * GB, 32 * GB
    ),
    "rtx_3090": Device(
        ("NVIDIA GeForce RTX 3090",), 24 * GB, AMPERE_RTX, 71 * T, 0, 936 * GB, 32 * GB
    ),
    "l4": Device(("NVIDIA L4",), 22 * GB, ADA, 121 * T, 242 * T, 300 * GB, 32 * GB),
    "rtx_6000_ada": Device(
        ("NVIDIA RTX 6000 Ada Generation",), 48 * GB, ADA, 364 * T, 728 * T, 960 * GB, 32 * GB
    ),
    "rtx_4090_d": Device(
        ("NVIDIA GeForce RTX 4090 D",), 24 * GB, ADA, 147 * T, 294 * T, 1008 * GB, 32 * GB
    ),
    "l40s": Device(("NVIDIA L40S",), 45 * GB, ADA, 362 * T, 733 * T, 864 * GB, 32 * GB),
    "b200": Device(
        ("NVIDIA B200",), 180 * GB, BLACKWELL, 2250 * T, 4500 * T, 8000 * GB, 900 * GB
    ),
    "gb200": Device(
        ("NVIDIA GB200",), 186 * GB, BLACKWELL, 2500 * T, 5000 * T, 8000 * GB, 900 * GB
    ),
    "rtx_4090": Device(
        ("NVIDIA GeForce RTX 4090",), 24 * GB, ADA, 165 * T, 330 * T, 1008 * GB, 32 * GB
    ),
    "rtx_5090": Device(
        ("NVIDIA GeForce RTX 5090",), 32 * GB, BLACKWELL_RTX, 209 * T, 419 * T, 1792 * GB, 64 * GB
    ),
    "rtx_pro_6000": Device(
        (
            "NVIDIA RTX PRO 6000 Blackwell Workstation Edition",
            "NVIDIA RTX PRO 6000 Blackwell Server Edition",
        ),
        96 * GB, BLACKWELL_RTX, 503 * T, 1007 * T, 1597 * GB, 64 * GB,
    ),
    "rtx_pro_6000_max_q": Device(
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition",),
        96 * GB, BLACKWELL_RTX, 439 * T, 878 * T, 1792 * GB, 64 * GB,
    ),
}  # fmt: skip

TOLD = re.compile(r"([a-z0-9_]+)_sm(\d+)(\d)_(\d+)gb")  # name, compute capability, memory


def accelerator_of(name: str) -> str | None:
    return next((key for key, device in DEVICES.items() if name in device.names), None)


def told_accelerator(name: str, capability: tuple[int, int], memory_bytes: int) -> str:
    major, minor = capability
    return f"{_short(name)}_sm{major}{minor}_{memory_bytes >> 30}gb"


def _short(name: str) -> str:
    words = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return words.removeprefix("nvidia_").removeprefix("geforce_")


@cache
def find_device(accelerator: str) -> Device | None:
    """Return the device for a key of `DEVICES` or a name made by `told_accelerator`."""
    if accelerator in DEVICES:
        return DEVICES[accelerator]
    if (told := TOLD.fullmatch(accelerator)) is None:
        return None
    capability, memory_bytes = (int(told[2]), int(told[3])), int(told[4]) * GB
    older = [one.capability for one in DEVICES.values() if one.capability <= capability]
    if not older or not memory_bytes:
        return None
    similar = [one for one in DEVICES.values() if one.capability == max(older)]
    return Device(
        names=(),
        memory_bytes=memory_bytes,
        capability=capability,
        bf16_flops=min(one.bf16_flops for one in similar),
        fp8_flops=min(one.fp8_flops for one in similar),
        memory_bytes_per_s=min(one.memory_bytes_per_s for one in similar),
        link_bytes_per_s=min(one.link_bytes_per_s for one in similar),
        is_estimated=True,
    )


def device_of(accelerator: str) -> Device:
    if (device := find_device(accelerator)) is None:
        raise OrreryError(
            f"hardware.accelerator {accelerator!r} is no GPU. Type `orrery hardware`, which prints "
            "this machine's accelerator"
        )
    return device


def is_named(accelerator: str, name: str) -> bool:
    device, told = device_of(accelerator), TOLD.fullmatch(accelerator)
    return name in device.names or (told is not None and told[1] == _short(name))


SPARSE_PAIRS = 2**22  # maximum (query, key) pairs in a chunk of sparse attention's backward pass
AUTO_SHARE = 16  # `lm_head_chunk_tokens` "auto": logits take 1/16 of device memory
ALIGNMENT = 128  # token chunks and, if possible, vocabulary slices are multiples of this


def auto_chunk_tokens(device_bytes: int, vocab_size: int) -> int:
    tokens = device_bytes // (AUTO_SHARE * 6 * vocab_size)
    return max(ALIGNMENT, tokens // ALIGNMENT * ALIGNMENT)


def blocks(length: int, longest: int) -> list[slice]:
    """Divide range(length) into the fewest slices of at most `longest` elements."""
    longest = max(1, longest)
    size = -(-length // max(1, -(-length // longest)))
    aligned = -(-size // ALIGNMENT) * ALIGNMENT
    size = aligned if aligned <= longest else size
    return [slice(start, min(start + size, length)) for start in range(0, length, max(1, size))]


FOLDER = Path(__file__).with_name("rates")
MEASURED_ON = "h200"
USABLE = 0.99  # allocatable share of device memory
PCIE_BYTES = 50e9  # bytes/s of pinned copies over PCIe 5, one way


@dataclass(frozen=True)
class Rates:
    """Operations and bytes per second of a device.

    `dense_flops`: bfloat16 products of dense layers. `grouped_flops`: of routed experts.
    `fp8_flops`: products of FP8 weights. Devices without FP8 units multiply in bfloat16.
    `attention_flops`: limit for long documents. Documents of `attention_half_tokens` reach half.
    `link_bytes`: one-way copies to another device. `host_link_bytes`: to pinned host memory.
    `collective_bytes`: all-gathers and reduce-scatters during computation.
    """

    source: str
    dense_flops: float
    fp8_flops: float
    grouped_flops: float
    attention_flops: float
    attention_half_tokens: float
    memory_bytes: float
    link_bytes: float
    collective_bytes: float
    host_link_bytes: float


@cache
def rates_of(accelerator: str) -> Rates:
    path = FOLDER / f"{accelerator}.json"
    if path.is_file():
        return read_as(path, Rates, "restore the file from the repository")
    measured, theirs = rates_of(MEASURED_ON), DEVICES[MEASURED_ON]
    device = device_of(accelerator)
    dense = device.bf16_flops / theirs.bf16_flops
    memory = device.memory_bytes_per_s / theirs.memory_bytes_per_s
    link = device.link_bytes_per_s / theirs.link_bytes_per_s
    fp8 = measured.fp8_flops * device.fp8_flops / theirs.fp8_flops
    sheet = "data sheet"
    if device.is_estimated:
        sheet = "unknown device; the data sheet of the slowest similar GPU"
    return Rates(
        source=f"{sheet}, times the ratio of measured to sheet rates of an {MEASURED_ON.upper()}",
        dense_flops=measured.dense_flops * dense,
        fp8_flops=fp8 or measured.dense_flops * dense,
        grouped_flops=measured.grouped_flops * dense,
        attention_flops=measured.attention_flops * dense,
        attention_half_tokens=measured.attention_half_tokens,
        memory_bytes=measured.memory_bytes * memory,
        link_bytes=measured.link_bytes * link,
        collective_bytes=measured.collective_bytes * link,
        host_link_bytes=PCIE_BYTES,
    )


def usable_bytes(accelerator: str) -> int | None:
    device = find_device(accelerator)
    # Data sheets write GB for memory, but mean GiB.
    return None if device is None else int(USABLE * device.memory_bytes / 10**9 * 2**30)
