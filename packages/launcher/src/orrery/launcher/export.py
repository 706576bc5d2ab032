"""Export: a run's checkpoint as a Hugging Face folder, by a process here, or where the site has Slurm by a small job of its own.

- A login node has no torch, and no memory to spare; the trainer's image has the one, a node the other.
- It takes no lock: complete checkpoints are only read, beside whatever goes on with the run.
- No stage: `weights/rl` is what rl ends with, so there is nothing for a pipeline to wait for. Here a person asks for a step.
"""

import os
import shlex
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orrery.launcher import containers
from orrery.launcher.runs import Run
from orrery.launcher.site import Site
from orrery.launcher.slurm.queue import clean_environment
from orrery.manifest.errors import OrreryError
from orrery.manifest.workspace import Workspace

# The job's folder is its container's /tmp: torch leaves caches there.
IN_A_FOLDER = 'mkdir -p "$1" && trap \'rm -rf "$1"\' EXIT && "${@:2}"'
CPUS, MEMORY_MB = (
    2,
    16_000,
)  # one file of at most 5 GB is in memory at a time, and what of it is being merged or converted


def run(
    found: Run, stage: str, step: int | None, to: Path | None, workspace: Workspace, site: Site
) -> int:
    """Its exit code; raises `OrreryError` where the site's image is missing."""
    argv = ["-m", "orrery.trainer.export", str(found.path), "--stage", stage]
    argv += [] if step is None else ["--step", str(step)]
    argv += [] if to is None else ["--to", str(to.resolve())]
    if site.slurm is None:
        return subprocess.run([sys.executable, *argv]).returncode
    variables = {**containers.without_theirs(clean_environment(os.environ)), **site.environment}
    if site.containers is None:
        return _arrived(
            subprocess.run([*srun(site), sys.executable, *argv], env=variables).returncode, to
        )
    where = site.containers
    if to is not None:
        to.resolve().parent.mkdir(parents=True, exist_ok=True)
        where = where.model_copy(update={"mounts": (*where.mounts, str(to.resolve().parent))})
    image, code = (
        containers.image_of(where, workspace, found.manifest.hardware, "trainer"),
        containers.snapshot(workspace, found.path),
    )
    scratch = containers.scratch_of(where, f"export-{os.getpid()}-{found.path.name}")
    inside = containers.apptainer(
        where, image, found.path, code, scratch, False, ["python3", *argv]
    )
    if where.modules:
        inside = [
            "bash",
            "-lc",
            f'module load {shlex.join(where.modules)} && exec "$@"',
            "export",
            *inside,
        ]
    variables |= containers.passed_on(site.environment)
    words = ["bash", "-c", IN_A_FOLDER, "export", str(scratch), *inside]
    return _arrived(subprocess.run([*srun(site), *words], env=variables).returncode, to)


def _arrived(code: int, to: Path | None) -> int:
    """`code`; raises `OrreryError` where the job wrote into a folder that its node alone has."""
    if code == 0 and to is not None and to.name not in _names(to.resolve().parent):
        raise OrreryError(
            f"--to {to}: the job wrote it on its node, and it is not to be seen here; choose a folder that all nodes share"
        )
    return code


def _names(folder: Path) -> Sequence[str]:
    return (
        os.listdir(folder) if folder.is_dir() else ()
    )  # read anew, where to ask for one name may be answered from before


def srun(site: Site) -> Sequence[str]:
    """A job on a corner of one node, which ends with its command; Ctrl-C ends both."""
    slurm = site.slurm
    assert slurm is not None
    return [
        *(
            "srun",
            "--job-name=orrery-export",
            f"--partition={slurm.cpu_partition or slurm.partition}",
        ),
        *([f"--account={slurm.account}"] if slurm.account else []),
        *(
            f"--time={slurm.time_limit_min}",
            "--nodes=1",
            "--ntasks=1",
            f"--cpus-per-task={min(CPUS, slurm.cpus_per_node)}",
        ),
        *(
            f"--mem={min(MEMORY_MB, slurm.memory_per_node_mb)}M",
            "--export=ALL",
            "--input=none",
            *slurm.extra,
        ),
    ]
