"""Fingerprints of many slices of one buffer at once: each slice's share of its tensor's fingerprint (`fingerprint` has the formula).

On a CPU slice by slice. On a GPU one kernel over all slices of a size of element (`fingerprint_kernel`), since a mixture has tens of
thousands of tensors, and a launch each would cost more than the bytes.
"""

import importlib.util
import math
from collections import defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from orrery.transport.fingerprint import slice_share

if TYPE_CHECKING:
    import torch


class Where(NamedTuple):
    """A slice: dense, row-major, from byte `offset` of the buffer; the box at `starts` of a tensor of `full_shape`."""

    offset: int
    shape: tuple[int, ...]
    full_shape: tuple[int, ...]
    starts: tuple[int, ...]
    itemsize: int

    @property
    def rows(self) -> tuple[int, int, int] | None:
        """(elements of a row, positions from one row to the next, position of the first); None where rows do not follow evenly."""
        strides = [math.prod(self.full_shape[dim + 1 :]) for dim in range(len(self.full_shape))]
        origin = sum(start * stride for start, stride in zip(self.starts, strides, strict=True))
        dim = len(self.shape)
        while dim and self.shape[dim - 1] == self.full_shape[dim - 1]:
            dim -= 1
        if dim:
            dim -= 1  # part of this one, all of those after it: a row
        outer = [
            (size, stride)
            for size, stride in zip(self.shape[:dim], strides[:dim], strict=True)
            if size > 1
        ]
        if len(outer) > 1:
            return None
        return max(1, math.prod(self.shape[dim:])), outer[0][1] if outer else 0, origin


class SliceFingerprints:
    """Made once for slices that lie at the same places every time."""

    def __init__(
        self, slices: Sequence[Where], device: "torch.device", fused: bool | None = None
    ) -> None:
        """`fused`: by the kernel; where it is not said, on a GPU where there is Triton."""
        self._slices, self._device = list(slices), device
        self._kernels: list[tuple[Any, torch.Tensor]] = []
        self._alone = list(range(len(self._slices)))
        if (
            fused
            if fused is not None
            else device.type == "cuda" and importlib.util.find_spec("triton") is not None
        ):
            self._fuse()

    def of(self, buffer: "torch.Tensor") -> "torch.Tensor":
        """i64 [slices] on the buffer's device: F's share of each, mod 2^64 (as signed integers). `buffer` is u8."""
        import torch

        if len(self._kernels) == 1 and not self._alone:
            return self._kernels[0][0].of(buffer)  # which has them in their order
        integers = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
        shares = torch.zeros(len(self._slices), dtype=torch.int64, device=self._device)
        for kernel, positions in self._kernels:
            shares[positions] = kernel.of(buffer)
        for position in self._alone:
            offset, shape, full_shape, starts, itemsize = self._slices[position]
            size = itemsize * torch.Size(shape).numel()
            shares[position] = slice_share(
                buffer[offset : offset + size].view(integers[itemsize]).view(shape),
                full_shape,
                starts,
            )
        return shares

    def _fuse(self) -> None:
        import torch

        from orrery.transport.fingerprint_kernel import RowFingerprints, Rows

        groups, self._alone = defaultdict(list), []
        for position, one in enumerate(self._slices):
            rows = one.rows
            if rows is None:
                self._alone.append(position)
            else:
                groups[one.itemsize].append(
                    (position, Rows(one.offset // one.itemsize, math.prod(one.shape), *rows))
                )
        for itemsize, found in groups.items():
            positions = torch.tensor([position for position, _ in found], device=self._device)
            self._kernels.append(
                (RowFingerprints([rows for _, rows in found], itemsize, self._device), positions)
            )
