"""Write files and folders that survive a power cut, and hash files."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path, PurePath

DATA_SUFFIXES = (".jsonl", ".json", ".csv", ".parquet", ".arrow")


def write_atomic(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(data)
    publish_file(temporary, path)


def publish_file(temporary: Path, path: Path) -> None:
    """Rename `temporary` durably to `path` in the same folder."""
    sync(temporary)
    temporary.replace(path)
    sync(path.parent)


def publish_folder(temporary: Path, folder: Path) -> None:
    sync_tree(temporary)
    shutil.rmtree(folder, ignore_errors=True)
    temporary.rename(folder)
    sync(folder.parent)


def sync_tree(folder: Path) -> None:
    for parent, _, files in os.walk(folder, topdown=False):
        for name in files:
            if not os.path.islink(path := os.path.join(parent, name)):
                sync(Path(path))
        sync(Path(parent))


def sync_folders(folder: Path) -> None:
    """Call fsync on `folder` and folders below it, so that file names are durable."""
    for parent, _, _ in os.walk(folder, topdown=False):
        with suppress(FileNotFoundError):  # if another process removes the folder
            sync(Path(parent))


def make_folder(folder: Path) -> None:
    if folder.is_dir():
        return
    make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    sync(folder.parent)


def sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sha256_of(files: Sequence[Path]) -> str:
    """Return the sha256 of a file or, for several files, of `sha256sum`'s output."""
    files = sorted(files, key=lambda path: path.name)
    with ThreadPoolExecutor(min(len(files), len(os.sched_getaffinity(0)))) as pool:
        digests = list(pool.map(sha256, files))
    if len(files) == 1:
        return digests[0]
    lines = "".join(f"{digest}  {path.name}\n" for digest, path in zip(digests, files, strict=True))
    return hashlib.sha256(lines.encode()).hexdigest()


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def data_files(folder: Path) -> list[Path]:
    found = (path for path in folder.rglob("*") if is_data(path.relative_to(folder)))
    return sorted(path for path in found if path.is_file())


def is_data(path: PurePath) -> bool:
    return path.suffix in DATA_SUFFIXES and not any(part[0] == "." for part in path.parts)


def sha256_of_data(path: Path) -> str:
    """Return the sha256 of a file or, for a folder, of `sha256sum`'s output on its data files."""
    if not path.is_dir():
        return sha256(path)
    lines = [f"{sha256(p)}  {p.relative_to(path).as_posix()}\n" for p in data_files(path)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()
