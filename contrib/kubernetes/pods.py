"""Describe each engine as a container: command line, variables, devices and volumes."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.inference.assemble import engine_variables, server_arguments
from orrery.inference.kv_connectors import (
    HASH_SEED,
    connector_config,
    routes_environment,
    transfer_environment,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import id12
from orrery.manifest.plan import check_supported
from orrery.manifest.schema import Manifest
from orrery.runtime.network import TOKEN_FILE

WEIGHTS, TIERS, TOKEN_FOLDER = Path("/policy"), Path("/tiers"), Path("/run/orrery")
PORT, BEHIND_PROXY_PORT = 8000, 8200
SIDE_PORT = {"nixl": 5600, "mooncake": 8998, "none": 0}
ADDRESS = "$(VLLM_HOST_IP)"  # Kubernetes inserts the pod's address
TOKEN_KEY = "token"
WEIGHTS_MOUNT: dict[str, Any] = {"name": "weights", "mountPath": str(WEIGHTS), "readOnly": True}
TOKEN_MOUNT: dict[str, Any] = {"name": "token", "mountPath": str(TOKEN_FOLDER), "readOnly": True}


@dataclass(frozen=True)
class Place:
    """A cluster's images and weights.

    `image` has vLLM, this package and, if used, Dynamo. The root of volume claim `claim` has the
    weights.
    """

    image: str
    claim: str
    proxy_image: str = ""


@dataclass(frozen=True)
class Engine:
    index: int
    part: str  # "whole", "prefill" or "decode"
    container: dict[str, Any]
    volumes: list[dict[str, Any]]


def name_of(manifest: Manifest) -> str:
    name = manifest.name.replace("_", "-").strip("-")
    if len(name) > 40:
        raise OrreryError(
            f"name {manifest.name!r}: Kubernetes has room for 40 characters beside ours. "
            "Shorten the run's name"
        )
    return name


def labels(manifest: Manifest) -> dict[str, str]:
    # Without "id-", YAML would read some ids as numbers.
    return {"app": name_of(manifest), "orrery-manifest": f"id-{id12(manifest)}"}


def check_servable(manifest: Manifest) -> None:
    if manifest.inference.kv_offload.kind == "mooncake":
        raise OrreryError(
            "inference.kv_offload.kind 'mooncake': the store's master is started by the launcher, "
            "which does not run here. Set it to 'tiers' or 'none'"
        )
    if manifest.transport.weights == "adapters":
        raise OrreryError(
            "transport.weights 'adapters': engines would wait for an adapter of the run. "
            "Set it to 'files', and serve the merged weights"
        )
    for index in range(manifest.inference.num_replicas):
        nodes = manifest.inference.of_engine(index).nodes_per_replica
        if nodes > 1:
            raise OrreryError(
                f"inference.nodes_per_replica {nodes}: an engine is one pod, which has one node. "
                "Set it to 1"
            )
    check_supported(manifest)


def engines(manifest: Manifest, place: Place, behind_proxy: bool) -> list[Engine]:
    """Return the engines. With `behind_proxy`, decode engines leave PORT to a proxy."""
    check_servable(manifest)
    made = []
    for index in range(manifest.inference.num_replicas):
        shape = manifest.inference.of_engine(index)
        of_engine = manifest.model_copy(update={"inference": shape})
        apart = manifest.inference.prefill_replicas
        part = "whole" if not apart else "prefill" if index < apart else "decode"
        proxied = behind_proxy and part == "decode"
        # The proxy connects on loopback, and Kubernetes' probes on the pod's address.
        host, port = ("0.0.0.0", BEHIND_PROXY_PORT) if proxied else (ADDRESS, PORT)
        arguments = server_arguments(of_engine, WEIGHTS, index, host, port)
        if (config := connector_config(of_engine, index, TIERS)) is not None:
            config.pop("engine_id", None)  # let vLLM draw a new id at each start of a pod
            arguments += ["--kv-transfer-config", json.dumps(config)]
        container: dict[str, Any] = {
            "name": "engine",
            "image": place.image,
            "command": ["python3", "-m", "vllm.entrypoints.openai.api_server"],
            "args": arguments,
            "env": _environment(of_engine),
            "ports": [{"name": "engine", "containerPort": port}],
            "resources": _resources(of_engine),
            "volumeMounts": [WEIGHTS_MOUNT, TOKEN_MOUNT, {"name": "shm", "mountPath": "/dev/shm"}],
            "startupProbe": {
                "httpGet": {"path": "/health", "port": port},
                "periodSeconds": 10,
                "failureThreshold": 120,
            },
            "readinessProbe": {"httpGet": {"path": "/health", "port": port}, "periodSeconds": 5},
        }
        token = {"name": "token", "secret": {"secretName": f"{name_of(manifest)}-token"}}
        volumes: list[dict[str, Any]] = [
            weights_volume(place),
            token,
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ]
        if manifest.inference.kv_offload.kind == "tiers":
            container["volumeMounts"].append({"name": "tiers", "mountPath": str(TIERS)})
            volumes.append({"name": "tiers", "emptyDir": {}})
        made.append(Engine(index, part, container, volumes))
    return made


def weights_volume(place: Place) -> dict[str, Any]:
    return {
        "name": "weights",
        "persistentVolumeClaim": {"claimName": place.claim, "readOnly": True},
    }


def _environment(manifest: Manifest) -> list[dict[str, Any]]:
    inference = manifest.inference
    values = inference.environment | engine_variables(manifest)
    if inference.prefill_replicas:
        values |= transfer_environment(manifest, ADDRESS, SIDE_PORT[inference.kv_transfer.kind])
    if inference.kv_offload.kind == "tiers":
        values |= {"PYTHONHASHSEED": HASH_SEED, **routes_environment(manifest, TIERS)}
    own_address: dict[str, Any] = {
        "name": "VLLM_HOST_IP",
        "valueFrom": {"fieldRef": {"fieldPath": "status.podIP"}},
    }
    values |= {TOKEN_FILE: str(TOKEN_FOLDER / TOKEN_KEY)}
    return [own_address, *({"name": name, "value": value} for name, value in values.items())]


def _resources(manifest: Manifest) -> dict[str, Any]:
    devices = manifest.inference.devices_per_replica
    is_cpu = manifest.hardware.accelerator == "cpu"
    amount = {"cpu" if is_cpu else "nvidia.com/gpu": str(devices)}
    return {"limits": amount, "requests": amount}
