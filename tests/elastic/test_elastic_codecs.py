"""The contract of every codec, in native code and in numpy."""

import numpy as np
import pytest

from orrery.elastic.codecs import CODECS, base, codec
from orrery.elastic.types import ElasticError

KINDS = list(CODECS)
SIZES = [0, 1, 2, 63, 64, 65, 255, 256, 257, 4095, 4096, 4160, 65_535, 65_537, 140_001]
ERRORS = {  # most relative L2 error of Gaussian values; int8: a twelfth of a step of 6σ or absmax
    "float32": 0.0,
    "int8_block": 0.008,
    "int8_codebook": 0.015,
    "int4_block": 0.14,
    "top_k_2bit": 0.96,
}


def values(n: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(n).astype(np.float32) * np.float32(1e-3)


def decoded(coder, x):
    out = np.full(x.size, np.nan, np.float32)
    coder.decode(coder.encode(x), out)
    return out


@pytest.fixture(params=[True, False], ids=["native", "numpy"])
def is_native(request):
    if request.param and base.library() is None:
        pytest.skip("no g++ here")
    return request.param


@pytest.fixture(params=KINDS)
def coder(request, is_native):
    return CODECS[request.param](native=is_native)


@pytest.mark.parametrize("n", SIZES)
def test_the_number_of_values_fixes_the_number_of_bytes(coder, n):
    x = values(n)
    before = x.copy()
    wire = coder.encode(x)
    assert wire.dtype == np.uint8 and len(wire) == coder.wire_bytes(n)
    assert np.isfinite(decoded(coder, x)).all()
    assert (x == before).all()


def test_the_error_stays_within_the_kinds_bound(coder):
    x = values(1_000_003)
    error = np.linalg.norm(decoded(coder, x) - x) / np.linalg.norm(x)
    assert error <= ERRORS[coder.kind]
    assert coder.kind == "float32" or error > 0.5 * ERRORS[coder.kind]  # the bound is close


def test_int8_costs_at_most_a_quarter_and_a_fortieth():
    for kind in ("int8_block", "int8_codebook"):
        assert 4 * 10**6 / codec(kind).wire_bytes(10**6) >= 3.9


@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_adding_is_decoding_then_adding(coder, scale):
    x, acc = values(70_001), values(70_001, seed=1)
    expected = acc + decoded(coder, x) * np.float32(scale)
    coder.decode_add(coder.encode(x), acc, scale)
    assert (acc == expected).all()


@pytest.mark.parametrize("n", [0, 257, 140_001])
@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("is_added", [True, False])
def test_a_coded_sum_has_the_bits_of_its_steps(coder, n, share, is_added):
    x, added = values(n), coder.encode(values(n, seed=1)) if is_added else None
    expected = x * np.float32(share) if share else np.zeros_like(x)
    if added is not None:
        coder.decode_add(added, expected)
    wire = coder.encode_sum(x, share, added, np.empty(coder.wire_bytes(n), np.uint8))
    assert wire.tobytes() == coder.encode(expected).tobytes()


def test_zeros_and_tiny_values_decode_to_zero(coder):
    for fill in (0.0, -0.0, 1e-40):
        x = np.full(70_000, fill, np.float32)
        assert (decoded(coder, x) == (x if coder.kind == "float32" else 0)).all()


def test_zeros_among_values_stay_zeros(coder):
    x = np.zeros(4096, np.float32)
    x[[3, 700, 4095]] = 1.0, -2.0, 3.0
    assert (decoded(coder, x)[x == 0] == 0).all()


def test_a_block_of_one_value_is_exact_to_a_rounding(coder):
    for each in (1.0, -3e-7, 2.0**99):
        (out,) = decoded(coder, np.array([each], np.float32))
        assert out == pytest.approx(each, rel=1e-6)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e31])
def test_values_without_a_code_are_refused_by_place(coder, bad):
    x = values(70_001)
    x[66_000] = bad
    with pytest.raises(ElasticError, match="value 66000 of 70001 is"):
        coder.encode(x)


def test_bytes_of_another_size_are_refused(coder):
    wire = coder.encode(values(1000))
    with pytest.raises(ElasticError, match="bytes arrived for 1000 values"):
        coder.decode(wire[:-1], np.empty(1000, np.float32))


def test_bytes_at_any_offset_decode(coder):
    x = values(5001)
    wire = coder.encode(x)
    shifted = np.empty(len(wire) + 3, np.uint8)
    shifted[3:] = wire
    out = np.empty_like(x)
    coder.decode(shifted[3:], out)
    assert (out == decoded(coder, x)).all()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n", SIZES)
def test_native_code_has_the_bits_of_numpy(kind, n):
    if base.library() is None:
        pytest.skip("no g++ here")
    spread = np.random.default_rng(n).standard_t(1.5, n).astype(np.float32)  # heavy tails
    spread[: n // 3] *= np.float32(1e-20)
    spread[n // 2 : n // 2 + 300] = spread[n // 2 : n // 2 + 1]  # ties
    fast, plain = CODECS[kind](num_threads=2), CODECS[kind](native=False)
    wire = fast.encode(spread)
    assert (wire == plain.encode(spread)).all()
    results = [np.full(n, -0.0, np.float32) for _ in range(4)]
    fast.decode(wire, results[0])
    plain.decode(wire, results[1])
    fast.decode_add(wire, results[2], 0.7)
    plain.decode_add(wire, results[3], 0.7)
    bits = [each.view(np.uint32) for each in results]
    assert (bits[0] == bits[1]).all() and (bits[2] == bits[3]).all()


@pytest.mark.parametrize("kind", KINDS)
def test_the_number_of_threads_does_not_change_bytes(kind):
    x = values(1_200_001)
    assert (codec(kind, num_threads=3).encode(x) == codec(kind).encode(x)).all()


def test_without_a_compiler_numpy_runs_and_says_so(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    base.library.cache_clear()
    try:
        wire = codec("int8_block").encode(values(1000))
        assert "numpy runs instead" in caplog.text
    finally:
        base.library.cache_clear()
    assert (wire == CODECS["int8_block"](native=False).encode(values(1000))).all()


def test_an_unknown_kind_is_named():
    with pytest.raises(ElasticError, match="'int3' is unknown"):
        codec("int3")
