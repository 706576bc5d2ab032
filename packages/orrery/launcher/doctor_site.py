"""Check a site's Slurm, nodes, network, file system and containers.

- Slurm's commands and one small job (`doctor_probe.py`) read the facts. The pure functions
  `judge_…` return findings with remedies.
- Without the probe, `sbatch --test-only` checks whether Slurm accepts a job.
"""

import json
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

from orrery.launcher import containers
from orrery.launcher.doctor import Finding
from orrery.launcher.doctor_nodes import (
    RUNS_GIB,
    WAIT_S,
    judge_probe,
    judge_space,
    over_nodes,
    parse_probes,
)
from orrery.launcher.images import IMAGES, LOCK, Hardware, find, locked
from orrery.launcher.runs import runs_root
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.job_script import gres
from orrery.launcher.slurm.queue import clean_environment, seconds
from orrery.manifest.errors import OrreryError
from orrery.manifest.workspace import Workspace

COMMAND_S, START_S, PROBE_S = 20, 60, 120
PROBED = 32  # nodes at most
HARDWARE: tuple[Hardware, ...] = get_args(Hardware)
TOOLS = ("sinfo", "squeue", "sbatch", "srun", "scancel", "scontrol")
GONE = ("down", "drain", "fail", "maint", "unknown", "power", "reboot")


@dataclass(frozen=True)
class Node:
    """A node in sinfo. `gpus`: by type, "" for an untyped GPU."""

    name: str
    state: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]

    def num_gpus(self, kind: str) -> int:
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())

    @property
    def answers(self) -> bool:
        return not self.state.endswith("*") and not any(word in self.state for word in GONE)


@dataclass(frozen=True)
class Answer:
    """A command's answer. `code`: None if it is not installed or timed out."""

    code: int | None
    out: str
    said: str


def examine_site(workspace: Workspace, site: Site, probe: bool = True) -> list[Finding]:
    slurm = site.slurm
    if slurm is None:
        return []
    images = _images(workspace, site)
    found = [*_folders(workspace, site), *judge_images(images, site)]
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


# Asking


def _ask(*argv: str, within_s: float = COMMAND_S) -> Answer:
    pipe, env = subprocess.PIPE, clean_environment(os.environ)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env
    ) as process:
        try:
            out, said = process.communicate(timeout=within_s)
            return Answer(process.returncode, out, " ".join(said.split()))
        except subprocess.TimeoutExpired:
            process.terminate()  # srun then cancels its job
            try:
                out, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            return Answer(None, out, f"no answer within {within_s:.0f} s")


def _options(slurm: Slurm, nodes: Sequence[Node]) -> list[str]:
    gpus = max(node.num_gpus(slurm.gpu_type) for node in nodes)
    return [
        *_where(slurm),
        *(f"--time={slurm.time_limit_min}", "--nodes=1"),
        *(f"--cpus-per-task={slurm.cpus_per_node}", f"--mem={slurm.memory_per_node_mb}M"),
        *([f"--gres={gres(slurm, gpus)}"] if gpus else []),
        *("--requeue", *slurm.extra),
    ]


def _where(slurm: Slurm) -> list[str]:
    account = [f"--account={slurm.account}"] if slurm.account else []
    return [f"--partition={slurm.partition}", *account]


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
                found[f"{hardware}/{image}"] = find(workspace, folder, image, hardware)
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
        if writable or folder == runs:  # images may come from a read-only store
            free = shutil.disk_usage(folder).free if writable else None
            found.append(judge_space(name, {"here": free}, RUNS_GIB))
        if folder.is_dir() and folder.stat().st_mode & 0o002:
            remedy = f"type `chmod o-w {workspace.shown(folder)}`"
            found.append(Finding(name, "every user may write there", remedy))
    return found


def _probe(
    workspace: Workspace, site: Site, nodes: Sequence[Node], images: Mapping[str, Path | str]
) -> list[Finding]:
    slurm = site.slurm
    assert slurm is not None
    idle = [node for node in nodes if node.state == "idle"][:PROBED]
    if not idle:
        remedy = "ask again when one is; until then `--no-probe` says the rest"
        return [Finding("probe", "no node is idle now", remedy, is_required=False)]
    gpus = min(node.num_gpus(slurm.gpu_type) for node in idle)
    word = secrets.token_hex(4)
    folder = runs_root(workspace) / f".doctor-{word}"
    argv = [
        *("srun", f"--job-name=orrery-doctor-{word}", *_where(slurm), "--time=5"),
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
    where = site.containers
    options = {
        "folder": str(folder),
        "interface": site.network.interface if site.network else "",
        "python": sys.executable,
        "enter_image": containers.enter_image(gpus > 0),
        "theirs": containers.APPTAINER_OPTIONS,
        "images": {name: str(path) for name, path in images.items() if isinstance(path, Path)},
        "folders": {
            "runs": str(runs_root(workspace)),
            "scratch": where.scratch if where else "/tmp",
        },
        "mounts": [mount.split(":")[0] for mount in where.mounts] if where else [],
        "wait_s": WAIT_S,
        "limit_s": PROBE_S - 20,
    }
    script = str(Path(__file__).with_name("doctor_probe.py"))
    command = ["/usr/bin/env", "python3", script, json.dumps(options)]
    if where and where.modules:
        load = f'module load {shlex.join(where.modules)} && exec "$@"'
        command = ["bash", "-lc", load, "probe", *command]
    return command


# Judging: Slurm


def parse_nodes(text: str) -> list[Node]:
    """Parse `sinfo -N -o '%N|%T|%c|%m|%G'`."""
    found = {}
    for line in text.splitlines():
        name, state, cpus, memory, listed = line.split("|")
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", listed):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        found[name] = Node(name, state, int(cpus.rstrip("+")), int(memory.rstrip("+")), gpus)
    return list(found.values())


def judge_controller(ping: Answer, version: str) -> Finding:
    found = version.strip() or "Slurm"
    if ping.code == 0 and " UP" in ping.out:
        return Finding("Slurm", f"{found}, its controller answers")
    said = ping.said or " ".join(ping.out.split()) or f"exit code {ping.code}"
    remedy = "ask who runs the cluster: no controller answers (`scontrol ping`)"
    return Finding("Slurm", f"{found}: {said}", remedy)


def judge_no_partition(wanted: str, there: Iterable[str]) -> Finding:
    names = ", ".join(sorted(set(there))) or "none that you may see"
    return Finding("partition", f"{wanted}: no nodes", f"set slurm.partition to one of: {names}")


def judge_nodes(nodes: Sequence[Node], slurm: Slurm) -> list[Finding]:
    gone = {node.name: node.state for node in nodes if not node.answers}
    num_up = len(nodes) - len(gone)
    good, remedy = (
        f"{num_up} of {slurm.partition} answer",
        "ask why (`sinfo -R`); the other nodes are used",
    )
    found = [over_nodes("nodes", good, gone, remedy, is_required=not num_up)]
    wanted = f"gpu:{slurm.gpu_type}" if slurm.gpu_type else "gpu"
    counts = {node.name: node.num_gpus(slurm.gpu_type) for node in nodes}
    most = max(counts.values())
    if most == 0:
        kinds = sorted({kind for node in nodes for kind in node.gpus} - {""})
        remedy = "only runs of CPUs start here"
        if kinds:
            remedy = f"set slurm.gpu_type to one of: {', '.join(kinds)}"
        found.append(Finding("GPUs", f"no node offers {wanted}", remedy, is_required=bool(kinds)))
    else:
        fewer = {name: f"{num} × {wanted}" for name, num in counts.items() if num != most}
        remedy = f"take a partition where every node has {most}"
        found.append(
            over_nodes("GPUs", f"{most} × {wanted} a node", fewer, remedy, is_required=False)
        )
    cpus, memory_mb = slurm.cpus_per_node, slurm.memory_per_node_mb
    small = {node.name: f"{node.cpus} processors" for node in nodes if node.cpus < cpus}
    good, remedy = f"{cpus} a node, as the site says", "lower slurm.cpus_per_node"
    found.append(over_nodes("processors", good, small, remedy))
    little = {node.name: f"{node.memory_mb} MB" for node in nodes if node.memory_mb < memory_mb}
    good, remedy = f"{memory_mb} MB a node, as the site says", "lower slurm.memory_per_node_mb"
    found.append(over_nodes("memory", good, little, remedy))
    return found


def judge_config(text: str, slurm: Slurm) -> list[Finding]:
    pairs = (line.partition("=") for line in text.splitlines())
    config = {key.strip(): value.strip() for key, _, value in pairs}
    scheduler, remedy = config.get("SchedulerType", "unknown"), ""
    if scheduler != "sched/backfill":
        remedy = "stages of several node groups need SchedulerType=sched/backfill"
    found = [Finding("scheduler", scheduler, remedy, False)]
    is_off = config.get("JobRequeue", "1") == "0"
    requeue = "off unless a job asks for it, as ours do" if is_off else "allowed"
    found.append(Finding("requeue", requeue))
    accounting = config.get("AccountingStorageType", "(null)")
    if "none" not in accounting and accounting != "(null)":
        return [*found, Finding("accounting", accounting)]
    kept, remedy = re.match(r"\d+", config.get("MinJobAge", "300")), ""
    if kept is not None and int(kept[0]) < 3 * slurm.poll_s:
        remedy = (
            f"set MinJobAge to {3 * slurm.poll_s} s or more: "
            "an ended job is forgotten before it is asked for"
        )
    told = f"none; the controller keeps ended jobs for {kept[0] if kept else '?'} s"
    return [*found, Finding("accounting", told, remedy)]


def judge_time_limit(limit: str, slurm: Slurm) -> Finding:
    """Check the limit. Slurm accepts longer jobs, but never starts them."""
    allowed_s, remedy = seconds(limit), ""
    if allowed_s and 60 * slurm.time_limit_min > allowed_s:
        remedy = (
            f"lower slurm.time_limit_min from {slurm.time_limit_min} "
            f"to {allowed_s // 60:.0f} at most"
        )
    return Finding("time limit", f"{limit} in {slurm.partition}", remedy)


def judge_admission(test: Answer, slurm: Slurm) -> Finding:
    asked = f"partition {slurm.partition}" + (f", account {slurm.account}" if slurm.account else "")
    if test.code == 0:
        start = re.search(r"to start at (\S+)", test.said)
        when = f" from {start[1]}" if start else ""
        whole = f"{asked}: a whole node for {slurm.time_limit_min} min"
        return Finding("admission", f"{whole}{when}")
    pattern = r"\b(sbatch: )?(error|allocation failure|Batch job submission failed): "
    said = re.sub(pattern, "", test.said) or f"exit code {test.code}"
    remedies = {
        "account": "set slurm.account to one that admits you "
        "(`sacctmgr show associations user=$USER`)",
        "node configuration": "lower slurm.cpus_per_node or slurm.memory_per_node_mb, "
        "or mend slurm.gpu_type or slurm.extra",
        "gres": "mend slurm.gpu_type (`sinfo -o %G` says what there is)",
        "qos": "add the QOS that you may use to slurm.extra: '--qos=…'",
    }
    found = (remedy for word, remedy in remedies.items() if word in said.lower())
    remedy = next(found, "mend [slurm] of the site file")
    return Finding("admission", f"{asked}: {said}", remedy)


def judge_no_probe(answer: Answer) -> Finding:
    said = (answer.said or " ".join(answer.out.split()) or f"exit code {answer.code}")[:300]
    if "can't open file" in answer.said:
        remedy = "move it to the file system that all nodes share"
        return Finding("probe", "the nodes do not see this checkout", remedy)
    if "module: command not found" in said:
        remedy = "empty containers.modules, or ask who runs the cluster"
        return Finding("probe", "a login shell on the nodes has no `module`", remedy)
    busy = r"unable to allocate|immediate|busy|unavailable"
    if answer.code is None or re.search(busy, said, re.IGNORECASE):
        remedy = "ask again when the queue is shorter; `--no-probe` says the rest"
        told = f"its job did not start within {START_S} s ({said})"
        return Finding("probe", told, remedy, is_required=False)
    remedy = "mend [slurm] of the site file, or ask who runs the cluster"
    return Finding("probe", f"its job failed: {said}", remedy)


# Judging: files


def judge_images(images: Mapping[str, Path | str], site: Site) -> list[Finding]:
    if site.containers is None:
        remedy = "add [containers] for runs that others can repeat"
        told = "none: roles run in the checkout's .venv"
        return [Finding("containers", told, remedy, False)]
    if not images:
        remedy = (
            "check it out again, or type `snakemake -s pipelines/images.smk --cores all lock_cpu`"
        )
        return [Finding("images", f"{LOCK} names none", remedy)]
    errors: dict[str, list[str]] = {}
    for name, file in images.items():
        known = errors.setdefault(name.partition("/")[0], [])
        known += [file] if isinstance(file, str) else []
    none_whole = all(errors.values())
    found = []
    for hardware, missing in errors.items():
        what, remedy = f"there, as {LOCK} names them", ""
        if missing:
            what, _, remedy = missing[0].partition("; ")
        found.append(Finding(f"{hardware} images", what, remedy, is_required=none_whole))
    return found
