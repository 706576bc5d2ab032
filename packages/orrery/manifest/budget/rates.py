"""Look up the rates of devices. `manifest/rates/<device>.json` has measured rates.

Other devices are assumed to reach the same share of their data sheet's rates as an H200.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from orrery.manifest.devices import DEVICES, device_of, find_device
from orrery.manifest.json_file import read_as

FOLDER = Path(__file__).parents[1] / "rates"
MEASURED_ON = "h200"  # its rates are scaled for devices without measured rates
USABLE = 0.99  # share of a device's GiB open to a process. Data sheets write GB for GiB.
PCIE_BYTES = 50e9  # bytes per second of pinned copies over PCIe 5, one direction


@dataclass(frozen=True)
class Rates:
    """Operations per second of kernels, and bytes per second of memory and links.

    - `dense_flops`, `grouped_flops`: products of matrices and of routed experts, in bfloat16.
    - `attention_flops`: the limit that attention approaches in long documents.
    - `attention_half_tokens`: the document length that reaches half of this limit.
    - `link_bytes`: from a device to another one of its node. `host_link_bytes`: to pinned host
      memory. Both in one direction.
    - `collective_bytes`: of an all-gather or reduce-scatter while the device computes.
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
    sheet = "data sheet"
    if device.is_estimated:
        sheet = "unknown device; the data sheet of the slowest similar one"
    return Rates(
        source=f"{sheet}, times the share that an {MEASURED_ON.upper()} reaches of its own",
        dense_flops=measured.dense_flops * dense,
        fp8_flops=measured.fp8_flops * device.fp8_flops / theirs.fp8_flops,
        grouped_flops=measured.grouped_flops * dense,
        attention_flops=measured.attention_flops * dense,
        attention_half_tokens=measured.attention_half_tokens,
        memory_bytes=measured.memory_bytes * memory,
        link_bytes=measured.link_bytes * link,
        collective_bytes=measured.collective_bytes * link,
        host_link_bytes=PCIE_BYTES,
    )


def usable_bytes(accelerator: str) -> int | None:
    """Return the bytes that a process can allocate on the device, or None for a CPU."""
    device = find_device(accelerator)
    return None if device is None else int(USABLE * device.memory_bytes / 10**9 * 2**30)
