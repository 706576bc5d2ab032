"""The manifest of a run, and the constraints between its parts.

Jsonnet asserts most of them too, but a manifest may have another source.
"""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.inference import (
    Inference,
    disk_block_bytes,
    longest_blocks,
    longest_device_bytes,
    longest_host_bytes,
    shard_widths,
)
from orrery.manifest.schema.model import Model, head_divisors
from orrery.manifest.schema.orchestrator import Orchestrator, Sft, Stages, Tasks, Transport
from orrery.manifest.schema.record import Count, NonNegativeInt, Record, Sha256
from orrery.manifest.schema.trainer import Trainer, fit_model, has_state

SCHEMA_VERSION = 2
FP8_BLOCK = 128  # rows and columns of a block of FP8 weights with one scale
SEGMENT_BYTES = 16 << 20  # Mooncake's minimum for each worker
KV_BLOCK_TOKENS = {"cpu": 32, "h200": 16}  # vLLM's blocks of cache are a multiple of it
TARGETS = ("init", "sft", "rl", "evaluate", "report", "all")


class Hardware(Record):
    """The shape of the machine. It changes reduction orders."""

    accelerator: Literal["cpu", "h200"]
    num_nodes: Count
    devices_per_node: Count


class Manifest(Record):
    """One whole run.

    `python_lock_sha256` is the hash of `locks/cpu.txt`. On GPUs it is the output of `cat
    locks/orchestrator.txt locks/trainer.cuda.txt locks/inference.cuda.txt | sha256sum`.
    """

    schema_version: Literal[2]
    name: Annotated[str, Field(pattern=r"^[a-z0-9][a-z0-9_]*$", max_length=100)]
    seed: NonNegativeInt
    python_lock_sha256: Sha256
    model: Model
    hardware: Hardware
    trainer: Trainer
    inference: Inference
    orchestrator: Orchestrator
    tasks: Tasks
    transport: Transport
    stages: Stages

    @property
    def sft(self) -> Sft:
        """Return the warm start. Raise OrreryError for a run without one."""
        if self.stages.sft is None:
            raise OrreryError(f"stages.sft: null, so run {self.name} has no warm start; set it")
        return self.stages.sft

    @property
    def stage_before_rl(self) -> Literal["init", "sft"]:
        """Return the stage whose weights RL starts from."""
        return "init" if self.stages.sft is None else "sft"

    @property
    def group_devices(self) -> dict[str, int]:
        """Return the devices of each group, in node order."""
        inference = self.inference
        prefill = inference.prefill_replicas * inference.devices_per_replica
        rest = inference.num_replicas * inference.devices_per_replica - prefill
        engines = {"prefill": prefill, "decode": rest} if prefill else {"inference": rest}
        return {**engines, "trainer": self.trainer.mesh.world_size}

    @model_validator(mode="after")
    def name_is_free(self) -> "Manifest":
        if self.name in TARGETS:
            raise ValueError(
                f"name: no run is called {self.name!r}, for the pipeline has a rule of that name; "
                f"try {'my_' + self.name!r}"
            )
        return self

    @model_validator(mode="after")
    def mesh_fits_hardware(self) -> "Manifest":
        mesh, model = self.trainer.mesh, self.model
        if self.hardware.accelerator != "cpu" and self.hardware.num_nodes == 1:
            devices, inference = self.hardware.devices_per_node, self.inference
            used = mesh.world_size + inference.num_replicas * inference.devices_per_replica
            if used > devices:
                ranks = devices - used + mesh.world_size
                replicas = (devices - mesh.world_size) // inference.devices_per_replica
                fits = []
                if ranks > 0:
                    fits.append(f"trainer.mesh's dp_replicate·dp_shard·cp to at most {ranks}")
                if replicas > inference.prefill_replicas:
                    fits.append(f"inference.num_replicas to at most {replicas}")
                raise ValueError(
                    f"trainer {mesh.world_size} + inference {used - mesh.world_size} devices do "
                    f"not fit {devices}; set "
                    f"{', or '.join([*fits, f'hardware.devices_per_node to {used}'])}"
                )
        if self.inference.max_model_len_tokens > model.max_positions:
            raise ValueError(
                f"inference.max_model_len_tokens {self.inference.max_model_len_tokens} exceeds "
                f"model.max_positions {model.max_positions}"
            )
        longest = self.inference.max_model_len_tokens
        if (turn := self.orchestrator.sampling.max_tokens_per_turn) >= longest:
            raise ValueError(
                f"orchestrator.sampling.max_tokens_per_turn {turn} leave no room for a prompt in "
                f"inference.max_model_len_tokens {longest}; set it to less"
            )
        if (held := self.trainer.memory.max_tokens_per_micro_batch) < longest:
            raise ValueError(
                f"trainer.memory.max_tokens_per_micro_batch {held} cannot hold one rollout of "
                f"inference.max_model_len_tokens {longest}"
            )
        return self

    @model_validator(mode="after")
    def experts_are_there(self) -> "Manifest":
        family, moe, inference = self.model.family, self.model.moe, self.inference
        if moe is None and self.transport.routed_experts:
            raise ValueError(
                f"transport.routed_experts: family {family!r} has no experts to choose; set "
                "transport.routed_experts to false"
            )
        if not inference.expert_parallel:
            return self
        if moe is None:
            raise ValueError(
                f"inference.expert_parallel: family {family!r} has no experts to spread; set "
                "inference.expert_parallel to false"
            )
        if (devices := inference.devices_per_replica) == 1:
            raise ValueError(
                "inference.expert_parallel: the one device of an engine has all experts; set "
                "inference.expert_parallel to false, or data_parallel or tensor_parallel to more"
            )
        if moe.num_experts % devices:
            fits = [n for n in range(1, devices + 1) if moe.num_experts % n == 0]
            raise ValueError(
                f"inference.expert_parallel: {devices} devices of a replica do not divide "
                f"{moe.num_experts} experts; choose data_parallel·tensor_parallel from {fits}, or "
                "set inference.expert_parallel to false"
            )
        return self

    @model_validator(mode="after")
    def engines_fit(self) -> "Manifest":
        inference, accelerator = self.inference, self.hardware.accelerator
        if inference.tensor_parallel not in (heads := head_divisors(self.model)):
            raise ValueError(
                f"inference.tensor_parallel {inference.tensor_parallel}: {self.model.num_heads} "
                f"query heads and {self.model.num_kv_heads} key heads do not divide among as many "
                f"devices; choose from {heads}"
            )
        for field, width, by, devices in shard_widths(self.model, inference):
            if width % devices:
                fits, more = [n for n in range(1, devices + 1) if width % n == 0], ""
                if by == "tensor_parallel":
                    fits = [n for n in fits if n in heads]
                else:
                    more = ", or set inference.expert_parallel to true"
                raise ValueError(
                    f"inference.{by} {devices}: {field} {width} does not divide among as many "
                    f"devices; choose {by} from {fits}{more}"
                )
        if inference.kv_block_tokens % (least := KV_BLOCK_TOKENS[accelerator]):
            raise ValueError(
                f"inference.kv_block_tokens {inference.kv_block_tokens}: attention on "
                f"{accelerator} reads blocks of a multiple of {least} tokens; try "
                f"{-(-inference.kv_block_tokens // least) * least}"
            )
        if inference.max_batched_tokens < inference.max_num_sequences:
            raise ValueError(
                f"inference.max_batched_tokens {inference.max_batched_tokens} cannot hold one "
                f"token of each of inference.max_num_sequences {inference.max_num_sequences}; set "
                "it to at least that"
            )
        if inference.kv_cache_bytes < (needed := longest_device_bytes(self.model, inference)):
            raise ValueError(
                f"inference.kv_cache_bytes {inference.kv_cache_bytes} cannot hold one rollout of "
                f"inference.max_model_len_tokens {inference.max_model_len_tokens}, which needs "
                f"{needed}; set it to at least that"
            )
        _check_offload(self.model, inference, self.transport.routed_experts)
        can_fp8 = accelerator != "cpu" and inference.dtype == "bfloat16"
        if inference.quantization == "fp8" and not can_fp8:
            raise ValueError(
                f"inference.quantization 'fp8' with dtype {inference.dtype!r} on {accelerator}: "
                "vLLM makes FP8 weights from bfloat16, and multiplies them on GPUs alone; set "
                "inference.quantization to 'none'"
            )
        return self

    @model_validator(mode="after")
    def fp8_experts_are_whole_blocks(self) -> "Manifest":
        """vLLM pads experts to whole blocks of FP8, and no update fills the padding."""
        moe, inference = self.model.moe, self.inference
        if inference.quantization != "fp8" or moe is None:
            return self
        for field, size in (
            ("model.hidden_size", self.model.hidden_size),
            ("model.moe.expert_intermediate_size", moe.expert_intermediate_size),
        ):
            if size % FP8_BLOCK:
                raise ValueError(
                    f"inference.quantization 'fp8' with {field} {size}: experts in FP8 are blocks "
                    f"of {FP8_BLOCK} × {FP8_BLOCK}, and {size} is no multiple of {FP8_BLOCK}; set "
                    "inference.quantization to 'none'"
                )
        devices = 1 if inference.expert_parallel else inference.devices_per_replica
        if moe.expert_intermediate_size % (FP8_BLOCK * devices):
            raise ValueError(
                "inference.quantization 'fp8' with inference.expert_parallel false: "
                f"model.moe.expert_intermediate_size {moe.expert_intermediate_size} over "
                f"data_parallel·tensor_parallel = {devices} devices is no multiple of {FP8_BLOCK}, "
                "the width of a block in FP8; set inference.expert_parallel to true"
            )
        return self

    @model_validator(mode="after")
    def fp8_inputs_are_whole_blocks(self) -> "Manifest":
        """A dense FP8 layer of vLLM needs inputs of whole blocks on each device."""
        model, inference = self.model, self.inference
        if inference.quantization != "fp8":
            return self
        widths = [("model.hidden_size", model.hidden_size, 1)]
        if model.family != "hugging_face":
            field, size = "head_dim", model.head_dim
            if model.mla is not None:
                field, size = "mla.value_head_dim", model.mla.value_head_dim
            heads = model.num_heads * size
            widths.append((f"model.num_heads·{field}", heads, inference.tensor_parallel))
        for field, width, by, devices in shard_widths(model, inference):
            if by == "tensor_parallel":
                widths.append((field, width, devices))
        for field, width, devices in widths:
            if width % (FP8_BLOCK * devices):
                over = f" over inference.tensor_parallel {devices}" if devices > 1 else ""
                raise ValueError(
                    f"inference.quantization 'fp8' with {field} {width}{over}: a layer in FP8 "
                    f"takes inputs of a multiple of {FP8_BLOCK} on each device; set "
                    "inference.quantization to 'none'"
                    + (", or inference.tensor_parallel to less" if over else "")
                )
        return self

    @model_validator(mode="after")
    def nixl_and_mooncake_are_apart(self) -> "Manifest":
        """Refuse both in one engine: their two copies of rdma-core would crash it at exit."""
        kinds = {
            "transport.weights": self.transport.weights,
            "inference.kv_transfer.kind": self.inference.kv_transfer.kind,
            "inference.kv_offload.kind": self.inference.kv_offload.kind,
        }
        nixl, mooncake = (
            [field for field, kind in kinds.items() if kind == library]
            for library in ("nixl", "mooncake")
        )
        if nixl and mooncake:
            raise ValueError(
                f"{nixl[0]} 'nixl' with {mooncake[0]} 'mooncake': no engine can load both, for "
                "each brings its own rdma-core; set one of them to another kind"
            )
        return self

    @model_validator(mode="after")
    def adapters_are_there(self) -> "Manifest":
        if self.transport.weights == "adapters" and self.trainer.lora is None:
            raise ValueError(
                "transport.weights 'adapters': there are none; set trainer.lora, or "
                "transport.weights to 'files'"
            )
        return self

    @model_validator(mode="after")
    def there_is_state_to_offload(self) -> "Manifest":
        used = [self.trainer.optimizer]
        if self.stages.sft is not None:
            used.append(self.stages.sft.optimizer)
        if self.trainer.memory.optimizer_offload and not any(has_state(one) for one in used):
            kinds = " and ".join(sorted({one.kind for one in used}))
            raise ValueError(
                f"trainer.memory.optimizer_offload: {kinds} as written here keep no state; set "
                "trainer.memory.optimizer_offload to false"
            )
        return self

    @model_validator(mode="after")
    def groups_fill_nodes(self) -> "Manifest":
        num_nodes, per_node = self.hardware.num_nodes, self.hardware.devices_per_node
        if num_nodes == 1:
            return self
        if per_node % (devices := self.inference.devices_per_replica):
            fits = [n for n in range(1, per_node + 1) if per_node % n == 0]
            raise ValueError(
                f"inference.data_parallel·tensor_parallel = {devices} does not divide "
                f"hardware.devices_per_node {per_node}, and no engine spans nodes; choose from "
                f"{fits}"
            )
        groups = self.group_devices
        left = num_nodes * per_node - sum(
            devices for name, devices in groups.items() if name != "trainer"
        )
        for name, devices in groups.items():
            if devices % per_node:
                whole = devices // per_node * per_node or per_node
                if name == "trainer" and left > 0:
                    whole = left
                raise ValueError(
                    f"hardware.devices_per_node {per_node}: {name} has {devices} devices, which "
                    f"fill no whole number of nodes; try {whole}"
                )
        nodes = {name: devices // per_node for name, devices in groups.items()}
        if (needed := sum(nodes.values())) != num_nodes:
            shares = " + ".join(f"{name} {count}" for name, count in nodes.items())
            raise ValueError(
                f"hardware.num_nodes {num_nodes}: {shares} nodes are {needed}; set "
                f"hardware.num_nodes to {needed}"
                + (f", or trainer.mesh's dp_replicate·dp_shard·cp to {left}" if left > 0 else "")
            )
        return self

    @model_validator(mode="after")
    def trainer_fits_model(self) -> "Manifest":
        fit_model(self.trainer, self.model, self.hardware.accelerator, self.trainer.mesh.world_size)
        return self


def _check_offload(model: Model, inference: Inference, routed_experts: bool) -> None:
    """Raise ValueError if a tier cannot hold the longest rollout."""
    offload = inference.kv_offload
    if offload.kind == "tiers" and offload.host_bytes < (
        needed := longest_host_bytes(model, inference)
    ):
        raise ValueError(
            f"inference.kv_offload.host_bytes {offload.host_bytes} cannot hold one rollout of "
            f"inference.max_model_len_tokens {inference.max_model_len_tokens}, which needs "
            f"{needed}; set it to at least that, or inference.kv_offload.kind to 'none'"
        )
    if offload.kind == "mooncake":
        devices, longest = inference.devices_per_replica, longest_host_bytes(model, inference)
        if offload.segment_bytes < (needed := max(SEGMENT_BYTES * devices, longest)):
            raise ValueError(
                f"inference.kv_offload.segment_bytes {offload.segment_bytes}: Mooncake takes "
                f"at least {SEGMENT_BYTES} of each of an engine's {devices} devices, and one "
                f"rollout of inference.max_model_len_tokens {inference.max_model_len_tokens} "
                f"needs {longest}; set it to at least {needed}, or inference.kv_offload.kind "
                "to 'none'"
            )
    if offload.kind == "tiers" and offload.disk_bytes:
        needed = longest_blocks(inference) * sum(disk_block_bytes(model, inference, routed_experts))
        if offload.disk_bytes < needed:
            raise ValueError(
                f"inference.kv_offload.disk_bytes {offload.disk_bytes} cannot hold one rollout "
                f"of inference.max_model_len_tokens {inference.max_model_len_tokens}, which "
                f"needs {needed}; set it to at least that, or to 0 for no files"
            )
