"""Measure the time that Slurm and containers add to the demo.

- The pipeline runs as local processes and on the simulated cluster of the same machine. The cluster
  is up and idle (`ORRERY_CLUSTER_KEEP=1 make test-cluster` leaves it so).
- Measured per stage: its own seconds (`DONE`), seconds between Snakemake's messages and the
  launcher, and seconds from the launcher's start to the first role's health file.
- For the RL stage also: seconds from Snakemake's message to the first request in an engine.
- `snakemake -n` of the run over many nodes, on the login node: the median of three.

    sudo .venv/bin/python benchmarks/cluster/overhead.py     # on a quiet machine, about 6 minutes
"""

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.launcher.pipeline import checked_in
from orrery.manifest.identity import find_workspace
from orrery.runtime.metrics import read

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record
from workspace import linked

RUN, MANY_NODES = "reverse_text", "glm5_run"
DRY_RUNS, DRY_RUN_GOAL_S = 3, 3.0
LOOK_S = 0.02
CLUSTER = ("bash", str(ROOT / "tests/cluster/cluster.sh"))
CHECKOUT = (
    Path(os.environ.get("ORRERY_CLUSTER_ROOT", "/srv/orrery-cluster"))
    / "users"
    / os.environ.get("ORRERY_CLUSTER_USER", "orrery")
    / "orrery"
)
SAYS = (
    "--quiet",
    "host",
    "reason",
)  # print the rules to be timed, which the local profile hides
BEGINS, ENDS = re.compile(r"Job \d+: (\w+) of "), re.compile(r"Finished jobid: \d+ \(Rule: (\w+)\)")


@dataclass
class StageTimes:
    """Times of one stage, as `time.time()`."""

    begins_s: float = 0.0
    started_s: float = 0.0
    alive_s: float = 0.0
    ended_s: float = 0.0
    ends_s: float = 0.0

    def seconds(self) -> dict[str, float]:
        return {
            "stage": self.ended_s - self.started_s,
            "to the launcher's start": self.started_s - self.begins_s,
            "launcher's start to the first role's sign of life": self.alive_s - self.started_s,
            "launcher's end to Snakemake's word": self.ends_s - self.ended_s,
        }


@dataclass
class TimedPipeline:
    """A finished pipeline. `wall_s` includes the start of Snakemake."""

    wall_s: float
    stages: dict[str, StageTimes]
    to_first_request_s: float


def run_pipeline(
    argv: Sequence[str], cwd: Path, run_dir: Path, env: Mapping[str, str]
) -> TimedPipeline:
    """Run the pipeline and record the times of its stages. `run_dir` must not exist."""
    stages: dict[str, StageTimes] = {}
    finished = threading.Event()
    looks_on = threading.Thread(target=_look_on, args=(run_dir, stages, finished))
    start_s, lines = time.time(), []
    with subprocess.Popen(
        argv,
        cwd=cwd,
        env=env,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        looks_on.start()
        try:
            for line in process.stdout or ():
                lines.append(line)
                if begins := BEGINS.match(line):
                    stages[begins[1]] = StageTimes(begins_s=time.time())
                elif (ends := ENDS.match(line)) and ends[1] in stages:
                    stages[ends[1]].ends_s = time.time()
        finally:
            finished.set()
            looks_on.join()
    wall_s = time.time() - start_s
    if process.returncode:
        raise SystemExit(
            f"error: {' '.join(argv)} ended with code {process.returncode}:\n{''.join(lines[-30:])}"
        )
    for name, stage in stages.items():
        done = json.loads((run_dir / "stages" / name / "DONE").read_text())
        stage.started_s, stage.ended_s = done["started_s"], done["ended_s"]
        if not stage.begins_s < stage.started_s < stage.alive_s < stage.ended_s < stage.ends_s:
            raise SystemExit(f"error: {name} was not seen from its beginning to its end: {stage}")
    generating = [
        span["start_s"]
        for span in read(run_dir / "metrics/orchestrator.0.spans.jsonl")
        if span["name"] == "generate" and span["stage"] == "rl"
    ]
    return TimedPipeline(wall_s, stages, min(generating) - stages["rl"].begins_s)


def _look_on(run_dir: Path, stages: Mapping[str, StageTimes], finished: threading.Event) -> None:
    """Set `alive_s` when the first role of a stage writes its health file."""
    while not finished.wait(LOOK_S):
        for name, stage in list(stages.items()):
            if not stage.alive_s and any((run_dir / "stages" / name / "health").glob("*.json")):
                stage.alive_s = time.time()


def run_here(folder: str) -> TimedPipeline:
    """Run the demo as local processes of this environment, in a fresh checkout."""
    env = {name: value for name, value in os.environ.items() if name != "ORRERY_SITE"}
    env["PATH"] = f"{Path(sys.executable).parent}:{env['PATH']}"
    with tempfile.TemporaryDirectory() as made:
        workspace = linked(Path(made))
        return run_pipeline(
            ("snakemake", "--profile", "local", *SAYS, "--", RUN),
            workspace,
            workspace / "runs" / folder,
            env,
        )


def run_on_cluster(folder: str) -> TimedPipeline:
    """Run the demo as jobs of the cluster's user. Remove an earlier run of the same name."""
    as_user("rm", "-rf", f"runs/{folder}")
    argv = (*CLUSTER, "user", "snakemake", "--profile", "slurm", *SAYS, "--", RUN)
    return run_pipeline(argv, ROOT, CHECKOUT / "runs" / folder, os.environ)


def as_user(*argv: str) -> str:
    """Return the output of a command of the cluster's user on the login node."""
    done = subprocess.run((*CLUSTER, "user", *argv), capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(
            f"error: {' '.join(argv)} on the simulated cluster: "
            f"{done.stderr.strip() or done.stdout.strip()}"
        )
    return done.stdout


def dry_runs_s() -> list[float]:
    """Return the wall seconds of each dry run. Exit if one does not show the RL stage."""
    times_s = []
    for _ in range(DRY_RUNS):
        start_s = time.perf_counter()
        shown = as_user("snakemake", "--profile", "slurm", "-n", MANY_NODES)
        times_s.append(time.perf_counter() - start_s)
        if ["rl", "1"] not in [line.split() for line in shown.splitlines()]:
            raise SystemExit(
                f"error: `snakemake -n {MANY_NODES}` on the cluster did not show its RL "
                f"stage:\n{shown[-2000:]}"
            )
    return times_s


def rows(where: str, pipeline: TimedPipeline) -> list[dict[str, Any]]:
    """Return the rows. `around`: seconds between Snakemake's messages, less those of the stage."""
    own_s = {name: one.ended_s - one.started_s for name, one in pipeline.stages.items()}
    around_s = {
        name: one.ends_s - one.begins_s - own_s[name] for name, one in pipeline.stages.items()
    }
    found = {
        "pipeline": pipeline.wall_s,
        "all stages": sum(own_s.values()),
        "around all stages": sum(around_s.values()),
        **own_s,
        **{f"around {name}": seconds for name, seconds in around_s.items()},
        "rl submitted to first request": pipeline.to_first_request_s,
    }
    return [
        {"variant": f"{where}: {what}", "value": value, "goal": None}
        for what, value in found.items()
    ]


def main() -> None:
    parser_of(__doc__).parse_args()
    if os.geteuid() != 0:
        raise SystemExit(
            "error: the simulated cluster needs root; type `sudo .venv/bin/python "
            "benchmarks/cluster/overhead.py`"
        )
    if subprocess.run((*CLUSTER, "status"), capture_output=True).returncode:
        raise SystemExit(
            "error: the simulated cluster is not up; type `ORRERY_CLUSTER_KEEP=1 make test-cluster`"
        )
    if jobs := as_user("squeue", "--noheader"):
        raise SystemExit(
            f"error: the simulated cluster is not idle, so nothing can be timed there:\n{jobs}"
        )
    subprocess.run(("bash", str(ROOT / "tests/cluster/copy.sh")), check=True)
    load = os.getloadavg()[0]
    (folder,) = checked_in(find_workspace(ROOT)).folders[RUN]
    here, cluster, dry_s = run_here(folder), run_on_cluster(folder), dry_runs_s()
    dry_run = {
        "variant": f"snakemake -n {MANY_NODES} at the login",
        "value": statistics.median(dry_s),
        "goal": DRY_RUN_GOAL_S,
    }
    record(
        Path(__file__).with_suffix(".json"),
        figure=f"{RUN}: what jobs in containers add to local processes",
        value=cluster.wall_s - here.wall_s,
        unit="s",
        goal=None,
        better="lower",
        details={
            "by stage": {
                where: {name: stage.seconds() for name, stage in pipeline.stages.items()}
                for where, pipeline in (("local", here), ("cluster", cluster))
            },
            "dry runs": dry_s,
            "load_average": load,
        },
        rows=[*rows("local", here), *rows("cluster", cluster), dry_run],
    )


if __name__ == "__main__":
    main()
