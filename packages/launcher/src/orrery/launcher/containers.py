"""Containers: the command line around a role, and the code that it sees.

- An image holds dependencies only. The code is a snapshot in the run's folder, bound read-only: editing the checkout moves no running run.
- `--contain --cleanenv --no-home`: of the host a role sees its run folder, /dev/shm, the site's mounts and a scratch folder, and no Python.
- Variables go in through APPTAINERENV_*, never on the command line, which every user of the machine can read.
"""

import hashlib
import os
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from orrery.launcher.site import Containers
from orrery.manifest.publish import sync
from orrery.manifest.workspace import Workspace

CODE = "/orrery/code"  # where the snapshot is bound; on PYTHONPATH of every image


def apptainer(site: Containers, image: Path, run_dir: Path, code: Path, gpus: bool, argv: Sequence[str]) -> list[str]:
    """`argv` inside `image`."""
    binds = [str(run_dir), f"{code}:{CODE}:ro", "/dev/shm", *site.mounts]
    return [
        *("apptainer", "-s", "exec", "--contain", "--cleanenv", "--no-home", "--workdir", site.scratch),
        *(["--nv"] if gpus else []),
        *(part for bind in binds for part in ("--bind", bind)),
        *("--pwd", str(run_dir)),
        *(str(image), *argv),
    ]


def passed_on(variables: Mapping[str, str]) -> dict[str, str]:
    """Variables as Apptainer takes them into a container with a clean environment."""
    return {f"APPTAINERENV_{name}": value for name, value in variables.items()}


def snapshot(workspace: Workspace, run_dir: Path) -> Path:
    """The rooms' source as one import root in `<run_dir>/code/<digest>/`, with the metadata that entry points are found by."""
    files = dict(_sources(workspace))
    digest = hashlib.sha256()
    for name, content in sorted(files.items()):
        digest.update(f"{name}\0{len(content)}\0".encode() + content)
    target = run_dir / "code" / digest.hexdigest()[:16]
    if target.is_dir():
        return target
    aside = target.with_name(f".{target.name}.{os.getpid()}")
    shutil.rmtree(aside, ignore_errors=True)
    for name, content in files.items():
        path = aside / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    sync(aside)
    aside.rename(target)
    return target


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
        yield f"{folder}/METADATA", f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n".encode()
        if points := project.get("entry-points"):
            groups = [f"[{group}]\n" + "".join(f"{key} = {value}\n" for key, value in table.items()) for group, table in points.items()]
            yield f"{folder}/entry_points.txt", "\n".join(groups).encode()
