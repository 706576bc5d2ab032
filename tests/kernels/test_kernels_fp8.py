"""Block-scaled FP8: bytes of vLLM, and products of dequantized operands with their gradients."""

import os

import pytest
import torch
from torch import Tensor

from orrery.kernels.expert_rows import (
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
    swiglu_rows,
)
from orrery.kernels.fp8 import products
from orrery.kernels.fp8.products import fp8_experts, fp8_grouped_matmul, fp8_linear, weight_parts
from orrery.kernels.fp8.quantize import (
    BLOCK,
    DTYPE,
    HAS_TRITON,
    MAX,
    Quantized,
    RowGroups,
    dequantize_columns,
    dequantize_rows,
    dequantize_weight,
    group_of_rows,
    quantize,
    quantize_weight,
    reference_quantize_columns,
    reference_quantize_rows,
    reference_quantize_weight,
)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
HAS_KERNELS = HAS_TRITON and (DEVICE == "cuda" or IS_INTERPRETED)
GROUPS = RowGroups(  # 3 groups in 4 blocks of rows: full, empty, with padding, and rows of no group
    torch.tensor([128, 128, 384], dtype=torch.int32), torch.tensor([128, 0, 131], dtype=torch.int32)
)


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Return bfloat16 numbers whose blocks differ in size by powers of ten."""
    generator = torch.Generator().manual_seed(seed)
    sizes = torch.randint(-3, 4, (*shape[:-1], shape[-1] // 64), generator=generator)
    x = torch.randn(shape, generator=generator) * 10.0 ** sizes.repeat_interleave(64, -1)
    return x.bfloat16().to(DEVICE)


def same_bytes(found: Quantized, wanted: Quantized) -> bool:
    values = (each.value.view(torch.uint8) for each in (found, wanted))
    return torch.equal(*values) and torch.equal(found.scale, wanted.scale)


def test_rows_have_the_bytes_of_vllm():
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import QuantFP8
    from vllm.model_executor.layers.quantization.utils.quant_utils import GroupShape

    x = draw(64, 512).cpu()
    with set_current_vllm_config(VllmConfig()):
        peer = QuantFP8(static=False, group_shape=GroupShape(1, BLOCK), use_ue8m0=False)
        wanted = Quantized(*peer.forward_native(x))
    assert wanted.scale.min() > 1 / 448 / 512  # below it vLLM's native form differs from its kernel
    assert same_bytes(reference_quantize_rows(x), wanted)


def test_weights_have_the_bytes_of_vllm():
    from vllm.utils.deep_gemm import per_block_cast_to_fp8

    weight = draw(256, 512).cpu()
    weight[:128, :128] = 0
    with torch.compiler.set_stance("force_eager"):  # a compiled kernel would need a C++ compiler
        wanted = Quantized(*per_block_cast_to_fp8(weight, [BLOCK, BLOCK], use_ue8m0=False))
    assert same_bytes(reference_quantize_weight(weight), wanted)


def test_a_stack_of_weights_is_quantized_one_by_one():
    stack = draw(3, 256, 128)
    whole = quantize_weight(stack)
    for index, weight in enumerate(stack):
        for part, alone in zip(whole, quantize_weight(weight), strict=True):
            assert same_bytes(Quantized(part.value[index], part.scale[index]), alone)
    forward, backward = (dequantize_weight(each) for each in whole)
    assert torch.equal(backward, forward.mT)


def test_no_number_moves_by_more_than_half_a_step_of_e4m3():
    x = draw(200, 256)
    rows, columns = quantize(x)
    blocks = x.float().unflatten(1, (-1, BLOCK)).abs().amax(2).repeat_interleave(BLOCK, 1)
    # 3 bits of mantissa, or 2^-10 of the scale below the smallest normal number. 1 % for division.
    step = torch.maximum(x.float().abs() * 2**-4, blocks / 448 * 2**-10) * 1.01
    assert ((dequantize_rows(rows) - x.float()).abs() <= step).all()
    assert columns.value.shape == (256, 256) and columns.value.dtype == DTYPE
    assert torch.equal(dequantize_columns(columns)[:, 200:], torch.zeros(256, 56, device=DEVICE))


def test_a_group_has_the_bytes_of_its_rows_alone():
    groups = RowGroups(*(each.to(DEVICE) for each in GROUPS))
    x = draw(512, 256)
    x[384:] = float("nan")
    x[259:384] = float("nan")
    rows, columns = quantize(x, groups)
    for begin, count, padded in ((0, 128, 128), (128, 131, 256)):
        alone = x[begin : begin + count]
        wanted_rows, wanted = quantize(alone)
        here = slice(begin, begin + count)
        assert same_bytes(Quantized(rows.value[here], rows.scale[here]), wanted_rows)
        flat = columns.value[begin * 256 : (begin + padded) * 256].view(256, padded)
        blocks = slice(begin // BLOCK, (begin + padded) // BLOCK)
        assert same_bytes(Quantized(flat, columns.scale[blocks]), wanted)
    assert not rows.value[259:384].float().any()


def plain_linear(x: Tensor, weight: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    """Return y and both gradients by float32 products of dequantized operands."""
    w = dequantize_weight(reference_quantize_weight(weight))
    y = dequantize_rows(reference_quantize_rows(x)) @ w.T
    grad_x = dequantize_rows(reference_quantize_rows(grad)) @ w
    columns = (dequantize_columns(reference_quantize_columns(each)) for each in (grad, x))
    grad_columns, x_columns = columns
    return y, grad_x, grad_columns @ x_columns.T


def close(found: Tensor, wanted: Tensor) -> None:
    """Float32 sums of equal products, in any order."""
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


@pytest.mark.parametrize("is_given", [False, True])
def test_a_layer_and_its_gradients_are_products_of_dequantized_operands(is_given):
    x = draw(200, 256).float().cpu().requires_grad_()
    weights = [draw(n, 256, seed=n).float().cpu().requires_grad_() for n in (128, 384)]
    joined, grad = torch.cat(weights).detach(), draw(200, 512, seed=3).float().cpu()
    outputs = fp8_linear(x, weights, weight_parts(joined) if is_given else None)
    assert [each.shape for each in outputs] == [(200, 128), (200, 384)]
    torch.cat(outputs, 1).backward(grad)
    y, grad_x, grad_weight = plain_linear(x.detach(), joined, grad)
    close(torch.cat(outputs, 1), y)
    close(x.grad, grad_x)
    close(torch.cat([weight.grad for weight in weights]), grad_weight)


def test_a_layer_keeps_its_weights_and_no_copy_of_them():
    x = draw(128, 128).cpu().requires_grad_()
    weights = [draw(128, 128, seed=n).cpu().requires_grad_() for n in range(2)]
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda one: kept.append(one) or one, lambda x: x):
        fp8_linear(x, weights)
    wide = [one for one in kept if one.dtype == torch.bfloat16]
    assert [one.data_ptr() for one in wide] == [weight.data_ptr() for weight in weights]


def test_groups_and_their_gradients_are_layers():
    x, grad = (draw(512, k, seed=k).float().cpu() for k in (256, 128))
    weight = draw(3, 128, 256, seed=1).float().cpu().requires_grad_()
    x.requires_grad_()
    y = fp8_grouped_matmul(x, weight, GROUPS, weight_parts(weight.detach()))
    y.backward(grad)
    for e, begin, count in ((0, 0, 128), (2, 128, 131)):
        here = slice(begin, begin + count)
        wanted = plain_linear(x.detach()[here], weight.detach()[e], grad[here])
        for found, each in zip((y[here], x.grad[here], weight.grad[e]), wanted, strict=True):
            close(found, each)
    assert not weight.grad[1].any()


def experts_from_parts(x, score, rows, weights, parts):
    """Compute `fp8_experts` with separate operators."""
    groups = RowGroups(rows.ends_E, rows.counts_E)
    is_real = group_of_rows(groups, len(rows.row_M)) >= 0
    x_rows = torch.where(is_real[:, None], gather_rows(x, rows), 0)
    y = fp8_grouped_matmul(x_rows, weights[0], groups, parts[0])
    act = swiglu_rows(y, torch.where(is_real, order_slots(score, rows), 0))
    out = fp8_grouped_matmul(act, weights[1], groups, parts[1])
    return combine_rows(torch.where(is_real[:, None], out, 0), rows)


@pytest.mark.parametrize("frozen", [None, 0, 1, 2, 3])
@pytest.mark.parametrize("is_given", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_experts_have_the_bits_of_their_parts(dtype, is_given, frozen):
    expert = torch.rand(70, 3, generator=torch.Generator().manual_seed(0)).argsort(1)
    expert[expert == 1] = 3  # expert 1 gets no token, and id 3 means no expert
    rows = sort_by_expert(expert, 3, BLOCK)
    last = int(rows.ends_E[-1])
    place = torch.where(expert < 3, rows.place_TK, -1)
    rows = rows._replace(row_M=rows.row_M[: last + BLOCK], place_TK=place)
    inputs = [
        draw(70, 256),
        torch.rand(70, 3),
        draw(3, 256, 256, seed=1),
        draw(3, 256, 128, seed=2),
    ]
    inputs[2:] = [weight * 1e-3 for weight in inputs[2:]]
    grad, found = draw(70, 256, seed=3).to("cpu", dtype), []
    for how in (experts_from_parts, fp8_experts):
        leaves = [each.detach().to("cpu", dtype).requires_grad_() for each in inputs]
        if frozen is not None:
            leaves[frozen].requires_grad_(False)
        parts = [weight_parts(weight.detach()) if is_given else [] for weight in leaves[2:]]
        out = how(*leaves[:2], rows, tuple(leaves[2:]), tuple(parts))
        out.backward(grad)
        found.append([out.detach(), *(each.grad for each in leaves)])
    for index, (one, other) in enumerate(zip(*found, strict=True)):
        if index - 1 == frozen:
            assert one is None and other is None
            continue
        assert one.isfinite().all() and torch.equal(one, other), index


def test_compiled_experts_have_the_eager_bits():
    def run(x, score, expert, gate_up, down):
        rows = sort_by_expert(expert, 2, BLOCK)
        return fp8_experts(x, score, rows, (gate_up, down), ([], []))

    expert = torch.tensor([[0, 1], [1, 0], [1, 0]])
    results = []
    for how in (run, torch.compile(run, backend="aot_eager", fullgraph=True)):
        leaves = [draw(3, 128), torch.ones(3, 2), draw(2, 256, 128, seed=1), draw(2, 128, 128)]
        x, score, gate_up, down = (each.float().cpu().requires_grad_() for each in leaves)
        out = how(x, score, expert, gate_up, down)
        out.sum().backward()
        results.append([out.detach(), *(each.grad for each in (x, score, gate_up, down))])
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def test_frozen_weights_get_no_gradient_and_keep_no_columns():
    x, weight = draw(128, 128).cpu().requires_grad_(), draw(128, 128).cpu()
    value_t = products._linear(x, [weight], [], False)[1]
    assert value_t.numel() == 0
    fp8_linear(x, [weight])[0].float().sum().backward()
    assert x.grad is not None and weight.grad is None


@pytest.mark.parametrize("with_parts", [False, True])
def test_the_operators_are_sound_for_compilers(with_parts):
    x, weight = draw(256, 128).cpu().requires_grad_(), draw(2, 128, 128).cpu().requires_grad_()
    groups = RowGroups(
        *(torch.tensor(each, dtype=torch.int32) for each in ([128, 256], [100, 128]))
    )
    parts = weight_parts(weight.detach()) if with_parts else []
    one = weight.detach()[0].requires_grad_()
    dense = [part[0] for part in parts]
    checks = ["test_autograd_registration", "test_faketensor"]
    if not with_parts:  # torch's check of schemas multiplies all inputs, and FP8 has no product
        checks.append("test_schema")
    torch.library.opcheck(
        torch.ops.orrery.fp8_linear.default, (x, [one], dense, True), test_utils=checks
    )
    torch.library.opcheck(
        torch.ops.orrery.fp8_grouped.default, (x, weight, parts, *groups, True), test_utils=checks
    )


def test_a_compiled_layer_has_the_eager_bits():
    weight, grad = draw(256, 128).cpu(), draw(256, 256, seed=5).cpu()
    parts = weight_parts(weight)
    results = []
    for run in (fp8_linear, torch.compile(fp8_linear, backend="aot_eager", fullgraph=True)):
        x, w = draw(256, 128).cpu().requires_grad_(), weight.clone().requires_grad_()
        y = run(x, [w], parts)[0]
        y.backward(grad)
        results.append((y.detach(), x.grad, w.grad))
    assert all(torch.equal(*pair) for pair in zip(*results, strict=True))


def misaligned():
    rows = sort_by_expert(torch.zeros(65, 2, dtype=torch.int64), 1)
    weights = torch.zeros(1, 256, 128), torch.zeros(1, 128, 128)
    return fp8_experts(torch.zeros(65, 128), torch.zeros(65, 2), rows, weights, ([], []))


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: quantize(torch.zeros(2, 100)), "x is 2 × 100, but FP8 needs .* a multiple of 128"),
        (
            lambda: quantize_weight(torch.zeros(2, 64, 128)),
            "weight is 2 × 64 × 128, but FP8 needs multiples of 128",
        ),
        (
            lambda: fp8_linear(torch.zeros(2, 128), [torch.zeros(64, 128)]),
            "an FP8 layer has 64 outputs, but needs a multiple of 128",
        ),
        (misaligned, "FP8 experts got 130 rows"),
    ],
)
def test_other_widths_are_refused(call, words):
    with pytest.raises(ValueError, match=words):
        call()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_a_gpu_has_the_bytes_of_the_reference(groups):
    x = draw(512, 1024)
    on_device = None if groups is None else RowGroups(*(each.to(DEVICE) for each in groups))
    rows, columns = (Quantized(*(each.cpu() for each in part)) for part in quantize(x, on_device))
    clean, last = x.cpu().clone(), 512 if groups is None else 384
    if groups is not None:
        clean[259:] = 0
    wanted = reference_quantize_rows(clean)
    here = slice(0, last)
    found = Quantized(rows.value[here], rows.scale[here])
    assert same_bytes(found, Quantized(wanted.value[here], wanted.scale[here]))
    wanted = reference_quantize_columns(clean, groups)
    if groups is not None:
        columns, wanted = (
            Quantized(each.value[: last * 1024], each.scale[: last // BLOCK])
            for each in (columns, wanted)
        )
    assert same_bytes(columns, wanted)


def exact(*shape: int) -> Tensor:
    """Return numbers of e4m3 whose every block has the scale 1."""
    generator = torch.Generator().manual_seed(0)
    x = 2.0 ** torch.randint(-3, 8, shape, generator=generator)
    index = torch.arange(max(shape))
    x[..., index[: shape[-2]], index[: shape[-2]] % BLOCK] = MAX
    for column in range(BLOCK, shape[-1], BLOCK):
        x[..., index[: shape[-2]], column + index[: shape[-2]] % BLOCK] = -MAX
    return x.bfloat16().to(DEVICE)


@pytest.mark.skipif(not HAS_KERNELS, reason="needs Triton and a GPU, or its interpreter")
@pytest.mark.parametrize("side", [32, 128])
@pytest.mark.parametrize("groups", [None, GROUPS])
def test_triton_places_values_and_scales_as_the_reference(groups, side, monkeypatch):
    """With exact numbers, because Triton's interpreter does not round to e4m3 correctly."""
    from orrery.kernels.fp8 import quantize_triton

    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(quantize_triton, name, (side, 4))
    x, weight = exact(512, 256), exact(2, 256, 384)
    on_device = None if groups is None else RowGroups(*(each.to(DEVICE) for each in groups))
    found = quantize_triton.quantize(x, on_device, True, True)
    clean, last = x.cpu().clone(), 512
    if groups is not None:
        last = 384
        clean[259:] = 0
    rows, columns = reference_quantize_rows(clean), reference_quantize_columns(clean, groups)
    assert torch.equal(found[0][:last].cpu().float(), rows.value[:last].float())
    assert torch.equal(found[1][:last].cpu(), rows.scale[:last])
    values = found[2].cpu().float().view(columns.value.shape)
    if groups is None:
        assert torch.equal(values, columns.value.float())
    else:
        assert torch.equal(values[: 384 * 256], columns.value[: 384 * 256].float())
    assert torch.equal(found[3][: last // BLOCK].cpu(), columns.scale[: last // BLOCK])
    wanted = reference_quantize_weight(weight.cpu())
    value, scale, value_t, scale_t = (
        each.cpu() for each in quantize_triton.quantize_weight(weight)
    )
    assert torch.equal(value.float(), wanted.value.float())
    assert torch.equal(value_t.float(), value.float().mT) and torch.equal(scale_t, scale.mT)
    torch.testing.assert_close(scale, wanted.scale, rtol=2e-7, atol=0)  # a rounding of 1/448


@pytest.mark.skipif(not HAS_KERNELS, reason="needs Triton and a GPU, or its interpreter")
@pytest.mark.parametrize("side", [32, 128])
@pytest.mark.parametrize("source", ["tokens", "activation"])
def test_triton_permutes_and_activates_rows_as_the_reference(source, side, monkeypatch):
    from orrery.kernels.fp8 import quantize_triton

    for name in ("ROWS", "COLUMNS"):
        monkeypatch.setattr(quantize_triton, name, (side, 4))
    groups = RowGroups(*(each.to(DEVICE) for each in GROUPS))
    x, sources = exact(512, 256), {}
    if source == "tokens":
        x = x[:200]
        sources["token_M"] = torch.arange(512, device=DEVICE) * 7 % 200
        rows = x[sources["token_M"]]
    else:
        # silu(64) is 64 in float32 and the score 1/64, so the activation is exactly `up`.
        sources["score_M"] = torch.full((512,), 1 / 64, device=DEVICE)
        rows, x = x, torch.cat([torch.full_like(x, 64.0), x], 1)
        assert torch.equal(swiglu_rows(x, sources["score_M"]), rows)
    found = quantize_triton.quantize(x, groups, True, True, **sources)
    wanted = quantize_triton.quantize(rows.contiguous(), groups, True, True)
    lengths = (384, 384, 384 * 256, 3)  # the part of each result that groups fill
    for one, other, length in zip(found, wanted, lengths, strict=True):
        assert one.shape == other.shape
        assert torch.equal(one[:length].float(), other[:length].float())
    assert found[0][:384].float().any() and found[2][: 384 * 256].float().any()


@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("stack", [(), (3,)])
def test_a_gpu_transposes_quantized_weights(stack):
    forward, backward = quantize_weight(draw(*stack, 512, 384))
    wanted = reference_quantize_weight(draw(*stack, 512, 384).cpu())
    assert torch.equal(backward.value.float(), forward.value.float().mT)
    assert torch.equal(backward.scale, forward.scale.mT)
    # Triton divides by an approximate reciprocal, so a number between two codes may get either.
    codes = (each.value.cpu().view(torch.uint8).int() for each in (forward, wanted))
    assert (next(codes) - next(codes)).abs().max() <= 1
    torch.testing.assert_close(forward.scale.cpu(), wanted.scale, rtol=3e-7, atol=0.0)
