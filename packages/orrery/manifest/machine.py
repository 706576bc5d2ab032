"""Adapt runs to the GPUs of this machine.

`nvidia-smi` lists the GPUs, so login nodes need no torch. An adapted run is a new file in
`jsonnet/runs` that imports the original and changes fields.
"""

import hashlib
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from orrery.manifest.budget.options import fitting_fields, jsonnet_of
from orrery.manifest.check import check
from orrery.manifest.devices import (
    AMPERE,
    GB,
    T,
    accelerator_of,
    device_of,
    is_named,
    told_accelerator,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.plan import plan
from orrery.manifest.publish import write_atomic
from orrery.manifest.render import Evaluator, Rendered, file_of, import_of
from orrery.manifest.render import render as render_run
from orrery.manifest.schema import Manifest

QUERY = (
    "nvidia-smi",
    "--query-gpu=index,uuid,memory.total,compute_cap,name",
    "--format=csv,noheader,nounits",
)
DEVICE_FILE = Path("/dev/nvidia0")
WITHIN_S = 60
# A file is overwritten only if line 1 has this text and the digest of the other lines.
WRITTEN = "Written by `orrery "
DTYPES = {"param_dtype": "float32", "compute_dtype": "bfloat16", "reduce_dtype": "float32"}
MAX_FITS = 3  # attempts to fit a run into memory
# whether the GPU also trains → KV cache's share of its memory
CACHE_SHARE = {True: 0.25, False: 0.5}
MIN_CACHE_BYTES = 256 << 20


@dataclass(frozen=True)
class Gpu:
    name: str
    memory_bytes: int | None
    capability: tuple[int, int] | None


@dataclass(frozen=True)
class Machine:
    accelerator: str
    name: str
    num_devices: int

    def __str__(self) -> str:
        if self.accelerator == "cpu":
            return f"{self.num_devices} cores without a GPU"
        return f"{self.num_devices} × {self.name}"

    @property
    def layout(self) -> dict[str, int]:
        ranks = max(1, self.num_devices // 2)
        return {
            "trainer_ranks": ranks,
            "engines": max(1, self.num_devices - ranks),
            "prefill_engines": 0,
            "devices_per_engine": 1,
        }

    def cache_bytes(self, is_shared: bool) -> int:
        cache = int(device_of(self.accelerator).memory_bytes * CACHE_SHARE[is_shared])
        return max(MIN_CACHE_BYTES, cache >> 30 << 30)


def this_machine() -> Machine:
    """Raise OrreryError if the GPUs lack bfloat16."""
    if DEVICE_FILE.exists() and shutil.which(QUERY[0]) is None:
        raise OrreryError(
            f"{DEVICE_FILE} is a GPU, and `nvidia-smi` is not installed to tell its type. Give the "
            "container NVIDIA_DRIVER_CAPABILITIES=compute,utility"
        )
    found = list(gpus().values())
    if not found:
        return Machine("cpu", "", len(os.sched_getaffinity(0)))
    name = found[0].name
    return Machine(accelerator_of(name) or _told(found), name, len(found))


def _told(found: Sequence[Gpu]) -> str:
    name, capability = found[0].name, found[0].capability
    memory = [one.memory_bytes for one in found if one.memory_bytes is not None]
    if capability is None or not memory:
        raise OrreryError(
            f"GPU {name!r}: `nvidia-smi` lacks its memory or compute capability, and "
            "packages/orrery/manifest/devices.py has no such device. Add a row from its data sheet"
        )
    if capability < AMPERE:
        raise OrreryError(
            f"GPU {name!r}: has compute capability {'.'.join(map(str, capability))}, and bfloat16 "
            "needs 8.0. Take another GPU, or type `export CUDA_VISIBLE_DEVICES=` to use the CPU"
        )
    return told_accelerator(name, capability, min(memory))


def missing_gpu() -> str | None:
    """Return the reason if no GPU is visible, or None."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return "CUDA_VISIBLE_DEVICES is empty, so no GPU is visible"
    if shutil.which(QUERY[0]) is None and not DEVICE_FILE.exists():
        return "this machine has no NVIDIA driver (no `nvidia-smi`)"
    return None


def gpus() -> dict[str, Gpu]:
    """Return visible GPUs by index. Raise OrreryError if types differ or `nvidia-smi` fails."""
    if shutil.which(QUERY[0]) is None or os.environ.get("CUDA_VISIBLE_DEVICES") == "":
        return {}
    try:
        done = subprocess.run(QUERY, capture_output=True, text=True, timeout=WITHIN_S)
    except subprocess.TimeoutExpired:
        raise OrreryError(f"`nvidia-smi` has not answered in {WITHIN_S} s. Reboot") from None
    if done.returncode:
        said = " ".join((done.stdout + done.stderr).split())[:200]
        raise OrreryError(
            f"`nvidia-smi` ends with code {done.returncode} ({said}). Type `orrery doctor`, which "
            "checks the driver"
        )
    rows = [line.split(", ", 4) for line in done.stdout.splitlines() if line.strip()]
    if not rows or any(len(row) != 5 for row in rows):
        said = " ".join(done.stdout.split())[:200]
        raise OrreryError(
            f"`nvidia-smi` lists no GPU ({said}). Give this container its GPUs (`--gpus all`), or "
            "type `export CUDA_VISIBLE_DEVICES=` to use the CPU"
        )
    found_at = {
        index: Gpu(name, _mebibytes(memory), _capability(capability))
        for index, uuid, memory, capability, name in rows
        if _is_visible(index, uuid)
    }
    names = {index: gpu.name for index, gpu in found_at.items()}
    if len(kinds := Counter(names.values())) > 1:
        most = kinds.most_common(1)[0][0]
        take = ",".join(index for index, name in names.items() if name == most)
        found = " and ".join(f"{count} × {name}" for name, count in kinds.items())
        raise OrreryError(
            f"GPUs: this machine has {found}, and a run uses GPUs of one type. Type `export "
            f"CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES={take}`"
        )
    return found_at


def _mebibytes(text: str) -> int | None:
    return int(text) << 20 if text.isdigit() else None  # `nvidia-smi` prints "[N/A]" if unknown


def _capability(text: str) -> tuple[int, int] | None:
    major, _, minor = text.partition(".")
    return (int(major), int(minor)) if major.isdigit() and minor.isdigit() else None


def _is_visible(index: str, uuid: str) -> bool:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return True
    return any(one == index or (one and uuid.startswith(one)) for one in chosen.split(","))


def refuse_other_device(manifest: Manifest, name: str) -> None:
    accelerator = manifest.hardware.accelerator
    if accelerator != "cpu" and not is_named(accelerator, name):
        theirs = next(iter(device_of(accelerator).names), accelerator)
        raise OrreryError(
            f"hardware.accelerator {accelerator!r}: {manifest.name} is for "
            f"{theirs} and this machine has {name}. Type `orrery render "
            f"{manifest.name} --on-this-machine` and start the run that it writes"
        )


def describe(machine: Machine) -> str:
    if machine.accelerator == "cpu":
        return str(machine)
    device = device_of(machine.accelerator)
    capability = f"compute capability {'.'.join(map(str, device.capability))}"
    known = f"{machine} ({machine.accelerator}): {device.memory_bytes // GB} GB"
    if device.is_estimated:
        return (
            f"{known} each, {capability}. Its rates are unknown, so `orrery plan` takes rates of "
            "the slowest similar GPU of packages/orrery/manifest/devices.py"
        )
    return (
        f"{known} and {device.memory_bytes_per_s / GB:.0f} GB/s each, "
        f"{device.bf16_flops / T:.0f} dense Tflop/s in bfloat16, {capability}"
    )


def write_axis(workspace: Workspace, machine: Machine, path: Path) -> None:
    """Raise OrreryError if a user wrote or edited `path`."""
    keep = "name another file, or"
    _write(workspace, path, f"// {machine}. {WRITTEN}hardware`.\n{_axis(machine)}\n", keep)


def _axis(machine: Machine) -> str:
    if machine.accelerator == "cpu":
        return _cpu_axis(machine)
    return "\n".join(["{", *_gpu_fields(machine), "}"])


def _cpu_axis(machine: Machine) -> str:
    fields = {"devices_per_node": machine.num_devices, "shared_devices": False}
    return f"(import 'hardware/cpu.libsonnet') + {{ hardware+: {_object(fields)} }}"


def _gpu_fields(machine: Machine) -> list[str]:
    is_shared = machine.num_devices == 1
    return [
        f"  layout:: {_object(machine.layout)},",
        f"  hardware+: {_hardware(machine, is_shared)},",
        f"  trainer+: {_object(DTYPES)},",
        "  inference+: {",
        "    dtype: 'bfloat16',",
        "    kv_block_tokens: 64,",
        f"    kv_cache_bytes: {machine.cache_bytes(is_shared)},",
        "    max_batched_tokens: 8192,",
        "    enforce_eager: false,",
        "  },",
        "  orchestrator+: { admission: { kind: 'fixed', max_in_flight: 256 } },",
    ]


def _hardware(machine: Machine, is_shared: bool) -> str:
    return _object(
        {
            "accelerator": machine.accelerator,
            "num_nodes": 1,
            "devices_per_node": machine.num_devices,
            "shared_devices": is_shared,
        }
    )


def _object(fields: Mapping[str, object]) -> str:
    def spelled(value: object) -> str:
        if value is None:
            return "null"
        return f"'{value}'" if isinstance(value, str) else str(value).lower()

    return "{ " + ", ".join(f"{key}: {spelled(value)}" for key, value in fields.items()) + " }"


ONE_DEVICE: dict[str, int | str | None] = {
    "tensor_parallel": 1,
    "data_parallel": 1,
    "nodes_per_replica": 1,
    "expert_parallel": False,
    "all2all_backend": "allgather_reducescatter",
    "dual_batch_overlap": False,
    "prefill": None,
}


class Adapted(NamedTuple):
    """A run, adapted to a machine.

    `text`: the new run file, or None if the original fits. `fitting`: {field: value} changes that
    make the run fit into device memory.
    """

    run: Rendered
    text: str | None
    fitting: dict[str, Any]


def adapt(workspace: Workspace, name: str, machine: Machine) -> Adapted:
    """Adapt run `name`. A changed run is named `<name>_on_<accelerator>`."""
    run = render_run(workspace, name)
    changes = _changes(run.manifest, machine)
    found = (
        _adapted(workspace, name, machine, run, changes, {}) if changes else Adapted(run, None, {})
    )
    for _ in range(MAX_FITS):
        more = fitting_fields(found.run.manifest)
        if not more:
            break
        fitting = found.fitting | more
        found = _adapted(workspace, name, machine, run, changes, fitting)
    return found


def _adapted(
    workspace: Workspace,
    name: str,
    machine: Machine,
    run: Rendered,
    changes: list[str],
    fitting: dict[str, Any],
) -> Adapted:
    fields = changes or ["{},"]
    if fitting:
        fields = [*fields[:-1], f"{fields[-1].removesuffix(',')} + {{ {jsonnet_of(fitting)} }},"]
    adapted = f"{name}_on_{machine.accelerator}"
    path = workspace.root / "jsonnet" / "runs" / f"{adapted}.jsonnet"
    if (other := file_of(workspace, adapted) or path) != path:
        raise OrreryError(f"run {adapted!r} exists in {workspace.shown(other)}. Rename that run")
    key = name if name.isidentifier() else f"['{name}']"
    origin = import_of(workspace, run.file).replace('"', "'")
    lines = [
        f"// {name} on {machine}. {WRITTEN}render {name} --on-this-machine`.",
        "(import 'lib/named.libsonnet')({",
        f"  {adapted if adapted.isidentifier() else repr(adapted)}: "
        f"{origin}{'.' if key == name else ''}{key} + {fields[0]}",
        *(f"  {line}" for line in fields[1:]),
        "})",
    ]
    text = "\n".join(lines) + "\n"
    where = f"{workspace.shown(path)}: {adapted}"
    return Adapted(Rendered(check(Evaluator(workspace)(text)[adapted], where), path), text, fitting)


def write_run(workspace: Workspace, run: Rendered, text: str) -> None:
    keep = f"type `orrery render {run.manifest.name}` to keep the edits, or"
    _write(workspace, run.file, text, keep)


def _changes(manifest: Manifest, machine: Machine) -> list[str]:
    hardware = manifest.hardware
    if "cpu" in (machine.accelerator, hardware.accelerator):
        if machine.accelerator == hardware.accelerator:
            return []
        if machine.accelerator == "cpu":
            return [f"{_cpu_axis(machine)},"]
        return ["{", *_gpu_fields(machine), "},"]
    stages = [one for stage in plan(manifest) for one in stage.processes]
    needed = max(one.first_device + one.num_devices for one in stages)
    fits = hardware.num_nodes == 1 and needed <= machine.num_devices
    if fits and machine.accelerator == hardware.accelerator:
        return []
    is_shared = hardware.shared_devices if fits else machine.num_devices == 1
    cache = machine.cache_bytes(is_shared)
    inference: dict[str, int | str | None] = {}
    if manifest.inference.kv_cache_bytes > cache:
        inference["kv_cache_bytes"] = cache
    lines = [f"  hardware+: {_hardware(machine, is_shared)},"]
    if not fits:
        mesh = manifest.trainer.mesh
        along = {axis: 1 for axis in ("dp_replicate", "cp", "ep") if getattr(mesh, axis) > 1}
        inference |= {
            field: value
            for field, value in ONE_DEVICE.items()
            if getattr(manifest.inference, field) != value
        }
        lines.insert(0, f"  layout:: {_object(machine.layout)},")
        lines += [f"  trainer+: {{ mesh+: {_object(along)} }},"] if along else []
    lines += [f"  inference+: {_object(inference)},"] if inference else []
    return ["{", *lines, "},"]


def _write(workspace: Workspace, path: Path, text: str, keep: str) -> None:
    title, _, body = text.partition("\n")
    if path.exists():
        old_title, _, old_body = path.read_text(errors="replace").partition("\n")
        if WRITTEN not in old_title:
            raise OrreryError(
                f"{workspace.shown(path)}: exists, and this command did not write it. Move it away "
                "or name another file"
            )
        if old_body != body and _digest(old_body) not in old_title:
            raise OrreryError(
                f"{workspace.shown(path)}: was edited after this command wrote it; {keep} remove "
                "the file to write it anew"
            )
    if not path.parent.is_dir():
        raise OrreryError(f"{path}: there is no folder {path.parent}. Make it, or name another")
    note = f"Overwritten by that command, unless edited ({_digest(body)})."
    write_atomic(path, f"{title} {note}\n{body}".encode())


def _digest(body: str) -> str:
    return hashlib.sha256(body.encode()).hexdigest()[:12]
