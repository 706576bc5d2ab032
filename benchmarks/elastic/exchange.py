"""Exchange Δ between sites in network namespaces, and compare with the bound of their links.

python benchmarks/elastic/exchange.py     as root, with iproute2; about two minutes
"""

import multiprocessing
import os
import subprocess
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.codecs import codec
from orrery.elastic.exchange import exchange
from orrery.elastic.links import PeerLinks
from orrery.elastic.types import Epoch, OuterRound, SiteMember
from record import record

PORT = 29_000
ROUNDS = 3
BRIDGE = "orx-bridge"
CASES = {  # name: (sites, Mb/s of each site's link or None, values)
    "2 sites, 100 Mb/s": (2, 100, 16_000_000),
    "2 sites, 1 Gb/s": (2, 1000, 64_000_000),
    "2 sites, no limit": (2, None, 64_000_000),
    "4 sites, 1 GB, 1 Gb/s": (4, 1000, 250_000_000),
}


def run(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True)


def make_networks(num_sites: int, rate: int | None) -> None:
    run("ip", "link", "add", BRIDGE, "type", "bridge")
    run("ip", "link", "set", BRIDGE, "up")
    for site in range(num_sites):
        space, inside, outside = f"orx{site}", f"orx{site}-in", f"orx{site}-out"
        run("ip", "netns", "add", space)
        run("ip", "link", "add", inside, "netns", space, "type", "veth", "peer", "name", outside)
        run("ip", "link", "set", outside, "master", BRIDGE, "up")
        run("ip", "-n", space, "addr", "add", f"10.77.0.{site + 1}/24", "dev", inside)
        run("ip", "-n", space, "link", "set", inside, "up")
        if rate is not None:
            limit = ("rate", f"{rate}mbit", "burst", "256kb", "latency", "50ms")
            run("ip", "netns", "exec", space, *("tc", "qdisc", "add", "dev", inside, "root"),
                "tbf", *limit)  # fmt: skip


def remove_networks(num_sites: int) -> None:
    for site in range(num_sites):
        subprocess.run(["ip", "netns", "del", f"orx{site}"], capture_output=True)
    subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True)


def site(
    rank: int, num_sites: int, n: int, certificates: Certificates, barrier: Any, out: Connection
) -> None:
    with open(f"/run/netns/orx{rank}") as space:
        setns(space.fileno())
    links = PeerLinks("run", certificates, f"10.77.0.{rank + 1}", PORT)
    members = tuple(SiteMember(f"{i:032x}", f"10.77.0.{i + 1}", PORT) for i in range(num_sites))
    delta = np.random.default_rng(rank).standard_normal(n, dtype=np.float32)
    stats = []
    for number in range(ROUNDS):
        barrier.wait()
        outer_round = OuterRound(number, Epoch(1, members), (1,) * num_sites)
        stats.append(exchange(delta, outer_round, rank, links, codec("int8_block"), "ring"))
    out.send((min(each.seconds for each in stats[1:]), stats[-1].bytes_sent, hash(delta.tobytes())))
    barrier.wait()
    links.close()


def setns(descriptor: int) -> None:
    import ctypes

    if ctypes.CDLL(None, use_errno=True).setns(descriptor, 0):
        raise OSError(ctypes.get_errno(), "setns")


def measure(num_sites: int, rate: int | None, n: int) -> dict[str, Any]:
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(num_sites)
    remove_networks(num_sites)
    with tempfile.TemporaryDirectory() as folder:
        make_authority(Path(folder), "run")
        certificates = make_site(Path(folder), "site")
        try:
            make_networks(num_sites, rate)
            pipes = [context.Pipe() for _ in range(num_sites)]
            processes = [
                context.Process(target=site, args=(r, num_sites, n, certificates, barrier, end))
                for r, (_, end) in enumerate(pipes)
            ]
            for process in processes:
                process.start()
            found = [ours.recv() for ours, _ in pipes]
            for process in processes:
                process.join()
        finally:
            remove_networks(num_sites)
    assert len({digest for _, _, digest in found}) == 1, "the sites differ"
    seconds, num_bytes = max(each[0] for each in found), found[0][1]
    achieved = 8 * num_bytes / seconds / 1e6
    row = {"seconds": seconds, "bytes_sent": num_bytes, "Mb/s": achieved}
    return row | {"value": achieved / rate if rate else achieved / 4000}


def main() -> None:
    rows = []
    for name, case in CASES.items():
        rows.append({"variant": name, **measure(*case)})
        print(rows[-1], flush=True)
    record(
        Path(__file__).with_suffix(".json"),
        figure="Payload over an encrypted ring, share of the link, 2 sites at 1 Gb/s",
        value=rows[1]["value"],
        unit="of the rate",
        goal=0.9,
        better="higher",
        details={"codec": "int8_block", "share of 'no limit'": "of 4 Gb/s each way"},
        rows=rows,
    )


if __name__ == "__main__":
    main()
