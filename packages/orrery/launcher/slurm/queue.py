"""Submit a stage as a Slurm job, and read, requeue or cancel a user's jobs.

- Each node group is a job component. Several components form a heterogeneous job.
- Job names contain a hash of the run folder's path, so they differ between checkouts.
"""

import math
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from orrery.launcher.site import Site, Slurm
from orrery.manifest.errors import OrreryError
from orrery.manifest.plan import NodeGroup, StagePlan
from orrery.manifest.publish import sha256
from orrery.manifest.schema import Hardware
from orrery.runtime.run_directory import log_path, place

T = TypeVar("T")
JobState = Literal["waiting", "running", "ending", "done", "lost", "failed"]

STATES: dict[str, JobState] = {
    # Slurm will start or restart the job
    "PENDING": "waiting", "CONFIGURING": "waiting", "REQUEUED": "waiting", "EXPEDITING": "waiting",
    "REQUEUE_FED": "waiting", "REQUEUE_HOLD": "waiting", "RESV_DEL_HOLD": "waiting",
    "SPECIAL_EXIT": "waiting", "POWER_UP_NODE": "waiting",
    "RUNNING": "running", "SIGNALING": "running", "STAGE_OUT": "running", "RESIZING": "running",
    "SUSPENDED": "running", "STOPPED": "running", "UPDATE_DB": "running",
    # Slurm ends the job's processes, and then forgets or requeues the job
    "COMPLETING": "ending",
    "COMPLETED": "done",
    # Slurm will requeue the job soon
    "NODE_FAIL": "lost", "PREEMPTED": "lost",
    "BOOT_FAIL": "failed", "CANCELLED": "failed", "DEADLINE": "failed", "FAILED": "failed",
    "OUT_OF_MEMORY": "failed", "TIMEOUT": "failed", "REVOKED": "failed", "LAUNCH_FAILED": "failed",
    "RECONFIG_FAIL": "failed",
}  # fmt: skip

COMMAND_S = 60.0
CANCEL_S, CANCEL_POLL_S = 20.0, 0.5
REQUEUE_PAUSES_S = (2.0,) * 4


@dataclass(frozen=True)
class SlurmJob:
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


def state_of(slurm_state: str, job: str) -> JobState:
    first = slurm_state.split()[0].rstrip("+") if slurm_state.split() else ""
    if first not in STATES:
        raise OrreryError(
            f"Slurm says that job {job} is {slurm_state!r}, an unknown state. "
            "Add it to orrery/launcher/slurm/queue.py"
        )
    return STATES[first]


KEPT = re.compile(r"SLURM_(CONF|JOB_ID|JOBID|CLUSTER_NAME|HET_SIZE|JOB_ID_HET_GROUP_\d+)")


def clean_environment(env: Mapping[str, str], inside: bool = False) -> dict[str, str]:
    """Return `env` without Slurm's variables. If `inside` a job, keep those that srun needs."""

    def is_kept(name: str) -> bool:
        if name == "SLURM_CONF" or not re.match(r"SLURM_|SBATCH_|SRUN_|SALLOC_", name):
            return True
        return inside and KEPT.fullmatch(name) is not None

    return {name: value for name, value in env.items() if is_kept(name)}


def call(*command: str, script: str | None = None) -> str:
    program = command[0]
    try:
        done = subprocess.run(
            command, env=clean_environment(os.environ), capture_output=True, text=True,
            input=script, timeout=COMMAND_S, start_new_session=True,
        )  # fmt: skip
    except FileNotFoundError:
        raise OrreryError(
            f"{program}: not found. Put Slurm's client tools on PATH, and type `orrery doctor`"
        ) from None
    except subprocess.TimeoutExpired:
        raise OrreryError(
            f"{program}: no answer within {COMMAND_S:.0f} s. "
            "Type `scontrol ping` to check Slurm's controller"
        ) from None
    if done.returncode:
        lines = [line.strip() for line in done.stderr.splitlines() if line.strip()]
        last = lines[-1] if lines else f"exit code {done.returncode}"
        said = re.sub(rf"^({program}: )?((error|fatal): )?", "", last)
        raise OrreryError(f"{program}: {said}. Type `orrery doctor` to check Slurm")
    return done.stdout


_FORMAT = "%i|%j|%T|%r|%N|%M|%L"


def parse_queue(text: str) -> list[SlurmJob]:
    rows = (line.split("|") for line in text.splitlines())
    return [
        SlurmJob(leader, *row[1:]) for row in rows if len(row) == 7 and (leader := _leader(row[0]))
    ]


def _leader(job: str) -> str:
    leader, _, component = job.partition("+")
    return leader if component in ("", "0") else ""


def user_jobs() -> list[SlurmJob]:
    return parse_queue(call("squeue", "--me", "--noheader", f"--format={_FORMAT}"))


def job_name(run_dir: Path, stage: str) -> str:
    return f"{run_dir.name}.{place(run_dir)}.{stage}"


def run_jobs(run_dir: Path) -> list[SlurmJob]:
    return [job for job in user_jobs() if job.name == job_name(run_dir, job.stage)]


def slurm_states(ids: Iterable[str]) -> dict[str, str]:
    ids = list(ids)
    if not ids:
        return {}
    options = ("--states=all", "--noheader", f"--format={_FORMAT}", f"--jobs={','.join(ids)}")
    try:
        listed = parse_queue(call("squeue", *options))
    except OrreryError as error:
        if "Invalid job id" not in str(error):
            raise
        listed = []  # squeue fails if its only id is unknown
    found = {job.id: job.slurm_state for job in listed}
    forgotten = [id for id in ids if id not in found]
    return {**found, **_accounted(forgotten)} if forgotten else found


def _accounted(ids: Sequence[str]) -> dict[str, str]:
    try:
        rows = call("sacct", "-X", "-n", "-P", "-o", "JobID,State", "-j", ",".join(ids))
    except OrreryError:
        return {}  # the site has no accounting
    return parse_accounting(rows)


def parse_accounting(text: str) -> dict[str, str]:
    rows = (line.partition("|") for line in text.splitlines())
    return {leader: state for job, _, state in rows if state and (leader := _leader(job))}


def lost_nodes(job: str) -> list[str]:
    try:
        text = call("sacct", "-X", "-D", "-n", "-P", "-o", "FailedNode", "-j", job)
    except OrreryError:
        return []
    lines = {line.strip() for line in text.splitlines()} - {"", "None", "None assigned"}
    return sorted({name for line in lines for name in hostnames(line)})


def unusable_nodes(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    states = "down,drain,draining,fail,no_respond"
    try:
        text = call("sinfo", "-h", "-N", "-n", ",".join(names), "-t", states, "-o", "%N")
    except OrreryError:
        return []
    return sorted(set(text.split()))


def hostnames(listed: str) -> list[str]:
    if "[" not in listed:
        return [name for name in listed.split(",") if name]
    return call("scontrol", "show", "hostnames", listed).split()


def cancel(ids: Sequence[str]) -> None:
    """End the launchers of running jobs by SIGTERM, then cancel all jobs.

    Launchers end first, because a cancelled job cannot start the srun step that removes scratch.
    """
    if not ids:
        return
    try:
        with suppress(OrreryError):  # scancel fails if no job runs
            call("scancel", "--batch", "--signal=TERM", "--state=RUNNING", *ids)
            limit_s = time.monotonic() + CANCEL_S
            while time.monotonic() < limit_s and _any_runs(ids):
                time.sleep(CANCEL_POLL_S)
    finally:  # cancel also after a second Ctrl-C
        call("scancel", *ids)


def _any_runs(ids: Sequence[str]) -> bool:
    return "running" in {state_of(state, id) for id, state in slurm_states(ids).items()}


def requeue(job: str) -> None:
    retry(lambda: call("scontrol", "requeue", job), REQUEUE_PAUSES_S)


def retry(
    attempt: Callable[[], T],
    pauses_s: Iterable[float],
    is_worth: Callable[[OrreryError], object] = lambda error: True,
) -> T:
    for pause_s in pauses_s:
        try:
            return attempt()
        except OrreryError as error:
            if not is_worth(error):
                raise
        time.sleep(pause_s)
    return attempt()


def is_preempted(job: str) -> bool:
    found = re.search(r"PreemptTime=(\S+)", call("scontrol", "show", "job", "--oneliner", job))
    return found is not None and found[1] not in ("None", "Unknown")


def seconds(left: str) -> float | None:
    """Parse a time such as `1-02:03:04`, `2:03:04` or `03:04`. For other texts, return None."""
    found = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)", left.strip())
    if found is None:
        return None
    days, hours, minutes, rest = (int(part or 0) for part in found.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + rest


# Submission

IN_JOB = "ORRERY_SLURM"  # environment variable that marks Orrery's jobs
MEMORY_MB = 6000  # minimum memory of a job per node
LAUNCHER_CPUS = 2  # minimum cores of a job per node


@dataclass(frozen=True)
class Component:
    group: NodeGroup
    gpus: int
    cpus: int
    memory_mb: int


def components(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> list[Component]:
    return [_component(hardware, plan, group, slurm) for group in plan.groups]


def _component(hardware: Hardware, plan: StagePlan, group: NodeGroup, slurm: Slurm) -> Component:
    devices = devices_per_node(plan, group)
    if hardware.accelerator == "cpu":
        gpus, cpus = 0, max(hardware.devices_per_node, devices)
    else:
        gpus, cpus = devices, math.ceil(slurm.cpus_per_node * devices / hardware.devices_per_node)
    cpus = min(slurm.cpus_per_node, max(cpus, LAUNCHER_CPUS))
    share_mb = slurm.memory_per_node_mb * cpus // slurm.cpus_per_node
    return Component(group, gpus, cpus, min(slurm.memory_per_node_mb, max(MEMORY_MB, share_mb)))


def devices_per_node(plan: StagePlan, group: NodeGroup) -> int:
    processes = (plan.by_node.get(node, ()) for node in nodes(group))
    return max(one.first_device + one.num_devices for each in processes for one in each)


def nodes(group: NodeGroup) -> range:
    return range(group.first_node, group.first_node + group.num_nodes)


def gres(slurm: Slurm, count: int) -> str:
    return f"gpu:{slurm.gpu_type}:{count}" if slurm.gpu_type else f"gpu:{count}"


def where(slurm: Slurm, partition: str = "") -> list[str]:
    account = [f"--account={slurm.account}"] if slurm.account else []
    return [f"--partition={partition or slurm.partition}", *account]


def sbatch_options(hardware: Hardware, plan: StagePlan, slurm: Slurm) -> str:
    parts = []
    for number, one in enumerate(components(hardware, plan, slurm)):
        options = [
            *where(slurm, "" if one.gpus else slurm.cpu_partition),
            f"--time={slurm.time_limit_min}",
            f"--nodes={one.group.num_nodes}",
            "--ntasks-per-node=1",
            f"--cpus-per-task={one.cpus}",
            f"--mem={one.memory_mb}M",
            *([f"--gres={gres(slurm, one.gpus)}"] if one.gpus else []),
            *(["--requeue", f"--signal=B:USR1@{slurm.warning_s}"] if number == 0 else []),
            *slurm.extra,
        ]
        parts.append(shlex.join(options))
    return " : ".join(parts)


def batch_job(
    run_dir: Path, stage: str, options: str, shell_command: str, site: Site, root: Path
) -> tuple[list[str], str | None]:
    """Return (sbatch command, stdin). `stdin`: the script from the site's template, or None."""
    path = shlex.quote(str(Path(sys.executable).parent))
    modules = site.containers.modules if site.containers else ()
    load = f"module load {shlex.join(modules)} && " if modules else ""
    inner = f'{load}export PATH={path}:"$PATH" {IN_JOB}=1 && exec {shell_command}'
    lines = () if site.slurm is None else site.slurm.pre_run
    if lines:
        inner = "\n".join(["set -e", *lines, inner])
    shell = "-lc" if modules or lines else "-c"  # only login shells define `module`
    # Ignore SIGUSR1, which is for the launcher and would kill the shell.
    command = f"trap '' USR1; exec bash {shell} {shlex.quote(inner)}"
    folder = Path(str(run_dir.resolve()).replace("%", "%%"))  # Slurm expands % in --output
    argv = [
        *("sbatch", "--parsable", f"--job-name={job_name(run_dir, stage)}"),
        *(f"--output={log_path(folder, 'slurm.%j')}", "--open-mode=append"),
        f"--chdir={root}",
    ]
    if site.slurm is None or not site.slurm.template:
        return [*argv, *shlex.split(options), f"--wrap={command}"], None
    fields = {"run": run_dir.name, "stage": stage, "command": command, "slurm": site.slurm}
    return argv, _from_template(root / site.slurm.template, options, fields)


def _from_template(path: Path, options: str, fields: Mapping[str, object]) -> str:
    import jinja2

    parts = [shlex.split(part) for part in options.split(" : ")]
    lines = ["\n".join(f"#SBATCH {option}" for option in part) for part in parts]
    pairs = [[option.lstrip("-").partition("=") for option in part] for part in parts]
    components = [{key.replace("-", "_"): value for key, _, value in part} for part in pairs]
    name = f"slurm.template: {path.name}"
    try:
        environment = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True)
        text = environment.from_string(path.read_text(encoding="utf-8")).render(
            **fields, sbatch="\n#SBATCH hetjob\n".join(lines), components=components
        )
    except OSError as error:
        raise OrreryError(f"{name}: cannot be read ({error.strerror}); correct the path") from None
    except Exception as error:  # a template's expressions may raise anything
        raise OrreryError(
            f"{name}: {error}; the fields are {', '.join([*fields, 'sbatch', 'components'])}"
        ) from None
    if not text.startswith("#!") or str(fields["command"]) not in text:
        raise OrreryError(
            f"{name}: begins without '#!' or lacks {{{{ command }}}}; write #!/bin/bash first and "
            "{{ command }} last"
        )
    return text.rstrip("\n") + "\n"


def script_facts(slurm: Slurm | None, root: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    if slurm is not None and slurm.pre_run:
        found["pre_run"] = list(slurm.pre_run)
    if slurm is not None and slurm.template:
        path = root / slurm.template
        digest = sha256(path) if path.is_file() else None
        found["template"] = {"file": path.name, "sha256": digest}
    return found
