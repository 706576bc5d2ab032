"""Fingerprints of slices add up to whole tensors', by the fused pass too."""

import importlib.util
import math
import os
import subprocess
import sys

import pytest
import torch

from orrery.wire.fingerprint import MASK, SliceFingerprints, SliceSpec, array_fingerprint

CPU = torch.device("cpu")
NUMPY = {
    torch.bfloat16: torch.int16,
    torch.float32: torch.int32,
    torch.float8_e4m3fn: torch.int8,
    torch.float64: torch.int64,
}


def cases():
    """(tensor, boxes that tile it): rows, columns, quarters of three dimensions, a scalar."""
    generator = torch.Generator().manual_seed(0)

    def tensor(*shape):
        return torch.randn(shape, generator=generator)

    yield tensor(40, 16).bfloat16(), [((0, 13), (0, 16)), ((13, 40), (0, 16))]
    yield tensor(70, 130), [((0, 70), (0, 65)), ((0, 70), (65, 130))]
    yield (
        tensor(6, 10, 4).to(torch.float8_e4m3fn),
        [((a, a + 3), (b, b + 5), (c, c + 2)) for a in (0, 3) for b in (0, 5) for c in (0, 2)],
    )
    yield tensor(5, 6, 7).double(), [((0, 5), (2, 6), (0, 7)), ((0, 5), (0, 2), (0, 7))]
    yield tensor(), [()]
    yield tensor(9000).bfloat16(), [((0, 9000),)]
    # A row each, more than one program handles.
    yield (
        tensor(10, 1024).bfloat16(),
        [((0, 1), (0, 1024)), ((1, 10), (0, 1024))],
    )
    # Rows of whole groups.
    yield (
        tensor(3, 32, 48).bfloat16(),
        [((0, 3), (a, a + 16), (b, b + 16)) for a in (0, 16) for b in (0, 16, 32)],
    )
    yield tensor(5, 8192).bfloat16(), [((0, 5), (0, 8192))]  # one slice, more than one program's
    yield tensor(3, 5008).bfloat16(), [((0, 3), (0, 5008))]  # ends within a program's fourth block
    yield tensor(9, 2048), [((0, 9), (0, 1024)), ((0, 9), (1024, 2048))]
    yield tensor(9, 2048).to(torch.float8_e4m3fn), [((0, 4), (0, 2048)), ((4, 9), (0, 2048))]


def check(fused, device=CPU):
    buffer, where, owner, tensors = torch.zeros(1 << 19, dtype=torch.uint8), [], [], []
    offset = 0
    for index, (tensor, boxes) in enumerate(cases()):
        tensors.append(tensor)
        for box in boxes:
            part = tensor[tuple(slice(*side) for side in box)].contiguous()
            buffer[offset : offset + part.nbytes] = part.reshape(-1).view(torch.uint8)
            starts = tuple(start for start, _ in box)
            where.append(
                SliceSpec(
                    offset, tuple(part.shape), tuple(tensor.shape), starts, tensor.element_size()
                )
            )
            owner.append(index)
            offset += math.ceil(part.nbytes / 16) * 16
    shares = SliceFingerprints(where, device, fused=fused).of(buffer.to(device)).tolist()
    for index, tensor in enumerate(tensors):
        expected = array_fingerprint(tensor.view(NUMPY[tensor.dtype]).numpy())
        assert (
            sum(share for share, whose in zip(shares, owner, strict=True) if whose == index) & MASK
            == expected
        )


def test_shares_of_slices_add_up_to_the_referees_fingerprint():
    check(fused=False)


@pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed here"
)
def test_the_fused_pass_gives_the_same():
    """By Triton's interpreter where there is no GPU; it reads its switch when it is imported."""
    if torch.cuda.is_available():
        check(fused=True, device=torch.device("cuda"))
        return
    command = "import test_wire_slice_fingerprints as tests; tests.check(fused=True)"
    path = os.pathsep.join([os.path.dirname(__file__), *map(os.path.abspath, sys.path)])
    subprocess.run(
        [sys.executable, "-c", command],
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": path},
        check=True,
    )
