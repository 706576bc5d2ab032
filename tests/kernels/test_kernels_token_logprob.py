"""The chunked LM head against its reference.

The Triton backend runs on a GPU, or with TRITON_INTERPRET=1 on a CPU in its interpreter.
"""

import pytest
import torch
from triton_marks import DEVICE, NEEDS_TRITON

from orrery.kernels import token_logprob as lm_head
from orrery.kernels.token_logprob import (
    gradient,
    reference_token_logprob,
    token_logprob,
    update_state,
)
from orrery.manifest import devices

on_a_gpu = pytest.mark.skipif(DEVICE == "cpu", reason="there is no GPU here")


def example(num_tokens=37, hidden=16, vocab=50, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(num_tokens, hidden, generator=generator).to(dtype),
        torch.randn(vocab, hidden, generator=generator).to(dtype),
        torch.randint(0, vocab, (num_tokens,), generator=generator),
        0.5 + torch.rand(num_tokens, generator=generator),
        torch.randn(num_tokens, generator=generator).to(dtype),
        torch.randn(num_tokens, generator=generator).to(dtype),
    )


def outcome(op, hidden, weight, target, temperature, g, h, *chunk, **backend):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprob, entropy = op(hidden, weight, target, temperature, *chunk, **backend)
    (logprob * g + entropy * h).sum().backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert ((a.double() - e.double()).abs().max() / e.double().abs().max()).item() <= tolerance


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_equal_the_reference_at_any_chunk_length(
    chunk_tokens, dtype, tolerance
):
    expected = outcome(reference_token_logprob, *example())
    assert_close(outcome(token_logprob, *example(dtype=dtype), chunk_tokens), expected, tolerance)


def test_gradients_pass_gradcheck_through_both_outputs():
    hidden, weight, target, temperature, *_ = example(num_tokens=5, hidden=4, vocab=7)
    assert torch.autograd.gradcheck(
        lambda hidden, weight: token_logprob(hidden, weight, target, temperature, 2),
        (hidden.requires_grad_(), weight.requires_grad_()),
    )


def test_gradient_of_one_output_alone_equals_the_reference():
    hidden, weight, target, temperature, *_ = example()
    for output in (0, 1):
        gradients = []
        for op, chunk in ((reference_token_logprob, ()), (token_logprob, (8,))):
            leaf = hidden.clone().requires_grad_()
            op(leaf, weight, target, temperature, *chunk)[output].sum().backward()
            gradients.append(leaf.grad)
        assert_close(gradients[1:], gradients[:1], 1e-12)


def test_only_the_operand_that_wants_a_gradient_gets_one():
    hidden, weight, target, temperature, *_ = example()
    frozen, leaf = hidden.clone(), weight.clone().requires_grad_()
    token_logprob(frozen, leaf, target, temperature, 8)[0].sum().backward()
    assert frozen.grad is None and leaf.grad is not None
    assert not token_logprob(hidden, weight, target, temperature, 8)[0].requires_grad


def test_bfloat16_operands_give_float32_log_probs_of_the_rounded_operands():
    hidden, weight, target, temperature, g, h = example(dtype=torch.bfloat16)
    expected = outcome(
        reference_token_logprob, hidden.double(), weight.double(), target, temperature, g, h
    )
    actual = outcome(token_logprob, hidden, weight, target, temperature, g.float(), h.float(), 8)
    assert actual[0].dtype == torch.float32 and actual[3].dtype == torch.bfloat16
    assert_close(actual[:2], expected[:2], 1e-5)
    # The logits' gradient is rounded to bfloat16 before its products.
    assert_close(actual[2:], expected[2:], 2e-2)


def test_no_tokens_give_no_numbers_and_zero_gradients():
    hidden, weight, target, temperature, g, h = example(num_tokens=0)
    logprob, _, _, weight_grad = outcome(
        token_logprob, hidden, weight, target, temperature, g, h, 8
    )
    assert logprob.shape == (0,) and weight_grad.abs().max() == 0


@pytest.mark.parametrize(
    "backend", ["plain", pytest.param("triton", marks=on_a_gpu)]
)  # Triton's interpreter makes copies
@pytest.mark.parametrize(("num_tokens", "chunk"), [(64, 4), (64, 1000), (3, 4)])
def test_never_holds_more_logits_than_one_chunk(num_tokens, chunk, backend):
    vocab, sizes = 1000, []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                x.numel()
                for x in (out if isinstance(out, tuple | list) else [out])
                if isinstance(x, torch.Tensor)
            )
            return out

    hidden, weight, target, temperature, *_ = (
        x.to(DEVICE) for x in example(num_tokens, hidden=2, vocab=vocab, dtype=torch.float32)
    )
    with Watch():
        logprob, entropy = token_logprob(
            hidden.requires_grad_(),
            weight.requires_grad_(),
            target,
            temperature,
            chunk,
            backend=backend,
        )
        (logprob.sum() + entropy.sum()).backward()
    largest = max(sizes)
    assert (
        largest <= min(chunk, num_tokens) * vocab
        and largest >= 0.9 * min(chunk, num_tokens) * vocab
    )


@pytest.mark.parametrize(
    ("length", "longest"),
    [(0, 5), (5, 0), (1000, 128), (1000, 130), (151936, 94960), (16384, 10240), (300, 256)],
)
def test_blocks_cover_everything_once_in_as_few_as_can_be_or_one_more_for_alignment(
    length, longest
):
    found = devices.blocks(length, longest)
    assert [i for block in found for i in range(length)[block]] == list(range(length))
    assert all(block.stop - block.start <= max(1, longest) for block in found)
    assert len(found) == -(-length // max(1, longest))


def test_auto_takes_a_share_of_all_memory_and_not_of_what_is_free(monkeypatch):
    class H200:
        total_memory = 150 * 10**9

    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: H200)
    tokens = lm_head.auto_chunk_tokens(torch.device("cuda:0"), 151936)
    assert tokens % 128 == 0 and 0.9 < tokens * 151936 * 6 / (H200.total_memory / 16) <= 1
    assert lm_head.auto_chunk_tokens(torch.device("cpu"), 151936) == 256
    expected = outcome(reference_token_logprob, *example(num_tokens=300))
    assert_close(outcome(token_logprob, *example(num_tokens=300), "auto"), expected, 1e-12)


def test_frozen_operands_and_kept_logits_cost_no_product():
    products = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            products.append(func) if "mm" in str(func) else None
            return func(*args, **(kwargs or {}))

    hidden, weight, target, temperature, *_ = example(dtype=torch.float32)
    for of_hidden, of_weight in ((True, True), (True, False), (False, True)):
        for keep in (False, True):
            leaves = hidden.requires_grad_(of_hidden), weight.requires_grad_(of_weight)
            logprob, _ = token_logprob(*leaves, target, temperature, 8, keep_logits=keep)
            with Count():
                logprob.sum().backward()
            # Tiles of 8 of the 37 tokens.
            assert len(products) == 5 * (of_hidden + of_weight + (not keep))
            products.clear()


def softmax_of(update_state, block, target, temperature, edges=()):
    """Log-prob, entropy and log-normalizer of whole rows, absorbed in parts that end at `edges`."""
    state = lm_head.initial_state(block.shape[0], block.dtype, block.device)
    for first, last in zip((0, *edges), (*edges, block.shape[1]), strict=True):
        update_state(state, block[:, first:last].contiguous(), target, temperature, first)
    return lm_head.finish_state(state)


def rows_of(num_rows, vocab, seed=3):
    """Return a block of all logits, and its rows' other inputs.

    These are target, temperature, log-normalizer, entropy and two gradients.
    """
    generator = torch.Generator().manual_seed(seed)
    block = 4 * torch.randn(num_rows, vocab, generator=generator)
    target = torch.randint(0, vocab, (num_rows,), generator=generator)
    temperature = 0.5 + torch.rand(num_rows, generator=generator)
    _, entropy, log_normalizer = softmax_of(update_state, block.double(), target, temperature)
    gradients = torch.randn(2, num_rows, generator=generator).unbind()
    return block.to(DEVICE), tuple(
        x.to(DEVICE)
        for x in (target, temperature, log_normalizer.float(), entropy.float(), *gradients)
    )


@pytest.mark.parametrize("edges", [(), (1,), (3000, 8999), (4096,)])
def test_a_softmax_may_be_absorbed_in_any_parts(edges):
    block, (target, temperature, *_) = rows_of(5, 9000)
    block = block.double()
    block[0, 10], block[1, 8990] = 60, 60  # the maximum comes first in one row and late in another
    expected = torch.log_softmax(block / temperature[:, None], dim=1)
    logprob, entropy, _ = softmax_of(update_state, block.clone(), target, temperature, edges)
    torch.testing.assert_close(
        logprob, expected.gather(1, target[:, None]).squeeze(1), rtol=1e-12, atol=1e-12
    )
    torch.testing.assert_close(entropy, -(expected.exp() * expected).sum(1), rtol=1e-12, atol=1e-12)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("vocab", "edges"), [(7, ()), (4096, ()), (9000, ()), (9000, (3000,)), (9000, (1, 4098))]
)
def test_the_one_pass_softmax_of_triton_equals_float64(vocab, edges):
    from orrery.kernels import token_logprob_triton as triton

    block, (target, temperature, *_) = rows_of(5, vocab)
    block[1] += (
        1000  # a common offset cancels, except for the rounding of logits of 1000, 3e-5 each
    )
    expected = softmax_of(update_state, block.double(), target, temperature)
    actual = softmax_of(triton.update_state, block, target, temperature, edges)
    rest = torch.tensor([0, 2, 3, 4], device=DEVICE)
    for a, e in zip(actual, expected, strict=True):
        torch.testing.assert_close(a[rest].double(), e[rest], rtol=2e-6, atol=2e-6)
        torch.testing.assert_close(a[1].double(), e[1], rtol=0, atol=1e-3)


@NEEDS_TRITON
@pytest.mark.parametrize(
    ("vocab", "first_column", "width"), [(7, 0, 7), (9000, 100, 4096), (9000, 3000, 6000)]
)
def test_the_one_pass_gradient_of_triton_equals_the_plain_backend_in_any_block(
    vocab, first_column, width
):
    from orrery.kernels import token_logprob_triton as triton

    block, rows = rows_of(5, vocab)
    part = block[:, first_column : first_column + width].contiguous()
    # Rounding to bfloat16 costs at most 2⁻⁹. Triton's interpreter truncates: at most 2⁻⁷.
    for dtype, tolerance in (
        (torch.float32, 2e-6),
        (torch.bfloat16, 2**-9 if DEVICE == "cuda" else 2**-7),
    ):
        expected = gradient(part.double(), *rows, first_column, torch.float64)
        actual = triton.gradient(part.clone(), *rows, first_column, dtype)
        assert actual.dtype == dtype
        assert (actual.double() - expected).norm() <= tolerance * expected.norm()


@NEEDS_TRITON
def test_a_logit_that_is_no_number_comes_out_as_none():
    from orrery.kernels import token_logprob_triton as triton

    for bad in (float("nan"), float("inf")):
        for edges in ((), (3000,), (6000,)):
            block, (target, temperature, *_) = rows_of(3, 9000)
            block[1, 5000] = bad
            for values in softmax_of(triton.update_state, block, target, temperature, edges)[:2]:
                assert values.isnan().tolist() == [False, True, False]


@NEEDS_TRITON
@pytest.mark.parametrize("chunk_tokens", [1, 8, 64])
def test_the_whole_op_with_triton_equals_the_reference(chunk_tokens):
    expected = outcome(reference_token_logprob, *example())
    inputs = [x.to(DEVICE) for x in example(dtype=torch.float32)]
    assert_close(
        [x.cpu() for x in outcome(token_logprob, *inputs, chunk_tokens, backend="triton")],
        expected,
        1e-6,
    )


@pytest.mark.parametrize("backend", ["plain", "triton"])
@pytest.mark.parametrize(
    ("num_tokens", "vocab", "chunk"),
    [(37, 50, 8), (37, 50, 1), (5, 300, 64), (1000, 50, 1), (16384, 151936, 10240)],
)
def test_tiles_cover_every_logit_once(num_tokens, vocab, chunk, backend):
    found = lm_head.tiles(num_tokens, vocab, chunk, backend)
    sizes = [(tokens.stop - tokens.start) * (words.stop - words.start) for tokens, words in found]
    assert sum(sizes) == num_tokens * vocab and max(sizes) <= max(chunk * vocab, num_tokens)
    assert len({(tokens.start, words.start) for tokens, words in found}) == len(found)


def test_shapes_that_do_not_go_together_are_refused():
    hidden, weight, target, temperature, *_ = example()
    with pytest.raises(ValueError, match=r"must be \[T, D\] and \[V, D\]"):
        token_logprob(hidden.float(), weight, target, temperature, 8)
    with pytest.raises(ValueError, match=r"must be \[37\]"):
        token_logprob(hidden, weight, target[:-1], temperature, 8)
    with pytest.raises(ValueError, match="chunk_tokens"):
        token_logprob(hidden, weight, target, temperature, 0)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="the mixed product runs on a GPU only")
def test_bfloat16_on_a_gpu_accumulates_in_float32():
    tensors = example(num_tokens=64, hidden=256, vocab=1000, dtype=torch.bfloat16)
    hidden, weight, target, temperature, g, h = (x.cuda() for x in tensors)
    weight = weight / 8
    expected = outcome(
        reference_token_logprob, hidden.double(), weight.double(), target, temperature, g, h
    )
    actual = outcome(token_logprob, hidden, weight, target, temperature, g.float(), h.float(), 24)
    assert_close(actual[:2], expected[:2], 1e-5)
    assert_close(actual[2:], expected[2:], 2e-2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="device memory is counted on a GPU only")
def test_device_memory_holds_one_chunk_and_its_gradient_at_a_time():
    hidden, weight, target, temperature, *_ = (
        x.cuda() for x in example(4096, hidden=64, vocab=8192, dtype=torch.bfloat16)
    )
    hidden, weight, chunk = hidden.requires_grad_(), weight.requires_grad_(), 1024
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    logprob, _ = token_logprob(hidden, weight, target, temperature, chunk)
    assert torch.cuda.max_memory_allocated() - before <= 1.1 * chunk * 8192 * 4
    logprob.sum().backward()
    assert torch.cuda.max_memory_allocated() - before <= 1.25 * chunk * 8192 * 6


@pytest.mark.parametrize("backend", ["plain", pytest.param("triton", marks=NEEDS_TRITON)])
@pytest.mark.parametrize("chunk_tokens", [3, 100])
def test_logits_that_are_kept_give_the_bits_of_those_that_are_made_again(chunk_tokens, backend):
    hidden, weight = torch.randn(10, 8, device=DEVICE), torch.randn(12, 8, device=DEVICE)
    target, temperature = (
        torch.randint(0, 12, (10,), device=DEVICE),
        torch.rand(10, device=DEVICE) + 0.5,
    )
    found = []
    for keep in (False, True):
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logprob, entropy = token_logprob(
            *leaves, target, temperature, chunk_tokens, keep_logits=keep, backend=backend
        )
        (logprob + 0.3 * entropy).sum().backward()
        found.append((logprob, entropy, *(leaf.grad for leaf in leaves)))
    assert all(torch.equal(again, kept) for again, kept in zip(*found, strict=True))
