"""Patch vLLM: return routed experts on CPU.

`RoutedCPUModelRunner` drives `vllm.distributed.aux_output_connector` from Model Runner V1. Rows go
through vLLM's store, keyed by block hashes, so a prefix-cache hit has all its rows. A CPU step has
no speculation: every scheduled token is accepted.
"""

from contextlib import contextmanager
from typing import Any

import numpy as np


def routes_on_cpu() -> None:
    """Apply before the engine is made, in the process that forks it."""
    from vllm.config import VllmConfig
    from vllm.v1.worker import cpu_worker

    verify = VllmConfig._verify_aux_output_compatibility

    def verify_otherwise(self: Any) -> None:
        with _own_runner():
            verify(self)

    VllmConfig._verify_aux_output_compatibility = verify_otherwise  # type: ignore[method-assign]
    cpu_worker.CPUModelRunner = _routed(cpu_worker.CPUModelRunner)  # type: ignore[misc,assignment]


@contextmanager
def _own_runner() -> Any:
    """Make the platform claim its own runner."""
    from vllm.platforms import current_platform

    current_platform.is_out_of_tree = lambda: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        del current_platform.is_out_of_tree


class _Batch:
    """The arrays of V2's `InputBatch` that the connector reads, from V1's runner."""

    def __init__(self, runner: Any):
        self.req_ids = list(runner.input_batch.req_ids)
        num = len(self.req_ids)
        self.query_start_loc_np: np.ndarray = runner.query_start_loc.np[: num + 1].copy()
        computed: np.ndarray = runner.input_batch.num_computed_tokens_cpu
        self.num_computed_tokens_np = computed[:num].copy()


def _routed(runner: type) -> type:
    class RoutedCPUModelRunner(runner):
        routes: Any = None  # AuxOutputWorkerConnector

        def initialize_kv_cache(
            self, kv_cache_config: Any, is_profiling: bool = False, **options: Any
        ) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
            if self.vllm_config.aux_output_config.enabled and not is_profiling:
                from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

                config = (self.vllm_config, self.kv_cache_config)
                self.routes = get_aux_output_connector(self.model, *config)

        def execute_model(self, scheduler_output: Any, *rest: Any, **options: Any) -> Any:
            if self.routes is not None:
                self.routes.begin_step(scheduler_output.aux_output_connector_metadata)
            return super().execute_model(scheduler_output, *rest, **options)

        def sample_tokens(self, grammar_output: Any) -> Any:
            pending = None
            if self.routes is not None and self.execute_model_state is not None:
                pending = self.routes.prepare_output(_Batch(self))
            output = super().sample_tokens(grammar_output)
            if pending is not None:
                lengths = [len(tokens) for tokens in output.sampled_token_ids]
                sampled = np.array(lengths, dtype=np.int32)
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

        def shutdown(self) -> None:
            if self.routes is not None:
                self.routes.close()
            super().shutdown()

    return RoutedCPUModelRunner
