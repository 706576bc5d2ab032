"""From the manifest to vLLM's own words: its command line and its environment. Imports no vLLM.

- The flags that shape results come from `manifest.inference`; the rest is fixed here, with the reason beside it.
- Servers listen on the address that they are given, and to this run's roles only.
"""

import json
import os
from pathlib import Path

from orrery.inference import releases
from orrery.inference.adapter_start import adapter_arguments
from orrery.inference.kv_transfer import (
    name_devices,
    refuse_missing_rdma,
    refuse_open_interfaces,
    transfer_config,
    transfer_environment,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Inference, Manifest
from orrery.runtime.network import free_ports, name_interface
from orrery.runtime.role_context import log_level
from orrery.runtime.timing import scaled
from orrery.transport.weight_wire import check_library

PLUGIN = "orrery"  # name of our entry point in `vllm.general_plugins`
BACKEND = "orrery"  # name of our receiver among vLLM's weight-transfer backends
ADAPTER_BACKEND = "orrery_adapters"
ENGINE_READY_S = 600  # for vLLM's engine core to load, compile and report
MAX_GRAPH_TOKENS = (
    4096  # a larger step keeps a device busy while the next one's kernels are launched
)
KEEP_ALIVE_S = 600  # longer than any client keeps an idle connection: the server must not close one that a request is just being written to


def weights_dir(run_dir: Path, manifest: Manifest) -> Path:
    """What RL starts from, and the policy "before" of the evaluate stage. Raises OrreryError where the stage that makes it has not run."""
    stage = "init" if manifest.stages.sft is None else "sft"
    path = run_dir / "weights" / stage
    if not (path / "config.json").is_file():
        raise OrreryError(
            f"{path}: no config.json; the {stage} stage makes these weights, run it first"
        )
    return path


def server_arguments(
    manifest: Manifest, weights: Path, index: int, host: str, port: int, adapter: Path | None = None
) -> list[str]:
    """The command line of `vllm serve` for replica `index`; with the folder `adapter` it serves that one beside the weights."""
    inference = manifest.inference
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
        "--logprobs-mode": "processed_logprobs",  # of the distribution sampled from, which the importance ratio needs
        "--generation-config": "vllm",  # none: sampling is what the request says, not what a file beside the weights says
        "--weight-transfer-config": json.dumps(
            {"backend": BACKEND if adapter is None else ADAPTER_BACKEND}
        ),
        "--worker-extension-cls": "orrery.inference.attestation.AttestingWorker",
        "--middleware": "orrery.inference.token.RequireToken",
        "--uvicorn-log-level": "warning",
    }
    flags = [
        "--tokens-only",  # /inference/v1/generate without a tokenizer; chat templates are the orchestrator's
        "--enable-prompt-tokens-details",  # cached_tokens in answers
        "--enable-prefix-caching",
        "--disable-uvicorn-access-log",
        "--disable-fastapi-docs",
    ]
    if inference.enforce_eager:
        flags.append("--enforce-eager")
    if manifest.transport.routed_experts:
        flags.append("--enable-return-routed-experts")
    if manifest.hardware.accelerator == "cpu":
        if inference.devices_per_replica != 1:
            raise OrreryError(
                f"inference.data_parallel·tensor_parallel = {inference.devices_per_replica}: one CPU engine is one process; set both to 1"
            )
        # Worker and engine core in one process. The class by its path, because vLLM on CPU turns the name "uni" into "mp": it binds OpenMP
        # threads in the worker's environment, which `nobind` and OMP_NUM_THREADS leave nothing of.
        arguments["--distributed-executor-backend"] = (
            "vllm.v1.executor.uniproc_executor.UniProcExecutor"
        )
    else:
        arguments |= _spread(inference)
        if inference.expert_parallel:
            flags.append("--enable-expert-parallel")
        if not inference.enforce_eager:
            flags += ["--cudagraph-capture-sizes", *map(str, graph_sizes(inference))]
    if adapter is not None:
        flags += adapter_arguments(manifest, adapter)
    if (transfer := transfer_config(manifest, index)) is not None:
        arguments["--kv-transfer-config"] = json.dumps(transfer)
    if manifest.hardware.accelerator != "cpu":
        # With the cache's size said, vLLM reads it for one check alone: that so much of the device is free, which may be shared.
        arguments |= {"--gpu-memory-utilization": "0.05"}
    return [*(part for pair in arguments.items() for part in pair), *flags]


def graph_sizes(inference: Inference) -> list[int]:
    """Tokens of a step for which a CUDA graph is captured; a step takes the next larger one, and computes what it lacks for nobody.

    vLLM captures up to 512. But requests of a run end one by one, so with hundreds in flight nearly every step also has a prompt in it, is
    larger, and is launched kernel by kernel. Up to MAX_GRAPH_TOKENS, by an eighth from 256 on. Data-parallel ranks compute as many tokens
    as the fullest of them wherever all have a graph of that size, so theirs stay small.
    """
    sizes, most = (
        [1, 2, 4, *range(8, 256, 8), 256],
        512 if inference.data_parallel > 1 else MAX_GRAPH_TOKENS,
    )
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(32, sizes[-1] // 256 * 32))
    exactly = (
        inference.max_num_sequences,
        inference.max_batched_tokens,
    )  # steps that only sample, and full ones
    return sorted(
        size for size in {*sizes, *exactly} if size <= min(most, inference.max_batched_tokens)
    )


def _spread(inference: Inference) -> dict[str, str]:
    """How one replica is spread over its GPUs, and in which numbers it computes.

    Data parallelism is vLLM's own: one server, which gives each request to the rank with fewest; tokens of all ranks meet at the experts.
    """
    arguments = {"--tensor-parallel-size": str(inference.tensor_parallel)}
    if inference.data_parallel > 1:
        arguments["--data-parallel-size"] = str(inference.data_parallel)
    if inference.quantization == "fp8":
        # Weights in blocks of 128 × 128 with a scale each, made anew from what each update brings: DeepGEMM's format, and the trainer's.
        # Routers stay as they come, as in the trainer: a rounded score is another choice of experts.
        arguments |= {
            "--quantization": "fp8_per_block",
            "--quantization-config": json.dumps({"ignore": [r"re:.*\.gate$"]}),
        }
    return arguments


def engine_variables(manifest: Manifest) -> dict[str, str]:
    """What vLLM and torch read when they are imported, the same wherever the engine runs."""
    variables = {
        "VLLM_SERVER_DEV_MODE": "1",  # /pause, /resume, weight updates, /collective_rpc
        "VLLM_PLUGINS": PLUGIN,  # ours and no other that happens to be installed
        "VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(KEEP_ALIVE_S),
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        **releases.environment(manifest),
    }
    if manifest.inference.enforce_eager:
        # vLLM still compiles the ranks of log-probs, for which every machine would need a C++ compiler.
        variables["TORCHDYNAMO_DISABLE"] = "1"
    return variables


def engine_environment(manifest: Manifest, host: str) -> None:
    """Set the variables of this engine's process; what is set already as a matter of placement stays."""
    os.environ.update(engine_variables(manifest), VLLM_HOST_IP=host)
    os.environ.setdefault("VLLM_ENGINE_READY_TIMEOUT_S", str(int(scaled(ENGINE_READY_S))))
    name_interface()
    check_library(manifest.transport.weights)
    if manifest.inference.kv_transfer.kind == "mooncake":
        refuse_open_interfaces("inference.kv_transfer.kind 'mooncake'")
        refuse_missing_rdma("inference.kv_transfer", manifest.inference.kv_transfer.protocol)
    if manifest.inference.prefill_replicas:
        os.environ.update(transfer_environment(manifest, host, *free_ports(1, host)))
        name_devices(manifest)
    os.environ.setdefault("VLLM_LOGGING_LEVEL", (log_level() or "warning").upper())
    if manifest.hardware.accelerator == "cpu":
        os.environ.setdefault(
            "VLLM_CPU_OMP_THREADS_BIND", "nobind"
        )  # the default pins every server to the same first core
        os.environ.setdefault("OMP_NUM_THREADS", "1")
        os.environ.pop(
            "VLLM_CPU_KVCACHE_SPACE", None
        )  # whole GiB; would win over --kv-cache-memory-bytes
