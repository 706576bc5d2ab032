"""Find a role's container image, and build its Apptainer command.

- Images have packages, not Orrery's code. `containers/images.lock` lists each image's sha256 and
  `recipe` (digest of the files that it is built from).
- The command lacks `--contain`, which hides /dev/shm and InfiniBand.
- Containers get variables through APPTAINERENV_*, because other users can read command lines.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from orrery.launcher.site import Containers
from orrery.manifest import schema
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.json_file import read_as
from orrery.manifest.plan import StagePlan
from orrery.manifest.publish import make_folder, publish_folder, sha256
from orrery.runtime.run_directory import code_dir

Image = Literal["base", "trainer", "inference", "orchestrator"]
Hardware = Literal["cpu", "cuda"]

LOCK = "containers/images.lock"
IMAGES: tuple[Image, ...] = get_args(Image)
IMAGE_OF: dict[str, Image] = {
    "trainer": "trainer",
    "inference": "inference",
    "headless": "inference",
    "router": "inference",
    "kv_store": "inference",
    "orchestrator": "orchestrator",
    "report": "orchestrator",
}
TOOLS = ("debian.py", "bytecode.py", "normalise.py")
MKSQUASHFS = (
    "-comp zstd -Xcompression-level 1 -all-root -no-xattrs -all-time 1700000000 "
    "-mkfs-time 1700000000"
)


class Built(NamedTuple):
    recipe: str
    sif: str


def hardware_of(accelerator: str) -> Hardware:
    return "cpu" if accelerator == "cpu" else "cuda"


def parts(image: Image, hardware: Hardware) -> tuple[str, ...]:
    files = ["base.def", f"debian.{hardware}.lock", *TOOLS]
    if image == "base":
        return tuple(f"containers/{name}" for name in files)
    files += [f"{image}.def", "debian.cuda.lock"]
    files += ["python.sh", "contested.py", "sdists.in", "make_wheels.py"]
    lock = "orchestrator" if image == "orchestrator" else f"{image}.{hardware}"
    folder = dict.fromkeys(f"containers/{name}" for name in files)
    return (*folder, f"locks/{lock}.txt", ".python-version")


def recipe(workspace: Workspace, role: str, hardware: Hardware) -> str:
    image = _image(role)
    digests = {part: sha256(workspace.root / part) for part in parts(image, hardware)}
    text = json.dumps([image, hardware, digests, MKSQUASHFS], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def file_name(image: Image, hardware: Hardware, sif: str) -> str:
    return f"{image}-{hardware}-{sif[:16]}.sif"


def locked(workspace: Workspace) -> dict[str, Built]:
    path = workspace.root / LOCK
    if not path.exists():
        return {}
    return read_as(path, dict[str, Built], f"check out the commit's own {LOCK}")


def find_image(
    workspace: Workspace, images_dir: Path, role: str, hardware: Hardware, *, verify: bool = False
) -> Path:
    """Return the image file for `role`, the name of a role or an image.

    Raise OrreryError if the file is missing, or if its recipe or (with `verify`) its sha256 differs
    from `images.lock`.
    """
    image = _image(role)
    name, folder = f"{hardware}/{image}", workspace.shown(images_dir)
    build = f"snakemake -s pipelines/images.smk --cores all --config images={folder}"
    one = locked(workspace).get(name)
    if one is None:
        raise OrreryError(f"{LOCK}: no image {name}; type `{build} lock_{hardware}`")
    if one.recipe != recipe(workspace, image, hardware):
        raise OrreryError(
            f"{LOCK}: the recipe of {name} has changed since the build; "
            f"type `{build} lock_{hardware}`"
        )
    path = images_dir / file_name(image, hardware, one.sif)
    if not path.is_file():
        raise OrreryError(
            f"{workspace.shown(path)}: the image is missing; "
            f"type `{build} {image}_{hardware}`, or copy it there"
        )
    if verify and sha256(path) != one.sif:
        raise OrreryError(
            f"{workspace.shown(path)}: its sha256 differs from {LOCK}; "
            f"remove it and type `{build} {image}_{hardware}`"
        )
    return path


def record_path(workspace: Workspace, images_dir: Path, image: Image, hardware: Hardware) -> Path:
    """Return the path of a built image's record. Delete the record if the image is missing."""
    name = f"{image}-{hardware}-{recipe(workspace, image, hardware)[:16]}.json"
    path = images_dir / "built" / name
    if path.exists():
        file = images_dir / file_name(image, hardware, read_record(path).sif)
        if not file.is_file():
            path.unlink()
    return path


def read_record(path: Path) -> Built:
    return read_as(path, Built, "remove it, and the image is built again")


def _image(role: str) -> Image:
    known: dict[str, Image] = {image: image for image in IMAGES} | IMAGE_OF
    if role not in known:
        names = ", ".join(known)
        raise OrreryError(f"image: the role {role!r} has no image; choose from {names}")
    return known[role]


CODE = "/orrery/code"  # CODE and KERNELS are paths in a container
KERNELS = "/orrery/kernels"
APPTAINER_OPTIONS = r"(APPTAINER|SINGULARITY)(?!_(CACHEDIR|TMPDIR)$)"
CACHES = {  # containers have no home folder for caches
    "XDG_CACHE_HOME": "/tmp/.cache",
    "XDG_CONFIG_HOME": "/tmp/.config",
    "VLLM_CACHE_ROOT": f"{KERNELS}/vllm",
    "TRITON_HOME": KERNELS,
    "TORCHINDUCTOR_CACHE_DIR": f"{KERNELS}/inductor",
    "FLASHINFER_WORKSPACE_BASE": KERNELS,
    "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR": f"{KERNELS}/flash4",
}


def apptainer(
    site: Containers,
    image: Path,
    run_dir: Path,
    code: Path,
    folders: Sequence[Path],
    gpus: bool,
    argv: Sequence[str],
) -> list[str]:
    """Return the command that runs `argv`. Mount the two host `folders` at /tmp and KERNELS."""
    scratch, kernels = folders
    binds = [str(run_dir), f"{code}:{CODE}:ro", f"{scratch}:/tmp", f"{kernels}:{KERNELS}"]
    binds += ["/etc/hosts:/etc/hosts:ro", *site.mounts]
    options = [part for bind in binds for part in ("--bind", bind)]
    return [*enter_image(gpus), *options, "--pwd", str(run_dir), str(image), *argv]


def enter_image(gpus: bool) -> list[str]:
    command = ["apptainer", "-s", "exec", "--cleanenv", "--no-home"]
    command += ["--no-mount", "home,tmp,cwd,hostfs,bind-paths"]
    return command + (["--nv"] if gpus else [])


def with_modules(site: Containers | None, argv: list[str]) -> list[str]:
    if site is None or not site.modules:
        return argv
    return ["bash", "-lc", f'module load {shlex.join(site.modules)} && exec "$@"', "bash", *argv]


def without_apptainer_options(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not re.match(APPTAINER_OPTIONS, name)}


def image_of(site: Containers, workspace: Workspace, hardware: schema.Hardware, role: str) -> Path:
    kind = hardware_of(hardware.accelerator)
    return find_image(workspace, workspace.root / site.images, IMAGE_OF[role], kind)


def images_of(
    site: Containers | None, workspace: Workspace, hardware: schema.Hardware, plan: StagePlan
) -> dict[str, Path]:
    if site is None:
        return {}
    return {one.role: image_of(site, workspace, hardware, one.role) for one in plan.processes}


def scratch_of(site: Containers | None, job: str) -> Path:
    return Path(site.scratch if site else "/tmp") / f"orrery-{job}"


def node_folders(site: Containers, job: str, image: Path, user: object) -> list[Path]:
    """Return a node's folders for the job's scratch, and for kernels that later jobs reuse."""
    scratch = scratch_of(site, job)
    return [scratch, scratch.with_name(f"orrery-kernels-{user}-{image.stem}")]


def container_variables(variables: Mapping[str, str]) -> dict[str, str]:
    return {f"APPTAINERENV_{name}": value for name, value in {**CACHES, **variables}.items()}


def snapshot(workspace: Workspace, run_dir: Path) -> Path:
    """Copy Orrery's code to `<run_dir>/code/<digest>`, and return that folder."""
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
