"""Configure the tiers of cache blocks: host memory, disk or a shared store. Imports no vLLM.

- In: `manifest.inference.kv_offload`. Out: `--kv-transfer-config`, variables, Mooncake's client
  file.
- A block's hash includes the policy version at a group's dispatch, so no rollout finds older
  blocks. A resumed attempt repeats versions, so earlier attempts' files are removed.
- Caches and routes on disk together take at most `disk_bytes` (`kv_tiers`).
- An unreadable block is computed again. If routes are returned, so is a block without them.
"""

import json
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from orrery.inference.bounded_folder import FOLDER, FOLDER_BYTES
from orrery.inference.kv_transfer import refuse_missing_rdma, refuse_open_interfaces
from orrery.inference.patches.registry import KEPT
from orrery.manifest.schema import Manifest, disk_block_bytes
from orrery.runtime import scratch
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous

HASH_SEED = "0"  # equal block hashes in all engines and after restarts
STORE_DEADLINE_S = 120.0
DISK_TIER = "orrery_disk"  # `kv_tiers.BoundedFiles`


def disk_folder(ctx: RoleContext) -> Path:
    """Return an engine's folder on the scratch disk, shared by all starts in an attempt."""
    return scratch.disk_folder(ctx.run_dir, ctx.stage) / f"attempt_{ctx.attempt}" / str(ctx.index)


def offload_config(manifest: Manifest, disk: Path) -> dict[str, Any] | None:
    """Return `--kv-transfer-config`, or None without offloading."""
    offload = manifest.inference.kv_offload
    if offload.kind == "none":
        return None
    if offload.kind == "mooncake":
        return {
            "kv_connector": "MooncakeStoreConnector",
            "kv_role": "kv_both",
            "kv_load_failure_policy": "recompute",
        }
    extra: dict[str, Any] = {
        "cpu_bytes_to_use": offload.host_bytes,
        "spec_name": "Tiers",
        "spec_module_path": "orrery.inference.kv_tiers",
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


def offload(ctx: RoleContext) -> list[str]:
    """Prepare folder, store and variables. Return arguments for `vllm serve`."""
    disk = disk_folder(ctx)
    config = offload_config(ctx.manifest, disk)
    if config is None:
        return []
    os.environ["PYTHONHASHSEED"] = HASH_SEED
    if ctx.manifest.inference.kv_offload.kind == "mooncake":
        refuse_open_interfaces("inference.kv_offload.kind 'mooncake'")
        refuse_missing_rdma("inference.kv_offload", ctx.manifest.inference.kv_offload.protocol)
        store = rendezvous.await_endpoints(ctx, "kv_store", 1, scaled(STORE_DEADLINE_S))[0]
        disk.mkdir(parents=True, exist_ok=True)
        os.environ.update(store_environment(ctx.manifest, disk, store.info["rpc"]))
    else:
        # part of the host tier's file name
        config["engine_id"] = f"{scratch.role_memory_prefix(ctx.run_dir, ctx.name)}{uuid.uuid4()}"
        prepare_disk(disk)
    os.environ.update(routes_environment(ctx.manifest, disk))
    return ["--kv-transfer-config", json.dumps(config)]


def routes_environment(manifest: Manifest, disk: Path) -> dict[str, str]:
    """Return the variables that keep routes as long as their blocks."""
    inference, offload = manifest.inference, manifest.inference.kv_offload
    if not manifest.transport.routed_experts or offload.kind != "tiers":
        return {}  # `manifest.support` refuses routes with a Mooncake Store
    # Twice the room, because caches and routes are evicted in different orders.
    # `host_bytes` is for all devices of an engine, `kv_cache_bytes` for one.
    kept = 1 + 2 * offload.host_bytes / (inference.tensor_parallel * inference.kv_cache_bytes)
    if not offload.disk_bytes:
        return {KEPT: f"{kept:g}"}
    return {
        KEPT: f"{kept:g}",
        FOLDER: str(disk / "routes"),
        FOLDER_BYTES: str(_shares(manifest, offload.disk_bytes)[1]),
    }


def _shares(manifest: Manifest, disk_bytes: int) -> tuple[int, int]:
    """Split a rank's bytes on disk for equally many caches and routes."""
    model, has_routes = manifest.model, manifest.transport.routed_experts
    cache, routes = disk_block_bytes(model, manifest.inference, has_routes)
    caches = disk_bytes * cache // (cache + routes)
    return caches, disk_bytes - caches


def prepare_disk(disk: Path) -> None:
    """Make the folder and remove earlier attempts' folders."""
    for attempt in disk.parent.parent.glob("attempt_*"):
        if attempt != disk.parent:
            shutil.rmtree(attempt, ignore_errors=True)
    disk.mkdir(parents=True, exist_ok=True)


def forget(disk: Path) -> None:
    """Remove an engine's folder, and the run's empty folders above it."""
    shutil.rmtree(disk, ignore_errors=True)
    with suppress(OSError):
        disk.parent.rmdir()
        disk.parent.parent.rmdir()


def store_environment(manifest: Manifest, folder: Path, master: str) -> dict[str, str]:
    """Write the client file of the store at `master` (host:port). Return its variable. Each
    device's worker takes the bytes in the file.
    """
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
