"""Check the NVIDIA GPUs of this machine, as torch sees them.

`PROBE` runs in its own process, so that the doctor allocates no device memory.
"""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from orrery.launcher.doctor_judge import GIB, Answer, Finding
from orrery.launcher.process import installed_hardware

NEEDS_DRIVER = "580.65.06"  # CUDA 13.0's minimum on Linux
NEEDS_CAPABILITY = (8, 0)  # bfloat16
PROBE_S = 120
FREE = 0.9  # share that must be free. A CUDA context and a desktop need less than 0.1.
PROBE = """
import itertools, json, torch
found = {"error": "", "devices": [], "no_peer": []}
try:
    torch.cuda.init()
    every = range(torch.cuda.device_count())
    for index in every:
        of, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
        found["devices"].append([of.name, [of.major, of.minor], free, total])
    pairs = itertools.permutations(every, 2)
    found["no_peer"] = [pair for pair in pairs if not torch.cuda.can_device_access_peer(*pair)]
except Exception as error:
    found["error"] = str(error)
print(json.dumps(found))
"""


def examine_gpus(ask: Callable[..., Answer]) -> list[Finding]:
    query = ("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    driver = ask(*query)
    if installed_hardware() == "cuda":
        return judge_gpus(driver, ask(sys.executable, "-c", PROBE, within_s=PROBE_S))
    if driver.code is None:
        return []
    versions = [line for line in driver.out.splitlines() if line[:1].isdigit()]
    if driver.code != 0 or not versions:
        said = " ".join((driver.out + driver.said).split())[:200]
        remedy = (
            "for runs on GPUs, restart or reinstall the driver, or give this container its GPUs "
            "(`--gpus all`)"
        )
        found = f"`nvidia-smi` ends with code {driver.code} ({said})"
        return [Finding("GPUs", found, remedy, is_required=False)]
    remedy = "type `make setup HARDWARE=cuda` for runs on GPUs"
    found = f"{len(versions)}, and .venv is for machines without GPUs"
    return [Finding("GPUs", found, remedy, is_required=False)]


def judge_gpus(driver: Answer, probed: Answer) -> list[Finding]:
    try:
        found: Mapping[str, Any] = json.loads(probed.out)
    except ValueError:
        found = {"error": probed.said or f"exit code {probed.code}", "devices": []}
    version = driver.out.split()[0] if driver.code == 0 and driver.out.split() else ""
    if version and _numbers(version) < _numbers(NEEDS_DRIVER):
        remedy = f"install a driver of version {NEEDS_DRIVER} or newer, which CUDA 13 needs"
        return [Finding("driver", version, remedy)]
    devices = found["devices"]
    if found["error"] or not devices:
        said = " ".join(found["error"].split()).partition(". ")[0][:200] or "torch sees no device"
        remedy = (
            f"install a driver of version {NEEDS_DRIVER} or newer, give this container its GPUs "
            "(`--gpus all`), or unset CUDA_VISIBLE_DEVICES"
        )
        return [Finding("GPUs", said, remedy)]
    findings = [Finding("driver", version or "answers torch, without `nvidia-smi`")]
    findings += [_judge_kinds(devices), _judge_memory(devices)]
    if len(devices) > 1:
        findings.append(_judge_peers(found["no_peer"]))
    return findings


def _judge_kinds(devices: Sequence[Sequence[Any]]) -> Finding:
    kinds: dict[str, list[int]] = {}
    for index, (name, *_) in enumerate(devices):
        kinds.setdefault(name, []).append(index)
    found = ", ".join(f"{len(indices)} × {name}" for name, indices in kinds.items())
    old = [
        f"{index} ({major}.{minor})"
        for index, (_, (major, minor), *_) in enumerate(devices)
        if (major, minor) < NEEDS_CAPABILITY
    ]
    if old:
        remedy = f"bfloat16 needs compute capability 8.0; leave out device {', '.join(old)}"
        return Finding("GPUs", found, f"{remedy}: set CUDA_VISIBLE_DEVICES to the others")
    if len(kinds) > 1:
        most = max(kinds.values(), key=len)
        take = ",".join(map(str, most))
        remedy = f"a run takes GPUs of one kind; type `export CUDA_VISIBLE_DEVICES={take}`"
        return Finding("GPUs", found, remedy)
    return Finding("GPUs", found)


def _judge_memory(devices: Sequence[Sequence[Any]]) -> Finding:
    text = ", ".join(f"{free / GIB:.1f} of {total / GIB:.1f}" for *_, free, total in devices)
    used = [str(index) for index, (*_, free, total) in enumerate(devices) if free < FREE * total]
    remedy = ""
    if used:
        remedy = f"other processes hold memory of device {', '.join(used)}; `nvidia-smi` lists them"
    return Finding("GPU memory", f"{text} GiB free", remedy, is_required=False)


def _judge_peers(no_peer: Sequence[Sequence[int]]) -> Finding:
    if not no_peer:
        return Finding("peer access", "between all GPUs")
    pairs = ", ".join(f"{one}-{other}" for one, other in no_peer if one < other)
    remedy = "weights and gradients then pass through /dev/shm, which is slower"
    return Finding("peer access", f"none between {pairs}", remedy, is_required=False)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(one) for one in version.split(".") if one.isdigit())
