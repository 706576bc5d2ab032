"""The files of a plan: the resolved manifest and the submission scripts. Nothing is started.

- In: a run and its stages. Out: a new folder with `manifest.json`, `plan.txt` (the output of
  `orrery plan RUN STAGE`) and `<n>_<stage>.sh`.
- A script holds exactly the command that Snakemake's executor submits. At a site without Slurm it
  holds the stage's command.
- The folder appears whole or not at all.
"""

import shlex
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

from orrery.launcher.describe_plan import describe_stage
from orrery.launcher.runs import Run
from orrery.launcher.site import Site
from orrery.launcher.slurm.allocation import INSIDE
from orrery.launcher.slurm.job_script import sbatch_options
from orrery.launcher.slurm.queue import job_name
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json
from orrery.manifest.plan import stage
from orrery.manifest.workspace import Workspace


def write_plan(
    run: Run, stages: Sequence[str], site: Site, workspace: Workspace, folder: Path
) -> list[Path]:
    """Write the files into the new folder `folder`; return their paths.

    Raises OrreryError if the folder exists.
    """
    if folder.exists() or folder.is_symlink():
        raise OrreryError(
            f"{folder}: is there already; name a folder that is not, or remove this one"
        )
    texts = {"manifest.json": pretty_json(run.manifest)}
    described = [
        line for name in stages for line in describe_stage(run.manifest, name, site, workspace)
    ]
    texts["plan.txt"] = "\n".join(described) + "\n"
    texts |= {
        f"{run.stages.index(name) + 1}_{name}.sh": _script(run, name, site, workspace)
        for name in stages
    }
    made = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(made, ignore_errors=True)  # left by a killed process
    try:
        made.mkdir(parents=True)
        for name, text in texts.items():
            (made / name).write_text(text, encoding="utf-8")
            if name.endswith(".sh"):
                (made / name).chmod(0o755)
        made.rename(folder)
    except BaseException:
        shutil.rmtree(made, ignore_errors=True)
        raise
    return [folder / name for name in texts]


def _script(run: Run, name: str, site: Site, workspace: Workspace) -> str:
    command = ["orrery", "run", run.path.name, name]
    if site.slurm is not None:
        options = sbatch_options(run.manifest.hardware, stage(run.manifest, name), site.slurm)
        command = batch_command(run.path, name, options, shlex.join(command), site, workspace.root)
    return f"#!/bin/sh\n# {name} of {run.path.name}, from {workspace.root}\nexec {shlex.join(command)}\n"


def batch_command(
    run_dir: Path, stage: str, options: str, shell_command: str, site: Site, root: Path
) -> list[str]:
    """Return the `sbatch` command that submits `shell_command` as a job of the stage.

    `options` comes from `sbatch_options`. `root` is the checkout, the job's working folder.
    """
    path = shlex.quote(str(Path(sys.executable).parent))
    modules = site.containers.modules if site.containers else ()
    load = f"module load {shlex.join(modules)} && " if modules else ""
    inner = f'{load}export PATH={path}:"$PATH" {INSIDE}=1 && exec {shell_command}'
    # USR1 is for the launcher and must not end the shell before the launcher starts
    script = f"trap '' USR1; exec bash {'-lc' if modules else '-c'} {shlex.quote(inner)}"
    return [
        *("sbatch", "--parsable", f"--job-name={job_name(run_dir, stage)}"),
        *(f"--output={run_dir.resolve()}/logs/slurm.%j.log", "--open-mode=append"),
        *(f"--chdir={root}", *shlex.split(options), f"--wrap={script}"),
    ]
