"""The image of a role: its recipe, its digest, and its file.

An image holds packages, never code. `containers/images.lock` has each image's recipe (the digest of
the files that decide its content) and the sha256 of its SIF file.
"""

import hashlib
import json
from pathlib import Path
from typing import Literal, NamedTuple, get_args

from orrery.manifest.digest import sha256
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_as
from orrery.manifest.workspace import Workspace

Image = Literal["base", "trainer", "inference", "orchestrator"]
Hardware = Literal["cpu", "cuda"]

LOCK = "containers/images.lock"
IMAGES: tuple[Image, ...] = get_args(Image)
IMAGE_OF: dict[str, Image] = {
    "trainer": "trainer",
    "inference": "inference",
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
    files += [f"{image}.def", "debian.cuda.lock"]  # the GPU base has the compiler
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
    """Return the name with the digest, because Snakemake knows images by name."""
    return f"{image}-{hardware}-{sif[:16]}.sif"


def locked(workspace: Workspace) -> dict[str, Built]:
    path = workspace.root / LOCK
    if not path.exists():
        return {}
    return read_as(path, dict[str, Built], f"check out the commit's own {LOCK}")


def find(
    workspace: Workspace, images_dir: Path, role: str, hardware: Hardware, *, verify: bool = False
) -> Path:
    """Return the file in `images_dir` of a role's (or image's) image.

    Raise OrreryError if the recipe differs from the lock's, or the file is missing or (`verify`)
    damaged.
    """
    image = _image(role)
    name, folder = f"{hardware}/{image}", workspace.shown(images_dir)
    build = f"snakemake -s pipelines/images.smk --cores all --config images={folder}"
    one = locked(workspace).get(name)
    if one is None:
        raise OrreryError(f"{LOCK}: there is no image {name}; type `{build} lock_{hardware}`")
    if one.recipe != recipe(workspace, image, hardware):
        raise OrreryError(
            f"{LOCK}: the recipe of {name} has changed since its image was built; "
            f"type `{build} lock_{hardware}`"
        )
    path = images_dir / file_name(image, hardware, one.sif)
    if not path.is_file():
        raise OrreryError(
            f"{workspace.shown(path)}: the image is missing; "
            f"type `{build} {image}_{hardware}`, or copy the file there"
        )
    if verify and sha256(path) != one.sif:
        raise OrreryError(
            f"{workspace.shown(path)}: the file is not the one of {LOCK}; "
            f"remove it and type `{build} {image}_{hardware}`"
        )
    return path


def record_path(workspace: Workspace, images_dir: Path, image: Image, hardware: Hardware) -> Path:
    """Return the present image's record. Remove a record without image."""
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
        raise OrreryError(f"image: there is none for the role {role!r}; there are {names}")
    return known[role]
