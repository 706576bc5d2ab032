"""Containers: the command line around a role, and the code that it sees.

- An image holds dependencies only. The code is a snapshot in the run's folder, bound read-only: editing the checkout moves no running run.
- Of the host a role sees /dev, its run folder, the site's mounts, and the job's scratch folder as /tmp; no home, no variable, no Python.
  `--contain` says the same but for /dev: it gives every container a /dev/shm of its own, through which ranks, engines and NCCL could not
  reach one another, and takes InfiniBand's devices away. So its parts stand here one by one.
- Variables go in through APPTAINERENV_*, never on the command line, which every user of the machine can read.
"""

import hashlib
import os
import re
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orrery.launcher import images
from orrery.launcher.site import Containers
from orrery.manifest.plan import StagePlan
from orrery.manifest.publish import make_folder, publish_folder
from orrery.manifest.schema import Hardware
from orrery.manifest.workspace import Workspace

CODE = "/orrery/code"  # where the snapshot is bound; on PYTHONPATH of every image
THEIRS = r"(APPTAINER|SINGULARITY)(?!_(CACHEDIR|TMPDIR)$)"  # options, binds and variables of whoever submitted, which Apptainer would take


def apptainer(
    site: Containers,
    image: Path,
    run_dir: Path,
    code: Path,
    scratch: Path,
    gpus: bool,
    argv: Sequence[str],
) -> list[str]:
    """`argv` inside `image`."""
    binds = [
        str(run_dir),
        f"{code}:{CODE}:ro",
        f"{scratch}:/tmp",
        "/etc/hosts:/etc/hosts:ro",
        *site.mounts,
    ]
    return [
        *entering(gpus),
        *(part for bind in binds for part in ("--bind", bind)),
        *("--pwd", str(run_dir)),
        *(str(image), *argv),
    ]


def entering(gpus: bool) -> list[str]:
    """The beginning of every command line into an image: nothing of the host's but what Apptainer itself needs."""
    alone = [
        "apptainer",
        "-s",
        "exec",
        "--cleanenv",
        "--no-home",
        "--no-mount",
        "home,tmp,cwd,hostfs,bind-paths",
    ]
    return [*alone, *(["--nv"] if gpus else [])]


def without_theirs(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not re.match(THEIRS, name)}


def image_of(site: Containers, workspace: Workspace, hardware: Hardware, role: str) -> Path:
    """The image file of a role; raises `OrreryError` where it is missing."""
    return images.find(
        workspace,
        workspace.root / site.images,
        images.IMAGE_OF[role],
        images.hardware_of(hardware.accelerator),
    )


def images_of(
    site: Containers | None, workspace: Workspace, hardware: Hardware, plan: StagePlan
) -> dict[str, Path]:
    """The image of every role of a stage; empty at a site without containers."""
    return (
        {one.role: image_of(site, workspace, hardware, one.role) for one in plan.processes}
        if site
        else {}
    )


def scratch_of(site: Containers | None, job: str) -> Path:
    """The folder of a job on each of its nodes; the launcher removes it with the job."""
    return Path(site.scratch if site else "/tmp") / f"orrery-{job}"


CACHES = {
    "XDG_CACHE_HOME": "/tmp/.cache",
    "XDG_CONFIG_HOME": "/tmp/.config",
    "TRITON_HOME": "/tmp",
}  # there is no home


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables as Apptainer takes them into a container with a clean environment."""
    return {f"APPTAINERENV_{name}": value for name, value in {**CACHES, **variables}.items()}


def snapshot(workspace: Workspace, run_dir: Path) -> Path:
    """Copy the rooms' source and entry points into the import root `<run_dir>/code/<digest>/`.

    An existing copy is hashed again, and replaced if its content does not match its name.
    """
    files = dict(_sources(workspace))
    target = run_dir / "code" / _digest(files)
    if target.is_dir() and _digest(_copied(target)) == target.name:
        return target
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(target.parent)
    for name, content in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    publish_folder(aside, target)
    return target


def _digest(files: Mapping[str, bytes]) -> str:
    """Return a hash of `files`: content by path under the import root."""
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _copied(folder: Path) -> dict[str, bytes]:
    """Return the files of a copy, without Python's bytecode."""
    found = (
        path for path in folder.rglob("*") if path.is_file() and "__pycache__" not in path.parts
    )
    return {str(path.relative_to(folder)): path.read_bytes() for path in found}


def _sources(workspace: Workspace) -> Iterator[tuple[str, bytes]]:
    """(path under the import root, content) of every room's modules, and of its metadata."""
    for room in sorted((workspace.root / "packages").iterdir()):
        if not (room / "pyproject.toml").exists():
            continue
        for path in sorted((room / "src" / "orrery").rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield str(path.relative_to(room / "src")), path.read_bytes()
        project = tomllib.loads((room / "pyproject.toml").read_text())["project"]
        folder = f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
        yield (
            f"{folder}/METADATA",
            f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n".encode(),
        )
        if points := project.get("entry-points"):
            groups = [
                f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
                for group, table in points.items()
            ]
            yield f"{folder}/entry_points.txt", "\n".join(groups).encode()
