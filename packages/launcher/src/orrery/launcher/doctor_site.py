"""Doctor of a site: what its Slurm, nodes, network, file system and containers have against what the site file promises.

- Questions to Slurm's commands and one small job (`doctor_probe.py`, a task a node, on the nodes that are idle now) gather; the `judge_…`
  functions are pure and say what mends each trouble (of nodes: `doctor_nodes.py`).
- Nothing waits for long: a command `COMMAND_S`, the job `START_S` to start (a full queue is a finding) and `PROBE_S` to end.
- Without the probe nothing is submitted; `sbatch --test-only` asks whether a stage's job would be taken, and takes nothing.
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
    """A node of the partition as sinfo tells it; `gpus` by type, the type "" where the site names none."""

    name: str
    state: str
    cpus: int
    memory_mb: int
    gpus: Mapping[str, int]

    def num_gpus(self, kind: str) -> int:
        """Of that type; of any where no type is asked for."""
        return self.gpus.get(kind, 0) if kind else sum(self.gpus.values())

    @property
    def answers(self) -> bool:
        return not self.state.endswith("*") and not any(word in self.state for word in GONE)


@dataclass(frozen=True)
class Answer:
    """`code` is None where the command is not there or gave no answer in time."""

    code: int | None
    out: str
    said: str


def examine_site(workspace: Workspace, site: Site, probe: bool = True) -> list[Finding]:
    """Everything that was looked at; without [slurm] there is nothing to look at."""
    if site.slurm is None:
        return []
    images = _images(workspace, site)
    found = [*_folders(workspace, site), *judge_images(images, site)]
    if missing := [tool for tool in TOOLS if shutil.which(tool) is None]:
        return [
            *found,
            Finding(
                "Slurm",
                f"no {', '.join(missing)} here",
                "install Slurm's client, or load its module",
            ),
        ]
    found.append(judge_controller(_ask("scontrol", "ping"), _ask("sinfo", "--version").out))
    if found[-1].mend:
        return found
    listed = _ask(
        "sinfo", "-h", "-N", f"--partition={site.slurm.partition}", "-o", "%N|%T|%c|%m|%G"
    )
    nodes = parse_nodes(listed.out)
    if not nodes:
        return [
            *found,
            judge_no_partition(site.slurm.partition, _ask("sinfo", "-h", "-o", "%R").out.split()),
        ]
    found += [
        *judge_nodes(nodes, site.slurm),
        *judge_config(_ask("scontrol", "show", "config").out, site.slurm),
    ]
    found.append(
        judge_time_limit(
            _ask("sinfo", "-h", f"--partition={site.slurm.partition}", "-o", "%l").out.strip(),
            site.slurm,
        )
    )
    admission = judge_admission(
        _ask("sbatch", "--test-only", *_options(site.slurm, nodes), "--wrap=true"), site.slurm
    )
    found.append(admission)
    if site.network is None:
        found.append(
            Finding(
                "network",
                "the site names none",
                "add [network] interface = … for runs of several nodes",
                must=False,
            )
        )
    return (
        [*found, *_probe(workspace, site, nodes, images)] if probe and not admission.mend else found
    )


# Asking -----------------------------------------------------------------------------------------------------------------


def _ask(*argv: str, within_s: float = COMMAND_S) -> Answer:
    pipe, env = subprocess.PIPE, clean_environment(os.environ)
    with subprocess.Popen(
        argv, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, text=True, env=env
    ) as process:
        try:
            out, said = process.communicate(timeout=within_s)
            return Answer(process.returncode, out, " ".join(said.split()))
        except subprocess.TimeoutExpired:
            process.terminate()  # srun takes its job back
            try:
                out, _ = process.communicate(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                out, _ = process.communicate()
            return Answer(None, out, f"no answer within {within_s:.0f} s")


def _options(slurm: Slurm, nodes: Sequence[Node]) -> list[str]:
    """Of a stage's job on one whole node."""
    gpus = max(node.num_gpus(slurm.gpu_type) for node in nodes)
    return [
        *_where(slurm),
        f"--time={slurm.time_limit_min}",
        "--nodes=1",
        f"--cpus-per-task={slurm.cpus_per_node}",
        f"--mem={slurm.memory_per_node_mb}M",
        *([f"--gres={gres(slurm, gpus)}"] if gpus else []),
        "--requeue",
        *slurm.extra,
    ]


def _where(slurm: Slurm) -> list[str]:
    return [
        f"--partition={slurm.partition}",
        *([f"--account={slurm.account}"] if slurm.account else []),
    ]


def _images(workspace: Workspace, site: Site) -> dict[str, Path | str]:
    """By `hardware/image`, for each hardware that the lock knows: the file, or why there is none and what mends it."""
    found: dict[str, Path | str] = {}
    if site.containers is None:
        return found
    for hardware in HARDWARE:
        for image in IMAGES:
            if image == "base" or not any(
                name.startswith(f"{hardware}/") for name in locked(workspace)
            ):
                continue
            try:
                found[f"{hardware}/{image}"] = find(
                    workspace, workspace.root / site.containers.images, image, hardware
                )
            except OrreryError as error:
                found[f"{hardware}/{image}"] = str(error)
    return found


def _folders(workspace: Workspace, site: Site) -> list[Finding]:
    runs = runs_root(workspace)
    runs.mkdir(exist_ok=True)
    folders = {
        "runs/": runs,
        **({"images/": workspace.root / site.containers.images} if site.containers else {}),
    }
    found = []
    for name, folder in folders.items():
        writable = os.access(folder, os.W_OK)
        if writable or folder == runs:  # images may come from a store that only others write
            found.append(
                judge_space(
                    name, {"here": shutil.disk_usage(folder).free if writable else None}, RUNS_GIB
                )
            )
        if folder.is_dir() and folder.stat().st_mode & 0o002:
            found.append(
                Finding(
                    name,
                    "every user may write there",
                    f"type `chmod o-w {workspace.shown(folder)}`",
                )
            )
    return found


def _probe(
    workspace: Workspace, site: Site, nodes: Sequence[Node], images: Mapping[str, Path | str]
) -> list[Finding]:
    """One small job over the nodes that are idle now."""
    slurm = site.slurm
    assert slurm is not None
    idle = [node for node in nodes if node.state == "idle"][:PROBED]
    if not idle:
        return [
            Finding(
                "probe",
                "no node is idle now",
                "ask again when one is; until then `--no-probe` says the rest",
                must=False,
            )
        ]
    gpus = min(node.num_gpus(slurm.gpu_type) for node in idle)
    word = secrets.token_hex(4)
    folder = runs_root(workspace) / f".doctor-{word}"
    options = {
        "folder": str(folder), "interface": site.network.interface if site.network else "", "python": sys.executable,
        "entering": containers.entering(gpus > 0), "theirs": containers.THEIRS,
        "images": {name: str(path) for name, path in images.items() if isinstance(path, Path)},
        "folders": {"runs": str(runs_root(workspace)), "scratch": site.containers.scratch if site.containers else "/tmp"},
        "mounts": [mount.split(":")[0] for mount in site.containers.mounts] if site.containers else [],
        "wait_s": WAIT_S, "limit_s": PROBE_S - 20,
    }  # fmt: skip
    script = [
        "/usr/bin/env",
        "python3",
        str(Path(__file__).with_name("doctor_probe.py")),
        json.dumps(options),
    ]
    if site.containers and site.containers.modules:
        script = [
            "bash",
            "-lc",
            f'module load {shlex.join(site.containers.modules)} && exec "$@"',
            "probe",
            *script,
        ]
    argv = [
        *(
            "srun",
            f"--job-name=orrery-doctor-{word}",
            *_where(slurm),
            "--time=5",
            f"--immediate={START_S}",
            "--input=none",
        ),
        *(
            f"--nodelist={','.join(node.name for node in idle)}",
            f"--nodes={len(idle)}",
            "--ntasks-per-node=1",
            "--cpus-per-task=1",
        ),
        *(
            "--mem=2000M",
            *([f"--gres={gres(slurm, gpus)}"] if gpus else []),
            "--kill-on-bad-exit=0",
            *slurm.extra,
            *script,
        ),
    ]
    folder.mkdir(mode=0o700)
    try:
        answer = _ask(*argv, within_s=START_S + PROBE_S)
    finally:
        _ask("scancel", "--me", f"--name=orrery-doctor-{word}")
        shutil.rmtree(folder, ignore_errors=True)
    probes = parse_probes(answer.out)
    return (
        judge_probe(probes, [node.name for node in idle], len(nodes), gpus, site)
        if probes
        else [judge_no_probe(answer)]
    )


# Reading ----------------------------------------------------------------------------------------------------------------


def parse_nodes(text: str) -> list[Node]:
    """Of `sinfo -N -o '%N|%T|%c|%m|%G'`; a node once."""
    found = {}
    for line in text.splitlines():
        name, state, cpus, memory, listed = line.split("|")
        gpus: dict[str, int] = {}
        for kind, count in re.findall(r"(?:^|,)gpu:(?:([^:,(]+):)?(\d+)", listed):
            gpus[kind] = gpus.get(kind, 0) + int(count)
        found[name] = Node(name, state, int(cpus.rstrip("+")), int(memory.rstrip("+")), gpus)
    return list(found.values())


# Judging: Slurm ---------------------------------------------------------------------------------------------------------


def judge_controller(ping: Answer, version: str) -> Finding:
    found = version.strip() or "Slurm"
    if ping.code == 0 and " UP" in ping.out:
        return Finding("Slurm", f"{found}, its controller answers")
    said = ping.said or " ".join(ping.out.split()) or f"exit code {ping.code}"
    return Finding(
        "Slurm",
        f"{found}: {said}",
        "ask who runs the cluster: no controller answers (`scontrol ping`)",
    )


def judge_no_partition(wanted: str, there: Iterable[str]) -> Finding:
    names = ", ".join(sorted(set(there))) or "none that you may see"
    return Finding("partition", f"{wanted}: no nodes", f"set slurm.partition to one of: {names}")


def judge_nodes(nodes: Sequence[Node], slurm: Slurm) -> list[Finding]:
    """State, GPUs, processors and memory of the partition's nodes as Slurm has them."""
    gone = {node.name: node.state for node in nodes if not node.answers}
    up = [node for node in nodes if node.answers]
    found = [
        over_nodes(
            "nodes",
            f"{len(up)} of {slurm.partition} answer",
            gone,
            "ask why (`sinfo -R`); the other nodes are used",
            must=not up,
        )
    ]
    wanted = f"gpu:{slurm.gpu_type}" if slurm.gpu_type else "gpu"
    most = max(node.num_gpus(slurm.gpu_type) for node in nodes)
    if most == 0:
        kinds = sorted({kind for node in nodes for kind in node.gpus} - {""})
        mend = (
            f"set slurm.gpu_type to one of: {', '.join(kinds)}"
            if kinds
            else "only runs of CPUs start here"
        )
        found.append(Finding("GPUs", f"no node offers {wanted}", mend, must=bool(kinds)))
    else:
        fewer = {
            node.name: f"{node.num_gpus(slurm.gpu_type)} × {wanted}"
            for node in nodes
            if node.num_gpus(slurm.gpu_type) != most
        }
        found.append(
            over_nodes(
                "GPUs",
                f"{most} × {wanted} a node",
                fewer,
                f"take a partition where every node has {most}",
                must=False,
            )
        )
    small = {
        node.name: f"{node.cpus} processors" for node in nodes if node.cpus < slurm.cpus_per_node
    }
    found.append(
        over_nodes(
            "processors",
            f"{slurm.cpus_per_node} a node, as the site says",
            small,
            "lower slurm.cpus_per_node",
        )
    )
    little = {
        node.name: f"{node.memory_mb} MB"
        for node in nodes
        if node.memory_mb < slurm.memory_per_node_mb
    }
    found.append(
        over_nodes(
            "memory",
            f"{slurm.memory_per_node_mb} MB a node, as the site says",
            little,
            "lower slurm.memory_per_node_mb",
        )
    )
    return found


def judge_config(text: str, slurm: Slurm) -> list[Finding]:
    """What of slurm.conf a run leans on."""
    config = {
        key.strip(): value.strip()
        for key, _, value in (line.partition("=") for line in text.splitlines())
    }
    scheduler = config.get("SchedulerType", "unknown")
    backfill = scheduler == "sched/backfill"
    found = [
        Finding(
            "scheduler",
            scheduler,
            "" if backfill else "stages of several node groups need SchedulerType=sched/backfill",
            False,
        )
    ]
    requeue = config.get("JobRequeue", "1") != "0"
    found.append(
        Finding("requeue", "allowed" if requeue else "off unless a job asks for it, as ours do")
    )
    accounting = config.get("AccountingStorageType", "(null)")
    kept = re.match(r"\d+", config.get("MinJobAge", "300"))
    if "none" in accounting or accounting == "(null)":
        short = kept is not None and int(kept[0]) < 3 * slurm.poll_s
        mend = (
            f"set MinJobAge to {3 * slurm.poll_s} s or more: an ended job is forgotten before it is asked for"
            if short
            else ""
        )
        found.append(
            Finding(
                "accounting",
                f"none; the controller keeps ended jobs for {kept[0] if kept else '?'} s",
                mend,
            )
        )
    else:
        found.append(Finding("accounting", accounting))
    return found


def judge_time_limit(limit: str, slurm: Slurm) -> Finding:
    """Of `sinfo -o %l`; a job above the partition's limit is taken and then never starts."""
    allowed_s = seconds(limit)
    over = allowed_s is not None and 60 * slurm.time_limit_min > allowed_s
    mend = (
        f"lower slurm.time_limit_min from {slurm.time_limit_min} to {allowed_s // 60:.0f} at most"
        if allowed_s and over
        else ""
    )
    return Finding("time limit", f"{limit} in {slurm.partition}", mend)


def judge_admission(test: Answer, slurm: Slurm) -> Finding:
    """Of `sbatch --test-only`, with what a stage on one whole node asks for."""
    asked = f"partition {slurm.partition}" + (f", account {slurm.account}" if slurm.account else "")
    if test.code == 0:
        start = re.search(r"to start at (\S+)", test.said)
        return Finding(
            "admission",
            f"{asked}: a whole node for {slurm.time_limit_min} min"
            + (f" from {start[1]}" if start else ""),
        )
    said = (
        re.sub(
            r"\b(sbatch: )?(error|allocation failure|Batch job submission failed): ", "", test.said
        )
        or f"exit code {test.code}"
    )
    fields = {
        "account": "set slurm.account to one that admits you (`sacctmgr show associations user=$USER`)",
        "node configuration": "lower slurm.cpus_per_node or slurm.memory_per_node_mb, or mend slurm.gpu_type or slurm.extra",
        "gres": "mend slurm.gpu_type (`sinfo -o %G` says what there is)",
        "qos": "add the QOS that you may use to slurm.extra: '--qos=…'",
    }
    mend = next(
        (mend for word, mend in fields.items() if word in said.lower()),
        "mend [slurm] of the site file",
    )
    return Finding("admission", f"{asked}: {said}", mend)


def judge_no_probe(answer: Answer) -> Finding:
    """No node wrote a line: why not?"""
    if "can't open file" in answer.said:
        return Finding(
            "probe",
            "the nodes do not see this checkout",
            "move it to the file system that all nodes share",
        )
    said = (answer.said or " ".join(answer.out.split()) or f"exit code {answer.code}")[:300]
    if "module: command not found" in said:
        return Finding(
            "probe",
            "a login shell on the nodes has no `module`",
            "empty containers.modules, or ask who runs the cluster",
        )
    if answer.code is None or re.search(
        r"unable to allocate|immediate|busy|unavailable", said, re.IGNORECASE
    ):
        mend = "ask again when the queue is shorter; `--no-probe` says the rest"
        return Finding(
            "probe", f"its job did not start within {START_S} s ({said})", mend, must=False
        )
    return Finding(
        "probe",
        f"its job failed: {said}",
        "mend [slurm] of the site file, or ask who runs the cluster",
    )


# Judging: files ---------------------------------------------------------------------------------------------------------


def judge_images(images: Mapping[str, Path | str], site: Site) -> list[Finding]:
    """Are the images of the lock there? One hardware's suffice to run on it."""
    if site.containers is None:
        return [
            Finding(
                "containers",
                "none: roles run in the checkout's .venv",
                "add [containers] for runs that others can repeat",
                False,
            )
        ]
    if not images:
        mend = (
            "check it out again, or type `snakemake -s pipelines/images.smk --cores all lock_cpu`"
        )
        return [Finding("images", f"{LOCK} names none", mend)]
    by_hardware: dict[str, list[str]] = {}
    for name, file in images.items():
        by_hardware.setdefault(name.partition("/")[0], []).extend(
            [file] if isinstance(file, str) else []
        )
    none_whole = all(by_hardware.values())
    found = []
    for hardware, missing in by_hardware.items():
        what, _, mend = (
            missing[0].partition("; ") if missing else (f"there, as {LOCK} names them", "", "")
        )
        found.append(Finding(f"{hardware} images", what, mend, must=none_whole))
    return found
