"""Doctor of nodes: what the probing job (`doctor_probe.py`) found on them, as findings. Pure."""

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from orrery.launcher.doctor import GIB, Finding
from orrery.launcher.doctor_probe import MINE, THEIRS
from orrery.launcher.site import Site

WAIT_S = 20  # for a renamed file to be seen, and for the nodes to meet
SLOW_S, SKEW_S = (
    2.0,
    1.0,
)  # a rename that takes longer delays every meeting; clocks further apart make live roles look hung
RUNS_GIB, SCRATCH_GIB = 20, 2  # checkpoints and images; what Apptainer and roles put aside

Probe = dict[str, Any]


def parse_probes(text: str) -> list[Probe]:
    """What nodes wrote, in pieces `rank/place/count text`, by rank; what else stands between them (a shell's greetings) is left out."""
    pieces: dict[int, dict[int, str]] = {}
    counts: dict[int, int] = {}
    for line in text.splitlines():
        if found := re.fullmatch(r"(\d+)/(\d+)/(\d+) (.*)", line):
            rank, place, counts[int(found[1])] = int(found[1]), int(found[2]), int(found[3])
            pieces.setdefault(rank, {})[place] = found[4]
    whole = {
        rank: "".join(text for _, text in sorted(pieces[rank].items()))
        for rank in sorted(pieces)
        if len(pieces[rank]) == counts[rank]
    }
    return [json.loads(text) for text in whole.values()]


def judge_probe(
    probes: Sequence[Probe], asked: Sequence[str], num_nodes: int, gpus: int, site: Site
) -> list[Finding]:
    """What the job found on the nodes that it was `asked` to look at, each with `gpus`; the partition has `num_nodes`."""
    name = {one["rank"]: one["node"] for one in probes}
    lost = {node: "said nothing" for node in asked if node not in name.values()}
    lost |= {one["node"]: "ran out of time" for one in probes if one["ended"] != "in time"}
    probes = [one for one in probes if one["ended"] == "in time"]
    found = [
        over_nodes(
            "probe",
            f"{len(probes)} of {num_nodes} nodes",
            lost,
            "look at these nodes; something on them hangs",
        )
    ]
    if not probes:
        return found
    broken = {one["node"]: one["python"][1][-200:] for one in probes if one["python"][0] != 0}
    mend = "put the checkout and the Python of its .venv where every node has them, then type `bash locks/install.sh login`"
    found.append(
        over_nodes("environment", "the checkout's .venv works on every node", broken, mend)
    )
    found += [
        *_meeting(probes, name, site),
        *_devices(probes, gpus, site),
        *_containers(probes, site),
    ]
    for folder, enough_gib in (("runs", RUNS_GIB), ("scratch", SCRATCH_GIB)):
        found.append(
            judge_space(
                f"{folder} on nodes",
                {one["node"]: one["free_bytes"][folder] for one in probes},
                enough_gib,
            )
        )
    missing = {
        one["node"]: ", ".join(one["mounts_missing"]) for one in probes if one["mounts_missing"]
    }
    if missing or (site.containers and site.containers.mounts):
        found.append(
            over_nodes(
                "mounts",
                "all there",
                missing,
                "take them out of containers.mounts, or mount them on these nodes",
            )
        )
    return found


def _meeting(probes: Sequence[Probe], name: Mapping[int, str], site: Site) -> list[Finding]:
    """The shared file system, the network and the clocks."""
    found = []
    alone = {
        one["node"]: "sees nothing of " + ", ".join(name.get(other, "?") for other in one["unseen"])
        for one in probes
        if one["unseen"]
    }
    late = {
        one["node"]: other
        for one in probes
        for other, seconds in one["rename_s"].items()
        if seconds is None
    }
    alone |= {
        node: f"its file was not seen on {name.get(int(other), '?')} within {WAIT_S} s"
        for node, other in late.items()
    }
    slowest = max(
        (seconds for one in probes for seconds in one["rename_s"].values() if seconds is not None),
        default=None,
    )
    mend = "put the checkout on a file system that every node has mounted, without a cache of absent names (NFS: `lookupcache=positive`)"
    told = (
        "one node, nothing to compare"
        if len(probes) == 1
        else "files are seen by all"
        if slowest is None
        else ""
    )
    found.append(
        over_nodes(
            "shared files",
            told or f"a renamed file is seen by all within {slowest:.3f} s",
            alone,
            mend,
        )
    )
    if not alone and slowest is not None and slowest > SLOW_S:
        found[-1] = Finding(
            "shared files",
            found[-1].found,
            "set [roles] deadline_scale above 1, or mount with `lookupcache=positive`",
            False,
        )
    found.append(_locks(probes))
    if site.network is None:
        return found
    interface = site.network.interface
    there = {
        one["node"]: "has " + ", ".join(one["interfaces"])
        for one in probes
        if one["address"] is None
    }
    found.append(
        over_nodes(
            "interface",
            f"{interface} has an address on every node",
            there,
            "set network.interface to one that every node has",
        )
    )
    deaf = {}
    for one in probes:
        cannot = {name.get(int(other), "?"): text for other, text in one["tcp"].items() if text}
        if cannot:
            deaf[one["node"]] = "cannot reach " + ", ".join(
                f"{other} ({text})" for other, text in cannot.items()
            )
    if len(probes) > 1 and len(there) < len(probes):
        told = f"every node answers every other on {interface}"
        found.append(
            over_nodes(
                "ports",
                told,
                deaf,
                "open all ports between nodes on that interface, or name another",
            )
        )
    skew = max((abs(seconds) for one in probes for seconds in one["skew_s"].values()), default=0.0)
    if len(probes) > 1 and not deaf:
        mend = (
            ""
            if skew <= SKEW_S
            else "synchronise the nodes' clocks (chrony): times in logs and the report do not fit together"
        )
        found.append(Finding("clocks", f"at most {skew:.3f} s apart", mend))
    return found


def _locks(probes: Sequence[Probe]) -> Finding:
    """A run is held by a lock on a file of its folder: whoever may take one that another node holds can start the run a second time."""
    none = {one["node"]: one["lock"] for one in probes if one["lock"] not in (None, MINE, THEIRS)}
    if none:
        mend = "mount it with file locks (Lustre: `-o flock`; NFS: a lock service that answers), or put runs/ on a file system that has them"
        return over_nodes("file locks", "", none, mend)
    holder = next((one["node"] for one in probes if one["rank"] == 0 and one["lock"] == MINE), None)
    if holder is None or not any(one["lock"] for one in probes if one["rank"]):
        told = (
            "one node, nothing to compare"
            if len(probes) == 1
            else "not compared: the nodes did not meet"
        )
        return Finding("file locks", told)
    twice = {
        one["node"]: f"took a lock that {holder} held"
        for one in probes
        if one["rank"] and one["lock"] == MINE
    }
    mend = "mount it with locks between nodes (Lustre: `-o flock`, not `localflock`; NFS: without `nolock` and `local_lock`)"
    return over_nodes("file locks", "what one node locks no other can", twice, mend)


def _devices(probes: Sequence[Probe], gpus: int, site: Site) -> list[Finding]:
    """GPUs, driver and InfiniBand."""
    found = []
    if gpus:
        wrong = {
            one["node"]: f"shows {len(one['visible_gpus'])}"
            for one in probes
            if len(one["visible_gpus"]) != gpus
        }
        found.append(
            over_nodes(
                "visible GPUs",
                f"{gpus} a node",
                wrong,
                "Slurm's gres.conf and the node differ; ask who runs the cluster",
            )
        )
        drivers = {
            one["node"]: one["nvidia"][1].split() if one["nvidia"][0] == 0 else [] for one in probes
        }
        silent = {
            node: "no driver answers (`nvidia-smi`)" for node, lines in drivers.items() if not lines
        }
        versions = sorted({version for lines in drivers.values() for version in lines})
        found.append(
            over_nodes(
                "driver",
                ", ".join(versions),
                silent,
                "install it on these nodes; runs on CPUs go without",
                must=False,
            )
        )
        if len(versions) > 1:
            found[-1] = Finding(
                "driver",
                ", ".join(versions),
                "let every node have the same one: results may differ",
                must=False,
            )
        fewer = {
            node: f"{len(lines)} of {gpus} answer"
            for node, lines in drivers.items()
            if lines and len(lines) < gpus
        }
        found += (
            [over_nodes("driver", "", fewer, "look at `nvidia-smi` there: a GPU has fallen off")]
            if fewer
            else []
        )
    wanted = site.environment.get("NCCL_IB_HCA")
    if wanted is not None:
        none = {
            one["node"]: ", ".join(one["infiniband"]) or "has none"
            for one in probes
            if not _chosen(wanted, one["infiniband"])
        }
        mend = "set environment.NCCL_IB_HCA to devices of /sys/class/infiniband"
        found.append(over_nodes("InfiniBand", f"{wanted} is on every node", none, mend))
        locked = {
            one["node"]: f"{one['memlock_bytes']} bytes"
            for one in probes
            if one["memlock_bytes"] != -1
        }
        mend = "let jobs lock memory without limit (slurm.conf: PropagateResourceLimitsExcept=MEMLOCK, slurmd: LimitMEMLOCK=infinity)"
        found.append(over_nodes("locked memory", "without limit", locked, mend))
    return found


def _chosen(wanted: str, devices: Iterable[str]) -> list[str]:
    """NCCL's rule: names by prefix, `=` exactly, `^` all others; a port after a colon does not matter here."""
    exact, others = "=" in wanted[:2], wanted.startswith("^")
    names = [word.partition(":")[0] for word in wanted.lstrip("^=").split(",")]
    return [
        one
        for one in devices
        if any(one == name if exact else one.startswith(name) for name in names) != others
    ]


def _containers(probes: Sequence[Probe], site: Site) -> list[Finding]:
    """Apptainer, and Python inside the images; CUDA in them against the driver."""
    if site.containers is None:
        return []
    old = {}
    for one in probes:
        version = (
            re.search(r"(\d+)\.(\d+)", one["apptainer"][1]) if one["apptainer"][0] == 0 else None
        )
        if version is None or (int(version[1]), int(version[2])) < (1, 1):
            old[one["node"]] = one["apptainer"][1] or "no answer"
    versions = sorted({one["apptainer"][1] for one in probes})
    found = [
        over_nodes(
            "Apptainer",
            ", ".join(versions),
            old,
            "install 1.1 or newer, or name its module in containers.modules",
        )
    ]
    if old:
        return found
    for image in probes[0]["images"]:
        bad = {
            one["node"]: one["images"][image][1].strip()[-200:]
            for one in probes
            if one["images"][image][0] != 0
        }
        found.append(over_nodes(image, "starts on every node", bad, _start(probes, bad)))
        if bad:
            continue
        for one in probes:
            cuda = json.loads(one["images"][image][1].splitlines()[-1])["cuda"]
            told = (
                re.search(r"CUDA(?: \w+)? Version:\s*(\d+)\.(\d+)", one["nvidia_cuda"][1])
                if one["nvidia_cuda"][0] == 0
                else None
            )
            if cuda is None or told is None:
                continue
            has, knows = [int(part) for part in cuda.split(".")[:2]], [int(told[1]), int(told[2])]
            if has > knows:
                what = f"{one['node']}: the driver knows CUDA {knows[0]}.{knows[1]}, the image has {has[0]}.{has[1]}"
                found.append(
                    Finding(image, what, "install a newer driver there", must=has[0] > knows[0])
                )
    return found


def _start(probes: Sequence[Probe], bad: Mapping[str, str]) -> str:
    """What mends an image that does not start."""
    if all(text == "not there" for text in bad.values()):
        return "build it, and let containers.images be a folder that every node sees"
    shown = [one for one in probes if one["node"] in bad]
    if any(one["user_namespaces"] == "0" for one in shown):
        return "let users make namespaces: `sysctl user.max_user_namespaces=15000` on these nodes, or a setuid Apptainer"
    if not all(one["fuse"] for one in shown):
        return "let users open /dev/fuse on these nodes: `chmod 666 /dev/fuse`"
    return "type the same there to see more: `apptainer exec IMAGE true`"


def judge_space(what: str, free_bytes: Mapping[str, int | None], enough_gib: int) -> Finding:
    """Free bytes by where it was looked; None is a folder that cannot be written."""
    closed = {name: "cannot be written" for name, free in free_bytes.items() if free is None}
    if closed:
        return over_nodes(what, "", closed, "make it writable for you, or name another folder")
    least = min(free for free in free_bytes.values() if free is not None) / GIB
    return Finding(
        what,
        f"{least:.1f} GiB free",
        "" if least >= enough_gib else f"free {enough_gib} GiB there",
        must=least < 1,
    )


def over_nodes(
    what: str, good: str, troubles: Mapping[str, str], mend: str, must: bool = True
) -> Finding:
    """One finding over nodes: those in trouble, by their trouble."""
    if not troubles:
        return Finding(what, good, must=must)
    by_trouble: dict[str, list[str]] = {}
    for node, trouble in troubles.items():
        by_trouble.setdefault(" ".join(trouble.split()), []).append(node)
    return Finding(
        what,
        "; ".join(f"{', '.join(nodes)}: {trouble}" for trouble, nodes in by_trouble.items()),
        mend,
        must,
    )
