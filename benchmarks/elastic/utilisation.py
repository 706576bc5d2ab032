"""Simulate the utilisation of INTELLECT-1's sites (arXiv 2412.01152) from measured parts.

    python benchmarks/elastic/utilisation.py

A round has H inner steps, the arithmetic of the outer step, an exchange and a copy of the state.
The exchange takes the bytes of a ring at the slowest link's rate times the measured share, every
hop's delay once (all pieces travel at once), and the log's round trips. With streaming fragments
it runs beside the inner steps, so only its excess over them counts. ASSUMED lists what no script
measured. Rows also have the paper's values.
"""

import json
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.elastic.loop import Floats, Fragment, OuterLoop, OuterOptimizer
from orrery.elastic.snapshots import copy_state
from orrery.elastic.types import Epoch, OuterRound, SiteMember
from record import parser_of, record

ASSUMED = {
    "parameters": 10.2e9,
    "sites": 14,
    "ranks_of_a_site": 8,
    "inner_s": 38 * 60.0,  # 100 inner steps (published)
    "log_round_trips": 4,
    "lost_sites_a_day": 1,
    "state_bytes_a_parameter": 16,  # θ, momentum, inner state, all float32
}
# scenario: slowest link (Gb/s) in the published 0.5–4, assumed round trip (s), published share (%)
SCENARIOS = {
    "USA": (4.0, 0.06, 95.7),
    "USA and EU": (1.0, 0.14, 85.6),
    "global": (0.5, 0.22, 83.0),
}
SAMPLE = 1 << 24  # parameters in the measured arithmetic


class Alone:
    """The weights and coordinator of a site, whose rounds need no second process."""

    num_parameters = SAMPLE

    def __init__(self) -> None:
        self.values = np.random.default_rng(1).standard_normal(SAMPLE, dtype=np.float32)

    def parts(self, within: Fragment | None = None) -> Iterator[tuple[slice, Floats]]:
        yield slice(0, SAMPLE), self.values

    def write(self, values: Floats, within: Fragment | None = None) -> None:
        self.values[:] = values

    def begin_round(self, number: int, tokens: int, deadline_s: float) -> OuterRound:
        members = tuple(SiteMember(each, "", 0) for each in "ab")
        return OuterRound(number, Epoch(1, members), (1, 1))

    def commit(self, outer_round: OuterRound, digest: str) -> bool:
        return True

    def abort(self, outer_round: OuterRound, lost: object) -> OuterRound:
        raise AssertionError("no exchange breaks here")


def arithmetic_s() -> float:
    """Return CPU seconds per parameter for Δ, norms, digest and outer step."""
    site = Alone()
    optimizer = OuterOptimizer(0.7, 0.9, True)
    loop = OuterLoop(optimizer, site, site, lambda delta, outer_round, rank: 0, "a", 1.0)
    times = []
    for _ in range(3):
        site.values += np.float32(1e-3)
        begin_s = time.process_time()
        loop.exchange()
        times.append(time.process_time() - begin_s)
    return min(times) / SAMPLE


def copy_s() -> float:
    """Return CPU seconds per byte for the copy into shared memory."""
    state = np.ones(SAMPLE, dtype=np.float32).data
    times = []
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        for number in range(3):
            begin_s = time.process_time()
            copy_state(Path(folder), number, "", {"theta": state})
            times.append(time.process_time() - begin_s)
    return min(times) / state.nbytes


def read(name: str) -> dict:
    return json.loads(Path(__file__).with_name(f"{name}.json").read_text())


def main() -> None:
    parser_of(__doc__).parse_args()
    codec = next(row for row in read("codecs")["rows"] if row["variant"] == "int8_block native")
    measured = {
        "codec_ratio": codec["ratio"],
        "share_of_link": read("exchange")["value"],
        "lost_site_s": read("failover")["value"],
        "arithmetic_s_a_parameter": arithmetic_s(),
        "copy_s_a_byte": copy_s(),
    }
    sites, inner_s = int(ASSUMED["sites"]), ASSUMED["inner_s"]
    own = ASSUMED["parameters"] / ASSUMED["ranks_of_a_site"]
    num_bytes = 2 * (sites - 1) / sites * ASSUMED["parameters"] * 4 / measured["codec_ratio"]
    outer_s = own * measured["arithmetic_s_a_parameter"]
    saved_s = own * ASSUMED["state_bytes_a_parameter"] * measured["copy_s_a_byte"]
    losses_s = measured["lost_site_s"] * ASSUMED["lost_sites_a_day"] * inner_s / 86400
    rows = []
    for name, (gigabits, round_trip_s, published) in SCENARIOS.items():
        sent_s = num_bytes * 8 / (gigabits * 1e9 * measured["share_of_link"])
        delay_s = (sites - 1 + ASSUMED["log_round_trips"]) * round_trip_s
        exchange_s = sent_s + delay_s
        for kind, counted_s in (
            ("one exchange", exchange_s),
            ("streaming", max(0.0, exchange_s - inner_s)),
        ):
            share = 100 * inner_s / (inner_s + counted_s + outer_s + saved_s + losses_s)
            rows.append(
                {
                    "variant": f"{name}, {gigabits:g} Gb/s, {kind}",
                    "value": share,
                    "unit": "%",
                    "goal": 95.0,
                    "better": "higher",
                    "published": published,
                    "exchange_s": exchange_s,
                }
            )
            print(f"{rows[-1]['variant']}: {share:.1f} % (published: {published} %)")
    parts = {"bytes_sent": num_bytes, "outer_step_s": outer_s, "copy_s": saved_s}
    for title, values in (("assumed", ASSUMED), ("measured", measured), ("a round", parts)):
        print(f"{title}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
    record(
        Path(__file__).with_suffix(".json"),
        figure="time in inner steps of 10B parameters on INTELLECT-1's slowest links, simulated",
        value=min(row["value"] for row in rows if row["variant"].endswith("one exchange")),
        unit="%",
        goal=95.0,
        better="higher",
        rows=rows,
        details={"assumed": ASSUMED, "measured": measured, "a_round": parts},
    )


if __name__ == "__main__":
    main()
