"""Slurm as this project sees it: jobs and their states, asked for with its own commands. Pure parsing, thin calls.

- `squeue` first, which needs no accounting and is never late; `sacct` for jobs that the controller has forgotten.
- Every state of Slurm's documentation is mapped to one of ours; one that is not is an `OrreryError`, never a guess.
- A heterogeneous job is its leader: the leader's id cancels, requeues and reports all of its components.
- A job's name tells the run, where it is, and the stage: the same run in two checkouts follows, or cancels, no job of the other. Sites may
  write over a comment, and a working folder may be spelled in several ways.
"""

import os
import re
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from orrery.manifest.errors import OrreryError
from orrery.runtime.scratch import place

T = TypeVar("T")
JobState = Literal["waiting", "running", "done", "lost", "failed"]

STATES: dict[str, JobState] = {
    # not started, or to be started again
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "REQUEUE_FED": "waiting", "REQUEUE_HOLD": "waiting",
    "RESV_DEL_HOLD": "waiting", "SPECIAL_EXIT": "waiting", "POWER_UP_NODE": "waiting",
    "RUNNING": "running", "COMPLETING": "running", "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
    "SUSPENDED": "running", "STOPPED": "running", "UPDATE_DB": "running",
    "COMPLETED": "done",
    # ended by the cluster: with requeue Slurm puts the job back by itself, a moment later
    "NODE_FAIL": "lost", "PREEMPTED": "lost",
    "BOOT_FAIL": "failed", "CANCELLED": "failed", "DEADLINE": "failed", "FAILED": "failed", "OUT_OF_MEMORY": "failed", "TIMEOUT": "failed",
    "REVOKED": "failed", "LAUNCH_FAILED": "failed", "RECONFIG_FAIL": "failed", "EXPEDITING": "waiting",
}  # fmt: skip

COMMAND_S = 60.0
REQUEUE_PAUSES_S = (2.0,) * 4


@dataclass(frozen=True)
class SlurmJob:
    """One job (of a heterogeneous one, its leader). `word` is Slurm's own state; `name` is `job_name` of its stage."""

    id: str
    name: str
    slurm_state: str
    reason: str
    nodes: str
    elapsed: str
    left: str

    @property
    def state(self) -> JobState:
        return state_of(self.slurm_state, self.id)

    @property
    def stage(self) -> str:
        return self.name.rpartition(".")[2]


def state_of(word: str, job: str) -> JobState:
    """Our word for Slurm's (`CANCELLED by 1000` is CANCELLED); raises `OrreryError` for one that Slurm's documentation does not have."""
    first = word.split()[0].rstrip("+") if word.split() else ""
    if first not in STATES:
        raise OrreryError(
            f"Slurm says that job {job} is {word!r}, a state unknown here; add it to orrery/launcher/slurm.py"
        )
    return STATES[first]


KEPT = re.compile(r"SLURM_(CONF|JOB_ID|JOBID|CLUSTER_NAME|HET_SIZE|JOB_ID_HET_GROUP_\d+)")


def clean_environment(env: Mapping[str, str], inside: bool = False) -> dict[str, str]:
    """Without what Slurm's commands would read as options: those of a job that we happen to be in (a shell of `salloc`), or of our own.

    `inside` keeps what says which job we are in, for its steps.
    """
    ours = {
        name
        for name in env
        if re.match(r"SLURM_|SBATCH_|SRUN_|SALLOC_", name) and not (inside and KEPT.fullmatch(name))
    }
    return {name: value for name, value in env.items() if name not in ours or name == "SLURM_CONF"}


def call(*command: str) -> str:
    """Standard output of one of Slurm's commands, which Ctrl-C does not reach; raises `OrreryError` with what it said."""
    env = clean_environment(os.environ)
    try:
        done = subprocess.run(
            command,
            env=env,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            start_new_session=True,
        )
    except FileNotFoundError:
        raise OrreryError(
            f"{command[0]}: there is no such command; Slurm's client tools must be on PATH (see `orrery doctor`)"
        ) from None
    except subprocess.TimeoutExpired:
        raise OrreryError(
            f"{command[0]}: no answer within {COMMAND_S:.0f} s; is the controller up (`scontrol ping`)?"
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()] or [
            f"exit code {done.returncode}"
        ]
        said = re.sub(rf"^({command[0]}: )?((error|fatal): )?", "", lines[-1])
        raise OrreryError(f"{command[0]}: {said} (`orrery doctor` looks at Slurm)")
    return done.stdout


_FORMAT = "%i|%j|%T|%r|%N|%M|%L"


def parse_queue(text: str) -> list[SlurmJob]:
    """Leaders only: `12` and `12+0` are one, `12+1` belongs to it."""
    jobs = []
    for line in text.splitlines():
        fields = line.split("|")
        if len(fields) != 7:
            continue
        if leader := _leader(fields[0]):
            jobs.append(SlurmJob(leader, *fields[1:]))
    return jobs


def _leader(job: str) -> str:
    """The id of a plain job or of a heterogeneous one's first component; empty for its others."""
    leader, _, component = job.partition("+")
    return leader if component in ("", "0") else ""


def user_jobs() -> list[SlurmJob]:
    """This user's jobs that wait or run."""
    return parse_queue(call("squeue", "--me", "--noheader", f"--format={_FORMAT}"))


def job_name(run_dir: Path, stage: str) -> str:
    """`<run folder>.<place>.<stage>`."""
    return f"{run_dir.name}.{place(run_dir)}.{stage}"


def run_jobs(run_dir: Path) -> list[SlurmJob]:
    """This user's jobs of the run in this folder that wait or run."""
    return [job for job in user_jobs() if job.name == job_name(run_dir, job.stage)]


def slurm_states(ids: Iterable[str]) -> dict[str, str]:
    """Slurm's own state of each job that Slurm still knows."""
    ids = list(ids)
    if not ids:
        return {}
    try:
        listed = parse_queue(
            call(
                "squeue",
                "--states=all",
                "--noheader",
                f"--format={_FORMAT}",
                f"--jobs={','.join(ids)}",
            )
        )
    except OrreryError as error:
        if "Invalid job id" not in str(error):
            raise
        listed = []  # of several ids squeue leaves out those it forgot; a single one it calls invalid
    found = {job.id: job.slurm_state for job in listed}
    forgotten = [id for id in ids if id not in found]
    return {**found, **_accounted(forgotten)} if forgotten else found


def _accounted(ids: Sequence[str]) -> dict[str, str]:
    try:
        rows = call("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(ids))
    except OrreryError:
        return {}  # a site without accounting: what squeue has forgotten stays unknown
    return parse_accounting(rows)


def parse_accounting(text: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for line in text.splitlines():
        job, _, word = line.partition("|")
        if word and (leader := _leader(job)):
            found[leader] = word
    return found


def lost_nodes(job: str) -> list[str]:
    """Nodes that made an earlier start of this job fail, as accounting has it; empty where it does not say."""
    try:
        text = call("sacct", "-X", "-D", "-n", "-P", "-o", "FailedNode", "-j", job)
    except OrreryError:
        return []
    names = {
        name
        for line in text.splitlines()
        for name in hostnames(line.strip())
        if line.strip() not in ("", "None", "None assigned")
    }
    return sorted(names)


def unusable_nodes(names: Sequence[str]) -> list[str]:
    """Those of `names` that Slurm calls down, drained, failing or silent."""
    if not names:
        return []
    try:
        text = call(
            "sinfo",
            "-h",
            "-N",
            "-n",
            ",".join(names),
            "-t",
            "down,drain,draining,fail,no_respond",
            "-o",
            "%N",
        )
    except OrreryError:
        return []
    return sorted(set(text.split()))


def hostnames(listed: str) -> list[str]:
    """`node[1-3],x` as names, in order; Slurm's own expansion where there are brackets."""
    if "[" not in listed:
        return [name for name in listed.split(",") if name]
    return call("scontrol", "show", "hostnames", listed).split()


def cancel(ids: Sequence[str]) -> None:
    if ids:
        call("scancel", *ids)


def requeue(job: str) -> None:
    """Back into the queue with a job, which ends what runs of it. Tried several times: a controller that is busy must not cost a run."""
    retry(lambda: call("scontrol", "requeue", job), REQUEUE_PAUSES_S)


def retry(
    ask: Callable[[], T],
    pauses_s: Iterable[float],
    worth: Callable[[OrreryError], object] = lambda error: True,
) -> T:
    """What `ask` gives, asked again after each pause where its error is `worth` that; the last error is raised."""
    for pause_s in pauses_s:
        try:
            return ask()
        except OrreryError as error:
            if not worth(error):
                raise
        time.sleep(pause_s)
    return ask()


def is_preempted(job: str) -> bool:
    """Whether Slurm takes this running job's nodes away; it says so when the grace time begins."""
    found = re.search(r"PreemptTime=(\S+)", call("scontrol", "show", "job", "--oneliner", job))
    return found is not None and found[1] not in ("None", "Unknown")


def seconds(left: str) -> float | None:
    """`1-02:03:04`, `2:03:04`, `03:04` in seconds; None for UNLIMITED, INVALID, NOT_SET."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest
