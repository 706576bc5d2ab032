"""Copy complete checkpoints to an object store or another host, and fetch the newest.

    python -m orrery.trainer.uploader check|upload|restore TARGET [RUN_DIR STAGE [KEEP]]

- TARGET is an fsspec URL, such as `s3://bucket/runs`. Files lie in `TARGET/<run>/<stage>`.
- `blocks/<sha256>` is a piece of a file. A header `round_<step>.json` lists a checkpoint's blocks.
- A header is written after its blocks.
"""

import hashlib
import os
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec

from orrery.elastic.snapshots import (
    BLOCK_BYTES,
    HEADER,
    Block,
    BlockLacking,
    FolderSource,
    SnapshotPart,
    StateSnapshot,
    assemble,
    check_header,
    hashes,
    snapshot_dir,
)
from orrery.elastic.types import ElasticError
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import publish_folder
from orrery.runtime.run_directory import Checkpoint, checkpoint_named, checkpoints_dir
from orrery.wire import checkpoints

FIELD = "[roles] checkpoint_target"
FETCHED = ".fetched"
UPLOADING = f"{checkpoints.DISCARDED}.uploading"


class FsspecTarget:
    def __init__(self, url: str) -> None:
        import fsspec

        self.name = url
        self._files, root = fsspec.core.url_to_fs(url)
        self._root = root.rstrip("/")
        self._files.makedirs(f"{self._root}/blocks", exist_ok=True)

    def upload(self, header: StateSnapshot, source: FolderSource, keep: int) -> None:
        """Upload a checkpoint, and keep the newest `keep`. Remove later steps, now abandoned."""
        have = self._sizes()
        blocks = {block.sha256: block for block in header.blocks()}
        for block in blocks.values():
            if have.get(block.sha256) != block.size:
                data = source.read(block)
                if hashlib.sha256(data).hexdigest() != block.sha256:
                    raise ElasticError(f"{source.name}: {block.part} was changed during the upload")
                self._files.pipe_file(f"{self._root}/blocks/{block.sha256}", data)
        name = snapshot_dir(Path(), header.round).name
        newest = f"{name}.json"
        self._files.pipe_file(f"{self._root}/{newest}", msgspec.json.encode(header))
        kept: dict[str, StateSnapshot] = {}
        for path in reversed(self._headers()):
            # Remove unreadable headers, left by killed uploads.
            with suppress(msgspec.MsgspecError, ElasticError):
                if len(kept) < keep and path.rpartition("/")[2] <= newest:
                    kept[path] = self._header(path)
            if path not in kept:
                self._files.rm_file(path)
        used = {block.sha256 for each in kept.values() for block in each.blocks()}
        for sha in self._sizes().keys() - used:
            self._files.rm_file(f"{self._root}/blocks/{sha}")

    def newest(self) -> StateSnapshot | None:
        for path in reversed(self._headers()):
            with suppress(OSError, msgspec.MsgspecError, ElasticError):
                return self._header(path)
        return None

    def read(self, block: Block) -> bytes:
        try:
            found: bytes = self._files.cat_file(f"{self._root}/blocks/{block.sha256}")
        except FileNotFoundError:
            raise BlockLacking(block.sha256) from None
        return found

    def _headers(self) -> list[str]:
        return sorted(self._files.glob(f"{self._root}/round_*.json"))

    def _header(self, path: str) -> StateSnapshot:
        header = msgspec.json.decode(self._files.cat_file(path), type=StateSnapshot)
        check_header(header, path)
        return header

    def _sizes(self) -> dict[str, int]:
        self._files.invalidate_cache()
        listed: list[dict[str, Any]] = self._files.ls(f"{self._root}/blocks", detail=True)
        return {each["name"].rpartition("/")[2]: each["size"] for each in listed}


def target_of(url: str, run_dir: Path, stage: str) -> FsspecTarget:
    return FsspecTarget(f"{url.rstrip('/')}/{run_dir.resolve().name}/{stage}")


@contextmanager
def _kept(folder: Path, links: Path) -> Iterator[Path]:
    """Yield hard links to the files of `folder`, because the trainer may remove it meanwhile."""
    shutil.rmtree(links, ignore_errors=True)
    files = links
    try:
        shutil.copytree(folder, links, copy_function=os.link)
    except OSError:
        files = folder
    try:
        yield files
    finally:
        shutil.rmtree(links, ignore_errors=True)


def describe(folder: Path, checkpoint: Checkpoint) -> StateSnapshot:
    files = [path for path in folder.rglob("*") if path.is_file()]
    parts = {
        path.relative_to(folder).as_posix(): SnapshotPart(
            path.stat().st_size, hashes(path, BLOCK_BYTES)
        )
        for path in sorted(files)
    }
    facts: dict[str, Any] = {"checkpoint": checkpoint.name}
    return StateSnapshot(checkpoint.step, _digest(folder), BLOCK_BYTES, parts, facts)


def _digest(folder: Path) -> str:
    return hashlib.sha256((folder / checkpoints.FILES).read_bytes()).hexdigest()


def upload(target: FsspecTarget, run_dir: Path, stage: str, keep: int) -> None:
    done = None
    while (newest := checkpoints.latest(run_dir, stage)) not in (None, done):
        assert newest is not None
        folder, there = checkpoints_dir(run_dir, stage) / newest.name, target.newest()
        if there is None or there.digest != _digest(folder):
            with _kept(folder, checkpoints_dir(run_dir) / UPLOADING) as files:
                target.upload(describe(files, newest), FolderSource(files), keep)
        done = newest


def restore(target: FsspecTarget, run_dir: Path, stage: str) -> str:
    """Fetch the newest checkpoint. Raise OrreryError if none exists or the run has one."""
    folder = checkpoints_dir(run_dir, stage)
    if checkpoints.latest(run_dir, stage) is not None:
        raise OrreryError(
            f"{folder}: has a checkpoint, and the run resumes from it; remove its step folders to "
            f"fetch the newest of {target.name}"
        )
    header = target.newest()
    if header is None or checkpoint_named(str(header.facts.get("checkpoint"))) is None:
        raise OrreryError(
            f"{target.name}: has no checkpoint; correct {FIELD} in the site file, or start anew"
        )
    place = folder / str(header.facts["checkpoint"])
    fetched = assemble(header, folder / FETCHED, [target])
    (fetched / HEADER).unlink()
    publish_folder(fetched, place)
    shutil.rmtree(folder / FETCHED)
    checkpoints.verify(place)
    return f"{place}: fetched from {target.name}"


def main() -> None:
    action, url, *rest = sys.argv[1:]
    try:
        if action == "check":
            FsspecTarget(url)
            return
        target = target_of(url, Path(rest[0]), rest[1])
        if action == "upload":
            os.nice(10)
            upload(target, Path(rest[0]), rest[1], int(rest[2]))
        else:
            print(restore(target, Path(rest[0]), rest[1]))
    except OrreryError as error:
        raise SystemExit(f"error: {error}") from None
    except (ElasticError, OSError, ImportError, ValueError, msgspec.MsgspecError) as error:
        raise SystemExit(
            f"error: {FIELD} {url!r}: {error or type(error).__name__}; check the address and its "
            f"credentials, or set it to ''"
        ) from None


if __name__ == "__main__":
    main()
