"""Packed attention against its referee."""

import pytest
import torch

from orrery.kernels.attention import Documents, reference_varlen_attention, varlen_attention

PACKS = {
    "many of like lengths": [5, 7, 6, 7, 5, 6],
    "one length, no padding": [6, 6, 6],
    "one document": [23],
    "very unlike lengths": [40, 1, 3, 17, 1, 2],
    "an empty document among others": [4, 0, 9],
}


def pack(lengths, num_heads=4, num_kv_heads=2, head_dim=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    num_tokens = sum(lengths)
    q = torch.randn(num_tokens, num_heads, head_dim, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, num_tokens, num_kv_heads, head_dim, generator=generator, dtype=torch.float64)
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return q, k, v, cu_seqlens


def outcome(op, q, k, v, documents):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = op(q, k, v, documents)
    out.backward(torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out))
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_values_and_gradients_equal_the_referee(lengths, num_kv_heads):
    q, k, v, cu_seqlens = pack(lengths, num_kv_heads=num_kv_heads)
    for actual, expected in zip(
        outcome(varlen_attention, q, k, v, cu_seqlens), outcome(reference_varlen_attention, q, k, v, cu_seqlens), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_a_document_is_blind_to_the_others_and_to_its_own_future():
    q, k, v, cu_seqlens = pack([5, 8, 6])
    before = varlen_attention(q, k, v, cu_seqlens)
    k[9:], v[9:] = 100.0, 100.0  # the second document from its fifth token on, and all of the third
    after = varlen_attention(q, k, v, cu_seqlens)
    assert torch.equal(after[:9], before[:9]) and not torch.allclose(after[9:], before[9:])


def test_no_tokens_give_no_output_and_zero_gradients():
    q, k, v, _ = pack([0])
    for tensor in outcome(varlen_attention, q, k, v, torch.tensor([0, 0], dtype=torch.int32)):
        assert tensor is not None and tensor.shape[0] == 0


def test_documents_are_worked_out_once_and_padding_stays_below_a_third():
    lengths = torch.randint(1, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    documents = Documents(torch.tensor([0, *lengths]).cumsum(0).to(torch.int32))
    assert documents.grids is documents.grids and documents.max_seqlen == max(lengths)
    assert sum(source.numel() for source in documents.grids.sources) <= sum(lengths) * 4 / 3
    assert len(documents.grids.sources) <= 20


def test_heads_that_do_not_divide_are_refused():
    q, k, v, cu_seqlens = pack([4], num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="not a multiple"):
        varlen_attention(q, k, v, cu_seqlens)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="FlashAttention needs a GPU")
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_flash_attention_on_a_gpu_agrees_with_the_referee_within_bfloat16(lengths):
    q, k, v, cu_seqlens = (x.cuda() for x in pack(lengths, head_dim=64))
    actual = outcome(varlen_attention, *(x.bfloat16() for x in (q, k, v)), cu_seqlens)
    expected = outcome(reference_varlen_attention, *(x.bfloat16().double() for x in (q, k, v)), cu_seqlens)
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= 2e-2 * e.abs().max()
