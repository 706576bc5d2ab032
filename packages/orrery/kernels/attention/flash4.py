"""FlashAttention 4 on Hopper, if the package `flash-attn-4` is installed.

- Compiles a kernel per pass and head shape, for seconds, and caches it on disk.
- Gradients are summed in no fixed order, so deterministic runs use FlashAttention 2.
- Limited to the cases of benchmarks/kernels/attention.json. Packs of short documents, or of more
  than 256, would compile further kernels.
"""

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

from orrery.kernels.attention.layout import Layout

log = logging.getLogger("orrery.kernels.attention")

_SIGNATURES = {
    "_flash_attn_fwd": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k "
    "softmax_scale causal return_lse",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale causal "
    "cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}


@cache
def load_library() -> Any:
    """Return the package's interface, or None if it is missing or has other parameters."""
    _set_compile_cache()
    try:
        from flash_attn.cute import interface

        missing = [
            f"{name}({word})"
            for name, words in _SIGNATURES.items()
            for word in words.split()
            if word not in inspect.signature(getattr(interface, name)).parameters
        ]
        if missing:
            raise AttributeError(f"no {', '.join(missing)}")
    except Exception as error:  # a broken package must not stop the run
        log.info("attention runs without FlashAttention 4: %s: %s", type(error).__name__, error)
        return None
    return interface


def _set_compile_cache() -> None:
    """Cache compiled kernels in a private folder. Call before the import.

    The package executes cached files, and any user can create its default folder.
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


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
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
        and load_library() is not None
    )


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    with _as_runtime_error():
        out_THD, lse_HT, *_ = load_library()._flash_attn_fwd(
            q_THD, k_SGD, v_SGD, return_lse=True, **_documents(layout)
        )
    return out_THD, lse_HT


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    with _as_runtime_error():
        dq_THD, dk_SGD, dv_SGD, *_ = load_library()._flash_attn_bwd(
            q_THD, k_SGD, v_SGD, out_THD, dout_THD, lse_HT, **_documents(layout)
        )
    return dq_THD, dk_SGD, dv_SGD


@contextlib.contextmanager
def _as_runtime_error() -> Iterator[None]:
    """Raise the package's refusals as RuntimeError, so that another backend runs."""
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
