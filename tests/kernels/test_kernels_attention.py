"""Packed attention against its reference."""

import collections
import contextlib
import functools
import itertools
import os
import types

import pytest
import torch
from functorch.compile import min_cut_rematerialization_partition, nop
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orrery.kernels.attention import (
    Documents,
    attention_backward,
    attention_forward,
    cudnn,
    dispatch,
    flash,
    portable,
    reference_varlen_attention,
    varlen_attention,
)
from orrery.kernels.attention import (
    layout as layout_module,
)
from orrery.kernels.attention.flash import load_flash4
from orrery.kernels.attention.layout import Layout
from orrery.kernels.attention.portable import Grids

padded, batched, plain, cudnn_packed = (
    dispatch.BACKENDS[name] for name in ("padded", "batched", "plain", "cudnn_packed")
)

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
    k, v = torch.randn(
        2, num_tokens, num_kv_heads, head_dim, generator=generator, dtype=torch.float64
    )
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    return q, k, v, cu_seqlens


def outcome(op, q, k, v, documents):
    q, k, v = (x.clone().requires_grad_() for x in (q, k, v))
    out = op(q, k, v, documents)
    out.backward(
        torch.linspace(-1, 1, out.numel(), dtype=out.dtype, device=out.device).view_as(out)
    )
    return out.detach(), q.grad, k.grad, v.grad


@pytest.mark.parametrize("num_kv_heads", [1, 2, 4])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_values_and_gradients_equal_the_reference(lengths, num_kv_heads):
    q, k, v, cu_seqlens = pack(lengths, num_kv_heads=num_kv_heads)
    for actual, expected in zip(
        outcome(varlen_attention, q, k, v, cu_seqlens),
        outcome(reference_varlen_attention, q, k, v, cu_seqlens),
        strict=True,
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


def test_grids_are_worked_out_once_and_padding_stays_below_a_third():
    lengths = torch.randint(1, 200, (300,), generator=torch.Generator().manual_seed(0)).tolist()
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    grids = Grids.of(cu_seqlens)
    assert Grids.of(cu_seqlens.clone()) is grids and Documents(cu_seqlens).max_seqlen == max(
        lengths
    )
    assert sum(source.numel() for source in grids.sources) <= sum(lengths) * 4 / 3
    assert len(grids.sources) <= 20


def test_heads_that_do_not_divide_are_refused():
    q, k, v, cu_seqlens = pack([4], num_heads=4, num_kv_heads=3)
    with pytest.raises(ValueError, match="not a multiple"):
        varlen_attention(q, k, v, cu_seqlens)


def offsets(*lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def dense_scores(q, k, cu_seqlens_q, cu_seqlens_k, causal):
    """Return [H, T, S] scores by definition, with −∞ where a query does not see a key."""
    scores = torch.full((q.shape[1], q.shape[0], k.shape[0]), -torch.inf, dtype=torch.float64)
    pairs = zip(
        itertools.pairwise(cu_seqlens_q.tolist()),
        itertools.pairwise(cu_seqlens_k.tolist()),
        strict=True,
    )
    for (q0, q1), (k0, k1) in pairs:
        keys = k[k0:k1].double().repeat_interleave(q.shape[1] // k.shape[1], dim=1)
        block = torch.einsum("thd,shd->hts", q[q0:q1].double(), keys) * q.shape[-1] ** -0.5
        if causal:
            row, column = torch.arange(q1 - q0)[:, None], torch.arange(k1 - k0)
            block = block.masked_fill(column > row + (k1 - k0) - (q1 - q0), -torch.inf)
        scores[:, q0:q1, k0:k1] = block
    return scores


# Keys before, as many as, and fewer than the queries; a document without keys, one without queries.
CROSS = {
    "as many": ([5, 3], [5, 3]),
    "more keys": ([4, 6], [9, 6]),
    "fewer keys": ([7, 2], [3, 2]),
    "none": ([3, 0, 4], [0, 5, 4]),
}


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("lengths", CROSS.values(), ids=CROSS)
def test_queries_and_keys_of_different_tokens_agree_with_the_definition(lengths, causal):
    cu_q, cu_k = offsets(*lengths[0]), offsets(*lengths[1])
    generator = torch.Generator().manual_seed(1)
    q, dout = torch.randn(2, sum(lengths[0]), 4, 8, generator=generator, dtype=torch.float64)
    k, v = torch.randn(2, sum(lengths[1]), 2, 8, generator=generator, dtype=torch.float64)
    counts = cu_q, cu_k, max(lengths[0]), max(lengths[1]), causal
    out, lse = attention_forward(q, k, v, *counts)
    q_, k_, v_ = (x.clone().requires_grad_() for x in (q, k, v))
    scores = dense_scores(q_, k_, cu_q, cu_k, causal)
    sees = scores.detach().amax(-1) > -torch.inf
    weights = torch.where(sees[..., None], scores, 0.0).softmax(-1) * sees[..., None]
    expected = torch.einsum("hts,shd->thd", weights, v_.repeat_interleave(2, dim=1))
    torch.testing.assert_close(out, expected.detach(), rtol=1e-10, atol=1e-10)
    torch.testing.assert_close(lse, scores.detach().logsumexp(-1).t(), rtol=1e-10, atol=1e-10)
    assert (out[~sees.t()] == 0).all()
    expected.backward(dout)
    for actual, leaf in zip(
        attention_backward(dout, q, k, v, out, lse, *counts), (q_, k_, v_), strict=True
    ):
        torch.testing.assert_close(actual, leaf.grad, rtol=1e-10, atol=1e-10)


def test_parts_of_the_keys_merge_into_the_whole_forward_and_backward():
    q, k, v, cu = pack([6, 4])
    dout = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q)
    whole = cu, cu, 6, 6, False
    out, lse = attention_forward(q, k, v, *whole)
    # the first 3 keys of the first document and 1 of the second; the rest
    parts = [
        (torch.tensor([0, 1, 2, 6]), offsets(3, 1)),
        (torch.tensor([3, 4, 5, 7, 8, 9]), offsets(3, 3)),
    ]
    outputs = [
        attention_forward(q, k[keep], v[keep], cu, cu_k, 6, 3, False) for keep, cu_k in parts
    ]
    merged = sum(part * (part_lse - lse).exp()[..., None] for part, part_lse in outputs)
    torch.testing.assert_close(merged, out, rtol=1e-10, atol=1e-10)
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for keep, cu_k in parts:
        part = attention_backward(dout, q, k[keep], v[keep], out, lse, cu, cu_k, 6, 3, False)
        dq += part[0]
        dk[keep], dv[keep] = part[1], part[2]
    for actual, expected in zip(
        (dq, dk, dv), attention_backward(dout, q, k, v, out, lse, *whole), strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


def test_blocks_of_queries_do_not_show(monkeypatch):
    q, k, v, cu = pack([23, 9])
    layout = Layout(cu, cu, 23, 23, True, 0.3)
    dout = torch.ones_like(q)
    whole = plain.forward(q, k, v, layout)
    gradients = plain.backward(dout, (q, k, v, *whole), layout)
    monkeypatch.setattr(portable, "_BLOCK_QUERIES", 4)
    for actual, expected in zip(plain.forward(q, k, v, layout), whole, strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    for actual, expected in zip(
        plain.backward(dout, (q, k, v, *whole), layout), gradients, strict=True
    ):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_backends_of_a_cpu_agree_and_can_take_over_from_one_another(dtype):
    q, k, v, cu = pack([9, 7, 20])
    q, k, v = (x.to(dtype) for x in (q, k, v))
    layout = Layout(cu, cu, 20, 20, True, 8**-0.5)
    assert dispatch.candidates(q, k, layout) == ["padded", "plain"]
    out, lse = padded.forward(q, k, v, layout)
    # Sums of up to 20 terms; a bfloat16 keeps 8 bits.
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    for actual, expected in zip((out, lse), plain.forward(q, k, v, layout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)
    dout = torch.linspace(-1, 1, q.numel()).view_as(q).to(dtype)
    given = dout, (q, k, v, out, lse), layout
    for actual, expected in zip(padded.backward(*given), plain.backward(*given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("rows", [1, 2, 100])
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_batches_in_plain_products_agree_with_documents_one_by_one_however_many_go_at_a_time(
    lengths, rows, monkeypatch
):
    monkeypatch.setattr(portable, "_rows", lambda *_: rows)
    q, k, v, cu = pack(lengths)
    layout = Layout(cu, cu, max(lengths), max(lengths), True, 8**-0.5)
    out, lse = batched.forward(q, k, v, layout)
    for actual, expected in zip((out, lse), plain.forward(q, k, v, layout), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)
    dout = torch.linspace(-1, 1, q.numel(), dtype=q.dtype).view_as(q)
    given = dout, (q, k, v, out, lse), layout
    for actual, expected in zip(batched.backward(*given), plain.backward(*given), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("module", ["builtins", "cudnn", "cutlass.base_dsl.common"])
def test_a_backend_that_fails_is_left_out_and_the_next_one_answers(module, monkeypatch, caplog):
    q, k, v, cu = pack([5, 8])
    expected = varlen_attention(q, k, v, cu)
    asked = []
    kind = (
        RuntimeError
        if module == "builtins"
        else type("ItsOwnError", (Exception,), {"__module__": module})
    )

    def no_plan(*_):
        asked.append(1)
        raise kind("No valid execution plans built.")

    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(padded, "forward", no_plan)
    with caplog.at_level("WARNING"):
        for _ in range(2):
            torch.testing.assert_close(
                varlen_attention(q, k, v, cu), expected, rtol=1e-10, atol=1e-10
            )
    assert (
        len(asked) == 1
        and sum("No valid execution plans" in record.getMessage() for record in caplog.records) == 1
    )


@pytest.mark.parametrize("kind", [AssertionError, OSError, ValueError])
def test_what_flash_attention_4_refuses_another_backend_computes(kind):
    with (
        pytest.raises(RuntimeError, match=f"{kind.__name__}: no") as caught,
        flash._as_runtime_error(),
    ):
        raise kind("no")
    assert type(caught.value) is RuntimeError  # `dispatch` then runs the next one


def test_running_out_of_memory_is_not_taken_for_a_backend_that_cannot(monkeypatch):
    def out_of_memory(*_):
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(dispatch, "_failed", set())
    monkeypatch.setattr(padded, "forward", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        varlen_attention(*pack([5, 8]))
    assert not dispatch._failed


def test_compiled_kernels_are_kept_where_nobody_else_can_put_any(monkeypatch, tmp_path):
    names = "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "FLASH_ATTENTION_CUTE_DSL_CACHE_DIR"
    monkeypatch.setattr(flash.tempfile, "gettempdir", lambda: str(tmp_path))
    for name in names:
        monkeypatch.setenv(name, "")  # so that what is set below goes with the test
        monkeypatch.delenv(name)
    folder = tmp_path / f"orrery-flash4-{os.getuid()}"
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    flash._set_compile_cache()
    folder.unlink()
    folder.mkdir()
    folder.chmod(0o777)
    flash._set_compile_cache()
    assert not set(names) & os.environ.keys()
    folder.rmdir()
    flash._set_compile_cache()
    assert [os.environ[name] for name in names] == [
        "1",
        str(folder),
    ] and folder.stat().st_mode & 0o777 == 0o700


def test_a_private_operator_of_another_signature_is_left_alone_and_named(caplog):
    layout_module._matches.cache_clear()
    with caplog.at_level("WARNING"):
        assert not layout_module.has_signatures(
            {"_flash_attention_forward": "query key queries_per_key"}
        )
        assert not layout_module.has_signatures({"_no_such_attention": "query"})
    assert "queries_per_key" in caplog.text and "_no_such_attention" in caplog.text


@pytest.mark.parametrize(
    "signatures",
    [portable._SIGNATURES, flash._FLASH2_SIGNATURES, cudnn._DENSE_SIGNATURES],
    ids=["padded", "flash", "cudnn_dense"],
)
def test_private_operators_of_this_torch_are_those_that_the_backends_were_written_for(signatures):
    assert layout_module.has_signatures(signatures)


def operator_arguments(dtype=torch.float32, lengths=(5, 8)):
    q, k, v, cu = pack(list(lengths))
    q, k, v = (x.to(dtype).requires_grad_() for x in (q, k, v))
    return q, k, v, cu, cu, max(lengths), max(lengths), True, 8**-0.5


def test_the_operator_keeps_the_rules_of_operators():
    arguments = operator_arguments()
    torch.library.opcheck(torch.ops.orrery.varlen_attention_forward.default, arguments)
    q, k, v, *rest = (x.detach() if isinstance(x, torch.Tensor) else x for x in arguments)
    out, lse = torch.ops.orrery.varlen_attention_forward(q, k, v, *rest)
    given = torch.ones_like(out), q, k, v, out, lse, *rest
    torch.library.opcheck(torch.ops.orrery.varlen_attention_backward.default, given)


def test_gradients_agree_with_finite_differences():
    q, k, v, *rest = operator_arguments(torch.float64, (3, 4))
    assert torch.autograd.gradcheck(
        lambda q, k, v: torch.ops.orrery.varlen_attention_forward(q, k, v, *rest)[0], (q, k, v)
    )


def test_compiled_code_has_no_graph_break_and_new_packings_no_new_compilation():
    graphs = []

    def counting(graph, inputs):
        graphs.append(graph)
        return aot_autograd(
            fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
        )(graph, inputs)

    def attend(q, k, v, documents):
        return varlen_attention(q, 2 * k, v, documents).sin()

    torch._dynamo.reset()
    compiled = torch.compile(attend, fullgraph=True, backend=counting)
    for lengths in ([5, 8], [4, 9, 3], [2, 2, 2, 12], [7, 1, 11]):
        q, k, v, cu = pack(lengths)
        documents = Documents(cu, max(lengths))
        for actual, expected in zip(
            outcome(compiled, q, k, v, documents), outcome(attend, q, k, v, documents), strict=True
        ):
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)
    assert len(graphs) <= 2  # one for the first packing, one for all that follow


def test_attention_is_not_recomputed_where_a_checkpoint_policy_names_it_nor_by_the_compiler(
    monkeypatch,
):
    calls = collections.Counter()

    def counted(name, run, *arguments):
        calls[name] += 1
        return run(*arguments)

    for name in ("forward", "backward"):
        run = getattr(dispatch, f"run_{name}")
        monkeypatch.setattr(dispatch, f"run_{name}", functools.partial(counted, name, run))

    def policy(_, op, *args, **kwargs):
        named = op is torch.ops.orrery.varlen_attention_forward.default
        return CheckpointPolicy.MUST_SAVE if named else CheckpointPolicy.PREFER_RECOMPUTE

    def attend(q, k, v, documents):
        return varlen_attention(q.sin(), k, v, documents).cos()

    def checkpointed(*arguments, **options):
        return checkpoint(attend, *arguments, use_reentrant=False, **options)

    def compiled(function):
        torch._dynamo.reset()
        backend = aot_autograd(
            fw_compiler=nop, bw_compiler=nop, partition_fn=min_cut_rematerialization_partition
        )
        return torch.compile(function, fullgraph=True, backend=backend)

    selective = functools.partial(
        checkpointed, context_fn=functools.partial(create_selective_checkpoint_contexts, policy)
    )
    q, k, v, cu = pack([5, 8])
    documents = Documents(cu, 8)
    expected = outcome(attend, q, k, v, documents)
    # a checkpoint without a policy runs it twice: the count can tell
    for op, times in (
        (attend, 1),
        (compiled(attend), 1),
        (selective, 1),
        (compiled(selective), 1),
        (checkpointed, 2),
    ):
        calls.clear()
        found = outcome(op, q, k, v, documents)
        assert calls == {"forward": times, "backward": 1}
        for actual, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


class Described:
    """A tensor of cuDNN's graph."""

    def __init__(self, dim=None, stride=None, **_):
        self.dim, self.stride, self.ragged_offset = dim, stride, None

    def set_output(self, _):
        return self

    set_data_type = set_output

    def set_dim(self, dim):
        self.dim = dim
        return self

    def set_stride(self, stride):
        self.stride = stride
        return self

    def set_ragged_offset(self, tensor):
        self.ragged_offset = tensor
        return self


class FakeGraph:
    """Compute attention only from cuDNN's inputs: dims, strides, ragged offsets and lengths."""

    built = 0

    def __init__(self, **_):
        self.passes = {}

    def tensor(self, **options):
        return Described(**options)

    def sdpa(self, **given):
        assert given["use_padding_mask"] and given["generate_stats"]
        self.given, self.outputs = given, [Described(), Described()]
        return self.outputs

    def sdpa_backward(self, **given):
        self.given, self.outputs = given, [Described(), Described(), Described()]
        return self.outputs

    def build_plans(self):
        FakeGraph.built += 1

    def validate(self, *_):
        pass

    build_operation_graph = create_execution_plans = check_support = validate

    def get_workspace_size(self):
        return 16

    def execute(self, data, workspace, handle):
        given = self.given
        lengths_q, lengths_k = data[given["seq_len_q"]], data[given["seq_len_kv"]]
        assert (
            given["q"].dim[0] == len(lengths_q)
            and max(lengths_q) <= given["q"].dim[2]
            and max(lengths_k) <= given["k"].dim[2]
        )
        for i, (queries, keys) in enumerate(
            zip(lengths_q.tolist(), lengths_k.tolist(), strict=True)
        ):

            def of(tensor, count, i=i):
                (_, heads, _, size), (_, *stride) = tensor.dim, tensor.stride
                return (
                    data[tensor]
                    .view(-1)
                    .as_strided((heads, count, size), stride, int(data[tensor.ragged_offset][i]))
                )

            group = given["q"].dim[1] // given["k"].dim[1]
            q, k, v = (
                of(given["q"], queries).double(),
                *(of(given[x], keys).double().repeat_interleave(group, 0) for x in "kv"),
            )
            scores = q @ k.mT * given["attn_scale"]
            if given.get("diagonal_band_right_bound") == 0:
                scores = scores.masked_fill(
                    torch.ones(queries, keys, dtype=torch.bool).triu(1), -torch.inf
                )
            if "dO" not in given:
                of(self.outputs[0], queries).copy_(scores.softmax(-1) @ v)
                of(self.outputs[1], queries).copy_(scores.logsumexp(-1, keepdim=True))
                continue
            assert (
                sum(lengths_q) <= given["max_total_seq_len_q"]
                and sum(lengths_k) <= given["max_total_seq_len_kv"]
            )
            weights = (scores - of(given["stats"], queries)).exp()
            dout, out = of(given["dO"], queries).double(), of(given["o"], queries).double()
            dscores = (
                weights * (dout @ v.mT - (dout * out).sum(-1, keepdim=True)) * given["attn_scale"]
            )
            dk, dv = (
                (x.mT @ y).unflatten(0, (-1, group)).sum(1)
                for x, y in ((dscores, q), (weights, dout))
            )
            for tensor, gradient, count in zip(
                self.outputs, (dscores @ k, dk, dv), (queries, keys, keys), strict=True
            ):
                of(tensor, count).copy_(gradient)


FAKE_CUDNN = types.SimpleNamespace(
    pygraph=FakeGraph,
    data_type=types.SimpleNamespace(
        BFLOAT16="bf16", HALF="f16", FLOAT="f32", INT32="i32", INT64="i64"
    ),
    heur_mode=types.SimpleNamespace(A=0, FALLBACK=1),
    diagonal_alignment=types.SimpleNamespace(TOP_LEFT=0),
)


@pytest.fixture
def fake_cudnn(monkeypatch):
    """Run the packed backend on a CPU with `FakeGraph`. Unwritten memory is NaN."""
    monkeypatch.setattr(cudnn, "load_library", lambda: FAKE_CUDNN)
    monkeypatch.setattr(cudnn, "_ready", contextlib.nullcontext)
    monkeypatch.setattr(FakeGraph, "built", 0)
    cudnn._plan.cache_clear()
    torch.use_deterministic_algorithms(True)  # fills new memory with NaN
    yield
    torch.use_deterministic_algorithms(False)
    cudnn._plan.cache_clear()


PACKED = {
    "five documents": ([130, 1, 0, 57, 70], None),
    "one": ([200], None),
    "ring": ([30, 0, 13, 4], [9, 64, 0, 70]),
}


@pytest.mark.parametrize("lengths", PACKED.values(), ids=PACKED)
def test_cudnn_is_told_of_packed_documents_what_makes_it_right(lengths, fake_cudnn):
    lengths_q, lengths_k = lengths[0], lengths[1] or lengths[0]
    q, _, _, cu_q = pack(lengths_q)
    _, k, v, cu_k = pack(lengths_k, seed=1)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    layout = Layout(
        cu_q,
        cu_q if lengths[1] is None else cu_k,
        max(lengths_q),
        max(lengths_k),
        lengths[1] is None,
        8**-0.5,
    )
    dout = torch.linspace(-1, 1, q.numel()).view_as(q).bfloat16()
    out, lse = cudnn_packed.forward(q, k, v, layout)
    expected, expected_lse = plain.forward(q, k, v, layout)
    # Two roundings to bfloat16's 8 bits.
    close = functools.partial(torch.testing.assert_close, rtol=1e-2, atol=1e-2)
    close(out, expected)
    close(lse, expected_lse)
    gradients = cudnn_packed.backward(dout, (q, k, v, expected, expected_lse), layout)
    for actual, wanted in zip(
        gradients, plain.backward(dout, (q, k, v, expected, expected_lse), layout), strict=True
    ):
        close(actual, wanted)


def test_packs_of_like_sizes_share_a_plan(fake_cudnn):
    for lengths in ([60, 40, 28], [50, 50, 20, 8], [100, 20, 8]):
        q, k, v, cu = pack(lengths)
        q, k, v = (x.bfloat16() for x in (q, k, v))
        cudnn_packed.forward(q, k, v, Layout(cu, cu, max(lengths), max(lengths), True, 1.0))
    assert FakeGraph.built == 1


def test_counts_are_rounded_up_by_less_than_a_half():
    assert [cudnn.round_up(x) for x in (0, 1, 128, 129, 192, 193, 256, 257, 65536, 65537)] == [
        *(128, 128, 128, 192, 192, 256, 256, 384, 65536, 98304)
    ]
    assert all(x <= cudnn.round_up(x) < 1.5 * x for x in range(128, 5000))


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="float32 has a backend of its own on a GPU"
)
@pytest.mark.parametrize("lengths", PACKS.values(), ids=PACKS)
def test_float32_on_a_gpu_agrees_with_the_reference(lengths):
    q, k, v, cu_seqlens = (x.cuda() for x in pack(lengths, head_dim=64))
    layout = Layout(cu_seqlens, cu_seqlens, max(lengths), max(lengths), True, 64**-0.5)
    assert dispatch.candidates(q.float(), k.float(), layout) == ["batched", "plain"]
    actual = outcome(varlen_attention, *(x.float() for x in (q, k, v)), cu_seqlens)
    expected = outcome(
        reference_varlen_attention, *(x.float().double() for x in (q, k, v)), cu_seqlens
    )
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= 1e-5 * e.abs().max()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="half precision has backends of its own on a GPU"
)
@pytest.mark.parametrize("backend", ["chosen", "cudnn_dense", "cudnn_packed", "flash4", "flash"])
@pytest.mark.parametrize("lengths", [*PACKS.values(), [256, 256]], ids=[*PACKS, "chosen lengths"])
def test_backends_of_a_gpu_agree_with_the_reference_within_bfloat16(lengths, backend, monkeypatch):
    head_dim = 128 if backend == "flash4" else 64
    q, k, v, cu_seqlens = (x.cuda() for x in pack(lengths, head_dim=head_dim))
    layout = Layout(cu_seqlens, cu_seqlens, max(lengths), max(lengths), True, head_dim**-0.5)
    if backend != "chosen":
        if not dispatch.BACKENDS[backend].supports(q.bfloat16(), k.bfloat16(), layout):
            pytest.skip(f"{backend} does not take this here")
        monkeypatch.setattr(dispatch, "_order", [backend])
    actual = outcome(varlen_attention, *(x.bfloat16() for x in (q, k, v)), cu_seqlens)
    expected = outcome(
        reference_varlen_attention, *(x.bfloat16().double() for x in (q, k, v)), cu_seqlens
    )
    for a, e in zip(actual, expected, strict=True):
        assert (a.double() - e).abs().max() <= 2e-2 * e.abs().max()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="half precision has backends of its own on a GPU"
)
@pytest.mark.parametrize("backend", ["cudnn_packed", "flash"])
def test_backends_of_a_gpu_take_queries_and_keys_of_different_tokens(backend, monkeypatch):
    """As in ring attention: no mask, documents without keys or without queries."""
    q, _, _, cu_q = pack([300, 0, 513, 40], head_dim=64)
    _, k, v, cu_k = pack([129, 64, 0, 700], head_dim=64, seed=1)
    q, k, v = (x.cuda().bfloat16() for x in (q, k, v))
    layout = Layout(cu_q.cuda(), cu_k.cuda(), 513, 700, False, 64**-0.5)
    if not dispatch.BACKENDS[backend].supports(q, k, layout):
        pytest.skip(f"{backend} does not take this here")
    dout = torch.linspace(-1, 1, q.numel(), device="cuda").view_as(q).bfloat16()
    wide = [x.double() for x in (dout, q, k, v)]
    out, lse = plain.forward(*wide[1:], layout)
    expected = out, lse, *plain.backward(wide[0], (*wide[1:], out, lse), layout)
    given = dispatch.BACKENDS[backend].forward(q, k, v, layout)
    actual = *given, *dispatch.BACKENDS[backend].backward(dout, (q, k, v, *given), layout)
    for a, e in zip(actual, expected, strict=True):
        seen = e > -torch.inf
        assert (a[~seen] == -torch.inf).all()
        assert (a.double() - e)[seen].abs().max() <= 2e-2 * e[seen].abs().max()


@pytest.mark.skipif(
    not torch.cuda.is_available(), reason="half precision has backends of its own on a GPU"
)
@pytest.mark.parametrize("num_heads, num_kv_heads", [(16, 8), (32, 4)])
def test_a_gpu_that_is_asked_for_the_same_bits_gives_them(num_heads, num_kv_heads):
    lengths = [4000, 1, 96, 8000, 700]
    q, k, v, cu_seqlens = (x.cuda() for x in pack(lengths, num_heads, num_kv_heads, head_dim=128))
    q, k, v = (x.bfloat16() for x in (q, k, v))
    torch.use_deterministic_algorithms(True)
    try:
        first, *others = (outcome(varlen_attention, q, k, v, cu_seqlens) for _ in range(8))
    finally:
        torch.use_deterministic_algorithms(False)
    for other in others:
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_a_preferred_backend_comes_first_and_plain_excludes_the_others(monkeypatch):
    monkeypatch.setattr(dispatch, "_order", list(dispatch.BACKENDS))
    dispatch.prefer("fa2")
    assert dispatch._order[0] == "flash" and set(dispatch._order) == set(dispatch.BACKENDS)
    dispatch.prefer("plain")
    assert dispatch._order == ["padded", "batched", "plain"]
    dispatch.prefer("auto")
    assert dispatch._order == list(dispatch.BACKENDS)


@pytest.mark.skipif(load_flash4() is not None, reason="flash-attn-4 is installed here")
def test_a_backend_whose_package_is_missing_cannot_be_preferred(monkeypatch):
    with pytest.raises(ValueError, match="package flash-attn-4 cannot be imported here; install"):
        dispatch.prefer("fa4")
