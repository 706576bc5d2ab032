"""Which form of attention runs where, and what happens when one cannot.

The order below is the rule, until benchmarks/kernels/attention.json says otherwise: FlashAttention 4 on Hopper where it is installed
(with the backward pass 609 TFLOP/s for 32 query and 4 key heads of 128 at 16,384 tokens on one H200, 492 for eight documents), cuDNN
wherever it takes the layout on compute capability 9.0 and above (551 and 392), FlashAttention 2 for the rest of half precision on a GPU
(319 and 261), torch's CPU kernel for packs of documents on a CPU, and plain matrix products for what is left (float32 on a GPU, documents
that are short in batches; queries and keys of different tokens on a CPU).

Every form gives and takes the same things: out [T, H, D], log-sum-exp [H, T] over natural logarithms. So the backward pass may run in
another form than the forward pass did, and a form that fails is left out from then on.
"""

import logging
from types import ModuleType

import torch
from torch import Tensor

from orrery.kernels.attention import (
    batched,
    cudnn_dense,
    cudnn_packed,
    flash,
    flash4,
    padded,
    plain,
)
from orrery.kernels.attention.layout import Layout, lse_dtype

log = logging.getLogger("orrery.kernels.attention")

FORMS: dict[str, ModuleType] = {
    "flash4": flash4,
    "cudnn_dense": cudnn_dense,
    "cudnn_packed": cudnn_packed,
    "flash": flash,
    "padded": padded,
    "batched": batched,
    "plain": plain,
}

# Forms that have failed in this process.
_failed: set[str] = set()


def chosen(q: Tensor, k: Tensor, layout: Layout) -> list[str]:
    """The forms that take this, best first; `plain` is always the last."""
    return [
        name for name, form in FORMS.items() if name not in _failed and form.supports(q, k, layout)
    ]


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """out [T, H, D] and log-sum-exp [H, T], both contiguous."""
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        return q_THD.new_zeros(q_THD.shape), q_THD.new_full(
            q_THD.shape[1::-1], -torch.inf, dtype=lse_dtype(q_THD)
        )
    q_THD, k_SGD, v_SGD = (x.contiguous() for x in (q_THD, k_SGD, v_SGD))
    return _first_that_runs("forward", q_THD, k_SGD, layout, q_THD, k_SGD, v_SGD)


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv, contiguous and in their inputs' dtypes."""
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        return (
            q_THD.new_zeros(q_THD.shape),
            k_SGD.new_zeros(k_SGD.shape),
            v_SGD.new_zeros(v_SGD.shape),
        )
    tensors = tuple(x.contiguous() for x in (dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_HT))
    return _first_that_runs("backward", q_THD, k_SGD, layout, *tensors)


def _first_that_runs(
    pass_: str, q: Tensor, k: Tensor, layout: Layout, *tensors: Tensor
) -> tuple[Tensor, ...]:
    *optional, last = chosen(q, k, layout)
    for name in optional:
        try:
            return _contiguous(getattr(FORMS[name], pass_)(*tensors, layout))
        except Exception as error:
            # Out of memory and device faults are subclasses of RuntimeError, and no other form would mend them; a kernel library
            # that has no plan for a shape, or cannot compile one, raises RuntimeError itself, or an error type of its own.
            if type(error) is not RuntimeError and not type(error).__module__.startswith(
                ("cudnn", "cutlass")
            ):
                raise
            _failed.add(name)
            log.warning(
                "attention form %s fails in the %s pass and is left out from here on (q %s, k %s, %d documents): %s",
                name,
                pass_,
                list(q.shape),
                list(k.shape),
                layout.num_documents,
                error,
            )
    return _contiguous(getattr(FORMS[last], pass_)(*tensors, layout))


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)
