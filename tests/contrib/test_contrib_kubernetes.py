"""Documents for Dynamo and llm-d pass closed schemas of their APIs.

vLLM's own parsers accept the engines' flags.
"""

import itertools
import json
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from command_lines import flags
from kubernetes_schemas import (
    DEPLOYMENT,
    GRAPH,
    PROXY_CONNECTORS,
    PROXY_FLAGS,
    ROUTER_MODES,
    VALUES,
)

import dynamo
import llm_d
from dynamo import SERVER_FLAGS, without_server_flags
from orrery.inference.assemble import server_arguments
from orrery.inference.kv_connectors import connector_config
from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.inference import EngineShape
from pods import Place

REPOSITORY = Path(__file__).resolve().parents[2]
KINDS = {"dynamo": dynamo.render, "llm_d": llm_d.render}
STORE = {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 1 << 27}
PLACE = Place("engine:1", "policy", "proxy:1")
POLICIES = ["cache_aware", "power_of_two", "round_robin", "consistent_hash", "sticky_least_loaded"]
TIERS = {"kind": "tiers", "host_bytes": 1 << 26, "disk_bytes": 1 << 28}


def run(name="reverse_text_moe", weights="files", routed_experts=False, **inference):
    data = json.loads((REPOSITORY / f"manifests/{name}.json").read_text())
    data["hardware"] = {
        "accelerator": "h200",
        "num_nodes": 1,
        "devices_per_node": 32,
        "shared_devices": False,
    }
    data["transport"] |= {"weights": weights, "routed_experts": routed_experts}
    data["inference"] |= {"num_replicas": 2, "dtype": "bfloat16"} | inference
    return check(data, "test")


def routed(policy, **inference):
    absolute, relative = (2, 1.1) if policy == "cache_aware" else (None, None)
    router = {
        "kind": "vllm_router",
        "policy": policy,
        "balance_abs_threshold": absolute,
        "balance_rel_threshold": relative,
    }
    return run(router=router, **inference)


SHAPE = json.loads((REPOSITORY / "manifests/qwen3_30b_a3b_16k.json").read_text())["inference"]
PREFILL = {field: SHAPE[field] for field in EngineShape.model_fields} | {
    "tensor_parallel": 4,
    "environment": {"VLLM_LOGGING_LEVEL": "DEBUG"},
}


def apart(transfer, **more):
    return run(
        num_replicas=3, prefill_replicas=1, kv_transfer=transfer, router={"kind": "none"}, **more
    )


RUNS = {
    **{policy: routed(policy) for policy in POLICIES},
    "wide": routed(
        "cache_aware",
        name="qwen3_30b_a3b_16k",
        tensor_parallel=2,
        data_parallel=2,
        num_replicas=1,
        expert_parallel=True,
        quantization="fp8",
    ),
    "tiers": routed("cache_aware", kv_offload=TIERS, routed_experts=True),
    "nixl": apart({"kind": "nixl"}, routed_experts=True),
    "mooncake": apart({"kind": "mooncake", "protocol": "rdma"}),
    "shapes": apart({"kind": "nixl"}, name="qwen3_30b_a3b_16k", prefill=PREFILL),
}


def over_two_nodes(manifest):
    inference = manifest.inference.model_copy(update={"nodes_per_replica": 2})
    return manifest.model_copy(update={"inference": inference})


def containers(documents):
    """Each engine's container."""
    for document in itertools.chain(*documents.values()):
        if document.get("kind") == "Deployment":
            yield document["spec"]["template"]["spec"]["containers"][0]
        for component in document.get("spec", {}).get("components", ())[1:]:
            yield component["podTemplate"]["spec"]["containers"][0]


@pytest.mark.parametrize("name", RUNS)
def test_a_graph_is_one_that_dynamo_accepts(name):
    (graph,) = KINDS["dynamo"](RUNS[name], PLACE)["graph.yaml"]
    jsonschema.validate(graph, GRAPH)
    frontend, *workers = graph["spec"]["components"]
    environment = {
        each["name"]: each["value"]
        for each in frontend["podTemplate"]["spec"]["containers"][0]["env"]
    }
    assert environment["DYN_ROUTER_MODE"] in ROUTER_MODES
    assert (
        len({each["name"].lower() for each in (frontend, *workers)})
        == 1 + RUNS[name].inference.num_replicas
    )
    assert {
        each["podTemplate"]["spec"]["containers"][0]["name"] for each in (frontend, *workers)
    } == {"main"}
    sticky = name in ("consistent_hash", "sticky_least_loaded", "nixl", "mooncake", "shapes")
    assert ("DYN_ROUTER_SESSION_AFFINITY_TTL_SECS" in environment) == sticky
    parts = (
        ["prefill", "decode", "decode"]
        if RUNS[name].inference.prefill_replicas
        else ["worker"] * len(workers)
    )
    assert [each["type"] for each in workers] == parts


@pytest.mark.parametrize("name", RUNS)
def test_engines_and_picker_are_such_as_llm_d_accepts(name):
    documents = KINDS["llm_d"](RUNS[name], PLACE)
    for deployment in documents["engines.yaml"]:
        jsonschema.validate(deployment, DEPLOYMENT)
        template = deployment["spec"]["template"]
        assert (
            deployment["spec"]["selector"]["matchLabels"].items()
            <= template["metadata"]["labels"].items()
        )
        mounted = {mount["name"] for mount in template["spec"]["containers"][0]["volumeMounts"]}
        assert mounted == {volume["name"] for volume in template["spec"]["volumes"]}
        for proxy in template["spec"].get("initContainers", ()):
            given = dict(word.split("=") for word in proxy["args"])
            assert set(given) <= set(PROXY_FLAGS) and given["--kv-connector"] in PROXY_CONNECTORS
    assert (
        len({each["metadata"]["name"] for each in documents["engines.yaml"]})
        == RUNS[name].inference.num_replicas
    )
    (values,) = documents["router.values.yaml"]
    jsonschema.validate(values, VALUES)
    picker, servers = values["router"]["epp"]["pluginsConfig"], values["router"]["modelServers"]
    named = [each.get("name", each["type"]) for each in picker["plugins"]]
    used = [
        ref["pluginRef"] for profile in picker["schedulingProfiles"] for ref in profile["plugins"]
    ]
    assert len(set(named)) == len(named) and {
        *used,
        *(each["pluginRef"] for each in picker["requestHandler"]["parsers"]),
    } <= set(named)
    for deployment in documents["engines.yaml"]:
        assert (
            servers["matchLabels"].items()
            <= deployment["spec"]["template"]["metadata"]["labels"].items()
        )
        pod = deployment["spec"]["template"]["spec"]
        ports = [
            port["containerPort"]
            for each in [*pod["containers"], *pod.get("initContainers", ())]
            for port in each["ports"]
        ]
        assert servers["targetPorts"][0]["number"] in ports and len(set(ports)) == len(ports)


def test_a_schema_that_accepts_everything_would_show_nothing():
    (graph,) = KINDS["dynamo"](RUNS["nixl"], PLACE)["graph.yaml"]
    documents = KINDS["llm_d"](RUNS["nixl"], PLACE)
    for document, schema, path in (
        (graph, GRAPH, ("spec", "components", 1, "podTemplate", "spec", "containers", 0, "arg")),
        (graph, GRAPH, ("spec", "services")),
        (documents["engines.yaml"][0], DEPLOYMENT, ("spec", "template", "spec", "container")),
        (
            documents["router.values.yaml"][0],
            VALUES,
            ("router", "epp", "pluginsConfig", "plugins", 0, "parameters", "weight"),
        ),
    ):
        broken = json.loads(json.dumps(document))
        at = broken
        for key in path[:-1]:
            at = at.setdefault(key, {}) if isinstance(at, dict) else at[key]
        at[path[-1]] = 1
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, schema)


@pytest.mark.parametrize("name", RUNS)
def test_engines_have_the_flags_of_the_launchers_command(name):
    whole = RUNS[name]
    addresses = {"--host", "--port"}
    for kind in KINDS:
        made = list(containers(KINDS[kind](whole, PLACE)))
        assert len(made) == whole.inference.num_replicas
        for index, container in enumerate(made):
            shape = whole.inference.of_engine(index)
            manifest = whole.model_copy(update={"inference": shape})
            variables = {each["name"]: each.get("value") for each in container["env"]}
            assert shape.environment.items() <= variables.items()
            assert str(shape.devices_per_replica) in container["resources"]["limits"].values()
            ours = flags(server_arguments(manifest, Path("/policy"), index, "h", 1))
            theirs = flags(container["args"])
            if kind == "dynamo":
                ours = {flag: value for flag, value in ours.items() if flag not in SERVER_FLAGS}
                theirs = {
                    flag: value
                    for flag, value in theirs.items()
                    if flag not in ("--kv-events-config", "--disaggregation-mode")
                }
            if (config := connector_config(manifest, index, Path("/tiers"))) is not None:
                config.pop("engine_id", None)
                assert json.loads(theirs.pop("--kv-transfer-config")) == config
            assert {flag: value for flag, value in theirs.items() if flag not in addresses} == {
                flag: value for flag, value in ours.items() if flag not in addresses
            }


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_vllms_own_parsers_take_every_engines_arguments():
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    engine = AsyncEngineArgs.add_cli_args(FlexibleArgumentParser())
    server = make_arg_parser(FlexibleArgumentParser())
    of_engine = {flag for action in engine._actions for flag in action.option_strings}
    assert not of_engine & set(SERVER_FLAGS)  # what Dynamo leaves out is no engine's
    for manifest in RUNS.values():
        for index, container in enumerate(containers(KINDS["llm_d"](manifest, PLACE))):
            parsed = server.parse_args(container["args"])
            assert (parsed.model, parsed.tensor_parallel_size) == (
                "/policy",
                manifest.inference.of_engine(index).tensor_parallel,
            )
            assert engine.parse_args(without_server_flags(container["args"])).seed == parsed.seed


@pytest.mark.parametrize(
    ("kind", "manifest", "place", "sentence"),
    [
        ("llm_d", RUNS["nixl"], Place("engine:1", "policy"), "Name its image with --proxy-image"),
        ("dynamo", routed("round_robin", num_replicas=25), PLACE, "Set it to at most 24"),
        ("llm_d", routed("round_robin", kv_offload=STORE), PLACE, "which does not run here"),
        (
            "llm_d",
            over_two_nodes(RUNS["wide"]),
            PLACE,
            "nodes_per_replica 2: an engine is one pod",
        ),
        (
            "dynamo",
            run(name="qwen3_30b_a3b_16k", kv_cache_bytes=120 << 30),
            PLACE,
            "inference: a device needs",
        ),
    ],
    ids=[
        "no proxy",
        "too many",
        "store",
        "nodes",
        "too large for a device",
    ],
)
def test_what_a_cluster_cannot_serve_is_one_sentence(kind, manifest, place, sentence):
    with pytest.raises(OrreryError, match=sentence):
        KINDS[kind](manifest, place)


@pytest.mark.parametrize(
    ("kind", "files"),
    [("dynamo", ["graph.yaml"]), ("llm_d", ["engines.yaml", "router.values.yaml"])],
)
def test_the_command_writes_yaml_and_prints_where(kind, files, tmp_path):
    command = [
        sys.executable,
        str(REPOSITORY / "contrib/kubernetes"),
        kind,
        str(REPOSITORY / "manifests/reverse_text_moe.json"),
    ]
    command += ["--image", "engine:1", "--claim", "policy", "--to", tmp_path / "out"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [str(tmp_path / "out" / name) for name in files]
    for name in files:
        text = (tmp_path / "out" / name).read_text()
        assert list(yaml.safe_load_all(text)) and "&id" not in text
