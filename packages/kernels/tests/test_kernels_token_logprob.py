"""The chunked LM head against its referee."""

import pytest
import torch

from orrery.kernels.token_logprob import reference_token_logprob, token_logprob


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


def outcome(op, hidden, weight, target, temperature, g, h, *chunk):
    hidden, weight = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
    logprob, entropy = op(hidden, weight, target, temperature, *chunk)
    (logprob * g + entropy * h).sum().backward()
    return logprob.detach(), entropy.detach(), hidden.grad, weight.grad


def assert_close(actual, expected, tolerance):
    for a, e in zip(actual, expected, strict=True):
        assert ((a.double() - e.double()).abs().max() / e.double().abs().max()).item() <= tolerance


@pytest.mark.parametrize("chunk_tokens", [1, 8, 37, 64])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
def test_values_and_gradients_equal_the_referee_at_any_chunk_length(chunk_tokens, dtype, tolerance):
    expected = outcome(reference_token_logprob, *example())
    assert_close(outcome(token_logprob, *example(dtype=dtype), chunk_tokens), expected, tolerance)


def test_gradients_pass_gradcheck_through_both_outputs():
    hidden, weight, target, temperature, *_ = example(num_tokens=5, hidden=4, vocab=7)
    assert torch.autograd.gradcheck(
        lambda hidden, weight: token_logprob(hidden, weight, target, temperature, 2), (hidden.requires_grad_(), weight.requires_grad_())
    )


def test_gradient_of_one_output_alone_equals_the_referee():
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
    expected = outcome(reference_token_logprob, hidden.double(), weight.double(), target, temperature, g, h)
    actual = outcome(token_logprob, hidden, weight, target, temperature, g.float(), h.float(), 8)
    assert actual[0].dtype == torch.float32 and actual[3].dtype == torch.bfloat16
    assert_close(actual[:2], expected[:2], 1e-5)
    assert_close(actual[2:], expected[2:], 2e-2)  # the logits' gradient is rounded to bfloat16 before its products


def test_no_tokens_give_no_numbers_and_zero_gradients():
    hidden, weight, target, temperature, g, h = example(num_tokens=0)
    logprob, _, _, weight_grad = outcome(token_logprob, hidden, weight, target, temperature, g, h, 8)
    assert logprob.shape == (0,) and weight_grad.abs().max() == 0


def test_never_holds_more_logits_than_one_chunk():
    num_tokens, vocab, chunk = 64, 1000, 4
    sizes = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out if isinstance(out, tuple | list) else [out]) if isinstance(x, torch.Tensor))
            return out

    hidden, weight, target, temperature, *_ = example(num_tokens, hidden=2, vocab=vocab, dtype=torch.float32)
    with Watch():
        logprob, entropy = token_logprob(hidden.requires_grad_(), weight.requires_grad_(), target, temperature, chunk)
        (logprob.sum() + entropy.sum()).backward()
    assert max(sizes) == chunk * vocab


def test_shapes_that_do_not_go_together_are_refused():
    hidden, weight, target, temperature, *_ = example()
    with pytest.raises(ValueError, match="do not go together"):
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
    expected = outcome(reference_token_logprob, hidden.double(), weight.double(), target, temperature, g, h)
    actual = outcome(token_logprob, hidden, weight, target, temperature, g.float(), h.float(), 24)
    assert_close(actual[:2], expected[:2], 1e-5)
    assert_close(actual[2:], expected[2:], 2e-2)
