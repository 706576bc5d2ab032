"""Grouped products against one product a group."""

import pytest
import torch

from orrery.kernels.grouped_matmul import grouped_matmul


def example(counts, dtype=torch.float64, device="cpu", k=16, n=24):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(sum(counts), k, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    weight = torch.randn(len(counts), n, k, generator=generator, dtype=torch.float64).to(device, dtype).requires_grad_()
    return x, weight, torch.tensor(counts, device=device).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("counts", [[3, 5, 2], [0, 4, 0, 6], [0, 0], [7]])
def test_each_group_is_multiplied_by_its_own_weight_and_gets_its_own_gradient(counts):
    x, weight, ends = example(counts)
    out = grouped_matmul(x, weight, ends)
    out.square().sum().backward()
    start = 0
    for e, count in enumerate(counts):
        rows, start = slice(start, start + count), start + count
        expected = x[rows].detach() @ weight[e].detach().T
        torch.testing.assert_close(out[rows].detach(), expected)
        torch.testing.assert_close(weight.grad[e], 2 * expected.T @ x[rows].detach())
        torch.testing.assert_close(x.grad[rows], 2 * expected @ weight[e].detach())
    assert out.shape == (sum(counts), 24)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the fused form needs a GPU")
@pytest.mark.parametrize("counts", [[3, 5, 2], [0, 4, 0, 6], [7]])
def test_the_fused_form_on_a_gpu_agrees_within_bfloat16(counts):
    fused, loop = example(counts, torch.bfloat16, "cuda"), example(counts)
    outputs = []
    for x, weight, ends in (fused, loop):
        out = grouped_matmul(x, weight, ends)
        out.sum().backward()
        outputs.append((out.detach(), x.grad, weight.grad))
    for a, e in zip(*outputs, strict=True):
        assert (a.cpu().double() - e).abs().max() <= 3e-2 * e.abs().max()
