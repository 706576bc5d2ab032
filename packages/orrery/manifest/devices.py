"""Devices that `hardware.accelerator` may name, as data.

Rates are from data sheets: dense operations a second, bytes a second of memory, and bytes a second
to a peer in one direction. Measured rates are in `rates/`.
"""

from dataclasses import dataclass

GB, T = 10**9, 10**12


@dataclass(frozen=True)
class Device:
    """One type of device. `names`: the driver's names for it. `fp8_flops` is 0 without FP8."""

    names: tuple[str, ...]
    memory_bytes: int
    capability: tuple[int, int]
    bf16_flops: float
    fp8_flops: float
    memory_bytes_per_s: float
    link_bytes_per_s: float


HOPPER, AMPERE, ADA = (9, 0), (8, 0), (8, 9)
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
    "h20": Device(("NVIDIA H20",), 96 * GB, HOPPER, 148 * T, 296 * T, 4000 * GB, 450 * GB),
    "a100_40gb": Device(
        ("NVIDIA A100-SXM4-40GB", "NVIDIA A100-PCIE-40GB"),
        40 * GB, AMPERE, 312 * T, 0, 1555 * GB, 300 * GB,
    ),
    "a100_80gb": Device(
        ("NVIDIA A100-SXM4-80GB", "NVIDIA A100 80GB PCIe"),
        80 * GB, AMPERE, 312 * T, 0, 2039 * GB, 300 * GB,
    ),
    "l40s": Device(("NVIDIA L40S",), 48 * GB, ADA, 362 * T, 733 * T, 864 * GB, 32 * GB),
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
}  # fmt: skip


def accelerator_of(name: str) -> str | None:
    return next((key for key, device in DEVICES.items() if name in device.names), None)
