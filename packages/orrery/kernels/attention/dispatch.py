"""Choose an attention backend, and define attention's custom operators.

Supported backends are tried from fastest to slowest. A failed backend is not tried again.
"""

# mypy: disable-error-code="no-untyped-def"
import itertools
import logging

import torch
from torch import Tensor

from orrery.kernels.attention.cudnn import CudnnDense, CudnnPacked, load_library
from orrery.kernels.attention.flash import Flash2, Flash4, load_flash4
from orrery.kernels.attention.layout import (
    AttentionBackend,
    Documents,
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

CHOICES: dict[str, tuple[str, ...]] = {  # value of `trainer.attention`: backends to try first
    "auto": (),
    "fa2": ("flash",),
    "fa4": ("flash4",),
    "cudnn": ("cudnn_dense", "cudnn_packed"),
    "plain": ("padded", "batched", "plain"),
}
PORTABLE = CHOICES["plain"]
PACKAGES = {
    "fa4": ("flash-attn-4", load_flash4),
    "cudnn": ("nvidia-cudnn-frontend", load_library),
}

_failed: set[str] = set()
_first_used: set[str] = set()
_order: list[str] = list(BACKENDS)


def prefer(choice: str) -> None:
    """Try the backends of `CHOICES[choice]` first. With "plain", try no others.

    Raise ValueError if their package cannot be imported.
    """
    names = CHOICES[choice]
    if choice in PACKAGES and PACKAGES[choice][1]() is None:
        raise ValueError(
            f"the package {PACKAGES[choice][0]} cannot be imported here; install the "
            "version in locks/cuda.txt, or choose 'auto'"
        )
    rest = [name for name in BACKENDS if name not in names]
    _order[:] = names if names == PORTABLE else [*names, *rest]


def varlen_attention(
    q_THD: Tensor,
    k_TGD: Tensor,
    v_TGD: Tensor,
    cu_seqlens: Tensor | Documents,
    max_seqlen: int | None = None,
    documents_k: Documents | None = None,
) -> Tensor:
    """Return causal attention inside each packed document, [T, H, D] in q's dtype. Differentiable.

    q is [T, H, D], k and v are [T, G, D]. Query head h reads key head h // (H / G). Scores are
    scaled by D^-1/2. With `documents_k`, k and v are [S, G, D], and the causal mask aligns each
    document's last query with its last key.
    """
    if isinstance(cu_seqlens, Tensor):
        cu_seqlens = Documents(cu_seqlens, max_seqlen)
    q, k = cu_seqlens, documents_k or cu_seqlens
    sides = (q.cu_seqlens, k.cu_seqlens, q.max_seqlen, k.max_seqlen, True)
    return _attend(q_THD, k_TGD, v_TGD, *sides)[0]


def reference_varlen_attention(
    q_THD: Tensor, k_TGD: Tensor, v_TGD: Tensor, cu_seqlens: Tensor, max_seqlen: int | None = None
) -> Tensor:
    dtype = lse_dtype(q_THD)
    heads_per_group = q_THD.shape[1] // k_TGD.shape[1]
    outputs = [q_THD[:0]]
    for start, end in itertools.pairwise(cu_seqlens.tolist()):
        q_HLD = q_THD[start:end].transpose(0, 1).to(dtype)
        k_HLD = k_TGD[start:end].repeat_interleave(heads_per_group, dim=1).transpose(0, 1).to(dtype)
        v_HLD = v_TGD[start:end].repeat_interleave(heads_per_group, dim=1).transpose(0, 1).to(dtype)
        scores_HLL = q_HLD @ k_HLD.transpose(1, 2) * q_THD.shape[-1] ** -0.5
        future_LL = torch.ones_like(scores_HLL[0], dtype=torch.bool).triu(1)
        weights_HLL = scores_HLL.masked_fill(future_LL, -torch.inf).softmax(dim=-1)
        outputs.append((weights_HLL @ v_HLD).transpose(0, 1).to(q_THD.dtype))
    return torch.cat(outputs)


def _attend(
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor]:
    """Return outputs [T, H, D], and log-sum-exp of scores [T, H] (no gradient).

    Queries without keys get output 0 and log-sum-exp −∞. Raise ValueError unless G divides H.
    """
    num_heads, num_groups = q_THD.shape[1], k_SGD.shape[1]
    if num_heads % num_groups:
        raise ValueError(f"{num_heads} query heads are not a multiple of {num_groups} key heads")
    sides = (cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal)
    scale = q_THD.shape[-1] ** -0.5
    out_THD, lse_HT = torch.ops.orrery.varlen_attention_forward(q_THD, k_SGD, v_SGD, *sides, scale)
    return out_THD, lse_HT.t()


# Callers compute gradients with `attention_backward`.
attention_forward = torch.no_grad()(_attend)


@torch.no_grad()
def attention_backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_TH: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v in their dtypes.

    In ring attention (arXiv 2310.01889), k and v may be one shard of the keys, but `out` and
    `lse` [T, H] cover all shards. The caller sums dq over shards in float32.
    """
    tensors = (dout_THD, q_THD, k_SGD, v_SGD, out_THD, lse_TH.t().contiguous())
    sides = (cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal)
    return torch.ops.orrery.varlen_attention_backward(*tensors, *sides, q_THD.shape[-1] ** -0.5)


@torch.library.custom_op("orrery::varlen_attention_forward", mutates_args=())
def varlen_attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor]:
    layout = Layout(cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale)
    return run_forward(q, k, v, layout)


@varlen_attention_forward.register_fake
def _(q, k, v, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale):
    return q.new_empty(q.shape), q.new_empty((q.shape[1], q.shape[0]), dtype=lse_dtype(q))


@torch.library.custom_op("orrery::varlen_attention_backward", mutates_args=())
def varlen_attention_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_q: int,
    max_k: int,
    causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    layout = Layout(cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale)
    return run_backward(dout, (q, k, v, out, lse), layout)


@varlen_attention_backward.register_fake
def _(dout, q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k, max_q, max_k, causal, scale):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output):
    q, k, v, cu_seqlens_q, cu_seqlens_k, *ctx.options = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.set_materialize_grads(False)
    ctx.save_for_backward(q, k, v, out, lse, cu_seqlens_q, cu_seqlens_k)


def _backward(ctx, dout, _):
    if dout is None:
        return (None,) * 9
    saved = (*ctx.saved_tensors, *ctx.options)
    gradients = torch.ops.orrery.varlen_attention_backward(dout, *saved)
    return *gradients, *(None,) * 6


varlen_attention_forward.register_autograd(_backward, setup_context=_setup_context)


def candidates(q: Tensor, k: Tensor, layout: Layout) -> list[str]:
    names = [name for name in _order if name not in _failed]
    return [name for name in names if BACKENDS[name].supports(q, k, layout)]


def run_forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
    if q_THD.shape[0] == 0 or k_SGD.shape[0] == 0:
        lse_HT = q_THD.new_full(q_THD.shape[1::-1], -torch.inf, dtype=lse_dtype(q_THD))
        return q_THD.new_zeros(q_THD.shape), lse_HT
    inputs = _contiguous((q_THD, k_SGD, v_SGD))
    return _run_first_that_succeeds("forward", q_THD, k_SGD, layout, *inputs)


def run_backward(dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
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
        _tell_first_use(name, q, k)
        try:
            return _contiguous(getattr(BACKENDS[name], pass_)(*tensors, layout))
        except Exception as error:
            if not _is_refusal(error):
                raise
            _failed.add(name)
            log.warning(
                "attention backend %s failed in the %s pass and will not be tried again "
                "(q %s, k %s, %d documents): %s",
                *(name, pass_, list(q.shape), list(k.shape), layout.num_documents, error),
            )
    _tell_first_use(last, q, k)
    return _contiguous(getattr(BACKENDS[last], pass_)(*tensors, layout))


def _tell_first_use(name: str, q: Tensor, k: Tensor) -> None:
    if name not in _first_used:
        _first_used.add(name)
        log.info("attention runs on %s (q %s, k %s)", name, list(q.shape), list(k.shape))


def _is_refusal(error: Exception) -> bool:
    """Return whether another backend may succeed after `error`. False for out-of-memory errors."""
    return type(error) is RuntimeError or type(error).__module__.startswith(("cudnn", "cutlass"))


def _contiguous(tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return tuple(x.contiguous() for x in tensors)
