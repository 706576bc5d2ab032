"""Apply the corrections of vLLM 0.32 in each process.

- `patches/` holds the corrections, each with its reason and the test that shows when to remove it.
  This module, `plugin` and the code that needs them call them.
- Nothing here imports vLLM before `import_vllm`, because vLLM reads its environment at import.
- `test_inference_releases.py` compares every name and flag of vLLM in this package with the
  installed source.
"""

import os
from importlib.util import find_spec

from orrery.inference.patches.vllm_routes_elsewhere import KEPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest


def environment(manifest: Manifest) -> dict[str, str]:
    """Return the variables that choose vLLM's model runner; vLLM reads them at import."""
    if manifest.transport.routed_experts and manifest.hardware.accelerator != "cpu":
        return {
            "VLLM_USE_V2_MODEL_RUNNER": "1"
        }  # else vLLM may choose the other runner, and refuse to start with it
    return {}


def import_vllm(manifest: Manifest) -> None:
    """Import vLLM, without torch's compiler if nothing is compiled.

    Raises OrreryError if vLLM is not installed.
    """
    if find_spec("vllm") is None:
        raise OrreryError(
            "inference: vLLM is not installed here; install locks/inference.cuda.txt (GPU) or locks/inference.cpu.txt"
        )
    if manifest.inference.enforce_eager:
        from orrery.inference.patches.vllm import import_without_compiler

        import_without_compiler()


def correct(manifest: Manifest) -> None:
    """Correct the process that becomes the API server, before vLLM reads its arguments."""
    if manifest.hardware.accelerator == "cpu":
        from orrery.inference.patches import vllm, vllm_adapters, vllm_routes

        vllm.fork_engine_core()
        vllm.inspect_models_here()
        vllm.draw_again_after_a_part()
        if manifest.transport.routed_experts:
            vllm_routes.routes_on_cpu()
        if manifest.transport.weights == "adapters":
            vllm_adapters.keep_kernels_of_experts()
    from orrery.inference.patches import vllm_answers

    vllm_answers.write_answers()
    if manifest.inference.data_parallel > 1:
        from orrery.inference.patches import vllm_data_parallel

        vllm_data_parallel.answer_for_every_rank()


def correct_engine() -> None:
    """Correct each process of an engine."""
    from orrery.inference.patches import vllm_data_parallel

    vllm_data_parallel.meet_at_one_address()
    if KEPT in os.environ:
        from orrery.inference.patches import vllm_routes_elsewhere

        vllm_routes_elsewhere.keep()
        vllm_routes_elsewhere.beside_transfer()
