"""The fast kernels under `ring` and with exchanged experts, all ranks on one device.

The reference is attention over whole documents. On a CPU the same code runs in float64 and float32.
Its only error there is rounding, so it shows that the ranks' parts are combined correctly.
"""

import threading
from types import SimpleNamespace

import numpy as np
import pytest
import rank_threads
import torch
from trainer_cases import MOE, manifest

from orrery.kernels.attention import Documents, dispatch, flash, reference_varlen_attention
from orrery.models.layers import Attention, Experts, MixtureOfExperts, rotary_angles
from orrery.trainer.parallel.context_parallel import RingCore, zigzag
from orrery.trainer.parallel.expert_parallel import make_exchange

HEAD_DIM = 128
LENGTHS = {"cpu": [70, 1, 9, 150], "cuda": [700, 1, 96, 1500]}
HALF = pytest.param(
    "cuda",
    torch.bfloat16,
    marks=pytest.mark.skipif(
        not torch.cuda.is_available(), reason="half precision has forms of its own on a GPU"
    ),
)


@pytest.fixture(autouse=True)
def by_hand(monkeypatch):
    rank_threads.install(monkeypatch)


@pytest.fixture
def calls(monkeypatch):
    """Record the passes that FlashAttention 4 ran.

    A lock lets one rank at a time call kernels, because their compilers are not thread-safe.
    """
    seen, flash4, first_that_runs, lock = (
        [],
        dispatch.BACKENDS["flash4"],
        dispatch._run_first_that_succeeds,
        threading.Lock(),
    )

    def noted(name):
        def call(*args):
            seen.append(name)
            return getattr(flash4, name)(*args)

        return call

    def one_by_one(*args):
        with lock:
            return first_that_runs(*args)

    if is_hopper() and flash.load_flash4() is None:
        pytest.skip("NOT TESTED: FlashAttention 4 is not installed")
    passes = {name: noted(name) for name in ("forward", "backward")}
    monkeypatch.setitem(
        dispatch.BACKENDS, "flash4", SimpleNamespace(supports=flash4.supports, **passes)
    )
    monkeypatch.setattr(dispatch, "_run_first_that_succeeds", one_by_one)
    return seen


def is_hopper():
    return torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)


def check_calls(calls, device, num_ranks):
    """Check for one forward and one backward pass per rank: only its own block is causal."""
    assert sorted(calls) == (
        ["backward"] * num_ranks + ["forward"] * num_ranks
        if device == "cuda" and is_hopper()
        else []
    )
    assert not dispatch._failed


def draw(seed, *shape, device="cpu", dtype=torch.float64):
    return torch.randn(
        *shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64
    ).to(device, dtype)


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("num_heads", "num_kv_heads"), [(4, 2), (8, 2), (32, 4)])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float64), HALF])
def test_a_ring_makes_the_attention_and_the_gradients_of_whole_documents(
    device, dtype, num_heads, num_kv_heads, num_ranks, calls
):
    lengths = LENGTHS[device]
    num_tokens = sum(lengths)
    q, k, v, dout = (
        draw(i, num_tokens, heads, HEAD_DIM, device=device, dtype=dtype)
        for i, heads in enumerate((num_heads, num_kv_heads, num_kv_heads, num_heads))
    )
    cuts = [zigzag(lengths, num_ranks, rank) for rank in range(num_ranks)]
    sources = [torch.from_numpy(each.source).to(device) for each in cuts]
    real = [torch.from_numpy(each.is_real).to(device) for each in cuts]
    offsets = torch.from_numpy(cuts[0].cu_seqlens).to(device)
    longest = int(np.diff(cuts[0].cu_seqlens).max())

    def on_rank(group):
        here = sources[group.rank()]
        leaves = [x[here].requires_grad_() for x in (q, k, v)]
        out = RingCore(group)(*leaves, Documents(offsets, longest))
        out.backward(dout[here] * real[group.rank()][:, None, None])
        return out.detach(), *(leaf.grad for leaf in leaves)

    found = [torch.zeros_like(x, dtype=torch.float64) for x in (q, q, k, v)]
    for here, is_real, (out, *gradients) in zip(
        sources, real, rank_threads.on_ranks(num_ranks, on_rank), strict=True
    ):
        found[0][here[is_real]] = out[is_real].double()
        for whole, part in zip(found[1:], gradients, strict=True):
            whole.index_add_(0, here, part.double())

    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    cu_seqlens = torch.tensor([0, *np.cumsum(lengths)], dtype=torch.int32, device=device)
    out = reference_varlen_attention(*leaves, cu_seqlens)
    out.backward(dout.double())
    # bfloat16 rounds to 4e-3; outputs and gradients sum hundreds of such errors with random signs.
    tolerance = 2e-2 if dtype == torch.bfloat16 else 1e-10
    for whole, expected in zip(found, (out.detach(), *(leaf.grad for leaf in leaves)), strict=True):
        assert (whole - expected).abs().max() <= tolerance * expected.abs().max()
    check_calls(calls, device, num_ranks)


class Block(torch.nn.Module):
    """Attention and experts of a network, without the norms between them."""

    def __init__(self, config, exchange=None):
        super().__init__()
        self.attention, self.experts = (
            Attention(config),
            MixtureOfExperts(config.hidden_size, config.moe),
        )
        if exchange is not None:
            self.experts.exchange = exchange

    def forward(self, x, angles, documents, routes):
        x = x + self.attention(x, angles, documents)
        return x + self.experts(x, routes)[0]


MODEL = {
    "family": "qwen3_moe",
    "hidden_size": 256,
    "head_dim": HEAD_DIM,
    "num_heads": 4,
    "num_kv_heads": 2,
    "intermediate_size": 128,
}
MODEL["moe"] = {**MOE, "num_experts": 8, "expert_intermediate_size": 128}


@pytest.mark.parametrize("num_ranks", [2, 4])
@pytest.mark.parametrize(("device", "dtype"), [("cpu", torch.float32), HALF])
def test_attention_beside_exchanged_experts_makes_the_gradients_of_experts_that_are_all_here(
    device, dtype, num_ranks, calls
):
    """Each rank has its own documents and a share of the experts.

    Routes are given, because rounding may change the choice of an expert.
    """
    config = manifest(model=MODEL).model
    lengths = (
        [[900, 3], [250, 653], [1, 902], [451, 452]]
        if device == "cuda"
        else [[90, 3], [25, 68], [1, 92], [46, 47]]
    )[:num_ranks]
    num_tokens, num_local = sum(lengths[0]), config.moe.num_experts // num_ranks
    torch.manual_seed(0)
    whole = Block(config)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.copy_(
                0.05 * torch.randn(parameter.shape)
            ) if parameter.dim() > 1 else parameter.fill_(1.0)
            parameter.copy_(parameter.to(dtype))  # both dtypes hold the same numbers
    xs, douts = (
        [draw(i + base, num_tokens, 256, dtype=torch.float32).to(dtype) for i in range(num_ranks)]
        for base in (0, 50)
    )
    routes = [
        torch.rand(num_tokens, 8, generator=torch.Generator().manual_seed(i)).argsort(1)[:, :2]
        for i in range(num_ranks)
    ]
    positions = [torch.cat([torch.arange(length) for length in each]) for each in lengths]

    def run(block, rank, device, dtype):
        offsets = torch.tensor([0, *np.cumsum(lengths[rank])], dtype=torch.int32, device=device)
        angles = rotary_angles(positions[rank].to(device), HEAD_DIM, config.rope_theta, dtype)
        x = xs[rank].to(device, dtype).requires_grad_()
        out = block(x, angles, Documents(offsets, max(lengths[rank])), routes[rank].to(device))
        out.backward(douts[rank].to(device, dtype))
        return out.detach(), x.grad

    def on_rank(group):
        block = Block(config, make_exchange("torch", group, config.moe.num_experts))
        block.experts.experts = Experts(
            num_local, config.hidden_size, config.moe.expert_intermediate_size
        )
        with torch.no_grad():
            for name, parameter in block.named_parameters():
                source = whole.get_parameter(name)
                parameter.copy_(
                    source[group.rank() * num_local :][:num_local]
                    if ".experts.experts." in f".{name}"
                    else source
                )
        block.to(device, dtype)
        return *run(block, group.rank(), device, dtype), {
            name: parameter.grad for name, parameter in block.named_parameters()
        }

    ranks = rank_threads.on_ranks(num_ranks, on_rank)
    # Weight gradients add up.
    expected = [run(whole, rank, "cpu", torch.float32) for rank in range(num_ranks)]
    pairs = []
    for i, (actual, one) in enumerate(zip(ranks, expected, strict=True)):
        for what, a, e in zip(("output", "gradient"), actual, one, strict=False):
            pairs.append((f"{what} of rank {i}", a, e))
    for name, parameter in whole.named_parameters():
        parts = [gradients[name].float().cpu() for *_, gradients in ranks]
        pairs.append(
            (
                name,
                torch.cat(parts) if "experts.experts." in name else torch.stack(parts).sum(0),
                parameter.grad,
            )
        )
    # As on several GPUs: a half-precision gradient has tens of roundings of 4e-3 (random signs).
    tolerance = 5e-2 if dtype == torch.bfloat16 else 1e-5
    for name, actual, reference in pairs:
        error = torch.linalg.vector_norm(
            actual.float().cpu() - reference
        ) / torch.linalg.vector_norm(reference)
        assert error <= tolerance, (name, error)
    check_calls(calls, device, num_ranks)
