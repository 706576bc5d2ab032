"""Test `select_keys` and `sparse_mla`, the two operators of sparse attention, by backend.

The Triton backend runs on a GPU, or with TRITON_INTERPRET=1 in Triton's interpreter on a CPU.
"""

import math

import pytest
import torch
from triton_marks import DEVICE, NEEDS_TRITON, TRITON

from orrery.kernels import flash_mla, sparse_index, sparse_index_fp8, sparse_mla_hopper
from orrery.kernels import sparse_mla as mla_module
from orrery.kernels.sparse_index import reference_select_keys, select_keys
from orrery.kernels.sparse_index_loss import attention_of_chosen, chosen_scores, index_kl
from orrery.kernels.sparse_mla import reference_sparse_mla, sparse_mla

BACKENDS = pytest.mark.parametrize("backend", ["plain", TRITON])

NUM_HEADS, WIDTH, VALUE_WIDTH = 16, 48, 32
LENGTHS = (7, 1, 40, 16)  # of packed documents
NUM_TOKENS = sum(LENGTHS)


def ranges():
    """Return the first and last key of each query of the packed documents."""
    first = torch.cat([torch.full((n,), sum(LENGTHS[:i])) for i, n in enumerate(LENGTHS)])
    return first.int(), torch.arange(sum(LENGTHS), dtype=torch.int32)


def indexed(seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    num_keys = sum(LENGTHS)
    q = torch.randn(num_keys, 4, 16, generator=generator).to(DEVICE, dtype)
    k = torch.randn(num_keys, 16, generator=generator).to(DEVICE, dtype)
    weights = torch.randn(num_keys, 4, generator=generator).to(DEVICE)
    return q, k, weights, *(x.to(DEVICE) for x in ranges())


def attended(top_k, dtype=torch.float32, num_queries=NUM_TOKENS):
    generator = torch.Generator().manual_seed(1)
    q = torch.randn(num_queries, NUM_HEADS, WIDTH, generator=generator).to(DEVICE, dtype)
    kv = torch.randn(sum(LENGTHS), WIDTH, generator=generator).to(DEVICE, dtype)
    indices = select_keys(*indexed(), top_k, "plain")[:num_queries]
    return q.requires_grad_(), kv.requires_grad_(), indices


def outcome(function, q, kv, indices, **options):
    q.grad = kv.grad = None
    out, lse = function(q, kv, indices, 0.3, VALUE_WIDTH, **options)
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    out.backward(grad)
    return out.detach(), lse.detach(), q.grad, kv.grad


def exact(q, kv, indices):
    """Return the output, log-sum-exp and gradients of the reference in float64."""
    wide = [x.detach().double().requires_grad_() for x in (q, kv)]
    return outcome(reference_sparse_mla, *wide, indices)


def dtype_and_tolerance(backend):
    if backend == "plain":
        return torch.float64, 1e-12
    # On a GPU four tensors are rounded to bfloat16 (2⁻⁹ each). The interpreter uses float32.
    return (torch.bfloat16, 2e-2) if DEVICE == "cuda" else (torch.float32, 1e-5)


def assert_near(found, wanted, tolerance):
    for one, other in zip(found, wanted, strict=True):
        assert one.isfinite().equal(other.isfinite())
        one, other = (torch.where(x.isfinite(), x, 0).double() for x in (one, other))
        assert (one - other).norm() <= tolerance * other.norm()


@BACKENDS
@pytest.mark.parametrize("top_k", [4, 16, 64])
def test_chosen_keys_are_the_best_of_the_querys_own_document_and_past(backend, top_k):
    arguments = indexed()
    found = select_keys(*arguments, top_k, backend)
    wanted = reference_select_keys(*arguments, top_k)
    assert found.dtype == torch.int32 and found.shape == (sum(LENGTHS), top_k)
    first, last = ranges()
    for t in range(len(found)):
        chosen = found[t][found[t] >= 0]
        assert len(chosen) == min(top_k, last[t] - first[t] + 1)
        assert (found[t][len(chosen) :] == -1).all(), "none stands last"
        assert set(chosen.tolist()) == set(wanted[t][wanted[t] >= 0].tolist())
        assert first[t] <= chosen.min() and chosen.max() <= last[t]


def same_choice(found, wanted):
    return torch.equal(found.sort(dim=1).values, wanted.sort(dim=1).values)


def test_chunks_of_keys_and_queries_choose_as_the_whole_matrix(monkeypatch):
    arguments = indexed(seed=3)
    monkeypatch.setattr(sparse_index, "CHUNK_KEYS", 10)
    monkeypatch.setattr(sparse_index, "CHUNK_ELEMENTS", 4 * 10 * 7)
    found = select_keys(*arguments, 8, "plain")
    assert torch.equal(found, reference_select_keys(*arguments, 8))


def in_fp8(num_heads=4, width=16):
    """Return inputs of `select_keys` in FP8, and the same numbers in float32."""
    generator = torch.Generator().manual_seed(0)
    angle = torch.randn(NUM_TOKENS, 1, 4, generator=generator).repeat(1, 1, 2).to(DEVICE)
    angles = angle.cos(), angle.sin()
    q = torch.randn(NUM_TOKENS, num_heads, width, generator=generator).to(DEVICE)
    k = torch.randn(NUM_TOKENS, 1, width, generator=generator).to(DEVICE)
    weights = torch.randn(NUM_TOKENS, num_heads, generator=generator).to(DEVICE)
    (q, q_scale), (k, k_scale) = (
        sparse_index_fp8.quantize_index(x, angles, turns_pairs=True) for x in (q, k)
    )
    packed = sparse_index_fp8.pack(k, k_scale, torch.bfloat16)
    wide = q.float() * q_scale[..., None], (k.float() * k_scale[..., None])[:, 0], weights
    both = [x.to(DEVICE) for x in ranges()]
    return (q, packed, weights * q_scale, *both), (*wide, *both)


@pytest.mark.parametrize("turns_pairs", [True, False])
def test_queries_and_keys_are_rotated_then_quantized_with_a_power_of_two(turns_pairs):
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(5, 3, 16, generator=generator, dtype=torch.float64)
    x[1] *= 1e-9
    angle = torch.randn(5, 1, 4, generator=generator, dtype=torch.float64).repeat(1, 1, 2)
    value, scale = sparse_index_fp8.quantize_index(
        x.float(), (angle.cos().float(), angle.sin().float()), turns_pairs
    )
    for t in range(5):
        for h in range(3):
            wanted = x[t, h].clone()
            for i in range(4):
                at = [2 * i, 2 * i + 1] if turns_pairs else [i, i + 4]
                turn = torch.view_as_complex(x[t, h, at]) * torch.exp(1j * angle[t, 0, i])
                wanted[at] = torch.view_as_real(turn)
            largest = max(wanted.abs().max().item(), 1e-4)
            assert scale[t, h] == 2.0 ** math.ceil(math.log2(largest / 448))
            rounded = (wanted / scale[t, h]).float().to(torch.float8_e4m3fn)
            assert torch.equal(value[t, h].float(), rounded.float())


@NEEDS_TRITON
@pytest.mark.parametrize(
    "dtype", [torch.float16 if DEVICE == "cpu" else torch.bfloat16, torch.float32]
)
@pytest.mark.parametrize("turns_pairs", [True, False])
def test_triton_and_torch_quantize_to_equal_bits(turns_pairs, dtype):
    """With exact numbers on a CPU, because Triton's interpreter rounds wrongly to e4m3."""
    from orrery.kernels import sparse_index_triton as kernels

    generator = torch.Generator().manual_seed(0)
    x = torch.randn(11, 3, 128, generator=generator)
    angle = torch.randn(11, 1, 32, generator=generator)
    if DEVICE == "cpu":
        x, angle = (x * 8).round().clamp(-15, 15), (angle * 2).round() * (math.pi / 2)
    x[1], x[2], x[3, 0] = x[1] * 2**-30, x[2] * 2**10, 0.0
    x[4, 0], x[4, 0, 70] = 0.0, 1.75  # the scale is exactly 2⁻⁸
    angle = angle.repeat(1, 1, 2).double()
    cos, sin = (each.to(dtype).to(DEVICE) for each in (angle.cos(), angle.sin()))
    if DEVICE == "cpu":
        cos, sin = cos.round(), sin.round()
    given = x.to(DEVICE, dtype), cos, sin, turns_pairs
    found = kernels.quantize_index(*given)
    wanted = sparse_index_fp8.quantize_plainly(*given)
    assert torch.equal(found[0].view(torch.uint8), wanted[0].view(torch.uint8))
    assert torch.equal(found[1], wanted[1]) and found[1][4, 0] == 2.0**-8


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_keys_come_back_with_their_bits(dtype):
    value = torch.arange(256, dtype=torch.uint8).view(2, 1, 128).view(torch.float8_e4m3fn)
    scale = torch.tensor([[0.125], [2.0**-20]])
    packed = sparse_index_fp8.pack(value, scale, dtype)
    assert packed.dtype == dtype and packed.shape == (2, 132 // packed.element_size())
    key, found = sparse_index_fp8.unpack(packed)
    assert torch.equal(key.view(torch.uint8), value[:, 0].view(torch.uint8))
    assert torch.equal(found, scale[:, 0])


@pytest.mark.parametrize("top_k", [4, 64])
def test_keys_are_chosen_by_scores_of_fp8_numbers(top_k):
    given, wide = in_fp8()
    found, wanted = select_keys(*given, top_k, "plain"), reference_select_keys(*wide, top_k)
    assert torch.equal(found.sort(dim=1).values, wanted.sort(dim=1).values)
    with pytest.raises(ValueError, match=r"must be \[T, H, D\], \[S, bytes\]"):
        select_keys(given[0], given[1][:, 1:], *given[2:], top_k)


class FakeDeepGEMM:
    """Score as DeepGEMM does: a row begins with its first key, and undefined columns are NaN."""

    def fp8_mqa_logits(self, q, keys, weights, begin, end, clean_logits, max_seqlen_k):
        wide = q.float(), keys[0].float() * keys[1][:, None], weights
        score = sparse_index._scores(*wide, begin, end - 1, torch.arange(len(keys[0])))
        out = torch.full((len(q), max_seqlen_k + 8), torch.nan)
        for row, source, first, last in zip(out, score, begin, end, strict=True):
            row[: last - first] = source[first:last]
        return out[:, :max_seqlen_k]


def best_columns(score, first, last, key, index):
    top_k = index.shape[1]
    for row, values, begin, end, start in zip(index, score, first, last, key, strict=True):
        best = values[begin : end + 1].sort(descending=True, stable=True).indices[:top_k]
        row[: len(best)] = best + begin + start


@pytest.mark.parametrize("chunk", [2**7, 2**9, 2**26])
def test_chunks_choose_keys_of_the_queries_own_document(chunk, monkeypatch):
    monkeypatch.setattr(sparse_index_fp8, "load", FakeDeepGEMM)
    monkeypatch.setattr(sparse_index_fp8, "CHUNK_ELEMENTS", chunk)
    given, wide = ([x.cpu() for x in each] for each in in_fp8())
    found = sparse_index_fp8.select_keys(*given, 4, top_keys=best_columns)
    wanted = reference_select_keys(*wide, 4)
    assert torch.equal(found.sort(dim=1).values, wanted.sort(dim=1).values)


@pytest.mark.skipif(not sparse_index_fp8.has_library(), reason="needs DeepGEMM and a Hopper GPU")
@pytest.mark.parametrize("top_k", [8, 64, 2048])
@pytest.mark.parametrize("chunk", [2**7, 2**26])
def test_deep_gemm_and_triton_choose_as_the_reference(top_k, chunk, monkeypatch):
    monkeypatch.setattr(sparse_index_fp8, "CHUNK_ELEMENTS", chunk)
    given, wide = in_fp8(32, 128)
    found = select_keys(*given, top_k)
    assert torch.equal(found, select_keys(*given, top_k))
    assert same_choice(found, sparse_index_fp8.select_keys(*given, top_k, top_keys=best_columns))
    wanted = reference_select_keys(*wide, top_k)
    score_TS = sparse_index._scores(*wide, torch.arange(NUM_TOKENS, device=DEVICE))
    for t in range(NUM_TOKENS):
        rows = [row[t][row[t] >= 0].sort().values for row in (found, wanted)]
        assert len(rows[0]) == len(rows[1]) == len(rows[0].unique())
        scores = [score_TS[t, row.long()].sort().values for row in rows]
        assert torch.allclose(*scores, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize("top_k", [5, 16])
def test_any_order_of_scores_leads_to_the_best(backend, top_k):
    from orrery.kernels import sparse_index_triton as kernels

    q, k, weights, _, _ = indexed(seed=3)
    q, weights = q[:6].contiguous(), weights[:6].contiguous()
    ends = torch.tensor([[0, 3, 0, 9, 0, 5], [63, 50, 63, 50, 12, 5]], device=DEVICE)
    arguments = (q, k, weights, *ends)
    sizes = {"rows": 16, "keys": 16, "span": 32, "room": 32, "chunk_elements": 700}
    tiles = kernels.TILES._replace(**sizes, warps=4, choose_warps=1)
    found = kernels.select_keys(*arguments, top_k, tiles)
    assert same_choice(found, reference_select_keys(*arguments, top_k))
    rising = (q.abs(), k.abs().cumsum(dim=0), weights.abs(), *ends)
    found = kernels.select_keys(*rising, top_k, tiles)
    assert same_choice(found, reference_select_keys(*rising, top_k))


@pytest.mark.parametrize("backend", [TRITON])
@pytest.mark.parametrize(("num_keys", "first", "top_k"), [(64, 0, 5), (61, 3, 16), (600, 3, 16)])
@pytest.mark.parametrize("room", [16, 1024])
@pytest.mark.parametrize("aim", [1.5, 99.0])
def test_any_sample_of_a_rows_scores_leads_to_the_best(backend, num_keys, first, top_k, room, aim):
    from orrery.kernels import sparse_index_triton as kernels

    columns = torch.arange(num_keys)
    is_sampled = (columns - first) % 32 < 8  # two groups of eight
    generator = torch.Generator().manual_seed(4)
    rising, mixed = columns.float(), torch.randn(num_keys, generator=generator)
    best, worst = mixed.where(is_sampled, mixed - 9), mixed.where(~is_sampled, mixed - 9)
    score = torch.stack((rising, -rising, mixed, best, worst, mixed.round(), 0 * mixed))
    begin, end = torch.full((len(score),), first), torch.full((len(score),), num_keys - 2)
    sizes = {"room": room, "sample": 16, "choose_warps": 1, "aim": aim, "parts": 2}
    found = torch.full((len(score), top_k), -1, dtype=torch.int32, device=DEVICE)
    key = torch.arange(len(score)) * 100  # of column 0
    rows = (x.to(DEVICE) for x in (score, begin.int(), end.int(), key.int()))
    kernels.choose(*rows, found, kernels.TILES._replace(**sizes))
    seen = score[:, first : num_keys - 1]
    wanted = seen.sort(dim=1, descending=True, stable=True).indices[:, :top_k] + first
    assert torch.equal(found.cpu(), (wanted.sort(dim=1).values + key[:, None]).int())


@BACKENDS
def test_the_lowest_index_wins_among_equal_scores(backend, monkeypatch):
    q, k, weights, first, last = indexed()
    q, weights = q.round(), weights.round()  # sums of integers are exact in any order
    monkeypatch.setattr(sparse_index, "CHUNK_KEYS", 10)
    for weight in (weights, weights * 0.0):  # zeros of both signs make equal scores
        found = select_keys(q, torch.ones_like(k), weight, first, last, 5, backend)
        for t in range(len(found)):
            wanted = range(int(first[t]), min(int(first[t]) + 5, int(last[t]) + 1))
            assert sorted(found[t][found[t] >= 0].tolist()) == list(wanted)


@BACKENDS
def test_scores_of_other_queries_and_documents_change_no_choice(backend):
    q, k, weights, first, last = indexed()
    whole = select_keys(q, k, weights, first, last, 6, backend)
    begin, end = LENGTHS[0] + LENGTHS[1], sum(LENGTHS[:3])
    part = slice(begin, end)
    moved = (first[part] - begin, last[part] - begin)
    alone = select_keys(q[part], k[part], weights[part], *moved, 6, backend)
    assert torch.equal(whole[part], torch.where(alone < 0, alone, alone + begin))


@BACKENDS
@pytest.mark.parametrize("top_k", [4, 64])
def test_attention_to_chosen_keys_agrees_with_the_plain_formula(backend, top_k, monkeypatch):
    dtype, tolerance = dtype_and_tolerance(backend)
    for name in ("CHUNK_ELEMENTS", "GPU_CHUNK_ELEMENTS"):
        monkeypatch.setattr(mla_module, name, 5 * top_k * WIDTH)
    arguments = attended(top_k, dtype)
    assert_near(outcome(sparse_mla, *arguments, backend=backend), exact(*arguments), tolerance)


@pytest.mark.parametrize("backend", [TRITON])
def test_tiles_and_chunks_of_any_size_agree(backend):
    from orrery.kernels import sparse_mla_triton as kernels

    dtype, tolerance = dtype_and_tolerance(backend)
    q, kv, indices = (x.detach() for x in attended(24, dtype, num_queries=25))
    out, lse, *wanted = exact(q, kv, indices)
    tiles = kernels.Tiles(
        pairs=(16, 16, 4, 1),
        queries=(32, 32, 4, 1),
        sums=(4, 16, 4, 1),
        chunk_rows=24 * 10,
    )
    grad = torch.randn(out.shape, generator=torch.Generator().manual_seed(2)).to(out)
    saved = (indices, out.to(dtype), lse.float())
    found = kernels.backward(grad.to(dtype), q, kv, *saved, 0.3, tiles)
    assert_near(found, wanted, tolerance)


def test_all_past_keys_give_dense_causal_attention():
    q, kv, _ = attended(64)
    indices = torch.arange(64, dtype=torch.int32, device=DEVICE).expand(64, -1)
    indices = torch.where(indices <= torch.arange(64, device=DEVICE)[:, None], indices, -1)
    mask = indices >= 0
    logits = torch.einsum("thd,sd->ths", q, kv) * 0.3
    p = logits.masked_fill(~mask[:, None], -torch.inf).softmax(dim=-1)
    found, _ = sparse_mla(q, kv, indices.contiguous(), 0.3, VALUE_WIDTH)
    assert torch.allclose(found, p @ kv[:, :VALUE_WIDTH], atol=1e-5)


@BACKENDS
def test_none_may_stand_in_any_place_and_a_query_without_keys_gets_zeros(backend):
    dtype, tolerance = dtype_and_tolerance(backend)
    q, kv, indices = attended(8, dtype)
    indices = indices.clone()
    indices[3] = -1
    mixed = torch.cat((torch.full_like(indices[:, :3], -1), indices.flip(1)), dim=1)
    found = outcome(sparse_mla, q, kv, mixed, backend=backend)
    assert_near(found, exact(q, kv, indices), tolerance)
    out, lse, grad_q, _ = found
    assert not out[3].any() and lse[3].isneginf().all() and not grad_q[3].any()


@BACKENDS
def test_queries_may_be_a_part_of_the_keys_tokens(backend):
    dtype, tolerance = dtype_and_tolerance(backend)
    arguments = attended(8, dtype, num_queries=20)
    assert_near(outcome(sparse_mla, *arguments, backend=backend), exact(*arguments), tolerance)


def half(backend):
    """Return bfloat16, or float16 in Triton's interpreter: its `dot` takes no bfloat16."""
    return torch.float16 if backend == "triton" and DEVICE == "cpu" else torch.bfloat16


@BACKENDS
def test_half_precision_sums_in_float32(backend):
    arguments = attended(16, half(backend), num_queries=25)
    found = outcome(sparse_mla, *arguments, backend=backend)
    assert found[0].dtype == half(backend) and found[1].dtype == torch.float32
    # One rounding costs at most 2⁻⁹. Triton also rounds probabilities, logit and key gradients.
    assert_near(found, exact(*arguments), 1e-2 if backend == "plain" else 2e-2)


@BACKENDS
def test_equal_inputs_give_equal_bits(backend):
    arguments = attended(16, half(backend), num_queries=25)
    first, second = (outcome(sparse_mla, *arguments, backend=backend) for _ in range(2))
    assert all(torch.equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("top_k", [2048, 200])
def test_the_hopper_kernel_gives_the_gradients_of_triton(top_k):
    q = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device=DEVICE)
    if DEVICE == "cpu" or not sparse_mla_hopper.supports(q, 512):
        pytest.skip("a Hopper GPU is needed")
    from orrery.kernels import sparse_mla_triton as kernels

    g = torch.Generator(DEVICE).manual_seed(3)
    q, kv, grad = (
        torch.randn(*shape, generator=g, device=DEVICE).bfloat16()
        for shape in ((70, 64, 576), (4096, 576), (70, 64, 512))
    )
    indices = torch.rand(70, 4096, generator=g, device=DEVICE).topk(top_k).indices.int()
    indices[torch.rand(indices.shape, generator=g, device=DEVICE) < 0.2] = -1
    indices[3], indices[7, 70:] = -1, -1
    out, lse = sparse_mla(q, kv, indices, 0.05, 512, "triton")
    tiles = kernels.TILES._replace(chunk_rows=40 * top_k)
    found, again, wanted = (
        kernels.backward(grad, q, kv, indices, out, lse, 0.05, each)
        for each in (tiles, tiles, tiles._replace(uses_hopper=False))
    )
    assert torch.equal(found[0], again[0]) and torch.equal(found[1], again[1])
    assert_near(found, wanted, 1e-3)


@NEEDS_TRITON
def test_layers_that_share_a_choice_sort_its_keys_once(monkeypatch):
    from orrery.kernels import sparse_mla_triton as kernels

    calls, order = [], kernels._order_of_keys
    monkeypatch.setattr(kernels, "_order_of_keys", lambda *x: calls.append(x) or order(*x))
    q, kv, indices = attended(16, half("triton"), num_queries=25)
    shared = indices.clone()
    q, kv = q.detach().requires_grad_(), kv.detach().requires_grad_()
    outs = [sparse_mla(q, kv, each, 0.3, VALUE_WIDTH, "triton")[0] for each in (shared, shared)]
    (outs[0] + outs[1]).sum().backward()
    twice = kv.grad.clone()
    assert len(calls) == 1
    kv.grad = None
    (2 * sparse_mla(q, kv, indices, 0.3, VALUE_WIDTH, "triton")[0]).sum().backward()
    assert len(calls) == 2
    assert_near([twice], [kv.grad], 2e-2)


@NEEDS_TRITON
def test_only_outputs_of_queries_without_keys_are_cleared():
    from orrery.kernels import sparse_mla_triton as kernels

    out = torch.ones(5, 3, 700, dtype=torch.float16, device=DEVICE)
    out[1] = torch.nan
    kernels.clear_empty(out, torch.tensor([4, 0, 1, 0, 128], dtype=torch.int32, device=DEVICE))
    is_cleared = torch.tensor([False, True, False, True, False], device=DEVICE)
    assert torch.equal(out, torch.where(is_cleared, 0.0, 1.0).half()[:, None, None].expand_as(out))


def test_both_bases_of_flash_mlas_log_sum_exp_are_known():
    assert flash_mla.lse_factor(math.log(64), 64) == 1.0
    assert flash_mla.lse_factor(6.0, 64) == math.log(2.0)
    with pytest.raises(ValueError, match="has an unknown base"):
        flash_mla.lse_factor(1.0, 64)


def test_both_ops_are_one_graph_to_the_compiler():
    def both(q, kv, *arguments):
        return sparse_mla(q, kv, select_keys(*arguments, 8), 0.3, VALUE_WIDTH)[0]

    q, kv, _ = attended(8)
    keys = indexed()
    compiled = torch.compile(both, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(q, kv, *keys), both(q, kv, *keys))


def test_shapes_that_do_not_match_are_refused():
    q, kv, indices = attended(8)
    with pytest.raises(ValueError, match=r"value_width 49 must be \[T, H, D\]"):
        sparse_mla(q, kv, indices, 0.3, 49)
    with pytest.raises(ValueError, match=r"must be torch\.int32 \[64, K\]"):
        sparse_mla(q, kv, indices.long(), 0.3, VALUE_WIDTH)
    index_q, k, weights, first, last = indexed()
    with pytest.raises(ValueError, match=r"must be \[T, H, D\], \[S, D\]"):
        select_keys(index_q, k[:, :4], weights, first, last, 8)
    with pytest.raises(ValueError, match=r"must be \[64\]"):
        select_keys(index_q, k, weights, first[:3], last, 8)


def naive_kl(q_index, k_index, weights, q, kv, chosen, scale):
    """Return KL(mean attention ‖ softmax of index scores) of each query, in a loop."""
    values = []
    for t, row in enumerate(chosen.tolist()):
        keys = [index for index in row if index >= 0]
        if not keys:
            values.append(q_index.new_zeros(()))
            continue
        attention = (q[t] @ kv[keys].T * scale).softmax(dim=-1).sum(dim=0)
        p = (attention / attention.sum()).detach()
        score = (weights[t][:, None] * (q_index[t] @ k_index[keys].T).relu()).sum(dim=0)
        values.append((p * (p.log() - score.log_softmax(dim=0))).sum())
    return torch.stack(values)


def kl_inputs(top_k, dtype):
    q, k, weights, *_ = indexed()
    attention_q, kv, chosen = attended(top_k)
    indexing = [x.to(dtype).requires_grad_() for x in (q, k, weights)]
    attending = [x.detach().to(dtype).requires_grad_() for x in (attention_q, kv)]
    chosen = chosen.clone()
    chosen[3] = -1  # query 3 has no keys
    return indexing, attending, chosen


@pytest.mark.parametrize("chunk", [1, 2**24])
@pytest.mark.parametrize("top_k", [4, 64])
def test_the_loss_of_an_indexer_is_the_kl_of_its_scores_to_attention(top_k, chunk, monkeypatch):
    """Top-k 4 is below most documents' lengths, 64 above all. Float32 may differ by 1e-5."""
    for name in ("CHUNK_ELEMENTS", "GPU_CHUNK_ELEMENTS"):
        monkeypatch.setattr(mla_module, name, chunk)
    grad = torch.randn(NUM_TOKENS, generator=torch.Generator().manual_seed(2)).double().to(DEVICE)
    indexing, attending, chosen = kl_inputs(top_k, torch.float64)
    wanted = naive_kl(*indexing, *attending, chosen, 0.3)
    wanted.backward(grad)
    expected = [x.grad for x in indexing]
    for dtype, share in ((torch.float64, 1e-12), (torch.float32, 1e-5)):
        indexing, attending, chosen = kl_inputs(top_k, dtype)
        attention = attention_of_chosen(*attending, chosen, 0.3)
        found = index_kl(chosen_scores(*indexing, chosen), attention, chosen)
        found.backward(grad.to(dtype))
        assert found.dtype == dtype and found[3] == 0
        assert (found - wanted).norm() <= share * wanted.norm()
        for tensor, one in zip(indexing, expected, strict=True):
            assert (tensor.grad - one).norm() <= share * one.norm()
        assert all(x.grad is None for x in attending), "attention does not learn from the indexer"


def test_scores_of_tensors_that_do_not_fit_are_refused():
    q, k, weights, *_ = indexed()
    chosen = select_keys(*indexed(), 4)
    with pytest.raises(ValueError, match=r"must be \[T, J, I\]"):
        chosen_scores(q, k[:, :4], weights, chosen)
