"""Corrections to vLLM 0.32, for engines that take adapters alone. Each is one call, made where it says.

1. `keep_adapters`. Upstream: vLLM removes all adapters where it takes them for another's, and the next request brings back the one that
   its path names, from disk: that of the start. It does so at the end of each weight update (`reset_lora_state`: "invalidate LoRA state
   after base weights are replaced"; here they have not been), and after each empty step of a data-parallel rank that waits for others
   (`maybe_setup_dummy_loras`). Remove when an update can say that the base stays, and an empty step removes what it has added alone.
2. `keep_kernels_of_experts`. Upstream: with `--enable-lora` all experts get kernels that can add adapters, also where
   `--lora-target-modules` leaves experts out, and on CPU too, where these (Triton) do not run. Versions: 0.32 on CPU. Remove when
   `FusedMoEConfig.is_lora_enabled` follows the target modules: `test_inference_adapters.py` passes without the call.
"""

from typing import Any


def keep_adapters(manager: Any) -> None:
    """Once warm-up is over, whose own adapters have to go: `manager` does not remove all adapters any more."""
    if not hasattr(manager, "remove_all_adapters"):
        raise RuntimeError(
            "vLLM's LoRAModelManager has no remove_all_adapters any more; see orrery/inference/patches/vllm_adapters.py"
        )
    manager.remove_all_adapters = _nothing


def keep_kernels_of_experts() -> None:
    """Before a model is built: experts take the kernels that they have without adapters."""
    import vllm.model_executor.layers.fused_moe.layer as layer

    config = layer.FusedMoEConfig

    def without_adapters(*args: Any, **kwargs: Any) -> Any:
        return config(*args, **kwargs | {"is_lora_enabled": False})

    layer.FusedMoEConfig = without_adapters


def _nothing() -> None: ...
