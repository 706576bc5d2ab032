"""Choose the attention backend, and fall back to the next if it fails.

`BACKENDS` has the fastest first. A failed backend is not tried again in this process.
"""

import logging

import torch
from torch import Tensor

from orrery.kernels.attention.cudnn import CudnnDense, CudnnPacked
from orrery.kernels.attention.flash import Flash2, Flash4
from orrery.kernels.attention.layout import (
    AttentionBackend,
    Gradients,
    Layout,
    Output,
    Saved,
    lse_dtype,
)
from orrery.kernels.attention.portable import Batched, Padded, Plain

log = logging.getLogger("orrery.kernels.attention")

BACKENDS: dict[str, AttentionBackend] = {
    "flash4": Flash4(),
    "cudnn_dense": CudnnDense(),
    "cudnn_packed": CudnnPacked(),
    "flash": Flash2(),
    "padded": Padded(),
    "batched": Batched(),
    "plain": Plain(),
}

_failed: set[str] = set()


def candidates(q: Tensor, k: Tensor, layout: Layout) -> list[str]:
    """Return the backends for these inputs, best first and `plain` last."""
    names = [name for name in BACKENDS if name not in _failed]
    return [name for name in names if BACKENDS[name].supports(q, k, layout)]


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
    """Return out [T, H, D] and log-sum-exp [H, T], both contiguous."""
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=lse_dtype(q_THD))
        return q_THD.new_zeros(q_THD.shape), lse_HT
    inputs = _contiguous((q_THD, k_SGD, v_SGD))
    return _run_first_that_succeeds("forward", q_THD, k_SGD, layout, *inputs)


def backward(dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
    """Return dq, dk, dv, contiguous, in their inputs' dtypes."""
    q_THD, k_SGD, *_ = saved
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        return tuple(x.new_zeros(x.shape) for x in saved[:3])
    saved = _contiguous(saved)
    return _run_first_that_succeeds("backward", q_THD, k_SGD, layout, dout_THD.contiguous(), saved)


def _run_first_that_succeeds(
    pass_: str, q: Tensor, k: Tensor, layout: Layout, *tensors: Tensor | Saved
) -> tuple[Tensor, ...]:
    *optional, last = candidates(q, k, layout)
    for name in optional:
        try:
            return _contiguous(getattr(BACKENDS[name], pass_)(*tensors, layout))
        except Exception as error:
            if not _is_refusal(error):
                raise
            _failed.add(name)
            log.warning(
                "attention backend %s fails in the %s pass and is left out from here on "
                "(q %s, k %s, %d documents): %s",
                *(name, pass_, list(q.shape), list(k.shape), layout.num_documents, error),
            )
    return _contiguous(getattr(BACKENDS[last], pass_)(*tensors, layout))


def _is_refusal(error: Exception) -> bool:
    """Return whether another backend can help, as when a library has no plan.

    Out of memory and device faults, subclasses of RuntimeError, would recur.
    """
    return type(error) is RuntimeError or type(error).__module__.startswith(("cudnn", "cutlass"))


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)
