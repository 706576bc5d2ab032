"""Compare the outer loop with torchft's DiLoCo: same seeds, three sites, float32.

    pip install --target FOLDER torchft==0.2.0
    TORCHFT=FOLDER python benchmarks/elastic/oracle.py

Both train the same network with SGD on the same batches. torchft runs its Manager, Lighthouse and
gloo in a process per site. Our sites run the outer loop and the float32 exchange in threads. The
figure is the largest difference of θ_start after any round, over the largest |θ|.
"""

import os
import subprocess
import sys
import tempfile
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.codecs import codec
from orrery.elastic.exchange import exchange
from orrery.elastic.links import PeerLinks
from orrery.elastic.loop import Floats, Fragment, OuterLoop, OuterOptimizer, is_within
from orrery.elastic.types import Epoch, OuterRound, SiteMember
from record import own_words, record

NUM_SITES, NUM_ROUNDS, PHASE, HOST = 3, 8, 5, "127.0.0.1"
CASES = {"DiLoCo": (1, 0), "two fragments": (2, 0), "two fragments, two steps late": (2, 2)}
LIMIT_S = 300.0
WAIT = timedelta(seconds=LIMIT_S)
LAYERS = (0, 2)  # indices in `network` of the modules with weights


def network() -> torch.nn.Sequential:
    torch.manual_seed(1)
    return torch.nn.Sequential(torch.nn.Linear(32, 64), torch.nn.Tanh(), torch.nn.Linear(64, 8))


def loss(net: torch.nn.Module, site: int, step: int) -> torch.Tensor:
    draw = torch.Generator().manual_seed(1000 * site + step)
    batch, target = (torch.randn(16, n, generator=draw) for n in (32, 8))
    return (net(batch) - target).square().mean()


def inner(net: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.05)


def flat(values: Any) -> np.ndarray:
    return torch.cat([each.detach().reshape(-1) for each in values]).numpy().copy()


# torchft


def torchft_site(site: int, lighthouse: str, num_fragments: int, delay: int, out: str) -> None:
    """Train one site, in a process of its own, and write θ_start after each round."""
    sys.path.append(os.environ["TORCHFT"])
    from torchft.local_sgd import DiLoCo
    from torchft.manager import Manager
    from torchft.process_group import ProcessGroupGloo

    net, store = network(), torch.distributed.TCPStore(HOST, 0, is_master=True)
    modules = [net[i] for i in LAYERS] if num_fragments > 1 else [net]
    outer = [torch.optim.SGD(m.parameters(), 0.7, 0.9, nesterov=True) for m in modules]
    manager = Manager(
        ProcessGroupGloo(timeout=WAIT),
        load_state_dict=None,
        state_dict=None,
        min_replica_size=NUM_SITES,
        use_async_quorum=False,
        replica_id=f"site{site}",
        store_addr=HOST,
        store_port=store.port,
        rank=0,
        world_size=1,
        lighthouse_addr=lighthouse,
        init_sync=False,
    )
    optimizer, found = inner(net), []
    options = {"sync_every": PHASE * num_fragments, "fragment_sync_delay": delay}
    with DiLoCo(manager, modules, optimizer, outer, **options) as loop:
        for step in range(1, NUM_ROUNDS * PHASE + 1):
            optimizer.zero_grad()
            loss(net, site, step).backward()
            optimizer.step()
            if step % PHASE == 0:
                each = [p for f in loop._fragments for p in f.original_parameters.values()]
                found.append(flat(each))
    np.save(out, np.stack(found))
    manager.shutdown()


def torchft_thetas(num_fragments: int, delay: int, folder: Path) -> np.ndarray:
    sys.path.append(os.environ["TORCHFT"])
    from torchft.coordination import LighthouseServer

    server = LighthouseServer(bind=f"{HOST}:0", min_replicas=NUM_SITES, join_timeout_ms=2000)
    outs = [str(folder / f"{num_fragments}.{delay}.{site}.npy") for site in range(NUM_SITES)]
    address = f"http://{HOST}:{server.address().rpartition(':')[2]}"
    sites = [
        subprocess.Popen(
            [sys.executable, __file__, str(site), address, str(num_fragments), str(delay), out]
        )
        for site, out in enumerate(outs)
    ]
    codes = [each.wait(LIMIT_S) for each in sites]
    server.shutdown()
    if any(codes):
        raise SystemExit(f"error: torchft's sites ended with {codes}")
    found = [np.load(out) for out in outs]
    if not all(np.array_equal(found[0], each) for each in found):
        raise SystemExit("error: torchft's sites differ")
    return found[0]


# Ours


class NetworkWeights:
    """A network's weights in the order of its layers."""

    def __init__(self, net: torch.nn.Module) -> None:
        self._weights = [each.detach() for each in net.parameters()]
        self.num_parameters = sum(each.numel() for each in self._weights)

    def parts(self, within: Fragment | None = None) -> Any:
        begin = 0
        for weight in self._weights:
            part = slice(begin, begin := begin + weight.numel())
            if is_within(part, within):
                yield part, weight.reshape(-1).numpy()

    def write(self, values: Floats, within: Fragment | None = None) -> None:
        for part, own in self.parts(within):
            own[:] = values[part]


class Meeting:
    """Rounds of sites that all arrive and all commit."""

    def __init__(self, epoch: Epoch) -> None:
        self.epoch, self._barrier = epoch, threading.Barrier(NUM_SITES, timeout=60)

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        return OuterRound(number, self.epoch, (int(number > 0),) * NUM_SITES)

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        self._barrier.wait()
        return True

    def abort(self, outer_round: OuterRound, lost: Any) -> OuterRound:
        raise SystemExit(f"error: lost sites {list(lost)}")


def own_thetas(num_fragments: int, delay: int, links: list[PeerLinks], epoch: Epoch) -> np.ndarray:
    meeting, wire = Meeting(epoch), codec("float32")
    found: list[Floats] = []
    layers = [slice(0, 33 * 64), slice(33 * 64, 33 * 64 + 65 * 8)]
    fragments = [(each,) for each in layers] if num_fragments > 1 else [tuple(layers)]

    def train(site: int) -> None:
        net = nets[site]
        optimizer = inner(net)

        def send(delta: Floats, outer_round: OuterRound, rank: int) -> int:
            buckets = fragments[loop.fragment_of(outer_round.number)]
            return exchange(delta, outer_round, rank, links[site], wire, buckets=buckets).bytes_sent

        nesterov, own = OuterOptimizer(0.7, 0.9, True), epoch.members[site].id
        weights = NetworkWeights(net)
        loop = OuterLoop(nesterov, weights, meeting, send, own, 60.0, fragments=fragments)
        loop.exchange()
        for step in range(1, NUM_ROUNDS * PHASE + 1):
            optimizer.zero_grad()
            loss(net, site, step).backward()
            optimizer.step()
            loop.count(1)
            if delay and step % PHASE == PHASE - delay:
                loop.send()
            elif step % PHASE == 0:
                loop.apply(0.0) if delay else loop.exchange()
                if site == 0:
                    found.append(loop.state.start.copy())

    nets = [network() for _ in range(NUM_SITES)]
    sites = [threading.Thread(target=train, args=(site,)) for site in range(NUM_SITES)]
    for each in sites:
        each.start()
    for each in sites:
        each.join()
    return np.stack(found)


def main() -> None:
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_authority(folder, "oracle")
        files = make_site(folder, "site", [HOST])
        for number, (variant, (num_fragments, delay)) in enumerate(CASES.items()):
            links = [PeerLinks("oracle", files, HOST) for _ in range(NUM_SITES)]
            members = [SiteMember(f"{i:032x}", HOST, each.port) for i, each in enumerate(links)]
            ours = own_thetas(num_fragments, delay, links, Epoch(number + 1, tuple(members)))
            theirs = torchft_thetas(num_fragments, delay, folder)
            for each in links:
                each.close()
            moved = np.abs(ours[-1] - ours[0]).max() / np.abs(ours).max()
            value = float(np.abs(ours - theirs).max() / np.abs(ours).max())
            rows.append({"variant": variant, "value": value, "unit": "", "goal": 1e-6})
            rows[-1] |= {"better": "lower", "rounds": len(ours), "moved": float(moved)}
            print(rows[-1], flush=True)
    record(
        Path(__file__).with_suffix(".json"),
        figure="largest difference of θ between torchft's DiLoCo and ours, over the largest |θ|",
        value=max(row["value"] for row in rows),
        unit="",
        goal=1e-6,
        better="lower",
        rows=rows,
        details={"torchft": "0.2.0", "sites": NUM_SITES, "inner_steps": PHASE},
    )


if __name__ == "__main__":
    if words := own_words(__doc__):
        torch.set_num_threads(1)
        where, at, count, late, out = words
        torchft_site(int(where), at, int(count), int(late), out)
    elif "TORCHFT" not in os.environ:
        raise SystemExit(
            "TORCHFT: unset; type `pip install --target FOLDER torchft==0.2.0`, set it to FOLDER"
        )
    else:
        main()
