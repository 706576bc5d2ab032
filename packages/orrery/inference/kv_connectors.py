"""Configure vLLM's KV transfers and KV tiers from the manifest, without importing vLLM.

- The first `prefill_replicas` engines prefill, and the others read their KV blocks. Prefill engines
  keep a block for a lease longer than any request, or NIXL could send a reused block.
- An attempt removes earlier attempts' files, because their block hashes recur with other weights.
"""

import json
import logging
import os
import shutil
import socket
import threading
import uuid
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from orrery.inference.patches.registry import KEPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, disk_block_bytes, on_disk_bytes
from orrery.runtime import network, run_directory
from orrery.runtime.network import LOOPBACK_INTERFACE, interface
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous
from orrery.wire.rendezvous import request_s

LEASE_MARGIN_S = 300.0
OPEN_MOONCAKE = "ORRERY_MOONCAKE_ON_ALL_INTERFACES"
HASH_SEED = "0"  # gives equal block hashes in all engines and after restarts
STORE_DEADLINE_S = 120.0
DISK_TIER = "orrery_disk"


def lease_s(manifest: Manifest) -> int:
    return int(request_s(manifest) + scaled(LEASE_MARGIN_S))


def connector_config(manifest: Manifest, index: int, disk: Path) -> dict[str, Any] | None:
    transfer, tiers = _transfer_config(manifest, index), _offload_config(manifest, disk)
    if transfer is None or tiers is None:
        return transfer or tiers
    return {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": tiers["kv_load_failure_policy"],
        "engine_id": transfer.pop("engine_id"),
        "kv_connector_extra_config": {"connectors": [transfer, tiers]},  # queried in this order
    }


def _transfer_config(manifest: Manifest, index: int) -> dict[str, Any] | None:
    inference, transfer = manifest.inference, manifest.inference.kv_transfer
    if transfer.kind == "none":
        return None
    config: dict[str, Any] = {
        "kv_role": "kv_producer" if index < inference.prefill_replicas else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "engine_id": f"{index}-{uuid.uuid4()}",  # new, because a restart loses all blocks
    }
    if transfer.kind == "nixl":
        return config | {
            "kv_connector": "NixlConnector",
            "kv_connector_extra_config": {"kv_lease_duration": lease_s(manifest)},
        }
    return config | {
        "kv_connector": "MooncakeConnector",
        "kv_connector_extra_config": {"mooncake_protocol": transfer.protocol},
    }


def transfer_environment(manifest: Manifest, host: str, port: int) -> dict[str, str]:
    routes = {KEPT: "1"} if manifest.transport.routed_experts else {}
    if manifest.inference.kv_transfer.kind == "nixl":
        return routes | {
            "VLLM_NIXL_SIDE_CHANNEL_HOST": host,
            "VLLM_NIXL_SIDE_CHANNEL_PORT": str(port),
        }
    return routes | {
        "VLLM_MOONCAKE_BOOTSTRAP_PORT": str(port),
        "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT": str(lease_s(manifest)),
        "MC_TCP_BIND_ADDRESS": host,
    }


def handover(config: Any, host: str) -> dict[str, str]:
    if config is None or "VLLM_MOONCAKE_BOOTSTRAP_PORT" not in os.environ:
        return {}  # NIXL adds the engine's id and address to each answer
    return {
        "kv_engine_id": config.engine_id,
        "kv_bootstrap": f"http://{host}:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
    }


def disk_folder(ctx: RoleContext) -> Path:
    """Return the engine's scratch folder. It outlives restarts within an attempt."""
    name = str(ctx.index) if ctx.role == "inference" else ctx.name
    folder = run_directory.disk_folder(ctx.run_dir, ctx.stage)
    return folder / f"attempt_{ctx.attempt}" / name


def _offload_config(manifest: Manifest, disk: Path) -> dict[str, Any] | None:
    offload = manifest.inference.kv_offload
    if offload.kind == "none":
        return None
    if offload.kind == "mooncake":
        return {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
            "kv_connector_extra_config": {"save_decode_cache": True},
        }
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": offload.host_bytes,
        "spec_name": "Tiers",
        "spec_module_path": "orrery.inference.kv_tiers",
        "offload_prompt_only": False,  # a later turn's prompt contains earlier turns' answers
    }
    if offload.disk_bytes:
        max_bytes, _ = _shares(manifest, offload.disk_bytes)
        tier = {"type": DISK_TIER, "root_dir": str(disk), "max_bytes": max_bytes}
        extra["secondary_tiers"] = [tier]
    if manifest.hardware.accelerator == "cpu":
        extra["spec_name"] = "CpuTiers"
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def connect(ctx: RoleContext, engine: int) -> list[str]:
    disk = disk_folder(ctx)
    config = connector_config(ctx.manifest, engine, disk)
    if config is None:
        return []
    offload = ctx.manifest.inference.kv_offload
    if offload.kind != "none":
        os.environ["PYTHONHASHSEED"] = HASH_SEED
    if offload.kind == "mooncake":
        refuse_open_interfaces("inference.kv_offload.kind 'mooncake'")
        refuse_missing_rdma("inference.kv_offload", offload.protocol)
        store = rendezvous.await_endpoints(ctx, "kv_store", 1, scaled(STORE_DEADLINE_S))[0]
        disk.mkdir(parents=True, exist_ok=True)
        os.environ.update(store_environment(ctx.manifest, disk, store.info["rpc"]))
    elif offload.kind == "tiers":
        prefix = run_directory.role_memory_prefix(ctx.run_dir, ctx.name)
        config["engine_id"] = f"{prefix}{uuid.uuid4()}"  # part of the host tier's file name
        prepare_disk(disk)
    os.environ.update(routes_environment(ctx.manifest, disk))
    return ["--kv-transfer-config", json.dumps(config)]


def routes_environment(manifest: Manifest, disk: Path) -> dict[str, str]:
    """Return variables that make vLLM keep routes (chosen experts) as long as their KV blocks.

    `host_bytes` is per engine, `kv_cache_bytes` per device.
    """
    inference, offload = manifest.inference, manifest.inference.kv_offload
    if not manifest.transport.routed_experts or offload.kind != "tiers":
        return {}
    # Host blocks count twice, because routes and blocks are evicted in different orders.
    kept = 1 + 2 * offload.host_bytes / (inference.tensor_parallel * inference.kv_cache_bytes)
    if not offload.disk_bytes:
        return {KEPT: f"{kept:g}"}
    return {
        KEPT: f"{kept:g}",
        FOLDER: str(disk / "routes"),
        FOLDER_BYTES: str(_shares(manifest, offload.disk_bytes)[1]),
    }


def _shares(manifest: Manifest, disk_bytes: int) -> tuple[int, int]:
    """Split disk bytes into (KV bytes, route bytes) for equally many blocks."""
    cache, routes = disk_block_bytes(manifest.model, manifest.inference, manifest.route_bytes)
    caches = disk_bytes * cache // (cache + routes)
    return caches, disk_bytes - caches


def prepare_disk(disk: Path) -> None:
    for attempt in disk.parent.parent.glob("attempt_*"):
        if attempt != disk.parent:
            shutil.rmtree(attempt, ignore_errors=True)
    disk.mkdir(parents=True, exist_ok=True)


def remove_disk(disk: Path) -> None:
    shutil.rmtree(disk, ignore_errors=True)
    with suppress(OSError):
        disk.parent.rmdir()
        disk.parent.parent.rmdir()


def store_environment(manifest: Manifest, folder: Path, master: str) -> dict[str, str]:
    """Write Mooncake's client config. Return the environment variable with its path."""
    offload = manifest.inference.kv_offload
    assert offload.kind == "mooncake"
    share = offload.segment_bytes // manifest.inference.devices_per_replica
    path = folder / "mooncake.json"
    client = {
        "metadata_server": "P2PHANDSHAKE",
        "master_server_address": master,
        "protocol": offload.protocol,
        "device_name": os.environ.get("ORRERY_RDMA_DEVICE", ""),
        "mode": "embedded",
        "global_segment_size": share,
        "local_buffer_size": min(share, 1 << 30),
    }
    path.write_text(json.dumps(client))
    return {"MOONCAKE_CONFIG_PATH": str(path)}


def refuse_open_interfaces(what: str) -> None:
    ours = {LOOPBACK_INTERFACE, interface()}
    others = sorted(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name not in ours
        and any(address.family.name in ("AF_INET", "AF_INET6") for address in addresses)
    )
    if others and os.environ.get(OPEN_MOONCAKE) != "1":
        raise OrreryError(
            f"{what}: Mooncake's transfer engine listens on every interface, and this machine has "
            f"{', '.join(others)} besides the run's interface. Choose 'nixl' or 'tiers', run in a "
            f"network namespace, or, behind a firewall, set {OPEN_MOONCAKE} = '1' in [environment] "
            "of the site file"
        )


def refuse_missing_rdma(field: str, protocol: str) -> None:
    """Raise OrreryError if RDMA lacks a device, because Mooncake would silently use TCP."""
    if protocol == "rdma" and not network.rdma_devices():
        raise OrreryError(
            f"{field}.protocol 'rdma': {socket.gethostname()} has no device in "
            f"{network.RDMA_DEVICES}, so Mooncake would use TCP. Set {field}.protocol to 'tcp', "
            "or run on nodes with RDMA devices"
        )


log = logging.getLogger("orrery.inference.routes")

FOLDER = "ORRERY_ROUTES_FOLDER"
FOLDER_BYTES = "ORRERY_ROUTES_FOLDER_BYTES"


class BoundedFolder:
    """A size-limited folder. It evicts least recently used files, so reads may fail."""

    def __init__(self, folder: Path, max_bytes: int):
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._sizes: OrderedDict[str, int] = OrderedDict()  # by path, oldest use first
        self._num_bytes = 0
        for path, _, num_bytes in sorted(_files(folder), key=lambda found: found[1]):
            _remove(self._enter([path], num_bytes))

    @contextmanager
    def writing(self, paths: Sequence[str], num_bytes: int) -> Iterator[None]:
        """Make room for the `with` body to write `paths` of `num_bytes` each."""
        _remove(self._enter(paths, num_bytes))
        try:
            yield
        except BaseException:
            self._forget(path for path in paths if not os.path.exists(path))
            raise
        with self._lock:
            lost = [path for path in paths if path not in self._sizes]
        _remove(lost)

    def used(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                if path in self._sizes:
                    self._sizes.move_to_end(path)

    def _enter(self, paths: Iterable[str], num_bytes: int) -> list[str]:
        size, removed = on_disk_bytes(num_bytes), []
        with self._lock:
            for path in paths:
                if path not in self._sizes:
                    self._sizes[path] = size
                    self._num_bytes += size
                self._sizes.move_to_end(path)
            while self._num_bytes > self._max_bytes:
                path, its = self._sizes.popitem(last=False)
                self._num_bytes -= its
                removed.append(path)
        return removed

    def _forget(self, paths: Iterable[str]) -> None:
        with self._lock:
            for path in paths:
                self._num_bytes -= self._sizes.pop(path, 0)


def _remove(paths: Iterable[str]) -> None:
    for path in paths:
        with suppress(FileNotFoundError):
            os.unlink(path)


def _files(folder: Path) -> Iterator[tuple[str, int, int]]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(FileNotFoundError):
                status = os.stat(path := os.path.join(parent, name))
                yield path, status.st_mtime_ns, status.st_size


def is_on_disk(key: str) -> bool:
    folder = os.environ.get(FOLDER)
    return folder is not None and _path(Path(folder), key).is_file()


def _path(folder: Path, key: str) -> Path:
    return folder / key[:2] / key


class RoutesOnDisk:
    """Routes (chosen experts) on disk, one file per KV block. Only one thread may write."""

    def __init__(self) -> None:
        self._folder = Path(os.environ[FOLDER])
        self._files = BoundedFolder(self._folder, int(os.environ[FOLDER_BYTES]))

    def write(self, objects: Iterable[Any]) -> None:
        for each in objects:
            path = _path(self._folder, each.key)
            aside = path.with_suffix(f".{os.getpid()}")
            try:
                path.parent.mkdir(parents=True, exist_ok=True)
                with self._files.writing([str(path)], len(each.payload)):
                    aside.write_bytes(each.payload)
                    aside.rename(path)
            except OSError as error:
                log.warning("routes %s cannot be kept on disk: %s", path.name, error)
                with suppress(OSError):
                    aside.unlink()

    def read(self, keys: list[str], num_bytes: int) -> dict[str, bytes]:
        paths = {key: _path(self._folder, key) for key in keys}
        self._files.used(map(str, paths.values()))
        found = {key: self._read(path) for key, path in paths.items()}
        return {key: payload for key, payload in found.items() if len(payload) == num_bytes}

    def _read(self, path: Path) -> bytes:
        try:
            return path.read_bytes()
        except FileNotFoundError:
            return b""
        except OSError as error:
            log.warning("routes %s cannot be read, and count as missing: %s", path.name, error)
            return b""
