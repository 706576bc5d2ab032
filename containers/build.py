"""Build one image to the same bytes on every machine, and write `containers/images.lock`.

    python containers/build.py build IMAGE HARDWARE FOLDER   the SIF file and FOLDER/built/<record>
    python containers/build.py lock RECORD...                records into containers/images.lock

- Runs as root and as a plain user. Root enters a user namespace first, because root in a container
  lacks rights that Apptainer needs.
- Needs apptainer, uv, and gigabytes in TMPDIR. A memory file system is much faster.
- The sha256 follows from the recipe and the versions of apptainer and squashfs-tools.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import get_args

from debian import fetch, read_lock
from normalise import normalise

from orrery.launcher import containers
from orrery.launcher.containers import Built, Hardware, Image
from orrery.manifest.identity import Workspace, find_workspace

FETCH_PAUSES_S = (1.0, 2.0, 4.0, 8.0)


def build(workspace: Workspace, image: Image, hardware: Hardware, folder: Path) -> Built:
    """Build an image into `folder`. Raise CalledProcessError if a tool fails."""
    recipe = containers.recipe(workspace, image, hardware)
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f"orrery-{image}-", ignore_cleanup_errors=True) as name:
        work = Path(name)
        environment = _environment(workspace, folder, work)
        if image == "base":
            _prefetch(workspace.root / f"containers/debian.{hardware}.lock", folder / "debian")
        else:
            (work / "base.sif").symlink_to(_built(workspace, folder, "base", hardware))
            lock = next(
                part for part in containers.parts(image, hardware) if part.startswith("locks/")
            )
            compiler = _built(workspace, folder, "base", "cuda")
            script = workspace.root / "containers/python.sh"
            arguments = [lock, environment["BUILD_PACKAGES"], compiler]
            subprocess.run(["bash", script, *arguments], env=environment, check=True)
        _apptainer(workspace.root / f"containers/{image}.def", hardware, work, environment)
        normalise(work / "image.sif")
        built = Built(recipe, containers.sha256(work / "image.sif"))
        part = folder / f".{image}-{hardware}.{os.getpid()}"
        shutil.copyfile(work / "image.sif", part)
        part.chmod(0o755)
        part.replace(folder / containers.file_name(image, hardware, built.sif))
    record = containers.record_path(workspace, folder, image, hardware)
    record.parent.mkdir(exist_ok=True)
    record.write_text(json.dumps(built._asdict()) + "\n")
    return built


def _prefetch(lock: Path, cache: Path) -> None:
    """Fetch the packages of a lock into `cache`, with retries. Raise OSError after the last."""
    time_stamp, packages = read_lock(lock)
    cache.mkdir(parents=True, exist_ok=True)

    def fetch_all() -> None:
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(lambda package: fetch(package, time_stamp, cache), packages))

    for pause_s in FETCH_PAUSES_S:
        try:
            return fetch_all()
        except OSError:
            time.sleep(pause_s)
    fetch_all()


def _environment(workspace: Workspace, folder: Path, work: Path) -> dict[str, str]:
    """Return the environment of the definition files and of python.sh."""
    own = {
        "BUILD_PYTHON": Path(sys.executable),
        "BUILD_ROOT": workspace.root,
        "BUILD_CACHE": folder / "debian",
        "BUILD_PACKAGES": work / "packages",
    }
    tools = [str(Path(sys.executable).parent), str(workspace.root / ".tools/bin")]
    paths = {
        "PATH": os.pathsep.join([*tools, os.environ["PATH"]]),
        "APPTAINER_TMPDIR": str(work),
        "TMPDIR": str(work),
    }
    return {**os.environ, **{name: str(value.absolute()) for name, value in own.items()}, **paths}


def _apptainer(
    definition: Path, hardware: Hardware, work: Path, environment: dict[str, str]
) -> None:
    alone = ["unshare", "--user", "--map-root-user"] if os.geteuid() == 0 else []
    argument = ["--build-arg", f"HARDWARE={hardware}"] if definition.name == "base.def" else []
    options = ["--force", *argument, f"--mksquashfs-args={containers.MKSQUASHFS}"]
    build = ["apptainer", "--silent", "build", *options, "image.sif", str(definition)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    done = subprocess.run([*alone, *build], cwd=work, env=environment, text=True, **pipes)
    if done.returncode:
        print(done.stdout, file=sys.stderr)
        done.check_returncode()


def _built(workspace: Workspace, folder: Path, image: Image, hardware: Hardware) -> Path:
    record = containers.record_path(workspace, folder, image, hardware)
    return (
        folder / containers.file_name(image, hardware, containers.read_record(record).sif)
    ).absolute()


def against_lock(name: str, built: Built, locked: Built | None) -> str:
    """Compare a built image with `images.lock`, in one sentence."""
    if locked is None:
        return f"{name}: {built.sif[:16]}; it is not in {containers.LOCK} yet"
    if locked == built:
        return f"{name}: {built.sif[:16]}, as {containers.LOCK} says"
    if locked.recipe != built.recipe:
        return (
            f"{name}: {built.sif[:16]}; the recipe has changed since {containers.LOCK} was "
            "written, so this is another image"
        )
    return (
        f"{name}: {built.sif[:16]} is not the {locked.sif[:16]} of {containers.LOCK}, though the "
        f"recipe is the same: {_version('apptainer', '--version')} or "
        f"{_version('mksquashfs', '-version')} differs from what wrote the lock"
    )


def _version(*command: str) -> str:
    printed = subprocess.run(command, capture_output=True, text=True).stdout
    return printed.partition("\n")[0].partition(" (")[0]


def write_lock(workspace: Workspace, records: list[Path]) -> None:
    """Merge records (`<image>-<hardware>-<recipe>.json`) into images.lock."""
    lock = containers.locked(workspace)
    for record in records:
        image, hardware, _ = record.name.split("-")
        lock[f"{hardware}/{image}"] = containers.read_record(record)
    text = json.dumps({name: built._asdict() for name, built in sorted(lock.items())}, indent=2)
    (workspace.root / containers.LOCK).write_text(text + "\n")


def main(argv: list[str]) -> None:
    workspace = find_workspace(Path(__file__))
    known = {(image, hardware) for image in containers.IMAGES for hardware in get_args(Hardware)}
    match argv:
        case ["build", image, hardware, folder] if (image, hardware) in known:
            built = build(workspace, image, hardware, Path(folder))  # type: ignore[arg-type]
            name = f"{hardware}/{image}"
            print(against_lock(name, built, containers.locked(workspace).get(name)))
        case ["lock", *records] if records:
            write_lock(workspace, [Path(record) for record in records])
        case _:
            sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
