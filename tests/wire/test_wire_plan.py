"""The plan of slices: every needed element comes exactly once, in bounded rounds."""

import math
import re
from collections import defaultdict
from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orrery.manifest.errors import OrreryError
from orrery.wire.weight_wire.plan import (
    ALIGNMENT_BYTES,
    PIECES_A_BUCKET,
    cut,
    intersection,
    pieces,
    plan_moves,
    schedule,
    volume,
)


def parts(size, number):
    step = -(-size // number)
    return [(min(step * i, size), min(step * (i + 1), size)) for i in range(number)]


@st.composite
def layouts(draw):
    """Draw (shapes, holdings, needs); each side shards each tensor along any dimension."""
    num_shards, replicas, num_targets = (
        draw(st.integers(1, 4)),
        draw(st.integers(1, 2)),
        draw(st.integers(1, 4)),
    )
    shapes, holdings, needs = (
        {},
        [{} for _ in range(num_shards * replicas)],
        [{} for _ in range(num_targets)],
    )
    for index in range(draw(st.integers(1, 5))):
        name, shape = f"t{index}", tuple(draw(st.lists(st.integers(1, 9), max_size=3)))
        shapes[name] = shape
        whole = tuple((0, size) for size in shape)
        for side, number in ((holdings, num_shards), (needs, num_targets)):
            dim = draw(st.integers(0, len(shape) - 1)) if shape and draw(st.booleans()) else None
            for rank, held in enumerate(side):
                box = (
                    whole
                    if dim is None
                    else (*whole[:dim], parts(shape[dim], number)[rank % number], *whole[dim + 1 :])
                )
                if volume(box):
                    held[name] = box if side is holdings else (box,)
    return shapes, holdings, needs


def elements(box):
    return product(*(range(start, stop) for start, stop in box))


@settings(max_examples=60, deadline=None)
@given(layouts(), st.sampled_from([64, 256, 4096]), st.sampled_from([1, 2, 4]))
def test_every_needed_element_comes_exactly_once_from_who_holds_it_in_bounded_rounds(
    layout, bucket_bytes, size
):
    shapes, holdings, needs = layout
    itemsize = dict.fromkeys(shapes, size)
    rounds = schedule(plan_moves(list(shapes), holdings, needs, itemsize), itemsize, bucket_bytes)
    arrived = defaultdict(int)
    for messages in rounds:
        sent, received = defaultdict(int), defaultdict(int)
        for (source, target), message in messages.items():
            assert (message.source_offset, message.target_offset) == (
                sent[source],
                received[target],
            )
            end = 0
            for name, box, offset in message.slices:
                assert intersection(box, holdings[source][name]) == box, (
                    "sent by who does not hold it"
                )
                assert offset >= end and offset % ALIGNMENT_BYTES == 0
                end = offset + volume(box) * size
                assert end - offset <= max(bucket_bytes // PIECES_A_BUCKET, size)
                for element in elements(box):
                    arrived[target, name, element] += 1
            assert end <= message.num_bytes
            sent[source] += message.num_bytes
            received[target] += message.num_bytes
        assert max([*sent.values(), *received.values()]) <= bucket_bytes
    expected = {
        (t, name, e)
        for t, wanted in enumerate(needs)
        for name, boxes in wanted.items()
        for box in boxes
        for e in elements(box)
    }
    assert arrived == dict.fromkeys(expected, 1)


@given(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple), st.integers(2, 64))
def test_a_box_is_cut_into_parts_that_tile_it(shape, max_bytes):
    found = list(cut(tuple((0, size) for size in shape), 2, max_bytes))
    assert sum(map(volume, found)) == math.prod(shape) and len(
        {e for box in found for e in elements(box)}
    ) == math.prod(shape)
    assert all(volume(box) * 2 <= max_bytes for box in found)


def test_replicas_share_the_sending():
    whole = ((0, 8),)
    moves = plan_moves(
        ["a", "b"],
        [{"a": whole, "b": whole}] * 2,
        [{"a": (whole,), "b": (whole,)}],
        {"a": 4, "b": 4},
    )
    assert [move.source for move in moves] == [0, 1]


def test_ranks_that_have_nothing_to_do_with_one_another_do_not_wait_for_one_another():
    """Experts of rank 1 are in the first round too, though rank 0's experts fill buckets."""
    names, whole = [f"e{e}" for e in range(8)], ((0, 4), (0, 4))
    sides = [{name: whole for name in names[:4]}, {name: whole for name in names[4:]}]
    needs = [{name: (box,) for name, box in side.items()} for side in sides]
    rounds = schedule(
        plan_moves(names, sides, needs, dict.fromkeys(names, 4)),
        dict.fromkeys(names, 4),
        64 * PIECES_A_BUCKET,
    )
    assert set(rounds[0]) == {(0, 0), (1, 1)} and len(rounds) == 1


@pytest.mark.parametrize(
    ("boxes", "overlapping"),
    [
        ([((0, 3),), ((2, 4),)], "[(0, 3)] and [(2, 4)]"),  # as many doubled as missing elements
        ([((0, 1), (0, 5)), ((0, 2), (0, 3))], "[(0, 1), (0, 5)] and [(0, 2), (0, 3)]"),
        ([((0, 9), (0, 1)), ((1, 2), (1, 5)), ((3, 4), (0, 2))], "[(0, 9), (0, 1)] and"),
    ],
)
def test_parts_of_two_ranks_that_overlap_are_named(boxes, overlapping):
    need = tuple((0, 5) for _ in boxes[0])
    with pytest.raises(OrreryError, match=re.escape(overlapping)):
        plan_moves(["a"], [{"a": box} for box in boxes], [{"a": (need,)}], {"a": 4})


def test_what_nobody_holds_and_what_an_engine_lacks_is_named():
    with pytest.raises(OrreryError, match=r"engine rank 0 needs .* of tensor 'a'"):
        plan_moves(["a"], [{"a": ((0, 3),)}], [{"a": (((0, 4),),)}], {"a": 4})
    assert pieces(["a"], {"a": (4,)}, [{"a": (((0, 2),),)}, {"a": (((2, 4),),)}]) == [
        ("a", ((0, 2),)),
        ("a", ((2, 4),)),
    ]
    with pytest.raises(
        OrreryError, match=r"the 1 boxes of tensor 'a' .* have 2 elements, but the tensor has 4"
    ):
        pieces(["a"], {"a": (4,)}, [{"a": (((0, 2),),)}])
