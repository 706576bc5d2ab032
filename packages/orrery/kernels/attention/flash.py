"""Run FlashAttention 2 (from torch) or 4 (package `flash-attn-4`)."""

import contextlib
import inspect
import logging
import os
import stat
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orrery.kernels.attention.layout import (
    AttentionBackend,
    Gradients,
    Layout,
    Output,
    Saved,
    has_signatures,
)

log = logging.getLogger("orrery.kernels.attention")

_FLASH2_SIGNATURES = {
    "_flash_attention_forward": "query key value cum_seq_q cum_seq_k max_q max_k dropout_p "
    "is_causal return_debug_mask scale",
    "_flash_attention_backward": "grad_out query key value out logsumexp cum_seq_q cum_seq_k "
    "max_q max_k dropout_p is_causal rng_state unused scale",
}


class Flash2(AttentionBackend):
    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        return (
            q.is_cuda
            and q.dtype in (torch.bfloat16, torch.float16)
            and q.shape[-1] <= 256
            and q.shape[-1] % 8 == 0
            and torch.cuda.get_device_capability(q.device) >= (8, 0)
            and has_signatures(_FLASH2_SIGNATURES)
        )

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
        cu_q, cu_k, max_q, max_k, causal, scale = layout
        out_THD, lse_HT, *_ = torch.ops.aten._flash_attention_forward(
            q_THD, k_SGD, v_SGD, cu_q, cu_k, max_q, max_k, 0.0, causal, False, scale=scale
        )
        if not layout.is_self_attention:  # the kernel returns lse +∞ for queries without keys
            lse_HT = lse_HT.masked_fill(lse_HT == torch.inf, -torch.inf)
        return out_THD, lse_HT

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        cu_q, cu_k, max_q, max_k, causal, scale = layout
        # used only with dropout
        rng_state = torch.zeros(2, dtype=torch.uint64, device=dout_THD.device)
        unused = torch.empty(0, device=dout_THD.device)
        options = (cu_q, cu_k, max_q, max_k, 0.0, causal, rng_state, unused)
        return torch.ops.aten._flash_attention_backward(dout_THD, *saved, *options, scale=scale)


_FLASH4_PARAMETERS = {
    "_flash_attn_fwd": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "softmax_scale causal return_lse",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale causal "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}


@cache
def load_flash4() -> Any:
    """Return FlashAttention 4's interface module, or None if unusable."""
    _set_compile_cache()
    try:
        from flash_attn.cute import interface

        missing = [
            f"{name}({word})"
            for name, words in _FLASH4_PARAMETERS.items()
            for word in words.split()
            if word not in inspect.signature(getattr(interface, name)).parameters
        ]
        if missing:
            raise AttributeError(f"missing parameters {', '.join(missing)}")
    except Exception as error:
        log.info("attention runs without FlashAttention 4: %s: %s", type(error).__name__, error)
        return None
    return interface


def _set_compile_cache() -> None:
    """Set a private cache folder before `flash-attn-4` is imported.

    The package executes cached files, and another user could own the default folder.
    """
    folder = Path(tempfile.gettempdir()) / f"orrery-flash4-{os.getuid()}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o077:
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "1")
        os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_DIR", str(folder))


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Convert errors to RuntimeError, so that another backend runs."""
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, OSError, ValueError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _documents(layout: Layout) -> dict[str, Any]:
    return {
        "cu_seqlens_q": layout.cu_seqlens_q,
        "cu_seqlens_k": layout.cu_seqlens_k,
        "max_seqlen_q": layout.max_q,
        "max_seqlen_k": layout.max_k,
        "causal": layout.causal,
        "softmax_scale": layout.scale,
    }


class Flash4(AttentionBackend):
    """FlashAttention 4 on Hopper. Not used in deterministic mode."""

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        return (
            q.is_cuda
            and not torch.are_deterministic_algorithms_enabled()
            and q.dtype == torch.bfloat16
            and q.shape[-1] == 128
            and q.shape[1] in (2 * k.shape[1], 4 * k.shape[1], 8 * k.shape[1])
            and layout.max_q > 128
            and layout.num_documents <= 256
            and torch.cuda.get_device_capability(q.device) == (9, 0)
            and layout.causal
            and layout.is_self_attention
            and load_flash4() is not None
        )

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
        with _as_runtime_error():
            out_THD, lse_HT, *_ = load_flash4()._flash_attn_fwd(
                q_THD, k_SGD, v_SGD, return_lse=True, **_documents(layout)
            )
        return out_THD, lse_HT

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        with _as_runtime_error():
            dq_THD, dk_SGD, dv_SGD, *_ = load_flash4()._flash_attn_bwd(
                q_THD, k_SGD, v_SGD, out_THD, dout_THD, lse_HT, **_documents(layout)
            )
        return dq_THD, dk_SGD, dv_SGD
