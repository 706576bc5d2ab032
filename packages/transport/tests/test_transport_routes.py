"""Routes: what a batch says of experts, told right from wrong in one look."""

import numpy as np
import pytest

from orrery.manifest.errors import RunFailed
from orrery.transport.columns import Columns
from orrery.transport.rollout_store import read_batch, write_batch
from orrery.transport.routes import RouteShape, check_routes, without_routes

SMALL, LARGE = RouteShape(3, 2, 8), RouteShape(3, 2, 256)


def routes(shape, num_tokens=6, seed=0):
    return np.random.default_rng(seed).integers(0, shape.num_experts, (num_tokens, shape.num_layers, shape.top_k)).astype(shape.dtype)


@pytest.mark.parametrize("shape", [SMALL, LARGE, RouteShape(3, 2, 255)])
def test_missing_routes_are_told_from_those_that_are_there(shape):
    column = routes(shape)
    column[1, 2] = column[4] = shape.no_route
    is_missing, num_routed = check_routes(column, shape, "batch 1")
    assert is_missing.tolist() == [False, True, False, False, True, False] and num_routed == 6 * 3 - 4
    assert check_routes(routes(shape), shape, "batch 1")[1] == 18


def test_a_number_of_two_bytes_says_that_a_route_is_missing_where_experts_need_all_of_one_byte():
    assert (RouteShape(1, 1, 255).dtype, RouteShape(1, 1, 256).dtype) == (np.uint8, np.uint16)
    column = np.full((1, 3, 2), 255, dtype=np.uint16)  # an expert, not a route that is missing
    assert check_routes(column, LARGE, "batch 1") == (np.array([False]), 3)


@pytest.mark.parametrize("slots", [[8, 1], [200, 255], [255, 3]])
def test_an_expert_that_the_model_does_not_have_is_named_with_its_token_and_layer(slots):
    column = routes(SMALL)
    column[0] = 255
    column[4, 1] = slots
    says = rf"batch 7, groups 3: routed_experts of token 4 in layer 1 is \[{slots[0]}, {slots[1]}\]; experts are 0 to 7, .* is 255 in all 2"
    with pytest.raises(RunFailed, match=says):
        check_routes(column, SMALL, "batch 7, groups 3")


@pytest.mark.parametrize("column", [np.zeros((6, 2, 2), np.uint8), np.zeros((6, 3, 4), np.uint8), np.zeros((6, 3, 2), np.uint16)])
def test_routes_of_another_model_are_refused(column):
    with pytest.raises(
        RunFailed, match=r"batch 7: .* this model has 8 experts in each of 3 layers, 2 a token, and wants uint8 \[tokens, 3, 2\]"
    ):
        check_routes(column, SMALL, "batch 7")


def test_what_an_engine_did_not_say_takes_no_memory_and_is_stored_with_the_rest(tmp_path):
    nothing = without_routes(1_000_000, LARGE)
    assert nothing.strides == (0, 0, 0) and nothing.base.nbytes == 2
    said = routes(LARGE)
    documents = [Columns(np.array([0, len(column)]), {"routed_experts": column}) for column in (said, nothing[:4])]
    write_batch(tmp_path, 3, documents)
    columns, _ = read_batch(tmp_path, 3)
    column = columns.token["routed_experts"]
    assert column.dtype == np.uint16 and np.array_equal(column[:6], said)
    assert check_routes(column, LARGE, "batch 3")[0].tolist() == [False] * 6 + [True] * 4
