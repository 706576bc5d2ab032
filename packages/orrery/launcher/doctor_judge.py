"""Judge the output of Slurm commands and of the probe job (`doctor_probe.py`)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from orrery.launcher.doctor_probe import MINE, THEIRS
from orrery.launcher.site import Site, Slurm
from orrery.launcher.slurm.queue import seconds as parse_seconds

GIB = 2**30
START_S = 60  # maximum wait until the probe job starts
WAIT_S = 20  # maximum wait for another node's file
SLOW_S = 2.0  # longest accepted delay until other nodes see a renamed file
SKEW_S = 1.0  # largest accepted clock difference between nodes
RUNS_GIB, SCRATCH_GIB = 20, 2  # minimum free GiB on the disks of runs and scratch
GONE = ("down", "drain", "fail", "maint", "unknown", "power", "reboot")

Probe = dict[str, Any]


@dataclass(frozen=True)
class Finding:
    """`remedy` is "" if the check passed. Only required checks fail `orrery doctor`."""

    what: str
    found: str
    remedy: str = ""
    is_required: bool = True


@dataclass(frozen=True)
class Node:
    """A node in sinfo's output. `gpus`: number of GPUs by type ("" if unnamed)."""

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
    """`said` is stderr. `code` is None if the command is missing or timed out."""

    code: int | None
    out: str
    said: str


def parse_nodes(text: str) -> list[Node]:
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
    remedy = "no controller answers (`scontrol ping`); ask the cluster's administrators"
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
        remedy = "only runs on CPUs can start here"
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
    requeue = "off by default; Orrery's jobs ask for it" if is_off else "allowed"
    found.append(Finding("requeue", requeue))
    accounting = config.get("AccountingStorageType", "(null)")
    if "none" not in accounting and accounting != "(null)":
        return [*found, Finding("accounting", accounting)]
    kept, remedy = re.match(r"\d+", config.get("MinJobAge", "300")), ""
    if kept is not None and int(kept[0]) < 3 * slurm.poll_s:
        remedy = (
            f"set MinJobAge to {3 * slurm.poll_s} s or more: "
            "Slurm forgets ended jobs before Orrery asks for them"
        )
    told = f"none; the controller keeps ended jobs for {kept[0] if kept else '?'} s"
    return [*found, Finding("accounting", told, remedy)]


def judge_time_limit(limit: str, slurm: Slurm) -> Finding:
    allowed_s, remedy = parse_seconds(limit), ""
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
        "or correct slurm.gpu_type or slurm.extra",
        "gres": "correct slurm.gpu_type (`sinfo -o %G` lists the types)",
        "qos": "add the QOS that you may use to slurm.extra: '--qos=…'",
    }
    found = (remedy for word, remedy in remedies.items() if word in said.lower())
    remedy = next(found, "correct [slurm] of the site file")
    return Finding("admission", f"{asked}: {said}", remedy)


def judge_no_probe(answer: Answer) -> Finding:
    said = (answer.said or " ".join(answer.out.split()) or f"exit code {answer.code}")[:300]
    if "can't open file" in answer.said:
        remedy = "move it to the file system that all nodes share"
        return Finding("probe", "the nodes do not see this checkout", remedy)
    if "module: command not found" in said:
        remedy = "set containers.modules to [], or ask the cluster's administrators"
        return Finding("probe", "a login shell on the nodes has no `module`", remedy)
    busy = r"unable to allocate|immediate|busy|unavailable"
    if answer.code is None or re.search(busy, said, re.IGNORECASE):
        remedy = (
            "type `orrery doctor` again when the queue is shorter; `--no-probe` leaves out "
            "this check"
        )
        told = f"its job did not start within {START_S} s ({said})"
        return Finding("probe", told, remedy, is_required=False)
    remedy = "correct [slurm] of the site file, or ask the cluster's administrators"
    return Finding("probe", f"its job failed: {said}", remedy)


def parse_probes(text: str) -> list[Probe]:
    pieces: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"(\d+)/(\d+)/(\d+) (.*)", line):
            rank, place, counts[int(found[1])] = int(found[1]), int(found[2]), int(found[3])
            pieces.setdefault(rank, {})[place] = found[4]
    return [
        json.loads("".join(text for _, text in sorted(pieces[rank].items())))
        for rank in sorted(pieces)
        if len(pieces[rank]) == counts[rank]
    ]


def judge_probe(
    probes: Sequence[Probe], asked: Sequence[str], num_nodes: int, gpus: int, site: Site
) -> list[Finding]:
    name = {one["rank"]: one["node"] for one in probes}
    lost = {node: "printed no facts" for node in asked if node not in name.values()}
    lost |= {one["node"]: "ran out of time" for one in probes if one["ended"] != "in time"}
    probes = [one for one in probes if one["ended"] == "in time"]
    good, remedy = (
        f"{len(probes)} of {num_nodes} nodes",
        "log in to these nodes and look for a file system or command that hangs",
    )
    found = [over_nodes("probe", good, lost, remedy)]
    if not probes:
        return found
    broken = {one["node"]: one["python"][1][-200:] for one in probes if one["python"][0] != 0}
    good = "the checkout's .venv works on every node"
    remedy = (
        "put the checkout and the Python of its .venv where every node has them, "
        "then type `bash locks/install.sh login`"
    )
    found.append(over_nodes("environment", good, broken, remedy))
    found += _judge_files(probes, name)
    found += _judge_network(probes, name, site)
    found += _judge_devices(probes, gpus, site)
    found += _judge_containers(probes, site)
    for folder, enough_gib in (("runs", RUNS_GIB), ("scratch", SCRATCH_GIB)):
        free = {one["node"]: one["free_bytes"][folder] for one in probes}
        found.append(judge_space(f"{folder} on nodes", free, enough_gib))
    missing = {
        one["node"]: ", ".join(one["mounts_missing"]) for one in probes if one["mounts_missing"]
    }
    if missing or (site.containers and site.containers.mounts):
        remedy = "remove these folders from containers.mounts, or mount them on these nodes"
        found.append(over_nodes("mounts", "all there", missing, remedy))
    return found


def _judge_files(probes: Sequence[Probe], name: Mapping[int, str]) -> list[Finding]:
    troubles, times_s = {}, []
    for one in probes:
        if one["unseen"]:
            others = (name.get(other, "?") for other in one["unseen"])
            troubles[one["node"]] = "sees nothing of " + ", ".join(others)
    for one in probes:
        times_s += [seconds for seconds in one["rename_s"].values() if seconds is not None]
        for other, seconds in one["rename_s"].items():
            if seconds is None:
                where = name.get(int(other), "?")
                troubles[one["node"]] = f"its file was not seen on {where} within {WAIT_S} s"
    slowest = max(times_s, default=None)
    good = "one node, nothing to compare" if len(probes) == 1 else "files are seen by all"
    if len(probes) > 1 and slowest is not None:
        good = f"a renamed file is seen by all within {slowest:.3f} s"
    remedy = (
        "put the checkout on a file system that every node has mounted and that caches no absent "
        "names (NFS: `lookupcache=positive`)"
    )
    found = over_nodes("shared files", good, troubles, remedy)
    if not troubles and slowest is not None and slowest > SLOW_S:
        remedy = "set [roles] deadline_scale above 1, or mount with `lookupcache=positive`"
        found = Finding("shared files", good, remedy, False)
    return [found, _judge_locks(probes)]


def _judge_locks(probes: Sequence[Probe]) -> Finding:
    none = {one["node"]: one["lock"] for one in probes if one["lock"] not in (None, MINE, THEIRS)}
    if none:
        remedy = (
            "mount runs/ with file locks (Lustre: `-o flock`; NFS: a lock service that answers), "
            "or put it on a file system that has them"
        )
        return over_nodes("file locks", "", none, remedy)
    holder = next((one["node"] for one in probes if one["rank"] == 0 and one["lock"] == MINE), None)
    if holder is None or not any(one["lock"] for one in probes if one["rank"]):
        if len(probes) == 1:
            return Finding("file locks", "one node, nothing to compare")
        return Finding("file locks", "not compared: the nodes did not reach one another")
    twice = {
        one["node"]: f"took a lock that {holder} held"
        for one in probes
        if one["rank"] and one["lock"] == MINE
    }
    remedy = (
        "mount runs/ with locks between nodes (Lustre: `-o flock`, not `localflock`; "
        "NFS: without `nolock` and `local_lock`)"
    )
    return over_nodes("file locks", "a lock on one node excludes all others", twice, remedy)


def _judge_network(probes: Sequence[Probe], name: Mapping[int, str], site: Site) -> list[Finding]:
    if site.network is None:
        return []
    interface = site.network.interface
    without = {
        one["node"]: "has " + ", ".join(one["interfaces"])
        for one in probes
        if one["address"] is None
    }
    good = f"{interface} has an address on every node"
    remedy = "set network.interface to one that every node has"
    found = [over_nodes("interface", good, without, remedy)]
    deaf = {}
    for one in probes:
        cannot = [
            f"{name.get(int(other), '?')} ({text})" for other, text in one["tcp"].items() if text
        ]
        if cannot:
            deaf[one["node"]] = "cannot reach " + ", ".join(cannot)
    if len(probes) > 1 and len(without) < len(probes):
        good = f"every node answers every other on {interface}"
        remedy = "open all ports between nodes on that interface, or name another"
        found.append(over_nodes("ports", good, deaf, remedy))
    skew = max((abs(seconds) for one in probes for seconds in one["skew_s"].values()), default=0.0)
    if len(probes) > 1 and not deaf:
        remedy = ""
        if skew > SKEW_S:
            remedy = (
                "synchronise the nodes' clocks (chrony): "
                "times in logs and the report do not fit together"
            )
        found.append(Finding("clocks", f"at most {skew:.3f} s apart", remedy))
    return found


def _judge_devices(probes: Sequence[Probe], gpus: int, site: Site) -> list[Finding]:
    found = _judge_gpus(probes, gpus) if gpus else []
    wanted = site.environment.get("NCCL_IB_HCA")
    if wanted is None:
        return found
    without = {
        one["node"]: ", ".join(one["infiniband"]) or "has none"
        for one in probes
        if not _chosen(wanted, one["infiniband"])
    }
    remedy = "set environment.NCCL_IB_HCA to devices of /sys/class/infiniband"
    found.append(over_nodes("InfiniBand", f"{wanted} is on every node", without, remedy))
    locked = {
        one["node"]: f"{one['memlock_bytes']} bytes" for one in probes if one["memlock_bytes"] != -1
    }
    remedy = (
        "let jobs lock memory without limit (slurm.conf: PropagateResourceLimitsExcept=MEMLOCK, "
        "slurmd: LimitMEMLOCK=infinity)"
    )
    found.append(over_nodes("locked memory", "without limit", locked, remedy))
    return found


def _judge_gpus(probes: Sequence[Probe], gpus: int) -> list[Finding]:
    shown = {one["node"]: len(one["visible_gpus"]) for one in probes}
    wrong = {node: f"shows {count}" for node, count in shown.items() if count != gpus}
    remedy = "Slurm's gres.conf and the node differ; ask the cluster's administrators"
    found = [over_nodes("visible GPUs", f"{gpus} a node", wrong, remedy)]
    drivers = {
        one["node"]: one["nvidia"][1].split() if one["nvidia"][0] == 0 else [] for one in probes
    }
    silent = {
        node: "no driver answers (`nvidia-smi`)" for node, lines in drivers.items() if not lines
    }
    versions = sorted({version for lines in drivers.values() for version in lines})
    good = ", ".join(versions)
    if len(versions) > 1:
        remedy = "install the same driver on all nodes, because results may differ"
        found.append(Finding("driver", good, remedy, is_required=False))
    else:
        remedy = "install a driver on these nodes; runs on CPUs need none"
        found.append(over_nodes("driver", good, silent, remedy, is_required=False))
    fewer = {
        node: f"{len(lines)} of {gpus} answer"
        for node, lines in drivers.items()
        if 0 < len(lines) < gpus
    }
    if fewer:
        remedy = "type `nvidia-smi` there: a GPU does not answer"
        found.append(over_nodes("driver", "", fewer, remedy))
    return found


def _chosen(wanted: str, devices: Iterable[str]) -> list[str]:
    """Return the devices that NCCL_IB_HCA=`wanted` selects.

    `wanted` lists name prefixes, or full names after `=`. A leading `^` excludes them.
    """
    exact, others = "=" in wanted[:2], wanted.startswith("^")
    names = [word.partition(":")[0] for word in wanted.lstrip("^=").split(",")]

    def matches(device: str) -> bool:
        return any(device == name if exact else device.startswith(name) for name in names)

    return [device for device in devices if matches(device) != others]


def _judge_containers(probes: Sequence[Probe], site: Site) -> list[Finding]:
    if site.containers is None:
        return []
    old = {}
    for one in probes:
        code, said = one["apptainer"]
        version = re.search(r"(\d+)\.(\d+)", said) if code == 0 else None
        if version is None or (int(version[1]), int(version[2])) < (1, 1):
            old[one["node"]] = said or "no answer"
    versions = ", ".join(sorted({one["apptainer"][1] for one in probes}))
    remedy = "install Apptainer 1.1 or newer, or name its module in containers.modules"
    found = [over_nodes("Apptainer", versions, old, remedy)]
    if old:
        return found
    for image in probes[0]["images"]:
        bad = {
            one["node"]: one["images"][image][1].strip()[-200:]
            for one in probes
            if one["images"][image][0] != 0
        }
        found.append(over_nodes(image, "starts on every node", bad, _image_remedy(probes, bad)))
        if not bad:
            found += _judge_cuda(probes, image)
    return found


def _judge_cuda(probes: Sequence[Probe], image: str) -> list[Finding]:
    found = []
    for one in probes:
        cuda = json.loads(one["images"][image][1].splitlines()[-1])["cuda"]
        code, said = one["nvidia_cuda"]
        told = re.search(r"CUDA(?: \w+)? Version:\s*(\d+)\.(\d+)", said) if code == 0 else None
        if cuda is None or told is None:
            continue
        has, knows = [int(part) for part in cuda.split(".")[:2]], [int(told[1]), int(told[2])]
        if has > knows:
            what = (
                f"{one['node']}: the driver knows CUDA {knows[0]}.{knows[1]}, "
                f"the image has {has[0]}.{has[1]}"
            )
            remedy = "install a newer driver there"
            found.append(Finding(image, what, remedy, is_required=has[0] > knows[0]))
    return found


def _image_remedy(probes: Sequence[Probe], bad: Mapping[str, str]) -> str:
    if all(text == "not there" for text in bad.values()):
        return "build it, and set containers.images to a folder that every node sees"
    shown = [one for one in probes if one["node"] in bad]
    if any(one["user_namespaces"] == "0" for one in shown):
        return (
            "let users make namespaces: `sysctl user.max_user_namespaces=15000` on these nodes, "
            "or a setuid Apptainer"
        )
    if not all(one["fuse"] for one in shown):
        return "let users open /dev/fuse on these nodes: `chmod 666 /dev/fuse`"
    return "type `apptainer exec IMAGE true` there to see more"


def judge_space(what: str, free_bytes: Mapping[str, int | None], enough_gib: int) -> Finding:
    closed = {name: "cannot be written" for name, free in free_bytes.items() if free is None}
    if closed:
        return over_nodes(what, "", closed, "make it writable for you, or name another folder")
    least = min(free for free in free_bytes.values() if free is not None) / GIB
    remedy = "" if least >= enough_gib else f"free {enough_gib} GiB there"
    return Finding(what, f"{least:.1f} GiB free", remedy, is_required=least < 1)


def over_nodes(
    what: str, good: str, troubles: Mapping[str, str], remedy: str, is_required: bool = True
) -> Finding:
    if not troubles:
        return Finding(what, good, is_required=is_required)
    by_trouble: dict[str, list[str]] = {}
    for node, trouble in troubles.items():
        by_trouble.setdefault(" ".join(trouble.split()), []).append(node)
    found = "; ".join(f"{', '.join(nodes)}: {trouble}" for trouble, nodes in by_trouble.items())
    return Finding(what, found, remedy, is_required)
