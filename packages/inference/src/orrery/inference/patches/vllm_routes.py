"""Routed experts from vLLM 0.32 on CPU. Nothing of vLLM's files is touched; `routes_on_cpu` is one call before the engine is made.

- Upstream: `--enable-return-routed-experts` is served by Model Runner V2 alone ("AuxOutput Connector requires Model Runner V2"), and that
  runner needs Triton, which has no CPU build. The connector itself (`vllm.distributed.aux_output_connector`) is plain Python: the
  scheduler's half works with any runner, and the worker's half wants three calls a step. `RoutedCPUModelRunner` makes them from Model
  Runner V1.
- Because the rows go through vLLM's own store, which is keyed by the hashes of cache blocks, a prefix-cache hit has all its rows.
- A step on CPU is synchronous, has no speculation and no pipeline: every scheduled token is accepted, and its output is taken before the
  next step begins.
- Versions: 0.32. Remove when `_verify_aux_output_compatibility` lets a CPU engine start: `test_inference_routes.py` passes without the
  call.
"""

from contextlib import contextmanager
from typing import Any

import numpy as np


def routes_on_cpu() -> None:
    """Have engines that this process starts, as forks, return routes on Model Runner V1."""
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
    """For the time of the check: a platform that brings its own runner, which is what vLLM asks about."""
    from vllm.platforms import current_platform

    current_platform.is_out_of_tree = lambda: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        del current_platform.is_out_of_tree


class _Batch:
    """What the connector reads of a step: V2's `InputBatch` has these arrays, V1 keeps them in its runner."""

    def __init__(self, runner: Any):
        self.req_ids = list(runner.input_batch.req_ids)
        num = len(self.req_ids)
        self.query_start_loc_np: np.ndarray = runner.query_start_loc.np[: num + 1].copy()
        self.num_computed_tokens_np: np.ndarray = runner.input_batch.num_computed_tokens_cpu[
            :num
        ].copy()


def _routed(runner: type) -> type:
    """Model Runner V1, driving the connector."""

    class RoutedCPUModelRunner(runner):
        routes: Any = None  # AuxOutputWorkerConnector

        def initialize_kv_cache(
            self, kv_cache_config: Any, is_profiling: bool = False, **options: Any
        ) -> None:
            super().initialize_kv_cache(kv_cache_config, is_profiling, **options)
            if self.vllm_config.aux_output_config.enabled and not is_profiling:
                from vllm.distributed.aux_output_connector.worker import get_aux_output_connector

                self.routes = get_aux_output_connector(
                    self.model, self.vllm_config, self.kv_cache_config
                )

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
                sampled = np.array(
                    [len(tokens) for tokens in output.sampled_token_ids], dtype=np.int32
                )
                pending.enqueue_cpu_copy(sampled, np.zeros_like(sampled))
                output.aux_output_connector_output = pending.process_output()
            return output

        def shutdown(self) -> None:
            if self.routes is not None:
                self.routes.close()
            super().shutdown()

    return RoutedCPUModelRunner
