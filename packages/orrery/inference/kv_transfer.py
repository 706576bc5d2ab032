"""Configure prefill and decode engines and their transfer of cache blocks. Imports no vLLM.

- In: `manifest.inference`, this engine's index. Out: `--kv-transfer-config`, variables, and the
  fields that an engine publishes.
- The first `prefill_replicas` engines produce, the others consume.
- A block's lease is longer than any request. Afterwards a late reader of NIXL would silently get
  another request's cache.
- A cache that cannot be read fails the request.
- Sockets are on `host`. Only Mooncake listens on all interfaces.
"""

import os
import socket
import uuid
from typing import Any

import psutil

from orrery.inference.patches.registry import KEPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.runtime import network
from orrery.runtime.network import LOOPBACK_INTERFACE, interface
from orrery.runtime.timing import scaled
from orrery.wire.engine_api import request_s

LEASE_MARGIN_S = 300.0  # beyond a client's timeout, scaled
OPEN_MOONCAKE = "ORRERY_MOONCAKE_ON_ALL_INTERFACES"


def lease_s(manifest: Manifest) -> int:
    """Return the seconds for which a prefill engine keeps blocks."""
    return int(request_s(manifest) + scaled(LEASE_MARGIN_S))


def transfer_config(manifest: Manifest, index: int) -> dict[str, Any] | None:
    """Return `--kv-transfer-config` of engine `index`, or None without prefill engines."""
    inference, transfer = manifest.inference, manifest.inference.kv_transfer
    if transfer.kind == "none":
        return None
    config: dict[str, Any] = {
        "kv_role": "kv_producer" if index < inference.prefill_replicas else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "engine_id": f"{index}-{uuid.uuid4()}",  # a restarted engine has other blocks
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
    """Return the libraries' variables for an engine with blocks at `host` and `port`."""
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


def name_devices(manifest: Manifest) -> None:
    """Restrict UCX, NIXL's library, to this run's devices, if not set."""
    if manifest.inference.kv_transfer.kind == "nixl":
        network.name_ucx_devices()


def handover(config: Any, host: str) -> dict[str, str]:
    """Return the fields that an engine with this KVTransferConfig publishes."""
    if config is None or config.kv_connector != "MooncakeConnector":
        return {}  # NIXL's producer sends them with each answer
    return {
        "kv_engine_id": config.engine_id,
        "kv_bootstrap": f"http://{host}:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
    }


def refuse_open_interfaces(what: str) -> None:
    """Raise OrreryError if Mooncake would listen on interfaces outside this run."""
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
            f"{', '.join(others)} beside the run's own; choose 'nixl' or 'tiers', run in a network "
            f"namespace, or set {OPEN_MOONCAKE} = '1' in [environment] of the site file where a "
            "firewall keeps others out"
        )


def refuse_missing_rdma(field: str, protocol: str) -> None:
    """Raise OrreryError if RDMA has no device. Mooncake would silently use TCP."""
    if protocol == "rdma" and not network.rdma_devices():
        raise OrreryError(
            f"{field}.protocol 'rdma': {socket.gethostname()} has no device in "
            f"{network.RDMA_DEVICES}, and Mooncake would go by TCP; set {field}.protocol to 'tcp', "
            "or run where every node has one"
        )
