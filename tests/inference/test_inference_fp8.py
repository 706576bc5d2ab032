"""Layers in FP8 and logits in float32, as an engine's command line, environment and patches say."""

import json
from dataclasses import replace

import pytest
import torch
from command_lines import flags
from inference_servers import REPOSITORY

from orrery.inference.assemble import engine_variables, server_arguments
from orrery.inference.patches import registry, vllm
from orrery.manifest.check import check
from orrery.manifest.identity import load

LAYERS = {
    "attention": ("self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_b_proj"),
    "feed_forward": ("mlp.gate_up_proj", "mlp.down_proj", "mlp.shared_experts.gate_up_proj"),
    "experts": ("mlp.experts",),
}


NARROW = ("fused_qkv_a_proj", "kv_b_proj", "indexer.wq_b")  # projections of latent attention


def engine(name, tmp_path, fp8=None):
    data = json.loads((REPOSITORY / f"manifests/{name}.json").read_text())
    if fp8 is not None:
        data["model"]["fp8"] = fp8
        data["inference"]["quantization"] = "fp8"
    manifest = check(data, "test")
    return flags(server_arguments(manifest, tmp_path, 0, "127.0.0.1", 1)), engine_variables(
        manifest
    )


def online_config(ignore):
    """Return vLLM's configuration for block-scaled FP8, without the layers in `ignore`."""
    from vllm.config.quantization import _ONLINE_SHORTHANDS
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    return OnlineQuantizationConfig(replace(_ONLINE_SHORTHANDS["fp8_per_block"], ignore=ignore))


@pytest.mark.parametrize("fp8", [None, ["attention"], ["experts"], ["attention", "experts"]])
def test_an_engine_quantizes_the_layers_that_the_manifest_names(tmp_path, fp8):
    from vllm.model_executor.layers.fused_moe import RoutedExperts
    from vllm.model_executor.layers.linear import LinearBase

    name = "qwen3_30b_a3b_16k_fp8" if fp8 is None else "qwen3_30b_a3b_16k"
    arguments, variables = engine(name, tmp_path, fp8)
    assert arguments["--quantization"] == "fp8_per_block"
    assert variables["VLLM_USE_DEEP_GEMM_E8M0"] == "0"
    ignore = json.loads(arguments["--quantization-config"])["ignore"]
    config = online_config(ignore)
    config.packed_modules_mapping = {
        "qkv_proj": ["q_proj", "k_proj", "v_proj"],
        "gate_up_proj": ["gate_proj", "up_proj"],
    }
    for part, layers in LAYERS.items():
        for layer in layers:
            kind = RoutedExperts if part == "experts" else LinearBase
            method = config.resolve_quant_method_cls(kind, f"model.layers.3.{layer}")
            assert (method is not None) == (fp8 is None or part in fp8), layer
    assert config.resolve_quant_method_cls(LinearBase, "model.layers.3.mlp.gate") is None


@pytest.mark.parametrize("fp8", [None, ["attention"], ["experts"]])
def test_an_engine_leaves_the_narrow_projections_of_latent_attention(tmp_path, fp8):
    from vllm.model_executor.layers.linear import LinearBase

    arguments, _ = engine("glm5_run", tmp_path, fp8)
    ignore = json.loads(arguments["--quantization-config"])["ignore"]
    config = online_config(ignore)
    config.packed_modules_mapping = {"fused_qkv_a_proj": ["q_a_proj", "kv_a_proj_with_mqa"]}

    def is_quantized(layer):
        return config.resolve_quant_method_cls(LinearBase, f"model.layers.3.{layer}") is not None

    wide = [is_quantized(f"self_attn.{layer}") for layer in ("q_b_proj", "o_proj")]
    assert wide == [fp8 is None or "attention" in fp8] * 2
    assert [is_quantized(f"self_attn.{layer}") for layer in NARROW] == [fp8 is None] * 3


def test_engines_on_gpus_compute_logits_and_routes_in_float32(tmp_path):
    arguments, variables = engine("qwen3_30b_a3b_16k", tmp_path)
    assert json.loads(arguments["--hf-overrides"]) == {"head_dtype": "float32"}
    assert variables[registry.ROUTE_IN_FLOAT32] == "1"
    assert "VLLM_USE_DEEP_GEMM_E8M0" not in variables
    assert registry.ROUTE_IN_FLOAT32 not in engine("qwen3_8b_8k", tmp_path)[1]
    on_cpu, of_cpu = engine("reverse_text_moe", tmp_path)
    assert "--hf-overrides" not in on_cpu and registry.ROUTE_IN_FLOAT32 not in of_cpu
    assert load(REPOSITORY / "manifests/reverse_text_moe.json").inference.dtype == "float32"


def test_a_router_without_a_dtype_gets_float32_logits(monkeypatch):
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.fused_moe.router import gate_linear
    from vllm.model_executor.layers.linear import ReplicatedLinear

    monkeypatch.setattr(gate_linear.GateLinear, "__init__", gate_linear.GateLinear.__init__)
    monkeypatch.setattr("vllm.distributed.parallel_state._TP", None)
    vllm.route_in_float32()
    monkeypatch.setattr(ReplicatedLinear, "__init__", _without_vllm)
    with set_current_vllm_config(VllmConfig()):
        found = [gate_linear.GateLinear(8, 4, out_dtype=dtype) for dtype in (None, torch.bfloat16)]
    assert [gate.out_dtype for gate in found] == [torch.float32, torch.bfloat16]


def _without_vllm(self, num_inputs, num_outputs, **_):
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod

    torch.nn.Module.__init__(self)
    self.weight = torch.nn.Parameter(torch.empty(num_outputs, num_inputs, dtype=torch.bfloat16))
    self.quant_method = UnquantizedLinearMethod()
