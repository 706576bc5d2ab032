"""Grouped products against one product a group."""

import pytest
import torch

from orrery.kernels.grouped_matmul import grouped_matmul, reference_grouped_matmul

COUNTS = pytest.mark.parametrize("counts", [[3, 5, 2], [0, 4, 0, 6], [0, 0], [7]])


def example(counts, dtype=torch.float64, device="cpu", k=16, n=24, rest=0):
    generator = torch.Generator().manual_seed(0)
    x = (
        torch.randn(sum(counts) + rest, k, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
    )
    weight = (
        torch.randn(len(counts), n, k, generator=generator, dtype=torch.float64)
        .to(device, dtype)
        .requires_grad_()
    )
    return x, weight, torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


def outcome(op, x, weight, ends):
    out = op(x, weight, ends)
    out.backward(
        torch.randn(*out.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(
            out
        )
    )
    return out.detach(), x.grad, weight.grad


def grouped(outcome, ends):
    """Return the defined part of an outcome: rows of groups, and the weight's gradient."""
    out, grad_x, grad_weight = outcome
    return out[: ends[-1]], grad_x[: ends[-1]], grad_weight


@COUNTS
@pytest.mark.parametrize("op", [grouped_matmul, reference_grouped_matmul])
def test_each_group_is_multiplied_by_its_own_weight_and_gets_its_own_gradient(op, counts):
    x, weight, ends = example(counts)
    out = op(x, weight, ends)
    out.square().sum().backward()
    start = 0
    for e, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        expected = x[rows].detach() @ weight[e].detach().T
        torch.testing.assert_close(out[rows].detach(), expected)
        torch.testing.assert_close(weight.grad[e], 2 * expected.T @ x[rows].detach())
        torch.testing.assert_close(x.grad[rows], 2 * expected @ weight[e].detach())
    assert out.shape == (sum(counts), 24)


@COUNTS
def test_rows_of_no_group_give_no_gradient(counts):
    expected = outcome(reference_grouped_matmul, *example(counts, rest=4))
    x, weight, ends = example(counts, rest=4)
    with torch.no_grad():
        x[sum(counts) :] = float("nan")
    for a, e in zip(
        grouped(outcome(grouped_matmul, x, weight, ends), ends),
        grouped(expected, ends),
        strict=True,
    ):
        torch.testing.assert_close(a, e)
    assert (expected[0][sum(counts) :] == 0).all() and (expected[1][sum(counts) :] == 0).all()


def test_rows_of_no_group_show_when_they_are_read():
    out, grad_x, grad_weight = outcome(grouped_matmul, *example([3, 5], rest=2))
    assert (
        out[8:].isnan().all()
        and grad_x[8:].isnan().all()
        and not grad_weight.isnan().any()
        and not out[:8].isnan().any()
    )


@pytest.mark.parametrize("trained", ["x", "weight"])
def test_a_gradient_that_nobody_wants_is_neither_made_nor_kept_for(trained):
    x, weight, ends = example([3, 5])
    (weight if trained == "x" else x).requires_grad_(False)
    kept, calls = [], []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: kept.append(t.data_ptr()) or t, lambda t: t
    ):
        out = grouped_matmul(x, weight, ends)
    assert sorted(kept) == sorted([(weight if trained == "x" else x).data_ptr(), ends.data_ptr()])
    with Watch():
        out.sum().backward()
    wanted = (
        "orrery.grouped_matmul.default"
        if trained == "x"
        else "orrery.grouped_matmul_weight_gradient.default"
    )
    assert [call for call in calls if call.startswith("orrery.")] == [wanted]


def test_it_compiles_into_one_graph_that_serves_every_routing():
    compiled = torch.compile(
        lambda x, weight, ends: grouped_matmul(x.sin(), weight, ends).cos(),
        fullgraph=True,
        backend="aot_eager",
    )
    for counts in ([3, 5, 2], [0, 10, 0], [10, 0, 0]):
        expected = outcome(
            lambda x, weight, ends: reference_grouped_matmul(x.sin(), weight, ends).cos(),
            *example(counts),
        )
        with torch.compiler.set_stance("default" if counts == [3, 5, 2] else "fail_on_recompile"):
            actual = outcome(compiled, *example(counts))
        for a, e in zip(actual, expected, strict=True):
            torch.testing.assert_close(a, e)


def test_the_operators_say_truly_what_they_return():
    x, weight, ends = example([3, 0, 5])
    torch.library.opcheck(torch.ops.orrery.grouped_matmul, (x, weight, ends))
    grad = torch.randn(8, 24, dtype=torch.float64)
    torch.library.opcheck(torch.ops.orrery.grouped_matmul_weight_gradient, (grad, x.detach(), ends))


def test_shapes_that_do_not_go_together_are_refused():
    x, weight, ends = example([3, 5])
    for wrong in ((x[:, 1:], weight, ends), (x, weight.float(), ends), (x, weight, ends[1:])):
        with pytest.raises(ValueError, match="must be"):
            grouped_matmul(*wrong)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused backend needs a GPU")
@pytest.mark.parametrize("rest", [0, 5])
@pytest.mark.parametrize("counts", [[3, 5, 2], [0, 4, 0, 6], [7]])
def test_the_fused_backend_on_a_gpu_agrees_within_bfloat16(counts, rest):
    outputs = []
    for x, weight, ends in (
        example(counts, torch.bfloat16, "cuda", rest=rest),
        example(counts, rest=rest),
    ):
        out = grouped_matmul(x, weight, ends)
        out.sum().backward()
        outputs.append(grouped((out.detach(), x.grad, weight.grad), ends))
    for a, e in zip(*outputs, strict=True):
        assert (a.cpu().double() - e).abs().max() <= 3e-2 * e.abs().max()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused backend needs a GPU")
def test_the_fused_backend_never_waits_for_the_device():
    x, weight, ends = example([3, 5, 2], torch.bfloat16, "cuda")
    outcome(grouped_matmul, x, weight, ends)
    torch.cuda.set_sync_debug_mode("error")
    try:
        grouped_matmul(x, weight, ends).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
