"""Judge the nodes by the results of the probing job (`doctor_probe.py`)."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orrery.launcher.doctor import GIB, Finding
from orrery.launcher.doctor_probe import MINE, THEIRS
from orrery.launcher.site import Site

WAIT_S = 20  # to see a renamed file, and for the nodes to meet
SLOW_S = 2.0  # slower renames delay every rendezvous
SKEW_S = 1.0  # clocks further apart make live roles look hung
RUNS_GIB, SCRATCH_GIB = 20, 2  # checkpoints and images, temporary files

Probe = dict[str, Any]


def parse_probes(text: str) -> list[Probe]:
    """Parse the nodes' lines `rank/place/count text`, by rank."""
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
    """Return findings on the nodes `asked`, each with `gpus`."""
    name = {one["rank"]: one["node"] for one in probes}
    lost = {node: "said nothing" for node in asked if node not in name.values()}
    lost |= {one["node"]: "ran out of time" for one in probes if one["ended"] != "in time"}
    probes = [one for one in probes if one["ended"] == "in time"]
    good, remedy = (
        f"{len(probes)} of {num_nodes} nodes",
        "look at these nodes; something on them hangs",
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
        remedy = "take them out of containers.mounts, or mount them on these nodes"
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
        "put the checkout on a file system that every node has mounted, without a cache of absent "
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
            "mount it with file locks (Lustre: `-o flock`; NFS: a lock service that answers), "
            "or put runs/ on a file system that has them"
        )
        return over_nodes("file locks", "", none, remedy)
    holder = next((one["node"] for one in probes if one["rank"] == 0 and one["lock"] == MINE), None)
    if holder is None or not any(one["lock"] for one in probes if one["rank"]):
        if len(probes) == 1:
            return Finding("file locks", "one node, nothing to compare")
        return Finding("file locks", "not compared: the nodes did not meet")
    twice = {
        one["node"]: f"took a lock that {holder} held"
        for one in probes
        if one["rank"] and one["lock"] == MINE
    }
    remedy = (
        "mount it with locks between nodes (Lustre: `-o flock`, not `localflock`; "
        "NFS: without `nolock` and `local_lock`)"
    )
    return over_nodes("file locks", "what one node locks no other can", twice, remedy)


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
    remedy = "Slurm's gres.conf and the node differ; ask who runs the cluster"
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
        remedy = "let every node have the same one: results may differ"
        found.append(Finding("driver", good, remedy, is_required=False))
    else:
        remedy = "install it on these nodes; runs on CPUs go without"
        found.append(over_nodes("driver", good, silent, remedy, is_required=False))
    fewer = {
        node: f"{len(lines)} of {gpus} answer"
        for node, lines in drivers.items()
        if 0 < len(lines) < gpus
    }
    if fewer:
        remedy = "look at `nvidia-smi` there: a GPU has fallen off"
        found.append(over_nodes("driver", "", fewer, remedy))
    return found


def _chosen(wanted: str, devices: Iterable[str]) -> list[str]:
    """Return NCCL's devices, chosen by prefix. `=` matches exactly, `^` inverts."""
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
    remedy = "install 1.1 or newer, or name its module in containers.modules"
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
        return "build it, and let containers.images be a folder that every node sees"
    shown = [one for one in probes if one["node"] in bad]
    if any(one["user_namespaces"] == "0" for one in shown):
        return (
            "let users make namespaces: `sysctl user.max_user_namespaces=15000` on these nodes, "
            "or a setuid Apptainer"
        )
    if not all(one["fuse"] for one in shown):
        return "let users open /dev/fuse on these nodes: `chmod 666 /dev/fuse`"
    return "type the same there to see more: `apptainer exec IMAGE true`"


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
