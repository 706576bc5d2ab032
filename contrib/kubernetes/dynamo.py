"""Render a run as a DynamoGraphDeployment (nvidia.com/v1beta1) of a frontend and the engines.

- A worker takes vLLM's engine flags, not its server flags.
- Dynamo reads a request's session from the header X-Dynamo-Session-ID.
"""

import json
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from pods import (
    WEIGHTS_MOUNT,
    Engine,
    Place,
    engines,
    labels,
    name_of,
    weights_volume,
)

MAX_COMPONENTS = 25  # Dynamo's limit, including the frontend
# Flags of vLLM's API server → number of values.
SERVER_FLAGS = {
    "--host": 1, "--port": 1, "--middleware": 1, "--uvicorn-log-level": 1, "--tokens-only": 0,
    "--enable-prompt-tokens-details": 0, "--disable-uvicorn-access-log": 0,
    "--disable-fastapi-docs": 0,
}  # fmt: skip
EVENTS = {
    "publisher": "zmq",
    "topic": "kv-events",
    "endpoint": "tcp://*:20080",
    "enable_kv_cache_events": True,
}
MODES = {"round_robin": "round-robin", "power_of_two": "least-loaded"}  # other policies use "kv"
TYPES = {"whole": "worker", "prefill": "prefill", "decode": "decode"}


def render(manifest: Manifest, place: Place) -> dict[str, list[dict[str, Any]]]:
    made = engines(manifest, place, behind_proxy=False)
    if len(made) + 1 > MAX_COMPONENTS:
        raise OrreryError(
            f"inference.num_replicas {len(made)}: a DynamoGraphDeployment has at most "
            f"{MAX_COMPONENTS} components, one of them the frontend. Set it to at most "
            f"{MAX_COMPONENTS - 1}"
        )
    graph = {
        "apiVersion": "nvidia.com/v1beta1",
        "kind": "DynamoGraphDeployment",
        "metadata": {"name": name_of(manifest), "labels": labels(manifest)},
        "spec": {
            "backendFramework": "vllm",
            "components": [_frontend(manifest, place), *(_worker(manifest, each) for each in made)],
        },
    }
    return {"graph.yaml": [graph]}


def _mode(manifest: Manifest) -> str:
    router = manifest.inference.router
    return MODES.get(router.policy, "kv") if router.kind == "vllm_router" else "kv"


def _frontend(manifest: Manifest, place: Place) -> dict[str, Any]:
    router, environment = manifest.inference.router, {"DYN_ROUTER_MODE": _mode(manifest)}
    if _mode(manifest) == "kv" and (router.kind == "none" or router.policy != "cache_aware"):
        environment["DYN_ROUTER_SESSION_AFFINITY_TTL_SECS"] = str(
            int(manifest.orchestrator.rollout_timeout_s)
        )
    container = {
        "name": "main",
        "image": place.image,
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "volumeMounts": [WEIGHTS_MOUNT],  # for the model's configuration and tokenizer
    }
    pod = {"containers": [container], "volumes": [weights_volume(place)]}
    return {"name": "Frontend", "type": "frontend", "replicas": 1, "podTemplate": {"spec": pod}}


def _worker(manifest: Manifest, engine: Engine) -> dict[str, Any]:
    arguments = without_server_flags(engine.container["args"])
    if _mode(manifest) == "kv" and engine.part != "decode":
        arguments += ["--kv-events-config", json.dumps(EVENTS)]
    if engine.part != "whole":
        arguments += ["--disaggregation-mode", engine.part]
    # Dynamo's operator adds its own probes, ports and shared memory.
    kept = {key: value for key, value in engine.container.items() if not key.endswith("Probe")}
    kept.pop("ports")
    mounts = [each for each in engine.container["volumeMounts"] if each["name"] != "shm"]
    container = {
        **kept,
        "name": "main",
        "command": ["python3", "-m", "dynamo.vllm"],
        "args": arguments,
        "volumeMounts": mounts,
    }
    volumes = [each for each in engine.volumes if each["name"] != "shm"]
    return {
        "name": f"Engine{engine.index}",
        "type": TYPES[engine.part],
        "replicas": 1,
        "podTemplate": {
            "metadata": {"labels": labels(manifest)},
            "spec": {"containers": [container], "volumes": volumes},
        },
    }


def without_server_flags(arguments: list[str]) -> list[str]:
    kept, rest = [], list(arguments)
    while rest:
        word = rest.pop(0)
        if word in SERVER_FLAGS:
            del rest[: SERVER_FLAGS[word]]
        else:
            kept.append(word)
    return kept
