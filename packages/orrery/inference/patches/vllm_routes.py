"""Make vLLM return routed experts (routes) and sparse attention's chosen keys.

- This includes CPU engines (without speculative decoding), KV offloading and KV transfers.
- The scheduler loads an offloaded KV block only if its routes are known.
- After a KV transfer, a decode engine knows routes only from the prompt's last token on.
- With `capture_choices`, vLLM reports u8 [1, bytes] per token: all layers' routes, then each
  indexer's chosen keys, as a bit mask over key positions or a sample.
- No bit is set for a prompt of at most `top_k` tokens, because vLLM attends to all keys.
"""

import os
from collections import OrderedDict, deque
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor

from orrery.inference.kv_connectors import FOLDER, RoutesOnDisk, is_on_disk
from orrery.inference.patches.registry import CHOICE_TOKENS, KEPT
from orrery.manifest.schema.manifest import SAMPLED_KEYS

CHUNK_ROWS = 1024  # tokens per call of `pack_positions`
SCATTER = 1_000_003  # a prime, so that similar sums give distant first columns
CHANGES = "routes that came and went"  # differs from request ids, which have no spaces

_known: set[str] = set()  # hashes of KV blocks with known routes


def routes_on_cpu() -> None:
    """Make CPU engines return routes. Call this in the engine's parent process."""
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
    """Declare the CPU platform out-of-tree, so that vLLM does not require Model Runner V2."""
    from vllm.platforms import current_platform

    current_platform.is_out_of_tree = lambda: True  # type: ignore[method-assign]
    try:
        yield
    finally:
        del current_platform.is_out_of_tree


class _Batch:
    """Model Runner V1's batch, with V2's field names."""

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


def keep() -> None:
    from vllm.distributed.aux_output_connector import worker
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import (
        OffloadingConnectorScheduler,
    )
    from vllm.v1.core.sched.scheduler import Scheduler

    if getattr(worker.BlockObjectStore, "orrery", False):
        return
    worker.BlockObjectStore = _known_routes(worker.BlockObjectStore)  # type: ignore[misc]
    worker.routed_experts_keys = lambda hashes, _namespace: [each.hex() for each in hashes]
    matched = OffloadingConnectorScheduler.get_num_new_matched_tokens
    process_output = worker.AuxOutputWorkerConnector.process_output
    update_from_output = Scheduler.update_from_output

    def and_tell(self: Any, pending: Any) -> Any:
        outputs = process_output(self, pending)
        outputs[CHANGES] = self._store._store.changes()
        return outputs

    def and_hear(self: Any, scheduler_output: Any, model_runner_output: Any) -> Any:
        outputs = model_runner_output.aux_output_connector_output or {}
        for key, is_kept in outputs.pop(CHANGES, ()):
            (_known.add if is_kept else _known.discard)(key)
        return update_from_output(self, scheduler_output, model_runner_output)

    def with_routes(
        self: Any, request: Any, num_computed_tokens: int, max_num_new_tokens: int | None = None
    ) -> Any:
        first = num_computed_tokens // self.config.tokens_per_hash
        known = _num_known(request.block_hashes[first:]) * self.config.tokens_per_hash
        if max_num_new_tokens is not None:
            known = min(known, max_num_new_tokens)
        return matched(self, request, num_computed_tokens, known)

    worker.AuxOutputWorkerConnector.process_output = and_tell  # type: ignore[method-assign]
    Scheduler.update_from_output = and_hear  # type: ignore[method-assign]
    scheduler = OffloadingConnectorScheduler
    scheduler.get_num_new_matched_tokens = with_routes  # type: ignore[method-assign]


def beside_transfer() -> None:
    from vllm.config import VllmConfig
    from vllm.distributed.aux_output_connector.routed_experts import RoutedExpertsBuffer

    verify, capture = VllmConfig._verify_aux_output_compatibility, RoutedExpertsBuffer.capture
    if getattr(verify, "orrery", False):
        return

    def verify_the_rest(self: Any) -> None:
        transfer, self.kv_transfer_config = self.kv_transfer_config, None
        try:
            verify(self)
        finally:
            self.kv_transfer_config = transfer

    def capture_within_a_block(self: Any, request_id: Any, token_start: int, rows: Any) -> Any:
        before = token_start % self.block_size
        if before and request_id not in self._requests:
            tail = self._tail(request_id, token_start - before)
            self._rows[tail.slot, :before].view("u1")[...] = 0xFF
            tail.length = before
        return capture(self, request_id, token_start, rows)

    verify_the_rest.orrery = True  # type: ignore[attr-defined]
    VllmConfig._verify_aux_output_compatibility = verify_the_rest  # type: ignore[method-assign]
    RoutedExpertsBuffer.capture = capture_within_a_block  # type: ignore[method-assign]


def _num_known(block_hashes: Any) -> int:
    keys = enumerate(each.hex() for each in block_hashes)
    unknown = (i for i, key in keys if key not in _known and not is_on_disk(key))
    return next(unknown, len(block_hashes))


class _Slots(OrderedDict[str, int]):
    """Block hash → slot in vLLM's route store. `changes` logs (hash, is added)."""

    def __init__(self, unallocated: int) -> None:
        super().__init__()
        self.unallocated = unallocated
        self.changes: deque[tuple[str, bool]] = deque()

    def __setitem__(self, key: str, slot: int) -> None:
        super().__setitem__(key, slot)
        if slot != self.unallocated:
            self.changes.append((key, True))

    def pop(self, key: str, *default: Any) -> Any:
        self.changes.append((key, False))
        return super().pop(key, *default)


def _known_routes(store: type) -> type:
    """Subclass vLLM's route store to fill missing routes with 0xFF."""

    class KnownRoutes(store):
        orrery = True

        def __init__(self, *, max_bytes: int, object_nbytes: int):
            max_bytes = int(max_bytes * float(os.environ.get(KEPT, "1")))
            super().__init__(max_bytes=max_bytes, object_nbytes=object_nbytes)
            self._lru = _Slots(self._UNALLOCATED_SLOT)
            self._disk = RoutesOnDisk() if FOLDER in os.environ else None

        def changes(self) -> list[tuple[str, bool]]:
            return [self._lru.changes.popleft() for _ in range(len(self._lru.changes))]

        def put(self, objects: list[Any], **keys: Any) -> None:
            for each in objects:
                if self._has(each.key):  # overwrite routes of older weights
                    begin = self._lru[each.key] * self.object_nbytes
                    self._arena[begin : begin + self.object_nbytes] = each.payload
            if self._disk is not None:
                self._disk.write(objects)
            super().put(objects, **keys)

        def get_concatenated(self, keys: list[str]) -> bytes:
            get = super().get_concatenated
            here = {key: bytes(get([key])) for key in keys if self._has(key)}
            if self._disk is not None:
                missing = [key for key in keys if key not in here]
                here |= self._disk.read(missing, self.object_nbytes)
            return b"".join(here.get(key, b"\xff" * self.object_nbytes) for key in keys)

        def _has(self, key: str) -> bool:
            return self._lru.get(key, self._UNALLOCATED_SLOT) != self._UNALLOCATED_SLOT

    return KnownRoutes


def capture_choices() -> None:
    """Record the chosen keys. Call this before the worker creates its model."""
    from vllm.distributed.aux_output_connector import worker

    bind = worker.bind_routed_experts_capturer
    if getattr(bind, "orrery", False):
        return

    def bind_both(model: torch.nn.Module, capturer: Any) -> None:
        bind(model, capturer)
        _bind_indexers(model, capturer)

    bind_both.orrery = True  # type: ignore[attr-defined]
    worker.bind_routed_experts_capturer = bind_both
    worker.RoutedExpertsCapturer = _with_choices(  # type: ignore[misc]
        worker.RoutedExpertsCapturer
    )


def _bind_indexers(model: torch.nn.Module, capturer: Any) -> None:
    from vllm.models.deepseek_v32 import attention

    indexers, select = attention.DeepseekV32Indexer, attention.sparse_attn_indexer
    prefixes = [one.k_cache.prefix for one in model.modules() if isinstance(one, indexers)]
    capturer.add_indexers(prefixes, -(-int(os.environ[CHOICE_TOKENS]) // 8))

    def select_and_capture(
        hidden_states: Tensor, k_cache_prefix: str, *rest: Any, **options: Any
    ) -> Tensor:
        position_TK = select(hidden_states, k_cache_prefix, *rest, **options)
        capturer.capture_choice(k_cache_prefix, position_TK[: hidden_states.shape[0]])
        return position_TK

    attention.sparse_attn_indexer = select_and_capture


def pack_positions(position_TK: Tensor, num_bits: int) -> Tensor:
    """Return u8 [T, `num_bits` / 8]. Bit p of row t is set if `position_TK[t]` contains p."""
    place_TK = torch.where(position_TK < 0, num_bits, position_TK).clamp(max=num_bits).long()
    is_set_TL = position_TK.new_zeros(len(place_TK), num_bits + 8, dtype=torch.uint8)
    is_set_TL.scatter_(1, place_TK, 1)
    shift_8 = torch.arange(8, dtype=torch.uint8, device=place_TK.device)
    bit_TB8 = is_set_TL[:, :num_bits].unflatten(1, (-1, 8)) << shift_8
    return bit_TB8.sum(dim=-1, dtype=torch.uint8)


def sample_positions(position_TK: Tensor) -> Tensor:
    """Return `SAMPLED_KEYS` positions of each row, i32 viewed as u8 [T, 4 · SAMPLED_KEYS].

    Sampled columns are equally spaced. The row's sum chooses the first, so that all columns are
    equally likely. Rows that contain −1 (no key) return only −1.
    """
    num_keys = position_TK.shape[1]
    total_T = position_TK.sum(dim=1)  # i64
    spacing = max(1, num_keys // SAMPLED_KEYS)
    column_S = spacing * torch.arange(SAMPLED_KEYS, device=position_TK.device)
    column_TS = (total_T[:, None] * SCATTER + column_S) % num_keys
    sample_TS = position_TK.gather(1, column_TS)
    is_whole_T = (position_TK >= 0).all(dim=1)
    return torch.where(is_whole_T[:, None], sample_TS, -1).int().view(torch.uint8)


def _with_choices(capturer: type) -> type:
    class RoutesAndChoices(capturer):
        def add_indexers(self, prefixes: list[str], num_bytes: int) -> None:
            """`num_bytes`: size of a token's bit mask. If 0, record samples."""
            self._index = {prefix: index for index, prefix in enumerate(prefixes)}
            self._num_bits, routes = 8 * num_bytes, self.device_buffer
            width = num_bytes or 4 * SAMPLED_KEYS
            self._choices = routes.new_zeros(len(routes), len(prefixes), width, dtype=torch.uint8)
            num_bytes = self.snapshot_routing_data(1).shape[-1]
            self.shape_per_token, self.output_dtype_name = (1, num_bytes), "uint8"

        def capture_choice(self, prefix: str, position_TK: Tensor) -> None:
            if (index := self._index.get(prefix)) is not None:
                for rows, out in zip(
                    position_TK.split(CHUNK_ROWS), self._choices.split(CHUNK_ROWS), strict=False
                ):
                    if self._num_bits:
                        out[: len(rows), index] = pack_positions(rows, self._num_bits)
                    else:
                        out[: len(rows), index] = sample_positions(rows)

        def snapshot_routing_data(self, num_tokens: int) -> Tensor:
            routes = super().snapshot_routing_data(num_tokens).view(torch.uint8).flatten(1)
            return torch.cat((routes, self._choices[:num_tokens].flatten(1)), dim=1)[:, None]

    return RoutesAndChoices
