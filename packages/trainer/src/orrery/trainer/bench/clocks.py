"""The device's clock and power while steps are measured, as `nvidia-smi` reads them: at its power limit a chip slows down by itself.

A process of its own reads them, so the host that launches kernels does nothing for it. Without `nvidia-smi`, or a GPU, there are none.
"""

import shutil
import statistics
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from orrery.runtime.parent_watch import die_with_parent

FIELDS = {
    "sm_mhz": "clocks.sm",
    "power_w": "power.draw",
    "most_sm_mhz": "clocks.max.sm",
    "power_limit_w": "power.limit",
}
EVERY_MS = 50


@contextmanager
def read_clocks(device: torch.device, is_asked: bool = True) -> Iterator[dict[str, float]]:
    """After the block it holds means over it, by the names of FIELDS; nothing where nothing was read."""
    found: dict[str, float] = {}
    command = shutil.which("nvidia-smi") if device.type == "cuda" and is_asked else None
    if command is None:
        yield found
        return
    identity = f"GPU-{torch.cuda.get_device_properties(device).uuid}"  # indices of nvidia-smi know no CUDA_VISIBLE_DEVICES
    with tempfile.TemporaryFile("w+") as file:
        with watch(command, identity, file.fileno()):
            yield found
        file.seek(0)
        found.update(means(file.read()) or {})


@contextmanager
def watch(command: str, identity: str, output: int) -> Iterator["subprocess.Popen[bytes]"]:
    """The process that reads; it ends with the block, and with this process however that ends."""
    asked = [
        f"--id={identity}",
        f"--query-gpu={','.join(FIELDS.values())}",
        "--format=csv,noheader,nounits",
        f"--loop-ms={EVERY_MS}",
    ]
    process = subprocess.Popen(
        [command, *asked], stdout=output, stderr=subprocess.DEVNULL, preexec_fn=die_with_parent
    )
    try:
        yield process
    finally:
        process.terminate()
        process.wait()


def means(text: str) -> dict[str, float] | None:
    """Of whole lines of numbers; a field that a device does not know reads `[N/A]`, and then nothing is said."""
    rows = [line.split(", ") for line in text.splitlines(keepends=True) if line.endswith("\n")]
    try:
        columns = list(zip(*([float(value) for value in row] for row in rows), strict=True))
    except ValueError:
        return None
    return dict(zip(FIELDS, map(statistics.fmean, columns), strict=True)) if columns else None
