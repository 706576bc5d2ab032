"""Store and fetch training states as snapshots (folders of files with hashed blocks).

- A snapshot `round_N` has a file per part of the state, and `snapshot.json` with each block's
  sha256. A rename publishes it, so readers never see a partial snapshot.
- The trainer writes only `round_N.copied`. The keeper hashes and publishes it.
"""

import hashlib
import http
import http.client
import json
import os
import re
import shutil
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import msgspec

from orrery.elastic.certificates import Certificates
from orrery.elastic.types import ElasticError
from orrery.manifest.publish import make_folder, publish_folder, write_atomic
from orrery.runtime.run_directory import ENLARGE

BLOCK_BYTES = 16 << 20
HEADER = "snapshot.json"
SILENCE_S = 20.0
ANSWER_S = 300.0  # limit of a whole HTTP response
POLL_S = 0.2
LANES = 2  # connections per peer: one receives while the other hashes
MAX_HEADER_BYTES = 64 << 20
# a deeply nested header raises RecursionError
BAD_HEADER = (OSError, ValueError, RecursionError, msgspec.MsgspecError, ElasticError)
_PUBLISHED = re.compile(r"round_([0-9]{9})")
_PART = re.compile(r"[\w-][\w.-]*(/[\w-][\w.-]*)*")  # a path inside the snapshot's folder
Buffer = bytes | bytearray | memoryview


class SnapshotPart(msgspec.Struct, frozen=True):
    num_bytes: int
    blocks: tuple[str, ...]


class StateSnapshot(msgspec.Struct, frozen=True):
    """A snapshot's header. `digest`: the ledger's digest of the state after `round`."""

    round: int
    digest: str
    block_bytes: int
    parts: dict[str, SnapshotPart]
    facts: dict[str, Any] = {}  # such as the training step

    def blocks(self) -> Iterator["Block"]:
        for name, part in self.parts.items():
            for index, sha256 in enumerate(part.blocks):
                offset = index * self.block_bytes
                size = min(self.block_bytes, part.num_bytes - offset)
                yield Block(name, offset, size, sha256)


class Block(NamedTuple):
    part: str
    offset: int
    size: int
    sha256: str


class BlockLacking(Exception):
    """A source lacks a block."""


class FetchFailed(ElasticError):
    """Blocks are missing. `num_fetched` arrived."""

    def __init__(self, text: str, num_fetched: int) -> None:
        super().__init__(text)
        self.num_fetched = num_fetched


class BlockSource(Protocol):
    name: str

    def read(self, block: Block) -> bytes:
        """Raise BlockLacking if the block is missing, or OSError if the source fails."""


class FolderSource:
    def __init__(self, folder: Path) -> None:
        self.name, self._folder = str(folder), folder

    def read(self, block: Block) -> bytes:
        try:
            with (self._folder / block.part).open("rb") as file:
                return os.pread(file.fileno(), block.size, block.offset)
        except FileNotFoundError:
            raise BlockLacking(block.part) from None


def snapshot_dir(folder: Path, number: int) -> Path:
    return folder / f"round_{number:09d}"


def published(folder: Path) -> list[Path]:
    """Return complete snapshots, oldest first."""
    found = folder.iterdir() if folder.is_dir() else ()
    return sorted(path for path in found if _PUBLISHED.fullmatch(path.name))


def read_header(snapshot: Path) -> StateSnapshot:
    path = snapshot / HEADER
    try:
        header = msgspec.json.decode(path.read_bytes(), type=StateSnapshot)
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(
            f"{path}: cannot be read ({error}); remove {snapshot} to use the snapshot before it"
        ) from error
    check_header(header, str(path))
    return header


def check_header(header: StateSnapshot, place: str) -> None:
    """Raise ElasticError if a part has an invalid path or number of blocks."""
    for name, part in header.parts.items():
        count = -(-part.num_bytes // max(header.block_bytes, 1))
        if not _PART.fullmatch(name) or name == HEADER or count != len(part.blocks):
            raise ElasticError(
                f"{place}: the header's part {name!r} ({part.num_bytes} bytes in "
                f"{len(part.blocks)} blocks of {header.block_bytes} bytes) is damaged; "
                "take the snapshot from another site"
            )


def check_room(folder: Path, num_bytes: int, count: int) -> None:
    if count * num_bytes > (free := shutil.disk_usage(folder).free):
        raise ElasticError(
            f"trainer.elastic.snapshots: {count} × {num_bytes / 1e9:.1f} GB need "
            f"{count * num_bytes / 1e9:.1f} GB of shared memory, and {folder} has "
            f"{free / 1e9:.1f} GB free; lower trainer.elastic.snapshots.keep, or {ENLARGE}"
        )


def copy_state(
    folder: Path,
    number: int,
    digest: str,
    parts: Mapping[str, Buffer],
    facts: Mapping[str, Any] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Path:
    """Copy the state into `folder`, for the keeper. Raise ElasticError if space is lacking."""
    make_folder(folder)
    check_room(folder, sum(memoryview(part).nbytes for part in parts.values()), 1)

    def write(partial: Path) -> dict[str, int]:
        for name, part in parts.items():
            assert _PART.fullmatch(name), name
            (partial / name).write_bytes(part)
        return {name: memoryview(part).nbytes for name, part in parts.items()}

    return _copied(folder, number, digest, write, facts, block_bytes)


def link_files(
    folder: Path,
    number: int,
    digest: str,
    files: Sequence[Path],
    facts: Mapping[str, Any] | None = None,
    block_bytes: int = BLOCK_BYTES,
) -> Path:
    """Do as `copy_state`, but hard-link finished files on the same disk."""
    make_folder(folder)

    def write(partial: Path) -> dict[str, int]:
        for file in files:
            os.link(file, partial / file.name)
        return {file.name: file.stat().st_size for file in files}

    return _copied(folder, number, digest, write, facts, block_bytes)


def _copied(
    folder: Path,
    number: int,
    digest: str,
    write: Callable[[Path], dict[str, int]],
    facts: Mapping[str, Any] | None,
    block_bytes: int,
) -> Path:
    place = snapshot_dir(folder, number)
    partial = place.with_name(f".{place.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    sizes = {name: SnapshotPart(size, ()) for name, size in write(partial).items()}
    header = StateSnapshot(number, digest, block_bytes, sizes, dict(facts or {}))
    (partial / HEADER).write_bytes(msgspec.json.encode(header))
    copied = place.with_suffix(".copied")
    shutil.rmtree(copied, ignore_errors=True)
    partial.rename(copied)
    return copied


def publish_copies(folder: Path, keep: int) -> list[Path]:
    """Hash and publish all copies. Return their folders.

    Remove snapshots of rewound rounds, and all but the newest `keep` snapshots.
    """
    done = []
    for copied in sorted(folder.glob("round_*.copied")):
        header = msgspec.json.decode((copied / HEADER).read_bytes(), type=StateSnapshot)
        parts = {
            name: SnapshotPart(part.num_bytes, hashes(copied / name, header.block_bytes))
            for name, part in header.parts.items()
        }
        header = msgspec.structs.replace(header, parts=parts)
        write_atomic(copied / HEADER, msgspec.json.encode(header))
        place = copied.with_suffix("")
        shutil.rmtree(place, ignore_errors=True)
        copied.rename(place)
        done.append(place)
    if done:
        _remove(path for path in published(folder) if path > done[-1])
    remove_old(folder, keep)
    return done


def remove_old(folder: Path, keep: int) -> None:
    _remove(published(folder)[: -max(keep, 1)])


def _remove(snapshots: Iterable[Path]) -> None:
    for path in snapshots:
        aside = path.with_name(f".{path.name}.removed")
        with suppress(OSError):
            path.rename(aside)  # readers must not see a partly removed folder
        shutil.rmtree(aside, ignore_errors=True)


def verify(snapshot: Path) -> StateSnapshot:
    """Raise ElasticError if a block is damaged or missing."""
    header = read_header(snapshot)
    for name, part in header.parts.items():
        path = snapshot / name
        found = hashes(path, header.block_bytes) if path.is_file() else ()
        if found != part.blocks:
            wrong = next(
                (i for i, (a, b) in enumerate(zip(found, part.blocks, strict=False)) if a != b),
                min(len(found), len(part.blocks)),
            )
            raise ElasticError(
                f"{path}: block {wrong} is damaged or missing; remove {snapshot} to use the "
                "snapshot before it, or take it from another site"
            )
    return header


def assemble(header: StateSnapshot, folder: Path, sources: Sequence[BlockSource]) -> Path:
    """Fetch a snapshot from `sources` and publish it below `folder`.

    Drop sources that fail or send a wrong block. Raise FetchFailed if blocks are missing.
    """
    place = snapshot_dir(folder, header.round)
    partial = place.with_name(f".{place.name}.{_digest_of(header)[:12]}.partial")
    partial.mkdir(parents=True, exist_ok=True)
    for name, part in header.parts.items():
        (partial / name).parent.mkdir(parents=True, exist_ok=True)
        with (partial / name).open("ab") as file:
            file.truncate(part.num_bytes)
    missing = [block for block in header.blocks() if not _has(partial, block)]
    queue = _BlockQueue(missing)
    with ThreadPoolExecutor(max(1, len(sources))) as pool:
        list(pool.map(lambda source: queue.drain(source, partial), sources))
    if queue.num_left:
        raise FetchFailed(
            f"snapshot of round {header.round}: {queue.num_left} blocks are missing, and no source "
            f"is left ({'; '.join(queue.faults) or 'none was given'}); the next try resumes",
            len(missing) - queue.num_left,
        )
    (partial / HEADER).write_bytes(msgspec.json.encode(header))
    publish_folder(partial, place)
    for other in folder.glob(f".{place.name}.*.partial"):
        shutil.rmtree(other, ignore_errors=True)
    return place


class _BlockQueue:
    def __init__(self, blocks: list[Block]) -> None:
        self._todo, self._num_open = blocks[::-1], 0
        self._changed = threading.Condition()
        self.faults: list[str] = []

    @property
    def num_left(self) -> int:
        return len(self._todo)

    def drain(self, source: BlockSource, partial: Path) -> None:
        lacking: set[str] = set()
        while (block := self._take(lacking)) is not None:
            fault = "failed"
            try:
                data = source.read(block)
                if hashlib.sha256(data).hexdigest() != block.sha256:
                    fault = f"{source.name}: a block of {block.part} has another sha256"
                else:
                    _write(partial / block.part, data, block.offset)
                    fault = ""
            except BlockLacking:
                lacking.add(block.sha256)
                fault = "lacking"
            except (OSError, ValueError) as error:
                fault = f"{source.name}: {error or type(error).__name__}"
            finally:
                self._done(block if fault else None)
            if fault and fault != "lacking":
                with self._changed:
                    self.faults.append(fault)
                return

    def _take(self, lacking: set[str]) -> Block | None:
        """Pop a block not in `lacking`. Return None once no other thread can put one back."""
        with self._changed:
            while True:
                for index in range(len(self._todo) - 1, -1, -1):
                    if self._todo[index].sha256 not in lacking:
                        self._num_open += 1
                        return self._todo.pop(index)
                if not self._num_open:
                    return None
                self._changed.wait()

    def _done(self, put_back: Block | None) -> None:
        with self._changed:
            self._num_open -= 1
            if put_back is not None:
                self._todo.append(put_back)
            self._changed.notify_all()


def _write(path: Path, data: bytes, offset: int) -> None:
    with path.open("r+b") as file:
        os.pwrite(file.fileno(), data, offset)


def _has(partial: Path, block: Block) -> bool:
    try:
        data = FolderSource(partial).read(block)
    except (BlockLacking, OSError):
        return False
    return hashlib.sha256(data).hexdigest() == block.sha256


def hashes(path: Path, block_bytes: int) -> tuple[str, ...]:
    found = []
    with path.open("rb", buffering=0) as file:
        while data := file.read(block_bytes):
            found.append(hashlib.sha256(data).hexdigest())
    return tuple(found)


def _digest_of(header: StateSnapshot) -> str:
    return hashlib.sha256(
        json.dumps(msgspec.to_builtins(header), sort_keys=True).encode()
    ).hexdigest()


class PeerSource:
    def __init__(self, peer: str, certificates: Certificates) -> None:
        self.name, self.num_bytes = peer, 0  # bytes of received blocks
        address, _, port = peer.rpartition(":")
        self._connection = http.client.HTTPSConnection(
            address, int(port), timeout=SILENCE_S, context=certificates.client()
        )

    def newest(self) -> StateSnapshot | None:
        body = self._get("/newest", MAX_HEADER_BYTES)
        if body is None:
            return None
        header = msgspec.json.decode(body, type=StateSnapshot)
        check_header(header, self.name)
        return header

    def read(self, block: Block) -> bytes:
        body = self._get(f"/block/{block.sha256}", block.size)
        if body is None:
            raise BlockLacking(block.sha256)
        self.num_bytes += len(body)
        return body

    def close(self) -> None:
        self._connection.close()

    def _get(self, path: str, most: int) -> bytes | None:
        """Return the body of `path`, or None if missing. Raise ValueError above `most` bytes."""
        try:
            self._connection.request("GET", path)
            with _limited(self._connection.sock):
                answer = self._connection.getresponse()
                size = int(answer.headers.get("Content-Length", -1))
                if not 0 <= size <= most:
                    raise ValueError(f"{size} bytes instead of at most {most}")
                if len(body := answer.read(size)) < size:
                    raise ConnectionResetError(f"closed after {len(body)} of {size} bytes")
        except http.client.HTTPException as error:
            raise OSError(str(error) or type(error).__name__) from error
        return body if answer.status == http.HTTPStatus.OK else None


@contextmanager
def _limited(sock: socket.socket) -> Iterator[None]:
    timer = threading.Timer(ANSWER_S, _shut, (sock,))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _shut(sock: socket.socket) -> None:
    with suppress(OSError):
        socket.socket.shutdown(sock, socket.SHUT_RDWR)


def fetch_state(
    peers: Callable[[], Sequence[str]],
    wanted: Callable[[], tuple[int, str]],
    folder: Path,
    certificates: Certificates,
    deadline_s: float,
) -> Path:
    """Fetch the newest committed state from all peers at once. Return its folder.

    `peers` returns snapshot servers (ADDRESS:PORT). `wanted` returns the last round's number and
    digest. Raise FetchFailed after `deadline_s` without a new block, or if no peer has this round
    and one has a later round.
    """
    end_s, reason, num_fetched = time.monotonic() + deadline_s, "no peer is live", 0
    while True:
        number, digest = wanted()
        sources, headers, is_gone = [], [], False
        for peer in peers():
            source = PeerSource(peer, certificates)
            try:
                header = source.newest()
            except BAD_HEADER as error:
                reason = f"{peer}: {error or type(error).__name__}"
                source.close()
                continue
            sources.append(source)
            if header is None or (header.round, header.digest) != (number, digest):
                is_gone |= header is not None and header.round > number
                has = f"round {header.round}" if header else "no snapshot"
                reason = f"{peer} has {has}, and the run is at round {number}"
            else:
                headers.append(header)
                sources += [PeerSource(peer, certificates) for _ in range(LANES - 1)]
        try:
            if headers:
                return assemble(headers[0], folder, sources)
        except FetchFailed as error:
            reason, num_fetched = str(error), num_fetched + error.num_fetched
            if error.num_fetched:
                end_s = time.monotonic() + deadline_s
        finally:
            for source in sources:
                source.close()
        time.sleep(POLL_S)
        is_gone = is_gone and not headers and wanted() == (number, digest)
        if is_gone or time.monotonic() >= end_s:
            raise FetchFailed(
                f"recovery: no state of round {number} from other sites ({reason}); check that "
                "they run and their snapshot ports are open, then join again",
                num_fetched,
            )
