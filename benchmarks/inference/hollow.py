"""An executor of vLLM 0.26 without a model: its steps take no processor time, and give tokens, log-probs and routes of the right shapes.

What is left of an engine is its host side: scheduler, answers, API server. Not in it: what the model's own process does on the host.
`--distributed-executor-backend hollow.Hollow`; the scheduler is told to work ahead of the device, as it is on a GPU.
"""

import os
import time
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.executor.abstract import Executor
from vllm.v1.kv_cache_interface import FullAttentionSpec
from vllm.v1.outputs import LogprobsLists, ModelRunnerOutput, RoutedExpertsLists
from vllm.v1.worker.worker_base import CompilationTimes

STEP_S = float(os.environ.get("HOLLOW_STEP_S", "0.04"))


class Later(Future):
    """A step's output, which is there when the device would be done with it."""

    def __init__(self, output: ModelRunnerOutput, at_s: float):
        super().__init__()
        self.output, self.at_s = output, at_s

    def result(self, timeout: float | None = None) -> Any:
        time.sleep(max(0.0, self.at_s - time.monotonic()))
        return self.output


class Hollow(Executor):
    uses_ray = supports_pp = False
    max_concurrent_batches = 2  # one on the device, one behind it

    @classmethod
    def supports_async_scheduling(cls) -> bool:
        return True

    def _init_executor(self) -> None:
        self.scheduler_config.async_scheduling = True  # vLLM's platform of a CPU says no
        config = self.model_config.hf_config
        self.route = (config.num_hidden_layers, config.num_experts_per_tok) if self.model_config.enable_return_routed_experts else None
        self.scheduled: SchedulerOutput | None = None
        self.done_s = 0.0
        self.ahead: dict[str, int] = {}  # tokens of a prompt that are not computed yet, by request
        self.log_probs: set[str] = set()  # requests that asked for them

    def collective_rpc(self, method: Any, timeout: Any = None, args: Any = (), kwargs: Any = None, non_block: bool = False) -> list[Any]:
        if method == "get_kv_cache_spec":
            config, parallel = self.model_config, self.parallel_config
            spec = FullAttentionSpec(
                block_size=self.cache_config.block_size, num_kv_heads=config.get_num_kv_heads(parallel),
                head_size=config.get_head_size(), dtype=torch.bfloat16,
            )  # fmt: skip
            return [{f"model.layers.{i}.self_attn.attn": spec for i in range(config.hf_config.num_hidden_layers)}]
        answers = {
            "determine_available_memory": 1 << 40,
            "compile_or_warm_up_model": CompilationTimes(language_model=0.0, encoder=0.0),
            "get_supported_tasks": ("generate",),
        }
        return [answers.get(method)]

    def check_health(self) -> None:
        pass

    def execute_model(self, scheduler_output: SchedulerOutput, non_block: bool = False) -> Future:
        self.scheduled = scheduler_output
        found: Future = Future()
        found.set_result(None if scheduler_output.total_num_scheduled_tokens else ModelRunnerOutput([], {}))
        return found

    def sample_tokens(self, grammar_output: Any, non_block: bool = False) -> Any:
        step = self.scheduled
        assert step is not None
        for name in step.finished_req_ids:
            self.ahead.pop(name, None)
            self.log_probs.discard(name)
        for request in step.scheduled_new_reqs:
            self.ahead[request.req_id] = len(request.prompt_token_ids or ()) - request.num_computed_tokens
            if request.sampling_params is not None and request.sampling_params.logprobs is not None:
                self.log_probs.add(request.req_id)
        names = list(step.num_scheduled_tokens)
        tokens: list[list[int]] = []
        for name in names:
            self.ahead[name] -= step.num_scheduled_tokens[name]
            tokens.append([] if self.ahead[name] > 0 else [7])
        count, num_tokens = len(names), step.total_num_scheduled_tokens
        output = ModelRunnerOutput(
            req_ids=names,
            req_id_to_index={name: i for i, name in enumerate(names)},
            sampled_token_ids=tokens,
            logprobs=LogprobsLists(np.full((count, 1), 7, np.int32), np.full((count, 1), -1.0, np.float32), np.zeros(count, np.int32))
            if self.log_probs else None,
            routed_experts=RoutedExpertsLists(np.zeros((num_tokens, *self.route), np.uint8), np.arange(num_tokens)) if self.route else None,
        )  # fmt: skip
        self.done_s = max(self.done_s, time.monotonic()) + STEP_S
        found = Later(output, self.done_s)
        return found if non_block else found.result()
