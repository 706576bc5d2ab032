"""Sites in network namespaces, with a log and links, for tests."""

import multiprocessing
import subprocess
import time
import uuid
from pathlib import Path

import msgspec
import numpy as np
from linked_sites import delta_of
from networks import PUBLIC, enter
from store_site import TERMS

from orrery.elastic import links as links_module
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.codecs import codec
from orrery.elastic.etcd_site import EtcdSite
from orrery.elastic.exchange import exchange
from orrery.elastic.links import PeerLinks
from orrery.elastic.loop import weighted_mean
from orrery.elastic.membership import RoundPace
from orrery.elastic.types import SiteMember

N, PORT = 1_000_000, 29400
ROOT = Path(__file__).parents[2]


def placed_site(space, address, index, count, num_rounds, folder, files, pipe):
    """Join the log at site 0 and exchange. `address` is "" behind NAT."""
    enter(space)
    links_module.QUIET_S = 0.0
    name = f"{address}:{PORT}" if address else ""
    links = PeerLinks("run", files, address, PORT + 2 if address else 0, num_lanes=1)
    join = "" if index == 0 else f"{PUBLIC}.1:{PORT}"
    pace = RoundPace(founders=count)
    with EtcdSite("run", folder, name, files, join, pace=pace, heartbeat_s=0.5) as site:
        site.membership.measured = links.speeds
        member = SiteMember(uuid.uuid4().hex, address, links.port)
        site.membership.join(member, msgspec.structs.replace(TERMS, codec="int8_block"))
        for number in range(num_rounds):
            found = site.membership.begin_round(number, index + 1, 60.0)
            rank, delta = found.epoch.rank(member.id), delta_of(index, N)
            exchange(delta, found, rank, links, codec("int8_block"))
            assert site.membership.commit(found, f"{delta.sum()}")
            end_s = time.monotonic() + 20
            while len(links.speeds()) < count - 1 and time.monotonic() < end_s:
                time.sleep(0.01)
        pipe.send((rank, found, delta))
        pipe.recv()
    links.close()


def rounds_of(spaces, addresses, num_rounds, folder):
    """Run a site in each namespace. Return each site's (rank, last round, mean)."""
    subprocess.run(["bash", "locks/system.sh", "elastic"], cwd=ROOT, check=True)
    make_authority(folder, "run")
    files = make_site(folder, "site", [each for each in addresses if each])
    context, count = multiprocessing.get_context("spawn"), len(spaces)
    pipes = [context.Pipe() for _ in spaces]
    sites = []
    for index, (space, address) in enumerate(zip(spaces, addresses, strict=True)):
        args = (index, count, num_rounds, folder / f"{index}", files, pipes[index][1])
        sites.append(context.Process(target=placed_site, args=(space, address, *args)))
        sites[-1].start()
    try:
        for ours, _ in pipes:
            assert ours.poll(60), "a site hangs"
        found = [ours.recv() for ours, _ in pipes]
        for ours, _ in pipes:
            ours.send("end")
        for each in sites:
            each.join(20)
    finally:
        for each in sites:
            each.kill()
    expected = weighted_mean([delta_of(i, N) for i in range(count)], [1, 2, 3][:count])
    assert all((mean == found[0][2]).all() for _, _, mean in found)
    assert np.linalg.norm(found[0][2] - expected) < 0.03 * np.linalg.norm(expected)
    return found
