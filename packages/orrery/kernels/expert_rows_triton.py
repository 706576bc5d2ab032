"""Triton kernels of `expert_rows.py`, in float32, for contiguous tensors.

Offsets have 64 bits, because tensors may exceed 2³¹ elements.
"""

# mypy: disable-error-code="no-untyped-def"
import torch
import triton
import triton.language as tl
from torch import Tensor

MAX_BLOCK = 2048  # maximum columns in a program's registers


def spread_rows(x_TD: Tensor, place_TK: Tensor, num_rows: int) -> Tensor:
    num_tokens, width = x_TD.shape
    out_MD = x_TD.new_empty(num_rows, width)
    if out_MD.numel():
        block = _block(width)
        _spread_rows[(num_tokens, triton.cdiv(width, block))](
            x_TD, place_TK, out_MD, width, K=place_TK.shape[1], BLOCK=block
        )
    return out_MD


def sum_rows(y_MD: Tensor, place_TK: Tensor) -> Tensor:
    num_tokens, width = place_TK.shape[0], y_MD.shape[1]
    out_TD = y_MD.new_empty(num_tokens, width)
    if out_TD.numel():
        block = _block(width)
        _sum_rows[(num_tokens, triton.cdiv(width, block))](
            y_MD, place_TK, out_TD, width, K=place_TK.shape[1], BLOCK=block
        )
    return out_TD


def swiglu_rows(gate_up_M2I: Tensor, score_M: Tensor) -> Tensor:
    num_rows, width = gate_up_M2I.shape[0], gate_up_M2I.shape[1] // 2
    act_MI = gate_up_M2I.new_empty(num_rows, width)
    if act_MI.numel():
        block = _block(width)
        _swiglu_rows[(num_rows, triton.cdiv(width, block))](
            gate_up_M2I, score_M, act_MI, width, BLOCK=block
        )
    return act_MI


def swiglu_rows_backward(
    grad_MI: Tensor, gate_up_M2I: Tensor, score_M: Tensor
) -> tuple[Tensor, Tensor]:
    grad_gate_up_M2I, grad_score_M = torch.empty_like(gate_up_M2I), torch.empty_like(score_M)
    num_rows, width = grad_MI.shape
    if num_rows:
        tensors = (grad_MI, gate_up_M2I, score_M, grad_gate_up_M2I, grad_score_M)
        _swiglu_rows_backward[(num_rows,)](*tensors, width, BLOCK=_block(width))
    return grad_gate_up_M2I, grad_score_M


def _block(width: int) -> int:
    return min(triton.next_power_of_2(width), MAX_BLOCK)


@triton.jit
def _spread_rows(x, place, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    row = tl.load(x + token * width + column, mask=inside)
    for k in tl.static_range(K):
        there = tl.load(place + token * K + k)
        if there >= 0:
            tl.store(out + there * width + column, row, mask=inside)


@triton.jit
def _sum_rows(y, place, out, width, K: tl.constexpr, BLOCK: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    total = tl.zeros([BLOCK], tl.float32)
    for k in tl.static_range(K):
        row = tl.load(place + token * K + k)
        if row >= 0:
            total += tl.load(y + row * width + column, mask=inside).to(tl.float32)
    tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_rows(gate_up, score, act, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < width
    gate = tl.load(gate_up + row * 2 * width + column, mask=inside).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + column, mask=inside).to(tl.float32)
    value = gate * tl.sigmoid(gate) * up * tl.load(score + row).to(tl.float32)
    tl.store(act + row * width + column, value.to(act.dtype.element_ty), mask=inside)


@triton.jit
def _swiglu_rows_backward(
    grad, gate_up, score, grad_gate_up, grad_score, width, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    weight = tl.load(score + row).to(tl.float32)
    product = tl.zeros([BLOCK], tl.float32)
    for start in range(0, width, BLOCK):
        column = start + tl.arange(0, BLOCK)
        inside = column < width
        here = gate_up + row * 2 * width + column
        gate = tl.load(here, mask=inside, other=0.0).to(tl.float32)
        up = tl.load(here + width, mask=inside, other=0.0).to(tl.float32)
        arrived = tl.load(grad + row * width + column, mask=inside, other=0.0).to(tl.float32)
        sigmoid = tl.sigmoid(gate)
        silu = gate * sigmoid
        product += arrived * silu * up
        scored = arrived * weight
        grad_gate = scored * up * sigmoid * (1 + gate * (1 - sigmoid))
        place = grad_gate_up + row * 2 * width + column
        tl.store(place, grad_gate.to(grad_gate_up.dtype.element_ty), mask=inside)
        tl.store(place + width, (scored * silu).to(grad_gate_up.dtype.element_ty), mask=inside)
    tl.store(grad_score + row, tl.sum(product, axis=0).to(grad_score.dtype.element_ty))
