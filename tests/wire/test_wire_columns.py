"""Columns against plain Python lists of samples."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from wire_documents import documents, same

from orrery.wire.columns import Columns, chunks, columns_from, layout_of, segments

lengths_of = st.lists(st.integers(0, 12), max_size=8)


@given(lengths_of, st.data())
def test_selecting_is_concatenating_the_chosen_documents(lengths, data):
    parts = documents(lengths)
    chosen = data.draw(
        st.lists(st.integers(0, len(parts) - 1), max_size=8) if parts else st.just([])
    )
    whole = Columns.concatenate(parts)
    expected = Columns.concatenate([parts[i] for i in chosen])
    assert same(whole.select(chosen), expected) or not chosen
    assert whole.select(chosen).num_samples == len(chosen)


@given(lengths_of, st.integers(1, 200))
def test_the_bytes_of_parts_are_the_columns_of_their_concatenation(lengths, chunk_bytes):
    parts = documents(lengths)
    layout = layout_of(parts)
    run = b"".join(chunks(segments(parts, layout), chunk_bytes))
    assert len(run) == layout.num_bytes
    assert same(columns_from(layout, np.frombuffer(run, np.uint8)), Columns.concatenate(parts))


def test_every_slot_is_aligned_to_its_dtype():
    layout = layout_of(documents([3, 5, 2]))
    for slot in layout.slots:
        assert slot.start % np.dtype(slot.dtype).itemsize == 0, slot


def test_large_segments_are_not_copied():
    parts = documents([100_000, 50_000])
    run = list(chunks(segments(parts, layout_of(parts)), 1 << 20))
    shared = [
        chunk
        for chunk in run
        for part in parts
        if np.shares_memory(np.frombuffer(chunk, np.uint8), part.token["routed_experts"])
    ]
    assert sum(map(len, shared)) == 150_000 * 6


def test_parts_with_different_columns_are_refused_by_name():
    left, right = documents([2, 2])
    del right.token["logprob"]
    for join in (layout_of, Columns.concatenate):
        with pytest.raises(ValueError, match="logprob"):
            join([left, right])


def test_parts_that_disagree_on_an_opaque_shape_are_refused():
    with pytest.raises(ValueError, match="routed_experts"):
        layout_of([documents([2])[0], documents([2], opaque=4)[0]])


def test_python_objects_are_refused():
    with pytest.raises(ValueError, match="has the unsupported dtype"):
        layout_of(Columns(np.array([0, 1]), {"text": np.array(["a"], dtype=object)}))


def test_wrong_dtypes_and_lengths_are_refused():
    with pytest.raises(ValueError, match="float64"):
        Columns(np.array([0, 1]), {"logprob": np.zeros(1)})
    with pytest.raises(ValueError, match="2 rows, expected 1"):
        Columns(np.array([0, 1]), {"other": np.zeros(2)})
    with pytest.raises(ValueError, match="offsets"):
        Columns(np.array([0, 2, 1]))


@given(st.data())
def test_a_damaged_layout_never_reads_outside_the_buffer(data):
    layout = layout_of(documents([4, 3]))
    at = data.draw(st.integers(0, len(layout.slots) - 1))
    slot = layout.slots[at]
    change = data.draw(
        st.sampled_from(
            [
                {"start": slot.start + 1},
                {"shape": (1 << 40, *slot.shape[1:])},
                {"shape": (-1,)},
                {"dtype": "|O"},
                {"kind": "other"},
            ]
        )
    )
    fields = {name: getattr(slot, name) for name in slot.__struct_fields__} | change
    slots = (*layout.slots[:at], type(slot)(**fields), *layout.slots[at + 1 :])
    with pytest.raises(ValueError):
        columns_from(type(layout)(slots, layout.num_bytes), np.zeros(layout.num_bytes, np.uint8))
