"""Run FlashMLA's sparse forward pass on Hopper.

Load `_flashmla_C` of vLLM's wheel without importing vLLM. A test call finds whether FlashMLA's
log-sum-exp has base e or 2.
"""

import importlib.util
import logging
import math
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

log = logging.getLogger("orrery.kernels.flash_mla")

HOPPER = (9, 0)
WIDTH, VALUE_WIDTH = 576, 512  # widths of a key and its value
HEADS, KEYS = 64, 128  # query heads and chosen keys must be multiples


class FlashMLA(NamedTuple):
    operation: Any
    lse_factor: float


@cache
def load() -> FlashMLA | None:
    if not torch.cuda.is_available() or torch.cuda.get_device_capability() != HOPPER:
        return None
    vllm = importlib.util.find_spec("vllm")
    if vllm is None or vllm.origin is None:
        return None
    library = Path(vllm.origin).parent / "_flashmla_C.abi3.so"
    if not library.is_file():
        return None
    try:
        torch.ops.load_library(library)
        operation = torch.ops._flashmla_C.sparse_prefill_fwd.default
        return FlashMLA(operation, lse_factor(_lse_of_zeros(operation), KEYS // 2))
    except (OSError, RuntimeError, AttributeError, ValueError) as error:
        log.warning("FlashMLA cannot run, so sparse attention uses Triton: %s", error)
        return None


def supports(q_THD: Tensor, value_width: int, num_chosen: int) -> bool:
    _, num_heads, width = q_THD.shape
    return (
        q_THD.is_cuda
        and q_THD.dtype == torch.bfloat16
        and (width, value_width) == (WIDTH, VALUE_WIDTH)
        and num_heads % HEADS == 0
        and num_chosen % KEYS == 0
        and load() is not None
    )


def forward(
    q_THD: Tensor, kv_SD: Tensor, indices_TK: Tensor, scale: float, length_T: Tensor
) -> tuple[Tensor, Tensor]:
    """Return `sparse_mla`'s out [T, H, V] and lse f32 [T, H]. `supports` must be true.

    `length_T` is `sparse_mla_triton.lengths(indices_TK)`. Where it is 0, out is undefined.
    """
    library = load()
    assert library is not None
    out_THV, lse_TH = _call(library.operation, q_THD, kv_SD, indices_TK, scale, length_T)
    return out_THV, (lse_TH * library.lse_factor).masked_fill_((length_T == 0)[:, None], -torch.inf)


def lse_factor(lse: float, num_keys: int) -> float:
    """Return the factor that converts FlashMLA's log-sum-exp to base e.

    `lse` is its value for `num_keys` scores of 0. Raise ValueError unless the base is e or 2.
    """
    for factor in (1.0, math.log(2.0)):
        if abs(lse * factor - math.log(num_keys)) < 1e-3:
            return factor
    raise ValueError(f"FlashMLA's log-sum-exp of {num_keys} zeros, {lse:.4g}, has an unknown base")


def _lse_of_zeros(operation: Any) -> float:
    q = torch.zeros(1, HEADS, WIDTH, dtype=torch.bfloat16, device="cuda")
    indices = torch.arange(KEYS, dtype=torch.int32, device="cuda")[None]
    indices = torch.where(indices < KEYS // 2, indices, -1)
    length = torch.full((1,), KEYS, dtype=torch.int32, device="cuda")
    _, lse = _call(operation, q, q.new_zeros(KEYS, WIDTH), indices, 1.0, length)
    return float(lse[0, 0])


def _call(
    operation: Any, q: Tensor, kv: Tensor, indices: Tensor, scale: float, length: Tensor
) -> tuple[Tensor, Tensor]:
    known = {argument.name for argument in operation._schema.arguments}
    optional = {"attn_sink": None, "topk_length": length, "out": None, "out_": None}
    named = {name: value for name, value in optional.items() if name in known}
    out, _, lse = operation(
        q.contiguous(), kv[:, None].contiguous(), indices[:, None].contiguous(), scale,
        VALUE_WIDTH, **named,
    )  # fmt: skip
    return out, lse
