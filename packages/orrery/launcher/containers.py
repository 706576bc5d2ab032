"""The container of a role: its command line and its code.

- The code is a read-only snapshot in the run's folder.
- A role sees /dev, its run folder, the site's mounts, and the job's scratch folder as /tmp. No
  `--contain`: ranks, engines and NCCL share /dev/shm and InfiniBand.
- Variables go in through APPTAINERENV_*, because every user can read a command line.
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
from orrery.runtime.run_directory import code_dir

CODE = "/orrery/code"  # the snapshot, on every image's PYTHONPATH
APPTAINER_OPTIONS = (
    r"(APPTAINER|SINGULARITY)(?!_(CACHEDIR|TMPDIR)$)"  # a user's options for Apptainer
)
CACHES = {  # there is no home
    "XDG_CACHE_HOME": "/tmp/.cache",
    "XDG_CONFIG_HOME": "/tmp/.config",
    "TRITON_HOME": "/tmp",
}


def apptainer(
    site: Containers,
    image: Path,
    run_dir: Path,
    code: Path,
    scratch: Path,
    gpus: bool,
    argv: Sequence[str],
) -> list[str]:
    binds = [str(run_dir), f"{code}:{CODE}:ro", f"{scratch}:/tmp", "/etc/hosts:/etc/hosts:ro"]
    binds += site.mounts
    options = [part for bind in binds for part in ("--bind", bind)]
    return [*enter_image(gpus), *options, "--pwd", str(run_dir), str(image), *argv]


def enter_image(gpus: bool) -> list[str]:
    command = ["apptainer", "-s", "exec", "--cleanenv", "--no-home"]
    command += ["--no-mount", "home,tmp,cwd,hostfs,bind-paths"]
    return command + (["--nv"] if gpus else [])


def without_apptainer_options(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not re.match(APPTAINER_OPTIONS, name)}


def image_of(site: Containers, workspace: Workspace, hardware: Hardware, role: str) -> Path:
    """Return the image file of a role. Raise OrreryError if it is missing."""
    kind = images.hardware_of(hardware.accelerator)
    return images.find(workspace, workspace.root / site.images, images.IMAGE_OF[role], kind)


def images_of(
    site: Containers | None, workspace: Workspace, hardware: Hardware, plan: StagePlan
) -> dict[str, Path]:
    if site is None:
        return {}
    return {one.role: image_of(site, workspace, hardware, one.role) for one in plan.processes}


def scratch_of(site: Containers | None, job: str) -> Path:
    return Path(site.scratch if site else "/tmp") / f"orrery-{job}"


def container_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {f"APPTAINERENV_{name}": value for name, value in {**CACHES, **variables}.items()}


def snapshot(workspace: Workspace, run_dir: Path) -> Path:
    """Copy the rooms' source and entry points into `<run_dir>/code/<digest>/`.

    Replace a copy whose content does not match its name.
    """
    files = dict(_sources(workspace))
    target = code_dir(run_dir) / _digest(files)
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
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    return digest.hexdigest()[:16]


def _files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if "__pycache__" not in path.parts)
    return sorted(path for path in found if path.is_file())


def _copied(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in _files(folder)}


def _sources(workspace: Workspace) -> Iterator[tuple[str, bytes]]:
    root = workspace.root / "packages"
    for path in sorted((root / "orrery").rglob("*")):
        if path.is_file() and "__pycache__" not in path.parts:
            yield str(path.relative_to(root)), path.read_bytes()
    project = tomllib.loads((workspace.root / "pyproject.toml").read_text())["project"]
    folder = f"{project['name']}-{project['version']}.dist-info"
    head = f"Name: {project['name']}\nVersion: {project['version']}\n"
    yield f"{folder}/METADATA", f"Metadata-Version: 2.1\n{head}".encode()
    groups = [
        f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items())
        for group, table in project.get("entry-points", {}).items()
    ]
    yield f"{folder}/entry_points.txt", "\n".join(groups).encode()
