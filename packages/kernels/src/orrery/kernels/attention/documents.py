"""How a packed tensor divides into documents: made once a forward, shared by its layers, read inside compiled code."""

from torch import Tensor


class Documents:
    """Packed documents: document i owns tokens `cu_seqlens[i]:cu_seqlens[i + 1]`.

    `cu_seqlens` i32 [n + 1], rising from 0 to the number of tokens. `max_seqlen` is the length of the longest document, or any bound
    above it; where it is not given it is read from `cu_seqlens`, which costs a device-to-host copy and cannot be done in compiled code.
    Both may change from step to step without a new compilation.
    """

    def __init__(self, cu_seqlens: Tensor, max_seqlen: int | None = None) -> None:
        self.cu_seqlens = cu_seqlens
        self.max_seqlen = longest(cu_seqlens) if max_seqlen is None else max_seqlen


def longest(cu_seqlens: Tensor) -> int:
    return int(cu_seqlens.diff().max()) if cu_seqlens.numel() > 1 else 0
