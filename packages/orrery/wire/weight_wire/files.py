"""Send weights as safetensors files. Engines memory-map them.

- The folder (mode 0700) is in shared memory on one node, otherwise in the run directory.
- `version_<n>/00000.safetensors …`: shards of at most SHARD_BYTES, or of one larger tensor.
- `version_<n>.json`: the marker, written last and removed first.
- The publisher keeps the newest `keep` versions.
"""

import math
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np
from safetensors import SafetensorError

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sync, write_atomic
from orrery.runtime.run_directory import ENLARGE, SHARED_MEMORY, WIRE, memory_prefix, weights_path
from orrery.wire import nfs
from orrery.wire.columns import split_header
from orrery.wire.fingerprint import array_fingerprint, digest, tensor_fingerprint
from orrery.wire.weight_wire.leases import Published

if TYPE_CHECKING:
    import torch

SHARD_BYTES = 1 << 30


def weight_dir(run_dir: Path, attempt: int, num_nodes: int = 1) -> Path:
    if num_nodes > 1:
        return weights_path(run_dir, WIRE) / f"attempt{attempt}"
    return SHARED_MEMORY / f"{memory_prefix(Path(run_dir))}attempt{attempt}"


def remove_weight_dir(run_dir: Path, attempt: int, num_nodes: int = 1) -> None:
    shutil.rmtree(weight_dir(run_dir, attempt, num_nodes), ignore_errors=True)


def own(folder: Path) -> None:
    """Create `folder` with mode 0700. Raise OrreryError if it is a link or has another owner."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.is_symlink() or folder.stat().st_uid != os.getuid():
        raise OrreryError(
            f"{folder}: is a link or another user's folder. "
            "Remove it, or ask its owner to, and run again"
        )
    folder.chmod(0o700)


def check_room(run_dir: Path, num_nodes: int, keep: int, version_bytes: int) -> int:
    """Return the bytes of shared memory for `keep` + 1 versions, or 0 if on disk.

    Raise OrreryError if the versions do not fit.
    """
    where, enlarge = Path(run_dir), "free some there"
    if num_nodes == 1:
        where = SHARED_MEMORY
        enlarge = ENLARGE
    needed, free = (keep + 1) * version_bytes, shutil.disk_usage(where).free
    if needed > free:
        raise OrreryError(
            f"transport.weights: 'files' needs {needed / 1e9:.2f} GB in {where} for {keep + 1} "
            f"versions of {version_bytes / 1e9:.2f} GB, but {free / 1e9:.2f} GB are free. "
            f"Set it to 'nccl', lower orchestrator.max_batches_ahead, or {enlarge}"
        )
    return needed if where == SHARED_MEMORY else 0


class WeightPublisher:
    def __init__(self, folder: Path, keep: int = 2, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = Path(folder)
        self._keep, self._shard_bytes = keep, shard_bytes
        self._last_version: int | None = None
        own(self.folder)

    def publish(
        self,
        version: int,
        named_tensors: "Iterable[tuple[str, torch.Tensor]]",
        canary: Sequence[float] = (),
    ) -> Published:
        return self._publish(
            version, lambda aside: self._write_shards(aside, named_tensors), canary
        )

    def publish_folder(self, version: int, folder: Path) -> Published:
        """Publish symlinks to the safetensors files of `folder`."""
        return self._publish(version, lambda aside: _link_shards(aside, folder))

    def _publish(
        self, version: int, write: Callable[[Path], dict[str, int]], canary: Sequence[float] = ()
    ) -> Published:
        if self._last_version is not None and version <= self._last_version:
            raise OrreryError(
                f"weight wire: cannot publish version {version} after version {self._last_version}"
                "; versions must increase"
            )
        target = self.folder / f"version_{version}"
        aside = self.folder / f".version_{version}.{os.getpid()}"
        shutil.rmtree(aside, ignore_errors=True)
        aside.mkdir(parents=True)
        try:
            fingerprints = write(aside)
        except (SafetensorError, OSError) as error:
            raise OrreryError(
                f"{aside}: weights cannot be written ({error}); `df -h {self.folder}` shows the "
                f"free space; if it is shared memory, {ENLARGE}"
            ) from error
        shutil.rmtree(target, ignore_errors=True)
        sync(aside)
        aside.rename(target)  # readers wait for the marker
        summary = digest(fingerprints)
        published = Published(version, str(target), fingerprints, summary, tuple(canary))
        write_atomic(self.folder / f"version_{version}.json", msgspec.json.encode(published))
        self._last_version = version
        for old in sorted(_versions(self.folder))[: -self._keep]:
            (self.folder / f"version_{old}.json").unlink(missing_ok=True)
            shutil.rmtree(self.folder / f"version_{old}", ignore_errors=True)
        return published

    def close(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _write_shards(
        self, aside: Path, named_tensors: "Iterable[tuple[str, torch.Tensor]]"
    ) -> dict[str, int]:
        import torch
        from safetensors.torch import save_file

        fingerprints: dict[str, int] = {}
        shard: dict[str, torch.Tensor] = {}
        num_shards = shard_bytes = 0

        def flush() -> None:
            nonlocal num_shards, shard_bytes
            if shard:
                path = aside / f"{num_shards:05d}.safetensors"
                save_file(shard, path)
                sync(path)
                num_shards += 1
                shard.clear()
                shard_bytes = 0

        for name, tensor in named_tensors:
            if name in fingerprints:
                raise OrreryError(f"weight wire: tensor {name!r} was given twice")
            tensor = tensor.detach()
            fingerprints[name] = tensor_fingerprint(tensor)
            tensor = tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
            if shard and shard_bytes + tensor.nbytes > self._shard_bytes:
                flush()
            shard[name] = tensor
            shard_bytes += tensor.nbytes
        flush()
        if not fingerprints:
            raise OrreryError("weight wire: a version needs at least one tensor")
        return fingerprints


def _link_shards(aside: Path, folder: Path) -> dict[str, int]:
    fingerprints: dict[str, int] = {}
    # Do not resolve symlinks, because a container mounts the folder under this name.
    for path in sorted(folder.absolute().glob("*.safetensors")):
        (aside / path.name).symlink_to(path)
        fingerprints |= {name: array_fingerprint(bits) for name, bits in _tensor_bits(path)}
    if not fingerprints:
        raise OrreryError(f"{folder}: no weights found. Run the stage that writes them first")
    return fingerprints


def _tensor_bits(path: Path) -> Iterator[tuple[str, np.ndarray]]:
    header, data = split_header(np.memmap(path, np.uint8, "r"))
    for name, entry in header.items():
        if name != "__metadata__":
            begin, end = entry["data_offsets"]
            elements = math.prod(entry["shape"])
            integers = f"<i{(end - begin) // elements}" if elements else "<i1"
            yield name, np.frombuffer(data[begin:end].tobytes(), integers)


class WeightWatch:
    def __init__(self, folder: Path) -> None:
        self.folder = Path(folder)
        self._found: tuple[tuple[int, int], Published] | None = None

    def latest(self) -> Published | None:
        for version in sorted(_versions(self.folder), reverse=True):
            file = nfs.identity(self.folder / f"version_{version}.json")
            if file is None:
                continue
            if self._found is not None:
                known, published = self._found
                if known == file and published.version == version:
                    return published
            found = self.version(version)
            if found is not None:
                self._found = file, found
                return found
        return None

    def version(self, version: int) -> Published | None:
        path = self.folder / f"version_{version}.json"
        try:
            content = nfs.read(path)
            return None if content is None else msgspec.json.decode(content, type=Published)
        except msgspec.DecodeError as error:
            raise OrreryError(f"{path}: not a marker of published weights ({error})") from error


def read_weights(path: "Path | str", device: str = "cpu") -> "Iterator[tuple[str, torch.Tensor]]":
    from safetensors import safe_open

    folder = Path(path)
    # NFS may show the newest version's folder late.
    if not any(version > _version(folder) for version in _versions(folder.parent)):
        nfs.appears(folder)
    shards = sorted(folder.glob("*.safetensors"))
    if not shards:
        raise OrreryError(
            f"{folder}: no weights found; the publisher keeps only the newest versions, "
            "so read the latest"
        )
    for shard in shards:
        try:
            with safe_open(shard, framework="pt", device=device) as file:
                for name in file.keys():  # noqa: SIM118 (not a dict)
                    yield name, file.get_tensor(name)
        except FileNotFoundError as error:
            raise OrreryError(
                f"{shard}: removed while it was read; the publisher keeps only the newest "
                "versions, so read the latest"
            ) from error


def _versions(folder: Path) -> list[int]:
    return [version for path in folder.glob("version_*.json") if (version := _version(path)) >= 0]


def _version(path: Path) -> int:
    name = path.stem.removeprefix("version_")
    return int(name) if name.isdigit() else -1
