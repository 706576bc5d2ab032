"""Render a run for llm-d: a Deployment per engine, and Helm values of llm-d-router-standalone.

- llm-d's router, the endpoint picker, reads a request's session from the header X-Session-ID.
- Any client with the run's token and a pod's address can use an engine.
"""

from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest
from pods import (
    BEHIND_PROXY_PORT,
    PORT,
    SIDE_PORT,
    Engine,
    Place,
    engines,
    labels,
    name_of,
)

ROLE = "llm-d.ai/role"
CONNECTORS = {"nixl": "nixlv2", "mooncake": "mooncake"}  # the routing proxy's connectors
PICKER_FILE = "picker.yaml"


def render(manifest: Manifest, place: Place) -> dict[str, list[dict[str, Any]]]:
    if manifest.inference.prefill_replicas and not place.proxy_image:
        raise OrreryError(
            f"inference.prefill_replicas {manifest.inference.prefill_replicas}: decoding pods have "
            "llm-d's routing proxy before their engine. Name its image with --proxy-image"
        )
    return {
        "engines.yaml": [
            _deployment(manifest, place, each)
            for each in engines(manifest, place, behind_proxy=True)
        ],
        "router.values.yaml": [_values(manifest)],
    }


def _deployment(manifest: Manifest, place: Place, engine: Engine) -> dict[str, Any]:
    own = {**labels(manifest), "orrery-engine": str(engine.index)}
    template = own | ({ROLE: engine.part} if engine.part != "whole" else {})
    pod: dict[str, Any] = {"containers": [engine.container], "volumes": engine.volumes}
    if engine.part == "decode":
        pod["initContainers"] = [_proxy(manifest, place)]
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": {"name": f"{name_of(manifest)}-engine-{engine.index}", "labels": own},
        "spec": {
            "replicas": 1,
            "strategy": {"type": "Recreate"},  # the old engine must free its GPU first
            "selector": {"matchLabels": own},
            "template": {"metadata": {"labels": template}, "spec": pod},
        },
    }


def _proxy(manifest: Manifest, place: Place) -> dict[str, Any]:
    transfer = manifest.inference.kv_transfer.kind
    arguments = [
        f"--port={PORT}",
        f"--model-server-port={BEHIND_PROXY_PORT}",
        f"--kv-connector={CONNECTORS[transfer]}",
    ]
    if transfer == "mooncake":
        arguments.append(f"--mooncake-bootstrap-port={SIDE_PORT[transfer]}")
    return {
        "name": "routing-proxy",
        "image": place.proxy_image,
        "args": [*arguments, "--secure-serving=false"],
        "ports": [{"name": "proxy", "containerPort": PORT}],
        "restartPolicy": "Always",
    }


def _values(manifest: Manifest) -> dict[str, Any]:
    return {
        "router": {
            "epp": {
                "replicas": 1,  # replicas would not share their state
                "pluginsConfigFile": PICKER_FILE,
                "pluginsConfig": picker(manifest),
            },
            # FailOpen could send a request to an engine with an older policy.
            "inferencePool": {"create": True, "failureMode": "FailClose"},
            "modelServers": {
                "type": "vllm",
                "protocol": "http",
                "matchLabels": labels(manifest),
                "targetPorts": [{"number": PORT}],
            },
        }
    }


def picker(manifest: Manifest) -> dict[str, Any]:
    """Return the endpoint picker's configuration. Round robin becomes shortest queue."""
    router, apart = manifest.inference.router, manifest.inference.prefill_replicas > 0
    plugins: list[dict[str, Any]] = [
        {"type": "vllmhttp-parser"},
        {"type": "max-score-picker"},
        {"type": "queue-scorer"},
    ]
    scorers: list[dict[str, Any]] = [{"pluginRef": "queue-scorer", "weight": 1}]
    if router.kind == "vllm_router" and router.policy == "cache_aware":
        plugins += [
            {
                "type": "approx-prefix-cache-producer",
                "parameters": {"maxPrefixTokensToMatch": manifest.inference.max_model_len_tokens},
            },
            {"type": "prefix-cache-scorer"},
        ]
        scorers.append({"pluginRef": "prefix-cache-scorer", "weight": 2})
    sticky = apart or (
        router.kind == "vllm_router" and router.policy in ("consistent_hash", "sticky_least_loaded")
    )
    profiles = ("prefill", "decode") if apart else ("default",)
    made = []
    if apart:
        plugins += [
            {"type": "always-disagg-pd-decider"},
            {
                "type": "disagg-profile-handler",
                "parameters": {"deciders": {"prefill": "always-disagg-pd-decider"}},
            },
            {"type": "prefill-filter"},
            {"type": "decode-filter"},
        ]
    for profile in profiles:
        chosen = [{"pluginRef": f"{profile}-filter"}] if apart else []
        if sticky:
            plugins.append(_session_filter(manifest, profile))
            chosen.append({"pluginRef": f"session-{profile}"})
        made.append(
            {"name": profile, "plugins": [*chosen, *scorers, {"pluginRef": "max-score-picker"}]}
        )
    return {
        "apiVersion": "llm-d.ai/v1alpha1",
        "kind": "EndpointPickerConfig",
        "plugins": plugins,
        "schedulingProfiles": made,
        "requestHandler": {"parsers": [{"pluginRef": "vllmhttp-parser"}]},
    }


def _session_filter(manifest: Manifest, profile: str) -> dict[str, Any]:
    parameters: dict[str, Any] = {
        "strategy": "session_id",
        "sessionIdConfig": {
            "sources": [{"header": "x-session-id"}],
            "evictionTtlSeconds": manifest.orchestrator.rollout_timeout_s,
        },
    }
    if profile == "prefill":
        parameters["profileName"] = profile
    return {
        "name": f"session-{profile}",
        "type": "session-affinity-filter",
        "parameters": parameters,
    }
