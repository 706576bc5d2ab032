"""Plan the memory and speed of a vLLM engine.

A decode step takes the maximum of memory time and compute time (roofline, arXiv 2402.16363,
section 3), plus collectives and host work. Prefill takes compute time and collectives.

GRAPH_COPIES, SEQUENCE_S, LAYER_S, EXPERTS_SHARE and PRODUCTS_SHARE are fitted to
`benchmarks/inference` and `benchmarks/async/memory_h100.json`.
"""

from dataclasses import dataclass

from orrery.manifest.budget.parameters import (
    BlockWeight,
    active_parameters,
    attention_forward,
    block_weights,
    indexers,
    is_sparse,
)
from orrery.manifest.devices import Rates
from orrery.manifest.schema import Inference, Manifest, Model
from orrery.manifest.schema.inference import indexer_token_bytes, token_bytes
from orrery.manifest.schema.model import DTYPE_BYTES, FP8_BLOCK

MAX_GRAPH_TOKENS = 4096  # larger steps gain little from CUDA graphs
CONTEXT_BYTES = 700 << 20  # CUDA context and libraries
NCCL_BYTES = 400 << 20
DEEPEP_BYTES = 1 << 30  # vLLM's VLLM_DEEPEP_BUFFER_SIZE_MB
LOGIT_COPIES = 4  # float32 copies of a step's logits
GRAPH_COPIES = 5  # bytes of CUDA graphs / bytes of their hidden states
SEQUENCE_S = 10e-6  # host time per sampled token: scheduling, log-probs, response
LAYER_S = 60e-6  # time of short kernels and gaps, per layer of a decode step
EXPERTS_SHARE = 0.7  # share of memory bandwidth at which a decode step reads routed experts
PRODUCTS_SHARE = 0.7  # share of the product rate that prefill reaches
# Latency of a ring collective's start, a step in a node, a step between nodes (NCCL's `tuning.cc`)
COLLECTIVE_S, LINK_STEP_S, NETWORK_STEP_S = 14e-6, 1.9e-6, 4e-6
DEEPEP_SHARE = 0.87  # share of the network's rate that DeepEP reaches on 64 GPUs (its README)

Bytes = dict[str, int]


def graph_sizes(inference: Inference) -> list[int]:
    """Return the token counts of vLLM's CUDA graphs. Steps are padded to them.

    Orrery raises vLLM's limit of 512 for steps with prefill, except with data parallelism, because
    then all ranks pad to the largest step.
    """
    sizes = [1, 2, 4, *range(8, 256, 8), 256]
    most = 512 if inference.data_parallel > 1 else MAX_GRAPH_TOKENS
    while sizes[-1] < most:
        sizes.append(sizes[-1] + max(32, sizes[-1] // 256 * 32))
    sizes += [inference.max_num_sequences, inference.max_batched_tokens]
    return sorted(size for size in set(sizes) if size <= min(most, inference.max_batched_tokens))


def weight_bytes(model: Model, inference: Inference) -> tuple[int, int]:
    """Return a device's bytes of (all weights, routed experts).

    Norms, routers, indexers and down-projections of latent attention are replicated.
    """
    value_bytes, tensor = DTYPE_BYTES[inference.dtype], inference.tensor_parallel
    kinds: dict[tuple[bool, str], tuple[float, float]] = {}
    total = experts = 0.0
    for layer in range(model.num_layers):
        indexer = None if model.mla is None else model.mla.indexer
        types = None if indexer is None else indexer.types
        kind = is_sparse(model, layer), "full" if types is None else types[layer]
        if kind not in kinds:
            kinds[kind] = _block_bytes(model, inference, layer)
        total += kinds[kind][0]
        experts += kinds[kind][1]
    ends = (1 if model.tie_embeddings else 2) * model.vocab_size * model.hidden_size
    total += value_bytes * ends / tensor
    return int(total), int(experts)


def _block_bytes(model: Model, inference: Inference, layer: int) -> tuple[float, float]:
    total = experts = 0.0
    narrow = set()
    if (mla := model.mla) is not None:
        narrow = {mla.q_lora_rank, mla.kv_lora_rank + mla.rope_head_dim}
    for weight in block_weights(model, layer):
        num_bytes = weight.size * _value_bytes(model, inference, weight)
        is_cut = weight.part == "attention" and weight.shape[0] not in narrow
        if weight.part == "experts":
            experts += num_bytes / inference.devices_per_replica
        elif is_cut or weight.part == "feed_forward":
            total += num_bytes / inference.tensor_parallel
        else:
            total += num_bytes
    return total + experts, experts


def _value_bytes(model: Model, inference: Inference, weight: BlockWeight) -> float:
    if model.fp8 is None:
        is_quantized = weight.part in ("attention", "feed_forward", "experts")
    else:
        is_quantized = weight.part in model.fp8 and weight.has_fp8
    if inference.quantization == "fp8" and is_quantized:
        return 1 + 4 / FP8_BLOCK**2
    return DTYPE_BYTES[inference.dtype]


def memory(model: Model, inference: Inference, is_gpu: bool, has_adapters: bool) -> Bytes:
    weights, _ = weight_bytes(model, inference)
    value_bytes, tensor = DTYPE_BYTES[inference.dtype], inference.tensor_parallel
    wide = model.intermediate_size
    if (moe := model.moe) is not None:
        per_token = moe.num_experts_per_token * moe.expert_intermediate_size
        wide = max(per_token, model.hidden_size)
    rows = inference.max_batched_tokens * value_bytes
    found = {
        "weights": weights,
        "cache": inference.kv_cache_bytes,
        "activations": rows * (4 * model.hidden_size + 3 * wide // tensor),
        "logits": LOGIT_COPIES * 4 * inference.max_num_sequences * model.vocab_size,
    }
    if not is_gpu:
        return found
    if inference.dtype == "bfloat16":  # vLLM also keeps a float32 LM head
        found["weights"] += 4 * model.vocab_size * model.hidden_size // tensor
    if not inference.enforce_eager:
        graphs = sum(graph_sizes(inference)) * model.hidden_size * value_bytes
        found["graphs"] = GRAPH_COPIES * graphs * (2 if has_adapters else 1)
    if inference.devices_per_replica > 1:
        found["communication buffers"] = NCCL_BYTES + _deepep_bytes(model, inference)
    return found | {"context": CONTEXT_BYTES}


def _deepep_bytes(model: Model, inference: Inference) -> int:
    """Return the bytes of DeepEP's buffers, as its `config.hpp` and vLLM's options size them.

    "deepep_low_latency" has four buffers, each with a row per expert and token of a step.
    """
    if model.moe is None or inference.all2all_backend == "allgather_reducescatter":
        return 0
    if inference.all2all_backend == "deepep_high_throughput":
        return 2 * DEEPEP_BYTES
    row = 2 * model.hidden_size + 4 * model.hidden_size // FP8_BLOCK
    rows = model.moe.num_experts * inference.max_batched_tokens
    return DEEPEP_BYTES + 4 * rows * row


def memory_of(manifest: Manifest, shape: Inference) -> Bytes:
    is_gpu = manifest.hardware.accelerator != "cpu"
    return memory(manifest.model, shape, is_gpu, manifest.transport.weights == "adapters")


@dataclass(frozen=True)
class Serving:
    """An engine's load. `prompt`, `sampled`: mean tokens per rollout. `in_flight`: rollouts."""

    prompt: float
    sampled: float
    in_flight: float

    @property
    def mean_context(self) -> float:
        return self.prompt + self.sampled / 2


def batch_size(model: Model, inference: Inference, load: Serving) -> float:
    held = inference.kv_cache_bytes / (load.mean_context * token_bytes(model, inference))
    admitted = load.in_flight / inference.data_parallel
    return max(1.0, min(inference.max_num_sequences, admitted, held))


def decode_s(
    model: Model, inference: Inference, batch: float, context: float, rates: Rates, network: float
) -> float:
    """Return the seconds of a step in which each data-parallel rank samples `batch` tokens.

    `context`: mean tokens of a sequence. `network`: bytes/s of a device between nodes.
    """
    weights, experts = weight_bytes(model, inference)
    tokens = batch * inference.data_parallel
    touched = 1.0
    if (moe := model.moe) is not None:
        touched = 1 - (1 - moe.num_experts_per_token / moe.num_experts) ** tokens
    read = weights - experts + experts * touched / EXPERTS_SHARE
    read += batch * _read_bytes(model, inference, context)
    work = 2 * batch * active_parameters(model).total / inference.tensor_parallel
    computing = max(read / rates.memory_bytes, work / rates.dense_flops)
    host = LAYER_S * model.num_layers + SEQUENCE_S * batch
    reduce = _all_reduce_s(model, inference, batch, rates)
    exchange = exchange_s(model, inference, batch, 1, rates, network)
    return host + reduce + _beside(inference, computing, exchange)


def _beside(inference: Inference, computing: float, exchange: float) -> float:
    if inference.dual_batch_overlap:
        return max(computing, exchange)
    return computing + exchange


def _read_bytes(model: Model, inference: Inference, context: float) -> float:
    """Return the cache bytes that a step reads per sequence of `context` tokens."""
    mla = model.mla
    if mla is None or mla.indexer is None or context <= mla.indexer.top_k:
        return context * token_bytes(model, inference)
    latent = token_bytes(model, inference) - indexer_token_bytes(model)
    return mla.indexer.top_k * latent + context * indexer_token_bytes(model)


def prefill_s(
    model: Model, inference: Inference, prompt: float, rates: Rates, network: float
) -> float:
    core = attention_forward(model, [int(prompt)]) / rates.attention_flops
    # Each tensor-parallel rank computes all indexer scores, in FP8 at bfloat16's rate.
    scores = indexers(model, [int(prompt)]) / rates.dense_flops
    dense = rates.dense_flops if inference.quantization == "none" else rates.fp8_flops
    products = 2 * prompt * active_parameters(model).total / (PRODUCTS_SHARE * dense)
    computing = scores + (core + products) / inference.tensor_parallel
    reduce = _all_reduce_s(model, inference, prompt, rates)
    steps = prompt / inference.max_batched_tokens
    exchange = exchange_s(model, inference, prompt, steps, rates, network)
    return reduce + _beside(inference, computing, exchange)


def _all_reduce_s(model: Model, inference: Inference, tokens: float, rates: Rates) -> float:
    """Return the seconds of tensor-parallel all-reduces, two per layer."""
    num_bytes = tokens * model.hidden_size * DTYPE_BYTES[inference.dtype] * model.num_layers
    tensor = inference.tensor_parallel
    return 4 * num_bytes * (tensor - 1) / tensor / rates.link_bytes


def exchange_s(
    model: Model, inference: Inference, tokens: float, steps: float, rates: Rates, network: float
) -> float:
    """Return the seconds of expert dispatch and combine in all MoE layers.

    Each data-parallel rank has `tokens` tokens in `steps` steps. "allgather_reducescatter" sends
    them to all devices. DeepEP sends a token once per expert ("deepep_low_latency"), or once per
    node of its experts ("deepep_high_throughput").
    """
    devices, nodes = inference.devices_per_replica, inference.nodes_per_replica
    if (moe := model.moe) is None or devices == inference.tensor_parallel:
        return 0.0
    layers, here = model.num_layers - moe.num_dense_layers, devices // nodes
    start = COLLECTIVE_S + (NETWORK_STEP_S if nodes > 1 else LINK_STEP_S)
    sent = tokens * model.hidden_size
    out = back = sent * DTYPE_BYTES[inference.dtype]
    if inference.all2all_backend == "allgather_reducescatter":
        start = COLLECTIVE_S + (nodes - 1) * NETWORK_STEP_S + (devices - nodes) * LINK_STEP_S
        whole = (out + back) * inference.data_parallel
        between = whole * (nodes - 1) / nodes / (here * network)  # devices send in parallel
        seconds = max(between, whole * (devices - 1) / devices / rates.link_bytes)
    else:
        if inference.quantization == "fp8":
            out = sent
        copies = min(moe.num_experts_per_token, devices)
        rate = rates.link_bytes if nodes == 1 else DEEPEP_SHARE * network
        if nodes > 1 and inference.all2all_backend == "deepep_high_throughput":
            copies = min(moe.num_experts_per_token, nodes)
        seconds = (out + back) * copies * (devices - 1) / devices / rate
    return layers * (seconds + 2 * start * steps)
