"""Built: a manifest may say more than today's code can run; such a run is rendered, planned and shown, and refused when a stage starts.

Each table below names what runs today; whoever builds more adds it there and nowhere else.
"""

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

FAMILIES = (
    "qwen3",
    "qwen3_moe",
    "llama",
    "glm4_moe",
    "hugging_face",
)  # that orrery.models has networks of
WIDE_ENGINES = ("h200",)  # accelerators on which an engine of orrery.inference is several processes
WEIGHT_WIRES = ("files", "adapters", "nccl", "nixl")
SERVED_RANK = 512  # of adapters, the largest that vLLM makes room for
ROUTED_EXPERTS = (False, True)
QUANTIZATIONS = ("none", "fp8")
KV_TRANSFERS = ("none", "nixl", "mooncake")
ADMISSIONS = ("fixed", "adaptive")


def check_supported(manifest: Manifest) -> None:
    """Raises `OrreryError` with one sentence where a stage of this run cannot start yet."""
    accelerator, inference = manifest.hardware.accelerator, manifest.inference
    if (family := manifest.model.family) not in FAMILIES:
        raise OrreryError(
            f"model.family {family!r}: this network is not built yet; choose from {', '.join(FAMILIES)}"
        )
    if accelerator not in WIDE_ENGINES and (devices := inference.devices_per_replica) != 1:
        raise OrreryError(
            f"inference.data_parallel·tensor_parallel = {devices}: an engine on {accelerator} is one process, for vLLM exchanges tokens "
            f"between experts on GPUs alone; set both to 1, and inference.num_replicas to {devices} for as many engines"
        )
    _check_adapters(manifest)
    if inference.prefill_replicas and inference.kv_offload.kind != "none":
        raise OrreryError(
            f"inference.kv_offload.kind {inference.kv_offload.kind!r}: engines that hand caches over keep none elsewhere yet; "
            f"set inference.kv_offload.kind to 'none', or inference.prefill_replicas to 0"
        )
    if inference.prefill_replicas and inference.data_parallel > 1:
        raise OrreryError(
            f"inference.data_parallel {inference.data_parallel}: engines that hand caches over are of one data-parallel rank each so far; "
            f"set inference.data_parallel to 1, or inference.prefill_replicas to 0"
        )
    choices = (
        ("transport.weights", manifest.transport.weights, WEIGHT_WIRES),
        ("transport.routed_experts", manifest.transport.routed_experts, ROUTED_EXPERTS),
        ("inference.quantization", inference.quantization, QUANTIZATIONS),
        ("inference.kv_transfer.kind", inference.kv_transfer.kind, KV_TRANSFERS),
        ("orchestrator.admission.kind", manifest.orchestrator.admission.kind, ADMISSIONS),
    )
    for field, value, built in choices:
        if value not in built:
            raise OrreryError(
                f"{field} {value!r}: this is not built yet; choose from {', '.join(map(repr, built))}"
            )


def refusal(manifest: Manifest) -> str | None:
    """Return why a run can be planned but not started, or None."""
    try:
        check_supported(manifest)
    except OrreryError as error:
        return f"it is planned and refuses to start: {error}"
    return None


def notes(manifest: Manifest) -> list[str]:
    """Lines below a run that is listed or planned: if it cannot start, keeps less than it says, or may end when it compiles."""
    said = [] if (told := refusal(manifest)) is None else [f"  note: {told}"]
    trainer, mesh = manifest.trainer, manifest.trainer.mesh
    keep = getattr(trainer.memory.activation_checkpointing, "keep", ())
    lost = [name for name in keep if name in trainer.unseen]
    if lost := [name for name in lost if name != "experts" or manifest.model.moe is not None]:
        said.append(
            f"  note: trainer.memory.activation_checkpointing.keep {lost}: made again all the same, for with trainer.compile on "
            f"cp {mesh.cp} and ep {mesh.ep} nothing of that can be kept; set trainer.compile to false to keep it"
        )
    if set(keep) == {"experts"} and manifest.model.moe is None:
        said.append(
            f"  note: trainer.memory.activation_checkpointing.keep ['experts']: family {manifest.model.family!r} has none, and all is made "
            f"again; set it to ['attention'] or ['attention', 'projections'], or activation_checkpointing.kind to 'full'"
        )
    if trainer.compile and manifest.model.family == "hugging_face":
        said.append(
            "  note: trainer.compile with family 'hugging_face': the first step ends the run where torch does not compile such a block "
            "whole (one with experts, or Mamba's); set trainer.compile to false there"
        )
    return said


def _check_adapters(manifest: Manifest) -> None:
    """What of `trainer.lora` does not reach engines yet."""
    lora, wire = manifest.trainer.lora, manifest.transport.weights
    if lora is None or wire != "adapters":
        return
    if "experts" in lora.targets:
        raise OrreryError(
            f"transport.weights 'adapters' with trainer.lora.targets {list(lora.targets)}: engines take no adapters of experts (vLLM "
            f"computes these on GPUs only, where they have not run yet); leave experts out, or set transport.weights to 'nccl' or "
            f"'files', which merge adapters"
        )
    if lora.rank > SERVED_RANK:
        raise OrreryError(
            f"transport.weights 'adapters' with trainer.lora.rank {lora.rank}: engines take ranks up to {SERVED_RANK}; set it to that, "
            f"or transport.weights to 'nccl' or 'files', which merge adapters"
        )
    if manifest.inference.quantization != "none":
        raise OrreryError(
            f"transport.weights 'adapters' with inference.quantization {manifest.inference.quantization!r}: adapters beside quantised "
            f"weights have not run yet; set inference.quantization to 'none', or transport.weights to 'nccl' or 'files', which merge "
            f"adapters"
        )
