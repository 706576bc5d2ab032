"""Corrections to vLLM 0.32, all but 5 and 7 on CPU. None touches vLLM's files; each is one call, made where the comment says.

1. `forget_moe_kernels`. Upstream: `UnquantizedFusedMoEMethod._setup_kernel` calls the experts' `process_weights_after_loading` (on CPU: the
   prepack into the grouped-GEMM layout) only while `moe_kernel is None`, so a layerwise reload leaves CPU experts computing with the old
   packed weights against new routers: log-probs are silently wrong. Versions: 0.32 (seen). Remove when `_setup_kernel`
   prepacks on weight updates too (the skip came with vllm-project/vllm#40390, for ROCm): `test_inference_router.py` (its model is a
   mixture) passes without the call.
2. `repack_tied_heads`. Upstream: a tied output head shares the embedding's parameter, so a layerwise reload loads nothing into the head
   itself and never processes it again; on CPU the head multiplies with its own prepacked copy, which stays that of the first load.
   Log-probs are silently those of old head × new body. Versions: 0.32 (seen; no upstream issue found). Remove when a
   reload processes tied heads: `test_inference_engine.py` passes without the call.
3. `fork_engine_core`. Upstream: `CpuPlatform.check_and_update_config` sets VLLM_WORKER_MULTIPROC_METHOD to "spawn", which makes the
   engine core import torch and vLLM a second time (half of what start-up then takes). Nothing on CPU is lost in a fork: no device context,
   no OpenMP team before the fork at OMP_NUM_THREADS=1. Versions: 0.32. Remove when the platform respects a value that is set already.
4. `inspect_models_here`. Upstream: the model registry looks at a model class in a subprocess, "to avoid initialising CUDA in the parent",
   and caches the answer in the home directory; on a fresh machine that is one more import of torch and vLLM. On CPU there is
   nothing to initialise. Versions: 0.32. Remove when the registry skips the subprocess on CPU.
5. `import_without_compiler`. Upstream: `vllm.env_override` imports torch's compiler to add names to a list of its lowerings, a fifth of
   what start-up takes, also where nothing is ever compiled; it goes on without where there is no compiler. Versions: 0.32.
   Remove when it waits until the compiler is imported, as it does for its other corrections of it.
6. `draw_again_after_a_part`. Upstream: a request with a seed whose prompt is prefilled in parts draws a token after each part, and
   `GPUModelRunner._bookkeeping_sync` takes the draw back by its generator's offset; a generator on CPU has none ("CPU Generator does
   not use offset"), and the engine core ends. Versions: 0.32 (seen). Remove when it puts the generator's state back:
   `test_inference_engine.py` passes without.
7. `say_nothing_of_unloaded`. Upstream: after a layerwise reload vLLM warns "Failed to load weights" of each layer that no tensor came for,
   also where none is to come: of rotary angles, which are computed, and of a tied output head, whose weight is the embedding's. The
   receiver knows that all tensors came. Versions: 0.32 (seen). Remove when vLLM leaves such layers out:
   `test_inference_engine.py` passes without.
"""

import contextlib
import logging
import multiprocessing
import sys
from collections.abc import Callable, Iterator
from multiprocessing.context import BaseContext
from typing import Any

import torch


def import_without_compiler() -> None:
    """Import vLLM, before anything else does, in a process that compiles nothing; torch's compiler stays there for whoever asks."""
    if "vllm" in sys.modules or "torch._inductor" in sys.modules:
        return
    sys.modules["torch._inductor"] = None  # type: ignore[assignment]  # an import of it is an ImportError
    try:
        import vllm  # noqa: F401
    finally:
        del sys.modules["torch._inductor"]


def forget_moe_kernels(model: torch.nn.Module) -> None:
    """Before each layerwise reload on CPU: have every MoE layer set its kernel up afresh from the new weights."""
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if getattr(method, "moe_kernel", None) is not None:
            method.moe_kernel = None


def repack_tied_heads(model: torch.nn.Module) -> None:
    """After each layerwise reload on CPU of a model with tied embeddings: have the output head pack the new weights."""
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextlib.contextmanager
def say_nothing_of_unloaded(model: torch.nn.Module, is_tied: bool) -> Iterator[None]:
    """Drop vLLM's warnings of layers without parameters, and of an output head that `is_tied`.

    Use it while a reload is being finished.
    """
    from vllm.model_executor.model_loader.reload import layerwise

    expected = {type(module).__name__ for module in model.modules() if not module._parameters}
    expected |= {"ParallelLMHead"} if is_tied else set()

    def is_news(record: logging.LogRecord) -> bool:
        arguments = record.args if isinstance(record.args, tuple) else ()
        return record.msg != "%s: Failed to load weights" or not expected.issuperset(arguments)

    log = logging.getLogger(layerwise.__name__)
    log.addFilter(is_news)
    try:
        yield
    finally:
        log.removeFilter(is_news)


def has_stale_head(model: torch.nn.Module) -> bool:
    """Return whether an output head does not share the embedding's parameter.

    An update of tied weights would not reach such a head.
    """
    from vllm.model_executor.layers.vocab_parallel_embedding import (
        ParallelLMHead,
        VocabParallelEmbedding,
    )

    modules = [module for module in model.modules() if isinstance(module, VocabParallelEmbedding)]
    heads, embeddings = (
        [each for each in modules if isinstance(each, ParallelLMHead) is is_head]
        for is_head in (True, False)
    )
    return any(all(head.weight is not each.weight for each in embeddings) for head in heads)


def fork_engine_core() -> None:
    """Before the engine client is built."""
    import vllm.v1.engine.utils as engine_utils

    def forking() -> BaseContext:
        return multiprocessing.get_context("fork")

    _replace(engine_utils, "get_mp_context", forking)


def inspect_models_here() -> None:
    """Before the model config is made."""
    import vllm.model_executor.models.registry as registry

    def call(inspect: Callable[[], Any]) -> Any:
        return inspect()

    _replace(registry, "_run_in_subprocess", call)


def _replace(module: Any, name: str, by: Callable[..., Any]) -> None:
    """Set an attribute that must exist: a vLLM that has moved it needs this file read again."""
    if not hasattr(module, name):
        raise RuntimeError(
            f"vLLM has no {module.__name__}.{name} any more; see orrery/inference/patches/vllm.py"
        )
    setattr(module, name, by)


def draw_again_after_a_part() -> None:
    """Before the engine core is forked: a seeded request draws its first token as if its prompt had been prefilled at once."""
    from vllm.v1.worker.cpu_model_runner import CPUModelRunner

    sample, bookkeep = CPUModelRunner._sample, CPUModelRunner._bookkeeping_sync
    if getattr(sample, "orrery", False):
        return

    def of_parts(self: Any) -> dict[int, torch.Generator]:
        """Generators by row, of requests whose prompt is not done yet."""
        rows = self.discard_request_mask.np[: self.input_batch.num_reqs].nonzero()[0].tolist()
        return {
            row: self.input_batch.generators[row]
            for row in rows
            if row in self.input_batch.generators
        }

    def sample_and_put_back(self: Any, *args: Any, **options: Any) -> Any:
        states = [(generator, generator.get_state()) for generator in of_parts(self).values()]
        output = sample(self, *args, **options)
        for generator, state in states:
            generator.set_state(state)
        return output

    def bookkeep_without(self: Any, *args: Any, **options: Any) -> Any:
        hidden = of_parts(self)
        for row in hidden:
            del self.input_batch.generators[row]
        try:
            return bookkeep(self, *args, **options)
        finally:
            self.input_batch.generators.update(hidden)

    sample_and_put_back.orrery = True  # type: ignore[attr-defined]
    CPUModelRunner._sample = sample_and_put_back  # type: ignore[method-assign]
    CPUModelRunner._bookkeeping_sync = bookkeep_without  # type: ignore[method-assign]
