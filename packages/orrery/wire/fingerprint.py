"""Compute 64-bit fingerprints F, to check that processes hold bitwise equal tensors.

b_i is element i in row-major order, with its bits read as a signed integer:

    F = Σ_i (b_i + 1) · c_i  mod 2^64,   c_i = k(i mod 16) · m(⌊i / 16⌋)
    m(q) = mix(q) | 1,   k(r) = mix(2^63 + r) | 1,   mix(i): output i of splitmix64 from seed 0

- A slice's "share" is the sum over its elements. Shares of disjoint slices add up to F.
- A flipped bit changes F, because c_i is odd. F detects damage, not tampering.
"""

import functools
import hashlib
import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    import torch

CHUNK_ELEMENTS = 1 << 18  # fits a CPU core's cache
GPU_CHUNK_ELEMENTS = 1 << 24  # large, to launch few kernels
GOLDEN = 0x9E3779B97F4A7C15
FIRST = 0xBF58476D1CE4E5B9
SECOND = 0x94D049BB133111EB
MASK = (1 << 64) - 1
GROUP = 16  # consecutive elements with the same factor m(q)


def _mixed(index: np.ndarray) -> np.ndarray:
    value = (index + np.uint64(1)) * np.uint64(GOLDEN)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(FIRST)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(SECOND)
    return (value ^ (value >> np.uint64(31))) | np.uint64(1)


FACTORS = _mixed(np.arange(1 << 63, (1 << 63) + GROUP, dtype=np.uint64))  # k(0), k(1), …


def tensor_fingerprint(tensor: "torch.Tensor") -> int:
    shape = tuple(tensor.shape)
    return int(slice_share(tensor.detach(), shape, (0,) * len(shape)).item()) & MASK


def array_fingerprint(bits: np.ndarray) -> int:
    """Return a tensor's fingerprint from its bits as integers, without torch."""
    total, flat = 0, bits.reshape(-1)
    for start in range(0, flat.size, CHUNK_ELEMENTS):
        part = flat[start : start + CHUNK_ELEMENTS]
        chunk = np.zeros(-(-part.size // GROUP) * GROUP, np.uint64)  # zeros leave F unchanged
        chunk[: part.size] = part.astype(np.int64).view(np.uint64) + np.uint64(1)
        sums = (chunk.reshape(-1, GROUP) * FACTORS).sum(1, dtype=np.uint64)
        mixed = _mixed(start // GROUP + np.arange(sums.size, dtype=np.uint64))
        total += int((sums * mixed).sum(dtype=np.uint64))
    return total & MASK


def digest(fingerprints: dict[str, int]) -> str:
    """Return a hash of names and fingerprints, 16 hex digits."""
    text = "".join(f"{name}\0{fingerprints[name]:016x}\n" for name in sorted(fingerprints))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def slice_share(
    tensor: "torch.Tensor", full_shape: tuple[int, ...], starts: tuple[int, ...]
) -> "torch.Tensor":
    """Return a slice's share of the fingerprint, i64 [].

    `tensor` starts at index `starts` of a tensor of shape `full_shape`. Raise ValueError if its
    dtype has no integer view.
    """
    import torch

    total = torch.zeros((), dtype=torch.int64, device=tensor.device)
    if tensor.numel() == 0:
        return total
    most = GPU_CHUNK_ELEMENTS if tensor.is_cuda else CHUNK_ELEMENTS
    shape = tuple(tensor.shape)
    is_run = tensor.is_contiguous() and shape[1:] == full_shape[1:]
    if not is_run and tensor.numel() > most:  # halve the slice, so that its flat copy is small
        dim = max(range(tensor.dim()), key=lambda d: shape[d])
        half = shape[dim] // 2
        after = tuple(start + half * (d == dim) for d, start in enumerate(starts))
        return slice_share(tensor.narrow(dim, 0, half), full_shape, starts) + slice_share(
            tensor.narrow(dim, half, shape[dim] - half), full_shape, after
        )
    integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    if tensor.element_size() not in integers or tensor.is_complex():
        raise ValueError(
            f"fingerprint: {tensor.dtype} elements have no integer view. "
            "View them as a smaller dtype first"
        )
    bits = tensor.contiguous().view(integers[tensor.element_size()]).reshape(-1)
    if is_run:
        first = starts[0] * math.prod(full_shape[1:]) if starts else 0
        for start in range(0, len(bits), most):
            total += _run(bits[start : start + most], first + start)
        return total
    if (shape[-1] | starts[-1] | full_shape[-1]) % GROUP == 0:
        return _groups(bits, _positions(shape, full_shape, starts, GROUP, tensor.device))
    return _scattered(bits, _positions(shape, full_shape, starts, 1, tensor.device))


def _run(bits: "torch.Tensor", first: int) -> "torch.Tensor":
    import torch

    head = min(-first % GROUP, len(bits))
    end = head + (len(bits) - head) // GROUP * GROUP
    device = bits.device
    total = torch.zeros((), dtype=torch.int64, device=device)
    for ragged, position in ((bits[:head], first), (bits[end:], first + end)):
        if len(ragged):
            index = torch.arange(position, position + len(ragged), device=device)
            total += _scattered(ragged, index)
    if end > head:
        group = (first + head) // GROUP
        index = torch.arange(group, group + (end - head) // GROUP, device=device)
        total += _groups(bits[head:end], index)
    return total


def _groups(bits: "torch.Tensor", index: "torch.Tensor") -> "torch.Tensor":
    import torch

    terms = bits.to(torch.int64, copy=True).add_(1).view(-1, GROUP).mul_(_factors(bits.device))
    return terms.sum(1).mul_(_mix(index)).sum()


def _scattered(bits: "torch.Tensor", index: "torch.Tensor") -> "torch.Tensor":
    import torch

    terms = bits.to(torch.int64, copy=True).add_(1).mul_(_factors(bits.device)[index % GROUP])
    return terms.mul_(_mix(index // GROUP)).sum()


def _positions(
    shape: tuple[int, ...],
    full_shape: tuple[int, ...],
    starts: tuple[int, ...],
    run: int,
    device: "torch.device",
) -> "torch.Tensor":
    import torch

    index = torch.zeros(1, dtype=torch.int64, device=device)
    for dim, (size, full, start) in enumerate(zip(shape, full_shape, starts, strict=True)):
        unit = run if dim == len(shape) - 1 else 1
        along = torch.arange(start // unit, (start + size) // unit, device=device)
        index = (index[:, None] * (full // unit) + along).view(-1)
    return index


@functools.cache
def _factors(device: "torch.device") -> "torch.Tensor":
    import torch

    return torch.from_numpy(FACTORS.view(np.int64)).to(device)


def _mix(index: "torch.Tensor") -> "torch.Tensor":
    value = index.add_(1).mul_(_signed(GOLDEN))
    value ^= (value >> 30) & ((1 << 34) - 1)
    value.mul_(_signed(FIRST))
    value ^= (value >> 27) & ((1 << 37) - 1)
    value.mul_(_signed(SECOND))
    value ^= (value >> 31) & ((1 << 33) - 1)
    return value.bitwise_or_(1)


def _signed(unsigned: int) -> int:
    return unsigned - (1 << 64) if unsigned >> 63 else unsigned


class SliceSpec(NamedTuple):
    """A slice from index `starts` of a tensor of shape `full_shape`.

    It is dense and row-major at byte `offset` of a buffer.
    """

    offset: int
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    itemsize: int

    @property
    def rows(self) -> tuple[int, int, int] | None:
        """Return (row length, row stride, first position) in elements, or None if strides differ.

        A row's elements are consecutive in the full tensor.
        """
        strides = [math.prod(self.full_shape[dim + 1 :]) for dim in range(len(self.full_shape))]
        origin = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        dim = len(self.shape)
        while dim and self.shape[dim - 1] == self.full_shape[dim - 1]:
            dim -= 1
        if dim:
            dim -= 1
        sizes = zip(self.shape[:dim], strides[:dim], strict=True)
        outer = [(size, stride) for size, stride in sizes if size > 1]
        if len(outer) > 1:
            return None
        return max(1, math.prod(self.shape[dim:])), outer[0][1] if outer else 0, origin


class SliceFingerprints:
    def __init__(
        self, slices: Sequence[SliceSpec], device: "torch.device", fused: bool | None = None
    ) -> None:
        """Use Triton kernels if `fused` (None: on GPUs with Triton installed)."""
        self._slices, self._device = list(slices), device
        self._kernels: list[tuple[Any, torch.Tensor]] = []
        self._alone = list(range(len(self._slices)))
        if fused is None:
            fused = device.type == "cuda" and importlib.util.find_spec("triton") is not None
        if fused:
            self._fuse()

    def of(self, buffer: "torch.Tensor") -> "torch.Tensor":
        """Return each slice's share of the fingerprint, i64 [slices]. `buffer` is u8."""
        import torch

        if len(self._kernels) == 1 and not self._alone:
            return self._kernels[0][0].of(buffer)
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        shares = torch.zeros(len(self._slices), dtype=torch.int64, device=self._device)
        for kernel, positions in self._kernels:
            shares[positions] = kernel.of(buffer)
        for position in self._alone:
            offset, shape, full_shape, starts, itemsize = self._slices[position]
            data = buffer[offset : offset + itemsize * torch.Size(shape).numel()]
            bits = data.view(integers[itemsize]).view(shape)
            shares[position] = slice_share(bits, full_shape, starts)
        return shares

    def _fuse(self) -> None:
        import torch

        from orrery.wire.fingerprint_kernel import RowFingerprints, Rows

        groups, self._alone = defaultdict(list), []
        for position, one in enumerate(self._slices):
            if (numbers := one.rows) is None:
                self._alone.append(position)
            else:
                rows = Rows(one.offset // one.itemsize, math.prod(one.shape), *numbers)
                groups[one.itemsize].append((position, rows))
        for itemsize, found in groups.items():
            positions = torch.tensor([position for position, _ in found], device=self._device)
            kernel = RowFingerprints([rows for _, rows in found], itemsize, self._device)
            self._kernels.append((kernel, positions))
