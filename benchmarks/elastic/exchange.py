"""Exchange weight changes (Δ) between sites in network namespaces. Compare with the links' rate.

python benchmarks/elastic/exchange.py [WORD]     as root, with iproute2, nftables and /dev/net/tun;
                                                 five minutes on two idle cores

With WORD, measure only rows whose names contain it, and write no record.
"""

import multiprocessing
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / "benchmarks"), str(ROOT / "tests/elastic")]
from networks import PUBLIC, Networks, enter  # noqa: E402

from orrery.elastic import links as links_module  # noqa: E402
from orrery.elastic.certificates import Certificates, make_authority, make_site  # noqa: E402
from orrery.elastic.codecs import codec  # noqa: E402
from orrery.elastic.exchange import exchange  # noqa: E402
from orrery.elastic.links import PeerLinks  # noqa: E402
from orrery.elastic.types import Epoch, OuterRound, SiteMember  # noqa: E402
from record import parser_of, record  # noqa: E402

PORT = 29_000
ROUNDS = 3  # the first opens TCP's windows and is not counted
STREAM_BYTES = 1 << 29


@dataclass(frozen=True)
class Case:
    """`rate`: Mb/s that a site sends at most. `slow`: pairs of sites with their lower Mb/s."""

    sites: int
    rate: int | None
    values: int
    round_trip_ms: int = 0
    loss: float = 0.0
    lanes: int = 0  # 0: the default
    slow: tuple[tuple[int, int, int], ...] = ()
    is_measured: bool = False  # whether sites know the slow pairs' speeds
    codec: str = "int8_block"


MILLION, SLOW = 1_000_000, ((0, 1, 10),)
LOSSLESS = {
    f"2 sites, {name}, {ms} ms": Case(2, rate, values, ms)
    for name, rate, values in (("100 Mb/s", 100, 32 * MILLION), ("1 Gb/s", 1000, 512 * MILLION))
    for ms in (1, 10, 100)
}
CASES = {
    **LOSSLESS,
    "2 sites, 100 Mb/s, 10 ms, 0.1 % loss": Case(2, 100, 32 * MILLION, 10, 0.001),
    "2 sites, 1 Gb/s, 10 ms, 0.1 % loss": Case(2, 1000, 512 * MILLION, 10, 0.001),
    **{
        f"2 sites, 1 Gb/s, 100 ms, {num} lanes": Case(2, 1000, 512 * MILLION, 100, lanes=num)
        for num in (1, 2, 8)  # 4 is the default
    },
    "2 sites, no limit": Case(2, None, 128 * MILLION),
    "2 sites, no limit, float32": Case(2, None, 32 * MILLION, codec="float32"),
    "4 sites, 1 GB, 1 Gb/s": Case(4, 1000, 250 * MILLION),
    "3 sites, a slow pair": Case(3, 100, 3 * MILLION, slow=SLOW),
    "3 sites, a slow pair over the third": Case(3, 100, 3 * MILLION, slow=SLOW, is_measured=True),
    "4 sites, a slow pair": Case(4, 100, 3 * MILLION, slow=SLOW),
    "4 sites, a slow pair outside the ring": Case(4, 100, 3 * MILLION, slow=SLOW, is_measured=True),
}


@contextmanager
def network(case: Case) -> Iterator[list[tuple[str, str]]]:
    """Yield the namespace and the address of each site."""
    with Networks("orx") as networks:
        if case.round_trip_ms:
            found = [
                (networks.empty(site + 1), f"{PUBLIC}.{site + 1}") for site in range(case.sites)
            ]
            script = Path(__file__).with_name("delay.py")
            command = [sys.executable, str(script), str(case.round_trip_ms / 2)]
            command += [f"{space}={address}" for space, address in found]
            pipe = subprocess.PIPE
            with subprocess.Popen(command, stdin=pipe, stdout=pipe) as hub:
                assert hub.stdout is not None and hub.stdout.readline() == b"ready\n"
                shape(networks, case, found)
                yield found
                assert hub.stdin is not None
                hub.stdin.close()
        else:
            found = [
                (networks.public(site + 1), f"{PUBLIC}.{site + 1}") for site in range(case.sites)
            ]
            shape(networks, case, found)
            yield found


def shape(networks: Networks, case: Case, found: list[tuple[str, str]]) -> None:
    for space, _ in found:
        if case.rate is not None:
            networks.limit(space, case.rate, max(50, case.round_trip_ms))
        if case.loss:
            networks.lose(space, case.loss)
    for a, b, rate in case.slow:
        for one, two in ((a, b), (b, a)):
            networks.limit_edge(found[one][0], two + 1, rate)


def speeds(case: Case) -> tuple[tuple[int, ...], ...]:
    if not case.is_measured:
        return ()
    rows = [[(case.rate or 0) * (a != b) for b in range(case.sites)] for a in range(case.sites)]
    for a, b, rate in case.slow:
        rows[a][b] = rows[b][a] = rate
    return tuple(map(tuple, rows))


def site(
    rank: int,
    case: Case,
    places: list[tuple[str, str]],
    certificates: Certificates,
    barrier: Any,
    out: Connection,
) -> None:
    space, address = places[rank]
    enter(space)
    links_module.QUIET_S = 1e6  # measure no speeds
    lanes = {"num_lanes": case.lanes} if case.lanes else {}
    links = PeerLinks("run", certificates, address, PORT, **lanes)
    members = tuple(SiteMember(f"{i:032x}", each, PORT) for i, (_, each) in enumerate(places))
    epoch = Epoch(1, members, speeds(case))
    delta = np.random.default_rng(rank).standard_normal(case.values, dtype=np.float32)
    stats = []
    for number in range(ROUNDS):
        barrier.wait()
        outer_round = OuterRound(number, epoch, (1,) * case.sites)
        stats.append(exchange(delta, outer_round, rank, links, codec(case.codec), "ring"))
    out.send((min(each.seconds for each in stats[1:]), stats[-1].bytes_sent, hash(delta.tobytes())))
    barrier.wait()
    links.close()


def measure(case: Case) -> dict[str, Any]:
    os.environ["PYTHONHASHSEED"] = "0"
    context = multiprocessing.get_context("spawn")
    barrier = context.Barrier(case.sites)
    with tempfile.TemporaryDirectory() as folder, network(case) as places:
        make_authority(Path(folder), "run")
        certificates = make_site(Path(folder), "site")
        pipes = [context.Pipe() for _ in places]
        processes = [
            context.Process(
                target=site, args=(r, case, places, certificates, barrier, end), daemon=True
            )
            for r, (_, end) in enumerate(pipes)
        ]
        for process, (_, end) in zip(processes, pipes, strict=True):
            process.start()
            end.close()  # so that `recv` ends if the site dies
        found = [ours.recv() for ours, _ in pipes]
        for process in processes:
            process.join()
    assert len({digest for _, _, digest in found}) == 1, "the sites differ"
    seconds, num_bytes = max(each[0] for each in found), found[0][1]
    achieved = 8 * num_bytes / seconds / 1e6
    row = {"seconds": seconds, "bytes_sent": num_bytes, "Mb/s": achieved}
    return row | {"value": achieved / (case.rate or 4000)}


def one_stream() -> float:
    """Return the Gb/s of one TLS stream over loopback between two processes."""
    with tempfile.TemporaryDirectory() as folder:
        make_authority(Path(folder), "run")
        files = make_site(Path(folder), "site")
        listener = socket.create_server(("127.0.0.1", 0))
        process = multiprocessing.get_context("spawn").Process(
            target=_send, args=(listener.getsockname(), files)
        )
        process.start()
        sock, _ = listener.accept()
        with files.server().wrap_socket(sock, server_side=True) as tls:
            view, left, begin_s = memoryview(bytearray(1 << 20)), STREAM_BYTES, time.monotonic()
            while left and (count := tls.recv_into(view)):
                left -= count
            seconds = time.monotonic() - begin_s
        process.join()
        listener.close()
    return 8 * STREAM_BYTES / seconds / 1e9


def _send(place: tuple[str, int], files: Certificates) -> None:
    with files.client().wrap_socket(socket.create_connection(place)) as tls:
        block = bytes(1 << 17)
        for _ in range(STREAM_BYTES // len(block)):
            tls.sendall(block)


def cipher_rate() -> float:
    """Return the GB/s of AES-256-GCM on one core, by openssl, in records of TLS's size."""
    command = ["openssl", "speed", "-seconds", "2", "-bytes", "16384", "-evp", "aes-256-gcm"]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    found = re.search(r"^AES-256-GCM\s+([0-9.]+)k", said, re.MULTILINE)
    assert found is not None, said
    return float(found[1]) / 1e6


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("word", nargs="?", default="")
    word = parser.parse_args().word
    rows = []
    for name, case in CASES.items():
        if word in name:
            rows.append({"variant": name, **measure(case)})
            print(rows[-1], flush=True)
    if word:
        return
    cipher, stream = cipher_rate(), one_stream()
    by_name = {row["variant"]: row for row in rows}
    record(
        Path(__file__).with_suffix(".json"),
        figure="Payload over an encrypted ring of 2 sites, smallest share of links without loss",
        value=min(by_name[name]["value"] for name in LOSSLESS),
        unit="of the rate",
        goal=0.9,
        better="higher",
        details={
            "codec": "int8_block",
            "share of 'no limit'": "of 4 Gb/s each way",
            "loss": "of packets as large as TCP makes them (TSO)",
            "AES-256-GCM, one core, GB/s": cipher,
            "bound of two cores by the cipher, Gb/s each way": 8 * 2 * cipher / 4,
            "one TLS stream over loopback, Gb/s": stream,
            "bound of two cores by streams, Gb/s each way": stream / 2,
        },
        rows=rows,
    )


if __name__ == "__main__":
    main()
