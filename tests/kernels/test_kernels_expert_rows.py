"""Rows to expert order and back, and the activation between, against the reference_

The Triton backend runs on a GPU, or with TRITON_INTERPRET=1 on a CPU in its interpreter.
"""

import pytest
import torch
from triton_marks import DEVICE, TRITON

from orrery.kernels.expert_rows import (
    combine_rows,
    gather_rows,
    order_slots,
    reference_combine_rows,
    reference_gather_rows,
    reference_order_slots,
    reference_swiglu_rows,
    sort_by_expert,
    swiglu_rows,
)

BACKENDS = pytest.mark.parametrize("backend", ["aten", TRITON])


def routes(num_tokens=13, num_slots=3, num_experts=5, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.rand(num_tokens, num_experts, generator=generator)
        .argsort(1)[:, :num_slots]
        .to(DEVICE)
    )


def random(*shape, dtype=torch.float32, seed=1):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(DEVICE, dtype)


def outcome(op, *inputs):
    """Output and gradients of a random linear loss, with weights exact in every dtype here."""
    inputs = [x.clone().requires_grad_() if isinstance(x, torch.Tensor) else x for x in inputs]
    out = op(*inputs)
    out.backward(random(*out.shape, dtype=torch.bfloat16, seed=7).to(out.dtype))
    return [out.detach(), *(x.grad for x in inputs if isinstance(x, torch.Tensor))]


def assert_all_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert (
            a.shape == e.shape and (a.double() - e.double()).norm() <= tolerance * e.double().norm()
        )


@pytest.mark.parametrize("num_experts", [5, 300])
@pytest.mark.parametrize("num_tokens", [0, 1, 40])
def test_rows_stand_by_expert_and_then_by_slot_and_places_are_the_inverse(num_tokens, num_experts):
    expert = routes(num_tokens, num_experts=num_experts)
    rows = sort_by_expert(expert, num_experts)
    slots = sorted(range(3 * num_tokens), key=lambda slot: (expert.flatten()[slot].item(), slot))
    assert rows.row_M.tolist() == slots
    assert (
        rows.place_TK.flatten()[rows.row_M].tolist() == list(range(3 * num_tokens))
        and rows.place_TK.shape == expert.shape
    )
    assert (
        rows.ends_E.tolist()
        == torch.bincount(expert.flatten(), minlength=num_experts).cumsum(0).tolist()
    )
    assert rows.ends_E.dtype == torch.int32


@pytest.mark.parametrize("num_experts", [4, 255, 256])
def test_slots_that_go_nowhere_stand_last_beyond_the_ends(num_experts):
    expert = torch.tensor([[num_experts], [0], [num_experts], [num_experts - 1]], device=DEVICE)
    rows = sort_by_expert(expert, num_experts)
    assert rows.row_M.tolist() == [1, 3, 0, 2] and rows.ends_E[-1].item() == 2


@pytest.mark.parametrize(
    "backend", ["aten", "triton"]
)  # the operators of "triton" run plain operations where Triton cannot
def test_slots_without_a_row_count_as_zeros(backend):
    every = sort_by_expert(torch.tensor([[5, 0, 1], [4, 5, 5], [2, 5, 0]], device=DEVICE), 5)
    place = torch.where(every.place_TK < 5, every.place_TK, -1)
    rows = every._replace(row_M=every.row_M[:6], place_TK=place)
    x, score, y, grad = random(3, 4), random(3, 3), random(6, 4), random(6, 4, seed=3)
    y[5] = grad[5] = torch.nan  # a row without a slot
    expected = outcome(lambda y: reference_combine_rows(y, rows), y)
    found = outcome(lambda y: combine_rows(y, rows, backend), y)
    assert found[0].isfinite().all()
    assert_all_close([each[:5] for each in found], [each[:5] for each in expected], 1e-6)
    leaves = [x.requires_grad_(), score.requires_grad_()]
    out = gather_rows(x, rows, backend)
    assert torch.equal(out[:5], reference_gather_rows(x, rows)[:5])
    gradients = torch.autograd.grad(
        [out, order_slots(score, rows)], leaves, [grad, grad[:, 0].contiguous()]
    )
    wanted = reference_combine_rows(grad, rows), torch.where(place < 0, 0, grad[:, 0][place])
    assert_all_close(gradients, wanted, 1e-6)


# One rounding of float32 sums in another order: bfloat16's half unit in the last place is 2⁻⁹.
DTYPES = pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 2**-8)]
)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("width", [16, 20, 4100])
def test_gathered_and_combined_rows_and_their_gradients_equal_the_reference(
    backend, dtype, tolerance, width
):
    rows = sort_by_expert(routes(), 5)
    x, y = random(13, width, dtype=dtype), random(39, width, dtype=dtype)
    for op, expected_op, value in (
        (gather_rows, reference_gather_rows, x),
        (combine_rows, reference_combine_rows, y),
    ):
        expected = outcome(lambda value, op=expected_op: op(value, rows), value.double())
        actual = outcome(lambda value, op=op: op(value, rows, backend), value)
        assert actual[0].dtype == dtype
        assert_all_close(actual, expected, tolerance)


def test_ordered_slots_and_their_gradients_equal_the_reference():
    rows, score = sort_by_expert(routes(), 5), random(13, 3)
    expected = outcome(lambda score: reference_order_slots(score, rows), score)
    assert_all_close(outcome(lambda score: order_slots(score, rows), score), expected, 0)


@BACKENDS
@DTYPES
@pytest.mark.parametrize("width", [16, 20, 2052])
def test_the_scored_activation_and_its_gradients_equal_the_reference(
    backend, dtype, tolerance, width
):
    gate_up, score = random(9, 2 * width, dtype=dtype), random(9, seed=2)
    expected = outcome(reference_swiglu_rows, gate_up.double(), score.double())
    actual = outcome(lambda gate_up, score: swiglu_rows(gate_up, score, backend), gate_up, score)
    assert actual[0].dtype == dtype and actual[2].dtype == torch.float32
    assert_all_close(actual, expected, tolerance)


def test_float64_passes_gradcheck():
    rows = sort_by_expert(routes(4), 5)
    double = {"dtype": torch.float64}
    for op, inputs in (
        (lambda x: gather_rows(x, rows, "aten"), (random(4, 2, **double),)),
        (lambda y: combine_rows(y, rows, "aten"), (random(12, 2, **double),)),
        (lambda score: order_slots(score, rows), (random(4, 3, **double),)),
        (
            lambda gate_up, score: swiglu_rows(gate_up, score, "aten"),
            (random(3, 4, **double), random(3, **double)),
        ),
    ):
        assert torch.autograd.gradcheck(op, tuple(x.requires_grad_() for x in inputs))


def test_the_activation_keeps_nothing_but_its_inputs():
    kept = []
    gate_up, score = random(9, 32).requires_grad_(), random(9).requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda x: kept.append(x.data_ptr()) or x, lambda x: x
    ):
        swiglu_rows(gate_up, score)
    assert sorted(kept) == sorted([gate_up.data_ptr(), score.data_ptr()])


def test_an_activation_of_shapes_that_do_not_go_together_is_refused():
    with pytest.raises(ValueError, match=r"must be \[M, 2·I\] and \[M\]"):
        swiglu_rows(random(3, 5), random(3))
    with pytest.raises(ValueError, match=r"must be \[M, 2·I\] and \[M\]"):
        swiglu_rows(random(3, 4), random(2))


@BACKENDS
def test_a_whole_mixture_compiles_to_one_graph_with_the_same_bits(backend):
    def mixture(x, expert, up, score):
        rows = sort_by_expert(expert, 5)
        gathered = gather_rows(x, rows, backend)
        return combine_rows(
            swiglu_rows(gathered @ up, order_slots(score, rows), backend), rows, backend
        )

    expert, inputs = routes(), [random(13, 8), random(8, 16), random(13, 3, seed=2)]
    expected = outcome(lambda x, up, score: mixture(x, expert, up, score), *inputs)
    compiled = torch.compile(mixture, fullgraph=True, backend="aot_eager")
    assert_all_close(
        outcome(lambda x, up, score: compiled(x, expert, up, score), *inputs), expected, 0
    )
