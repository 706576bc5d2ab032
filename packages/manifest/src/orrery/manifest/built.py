"""Built: a manifest may say more than today's code can run; such a run is rendered, planned and shown, and refused when a stage starts.

Each table below names what runs today; whoever builds more adds it there and nowhere else.
"""

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest

FAMILIES = ("qwen3", "qwen3_moe", "llama", "glm4_moe", "hugging_face")  # that orrery.models has networks of
PREFILL_APART = ("cpu",)  # accelerators on which prefill and decode engines may be placed apart, though each serves whole requests
WIDE_ENGINES = ("h200",)  # accelerators on which an engine of orrery.inference is several processes


def check_built(manifest: Manifest) -> None:
    """Raises `OrreryError` with one sentence where a stage of this run cannot start yet."""
    accelerator, inference = manifest.hardware.accelerator, manifest.inference
    if (family := manifest.model.family) not in FAMILIES:
        raise OrreryError(f"model.family {family!r}: this network is not built yet; choose from {', '.join(FAMILIES)}")
    if accelerator not in WIDE_ENGINES and (devices := inference.devices_per_replica) != 1:
        raise OrreryError(
            f"inference.devices_per_replica {devices}: an engine of several processes is not built yet on {accelerator}; "
            f"set inference.devices_per_replica to 1, and inference.num_replicas to {devices} for as many engines"
        )
    if accelerator not in PREFILL_APART and (count := inference.prefill_replicas):
        raise OrreryError(
            f"inference.prefill_replicas {count}: engines that only prefill are not built yet on {accelerator}; "
            f"set inference.prefill_replicas to 0"
        )


def remarks(manifest: Manifest) -> list[str]:
    """Where a run does less than its manifest says, a sentence each; a launcher and a plan show them."""
    apart = (
        "inference.prefill_replicas: the engines are placed apart, and each serves whole requests; handing over a cache is not built yet"
    )
    return [apart] if manifest.inference.prefill_replicas else []
