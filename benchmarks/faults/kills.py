"""Kill processes of the demo at random moments. Check the error messages and the resumed run.

- The layout: two engines behind a router, two trainer ranks, a checkpoint every second step.
- A kill is a SIGKILL of one process. `--seed` draws the order of the victims and the moments.
- Within 15 s the launcher ends and its last line names the victim and the command to type. For a
  killed launcher, `orrery status` prints this line. Then the stage is started again.
- The history of the finished run has every step once and in order, with the batch that was kept.
  Every group is whole, no sample is trained twice. Token versions are within the bound and have the
  digest that the trainer published. Log-probs of trainer and engines agree on equal weights.

    python benchmarks/faults/kills.py                           # 20 kills; 15 minutes on two cores
    python benchmarks/faults/kills.py --kills 3 --out /tmp      # a short trial in all stages
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import TypeVar

import numpy as np
import psutil

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import read
from orrery.runtime.metrics import rows as all_rows
from orrery.wire.columns import read_batch
from record import parser_of, record
from workspace import workspace_with

T = TypeVar("T")

ROOT = Path(__file__).parents[2]
BASE, NAME = "reverse_text_smoke", "kills"
STAGES = ("init", "sft", "rl", "evaluate", "report")
SHORT = ("init", "report")  # stages of a few seconds
NAMED_S = 15.0
LIMIT_S = 300.0  # a run that does not reach the moment of a kill in this time is a defect
NUM_STEPS, INTERVAL = 48, 2
SAME_WEIGHTS = 1e-4
# Children of roles are victims too: the prefix of a victim's name → a word of its command line.
CHILDREN = {"engine core of ": "EngineCore", "vllm-router of ": "router_program"}
OF_RL = (
    *(
        "orchestrator.0",
        "trainer.0",
        "launcher",
        "engine core of inference.0",
        "trainer.1",
        "inference.1",
        "router.0",
    ),
    *(
        "orchestrator.0",
        "launcher",
        "trainer.0",
        "engine core of inference.1",
        "inference.0",
        "vllm-router of router.0",
        "trainer.1",
    ),
    "orchestrator.0",
)
OF_OTHERS = (
    ("init", "trainer.0"),
    ("sft", "trainer.1"),
    ("evaluate", "orchestrator.0"),
    ("evaluate", "launcher"),
    ("report", "report.0"),
)


@dataclass(frozen=True)
class Kill:
    """A kill of `victim`: `after_s` after its start or, if given, after `after_steps` new steps."""

    stage: str
    victim: str
    after_steps: int | None
    after_s: float


def schedule(seed: int, kills: int) -> list[Kill]:
    """Return `kills` kills, spread evenly over the stages and in their order."""
    draw = random.Random(seed)
    victims = [("rl", victim) for victim in draw.sample(OF_RL, len(OF_RL))]
    chosen = [*OF_OTHERS[:2], *victims, *OF_OTHERS[2:]]
    chosen = [chosen[index * len(chosen) // kills] for index in range(kills)]
    found = []
    for stage, victim in chosen:
        is_training = stage == "rl" and draw.random() < 0.7
        after_steps = draw.randint(1, 3) if is_training else None
        found.append(
            Kill(stage, victim, after_steps, draw.uniform(0.0, 1.0 if stage in SHORT else 3.0))
        )
    return found


def manifest() -> Manifest:
    content = json.loads((ROOT / "manifests" / f"{BASE}.json").read_text())
    content["name"] = NAME
    content["trainer"]["checkpoint"]["interval_steps"] = INTERVAL
    content["stages"]["rl"] = {"num_steps": NUM_STEPS}
    content["orchestrator"]["evaluation"] |= {"interval_steps": NUM_STEPS // 2, "num_problems": 32}
    return Manifest.model_validate(content)


class History:
    """The files of a run in `folder`, whose manifest is `what`."""

    def __init__(self, folder: Path, what: Manifest):
        self.folder, self.what = folder, what

    def trained(self, stage: str = "rl") -> list[dict]:
        """Return a row for each trained step, including steps that a later attempt repeated."""
        return [
            row
            for row in all_rows(self.folder / "metrics" / "trainer.0.jsonl")
            if row["stage"] == stage and row.get("event") is None
        ]


class KilledRun(History):
    """A run in its own workspace, started and killed repeatedly."""

    def __init__(self, workspace: Path, what: Manifest):
        super().__init__(workspace_with(workspace, what), what)
        self.workspace = workspace

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        argv = [sys.executable, "-m", "orrery.launcher.cli", *words]
        with open(self.workspace / f"said.{words[0]}", "w") as said:
            return subprocess.Popen(argv, cwd=self.workspace, env=env, stdout=said, stderr=said)

    def said(self, word: str = "run") -> str:
        """Return the output of the newest `orrery run` or `orrery status`."""
        return (self.workspace / f"said.{word}").read_text()

    def last_words(self, word: str = "run") -> str:
        return next(iter(self.said(word).strip().splitlines()[-1:]), "").strip()

    def finish(self, stage: str) -> None:
        begin_s = time.monotonic()
        if self.start("run", NAME, stage).wait():
            raise SystemExit(f"{stage}: was to end well, and did not:\n{self.said()}")
        print(f"{stage}: done after {time.monotonic() - begin_s:.0f} s", flush=True)

    def round(self, kill: Kill) -> dict:
        """Start a stage and kill its victim. Return a row with the last line and the time to it."""
        before = self.attempt()
        launcher = self.start("run", NAME, kill.stage)
        pid = self.wait(launcher, kill, lambda: self.pid(kill.victim, launcher, before))
        if (steps := kill.after_steps) is not None:
            self.wait(launcher, kill, lambda: self.num_trained(before) >= steps)
        time.sleep(kill.after_s)
        if launcher.poll() is not None:
            raise SystemExit(f"{kill}: the stage ended before it:\n{self.said()}")
        trained, family = (
            self.num_trained(before),
            psutil.Process(launcher.pid).children(recursive=True),
        )
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
        killed_s = time.monotonic()
        launcher.wait()
        said = self.ask_status(killed_s) if kill.victim == "launcher" else self.last_words()
        named_s = time.monotonic() - killed_s
        while left := [
            process for process in family if _line(process)
        ]:  # each ends itself after its parent
            if time.monotonic() > killed_s + LIMIT_S:
                raise SystemExit(f"{kill}: left {left}")
            time.sleep(0.1)
        sentence = said.replace(str(self.folder), "RUN")
        row = {
            "stage": kill.stage, "victim": kill.victim, "trained_steps": trained,
            "named_s": round(named_s, 2), "all_gone_s": round(time.monotonic() - killed_s, 2),
            "is_named": is_named(kill.victim, sentence), "sentence": sentence,
        }  # fmt: skip
        print(json.dumps(row), flush=True)
        return row

    def attempt(self) -> int:
        """Return the number of the newest attempt in `status.json`, 0 before the first."""
        try:
            return int(json.loads((self.folder / "status.json").read_text())["attempt"])
        except FileNotFoundError:
            return 0

    def pid(self, victim: str, launcher: subprocess.Popen[bytes], before: int) -> int | None:
        """Return the victim's pid in an attempt after `before`, or None until it has started."""
        if self.attempt() <= before:
            return None
        if victim == "launcher":
            return launcher.pid
        kind = next((kind for kind in CHILDREN if victim.startswith(kind)), "")
        roles = json.loads((self.folder / "status.json").read_text())["roles"]
        pid = next(
            (int(role["pid"]) for role in roles if role["name"] == victim.removeprefix(kind)), None
        )
        if pid is None or not kind:
            return pid
        return next(
            (
                child.pid
                for child in psutil.Process(pid).children(recursive=True)
                if CHILDREN[kind] in " ".join(_line(child))
            ),
            None,
        )

    def num_trained(self, before: int) -> int:
        """Return the number of RL steps that attempts after `before` have trained."""
        return sum(row["attempt"] > before for row in self.trained())

    def wait(self, launcher: subprocess.Popen[bytes], kill: Kill, condition: Callable[[], T]) -> T:
        end_s = time.monotonic() + LIMIT_S
        while not (found := condition()):
            if launcher.poll() is not None or time.monotonic() > end_s:
                raise SystemExit(
                    f"{kill}: did not get there (launcher: {launcher.poll()}):\n{self.said()}"
                )
            time.sleep(0.05)
        return found

    def ask_status(self, killed_s: float) -> str:
        """Return the last line of `orrery status` once it reports that the launcher died."""
        while True:
            self.start("status", NAME).wait()
            if "its launcher died" in self.said("status") or time.monotonic() > killed_s + LIMIT_S:
                return self.last_words("status")


def _line(process: psutil.Process) -> list[str]:
    try:
        return (
            []
            if not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
            else [process.name(), *process.cmdline()]
        )
    except psutil.Error:
        return []


def is_named(victim: str, sentence: str) -> bool:
    """Return whether the sentence names the victim and the command to type."""
    if victim == "launcher":
        named = r"the launcher \(pid \d+\) ended without a message"
    elif victim.startswith("engine core"):
        named = rf"{re.escape(victim.split()[-1])} .*(engine core died|vLLM did not start)"
    elif victim.startswith("vllm-router"):
        named = (
            rf"{re.escape(victim.split()[-1])} .*vllm-router (ended by itself|did not "
            rf"start) \(exit code -9\)"
        )
    else:
        named = rf"{re.escape(victim)} was killed by SIGKILL"
    return re.search(rf"{named}.*; type `.+` to ", sentence) is not None


def checked(run: History, same_weights: float = SAME_WEIGHTS) -> dict:
    """Count lost, repeated and wrong batches of the finished run. All counts should be 0.

    `same_weights`: allowed log-prob difference of trainer and engines with equal weights.
    """
    assert run.what.stages.rl is not None
    num_steps = run.what.stages.rl.num_steps
    counted = {
        row["step"]: row
        for row in read(run.folder / "metrics" / "trainer.0.jsonl")
        if row["stage"] == "rl" and "loss" in row
    }
    batches = {
        row["step"]: row
        for row in read(run.folder / "metrics" / "orchestrator.0.jsonl")
        if row.get("event") == "batch"
    }
    steps = range(1, num_steps + 1)
    lost = len(set(steps) - counted.keys())
    twice, wrong = 0, 0
    digests = published(run, counted)
    wrong += digests.pop("differ")
    groups: Counter[int] = Counter()
    bound, size = (
        run.what.orchestrator.max_off_policy_steps,
        run.what.orchestrator.rollouts_per_batch,
    )
    for step in sorted(counted):
        batch, info = read_batch(run.folder, step)
        is_sampled = batch.token["trained"]
        lost += (
            batch.num_samples != size
            or int(np.count_nonzero(is_sampled)) != counted[step]["num_trained_tokens"]
        )
        groups.update(batch.sample["group_id"].tolist())
        last = set(batch.sample["group_id"].tolist())  # the last batch may end within a group
        versions = batch.token["version"][is_sampled]
        wrong += int(((versions > step - 1) | (versions < step - 1 - bound)).sum())
        wrong += info["digests"] != batches[step]["digests"]
        wrong += sum(
            digests.get(int(version)) != digest for version, digest in info["digests"].items()
        )
        wrong += (counted[step]["logprob_max_abs_diff_same_weights"] or 0.0) > same_weights
    whole = run.what.orchestrator.algorithm.group_size
    twice += sum(max(0, number - whole) for number in groups.values())
    lost += sum(number < whole for group, number in groups.items() if group not in last)
    order = [row["attempt"] for _, row in sorted(counted.items())]
    twice += sum(before > after for before, after in pairwise(order))
    trained = [(row["attempt"], row["step"]) for row in run.trained()]
    twice += len(trained) - len(set(trained))
    return {
        "lost": lost,
        "twice": twice,
        "wrong_versions": wrong,
        "num_samples": groups.total(),
        "num_steps_trained_again": len(trained) - num_steps,
    }


def published(run: History, counted: dict[int, dict]) -> dict:
    """Return the digest of each version in the final history.

    `differ` counts attempts that resumed from weights other than the published weights.
    """
    spans = [
        span
        for span in all_rows(run.folder / "metrics" / "trainer.0.spans.jsonl")
        if span["name"] == "publish" and span["stage"] == "rl"
    ]
    by_attempt = {(span["attempt"], span["step"]): span["digest"] for span in spans}
    first = min(attempt for attempt, _ in by_attempt)
    made = {
        0: by_attempt[first, 0],
        **{step: by_attempt[row["attempt"], step] for step, row in counted.items()},
    }
    begins = {
        attempt: min(step for one, step in by_attempt if one == attempt)
        for attempt, _ in by_attempt
    }
    return {
        **made,
        "differ": sum(by_attempt[attempt, step] != made[step] for attempt, step in begins.items()),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=len(OF_RL) + len(OF_OTHERS))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run, kills = KilledRun(Path(folder), manifest()), schedule(args.seed, args.kills)
        rounds = []
        for stage in STAGES:
            rounds += [run.round(kill) for kill in kills if kill.stage == stage]
            run.finish(stage)
        found = checked(run)
    late = [row for row in rounds if not row["is_named"] or row["named_s"] > NAMED_S]
    print(json.dumps(found), *map(json.dumps, late), sep="\n")
    record(
        args.out / "kills.json",
        figure="faults/kills",
        value=found["lost"] + found["twice"] + found["wrong_versions"] + len(late),
        unit="batches lost or trained twice, wrong versions, and ends not named in time",
        goal=0,
        better="lower",
        details={
            "seed": args.seed, "num_kills": len(rounds), **found, "ends_not_named": len(late),
            "named_limit_s": NAMED_S,
            "slowest_named_s": max(row["named_s"] for row in rounds), "kills": rounds,
        },
    )  # fmt: skip


if __name__ == "__main__":
    main()
