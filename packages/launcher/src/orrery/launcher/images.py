"""Which image a role runs in: what an image is made of, its digest, and the file that has it.

- An image holds packages, never code. Its recipe is the digest of every file of the checkout that decides what is in it.
- `containers/images.lock` (checked in) says for each image the recipe and the sha256 of the SIF file that came of it.
- A file is named by that sha256; `find` gives the file of the lock or says in one sentence why there is none and what to type.
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
IMAGE_OF: dict[str, Image] = {  # role → image
    "trainer": "trainer",
    "inference": "inference",
    "router": "inference",
    "kv_store": "inference",
    "orchestrator": "orchestrator",
    "report": "orchestrator",
}
TOOLS = ("debian.py", "bytecode.py", "normalise.py")
MKSQUASHFS = "-comp zstd -Xcompression-level 1 -all-root -no-xattrs -all-time 1700000000 -mkfs-time 1700000000"


class Built(NamedTuple):
    """An image as it was built: the recipe's digest and the SIF file's sha256."""

    recipe: str
    sif: str


def hardware_of(accelerator: str) -> Hardware:
    """Of a manifest's `hardware.accelerator`."""
    return "cpu" if accelerator == "cpu" else "cuda"


def parts(image: Image, hardware: Hardware) -> tuple[str, ...]:
    """The files that decide what is in an image, relative to the checkout's root."""
    base = ["base.def", f"debian.{hardware}.lock", *TOOLS]
    if image == "base":
        return tuple(f"containers/{name}" for name in base)
    lock = "orchestrator" if image == "orchestrator" else f"{image}.{hardware}"
    compiler = "debian.cuda.lock"  # in the GPU base
    packages = [
        f"{image}.def",
        compiler,
        "python.sh",
        "contested.py",
        "sdists.in",
        "make_wheels.py",
    ]
    return (
        *dict.fromkeys(f"containers/{name}" for name in [*base, *packages]),
        f"locks/{lock}.txt",
        ".python-version",
    )


def recipe(workspace: Workspace, role: str, hardware: Hardware) -> str:
    """sha256 of the names and contents of an image's parts and of how they are packed; `role` is a role or an image."""
    image = _image(role)
    digests = {part: sha256(workspace.root / part) for part in parts(image, hardware)}
    return hashlib.sha256(
        json.dumps([image, hardware, digests, MKSQUASHFS], sort_keys=True).encode()
    ).hexdigest()


def file_name(image: Image, hardware: Hardware, sif: str) -> str:
    """Snakemake knows an image by its name alone, so the digest is in it."""
    return f"{image}-{hardware}-{sif[:16]}.sif"


def locked(workspace: Workspace) -> dict[str, Built]:
    """`containers/images.lock`, by `hardware/image`; {} where there is none yet."""
    path = workspace.root / LOCK
    return (
        read_as(path, dict[str, Built], f"check out the commit's own {LOCK}")
        if path.exists()
        else {}
    )


def find(
    workspace: Workspace, images_dir: Path, role: str, hardware: Hardware, *, verify: bool = False
) -> Path:
    """The image of a role (or image) in the folder `images_dir`; with `verify` its sha256 is checked, which reads all of it.

    Raises `OrreryError` when the checkout's recipe has moved on since the lock, or the file of the lock is missing or damaged.
    """
    image = _image(role)
    name = f"{hardware}/{image}"
    build = f"snakemake -s pipelines/images.smk --cores all --config images={workspace.shown(images_dir)}"
    one = locked(workspace).get(name)
    if one is None:
        raise OrreryError(f"{LOCK}: there is no image {name}; type `{build} lock_{hardware}`")
    if one.recipe != recipe(workspace, image, hardware):
        raise OrreryError(
            f"{LOCK}: the recipe of {name} has changed since its image was built; type `{build} lock_{hardware}`"
        )
    path = images_dir / file_name(image, hardware, one.sif)
    if not path.is_file():
        raise OrreryError(
            f"{workspace.shown(path)}: the image is missing; type `{build} {image}_{hardware}`, or copy the file there"
        )
    if verify and sha256(path) != one.sif:
        raise OrreryError(
            f"{workspace.shown(path)}: the file is not the one of {LOCK}; remove it and type `{build} {image}_{hardware}`"
        )
    return path


def record_path(workspace: Workspace, images_dir: Path, image: Image, hardware: Hardware) -> Path:
    """The note that an image of the present recipe was built in `images_dir`; a note whose image is gone is removed."""
    path = (
        images_dir / "built" / f"{image}-{hardware}-{recipe(workspace, image, hardware)[:16]}.json"
    )
    if (
        path.exists()
        and not (images_dir / file_name(image, hardware, read_record(path).sif)).is_file()
    ):
        path.unlink()
    return path


def read_record(path: Path) -> Built:
    return read_as(path, Built, "remove it, and the image is built again")


def _image(role: str) -> Image:
    known: dict[str, Image] = {image: image for image in IMAGES} | IMAGE_OF
    if role not in known:
        raise OrreryError(
            f"image: there is none for the role {role!r}; there are {', '.join(known)}"
        )
    return known[role]
