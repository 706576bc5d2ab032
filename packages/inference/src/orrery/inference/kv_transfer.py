"""Prefill and decode apart: what vLLM is told so that one engine's cache blocks reach another. Imports no vLLM.

- In: `manifest.inference`, this engine's index. Out: `--kv-transfer-config`, variables, and what the client needs to know of an engine.
- The first `prefill_replicas` engines produce, the others consume; `orrery.orchestrator.engines.disaggregated` drives both.
- Blocks wait for their reader longer than any request may take (`lease_s`): NIXL's producer gives blocks away once their lease has run
  out, and a late reader would get another request's cache without an error.
- A cache that cannot be read (its owner is gone) fails the request, which is data for the orchestrator; nothing is decoded from it.
- Every socket is on `host`: NIXL's side channel and UCX by their own settings, Mooncake's bootstrap by `patches.vllm_kv_transfer`.
  Mooncake's transfer engine listens on all interfaces whatever it is told: it starts where those are ours (`refuse_open_interfaces`).
"""

import os
import socket
import uuid
from typing import Any

import psutil

from orrery.inference.patches.vllm_routes_elsewhere import KEPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from orrery.runtime import network
from orrery.runtime.network import LOOPBACK_INTERFACE, interface
from orrery.runtime.timing import scaled
from orrery.transport.engine_api import request_s

LEASE_MARGIN_S = 300.0  # beyond what a client waits; scaled
OPEN_MOONCAKE = "ORRERY_MOONCAKE_ON_ALL_INTERFACES"


def lease_s(manifest: Manifest) -> int:
    """How long a prefill engine keeps blocks for their reader: longer than any client waits (`request_s`)."""
    return int(request_s(manifest) + scaled(LEASE_MARGIN_S))


def transfer_config(manifest: Manifest, index: int) -> dict[str, Any] | None:
    """The value of `--kv-transfer-config` of engine `index`; None where every engine serves whole requests."""
    inference, transfer = manifest.inference, manifest.inference.kv_transfer
    if transfer.kind == "none":
        return None
    config: dict[str, Any] = {
        "kv_role": "kv_producer" if index < inference.prefill_replicas else "kv_consumer",
        "kv_load_failure_policy": "fail",
        "engine_id": f"{index}-{uuid.uuid4()}",  # of this start: an engine that is started again has other blocks
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
    """What the libraries behind `transfer_config` read of an engine on `host`, where others ask at `port` for its blocks."""
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
    """Have UCX, which NIXL goes by, use this run's interface and RDMA devices; what is set already, as a matter of placement, stays."""
    if manifest.inference.kv_transfer.kind == "nixl":
        network.name_ucx_devices()


def handover(config: Any, host: str) -> dict[str, str]:
    """What an engine with vLLM's `KVTransferConfig` publishes beside its address, for whoever hands its cache to another engine."""
    if config is None or config.kv_connector != "MooncakeConnector":
        return {}  # NIXL's producer says all with each answer
    return {
        "kv_engine_id": config.engine_id,
        "kv_bootstrap": f"http://{host}:{os.environ['VLLM_MOONCAKE_BOOTSTRAP_PORT']}",
    }


def refuse_open_interfaces(what: str) -> None:
    """Raise OrreryError where `what`, which listens on every interface of this machine, could be reached by others than this run."""
    ours = {LOOPBACK_INTERFACE, interface()}
    others = sorted(
        name
        for name, addresses in psutil.net_if_addrs().items()
        if name not in ours
        and any(address.family.name in ("AF_INET", "AF_INET6") for address in addresses)
    )
    if others and os.environ.get(OPEN_MOONCAKE) != "1":
        raise OrreryError(
            f"{what}: Mooncake's transfer engine listens on every interface, and this machine has {', '.join(others)} beside the "
            f"run's own; choose 'nixl' or 'tiers', run in a network namespace, or set {OPEN_MOONCAKE} = '1' in [environment] of the "
            f"site file where a firewall keeps others out"
        )


def refuse_missing_rdma(field: str, protocol: str) -> None:
    """Raise OrreryError where `field` asks Mooncake for RDMA and this machine has none: it would go by TCP, and say so in its log alone."""
    if protocol == "rdma" and not network.rdma_devices():
        raise OrreryError(
            f"{field}.protocol 'rdma': {socket.gethostname()} has no device in {network.RDMA_DEVICES}, and Mooncake would go by TCP; "
            f"set {field}.protocol to 'tcp', or run where every node has one"
        )
