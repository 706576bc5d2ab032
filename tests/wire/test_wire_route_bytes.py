"""Routes in an answer: found, decoded into their place, and marked if absent."""

import base64
import io
import json

import numpy as np
import pytest

from orrery.wire import routed_experts
from orrery.wire.routed_experts import RouteShape, column, split

SHAPE = RouteShape(3, 2, 200)


def answer(rows: np.ndarray, **more) -> bytes:
    file = io.BytesIO()
    np.save(file, rows)
    choice = {
        "index": 0,
        "token_ids": [1, 2],
        "routed_experts": base64.b64encode(file.getvalue()).decode(),
    } | more
    return json.dumps(
        {"request_id": "r", "choices": [choice], "usage": None}, separators=(",", ":")
    ).encode()


def some(num_rows: int, dtype="uint8", seed=0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 200, (num_rows, 3, 2)).astype(dtype)


@pytest.mark.parametrize("dtype", ["uint8", "uint16"])
@pytest.mark.parametrize("piece", [4, 64, 1 << 20])
def test_routes_come_out_as_they_went_in_and_the_rest_of_the_answer_stays(
    monkeypatch, dtype, piece
):
    monkeypatch.setattr(routed_experts, "PIECE", piece)
    rows = some(37, dtype)
    rest, found = split(answer(rows), 5)
    assert json.loads(rest)["choices"][0] == {"index": 0, "token_ids": [1, 2], "routed_experts": ""}
    assert (found.start, found.shape, found.dtype) == (5, rows.shape, rows.dtype)
    shape = RouteShape(3, 2, 200 if dtype == "uint8" else 300)
    np.testing.assert_array_equal(column(42, [found], shape)[5:], rows)


def test_an_answer_without_routes_is_left_alone():
    body = json.dumps(
        {"choices": [{"routed_experts": None, "text": 'a \\"routed_experts\\": \\"'}]}
    ).encode()
    assert split(body, 0) == (body, None)


def test_turns_join_by_position_and_gaps_and_the_last_token_have_no_route():
    first, second = some(7), some(4, seed=1)
    parts = [split(answer(first), 0)[1], split(answer(second), 9)[1]]
    whole = column(14, parts, SHAPE)
    assert whole.shape == (14, 3, 2) and whole.dtype == np.uint8
    np.testing.assert_array_equal(whole[:7], first)
    np.testing.assert_array_equal(whole[9:13], second)
    assert (whole[[7, 8, 13]] == SHAPE.no_route).all()


def test_layers_without_experts_are_left_out_and_one_byte_may_become_two():
    rows = some(6)
    part = split(answer(rows), 0)[1]
    np.testing.assert_array_equal(column(7, [part], RouteShape(2, 2, 256, 1))[:6], rows[:, 1:])
    whole = column(7, [part], RouteShape(2, 2, 300, 1))
    assert (
        whole.dtype == np.uint16 and (whole[:6] == rows[:, 1:]).all() and (whole[6] == 65535).all()
    )


@pytest.mark.parametrize(
    "parts",
    [
        [(some(5), 10)],
        [(some(5), 0), (some(5, "uint16"), 5)],
        [(some(5)[:, :2], 0)],
        [(some(5)[:, :, :1], 0)],
    ],
    ids=["beyond the end", "too many experts", "too few layers", "too few experts a token"],
)
def test_parts_that_are_not_of_this_model_and_these_tokens_are_refused(parts):
    with pytest.raises(
        ValueError,
        match="has 14 tokens, and the model 3 layers with experts, 2 experts per token",
    ):
        column(14, [split(answer(rows), start)[1] for rows, start in parts], SHAPE)


@pytest.mark.parametrize(
    "text",
    [
        b"AAAA",
        base64.b64encode(b"\x93NUMPY\x02\x00"),
        base64.b64encode(b"no numpy file at all, whatever it may be"),
    ],
)
def test_what_is_no_npy_file_is_refused(text):
    with pytest.raises(ValueError):
        split(b'{"routed_experts": "' + text + b'"}', 0)


def test_a_cut_or_foreign_array_is_refused():
    for rows in (some(5, "int32"), some(5)[:, 0]):
        with pytest.raises(ValueError, match="not uint8 or uint16"):
            split(answer(rows), 0)
    body = answer(some(50))
    with pytest.raises(ValueError, match="not uint8 or uint16"):
        split(body.replace(body[400:420], b"", 1), 0)


def test_damage_inside_the_text_is_found_when_it_is_decoded():
    body = bytearray(answer(some(500)))
    body[3000] = ord("*")
    _, found = split(bytes(body), 0)
    with pytest.raises(ValueError):
        column(501, [found], SHAPE)
