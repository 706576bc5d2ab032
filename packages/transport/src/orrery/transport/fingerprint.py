"""Fingerprints: 64 bits that say whether two processes hold the same tensor, bit for bit.

For a tensor whose elements, in row-major order, have the raw bits b_i (read as signed integers of the element's width):

    F = Σ_i (b_i + 1) · c_i   mod 2^64,    c_i = mix(i) | 1,  mix = two rounds of multiply and xor-shift (splitmix64's)

- Linear in slices: c_i depends on the global position only, so the fingerprints of the slices that ranks hold add up,
  mod 2^64, to the whole tensor's.
- One flipped bit always shows: it changes b_i by ±2^k with k < 64, and c_i is odd, so ±2^k · c_i is never 0 mod 2^64.
- Order shows: exchanging unequal elements i, j changes F by (b_i − b_j) · (c_j − c_i), which is 0 only where 2^64 divides it:
  for 32-bit elements c_i and c_j would have to agree in their lowest 33 bits, for 16-bit ones in 49.
- It guards against mistakes and damage, not against an adversary.

Elements are handled in chunks, so temporaries stay small whatever the tensor. Torch is imported when first needed.
"""

import hashlib
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 18  # stays in a core's cache
GPU_CHUNK_ELEMENTS = 1 << 24  # hides what fifteen launches cost
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = (1 << 64) - 1


def tensor_fingerprint(tensor: "torch.Tensor", full_shape: Sequence[int] | None = None, starts: Sequence[int] | None = None) -> int:
    """F of `tensor`, in [0, 2^64); any dtype of 1, 2, 4 or 8 bytes, any device, any strides.

    A slice of a larger tensor says that tensor's `full_shape` and the index `starts` where it begins in every dimension:
    then the result is the slice's share of the whole tensor's F.
    """
    shape = tuple(tensor.shape)
    full_shape = shape if full_shape is None else tuple(full_shape)
    starts = (0,) * len(shape) if starts is None else tuple(starts)
    if not len(shape) == len(full_shape) == len(starts) or any(
        start < 0 or start + size > full for start, size, full in zip(starts, shape, full_shape, strict=True)
    ):
        raise ValueError(f"a slice of shape {shape} at {starts} does not lie inside {full_shape}")
    return int(slice_share(tensor.detach(), full_shape, starts).item()) & MASK


def array_fingerprint(bits: np.ndarray) -> int:
    """F of a whole tensor whose elements are the integers `bits`, in row-major order; needs no torch, and is the referee of what does."""
    total = 0
    flat = bits.reshape(-1)
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        chunk = flat[start : start + CHUNK_ELEMENTS].astype(np.int64).view(np.uint64)
        value = np.arange(start + 1, start + 1 + chunk.size, dtype=np.uint64) * np.uint64(GOLDEN)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(FIRST)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(SECOND)
        value = (value ^ (value >> np.uint64(31))) | np.uint64(1)
        total += int(((chunk + np.uint64(1)) * value).sum(dtype=np.uint64))
    return total & MASK


def digest(fingerprints: dict[str, int]) -> str:
    """16 hex digits for a set of named fingerprints, whatever their order."""
    text = "".join(f"{name}\0{fingerprints[name]:016x}\n" for name in sorted(fingerprints))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slice_share(tensor: "torch.Tensor", full_shape: tuple[int, ...], starts: tuple[int, ...]) -> "torch.Tensor":
    """The share as a signed i64 scalar on the tensor's device, so that nobody has to wait for it; the arguments are not checked."""
    import torch

    if tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64, device=tensor.device)
    if not tensor.is_contiguous() and tensor.numel() > CHUNK_ELEMENTS:  # by parts: flattening it whole would copy it whole
        dim = max(range(tensor.dim()), key=lambda d: tensor.shape[d])
        half = tensor.shape[dim] // 2
        after = tuple(start + half * (d == dim) for d, start in enumerate(starts))
        return slice_share(tensor.narrow(dim, 0, half), full_shape, starts) + slice_share(
            tensor.narrow(dim, half, tensor.shape[dim] - half), full_shape, after
        )
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.element_size() not in integers or tensor.is_complex():
        raise ValueError(f"fingerprint: {tensor.dtype} elements have no integer view; view them as a smaller dtype first")
    bits = tensor.contiguous().view(integers[tensor.element_size()]).reshape(-1)
    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    most = GPU_CHUNK_ELEMENTS if tensor.is_cuda else CHUNK_ELEMENTS
    for start in range(0, len(bits), most):
        chunk = bits[start : start + most].to(torch.int64)
        local = torch.arange(start, start + len(chunk), dtype=torch.int64, device=tensor.device)
        total += (chunk + 1).mul_(_coefficients(_global_index(local, tuple(tensor.shape), full_shape, starts))).sum()
    return total


def _global_index(local: "torch.Tensor", shape: tuple[int, ...], full_shape: tuple[int, ...], starts: tuple[int, ...]) -> "torch.Tensor":
    """Row-major positions in the full tensor of row-major positions in the slice."""
    if shape[1:] == full_shape[1:]:  # whole rows: one shift
        return local.add_(starts[0] * math.prod(full_shape[1:])) if starts else local
    index = local.new_zeros(local.shape)
    stride = full_stride = 1
    for size, full, start in zip(reversed(shape), reversed(full_shape), reversed(starts), strict=True):
        index += ((local // stride) % size + start) * full_stride
        stride, full_stride = stride * size, full_stride * full
    return index


def _coefficients(index: "torch.Tensor") -> "torch.Tensor":
    """c of every position, in place. `>>` keeps the sign, so the mask makes it logical."""
    value = index.add_(1).mul_(_signed(GOLDEN))
    value ^= (value >> 30) & ((1 << 34) - 1)
    value.mul_(_signed(FIRST))
    value ^= (value >> 27) & ((1 << 37) - 1)
    value.mul_(_signed(SECOND))
    value ^= (value >> 31) & ((1 << 33) - 1)
    return value.bitwise_or_(1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned
