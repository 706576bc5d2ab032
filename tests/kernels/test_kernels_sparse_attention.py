"""The contract of sparse attention's two ops, for every backend that the device chooses."""

import pytest
import torch

from orrery.kernels import sparse_index
from orrery.kernels import sparse_mla as mla_module
from orrery.kernels.sparse_index import reference_select_keys, select_keys
from orrery.kernels.sparse_mla import reference_sparse_mla, sparse_mla

NUM_HEADS, WIDTH, VALUE_WIDTH = 4, 24, 16
LENGTHS = (7, 1, 40, 16)  # of packed documents
NUM_TOKENS = sum(LENGTHS)


def ranges():
    """Return the first and last key of each query of the packed documents."""
    first = torch.cat([torch.full((n,), sum(LENGTHS[:i])) for i, n in enumerate(LENGTHS)])
    return first.int(), torch.arange(sum(LENGTHS), dtype=torch.int32)


def indexed(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    num_keys = sum(LENGTHS)
    q = torch.randn(num_keys, 3, 8, generator=generator).to(dtype)
    k = torch.randn(num_keys, 8, generator=generator).to(dtype)
    weights = torch.randn(num_keys, 3, generator=generator)
    return q, k, weights, *ranges()


def attended(top_k, dtype=torch.float32, num_queries=NUM_TOKENS):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(num_queries, NUM_HEADS, WIDTH, generator=generator).to(dtype)
    kv = torch.randn(sum(LENGTHS), WIDTH, generator=generator).to(dtype)
    indices = select_keys(*indexed(), top_k)[:num_queries]
    return q.requires_grad_(), kv.requires_grad_(), indices


def outcome(function, q, kv, indices):
    q.grad = kv.grad = None
    out, lse = function(q, kv, indices, 0.3, VALUE_WIDTH)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out.dtype)
    out.backward(grad)
    return out.detach(), lse.detach(), q.grad, kv.grad


@pytest.mark.parametrize("top_k", [4, 16, 64])
def test_chosen_keys_are_the_best_of_the_querys_own_document_and_past(top_k):
    arguments = indexed()
    found, wanted = select_keys(*arguments, top_k), reference_select_keys(*arguments, top_k)
    assert found.dtype == torch.int32 and found.shape == (sum(LENGTHS), top_k)
    first, last = ranges()
    for t in range(len(found)):
        chosen = found[t][found[t] >= 0]
        assert len(chosen) == min(top_k, last[t] - first[t] + 1)
        assert (found[t][len(chosen) :] == -1).all(), "none stands last"
        assert set(chosen.tolist()) == set(wanted[t][wanted[t] >= 0].tolist())
        assert first[t] <= chosen.min() and chosen.max() <= last[t]


def test_chunks_of_keys_and_queries_choose_as_the_whole_matrix(monkeypatch):
    arguments = indexed(seed=3)
    monkeypatch.setattr(sparse_index, "CHUNK_KEYS", 10)
    monkeypatch.setattr(sparse_index, "CHUNK_ELEMENTS", 3 * 10 * 7)
    assert torch.equal(select_keys(*arguments, 8), reference_select_keys(*arguments, 8))


def test_the_lowest_index_wins_among_equal_scores(monkeypatch):
    q, k, weights, first, last = indexed()
    monkeypatch.setattr(sparse_index, "CHUNK_KEYS", 10)
    found = select_keys(q, torch.ones_like(k), weights, first, last, 5)
    for t in range(len(found)):
        wanted = range(int(first[t]), min(int(first[t]) + 5, int(last[t]) + 1))
        assert sorted(found[t][found[t] >= 0].tolist()) == list(wanted)


def test_scores_of_other_queries_and_documents_change_no_choice():
    q, k, weights, first, last = indexed()
    whole = select_keys(q, k, weights, first, last, 6)
    begin, end = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3])
    part = slice(begin, end)
    moved = (first[part] - begin, last[part] - begin)
    alone = select_keys(q[part], k[part], weights[part], *moved, 6)
    assert torch.equal(whole[part], torch.where(alone < 0, alone, alone + begin))


@pytest.mark.parametrize("top_k", [4, 64])
def test_attention_to_chosen_keys_agrees_with_the_plain_formula(top_k, monkeypatch):
    monkeypatch.setattr(mla_module, "CHUNK_ELEMENTS", 5 * top_k * WIDTH)
    arguments = attended(top_k, torch.float64)
    found = outcome(sparse_mla, *arguments)
    for one, other in zip(found, outcome(reference_sparse_mla, *arguments), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_all_past_keys_give_dense_causal_attention():
    q, kv, _ = attended(64)
    indices = torch.arange(64, dtype=torch.int32).expand(64, -1)
    indices = torch.where(indices <= torch.arange(64)[:, None], indices, -1)
    mask = indices >= 0
    logits = torch.einsum("thd,sd->ths", q, kv) * 0.3
    p = logits.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
    found, _ = sparse_mla(q, kv, indices.contiguous(), 0.3, VALUE_WIDTH)
    assert torch.allclose(found, p @ kv[:, :VALUE_WIDTH], atol=1e-5)


def test_none_may_stand_in_any_place_and_a_query_without_keys_gets_zeros():
    q, kv, indices = attended(8, torch.float64)
    indices = indices.clone()
    indices[3] = -1
    mixed = torch.cat((torch.full((len(indices), 3), -1), indices.flip(1)), dim=1).int()
    found, wanted = outcome(sparse_mla, q, kv, mixed), outcome(sparse_mla, q, kv, indices)
    for one, other in zip(found, wanted, strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)
    out, lse, grad_q, grad_kv = found
    assert not out[3].any() and lse[3].isneginf().all() and not grad_q[3].any()
    assert grad_kv.isfinite().all()


def test_queries_may_be_a_part_of_the_keys_tokens():
    q, kv, indices = attended(8, torch.float64, num_queries=20)
    found = outcome(sparse_mla, q, kv, indices)
    for one, other in zip(found, outcome(reference_sparse_mla, q, kv, indices), strict=True):
        assert torch.allclose(one, other, rtol=1e-12, atol=1e-12)


def test_half_precision_sums_in_float32():
    q, kv, indices = attended(16, torch.bfloat16)
    exact = (q.detach().double().requires_grad_(), kv.detach().double().requires_grad_(), indices)
    found, wanted = outcome(sparse_mla, q, kv, indices), outcome(reference_sparse_mla, *exact)
    assert found[0].dtype == torch.bfloat16 and found[1].dtype == torch.float32
    for one, other in zip(found, wanted, strict=True):
        # One rounding to bfloat16 (2^-9), of the output in delta too.
        assert (one - other).norm() < 1e-2 * other.norm()


def test_equal_inputs_give_equal_bits():
    arguments = attended(16, torch.bfloat16)
    first, second = outcome(sparse_mla, *arguments), outcome(sparse_mla, *arguments)
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


def test_both_ops_are_one_graph_to_the_compiler():
    def both(q, kv, *arguments):
        return sparse_mla(q, kv, select_keys(*arguments, 8), 0.3, VALUE_WIDTH)[0]

    q, kv, _ = attended(8)
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, kv, *indexed()), both(q, kv, *indexed()))


def test_shapes_that_do_not_match_are_refused():
    q, kv, indices = attended(8)
    with pytest.raises(ValueError, match="value_width 25 do not go together"):
        sparse_mla(q, kv, indices, 0.3, 25)
    with pytest.raises(ValueError, match=r"must be torch\.int32 \[64, K\]"):
        sparse_mla(q, kv, indices.long(), 0.3, VALUE_WIDTH)
    index_q, k, weights, first, last = indexed()
    with pytest.raises(ValueError, match="do not go together"):
        select_keys(index_q, k[:, :4], weights, first, last, 8)
    with pytest.raises(ValueError, match=r"must be \[64\]"):
        select_keys(index_q, k, weights, first[:3], last, 8)
