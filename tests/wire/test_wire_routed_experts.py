"""Routes: the checks of a batch's routed experts."""

import numpy as np
import pytest

from orrery.manifest.errors import RunFailed
from orrery.wire.columns import Columns, read_batch, write_batch
from orrery.wire.routed_experts import RouteShape, check_routes, without_routes

SMALL, BYTE, LARGE = RouteShape(3, 2, 8), RouteShape(3, 2, 256), RouteShape(3, 2, 300)


def routes(shape, num_tokens=6, seed=0):
    return (
        np.random.default_rng(seed)
        .integers(0, shape.num_experts, (num_tokens, shape.num_layers, shape.top_k))
        .astype(shape.dtype)
    )


@pytest.mark.parametrize("shape", [SMALL, RouteShape(3, 2, 255), BYTE, LARGE])
def test_missing_routes_are_told_from_those_that_are_there(shape):
    column = routes(shape)
    column[2, 1] = shape.num_experts - 1, 0
    expected = column.astype(np.int64)
    column[1, 2] = column[4] = shape.no_route
    ids, is_missing, num_routed = check_routes(column, shape, "batch 1")
    assert (
        is_missing.tolist() == [False, True, False, False, True, False] and num_routed == 6 * 3 - 4
    )
    is_expert = (ids >= 0) & (ids < shape.num_experts)
    assert (
        not is_expert[1, 2].any() and not is_expert[4].any() and is_expert.sum() == 2 * num_routed
    )
    assert np.array_equal(ids[is_expert], expected[is_expert])
    assert (
        check_routes(routes(shape, seed=1) % (shape.num_experts - 1), shape, "batch 1").num_routed
        == 18
    )


def test_an_engine_may_tell_of_dense_layers_too():
    shape = SMALL._replace(num_dense_layers=2)
    column = routes(shape)
    checked = check_routes(
        np.concatenate([np.full((6, 2, 2), 99, np.uint8), column], axis=1), shape, "batch 1"
    )
    assert np.array_equal(checked.ids, column) and checked.num_routed == 18


@pytest.mark.parametrize("slots", [[8, 1], [200, 255], [255, 3]])
def test_an_expert_that_the_model_does_not_have_is_named_with_its_token_and_layer(slots):
    column = routes(SMALL)
    column[0] = 255
    column[4, 1] = slots
    says = (
        rf"batch 7, groups 3: routed_experts of token 4 in layer 1 is \[{slots[0]}, {slots[1]}\]; "
        r"experts are 0 to 7, .* is 255 in all 2"
    )
    with pytest.raises(RunFailed, match=says):
        check_routes(column, SMALL, "batch 7, groups 3")


@pytest.mark.parametrize(
    "column",
    [np.zeros((6, 2, 2), np.uint8), np.zeros((6, 3, 4), np.uint8), np.zeros((6, 3, 2), np.uint16)],
)
def test_routes_of_another_model_are_refused(column):
    with pytest.raises(
        RunFailed,
        match=r"batch 7: .* this model has 8 experts in each of 3 layers, 2 per token, "
        r"and needs uint8 \[tokens, 3, 2\]",
    ):
        check_routes(column, SMALL, "batch 7")


def test_what_an_engine_did_not_say_takes_no_memory_and_is_stored_with_the_rest(tmp_path):
    nothing = without_routes(1_000_000, LARGE)
    assert nothing.strides == (0, 0, 0) and nothing.base.nbytes == 2
    said = routes(LARGE)
    documents = [
        Columns(np.array([0, len(column)]), {"routed_experts": column})
        for column in (said, nothing[:4])
    ]
    write_batch(tmp_path, 3, documents)
    columns, _ = read_batch(tmp_path, 3)
    column = columns.token["routed_experts"]
    assert column.dtype == np.uint16 and np.array_equal(column[:6], said)
    assert check_routes(column, LARGE, "batch 3").is_missing.tolist() == [False] * 6 + [True] * 4
