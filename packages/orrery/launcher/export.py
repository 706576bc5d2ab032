"""Export a run's checkpoint as a Hugging Face folder.

With Slurm a small job does it, because a login node has no torch and little memory.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from orrery.launcher import containers
from orrery.launcher.runs import Run
from orrery.launcher.site import Site
from orrery.launcher.slurm.job import where
from orrery.launcher.slurm.queue import clean_environment
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace

# Torch leaves caches in /tmp, so the container's /tmp is a folder that the job removes.
IN_A_FOLDER = 'mkdir -p "$1" && trap \'rm -rf "$1"\' EXIT && "${@:2}"'
CPUS, MEMORY_MB = 2, 16_000


def run(
    found: Run, stage: str, step: int | None, to: Path | None, workspace: Workspace, site: Site
) -> int:
    argv = ["-m", "orrery.trainer.export", str(found.path), "--stage", stage]
    argv += [] if step is None else ["--step", str(step)]
    argv += [] if to is None else ["--to", str(to.resolve())]
    if site.slurm is None:
        return subprocess.run([sys.executable, *argv]).returncode
    variables = {
        **containers.without_apptainer_options(clean_environment(os.environ)),
        **site.environment,
    }
    if site.containers is None:
        words = [sys.executable, *argv]
    else:
        words = _in_image(found, argv, to, workspace, site)
        variables |= containers.container_variables(site.environment)
    return _check_arrived(subprocess.run([*srun(site), *words], env=variables).returncode, to)


def _in_image(
    found: Run, argv: Sequence[str], to: Path | None, workspace: Workspace, site: Site
) -> list[str]:
    place = site.containers
    assert place is not None
    if to is not None:
        parent = to.resolve().parent
        parent.mkdir(parents=True, exist_ok=True)
        place = place.model_copy(update={"mounts": (*place.mounts, str(parent))})
    image = containers.image_of(place, workspace, found.manifest.hardware, "trainer")
    code = containers.snapshot(workspace, found.path)
    scratch = containers.scratch_of(place, f"export-{os.getpid()}-{found.path.name}")
    command = ["python3", *argv]
    inside = containers.apptainer(place, image, found.path, code, scratch, False, command)
    inside = containers.with_modules(site.containers, inside)
    return ["bash", "-c", IN_A_FOLDER, "export", str(scratch), *inside]


def _check_arrived(code: int, to: Path | None) -> int:
    # List the parent: a network file system may cache that a name is missing.
    if code == 0 and to is not None and to.name not in _names(to.resolve().parent):
        raise OrreryError(
            f"--to {to}: the job wrote it on its node, but this node does not see it. "
            "Choose a folder that all nodes share"
        )
    return code


def _names(folder: Path) -> Sequence[str]:
    return os.listdir(folder) if folder.is_dir() else ()


def srun(site: Site) -> Sequence[str]:
    slurm = site.slurm
    assert slurm is not None
    return [
        *("srun", "--job-name=orrery-export"),
        *where(slurm, slurm.cpu_partition),
        *(f"--time={slurm.time_limit_min}", "--nodes=1", "--ntasks=1"),
        f"--cpus-per-task={min(CPUS, slurm.cpus_per_node)}",
        f"--mem={min(MEMORY_MB, slurm.memory_per_node_mb)}M",
        *("--export=ALL", "--input=none", *slurm.extra),
    ]
