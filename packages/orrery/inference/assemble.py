"""Build vLLM's command line and environment from the manifest, without importing vLLM."""

import json
import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from safetensors.numpy import save_file

from orrery.inference.kv_connectors import (
    refuse_missing_rdma,
    refuse_open_interfaces,
    transfer_environment,
)
from orrery.inference.patches import registry
from orrery.manifest.budget.engine import graph_sizes
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.json_file import read_object
from orrery.manifest.plan import check_cpu_shape, stage
from orrery.manifest.publish import sync_tree
from orrery.manifest.schema import Inference, Manifest
from orrery.runtime.network import adjoining_ports, free_ports, name_interface, name_ucx_devices
from orrery.runtime.role_context import RoleContext, log_level
from orrery.runtime.run_directory import stage_dir, weights_path
from orrery.runtime.timing import scaled
from orrery.wire import rendezvous
from orrery.wire.weight_wire import check_library, served_model

PLUGIN = "orrery"
BACKEND = "orrery"
ADAPTER_BACKEND = "orrery_adapters"
# The executor's full name, because vLLM on CPU replaces "uni" by "mp".
UNIPROC = "vllm.v1.executor.uniproc_executor.UniProcExecutor"
INDEX = "ORRERY_ENGINE"  # environment variable with the engine's index
ENGINE_READY_S = 600
HEAD, MEET_S = "engine_head", 0.1  # HEAD: role that publishes where ranks meet
KEEP_ALIVE_S = 600  # clients close idle connections earlier
# Projections of each LoRA target. Experts are left out, because their LoRA kernels need a GPU.
PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("gate_proj", "up_proj", "down_proj"),
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # permitted values of --max-lora-rank


def weights_dir(run_dir: Path, manifest: Manifest) -> Path:
    stage = manifest.stage_before_rl
    path = weights_path(run_dir, stage)
    if not (path / "config.json").is_file():
        raise OrreryError(
            f"{path}: no config.json. Run the {stage} stage first, which writes these weights"
        )
    return path


def check_release(manifest: Manifest, weights: Path, known: Collection[str], release: str) -> None:
    """Raise OrreryError if vLLM `release` lacks the architecture of `weights`."""
    (name,) = json.loads((weights / "config.json").read_text())["architectures"]
    if manifest.model.family != "hugging_face" and name not in known:
        raise OrreryError(
            f"model.family {manifest.model.family!r}: vLLM {release} does not support {name}. Type "
            "`make setup` to install the release in locks/"
        )


def server_arguments(
    manifest: Manifest, weights: Path, index: int, host: str, port: int, adapter: Path | None = None
) -> list[str]:
    inference, is_cpu = manifest.inference, manifest.hardware.accelerator == "cpu"
    backend = BACKEND if adapter is None else ADAPTER_BACKEND
    arguments = {
        "--model": str(weights),
        "--served-model-name": "policy",
        "--host": host,
        "--port": str(port),
        "--seed": str(manifest.seed + index),
        "--dtype": inference.dtype,
        "--max-model-len": str(inference.max_model_len_tokens),
        "--block-size": str(inference.kv_block_tokens),
        "--kv-cache-memory-bytes": str(inference.kv_cache_bytes),
        "--max-num-seqs": str(inference.max_num_sequences),
        "--max-num-batched-tokens": str(inference.max_batched_tokens),
        "--logprobs-mode": "processed_logprobs",  # log-probs at the sampling temperature
        "--generation-config": "vllm",  # ignore the checkpoint's sampling defaults
        "--weight-transfer-config": json.dumps({"backend": backend}),
        "--worker-extension-cls": "orrery.inference.plugin.AttestingWorker",
        "--middleware": "orrery.inference.plugin.RequireToken",
        "--uvicorn-log-level": "warning",
    }
    flags = [
        "--tokens-only",  # the orchestrator tokenizes chats
        "--enable-prompt-tokens-details",
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    ]
    if inference.enforce_eager:
        flags.append("--enforce-eager")
    if manifest.transport.routed_experts:
        flags.append("--enable-return-routed-experts")
    if inference.expert_parallel:
        flags += ["--enable-expert-parallel", "--enable-ep-weight-filter"]
        arguments["--all2all-backend"] = inference.all2all_backend
    if inference.dual_batch_overlap:
        flags.append("--enable-dbo")
    if is_cpu:
        check_cpu_shape(inference)
        arguments |= _spread(manifest) | {"--distributed-executor-backend": UNIPROC}
    else:
        arguments |= _spread(manifest)
        if inference.dtype == "bfloat16":
            # float32 logits, as in the trainer
            arguments["--hf-overrides"] = json.dumps({"head_dtype": "float32"})
        if not inference.enforce_eager:
            flags += ["--cudagraph-capture-sizes", *map(str, graph_sizes(inference))]
    if adapter is not None:
        flags += _adapter_arguments(manifest, adapter)
    if not is_cpu:
        # vLLM only checks that this fraction of memory is free. `kv_cache_bytes` sizes the cache.
        arguments |= {"--gpu-memory-utilization": "0.05"}
    return [*(part for pair in arguments.items() for part in pair), *flags]


def _adapter_arguments(manifest: Manifest, folder: Path) -> list[str]:
    lora = manifest.trainer.lora
    assert lora is not None, "refused by the manifest"
    room = next(rank for rank in RANKS if rank >= lora.rank)
    targets = [name for target in lora.targets for name in PROJECTIONS[target]]
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)),
        *("--lora-target-modules", *targets),
        *("--lora-modules", f"{served_model(manifest, 'rl')}={folder}"),
    ]


# Model part → vLLM layers in bfloat16 if `model.fp8` lacks the part.
_NOT_FP8 = {
    "attention": r"re:.*\.self_attn\..*",
    "feed_forward": r"re:.*\.(mlp|shared_experts?)\.(gate|up|down|gate_up)_proj$",
    "experts": r"re:.*\.mlp\.experts(\..*)?$",
}
# Latent-attention layers that stay in bfloat16 under `model.fp8`.
_NARROW = r"re:.*\.self_attn\.(fused_qkv_a_proj|q_a_proj|kv_a_proj_with_mqa|kv_b_proj|indexer\..*)$"


def _spread(manifest: Manifest) -> dict[str, str]:
    inference, fp8 = manifest.inference, manifest.model.fp8
    arguments = {"--tensor-parallel-size": str(inference.tensor_parallel)}
    if inference.data_parallel > 1:
        arguments["--data-parallel-size"] = str(inference.data_parallel)
    if inference.quantization == "fp8":
        others = [name for part, name in _NOT_FP8.items() if fp8 is not None and part not in fp8]
        if fp8 is not None and manifest.model.mla is not None:
            others.append(_NARROW)
        arguments |= {
            # Scales per 128 × 128 block, as in DeepGEMM and the trainer.
            "--quantization": "fp8_per_block",
            # FP8 routers would choose other experts than the trainer.
            "--quantization-config": json.dumps({"ignore": [r"re:.*\.gate$", *others]}),
        }
    return arguments


def engine_and_part(ctx: RoleContext) -> tuple[int, int]:
    if ctx.role == "inference":
        return ctx.index, 0
    for process in stage(ctx.manifest, ctx.stage).processes:
        if (process.role, process.index) == (ctx.role, ctx.index):
            return process.engine, process.part
    raise OrreryError(f"{ctx.name}: run {ctx.manifest.name} has no such process in {ctx.stage}")


def meeting_point(ctx: RoleContext, engine: int, part: int) -> tuple[str, int]:
    """Return the host and port, chosen by the engine's first node, where its ranks meet."""
    if not part:
        [port] = free_ports(1, ctx.host)
        rendezvous.publish(ctx, f"tcp://{ctx.host}:{port}", as_role=HEAD)
        return ctx.host, port
    deadline_s = scaled(ENGINE_READY_S)
    with ctx.health.waiting(
        f"inference.{engine} to say where its ranks meet", deadline_s=deadline_s
    ):
        end_s = time.monotonic() + deadline_s
        while time.monotonic() < end_s:
            for head in rendezvous.find_endpoints(ctx, HEAD):
                if (head.index, head.incarnation) == (engine, ctx.incarnation):
                    address = urlsplit(head.url)
                    return str(address.hostname), int(address.port or 0)
            time.sleep(MEET_S)
    raise RunFailed(
        f"{ctx.role} {ctx.index} waited {deadline_s:g} s for inference {engine}. Read "
        f"logs/inference.{engine}.log"
    )


def node_arguments(inference: Inference, part: int, host: str, port: int) -> list[str]:
    """Return `vllm serve` arguments for node `part` of an engine. Only node 0 has a server."""
    ranks = inference.ranks_per_node
    where = ["--data-parallel-size-local", str(ranks), "--data-parallel-address", host]
    where += ["--data-parallel-rpc-port", str(port)]
    return where + (["--data-parallel-start-rank", str(part * ranks), "--headless"] * bool(part))


def blank_adapter(run_dir: Path, manifest: Manifest, stage: str, name: str) -> Path | None:
    """Return a folder with a PEFT adapter of zeros, or None without LoRA.

    A stage's engines share the folder, because its path is part of KV block hashes.
    """
    model, lora = manifest.model, manifest.trainer.lora
    if served_model(manifest, stage) is None or lora is None:
        return None
    folder = stage_dir(run_dir, stage) / "blank_adapter"
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".{folder.name}.{name}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    # Published factors contain LoRA's scale, so alpha / r must be 1.
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.rank}
    config |= {"target_modules": [], "bias": "none"}
    (aside / "adapter_config.json").write_text(json.dumps(config))
    # vLLM requires at least one projection's factors, and sets missing factors to 0.
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    shapes = {
        "A": (lora.rank, model.num_heads * model.head_dim),
        "B": (model.hidden_size, lora.rank),
    }
    factors = {
        f"{name}.lora_{factor}.weight": np.zeros(shape, np.float32)
        for factor, shape in shapes.items()
    }
    save_file(factors, aside / "adapter_model.safetensors")
    sync_tree(aside)  # later starts trust an existing folder
    try:
        aside.rename(folder)
    except OSError:
        shutil.rmtree(aside)
    return folder


def engine_variables(manifest: Manifest) -> dict[str, str]:
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # enable /pause, /resume, /collective_rpc, weight updates
        "VLLM_PLUGINS": PLUGIN,
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **registry.environment(manifest),
    }
    if manifest.inference.quantization == "fp8":
        variables["VLLM_USE_DEEP_GEMM_E8M0"] = "0"  # if 1, engines on Hopper round weights twice
    if manifest.inference.enforce_eager:
        # Otherwise vLLM needs a C++ compiler to rank log-probs.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def engine_environment(manifest: Manifest, host: str) -> None:
    """Set vLLM's environment variables. Keep the user's timeout, log level and CPU options."""
    os.environ.update(engine_variables(manifest), VLLM_HOST_IP=host)
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(scaled(ENGINE_READY_S))))
    name_interface()
    check_library(manifest.transport.weights)
    if manifest.inference.kv_transfer.kind == "mooncake":
        refuse_open_interfaces("inference.kv_transfer.kind 'mooncake'")
        refuse_missing_rdma("inference.kv_transfer", manifest.inference.kv_transfer.protocol)
    if manifest.inference.prefill_replicas:
        # With NIXL, data-parallel rank r listens at port + r.
        port = adjoining_ports(manifest.inference.data_parallel, host)
        os.environ.update(transfer_environment(manifest, host, port))
        if manifest.inference.kv_transfer.kind == "nixl":
            name_ucx_devices()
    os.environ.setdefault("VLLM_LOGGING_LEVEL", (log_level() or "warning").upper())
    if manifest.hardware.accelerator == "cpu":
        # Otherwise vLLM pins every server to the same core.
        os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes


def folder_arguments(folder: Path, host: str, port: int, cpu_cache_bytes: int | None) -> list[str]:
    """Return vLLM's command line for a Hugging Face folder.

    On CPU, pass config.json's dtype, because vLLM's default is never float32.
    """
    found = ["--model", str(folder), "--served-model-name", folder.name]
    found += ["--host", host, "--port", str(port), "--max-model-len", "auto"]
    found += ["--middleware", "orrery.inference.plugin.RequireKey"]
    found += ["--uvicorn-log-level", "warning"]
    found += ["--disable-uvicorn-access-log", "--disable-fastapi-docs"]
    if cpu_cache_bytes is not None:
        dtype = read_object(folder / "config.json", "copy it again").get("dtype") or "auto"
        found += ["--dtype", str(dtype)]
        found += ["--kv-cache-memory-bytes", str(cpu_cache_bytes), "--enforce-eager"]
        found += ["--distributed-executor-backend", UNIPROC]
    return found


def folder_environment(host: str, is_cpu: bool) -> None:
    variables = {"VLLM_PLUGINS": PLUGIN, "VLLM_HOST_IP": host, "VLLM_NO_USAGE_STATS": "1"}
    variables |= {"DO_NOT_TRACK": "1", "HF_HUB_OFFLINE": "1"}
    if is_cpu:
        variables |= {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "TORCHDYNAMO_DISABLE": "1"}
        os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # would override --kv-cache-memory-bytes
    os.environ.update(variables)
    os.environ.pop("VLLM_SERVER_DEV_MODE", None)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", (log_level() or "warning").upper())
    name_interface()
