"""Fingerprints against a plain referee in Python integers, and their laws."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from orrery.wire import fingerprint
from orrery.wire.fingerprint import (
    MASK,
    array_fingerprint,
    digest,
    slice_share,
    tensor_fingerprint,
)

INTEGERS = {1: np.int8, 2: np.int16, 4: np.int32, 8: np.int64}
INTEGER_VIEWS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.int8,
    torch.uint8,
    torch.int32,
    torch.int64,
    torch.bool,
]


def mix(i):
    c = (i + 1) * 0x9E3779B97F4A7C15 % 2**64
    c = (c ^ c >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    c = (c ^ c >> 27) * 0x94D049BB133111EB % 2**64
    return c ^ c >> 31


def referee(tensor: torch.Tensor) -> int:
    """The formula of the docstring in Python's own integers, on bytes that numpy reads."""
    raw = tensor.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    bits = np.frombuffer(raw, INTEGERS[tensor.element_size()]).tolist()
    return (
        sum(
            (one + 1) * (mix(2**63 + i % 16) | 1) * (mix(i // 16) | 1) for i, one in enumerate(bits)
        )
        % 2**64
    )


def random_tensor(dtype, *shape, seed=0):
    size = torch.empty(0, dtype=dtype).element_size()
    raw = np.random.default_rng(seed).integers(
        0, 2 if dtype == torch.bool else 256, (math.prod(shape) * size,), dtype=np.uint8
    )
    return torch.from_numpy(raw).view(dtype).reshape(shape)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_fingerprint_is_the_formula(dtype):
    tensor = random_tensor(dtype, 7, 5)
    assert tensor_fingerprint(tensor) == referee(tensor)
    assert array_fingerprint(tensor.view(INTEGER_VIEWS[tensor.element_size()]).numpy()) == referee(
        tensor
    )


def test_chunks_and_strides_do_not_matter(monkeypatch):
    tensor = random_tensor(torch.float32, 6, 5, 4)
    whole = referee(tensor)
    for chunk in (1, 7, 1000):
        monkeypatch.setattr(fingerprint, "CHUNK_ELEMENTS", chunk)
        assert tensor_fingerprint(tensor) == whole
        turned = tensor.permute(2, 0, 1)
        assert tensor_fingerprint(turned) == referee(turned)


@given(st.data(), st.sampled_from([1, 8, 16]))
def test_slices_add_up_to_the_whole(data, unit):
    shape = data.draw(
        st.lists(st.integers(1, 6).map(lambda side: side * unit), min_size=1, max_size=3)
    )
    tensor = random_tensor(torch.bfloat16, *shape, seed=data.draw(st.integers(0, 99)))
    pieces = [(tensor, (0,) * len(shape))]
    for _ in range(data.draw(st.integers(0, 4))):
        piece, starts = pieces.pop(0)
        dim = data.draw(st.integers(0, len(shape) - 1))
        at = data.draw(st.integers(0, piece.shape[dim] // unit)) * unit
        moved = tuple(start + at * (d == dim) for d, start in enumerate(starts))
        pieces += [
            (piece.narrow(dim, 0, at), starts),
            (piece.narrow(dim, at, piece.shape[dim] - at), moved),
        ]
    shares = [int(slice_share(piece, tuple(shape), starts)) for piece, starts in pieces]
    assert sum(shares) & MASK == tensor_fingerprint(tensor)


@given(
    st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64]),
    st.integers(0, 39),
    st.data(),
)
def test_one_flipped_bit_changes_it(dtype, element, data):
    tensor = random_tensor(dtype, 8, 5)
    before = tensor_fingerprint(tensor)
    size = tensor.element_size()
    tensor.view(-1).view(torch.uint8)[element * size + data.draw(st.integers(0, size - 1))] ^= (
        1 << data.draw(st.integers(0, 7))
    )
    assert tensor_fingerprint(tensor) != before


def test_the_order_of_elements_and_of_rows_shows():
    tensor = torch.arange(12.0).reshape(4, 3)
    seen = {
        tensor_fingerprint(t)
        for t in (
            tensor,
            tensor.flip(0),
            tensor.flip(1),
            tensor[[1, 0, 2, 3]],
            tensor.t().contiguous(),
        )
    }
    assert len(seen) == 5


def test_the_number_of_zeros_and_the_sign_of_zero_show():
    assert (
        len({tensor_fingerprint(t) for t in (torch.zeros(3), torch.zeros(4), -torch.zeros(3))}) == 3
    )


def test_complex_tensors_are_refused_with_a_remedy():
    with pytest.raises(ValueError, match="View them as a smaller dtype"):
        tensor_fingerprint(torch.zeros(1, dtype=torch.complex64))


def test_temporaries_stay_small():
    """The chunk is the largest thing made: no operation sees more elements than one chunk."""
    from torch.utils._python_dispatch import TorchDispatchMode

    sizes = []

    class Largest(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            result = function(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor) and result.dtype == torch.int64:
                sizes.append(result.numel())
            return result

    tensor = torch.zeros(3 * fingerprint.CHUNK_ELEMENTS, dtype=torch.bfloat16)
    with Largest():
        tensor_fingerprint(tensor)
    assert max(sizes) == fingerprint.CHUNK_ELEMENTS


def test_the_digest_does_not_depend_on_order_but_on_names_and_values():
    assert digest({"a": 1, "b": 2}) == digest({"b": 2, "a": 1})
    assert (
        len(
            {
                digest(d)
                for d in ({"a": 1, "b": 2}, {"a": 2, "b": 1}, {"a": 1}, {"a": 1, "c": 2}, {})
            }
        )
        == 5
    )
    assert len(digest({})) == 16
