"""Run one site of a real log in a process, without training.

python store_site.py FOLDER SITE NAME JOIN OPTIONS: prints a JSON line for every event.
`options`: founders, skew_s (of the wall clock), dead_s, pause_s (between rounds).
"""

import json
import signal
import sys
import time
import uuid
from pathlib import Path

import msgspec

from orrery.elastic.certificates import Certificates
from orrery.elastic.etcd_site import EtcdSite
from orrery.elastic.ledger import Behind
from orrery.elastic.membership import RoundPace
from orrery.elastic.types import NO_ROUND, LeaseLost, SiteMember, Terms

TERMS = Terms(manifest="m" * 64, code="c" * 40, codec="float32", memory_bytes=1 << 30)


def say(**event: object) -> None:
    print(json.dumps(event), flush=True)


def main() -> None:
    folder, who, name, join, text = sys.argv[1:]
    options = {"founders": 1, "skew_s": 0.0, "dead_s": 10.0, "pause_s": 0.05} | json.loads(text)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a background shell ignores it
    real = time.time
    time.time = lambda: real() + options["skew_s"]
    site = EtcdSite(
        "run",
        Path(folder) / who,
        name,
        Certificates.of(Path(folder), who),
        join,
        pace=RoundPace(founders=options["founders"], suspect_s=2.0),
        heartbeat_s=options.get("heartbeat_s", 2.0),
        dead_s=options["dead_s"],
    )
    with site:
        if site.server is not None and site.server.is_running:
            say(event="etcd", pid=site.server.pid)
        life = 0
        while True:
            try:
                run_rounds(site, who, life, options["pause_s"])
            except LeaseLost as error:
                say(event="fenced", reason=str(error), at_s=time.monotonic())
                life += 1


def run_rounds(site: EtcdSite, who: str, life: int, pause_s: float) -> None:
    row = site.log.read().ledger.committed
    held = (row.number, row.digest) if row else (NO_ROUND, "")
    terms = msgspec.structs.replace(TERMS, round=held[0], digest=held[1])
    member = SiteMember(uuid.uuid4().hex, "127.0.0.1", 1)
    site.membership.join(member, terms)
    say(event="joined", site=member.id, life=life)
    number = held[0] + 1
    while True:
        try:
            found = site.membership.begin_round(number, 10, 600.0)
        except Behind as behind:
            say(event="behind", committed=behind.committed)
            number = behind.committed + 1
            continue
        while not site.membership.commit(found, f"digest {number}"):
            found = site.membership.begin_round(number, 10, 600.0)
        say(
            event="round",
            number=number,
            epoch=found.epoch.number,
            members=[each.id for each in found.epoch.members],
            weights=found.weights,
            at_s=time.monotonic(),
        )
        number += 1
        time.sleep(pause_s)  # the inner steps


if __name__ == "__main__":
    main()
