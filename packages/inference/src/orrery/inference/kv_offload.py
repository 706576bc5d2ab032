"""Where cache blocks go that leave the device: what vLLM is told about host memory, disk and a shared store. Imports no vLLM.

- In: `manifest.inference.kv_offload`. Out: `--kv-transfer-config`, variables, and for a Mooncake Store the file that its clients read.
- Blocks are found by a hash over tokens and salt; the salt is the policy's version when a group was dispatched, so no block of an older
  policy is ever found by rollouts of a newer one. A resumed attempt counts versions again from its checkpoint: what an earlier attempt
  has left on disk is removed before it could be found.
- Files on disk take at most `disk_bytes`, caches and routes together: what was used longest ago makes room (`kv_disk`).
- A block that cannot be read back is computed again. Where routes are returned, so is one whose routes are not known
  (`patches.vllm_routes_elsewhere`).
"""

import json
import os
import shutil
import uuid
from contextlib import suppress
from pathlib import Path
from typing import Any

from orrery.inference.kv_transfer import refuse_missing_rdma, refuse_open_interfaces
from orrery.inference.patches.vllm_routes_elsewhere import KEPT
from orrery.inference.patches.vllm_routes_shared import SHARED
from orrery.inference.routes_on_disk import FOLDER, FOLDER_BYTES
from orrery.manifest.schema import Manifest, disk_block_bytes
from orrery.runtime import scratch
from orrery.runtime.role_context import RoleContext
from orrery.runtime.timing import scaled
from orrery.transport import rendezvous

HASH_SEED = "0"  # block hashes must be equal in all engines and after restarts
STORE_DEADLINE_S = 120.0
DISK_TIER = "orrery_disk"  # the name of `kv_disk.BoundedFiles` in a configuration


def disk_folder(ctx: RoleContext) -> Path:
    """Where engine `ctx` keeps blocks on the node's scratch disk, the same for every start within an attempt."""
    return scratch.disk_folder(ctx.run_dir, ctx.stage) / f"attempt_{ctx.attempt}" / str(ctx.index)


def offload_config(manifest: Manifest, disk: Path) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config`; None where blocks that leave the device are gone."""
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
        "spec_module_path": "orrery.inference.kv_disk",
    }
    if offload.disk_bytes:
        extra["secondary_tiers"] = [
            {
                "type": DISK_TIER,
                "root_dir": str(disk),
                "max_bytes": _shares(manifest, offload.disk_bytes)[0],
            }
        ]
    if manifest.hardware.accelerator == "cpu":
        extra |= {"spec_name": "CpuTiers", "spec_module_path": "orrery.inference.kv_tiers_cpu"}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra,
    }


def offload(ctx: RoleContext) -> list[str]:
    """Arguments of `vllm serve` for this engine, after making ready what they name: folder, store, variables."""
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
        config["engine_id"] = (
            f"{scratch.role_memory_prefix(ctx.run_dir, ctx.name)}{uuid.uuid4()}"  # the name of the host tier's file has it
        )
        prepare_disk(disk)
    os.environ.update(routes_environment(ctx.manifest, disk))
    return ["--kv-transfer-config", json.dumps(config)]


def routes_environment(manifest: Manifest, disk: Path) -> dict[str, str]:
    """Variables for routes that are kept as long as their blocks: in host memory and where blocks are on disk or shared, there too."""
    inference, offload = manifest.inference, manifest.inference.kv_offload
    if not manifest.transport.routed_experts or offload.kind == "none":
        return {}
    if offload.kind == "mooncake":
        return {KEPT: "2", SHARED: "1"}
    # Less than a hundredth of the blocks' bytes. Twice the room that is needed: both forget what was not used for long, but not alike.
    # Host memory is that of all devices of an engine together, a cache's bytes are those of one.
    kept = 1 + 2 * offload.host_bytes / (inference.tensor_parallel * inference.kv_cache_bytes)
    if not offload.disk_bytes:
        return {KEPT: f"{kept:g}"}
    return {
        KEPT: f"{kept:g}",
        FOLDER: str(disk / "routes"),
        FOLDER_BYTES: str(_shares(manifest, offload.disk_bytes)[1]),
    }


def _shares(manifest: Manifest, disk_bytes: int) -> tuple[int, int]:
    """Of a rank's bytes on disk those of caches and those of routes, so that both hold as many blocks, or routes some more."""
    cache, routes = disk_block_bytes(
        manifest.model, manifest.inference, manifest.transport.routed_experts
    )
    caches = disk_bytes * cache // (cache + routes)
    return caches, disk_bytes - caches


def prepare_disk(disk: Path) -> None:
    """Make the folder, and remove what earlier attempts have left beside it."""
    for attempt in disk.parent.parent.glob("attempt_*"):
        if attempt != disk.parent:
            shutil.rmtree(attempt, ignore_errors=True)
    disk.mkdir(parents=True, exist_ok=True)


def forget(disk: Path) -> None:
    """Remove what an engine kept there, and the folders above that are its run's and now empty."""
    shutil.rmtree(disk, ignore_errors=True)
    with suppress(OSError):
        disk.parent.rmdir()
        disk.parent.parent.rmdir()


def store_environment(manifest: Manifest, folder: Path, master: str) -> dict[str, str]:
    """Variables of an engine with a Mooncake Store, whose master is at `master` (host:port); writes the file that they name.

    Each of its devices has a worker, and each worker takes as much as the file says.
    """
    offload = manifest.inference.kv_offload
    assert offload.kind == "mooncake"
    share = offload.segment_bytes // manifest.inference.devices_per_replica
    path = folder / "mooncake.json"
    path.write_text(
        json.dumps(
            {
                "metadata_server": "P2PHANDSHAKE",
                "master_server_address": master,
                "protocol": offload.protocol,
                "device_name": os.environ.get("ORRERY_RDMA_DEVICE", ""),
                "mode": "embedded",
                "global_segment_size": share,
                "local_buffer_size": min(share, 1 << 30),
            }
        )
    )
    return {"MOONCAKE_CONFIG_PATH": str(path)}
