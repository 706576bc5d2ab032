"""Train the run elastic_text at four sites on this machine: one joins late, one is killed.

    python benchmarks/elastic/demo.py

Every site is a folder build/elastic/<name> with links to this checkout. The script writes
build/elastic/index.html with members, bytes and loss of every round.
"""

import argparse
import html
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from elastic.text import write
from orrery.elastic.certificates import make_authority, make_site
from orrery.manifest.identity import load, run_dir, run_id
from workspace import ONE_THREAD, ROOT, linked

RUN, NAMES, LATE, KILLED = "elastic_text", ("oslo", "lima", "kyoto", "accra"), "accra", "kyoto"
FOLDER = ROOT / "build/elastic"
FIRST_PORT, PORTS = 29400, 10
LIMIT_S, POLL_S = 300.0, 0.5


def checkout(name: str) -> Path:
    """Make a site's workspace, with a separate folder of runs."""
    folder = linked(FOLDER / name, "jsonnet", "locks", "manifests", "packages", "pyproject.toml")
    (folder / "datasets").symlink_to(FOLDER / "datasets")
    (folder / "site.toml").write_text(ONE_THREAD)
    return folder


def address(name: str) -> str:
    return f"127.0.0.1:{FIRST_PORT + PORTS * NAMES.index(name)}"


def start(name: str) -> "subprocess.Popen[bytes]":
    orrery = [sys.executable, "-m", "orrery.launcher.cli"]
    command = [*orrery, "join", RUN, address(NAMES[0]), "--listen", address(name), "--name", name]
    with (FOLDER / f"{name}.log").open("wb") as log:
        return subprocess.Popen(
            [*command, "--certificates", str(FOLDER / "certificates")],
            cwd=FOLDER / name,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def rows(name: str) -> list[dict]:
    """Return the metrics of a site's trainer."""
    manifest = load(ROOT / f"manifests/{RUN}.json")
    path = run_dir(FOLDER / name / "runs", manifest) / "metrics/trainer.0.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def rounds(name: str) -> list[dict]:
    return [row for row in rows(name) if row.get("event") == "round"]


@dataclass(frozen=True)
class Round:
    number: int
    epoch: int
    members: list[str]
    tokens: list[int]  # of each member since its last exchange
    num_bytes: int
    loss: float | None
    is_equal: bool  # whether all sites that report the round have equal weights


def table() -> list[Round]:
    """Return the rounds that the first site has finished."""
    every = {name: {row["round"]: row for row in rounds(name)} for name in NAMES}
    losses = {row["step"]: row["loss"] for row in rows(NAMES[0]) if row.get("loss") is not None}
    return [
        Round(
            number,
            row["epoch"],
            row["names"],
            row["weights"],
            row["num_bytes"],
            losses.get(row["step"]),
            len({found[number]["digest"] for found in every.values() if number in found}) == 1,
        )
        for number, row in sorted(every[NAMES[0]].items())
    ]


class Terminal:
    """Prints each round and event once, with the seconds since the start."""

    def __init__(self) -> None:
        self.begin_s = time.monotonic()
        self.num_rounds = 0

    def say(self, text: str) -> None:
        print(f"{time.monotonic() - self.begin_s:4.0f} s  {text}", flush=True)

    def watch(self, is_over: Callable[[], bool], limit_s: float) -> bool:
        """Print new rounds until `is_over()`. Return False after `limit_s`."""
        end_s = time.monotonic() + limit_s
        while True:
            over = is_over()
            for one in table()[self.num_rounds :]:
                if not over and one.loss is None and one.number > 0:
                    break  # the step's loss is not reported yet
                loss = "" if one.loss is None else f", loss {one.loss:.3f}"
                sites = f"{len(one.members)} sites ({' '.join(sorted(one.members))})"
                sent = f"{one.num_bytes / 1e6:.1f} MB sent by {NAMES[0]}"
                self.say(f"round {one.number}: {sites}, {sent}{loss}")
                self.num_rounds += 1
            if over or time.monotonic() > end_s:
                return over
            time.sleep(POLL_S)


def await_round(number: int, terminal: Terminal, name: str = NAMES[0]) -> None:
    if not terminal.watch(lambda: any(row["round"] >= number for row in rounds(name)), LIMIT_S):
        raise SystemExit(f"error: {name} finished no round {number}; read {FOLDER}/{name}.log")


def page() -> str:
    """Return a page with a line for every round."""
    head = "<tr><th>round<th>epoch<th>members<th>tokens<th>bytes sent<th>loss<th>equal bits"
    lines = []
    for one in table():
        cells = (
            one.number,
            one.epoch,
            " ".join(one.members),
            " · ".join(f"{tokens:,}" for tokens in one.tokens),
            f"{one.num_bytes:,}",
            "" if one.loss is None else f"{one.loss:.3f}",
            "yes" if one.is_equal else "NO",
        )
        lines.append("<tr>" + "".join(f"<td>{html.escape(str(each))}" for each in cells))
    style = "<style>body{font:16px sans-serif}td,th{padding:2px 12px;text-align:left}</style>"
    return f"<title>{RUN}</title>{style}<h1>{RUN}</h1><table>{head}{''.join(lines)}</table>\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__.splitlines()[0]).parse_args()
    shutil.rmtree(FOLDER, ignore_errors=True)
    write(FOLDER / "datasets/elastic_text.jsonl")
    certificates = FOLDER / "certificates"
    certificates.mkdir()
    make_authority(certificates, run_id(load(ROOT / f"manifests/{RUN}.json"))[:12])
    for name in NAMES:
        make_site(certificates, name, ["127.0.0.1"])
        checkout(name)
    print(f"{len(NAMES)} sites make their first weights", flush=True)
    init = [sys.executable, "-m", "orrery.launcher.cli", "run", RUN, "init"]
    for name in NAMES:
        subprocess.run(init, cwd=FOLDER / name, check=True, env=os.environ)
    terminal = Terminal()
    sites = {name: start(name) for name in NAMES if name != LATE}
    terminal.say(f"{', '.join(sites)} start")
    try:
        await_round(1, terminal)
        terminal.say(f"{LATE} joins")
        sites[LATE] = start(LATE)
        await_round(1, terminal, LATE)
        terminal.say(f"{KILLED} is killed")
        os.killpg(sites[KILLED].pid, signal.SIGKILL)
        terminal.watch(lambda: all(one.poll() is not None for one in sites.values()), 2 * LIMIT_S)
        for name, site in sites.items():
            if site.returncode != 0 and name != KILLED:
                how = "did not end" if site.returncode is None else f"ended with {site.returncode}"
                raise SystemExit(f"error: {name} {how}; read {FOLDER}/{name}.log")
    finally:
        for site in sites.values():
            if site.poll() is None:
                site.terminate()
        (FOLDER / "index.html").write_text(page())
    equal = sum(one.is_equal for one in table())
    terminal.say(
        f"{equal} of {terminal.num_rounds} rounds gave all sites the same weights, bit for bit"
    )
    print(f"open {FOLDER.relative_to(ROOT)}/index.html")


if __name__ == "__main__":
    main()
