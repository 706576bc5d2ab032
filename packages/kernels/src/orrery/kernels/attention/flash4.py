"""FlashAttention 4's kernels for Hopper on packed documents of any lengths, grouped heads as they are, where the package is installed.

CuTe DSL compiles them, some seconds a pass, when a host first meets a head shape, for all lengths that are taken here, and keeps them in a
folder that is this user's alone. Its gradients add up in no fixed order; where torch is asked for the same bits, FlashAttention 2 gives
them. It takes what it was measured on (benchmarks/kernels/attention.json): bfloat16, causal attention of documents to themselves, 128
numbers a head, 2, 4 or 8 query heads to a key head. Packs of short documents alone, and of more than 256, would be other kernels. Needs
`pip install flash-attn-4`, never a hard import.
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

_TAKEN = {
    "_flash_attn_fwd": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k softmax_scale causal return_lse",
    "_flash_attn_bwd": "q k v out dout lse softmax_scale causal cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k",
}


@cache
def library() -> Any:
    """The package's interface, or None where it is not installed or takes other arguments; said once."""
    _keep_what_is_compiled()
    try:
        from flash_attn.cute import interface

        missing = [
            f"{name}({word})"
            for name, words in _TAKEN.items()
            for word in words.split()
            if word not in inspect.signature(getattr(interface, name)).parameters
        ]
        if missing:
            raise AttributeError(f"no {', '.join(missing)}")
    except (
        Exception
    ) as error:  # an installed package that does not load must not stop a run that can do without
        log.info("attention runs without FlashAttention 4: %s: %s", type(error).__name__, error)
        return None
    return interface


def _keep_what_is_compiled() -> None:
    """Before the package is imported: it runs what it finds kept, and its own choice of a folder is a name that anybody can take."""
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
        and layout.shared
        and library() is not None
    )


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    with _as_one_that_cannot():
        out_THD, lse_HT, *_ = library()._flash_attn_fwd(
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
    with _as_one_that_cannot():
        dq_THD, dk_SGD, dv_SGD, *_ = library()._flash_attn_bwd(
            q_THD, k_SGD, v_SGD, out_THD, dout_THD, lse_HT, **_documents(layout)
        )
    return dq_THD, dk_SGD, dv_SGD


@contextlib.contextmanager
def _as_one_that_cannot() -> Iterator[None]:
    """What the package says of arguments that it does not take, and of a folder that it cannot write, is no end: other forms can."""
    try:
        yield
    except (AssertionError, ImportError, NotImplementedError, OSError, ValueError) as error:
        raise RuntimeError(f"{type(error).__name__}: {error}") from error


def _documents(layout: Layout) -> dict[str, Any]:
    cu_q, cu_k, max_q, max_k, causal, scale = layout
    names = {
        "cu_seqlens_q": cu_q,
        "cu_seqlens_k": cu_k,
        "max_seqlen_q": max_q,
        "max_seqlen_k": max_k,
    }
    return names | {"causal": causal, "softmax_scale": scale}
