"""Copies out of a bucket into layers: few of them, and the same elements in the same places as a
copy a slice would put there.
"""

import logging

import pytest
import torch
from vllm.model_executor.layers.vocab_parallel_embedding import (
    ParallelLMHead,
    VocabParallelEmbedding,
)

from orrery.inference import loading
from orrery.inference.loading import WORD, Destination, Loading, Needs, runs
from orrery.inference.patches.vllm import (
    has_stale_head,
    say_nothing_of_rounding,
    say_nothing_of_unloaded,
)
from orrery.wire.weight_wire.plan import Slice, TensorInfo, in_bucket, shape_of


def experts(number, rows, columns):
    """(needs, tensors): gate, up and down of each expert, as vLLM stacks them in `w13` and `w2` of
    one layer.
    """
    needs, tensors = Needs(), {}
    for expert in range(number):
        for place, name in enumerate(("gate", "up")):
            whole = f"experts.{expert}.{name}"
            tensors[whole] = TensorInfo(whole, (rows, columns), "bfloat16")
            offset = (2 * expert + place) * rows * columns
            needs.destinations[whole] = [
                Destination(whole, ((0, rows), (0, columns)), "moe", "w13", offset, (columns, 1))
            ]
        whole = f"experts.{expert}.down"
        tensors[whole] = TensorInfo(whole, (columns, rows), "bfloat16")
        offset = expert * columns * rows
        needs.destinations[whole] = [
            Destination(whole, ((0, columns), (0, rows)), "moe", "w2", offset, (rows, 1))
        ]
    return needs, tensors


def packed(tensors, boxes=None):
    """Slices of whole tensors, or of `boxes`, one after the other at multiples of 16 bytes; and a
    bucket full of numbers.
    """
    slices, offset = [], 0
    for name, tensor in tensors.items():
        for box in (boxes or {}).get(name, [tuple((0, size) for size in tensor.shape)]):
            slices.append(Slice(name, box, offset))
            offset += -(-2 * torch.Size(shape_of(box)).numel() // 16) * 16
    return slices, torch.randint(
        0, 256, (offset,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0)
    )


def plainly(slices, needs, bucket, into):
    """A copy a slice."""
    for name, box, begin in slices:
        [to] = needs.destinations[name]
        of = in_bucket(bucket, begin, shape_of(box), torch.bfloat16)
        offset = to.offset + sum(
            start * stride for (start, _), stride in zip(box, to.strides, strict=True)
        )
        into[to.parameter].as_strided(shape_of(box), to.strides, offset).copy_(of)


@pytest.mark.parametrize(
    ("number", "rows", "columns", "copies", "in_words"),
    [(6, 4, 16, 2, True), (5, 3, 7, 6, False), (1, 4, 16, 2, False)],
    ids=["words", "gate and up apart", "one expert"],
)
def test_experts_at_even_distances_are_one_copy_a_parameter(
    monkeypatch, number, rows, columns, copies, in_words
):
    needs, tensors = experts(number, rows, columns)
    slices, bucket = packed(tensors)
    found = runs(slices, needs, tensors)
    # Gate and up are adjacent in a bucket if their sizes are multiples of its alignment.
    assert len(found) == copies
    assert all((run.in_words.dtype == WORD) == in_words for run in found)
    check(monkeypatch, needs, tensors, slices, bucket, found)


def test_parts_of_tensors_and_gaps_between_experts_go_where_they_belong(monkeypatch):
    needs, tensors = experts(7, 4, 8)
    boxes = {
        "experts.1.gate": [((0, 1), (0, 8)), ((1, 4), (0, 8))],
        "experts.5.down": [((0, 8), (0, 2)), ((0, 8), (2, 4))],
    }
    # `one` comes last.
    order = dict(sorted(tensors.items(), key=lambda item: item[0] == "experts.2.up"))
    slices, bucket = packed(order, boxes)
    check(monkeypatch, needs, tensors, slices, bucket, runs(slices, needs, tensors))


def check(monkeypatch, needs, tensors, slices, bucket, found):
    sizes = {"w13": 0, "w2": 0}
    for each in needs.destinations.values():
        sizes[each[0].parameter] += torch.Size(shape_of(each[0].box)).numel()
    expected = {name: torch.zeros(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    plainly(slices, needs, bucket, expected)
    layer = torch.nn.Module()
    for name, size in sizes.items():
        layer.register_parameter(
            name, torch.nn.Parameter(torch.zeros(size, dtype=torch.bfloat16), requires_grad=False)
        )
    processed = []
    monkeypatch.setattr(loading, "materialize_layer", lambda layer, info: None)
    monkeypatch.setattr(
        loading.layerwise, "_layerwise_process", lambda layer, info: processed.append(layer)
    )
    one = Loading(torch.nn.ModuleDict({"moe": layer}), needs)
    one.load(found, bucket)
    one.check()
    assert processed == [layer]
    for name, values in expected.items():
        assert torch.equal(getattr(layer, name).view(torch.int16), values.view(torch.int16)), name


def module(kind, weight=None):
    made = kind.__new__(kind)
    torch.nn.Module.__init__(made)
    if weight is not None:
        made.weight = torch.nn.Parameter(weight)
    return made


def test_a_head_is_stale_where_it_does_not_share_the_embeddings_weight():
    embedding, head = (
        module(kind, torch.zeros(4, 2)) for kind in (VocabParallelEmbedding, ParallelLMHead)
    )
    model = torch.nn.ModuleList([embedding, head])
    assert has_stale_head(model)
    head.weight = embedding.weight
    assert not has_stale_head(model)


def test_vllm_does_not_warn_of_float32_weights_that_it_rounds(caplog):
    log = logging.getLogger("vllm.model_executor.models.utils")
    before, text = list(log.filters), "Attempted to load weight %s with dtype %s into %s"
    say_nothing_of_rounding()
    try:
        log.warning(text, "a", torch.float32, torch.bfloat16)
        log.warning(text, "b", torch.int8, torch.bfloat16)
        log.warning("another matter")
    finally:
        log.filters[:] = before
    said = ["Attempted to load weight b with dtype torch.int8 into torch.bfloat16"]
    assert caplog.messages == [*said, "another matter"]


@pytest.mark.parametrize(
    ("is_tied", "said"), [(True, ["Linear"]), (False, ["Linear", "ParallelLMHead"])]
)
def test_vllm_warns_of_layers_that_should_have_been_loaded_alone(is_tied, said, caplog):
    kinds = (torch.nn.Linear, torch.nn.ReLU, ParallelLMHead)
    model = torch.nn.ModuleList(
        [torch.nn.Linear(1, 1), torch.nn.ReLU(), module(ParallelLMHead, torch.zeros(4, 2))]
    )
    log = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    with say_nothing_of_unloaded(model, is_tied):
        for kind in kinds:
            log.warning("%s: Failed to load weights", kind.__name__)
        log.warning("another matter")
    log.warning("%s: Failed to load weights", "ReLU")
    assert caplog.messages == [
        *(f"{name}: Failed to load weights" for name in said),
        "another matter",
        "ReLU: Failed to load weights",
    ]
