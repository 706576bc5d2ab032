"""The names, flags, addresses and metrics of vLLM that Orrery uses are in the source of the
installed release. Nothing imports it.
"""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import pytest
from inference_servers import REPOSITORY

from orrery.inference.assemble import server_arguments
from orrery.inference.patches import registry
from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.orchestrator.engines.messages import METRICS

INFERENCE = REPOSITORY / "packages/orrery/inference"
TREE = Path(find_spec("vllm").submodule_search_locations[0])

# Code that patches and the worker extension replace or rely on, without imports: file, then
# class and attribute.
CORRECTED = {
    "../plugin.py": [
        ("v1/worker/gpu_worker.py", "Worker.weight_transfer_engine"),
        ("v1/worker/gpu_worker.py", "Worker.finish_weight_update"),
    ],
    "vllm.py": [
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner._sample"),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner._bookkeeping_sync"),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner.discard_request_mask"),
        ("v1/engine/utils.py", "get_mp_context"),
        ("model_executor/models/registry.py", "_run_in_subprocess"),
    ],
    "vllm_answers.py": [
        (
            "entrypoints/scale_out/token_in_token_out/serving.py",
            "ServingTokens.serve_tokens_full_generator",
        ),
        ("entrypoints/scale_out/token_in_token_out/api_router.py", "JSONResponse"),
    ],
    "vllm_answers.py (whole)": [
        ("v1/engine/core.py", "EngineCore.step"),
        ("v1/engine/core.py", "EngineCore.step_with_batch_queue"),
        ("v1/engine/core.py", "EngineCoreProc._handle_client_request"),
        ("v1/engine/core.py", "EngineCoreProc.output_queue"),
        ("v1/engine/__init__.py", "EngineCoreOutput.new_logprobs"),
    ],
    "vllm.py (memory)": [
        (
            "distributed/device_communicators/cpu_communicator.py",
            "_CPUSHMDistributed.make_group_name",
        ),
        ("v1/kv_offload/cpu/shared_offload_region.py", "SharedOffloadRegion.mmap_path"),
    ],
    "vllm.py (KV transfers)": [
        ("v1/core/sched/scheduler.py", "Scheduler.has_finished_requests"),
        ("distributed/nixl_utils.py", "_load_nixl_attr"),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "MooncakeConnectorWorker.receive_kv_from_single_worker",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "PullReqMeta.pull_tasks_count",
        ),
    ],
    "../plugin.py (caches)": [
        (
            "distributed/kv_transfer/kv_connector/v1/nixl/base_worker.py",
            "NixlBaseConnectorWorker._reqs_to_send",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "MooncakeConnectorWorker.reqs_need_send",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "MooncakeConnectorWorker.sender_loop",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "MooncakeConnectorWorker.receiver_loop",
        ),
        (
            "distributed/kv_transfer/kv_connector/v1/mooncake/mooncake_connector.py",
            "SendBlockMeta.expire_time",
        ),
    ],
    "../kv_tiers.py": [
        ("v1/kv_offload/tiering/fs/manager.py", "FileSystemTierManager.file_mapper"),
        ("v1/kv_offload/tiering/fs/manager.py", "FileSystemTierManager._pool"),
        ("v1/kv_offload/tiering/fs/manager.py", "FileSystemTierManager._block_size"),
        ("v1/kv_offload/tiering/fs/thread_pool.py", "DualQueueThreadPool.enqueue_store"),
        ("v1/kv_offload/file_mapper.py", "FileMapper.base_path"),
        ("v1/kv_offload/file_mapper.py", "FileMapper.rank"),
    ],
    "vllm.py (processes)": [
        ("v1/engine/core_client.py", "AsyncMPClient.collective_rpc_async"),
        ("v1/engine/core_client.py", "AsyncMPClient._call_utility_async"),
        ("v1/engine/core_client.py", "DPLBAsyncMPClient.call_utility_async"),
        ("distributed/utils.py", "TCPStore"),
        ("distributed/utils.py", "rendezvous"),
    ],
    "vllm.py (adapters)": [
        ("lora/model_manager.py", "LoRAModelManager.remove_all_adapters"),
        ("lora/model_manager.py", "LoRAModelManager.lora_index_to_id"),
        ("lora/model_manager.py", "LoRAModelManager.modules"),
        ("lora/model_manager.py", "LoRAModelManager.packed_modules"),
        ("lora/layers/base.py", "BaseLayerWithLoRA.set_lora"),
        ("model_executor/layers/fused_moe/layer.py", "FusedMoEConfig"),
        ("model_executor/layers/fused_moe/config.py", "FusedMoEConfig.is_lora_enabled"),
    ],
    "vllm_routes.py (tiers)": [
        ("config/vllm.py", "VllmConfig._verify_aux_output_compatibility"),
        ("distributed/aux_output_connector/worker.py", "BlockObjectStore"),
        ("distributed/aux_output_connector/worker.py", "routed_experts_keys"),
        ("distributed/aux_output_connector/worker.py", "AuxOutputWorkerConnector.process_output"),
        ("distributed/aux_output_connector/worker.py", "AuxOutputWorkerConnector._store"),
        ("distributed/aux_output_connector/store.py", "BackgroundBlockObjectStore._store"),
        ("v1/core/sched/scheduler.py", "Scheduler.update_from_output"),
        ("distributed/aux_output_connector/store.py", "BlockObjectStore._lru"),
        ("distributed/aux_output_connector/store.py", "BlockObjectStore._arena"),
        ("distributed/aux_output_connector/store.py", "BlockObjectStore._UNALLOCATED_SLOT"),
        ("distributed/aux_output_connector/store.py", "BlockObjectStore.get_concatenated"),
        ("distributed/aux_output_connector/routed_experts.py", "RoutedExpertsBuffer.capture"),
        ("distributed/aux_output_connector/routed_experts.py", "RoutedExpertsBuffer._tail"),
        (
            "distributed/kv_transfer/kv_connector/v1/offloading/scheduler.py",
            "OffloadingConnectorScheduler.get_num_new_matched_tokens",
        ),
    ],
    "vllm_routes.py (choices)": [
        ("models/deepseek_v32/attention.py", "sparse_attn_indexer"),
        ("models/deepseek_v32/attention.py", "DeepseekV32Indexer.k_cache"),
        ("distributed/aux_output_connector/worker.py", "bind_routed_experts_capturer"),
        ("distributed/aux_output_connector/worker.py", "RoutedExpertsCapturer"),
        (
            "model_executor/layers/fused_moe/routed_experts_capturer.py",
            "RoutedExpertsCapturer.device_buffer",
        ),
        (
            "model_executor/layers/fused_moe/routed_experts_capturer.py",
            "RoutedExpertsCapturer.shape_per_token",
        ),
        (
            "model_executor/layers/fused_moe/routed_experts_capturer.py",
            "RoutedExpertsCapturer.output_dtype_name",
        ),
        (
            "model_executor/layers/fused_moe/routed_experts_capturer.py",
            "RoutedExpertsCapturer.snapshot_routing_data",
        ),
    ],
    "vllm_routes.py": [
        ("config/vllm.py", "VllmConfig._verify_aux_output_compatibility"),
        ("distributed/aux_output_connector/worker.py", "AuxOutputWorkerConnector.begin_step"),
        ("distributed/aux_output_connector/worker.py", "AuxOutputWorkerConnector.prepare_output"),
        ("distributed/aux_output_connector/worker.py", "PendingAuxOutput.enqueue_cpu_copy"),
        ("v1/outputs.py", "ModelRunnerOutput.aux_output_connector_output"),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner.execute_model_state"),
        ("v1/worker/gpu_model_runner.py", "GPUModelRunner.sample_tokens"),
    ],
}
PATHS = ["/inference/v1/generate", "/abort_requests", "/pause", "/resume", "/start_weight_update",
         "/update_weights", "/finish_weight_update", "/collective_rpc", "/health"]  # fmt: skip


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text())


def imports(node: ast.AST) -> Iterator[tuple[str, str]]:
    """Return (module, name) of every import from vLLM."""
    for child in ast.walk(node):
        if isinstance(child, ast.ImportFrom) and (child.module or "").split(".")[0] == "vllm":
            yield from ((child.module, alias.name) for alias in child.names)
        elif isinstance(child, ast.Import):
            yield from (
                (alias.name, "") for alias in child.names if alias.name.split(".")[0] == "vllm"
            )


def module_file(module: str) -> Path | None:
    path = TREE.joinpath(*module.split(".")[1:])
    return next(
        (file for file in (path.with_suffix(".py"), path / "__init__.py") if file.is_file()), None
    )


def defined(body: list[ast.stmt]) -> Iterator[str]:
    """Names that these statements bind, also inside conditions; `self.x = …` of a class's methods
    counts as the class's x.
    """
    for statement in body:
        for node in (
            ast.walk(statement)
            if isinstance(statement, ast.If | ast.Try | ast.Assign | ast.AnnAssign)
            else [statement]
        ):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                yield node.name
            elif isinstance(node, ast.Import | ast.ImportFrom):
                yield from ((alias.asname or alias.name).split(".")[0] for alias in node.names)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                yield node.id


def attributes(class_: ast.ClassDef) -> set[str]:
    kept = {
        node.attr
        for node in ast.walk(class_)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
    }
    return kept | set(defined(class_.body))


def test_every_name_that_we_import_is_there():
    missing, seen = [], 0
    for file in sorted(INFERENCE.rglob("*.py")):
        for module, name in imports(parsed(file)):
            seen += 1
            found = module_file(module)
            if found is None or (
                name
                and name not in set(defined(parsed(found).body))
                and module_file(f"{module}.{name}") is None
            ):
                missing.append(f"{file.name}: from {module} import {name}")
    assert not missing and seen > 20


def test_every_attribute_that_a_correction_replaces_is_there():
    missing = []
    for patch, places in CORRECTED.items():
        for file, dotted in places:
            name, _, attribute = dotted.partition(".")
            body = parsed(TREE / file).body
            class_ = next(
                (node for node in body if isinstance(node, ast.ClassDef) and node.name == name),
                None,
            )
            there = (
                attribute in attributes(class_)
                if class_ is not None
                else not attribute and name in set(defined(body))
            )
            if not there:
                missing.append(f"{patch}: {file} has no {dotted}")
    assert not missing


def test_the_registry_lists_every_patch_and_each_has_a_function_and_a_test():
    listed = {patch.name for patch in registry.PATCHES}
    source = Path(registry.__file__).read_text()
    assert set(re.findall(r'_apply\(\s*"([\w.]+)"', source)) <= listed
    for patch in registry.PATCHES:
        module, _, function = patch.name.partition(".")
        assert function in set(defined(parsed(INFERENCE / "patches" / f"{module}.py").body))
        assert (REPOSITORY / registry.TESTS / patch.test).is_file()
    modules = {file.stem for file in (INFERENCE / "patches").glob("vllm*.py")}
    assert modules == {name.partition(".")[0] for name in listed}


def test_the_registry_prints_a_line_of_json_a_patch_without_vllm_or_torch():
    code = (
        "import runpy, sys\n"
        "sys.modules |= dict.fromkeys(('vllm', 'torch'))\n"  # their imports raise
        "runpy.run_module('orrery.inference.patches.registry', run_name='__main__')\n"
    )
    printed = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    patches = [json.loads(line) for line in printed.stdout.splitlines()]
    assert [patch["name"] for patch in patches] == [patch.name for patch in registry.PATCHES]
    for patch in patches:
        assert patch["target"] and patch["why"] and patch["until"] and patch["versions"]
        assert (REPOSITORY / patch["test"]).is_file()


@pytest.mark.parametrize("name", ["Receiver", "AdapterReceiver"])
def test_a_weight_backend_has_every_method_that_a_release_asks_for(name):
    def methods(path, class_name):
        class_ = next(
            node
            for node in parsed(path).body
            if isinstance(node, ast.ClassDef) and node.name == class_name
        )
        return [node for node in class_.body if isinstance(node, ast.FunctionDef)]

    asked = {
        method.name
        for method in methods(TREE / "distributed/weight_transfer/base.py", "WeightTransferEngine")
        if any(ast.unparse(decorator) == "abstractmethod" for decorator in method.decorator_list)
    }
    assert "receive_weights" in asked
    assert asked <= {
        method.name
        for one in (name, "Backend")
        for method in methods(INFERENCE / "receiver.py", one)
    }


def manifests():
    """A run on CPU, and one on GPUs that asks for everything."""
    cpu = json.loads((REPOSITORY / "manifests/reverse_text_moe.json").read_text())
    gpu = json.loads((REPOSITORY / "manifests/reverse_text_moe.json").read_text())
    gpu["hardware"] = {
        "accelerator": "h200",
        "num_nodes": 1,
        "devices_per_node": 8,
        "shared_devices": False,
    }
    gpu["model"]["moe"]["expert_intermediate_size"] = (
        256  # whole blocks of FP8, as on the next line
    )
    gpu["model"]["head_dim"] = 64
    gpu["inference"] |= {
        "dtype": "bfloat16",
        "tensor_parallel": 2,
        "data_parallel": 2,
        "expert_parallel": True,
        "quantization": "fp8",
    }
    for each in (cpu, gpu):
        each["transport"] |= {"routed_experts": True, "weights": "adapters"}
        each["trainer"]["lora"] = {"rank": 8, "alpha": 8.0, "targets": ["attention"], "seed": 1}
        yield check(each, "test")


def test_an_engine_where_vllm_is_not_installed_says_so_in_one_sentence(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    with pytest.raises(
        OrreryError,
        match=r"^inference: vLLM is not installed here\. Install locks/inference\.cuda\.txt",
    ):
        registry.import_vllm(enforce_eager=True)


def test_a_command_line_is_written_where_vllm_is_not_installed(monkeypatch):
    monkeypatch.setattr(registry, "find_spec", lambda name: None)
    assert "--model" in server_arguments(
        load(REPOSITORY / "manifests/reverse_text_moe_replay.json"), Path("w"), 0, "h", 1
    )


def test_every_flag_is_there():
    args = (TREE / "engine/arg_utils.py").read_text()
    frontend = parsed(TREE / "entrypoints/launchers/cli_args.py")
    fields = {
        name
        for node in ast.walk(frontend)
        if isinstance(node, ast.ClassDef)
        for name in attributes(node)
    }
    words = {
        word
        for manifest in manifests()
        for word in server_arguments(manifest, Path("w"), 0, "h", 1, Path("a"))
    }
    flags = {word for word in words if word.startswith("--")}
    assert {
        "--quantization",
        "--data-parallel-size",
        "--enable-expert-parallel",
        "--enable-return-routed-experts",
    } <= flags
    assert "--lora-target-modules" in flags
    assert [
        flag
        for flag in flags
        if f'"{flag}"' not in args and flag[2:].replace("-", "_") not in fields
    ] == []


def test_every_address_and_metric_of_the_client_is_there():
    source = "\n".join(file.read_text() for file in sorted((TREE / "entrypoints").rglob("*.py")))
    assert [
        path for path in PATHS if not re.search(rf'@router\.(?:post|get)\(\s*"{path}"', source)
    ] == []
    metrics = "\n".join(file.read_text() for file in (TREE / "v1/metrics").rglob("*.py"))
    assert [name for name in METRICS if f'"{name.removesuffix("_total")}"' not in metrics] == []


def test_what_the_quantization_flag_says_is_known():
    text = (TREE / "config/quantization.py").read_text()
    assert '"fp8_per_block"' in text and "ignore: list[str]" in text
    assert (
        '"re:"' in (TREE / "model_executor/layers/quantization/utils/quant_utils.py").read_text()
        or "re:"
        in (TREE / "model_executor/layers/quantization/compressed_tensors/utils.py").read_text()
    )
