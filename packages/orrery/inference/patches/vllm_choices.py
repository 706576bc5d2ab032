"""Make vLLM append the keys that sparse attention's indexers chose to the routed experts.

- vLLM reports u8 [1, bytes] per token: the routed experts of all layers, then, for each
  indexer, one bit per key position.
- For a prompt of at most `top_k` tokens, vLLM attends to all keys, and no bit is set.
"""

import os
from typing import Any

import torch
from torch import Tensor

from orrery.inference.patches.registry import CHOICE_TOKENS

CHUNK_ROWS = 1024  # tokens per call of `pack_positions`


def capture() -> None:
    """Make a worker record the chosen keys. Call this before the worker creates its model."""
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
    capturer.add_indexers(prefixes, 8 * -(-int(os.environ[CHOICE_TOKENS]) // 8))

    def select_and_capture(
        hidden_states: Tensor, k_cache_prefix: str, *rest: Any, **options: Any
    ) -> Tensor:
        position_TK = select(hidden_states, k_cache_prefix, *rest, **options)
        capturer.capture_choice(k_cache_prefix, position_TK[: hidden_states.shape[0]])
        return position_TK

    attention.sparse_attn_indexer = select_and_capture


def pack_positions(position_TK: Tensor, num_bits: int) -> Tensor:
    """Return u8 [T, `num_bits` / 8]. Bit p of row t is set if `position_TK[t]` has p."""
    place_TK = torch.where(position_TK < 0, num_bits, position_TK).clamp(max=num_bits).long()
    is_set_TL = position_TK.new_zeros(len(place_TK), num_bits + 8, dtype=torch.uint8)
    is_set_TL.scatter_(1, place_TK, 1)
    shift_8 = torch.arange(8, dtype=torch.uint8, device=place_TK.device)
    bit_TB8 = is_set_TL[:, :num_bits].unflatten(1, (-1, 8)) << shift_8
    return bit_TB8.sum(dim=-1, dtype=torch.uint8)


def _with_choices(capturer: type) -> type:
    class RoutesAndChoices(capturer):
        def add_indexers(self, prefixes: list[str], num_bits: int) -> None:
            self._index = {prefix: index for index, prefix in enumerate(prefixes)}
            self._num_bits, routes = num_bits, self.device_buffer
            self._choices = routes.new_zeros(
                len(routes), len(prefixes), num_bits // 8, dtype=torch.uint8
            )
            num_bytes = self.snapshot_routing_data(1).shape[-1]
            self.shape_per_token, self.output_dtype_name = (1, num_bytes), "uint8"

        def capture_choice(self, prefix: str, position_TK: Tensor) -> None:
            if (index := self._index.get(prefix)) is not None:
                for rows, out in zip(
                    position_TK.split(CHUNK_ROWS), self._choices.split(CHUNK_ROWS), strict=False
                ):
                    out[: len(rows), index] = pack_positions(rows, self._num_bits)

        def snapshot_routing_data(self, num_tokens: int) -> Tensor:
            routes = super().snapshot_routing_data(num_tokens).view(torch.uint8).flatten(1)
            return torch.cat((routes, self._choices[:num_tokens].flatten(1)), dim=1)[:, None]

    return RoutesAndChoices
