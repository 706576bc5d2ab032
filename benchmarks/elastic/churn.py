"""Train at up to eight sites that come and go, each in a network namespace. Needs root.

    python benchmarks/elastic/churn.py calm --rounds 1000      four steady sites, simulated
    python benchmarks/elastic/churn.py --minutes 30           100 events, and the record

The calm run uses the same data, learner, codec and outer step in one process, and writes to
build/churn. The churn run's loss is compared with it at equal tokens. A step takes four stories,
because with one the order of the data alone changes the loss by more than the goal. Checks:
- The rounds go on. No site ends by itself.
- All sites of a round report the digest in the coordinators' log.
- No document is trained twice: no two phases share a place in the data, and all match the log.
Events are drawn with a fixed seed. An event waits while it would leave less than a majority of the
coordinators, or fewer than NUM_STEADY sites. Trainers have a lower priority than etcd.
"""

import argparse
import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import accumulate, islice
from pathlib import Path
from statistics import mean, median
from typing import Any

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from elastic.diloco import as_columns, learn, make_learner, nats, outer_round
from elastic.failover import BRIDGES, COUNT, HOSTS, ip, network
from elastic.text import story, write
from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.codecs import codec
from orrery.elastic.etcd_log import EtcdClient, EtcdLog, EtcdRefused, SiteServices
from orrery.elastic.ledger import CommittedRound, ShardMap
from orrery.elastic.loop import Floats, OuterOptimizer, OuterState
from orrery.elastic.snapshots import published, read_header
from orrery.elastic.types import ElasticError
from orrery.manifest.identity import canonical_json, load, run_dir, run_id
from orrery.manifest.publish import sha256_of_data, write_atomic
from orrery.manifest.schema import Manifest
from orrery.runtime.run_directory import SHARED_MEMORY, memory_prefix, remove_memory, weights_path
from orrery.tasks.chat import Renderer
from orrery.trainer.elastic import LearnerWeights
from orrery.trainer.learner import learning_rate_factor
from orrery.trainer.sft_data import open_texts, text_order
from record import ROOT, committed, record
from workspace import ONE_THREAD, linked

RUN, FOLDER, PORT = "elastic_churn", ROOT / "build/churn", 29400
NUM_STORIES, NUM_SHARDS, NUM_CALM, NUM_STEADY, NUM_JUDGED = 1_200_000, 12, 4, 3, 256
KINDS = {"join": 34, "leave": 16, "kill": 17, "pause": 14, "cut": 19}
PAUSE_S, CUT_S, POLL_S, SETTLE_S = 60.0, (15.0, 60.0), 0.5, 180.0
LOSS_EVERY, NUM_LOSSES = 5, 6  # rounds between losses, and losses in the mean that is compared
Row = dict[str, Any]


def make_manifest(data: Path) -> Manifest:
    """Return the run elastic_text with a tiny network, constant learning rate and no end."""
    run = load(ROOT / "manifests/elastic_text.json")
    assert run.trainer.elastic is not None
    spec = {
        "min_sites": 4,
        "max_sites": 12,
        "inner_steps": 20,
        "quorum": 2,
        "grace_s": 10.0,
        "dead_after_s": 15.0,
    }
    elastic = run.trainer.elastic.model_copy(update=spec)
    saved = run.trainer.checkpoint.model_copy(update={"interval_steps": 2000})
    trainer = run.trainer.model_copy(update={"elastic": elastic, "checkpoint": saved})
    texts = run.sft.data.model_copy(
        update={"sha256": sha256_of_data(data), "num_shards": NUM_SHARDS}
    )
    steps = {"num_steps": 100_000, "examples_per_batch": 4, "schedule": run.trainer.schedule}
    sft = run.sft.model_copy(update=steps | {"data": texts})
    rl = run.stages.rl.model_copy(update={"num_steps": elastic.inner_steps})
    stages = run.stages.model_copy(update={"sft": sft, "rl": rl})
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    model = run.model.model_copy(update={**sizes, "head_dim": 16})
    parts = {"name": RUN, "model": model, "trainer": trainer, "stages": stages}
    return run.model_copy(update=parts)


class Judge:
    """Computes the loss of weights on stories of another seed, with the run's tokenizer."""

    def __init__(self, run: Manifest, tokenizer: Path) -> None:
        assert run.sft.data.kind == "text"
        data = run.sft.data.model_copy(update={"path": str(FOLDER / run.sft.data.path)})
        self.texts = open_texts(run, "data", data, tokenizer)
        renderer = Renderer(tokenizer, run.model.vocab_size)
        end = renderer.stop_token_ids[0]
        every = [[end, *renderer.encode(story(n, 1001)), end] for n in range(NUM_JUDGED)]
        self.batches = [as_columns(every[i : i + 32]) for i in range(0, NUM_JUDGED, 32)]
        self.learner = make_learner(run, 1)
        self.weights = LearnerWeights(self.learner)

    def loss(self, theta: Floats) -> float:
        self.weights.write(theta)
        return nats(self.learner, self.batches)


def simulate(run: Manifest, judge: Judge, num_rounds: int) -> Iterator[tuple[int, float]]:
    """Yield (tokens, loss) of a run with NUM_CALM permanent sites."""
    spec, elastic = run.sft, run.trainer.elastic
    assert elastic is not None and run.model.init.kind == "random"
    learners = [make_learner(run, run.model.init.seed) for _ in range(NUM_CALM)]
    held = [LearnerWeights(learner) for learner in learners]
    orders = [text_order(judge.texts.documents(k), run.seed, k, 0) for k in range(NUM_CALM)]
    outer = OuterOptimizer(elastic.outer.lr, elastic.outer.momentum, elastic.outer.nesterov)
    state = OuterState(held[0].num_parameters)
    held[0].read(state.start)
    num_tokens = 0
    for number in range(1, num_rounds + 1):
        for learner, order in zip(learners, orders, strict=True):
            for _ in range(elastic.inner_steps):
                batch = judge.texts.columns(islice(order, spec.examples_per_batch))
                num_tokens += batch.num_tokens
                step = learner.step + 1
                learn(learner, batch, learning_rate_factor(spec.schedule, step, spec.num_steps))
        outer_round(held, state, codec(elastic.codec), outer)
        if number % LOSS_EVERY == 0:
            yield num_tokens, judge.loss(state.start)


@dataclass
class Site:
    index: int
    state: str = "down"  # or up, pause, cut
    process: "subprocess.Popen[bytes] | None" = None
    until_s: float = 0.0  # end of a pause or cut
    rows: list[Row] = field(default_factory=list)
    is_settled: bool = False  # has finished a round since its start
    num_read: int = 0

    @property
    def name(self) -> str:
        return f"site{self.index}"

    @property
    def address(self) -> str:
        return f"{HOSTS[self.index]}:{PORT}"

    @property
    def folder(self) -> Path:
        return FOLDER / self.name

    def pids(self) -> list[int]:
        found = subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True)
        return [int(each) for each in found.stdout.split()]

    def signal(self, number: int) -> None:
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    def raise_etcd(self) -> None:
        """Reset the CPU priority of the site's etcd, which inherits the site's `nice`."""
        for pid in self.pids():
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text() == "etcd\n":
                    for thread in Path(f"/proc/{pid}/task").iterdir():
                        os.setpriority(os.PRIO_PROCESS, int(thread.name), 0)


def prepared() -> Manifest:
    """Write data and manifest, and run the stage init in build/churn/calm."""
    data, folder = FOLDER / "datasets/elastic_text.jsonl", FOLDER / "calm"
    shutil.rmtree(folder, ignore_errors=True)
    linked(folder, "jsonnet", "locks", "packages", "pyproject.toml")
    (FOLDER / "manifests").mkdir(exist_ok=True)
    for name in ("datasets", "manifests"):
        (folder / name).symlink_to(FOLDER / name)
    write(data, NUM_STORIES)
    path = FOLDER / f"manifests/{RUN}.json"
    path.write_bytes(canonical_json(make_manifest(data)))
    init = [sys.executable, "-m", "orrery.launcher.cli", "run", RUN, "init"]
    subprocess.run(init, cwd=folder, check=True)
    return load(path)


class Churn:
    """The sites and what they have reported."""

    def __init__(self) -> None:
        self.manifest, self.certificates = prepared(), FOLDER / "certificates"
        shutil.rmtree(self.certificates, ignore_errors=True)
        self.certificates.mkdir()
        make_authority(self.certificates, run_id(self.manifest)[:12])
        make_site(self.certificates, "test")
        self.sites = [Site(index) for index in range(COUNT)]
        for site in self.sites:
            self._checkout(site)
        files = Certificates.of(self.certificates, "test")
        self.client = EtcdClient([each.address for each in self.sites], files, 20.0)
        self.log = EtcdLog(self.client, run_id(self.manifest), 2.0, 10.0, SiteServices())
        self.judge = Judge(self.manifest, weights_path(self.run_dir(self.sites[0]), "init"))
        self.events: list[tuple[float, str, str]] = []
        self.failures: list[str] = []
        self.losses: dict[int, float] = {}
        self.newest, self.newest_s, self.longest_s = 0, time.monotonic(), 0.0
        self.begin_s = time.monotonic()

    def _checkout(self, site: Site) -> None:
        """Make a site's workspace from that of the calm run, which has finished the stage init."""
        make_site(self.certificates, site.name, [HOSTS[site.index]])
        shutil.rmtree(site.folder, ignore_errors=True)
        shutil.copytree(FOLDER / "calm", site.folder, symlinks=True)
        (site.folder / "site.toml").write_text(ONE_THREAD)

    def run_dir(self, site: Site) -> Path:
        return run_dir(site.folder / "runs", self.manifest)

    # Events

    def start(self, site: Site) -> None:
        others = [each for each in self.sites if each.state == "up" and each is not site]
        known = next((each for each in others if each.is_settled), others[0] if others else site)
        command = [sys.executable, "-m", "orrery.launcher.cli", "join", RUN, known.address]
        command += ["--listen", site.address, "--name", site.name]
        command += ["--certificates", str(self.certificates)]
        with (site.folder / "join.log").open("ab") as log:
            site.process = subprocess.Popen(
                ["ip", "netns", "exec", site.name, "nice", "-n", "10", *command],
                cwd=site.folder,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        site.state, site.is_settled = "up", False

    def stop(self, site: Site, number: int) -> None:
        site.state = "down"
        if number == signal.SIGKILL:
            site.signal(number)
        elif site.process is not None:
            site.process.send_signal(number)

    def do(self, kind: str, site: Site, draw: random.Random) -> None:
        now_s = time.monotonic()
        self.events.append((now_s - self.begin_s, kind, site.name))
        print(f"{now_s - self.begin_s:.0f} s: {kind} {site.name}, round {self.newest}", flush=True)
        match kind:
            case "join":
                self.start(site)
            case "leave":
                self.stop(site, signal.SIGTERM)
            case "kill":
                self.stop(site, signal.SIGKILL)
            case "pause":
                site.signal(signal.SIGSTOP)
                site.state, site.until_s = kind, now_s + PAUSE_S
            case "cut":
                ip("link", "set", f"side{site.index}", "master", BRIDGES[1])
                site.state, site.until_s = kind, now_s + draw.uniform(*CUT_S)

    def restore(self, now_s: float) -> None:
        """End the pauses and cuts that are over."""
        for site in self.sites:
            if site.state == "pause" and now_s >= site.until_s:
                site.signal(signal.SIGCONT)
                site.state, site.is_settled = "up", False
            elif site.state == "cut" and now_s >= site.until_s:
                ip("link", "set", f"side{site.index}", "master", BRIDGES[0])
                site.state, site.is_settled = "up", False

    def fits(self, kind: str, site: Site) -> bool:
        """Return whether the event leaves a majority of coordinators and NUM_STEADY sites."""
        if kind == "join":
            is_over = site.process is None or site.process.poll() is not None
            return site.state == "down" and is_over and not site.pids()
        steady = [each for each in self.sites if each.state == "up" and each.is_settled]
        if site.state != "up" or len([each for each in steady if each is not site]) < NUM_STEADY:
            return False
        try:
            voters = self.voters()
        except (ElasticError, EtcdRefused):
            return False
        good = voters & {each.address for each in self.sites if each.state == "up"}
        return 2 * len(good - {site.address}) > len(voters)

    def voters(self) -> set[str]:
        members = self.client.call("/v3/cluster/member/list", {}, 2.0)["members"]
        urls = [each["clientURLs"][0] for each in members if each.get("clientURLs")]
        return {url.removeprefix("https://") for url in urls}

    # Reports

    def collect(self) -> None:
        """Read new rows. Note the newest round, and sites that ended without an event."""
        now_s = time.monotonic()
        for site in self.sites:
            path = self.run_dir(site) / "metrics/trainer.0.jsonl"
            text = path.read_bytes()[site.num_read :] if path.exists() else b""
            text = text[: text.rfind(b"\n") + 1]
            site.num_read += len(text)
            found = [json.loads(line) for line in text.splitlines()]
            new = [row for row in found if row.get("event") == "round"]
            site.rows += new
            site.is_settled |= bool(new)
            for row in new:
                if row["round"] > self.newest:
                    self.newest = row["round"]
                    self.longest_s = max(self.longest_s, now_s - self.newest_s)
                    self.newest_s = now_s
            if (
                site.state != "down"
                and site.process is not None
                and site.process.poll() is not None
            ):
                site.state = "down"
                self.failures.append(f"{site.name} ended with {site.process.returncode}")
                print(self.failures[-1], flush=True)
            site.raise_etcd()
        if self.newest // LOSS_EVERY > max(self.losses, default=0) // LOSS_EVERY:
            self._note_loss()

    def _note_loss(self) -> None:
        steady = [each for each in self.sites if each.state == "up" and each.is_settled]
        for site in steady:
            folder = SHARED_MEMORY / f"{memory_prefix(self.run_dir(site))}site-0"
            with contextlib.suppress(OSError, ElasticError, IndexError):
                newest = published(folder)[-1]
                number = read_header(newest).round
                theta = np.fromfile(newest / "theta", dtype=np.float32)
                self.losses[number] = self.judge.loss(theta)
                return

    def until_round(self, number: int, limit_s: float) -> None:
        end_s = time.monotonic() + limit_s
        while self.newest < number:
            if time.monotonic() > end_s:
                raise SystemExit(f"error: no round {number} in {limit_s:g} s; read {FOLDER}")
            time.sleep(POLL_S)
            self.collect()

    def settle(self) -> None:
        """End pauses and cuts, and wait until every site that is up has finished a round."""
        self.restore(float("inf"))
        for site in self.sites:
            site.is_settled = False
        end_s = time.monotonic() + SETTLE_S
        while any(each.state == "up" and not each.is_settled for each in self.sites):
            if time.monotonic() > end_s:
                late = [s.name for s in self.sites if s.state == "up" and not s.is_settled]
                self.failures.append(f"{', '.join(late)} finished no round in {SETTLE_S:g} s")
                return
            time.sleep(POLL_S)
            self.collect()

    def close(self) -> None:
        for site in self.sites:
            site.signal(signal.SIGCONT)
            self.stop(site, signal.SIGKILL)
            remove_memory(memory_prefix(self.run_dir(site)))


def check_digests(churn: Churn, log: dict[int, CommittedRound]) -> list[str]:
    """Return rounds in which a site reports another digest, epoch or weights than the log."""
    return [
        f"round {row['round']} of {site.name}"
        for site in churn.sites
        for row in site.rows
        if (row["digest"], row["epoch"], row["weights"])
        != (
            log[row["round"]].digest,
            log[row["round"]].epoch,
            [*log[row["round"]].weights],
        )
    ]


def check_documents(churn: Churn, log: dict[int, CommittedRound]) -> list[str]:
    """Return training phases that share documents, or whose documents differ from the log."""
    spec, elastic = churn.manifest.sft, churn.manifest.trainer.elastic
    assert elastic is not None
    num_documents, seen = elastic.inner_steps * spec.examples_per_batch, Counter[tuple[int, int]]()
    rows: dict[int, list[Row]] = defaultdict(list)
    for site in churn.sites:
        for row in site.rows:
            rows[row["round"]].append(row)
            seen[row["shard"], row["start"]] += 1
    found = [
        f"shard {shard} from {start}, {n} times" for (shard, start), n in seen.items() if n > 1
    ]
    shards = ShardMap([0] * NUM_SHARDS)
    for number, one in sorted(log.items()):
        shards.finish_round(one.members, num_documents * (number > 0))
        held = {each[:8]: shard for each, shard in shards.holders.items()}
        for row in rows[number]:
            if (shard := held.get(row["own"])) is None or shard != row["shard"]:
                found.append(f"round {number}: site {row['own']} has shard {row['shard']}")
            elif shards.trained[shard] != row["start"]:
                found.append(f"round {number}: shard {shard} begins at {row['start']}")
    last = max(shards.trained)
    if last + num_documents > NUM_STORIES // NUM_SHARDS:
        found.append(f"a shard is over after {last} documents")
    return found


@contextlib.contextmanager
def sites() -> Iterator[Churn]:
    os.environ["ORRERY_COMMIT"] = committed()  # equal for all sites, even after a new commit
    torch.set_num_threads(1)
    with network():
        churn = Churn()
        try:
            yield churn
        finally:
            churn.close()


def calm(num_rounds: int) -> None:
    torch.set_num_threads(1)
    run, losses = prepared(), []
    judge = Judge(run, weights_path(run_dir(FOLDER / "calm/runs", run), "init"))
    for num_tokens, loss in simulate(run, judge, num_rounds):
        losses.append((num_tokens, loss))
        found = {"losses": losses, "commit": committed()}
        write_atomic(FOLDER / "calm.json", json.dumps(found).encode())
        print(f"calm run, {num_tokens} tokens: loss {loss:.4f}", flush=True)


def churn_for(churn: Churn, minutes: float, num_events: int, seed: int) -> None:
    draw, begin_s = random.Random(seed), time.monotonic()
    churn.begin_s = churn.newest_s = begin_s
    kinds, weights = list(KINDS), list(KINDS.values())
    while (now_s := time.monotonic()) < begin_s + 60 * minutes:
        churn.collect()
        churn.restore(now_s)
        if now_s >= begin_s + 60 * minutes * (len(churn.events) + 0.5) / num_events:
            kind = draw.choices(kinds, weights)[0]
            for site in draw.sample(churn.sites, COUNT):
                if churn.fits(kind, site):
                    churn.do(kind, site, draw)
                    break
        time.sleep(POLL_S)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode", nargs="?", choices=["calm"])
    parser.add_argument("--rounds", type=int, default=1000)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--events", type=int)
    parser.add_argument("--seed", type=int, default=1)
    told = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: stopped by SIGTERM"))
    if told.mode == "calm":
        calm(told.rounds)
        return
    num_events = told.events or round(100 * told.minutes / 30)
    with sites() as churn:
        for site in churn.sites[:5]:
            churn.start(site)
            time.sleep(2.0)
        churn.until_round(2, SETTLE_S)
        churn_for(churn, told.minutes, num_events, told.seed)
        churn.settle()
        log = {each.number: each for each in churn.log.rounds()}
        forks, twice = check_digests(churn, log), check_documents(churn, log)
    report(churn, log, forks, twice)


def report(
    churn: Churn, log: dict[int, CommittedRound], forks: list[str], twice: list[str]
) -> None:
    calm_file = FOLDER / "calm.json"
    if not calm_file.exists():
        raise SystemExit("error: there is no calm run; type `churn.py calm --rounds 1000` first")
    steady = json.loads(calm_file.read_text())
    tokens, losses = zip(*steady["losses"], strict=True)
    numbers = sorted(log)
    sums = accumulate(sum(log[number].weights) for number in numbers)
    trained = dict(zip(numbers, sums, strict=True))
    compared = [
        {
            "round": number,
            "tokens": trained[number],
            "loss": churn.losses[number],
            "calm": float(np.interp(trained[number], tokens, losses)),
        }
        for number in sorted(churn.losses)
        if tokens[0] <= trained[number] <= tokens[-1]
    ][-NUM_LOSSES:]
    above = [100 * (each["loss"] / each["calm"] - 1) for each in compared]
    details = {
        "events": Counter(kind for _, kind, _ in churn.events),
        "rounds": max(log),
        "epochs": log[max(log)].epoch,
        "sites_median": median(len(each.members) for each in log.values()),
        "compared": compared,
        "failures": churn.failures,
        "other_bits": forks,
        "documents_twice": twice,
        "calm_commit": steady.get("commit"),
    }
    print(json.dumps(details, indent=1))
    if not compared:
        raise SystemExit("error: the calm run has other numbers of tokens; give it more --rounds")
    must_be_none = {
        "sites that ended by themselves": churn.failures,
        "rounds with other bits at a site": forks,
        "phases that share documents": twice,
    }
    rows: list[Row] = [{"variant": "events", "value": len(churn.events), "unit": ""}]
    for name, each in must_be_none.items():
        rows.append({"variant": name, "value": len(each), "unit": "", "goal": 0, "better": "lower"})
    rows.append({"variant": "longest time between rounds", "value": churn.longest_s, "unit": "s"})
    record(
        Path(__file__).with_suffix(".json"),
        figure="loss of sites that come and go above the calm run's at equal tokens",
        value=mean(above),
        unit="%",
        goal=2.0,
        better="lower",
        rows=rows,
        details=details,
    )


if __name__ == "__main__":
    main()
