"""Grouped products with adapters, against the sum of plain products with autograd.

The Triton kernels run on a GPU, or with TRITON_INTERPRET=1 on a CPU in its interpreter.
"""

import pytest
import torch
from triton_marks import DEVICE, NEEDS_TRITON

from orrery.kernels.grouped_matmul import adapted_grouped_matmul, reference_grouped_matmul

COUNTS = pytest.mark.parametrize("counts", [[3, 5, 2], [0, 4, 0, 6], [0, 0], [7]])


def example(counts, dtype=torch.float64, device="cpu", k=16, n=24, rank=4, rest=0):
    """x, weight, a, b as leaves, and the groups' ends."""
    generator = torch.Generator().manual_seed(0)
    groups = len(counts)
    shapes = (sum(counts) + rest, k), (groups, n, k), (groups, rank, k), (groups, n, rank)
    leaves = [
        torch.randn(*shape, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
        for shape in shapes
    ]
    return *leaves, torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def reference(x, weight, a, b, ends):
    return reference_grouped_matmul(x, weight, ends) + reference_grouped_matmul(
        reference_grouped_matmul(x, a, ends), b, ends
    )


def outcome(op, *leaves_and_ends):
    """The result's rows of a group, and every leaf's gradient."""
    *leaves, ends = leaves_and_ends
    out = op(*leaves, ends)[: ends[-1]]
    out.backward(
        torch.randn(*out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
            out
        )
    )
    grad_x = leaves[0].grad
    return [
        out.detach(),
        None if grad_x is None else grad_x[: ends[-1]],
        *(leaf.grad for leaf in leaves[1:]),
    ]


@COUNTS
@pytest.mark.parametrize("rest", [0, 4])
def test_it_is_the_sum_of_two_products_and_so_are_its_gradients(counts, rest):
    for a, e in zip(
        outcome(adapted_grouped_matmul, *example(counts, rest=rest)),
        outcome(reference, *example(counts, rest=rest)),
        strict=True,
    ):
        torch.testing.assert_close(a, e)


@COUNTS
@pytest.mark.parametrize("trained", ["ab", "a", "b", "weight"])
def test_what_trains_behind_an_x_that_wants_no_gradient_has_its_own(trained, counts):
    def grads(op):
        *leaves, ends = example(counts)
        named = dict(zip(("x", "weight", "a", "b"), leaves, strict=True))
        for name, leaf in named.items():
            leaf.requires_grad_(name in {"ab": ("a", "b")}.get(trained, (trained,)))
        outcome(op, *leaves, ends)
        return {name: leaf.grad for name, leaf in named.items()}

    actual, expected = grads(adapted_grouped_matmul), grads(reference)
    for name, e in expected.items():
        if e is None:
            assert actual[name] is None
        else:
            torch.testing.assert_close(actual[name], e)


@pytest.mark.parametrize("trains_x", [True, False])
def test_a_gradient_that_nobody_wants_is_neither_made_nor_kept_for(trains_x):
    x, weight, a, b, ends = example([3, 5])
    weight.requires_grad_(False)
    x.requires_grad_(trains_x)
    kept, calls = [], []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(tuple(t.shape)) or t, lambda t: t
    ):
        out = adapted_grouped_matmul(x, weight, a, b, ends)
    assert sorted(kept) == sorted(
        [*(tuple(t.shape) for t in ((x, weight, a, b, ends) if trains_x else (x, b, ends))), (8, 4)]
    )
    with Watch():
        out.sum().backward()
    first = "adapted_grouped_matmul" if trains_x else "narrow_grouped_matmul"
    assert [call for call in calls if call.startswith("orrery.")] == [
        f"orrery.{first}.default",
        "orrery.adapter_gradient.default",
        "orrery.adapter_gradient.default",
    ]


def test_it_compiles_into_one_graph_that_serves_every_routing():
    compiled = torch.compile(
        lambda x, *rest: adapted_grouped_matmul(x.sin(), *rest).cos(),
        fullgraph=True,
        backend="aot_eager",
    )
    for counts in ([3, 5, 2], [0, 10, 0], [10, 0, 0]):
        expected = outcome(lambda x, *rest: reference(x.sin(), *rest).cos(), *example(counts))
        with torch.compiler.set_stance("default" if counts == [3, 5, 2] else "fail_on_recompile"):
            actual = outcome(compiled, *example(counts))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_the_operators_say_truly_what_they_return():
    x, weight, a, b, ends = example([3, 0, 5])
    torch.library.opcheck(torch.ops.orrery.adapted_grouped_matmul, (x, weight, a, b, ends))
    torch.library.opcheck(torch.ops.orrery.narrow_grouped_matmul, (x.detach(), a.detach(), ends))
    for narrow_first in (False, True):
        wide, narrow = (
            torch.randn(8, 24, dtype=torch.float64),
            torch.randn(8, 4, dtype=torch.float64),
        )
        torch.library.opcheck(torch.ops.orrery.adapter_gradient, (wide, narrow, ends, narrow_first))


def test_what_does_not_go_together_is_refused():
    x, weight, a, b, ends = example([3, 5])
    for wrong in (
        (x[:, 1:], weight, a, b, ends),
        (x, weight, a[:, 1:], b, ends),
        (x, weight, a, b, ends[1:]),
    ):
        with pytest.raises(ValueError, match=r"must be \[M, K\]"):
            adapted_grouped_matmul(*wrong)
    with pytest.raises(ValueError, match="must be of one dtype"):
        adapted_grouped_matmul(x, weight, a.float(), b, ends)


@NEEDS_TRITON
@pytest.mark.parametrize("rank", [4, 16, 20, 64])
@pytest.mark.parametrize("counts", [[3, 200, 0, 131], [0, 0], [128, 129]])
@pytest.mark.parametrize("transposed", [False, True], ids=["as stored", "transposed"])
def test_tritons_kernels_add_what_the_products_give_and_leave_other_rows_alone(
    rank, counts, transposed
):
    """In float32; the interpreter's and a GPU's own products of float32 may be of fewer bits."""
    x, _, a, b, ends = (
        t.detach() for t in example(counts, torch.float32, DEVICE, k=72, n=152, rank=rank, rest=3)
    )
    from orrery.kernels import grouped_matmul_triton as low_rank

    if transposed:
        a, b = (
            a.transpose(1, 2).contiguous().transpose(1, 2),
            b.transpose(1, 2).contiguous().transpose(1, 2),
        )
    y = torch.randn(len(x), 152, generator=torch.Generator().manual_seed(2)).to(DEVICE)
    grad = torch.randn(len(x), 152, generator=torch.Generator().manual_seed(3)).to(DEVICE)
    expected_narrow = reference_grouped_matmul(x, a, ends)
    expected = y + reference_grouped_matmul(expected_narrow, b, ends)
    actual = y.clone()
    narrow = low_rank.add_low_rank(actual, x, a, b, ends)
    num = int(ends[-1])
    assert close(narrow[:num], expected_narrow[:num]) and close(actual[:num], expected[:num])
    assert torch.equal(actual[num:], y[num:])
    assert torch.equal(low_rank.narrow_product(x, a, ends)[:num], narrow[:num])
    for narrow_first in (False, True):
        start, products = 0, []
        for end in ends.tolist():
            product = grad[start:end].T @ expected_narrow[start:end]
            products.append(product.T if narrow_first else product)
            start = end
        assert close(
            low_rank.thin_gradient(grad, expected_narrow.contiguous(), ends, narrow_first),
            torch.stack(products),
        )


def close(actual, expected):
    return actual.shape == expected.shape and (
        not expected.numel() or (actual - expected).abs().max() <= 4e-3 * expected.abs().max()
    )


@pytest.mark.skipif(DEVICE != "cuda", reason="the fused backend needs a GPU")
@pytest.mark.parametrize("counts", [[3, 200, 0, 131], [128, 129], [7]])
def test_the_fused_backend_on_a_gpu_agrees_within_bfloat16(counts):
    sizes = {"k": 64, "n": 160, "rank": 16, "rest": 5}
    fused = outcome(adapted_grouped_matmul, *example(counts, torch.bfloat16, "cuda", **sizes))
    for a, e in zip(fused, outcome(reference, *example(counts, **sizes)), strict=True):
        assert (a.cpu().double() - e).abs().max() <= 3e-2 * e.abs().max()


@pytest.mark.skipif(DEVICE != "cuda", reason="the fused backend needs a GPU")
def test_the_fused_backend_never_waits_for_the_device():
    x, weight, a, b, ends = example([3, 5, 2], torch.bfloat16, "cuda", rank=16)
    weight.requires_grad_(False)
    adapted_grouped_matmul(x, weight, a, b, ends).sum().backward()
    torch.cuda.set_sync_debug_mode("error")
    try:
        adapted_grouped_matmul(x, weight, a, b, ends).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
