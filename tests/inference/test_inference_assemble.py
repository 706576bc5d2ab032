"""The manifest as command lines of vLLM and of the router."""

import itertools
import json
import os
import socket
import subprocess
import sys
import tomllib
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
from command_lines import flags
from inference_servers import EXCHANGE, REPOSITORY
from replaced import replaced
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient

from orrery.inference import kv_store
from orrery.inference.assemble import (
    PLUGIN,
    check_release,
    engine_environment,
    meeting_point,
    node_arguments,
    server_arguments,
    weights_dir,
)
from orrery.inference.kv_connectors import (
    connect,
    lease_s,
    refuse_missing_rdma,
    refuse_open_interfaces,
    store_environment,
)
from orrery.inference.plugin import RequireToken
from orrery.inference.router import router_arguments
from orrery.manifest.budget.engine import MAX_GRAPH_TOKENS, graph_sizes
from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.schema.inference import EngineShape
from orrery.runtime import network
from orrery.runtime.network import Purpose, authorization
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous
from orrery.wire.rendezvous import UPDATE_S, request_s


@pytest.fixture
def make_manifest():
    def make(**inference):
        manifest = json.loads((REPOSITORY / "manifests/reverse_text_smoke.json").read_text())
        manifest["inference"] |= inference
        return check(manifest, "test")

    return make


def test_a_release_of_vllm_without_the_network_is_refused(tmp_path):
    manifest = load(REPOSITORY / "manifests" / "glm5_run.json")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["GlmMoeDsaForCausalLM"]}))
    check_release(manifest, tmp_path, {"Qwen3ForCausalLM", "GlmMoeDsaForCausalLM"}, "0.32.0")
    with pytest.raises(OrreryError) as caught:
        check_release(manifest, tmp_path, {"Qwen3ForCausalLM"}, "0.9.0")
    assert str(caught.value) == (
        "model.family 'glm5': vLLM 0.9.0 does not support GlmMoeDsaForCausalLM. "
        "Type `make setup` to "
        "install the release in locks/"
    )


def test_what_the_manifest_says_of_inference_reaches_the_command_line(make_manifest, tmp_path):
    manifest = make_manifest(
        max_model_len_tokens=96,
        kv_block_tokens=32,
        kv_cache_bytes=12345678,
        max_num_sequences=17,
        max_batched_tokens=640,
    )
    said = flags(server_arguments(manifest, tmp_path, index=3, host="10.1.2.3", port=4567))
    assert said["--model"] == str(tmp_path)
    assert said["--max-model-len"] == "96"
    assert said["--block-size"] == "32"
    assert said["--kv-cache-memory-bytes"] == "12345678"
    assert said["--max-num-seqs"] == "17"
    assert said["--max-num-batched-tokens"] == "640"
    assert said["--dtype"] == "float32"
    assert said["--seed"] == str(manifest.seed + 3)
    assert (said["--host"], said["--port"]) == ("10.1.2.3", "4567")
    assert "--enforce-eager" in said
    assert "--enforce-eager" not in flags(
        server_arguments(make_manifest(enforce_eager=False), tmp_path, 0, "127.0.0.1", 1)
    )


def test_the_devices_of_an_engine_share_its_segment_of_a_store(make_manifest, tmp_path):
    store = {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 1 << 27}
    for shape, share in (
        ({}, 1 << 27),
        ({"tensor_parallel": 2}, 1 << 26),
        ({"tensor_parallel": 2, "data_parallel": 2}, 1 << 25),
    ):
        said = store_environment(make_manifest(kv_offload=store, **shape), tmp_path, "127.0.0.1:1")
        config = json.loads(Path(said["MOONCAKE_CONFIG_PATH"]).read_text())
        assert (config["global_segment_size"], config["local_buffer_size"]) == (share, share)


def test_a_run_in_fp8_and_one_of_wide_engines_reach_the_command_line(tmp_path):
    fp8, wide = (
        flags(
            server_arguments(
                load(REPOSITORY / f"manifests/qwen3_30b_a3b_16k_{name}.json"),
                tmp_path,
                0,
                "127.0.0.1",
                1,
            )
        )
        for name in ("fp8", "wide")
    )
    assert (
        fp8["--quantization"] == "fp8_per_block"
        and fp8["--tensor-parallel-size"] == "1"
        and "--data-parallel-size" not in fp8
    )
    assert (
        wide["--data-parallel-size"] == "4"
        and wide["--tensor-parallel-size"] == "1"
        and "--quantization" not in wide
    )
    for flag in ("--enable-expert-parallel", "--enable-ep-weight-filter"):
        assert flag in wide and flag not in fp8


def test_a_gpu_engine_captures_steps_that_hold_prompts_too(tmp_path):
    manifest = load(REPOSITORY / "manifests/qwen3_30b_a3b_16k.json")

    def engine(**changes):
        return replaced(manifest, "inference", **changes)

    def sizes_of(**changes):
        return graph_sizes(engine(**changes).inference)

    sizes = sizes_of(max_num_sequences=512, max_batched_tokens=8192)
    assert sizes[0] == 1 and sizes[-1] == MAX_GRAPH_TOKENS and len(set(sizes)) == len(sizes)
    # The share of padding of a step that just misses a size.
    wasted = [
        (larger - 1 - size) / larger for size, larger in itertools.pairwise(sizes) if size >= 256
    ]
    assert all(0 < share <= 1 / 8 for share in wasted)
    assert sizes_of(max_num_sequences=300, max_batched_tokens=1000)[-1] == 1000  # full steps
    # Also steps that sample for all sequences and prefill none.
    assert 300 in sizes_of(max_num_sequences=300, max_batched_tokens=1000)
    assert sizes_of(data_parallel=4, max_num_sequences=128, max_batched_tokens=8192)[-1] == 512

    words = server_arguments(manifest, tmp_path, 0, "127.0.0.1", 1)
    begin, said = (
        words.index("--cudagraph-capture-sizes") + 1,
        [str(size) for size in graph_sizes(manifest.inference)],
    )
    assert words[begin : begin + len(said)] == said
    assert (words[begin + len(said) :] or ["--"])[0].startswith("--")
    assert "--cudagraph-capture-sizes" not in server_arguments(
        engine(enforce_eager=True), tmp_path, 0, "127.0.0.1", 1
    )


def test_only_the_first_node_of_an_engine_has_a_server(make_manifest, monkeypatch, tmp_path):
    inference = make_manifest().inference.model_copy(
        update={"data_parallel": 12, "nodes_per_replica": 3}
    )
    first, last = (node_arguments(inference, part, "10.0.0.1", 25000) for part in (0, 2))
    assert flags(first) == {
        "--data-parallel-size-local": "4",
        "--data-parallel-address": "10.0.0.1",
        "--data-parallel-rpc-port": "25000",
    }
    assert last == [*first, "--data-parallel-start-rank", "8", "--headless"]
    head = SimpleNamespace(index=2, incarnation=1, url="tcp://10.0.0.1:25000")
    old = SimpleNamespace(index=2, incarnation=0, url="tcp://10.0.0.1:24000")
    monkeypatch.setattr(rendezvous, "find_endpoints", lambda *_: [old, head])
    ctx = SimpleNamespace(
        health=SimpleNamespace(waiting=lambda *_, **__: nullcontext()), incarnation=1
    )
    assert meeting_point(ctx, 2, 1) == ("10.0.0.1", 25000)


def test_vllm_takes_the_fields_of_the_exchange(make_manifest, tmp_path):
    from typing import get_args

    from vllm.config.parallel import All2AllBackend
    from vllm.entrypoints.launchers.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    manifest = make_manifest()
    ours = get_args(EngineShape.model_fields["all2all_backend"].annotation)
    assert set(ours) <= set(get_args(All2AllBackend))
    for backend in ours:
        exchange = {"expert_parallel": True, "data_parallel": 2, "all2all_backend": backend}
        exchange["dual_batch_overlap"] = True
        one = replaced(manifest, "inference", **exchange)
        arguments = server_arguments(one, tmp_path, 0, "127.0.0.1", 1)
        parser = make_arg_parser(FlexibleArgumentParser())
        found = parser.parse_args([*arguments, *node_arguments(one.inference, 1, "h", 9)])
        assert (found.all2all_backend, found.enable_dbo) == (backend, True)
        assert found.headless and found.data_parallel_rpc_port == 9


def test_a_prefill_engine_has_the_fields_of_its_own_shape(make_manifest, tmp_path):
    own = {"nodes_per_replica": 1, "tensor_parallel": 1, "data_parallel": 1, "environment": {}}
    own |= EXCHANGE
    own |= {"expert_parallel": False, "kv_cache_bytes": 1 << 27, "max_num_sequences": 3}
    own |= {"max_batched_tokens": 77, "enforce_eager": True}
    apart = {"num_replicas": 3, "prefill_replicas": 2, "router": {"kind": "none"}}
    inference = make_manifest(kv_transfer={"kind": "nixl"}, prefill=own, **apart).inference
    assert inference.of_engine(2) is inference and inference.max_num_sequences != 3
    first, second = (inference.of_engine(index) for index in (0, 1))
    assert first == second and own.items() <= first.model_dump().items()
    assert first.num_replicas == 3 and first.of_engine(0) == first
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = network.adjoining_ports(16, "127.0.0.1")
        assert taken.getsockname()[1] not in range(port, port + 16)


def test_a_cpu_engine_of_several_devices_is_refused(make_manifest, tmp_path):
    with pytest.raises(OrreryError, match=r"tensor_parallel = 2"):
        server_arguments(make_manifest(tensor_parallel=2), tmp_path, 0, "127.0.0.1", 1)


def test_weights_come_from_sft_and_are_missed_by_name(make_manifest, tmp_path):
    manifest = make_manifest()
    with pytest.raises(
        OrreryError, match=r"weights/sft.*Run the sft stage first, which writes these weights"
    ):
        weights_dir(tmp_path, manifest)
    (tmp_path / "weights/sft").mkdir(parents=True)
    (tmp_path / "weights/sft/config.json").write_text("{}")
    assert weights_dir(tmp_path, manifest) == tmp_path / "weights/sft"


@pytest.mark.parametrize(
    ("named", "vllm"), [(None, "WARNING"), ("debug", "DEBUG"), ("info", "INFO")]
)
def test_vllm_logs_from_the_level_on_that_the_run_names(make_manifest, monkeypatch, named, vllm):
    monkeypatch.setattr(os, "environ", {} if named is None else {"ORRERY_LOG_LEVEL": named})
    engine_environment(make_manifest(), "127.0.0.1")
    assert os.environ["VLLM_LOGGING_LEVEL"] == vllm


def test_the_environment_keeps_what_placement_has_set(make_manifest, monkeypatch):
    for name in ("VLLM_SERVER_DEV_MODE", "VLLM_LOGGING_LEVEL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(os, "environ", os.environ.copy())
    os.environ.update(OMP_NUM_THREADS="5", VLLM_CPU_KVCACHE_SPACE="9")
    engine_environment(make_manifest(), "10.1.2.3")
    assert os.environ["OMP_NUM_THREADS"] == "5"
    assert "VLLM_CPU_KVCACHE_SPACE" not in os.environ
    assert os.environ["VLLM_SERVER_DEV_MODE"] == "1"
    assert os.environ["VLLM_HOST_IP"] == "10.1.2.3"


def test_the_router_gets_its_policy_and_thresholds_and_no_run_without_one_starts_it(make_manifest):
    router = {
        "kind": "vllm_router",
        "policy": "cache_aware",
        "balance_abs_threshold": 3,
        "balance_rel_threshold": 1.25,
    }
    arguments = router_arguments(
        make_manifest(router=router), ["http://a", "http://b"], "10.1.2.3", 10, 11
    )
    said = flags(arguments)
    assert arguments[arguments.index("--worker-urls") + 1 :][:2] == ["http://a", "http://b"]
    assert (said["--policy"], said["--balance-abs-threshold"], said["--balance-rel-threshold"]) == (
        "cache_aware",
        "3",
        "1.25",
    )
    assert said["--host"] == said["--prometheus-host"] == "10.1.2.3"
    assert "--intra-node-data-parallel-size" not in said
    wide = make_manifest(router=router, data_parallel=4)
    ranks = router_arguments(wide, ["http://a", "http://b"], "h", 10, 11)
    assert flags(ranks)["--intra-node-data-parallel-size"] == "4"
    without = {
        "kind": "vllm_router",
        "policy": "power_of_two",
        "balance_abs_threshold": None,
        "balance_rel_threshold": None,
    }
    said = flags(
        router_arguments(
            make_manifest(router=without), ["http://a", "http://b"], "10.1.2.3", 10, 11
        )
    )
    assert (
        said["--policy"] == "power_of_two"
        and not {"--balance-abs-threshold", "--balance-rel-threshold"} & said.keys()
    )
    with pytest.raises(OrreryError, match="has no router"):
        router_arguments(
            make_manifest(router={"kind": "none"}, num_replicas=1), [], "127.0.0.1", 10, 11
        )


def test_a_request_that_is_held_by_an_update_ends_at_its_client_before_it_does_at_the_router(
    make_manifest, monkeypatch
):
    manifest = make_manifest()
    for scale in ("1", "2.5"):
        monkeypatch.setenv("ORRERY_DEADLINE_SCALE", scale)
        said = flags(router_arguments(manifest, ["http://a"], "127.0.0.1", 10, 11))
        client_s = request_s(manifest)
        assert client_s >= 2 * manifest.orchestrator.rollout_timeout_s + scaled(UPDATE_S)
        assert int(said["--request-timeout-secs"]) >= client_s + 60
        assert lease_s(manifest) > client_s


INTERNET, LINK = SimpleNamespace(family=socket.AF_INET), SimpleNamespace(family=socket.AF_PACKET)


@pytest.mark.parametrize(
    ("others", "allowed", "refused"),
    [
        ({}, None, None),
        ({"ib0": [INTERNET]}, None, None),
        ({"dummy0": [LINK]}, None, None),
        ({"eth1": [LINK, INTERNET], "docker0": [INTERNET]}, None, "docker0, eth1"),
        ({"eth1": [SimpleNamespace(family=socket.AF_INET6)]}, "0", "eth1"),
        ({"eth1": [INTERNET]}, "1", None),
    ],
)
def test_what_listens_everywhere_starts_where_every_interface_is_the_runs_or_the_site_says_so(
    monkeypatch, others, allowed, refused
):
    monkeypatch.setenv("ORRERY_INTERFACE", "ib0")
    monkeypatch.delenv("ORRERY_MOONCAKE_ON_ALL_INTERFACES", raising=False)
    if allowed is not None:
        monkeypatch.setenv("ORRERY_MOONCAKE_ON_ALL_INTERFACES", allowed)
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {"lo": [INTERNET]} | others)
    if refused is None:
        refuse_open_interfaces("the store")
        return
    with pytest.raises(OrreryError) as caught:
        refuse_open_interfaces("the store")
    assert str(caught.value) == (
        "the store: Mooncake's transfer engine listens on every interface, and this machine has "
        f"{refused} besides the run's interface. Choose 'nixl' or 'tiers', run in a network "
        "namespace, or, behind a firewall, set ORRERY_MOONCAKE_ON_ALL_INTERFACES = '1' in "
        "[environment] of the site file"
    )


def test_rdma_is_refused_where_no_device_has_it(monkeypatch, tmp_path):
    folder = tmp_path / "infiniband"
    monkeypatch.setattr(network, "RDMA_DEVICES", folder)
    for make_ready in (lambda: None, folder.mkdir):
        make_ready()
        refuse_missing_rdma("here", "tcp")
        with pytest.raises(
            OrreryError,
            match=r"^here\.protocol 'rdma': .* has no device in .*/infiniband, .*\. "
            r"Set here\.protocol to 'tcp'",
        ):
            refuse_missing_rdma("here", "rdma")
    (folder / "mlx5_0").mkdir()
    refuse_missing_rdma("here", "rdma")


@pytest.mark.parametrize("field", ["kv_transfer", "kv_offload"])
def test_engines_that_ask_for_rdma_do_not_start_without(
    make_manifest, monkeypatch, tmp_path, field
):
    monkeypatch.setattr("psutil.net_if_addrs", lambda: {})
    monkeypatch.setattr("os.environ", dict(os.environ))
    monkeypatch.setattr(network, "RDMA_DEVICES", tmp_path / "none")
    mooncake = {"kind": "mooncake", "protocol": "rdma"}
    with pytest.raises(OrreryError, match=rf"^inference\.{field}\.protocol 'rdma': "):
        if field == "kv_transfer":
            apart = {"num_replicas": 2, "prefill_replicas": 1, "router": {"kind": "none"}}
            engine_environment(make_manifest(kv_transfer=mooncake, **apart), "127.0.0.1")
        else:
            (tmp_path / "manifest.json").touch()
            manifest = make_manifest(kv_offload=mooncake | {"segment_bytes": 1 << 24})
            connect(
                SimpleNamespace(
                    manifest=manifest,
                    run_dir=tmp_path,
                    stage="rl",
                    attempt=1,
                    role="inference",
                    index=0,
                ),
                0,
            )


@pytest.mark.parametrize("missing", sorted(kv_store.LIBRARIES))
def test_a_store_names_the_library_that_its_master_lacks_and_what_brings_it(
    monkeypatch, tmp_path, missing
):
    program = tmp_path / "mooncake" / "mooncake_master"
    program.parent.mkdir()
    program.touch()
    monkeypatch.setattr("sysconfig.get_path", lambda _: str(tmp_path))
    monkeypatch.setattr(kv_store, "_loads", lambda library: True)
    assert kv_store.master_program() == program
    monkeypatch.setattr(kv_store, "_loads", lambda library: library != missing)
    with pytest.raises(
        OrreryError,
        match=rf"{missing} is missing, .* `apt-get install -y {kv_store.LIBRARIES[missing]}`, "
        r"or rebuild the image ",
    ):
        kv_store.master_program()


@pytest.mark.parametrize("hardware", ["cpu", "cuda"])
def test_images_hold_what_mooncake_leaves_to_the_system(hardware):
    lines = (REPOSITORY / f"containers/debian.{hardware}.lock").read_text().splitlines()
    assert set(kv_store.LIBRARIES.values()) <= {line.split()[0] for line in lines}


def test_an_engine_does_not_start_without_the_package_of_its_wire(make_manifest, monkeypatch):
    monkeypatch.setattr("os.environ", dict(os.environ))
    manifest = make_manifest()
    with_nixl = replaced(manifest, "transport", weights="nixl")
    monkeypatch.setitem(sys.modules, "nixl", None)  # as where it is not installed
    engine_environment(manifest, "127.0.0.1")
    with pytest.raises(OrreryError, match=r"^transport\.weights 'nixl': NIXL is not installed\. "):
        engine_environment(with_nixl, "127.0.0.1")


def test_looking_for_mooncakes_libraries_loads_none_of_them_into_this_process():
    """A process with NIXL's and the system's copy of rdma-core dies by a signal."""
    program = (
        "from orrery.inference.kv_store import LIBRARIES, _loads\n"
        "print([_loads(each) for each in LIBRARIES],"
        " *(each for each in LIBRARIES if each in open('/proc/self/maps').read()))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    if "False" in done.stdout:
        pytest.skip(
            f"NOT TESTED: Mooncake's libraries {', '.join(kv_store.LIBRARIES)} are not all on "
            "this machine; type `make setup`"
        )
    assert done.stdout.split("]")[1].split() == []


def test_the_entry_point_that_vllm_loads_is_the_one_the_environment_allows():
    project = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    module, _, function = project["project"]["entry-points"]["vllm.general_plugins"][
        PLUGIN
    ].partition(":")
    assert callable(getattr(__import__(module, fromlist=[function]), function))


@pytest.mark.parametrize(
    ("token", "path", "given", "status"),
    [
        ("ours", "/pause", authorization("ours", Purpose.ADMINISTER), 200),
        ("ours", "/pause", authorization("ours", Purpose.GENERATE), 401),
        ("ours", "/pause", authorization("theirs", Purpose.ADMINISTER), 401),
        ("ours", "/pause", {"Authorization": "Bearer ours"}, 401),
        ("ours", "/pause", {}, 401),
        ("ours", "/inference/v1/generate", authorization("ours", Purpose.GENERATE), 200),
        ("ours", "/inference/v1/generate", authorization("ours", Purpose.ADMINISTER), 401),
        ("ours", "/inference/v1/generate", {}, 401),
        ("ours", "/health", {}, 200),
        ("ours", "/metrics", {}, 200),
        (None, "/pause", {}, 200),
    ],
)
def test_the_door_opens_to_a_paths_own_credential_only(monkeypatch, token, path, given, status):
    monkeypatch.setattr("orrery.runtime.network._token", token or "")
    client = TestClient(RequireToken(PlainTextResponse("in")))
    assert client.post(path, headers=given).status_code == status


def test_the_door_of_a_launched_engine_without_a_token_opens_to_nobody():
    code = """
from starlette.responses import PlainTextResponse
from starlette.testclient import TestClient
from orrery.inference.plugin import RequireToken
client = TestClient(RequireToken(PlainTextResponse("in")))
keys = ({"Authorization": given} for given in ("", "Bearer ", "Bearer None"))
print(*(client.post("/pause", headers=key).status_code for key in keys))
"""
    environment = os.environ | {
        "ORRERY_LAUNCHER_PID": "0",
        "PYTHONPATH": os.pathsep.join(filter(None, sys.path)),
    }
    engine = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60
    )
    assert engine.stdout.split() == ["401"] * 3, engine.stderr


def test_every_engine_has_the_door(make_manifest, tmp_path):
    assert (
        flags(server_arguments(make_manifest(), tmp_path, 0, "127.0.0.1", 1))["--middleware"]
        == f"{RequireToken.__module__}.{RequireToken.__name__}"
    )
