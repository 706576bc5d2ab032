"""Define the fields of engines, and compute sizes of KV caches."""

from typing import Annotated, Literal

from pydantic import Field, field_validator

from orrery.manifest.schema.model import (
    DTYPE_BYTES,
    Count,
    DType,
    Model,
    NonNegativeInt,
    PositiveInt,
    Record,
)

DISK_PAGE_BYTES = 4096
INDEXER_SCALE_BLOCK = 128  # values of an indexer key per scale in vLLM


class NoRouter(Record):
    """Requests go directly to the only engine, or to prefill and decode engines."""

    kind: Literal["none"]


class VllmRouter(Record):
    """`vllm-router` spreads requests over the replicas.

    "consistent_hash" and "sticky_least_loaded" send all turns of a rollout to one engine.
    Only "cache_aware" chooses engines by prompt prefix and uses `balance_*`.
    """

    kind: Literal["vllm_router"]
    policy: Literal[
        "cache_aware", "power_of_two", "round_robin", "consistent_hash", "sticky_least_loaded"
    ]
    balance_abs_threshold: PositiveInt | None
    balance_rel_threshold: Annotated[float, Field(ge=1.0)] | None


class NoKvTransfer(Record):
    """Every engine prefills and decodes."""

    kind: Literal["none"]


class NixlKvTransfer(Record):
    """NIXL sends caches from prefill to decode engines (UCX: RDMA, shared memory, TCP)."""

    kind: Literal["nixl"]


class MooncakeKvTransfer(Record):
    kind: Literal["mooncake"]
    protocol: Literal["tcp", "rdma"]


KvTransfer = Annotated[
    NoKvTransfer | NixlKvTransfer | MooncakeKvTransfer, Field(discriminator="kind")
]


class NoKvOffload(Record):
    """Evicted cache blocks are lost."""

    kind: Literal["none"]


class TieredKvOffload(Record):
    """Evicted cache blocks move to host memory, then to the node's scratch disk.

    Sizes are per data-parallel rank. A restarted engine reuses the files on disk.
    """

    kind: Literal["tiers"]
    host_bytes: PositiveInt
    disk_bytes: NonNegativeInt


class MooncakeKvOffload(Record):
    """Cache blocks move to a Mooncake Store that all engines of a stage share.

    `segment_bytes`: host memory per engine, divided evenly among its devices. Each device
    also has a buffer of at most 1 GiB.
    """

    kind: Literal["mooncake"]
    protocol: Literal["tcp", "rdma"]
    segment_bytes: PositiveInt


KvOffload = Annotated[
    NoKvOffload | TieredKvOffload | MooncakeKvOffload, Field(discriminator="kind")
]


class EngineShape(Record):
    """Settings that may differ between prefill and decode engines.

    - A replica has `data_parallel` · `tensor_parallel` devices on `nodes_per_replica` nodes.
    - `dual_batch_overlap`: exchange half a batch's tokens while the other half computes.
    - `environment`: environment variables. Orrery's take precedence.
    """

    nodes_per_replica: Count
    tensor_parallel: Count
    data_parallel: Count
    expert_parallel: bool
    kv_cache_bytes: PositiveInt
    max_num_sequences: PositiveInt
    max_batched_tokens: PositiveInt
    enforce_eager: bool
    all2all_backend: Literal[
        "allgather_reducescatter", "deepep_high_throughput", "deepep_low_latency"
    ]
    dual_batch_overlap: bool
    environment: dict[Annotated[str, Field(pattern=r"^[A-Z_][A-Z0-9_]*$")], str]

    @field_validator("all2all_backend", mode="before")
    @classmethod
    def _refuse_removed(cls, backend: object) -> object:
        if backend in ("naive", "pplx"):
            raise ValueError(
                f"vLLM 0.32 has no backend {backend!r} and would run 'allgather_reducescatter' in "
                "its place; set it to 'allgather_reducescatter'"
            )
        return backend

    @property
    def devices_per_replica(self) -> int:
        return self.data_parallel * self.tensor_parallel

    @property
    def ranks_per_node(self) -> int:
        return self.data_parallel // self.nodes_per_replica


class Inference(EngineShape):
    """The engines: `num_replicas` vLLM servers.

    - `prefill_replicas`: the first n engines prefill, the others decode. 0: all do both.
    - `prefill`: settings of prefill engines. Null: decode engines' settings.
    - `max_local_prefill_tokens`: maximum uncached tokens of a prompt that a decode engine prefills.
    - `quantization` "fp8": quantize dense layers and experts.
    - `max_restarts`: maximum restarts of all engines per day. The next failure ends the stage.
    """

    num_replicas: Count
    prefill_replicas: NonNegativeInt
    prefill: EngineShape | None
    max_local_prefill_tokens: NonNegativeInt
    dtype: DType
    quantization: Literal["none", "fp8"]
    max_model_len_tokens: PositiveInt
    kv_block_tokens: PositiveInt
    kv_transfer: KvTransfer
    kv_offload: KvOffload
    max_restarts: NonNegativeInt
    router: Annotated[NoRouter | VllmRouter, Field(discriminator="kind")]

    def of_engine(self, index: int) -> "Inference":
        if self.prefill is None or index >= self.prefill_replicas:
            return self
        return self.model_copy(update=dict(self.prefill))

    @property
    def num_devices(self) -> int:
        return sum(self.of_engine(i).devices_per_replica for i in range(self.num_replicas))


def token_bytes(model: Model, inference: Inference) -> int:
    """Return the KV cache bytes of a token on one device."""
    if (mla := model.mla) is None:
        numbers = 2 * max(1, model.num_kv_heads // inference.tensor_parallel) * model.head_dim
    else:
        numbers = mla.kv_lora_rank + mla.rope_head_dim
    return numbers * model.num_layers * DTYPE_BYTES[inference.dtype] + indexer_token_bytes(model)


def indexer_token_bytes(model: Model) -> int:
    """Return a token's bytes of indexer keys: FP8 values, and a float32 scale per block."""
    if model.mla is None or (indexer := model.mla.indexer) is None:
        return 0
    scales = indexer.head_dim // INDEXER_SCALE_BLOCK
    return model.num_indexers * (indexer.head_dim + 4 * scales)


def rank_token_bytes(model: Model, inference: Inference) -> int:
    """Return a data-parallel rank's bytes of a token's cache in host memory or files.

    With MLA, tensor-parallel devices share one copy.
    """
    copies = 1 if model.mla is not None else inference.tensor_parallel
    return copies * token_bytes(model, inference)


def longest_blocks(inference: Inference) -> int:
    return -(-inference.max_model_len_tokens // inference.kv_block_tokens)


def longest_device_bytes(model: Model, inference: Inference) -> int:
    """Return a device's cache bytes for the longest sequence and vLLM's reserved block."""
    tokens = (1 + longest_blocks(inference)) * inference.kv_block_tokens
    return tokens * token_bytes(model, inference)


def longest_host_bytes(model: Model, inference: Inference) -> int:
    tokens = longest_blocks(inference) * inference.kv_block_tokens
    return tokens * rank_token_bytes(model, inference)


def on_disk_bytes(num_bytes: int) -> int:
    return -(-num_bytes // DISK_PAGE_BYTES) * DISK_PAGE_BYTES


def disk_block_bytes(model: Model, inference: Inference, route_bytes: int) -> tuple[int, int]:
    """Return the disk bytes of a cache block, and of its tokens' routes (chosen experts).

    Routes get twice their size, as their eviction order may differ.
    """
    cache = on_disk_bytes(longest_host_bytes(model, inference) // longest_blocks(inference))
    return cache, 2 * on_disk_bytes(inference.kv_block_tokens * route_bytes)


def shard_widths(model: Model, inference: Inference) -> list[tuple[str, int, str, int]]:
    """Return sharded widths as (field, width, field of the shards' number, number of shards)."""
    moe, tensor = model.moe, ("tensor_parallel", inference.tensor_parallel)
    widths = []
    if model.family != "hugging_face" and (moe is None or moe.num_dense_layers):
        widths.append(("model.intermediate_size", model.intermediate_size, *tensor))
    if moe is not None and not inference.expert_parallel:
        devices = inference.devices_per_replica
        widths.append(
            (
                "model.moe.expert_intermediate_size",
                moe.expert_intermediate_size,
                "data_parallel·tensor_parallel",
                devices,
            )
        )
    if moe is not None and moe.num_shared_experts:
        shared = moe.num_shared_experts * moe.expert_intermediate_size
        widths.append(("model.moe.num_shared_experts·expert_intermediate_size", shared, *tensor))
    return widths
