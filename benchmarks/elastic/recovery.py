"""Measure how a new site takes 1 GB of state from two sites at 1 Gb/s, in namespaces. As root.

The first site trains on core 0 (matrix products). Both snapshot servers and the new site share
core 1. θ and momentum come from both sites, the inner optimizer state from one.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from failover import HOSTS, ROOT, network

from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.keeper import KeeperOptions, SnapshotKeeper
from orrery.elastic.snapshots import copy_state, fetch_state, published, read_header

sys.path.insert(0, str(ROOT / "benchmarks"))
from record import own_words, record

PORT, RATE_BYTES = 7300, 125e6
SIZES = {"theta": 250_000_000, "momentum": 250_000_000, "inner": 500_000_000}
CALM_S = 10.0


def donor(index: int, folder: Path) -> None:
    """Serve a snapshot for 90 s, or until the file `over` exists. The first site also trains."""
    own = Path(tempfile.mkdtemp(prefix="donor", dir="/dev/shm"))
    files = Certificates.of(folder, f"site{index}")
    paths = (str(files.authority), str(files.certificate), str(files.key))
    options = KeeperOptions(
        str(own), host=HOSTS[index], port=PORT, certificates=paths, linger_s=0.0
    )
    draws = {name: np.random.default_rng(0 if name != "inner" else index) for name in SIZES}
    parts = {name: memoryview(draws[name].bytes(size)) for name, size in SIZES.items()}
    with SnapshotKeeper(options) as keeper:
        subprocess.run(["taskset", "-pc", "1", str(keeper.process.pid)], check=True, stdout=2)
        begin_s = time.monotonic()
        copy_state(own, 1, "digest", parts)
        copy_s = time.monotonic() - begin_s
        keeper.copied()
        while not published(own):
            time.sleep(0.02)
        print(json.dumps([copy_s, time.monotonic() - begin_s - copy_s]), flush=True)
        matrix, steps, stop = np.ones((384, 384), np.float32), [], time.monotonic() + 90.0
        while time.monotonic() < stop and not (folder / "over").exists():
            if index:
                time.sleep(0.1)
                continue
            began = time.monotonic(), time.thread_time()
            for _ in range(20):
                matrix @ matrix
            steps.append((*began, time.monotonic() - began[0], time.thread_time() - began[1]))
        (folder / f"steps{index}.json").write_text(json.dumps(steps))
    keeper.process.wait()
    subprocess.run(["rm", "-r", str(own)], check=True)


def joiner(folder: Path) -> None:
    files = Certificates.of(folder, "site2")
    peers = [f"{host}:{PORT}" for host in HOSTS[:2]]
    with tempfile.TemporaryDirectory(dir="/dev/shm") as into:
        begin_s = time.monotonic()
        place = fetch_state(lambda: peers, lambda: (1, "digest"), Path(into), files, 0.0)
        end_s = time.monotonic()
        size = sum(part.num_bytes for part in read_header(place).parts.values())
    print(json.dumps([begin_s, end_s, size, time.process_time()]), flush=True)


def start(index: int, core: int, *words: object) -> "subprocess.Popen[str]":
    inside = ["ip", "netns", "exec", f"site{index}", "taskset", "-c", str(core)]
    command = [*inside, "env", "OMP_NUM_THREADS=1", "OPENBLAS_NUM_THREADS=1", sys.executable]
    return subprocess.Popen([*command, __file__, *map(str, words)], stdout=-1, text=True)


def main() -> None:
    with network(), tempfile.TemporaryDirectory() as text:
        folder = Path(text)
        make_authority(folder, "run")
        for index in range(3):
            make_site(folder, f"site{index}")
        shape = "qdisc add dev side2 root tbf rate 1gbit burst 512kb latency 50ms"
        subprocess.run(["tc", *shape.split()], check=True)
        donors = [start(i, i, "donor", i, folder) for i in (0, 1)]
        ready = [json.loads(each.stdout.readline()) for each in donors if each.stdout]
        time.sleep(CALM_S)
        taken = start(2, 1, "joiner", folder)
        begin_s, end_s, size, joiner_s = json.loads(taken.communicate()[0])
        time.sleep(CALM_S)
        (folder / "over").touch()
        for each in donors:
            each.wait()
        steps = np.array(json.loads((folder / "steps0.json").read_text()))
    during = (steps[:, 0] >= begin_s) & (steps[:, 0] < end_s)
    slower = {
        kind: 100 * float(np.median(steps[during, at]) / np.median(steps[~during, at]) - 1)
        for kind, at in (("wall", 2), ("processor", 3))
    }
    rows = [
        {
            "variant": "share of the link's rate",
            "value": size / (end_s - begin_s) / RATE_BYTES,
            "unit": "",
        },
        {
            "variant": "slow-down of a site's step, wall time",
            "value": slower["wall"],
            "unit": "%",
            "goal": 2.0,
            "better": "lower",
        },
        {"variant": "… processor time", "value": slower["processor"], "unit": "%"},
        {"variant": "processor time of the joiner", "value": joiner_s, "unit": "s"},
        {"variant": "training blocked by the copy", "value": ready[0][0], "unit": "s"},
        {"variant": "hashed and published after", "value": ready[0][1], "unit": "s"},
    ]
    for row in rows:
        print(row)
    record(
        Path(__file__).with_suffix(".json"),
        figure="elastic/recovery",
        value=end_s - begin_s,
        unit="s",
        goal=None,
        better="lower",
        rows=rows,
        details={"state_bytes": size, "bound_s": size / RATE_BYTES, "load": os.getloadavg()},
    )


if __name__ == "__main__":
    match own_words(__doc__):
        case ["donor", index, folder]:
            donor(int(index), Path(folder))
        case ["joiner", folder]:
            joiner(Path(folder))
        case _:
            main()
