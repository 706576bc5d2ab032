"""Optimizers: kinds against references, shards against the whole, offloaded or not, and norms."""

import importlib
import itertools
import math

import pytest
import torch
from optim_cases import ADAMW, SHAPES, SPECS, Toy, gradients, spec_of, take_steps
from trainer_cases import (
    MEMORY,
    make_learner,
    manifest,
    run_script,
    whole_weights,
    write_start_weights,
)
from trainer_rank import train

from orrery.trainer.optim import clip, gradient_norm, make_optimizer, muon, named_state
from orrery.trainer.optim.muon import _bounds, is_block_matrix, newton_schulz
from orrery.trainer.optim.optimizer import BucketedOptimizer
from orrery.trainer.parallel.world import World

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]
WORLD = World(0, 1, torch.device("cpu"), None)


def small_buckets(toy: Toy, kind: str, offload: bool) -> BucketedOptimizer:
    """As `make_optimizer`, with buckets of 2 KiB that cut the toy's weights in many places."""
    made = make_optimizer(toy, spec_of(kind))
    return BucketedOptimizer(made.groups, offload, bucket_bytes=2048)


def equal(one: Toy, other: Toy) -> bool:
    return all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


# Every kind --------------------------------------------------------------------------------------


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("prefetch", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_offloaded_state_in_small_buckets_gives_the_same_bits(kind, prefetch, device):
    plain, offloaded, whole = Toy().to(device), Toy().to(device), Toy().to(device)
    take_steps(plain, small_buckets(plain, kind, False), [1, 2, 3])
    take_steps(offloaded, small_buckets(offloaded, kind, True), [1, 2, 3], prefetch=prefetch)
    take_steps(whole, make_optimizer(whole, spec_of(kind)), [1, 2, 3])
    assert equal(plain, offloaded)
    # There the sizes of batches choose kernels.
    assert equal(plain, whole) or (kind in ("muon", "muon_without_nesterov") and device == "cuda")
    assert not equal(whole, Toy().to(device))


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_state_filled_by_name_goes_on_with_the_same_bits(kind, offload):
    first, second = Toy(), Toy()
    from_, to = small_buckets(first, kind, not offload), small_buckets(second, kind, offload)
    take_steps(first, from_, [1, 2])
    to.prefetch()  # fetched values from before the fill must not be used
    state = {
        (key, name): (tensor.clone(), box)
        for key, name, tensor, box in named_state(from_, dict(first.named_parameters()))
    }
    for key, name, tensor, box in named_state(to, dict(second.named_parameters())):
        assert state[key, name][1] == box
        tensor.copy_(state.pop((key, name))[0])
    assert not state
    second.load_state_dict(first.state_dict())
    take_steps(first, from_, [3])
    take_steps(second, to, [3])
    assert equal(first, second)


@pytest.mark.parametrize("kind", SPECS)
def test_a_divisor_is_as_if_gradients_had_been_divided(kind):
    divided, scaled = Toy(), Toy()
    take_steps(divided, make_optimizer(divided, spec_of(kind)), [1, 2], divisor=4.0)
    optimizer = make_optimizer(scaled, spec_of(kind))
    for step in (1, 2):
        for name, weight in scaled.named_parameters():
            weight.grad = gradients(step)[name] / 4
        optimizer.step()
    assert equal(divided, scaled)  # a power of two: exact


@pytest.mark.parametrize("offload", [False, True])
@pytest.mark.parametrize("kind", SPECS)
def test_a_weight_without_gradient_stays_and_does_not_count_the_step(kind, offload):
    toy, missing = Toy(), ("layers.0.q.weight", "layers.1.bias")
    optimizer = small_buckets(toy, kind, offload)
    for name, weight in toy.named_parameters():
        weight.grad = None if name in missing else gradients(1)[name]
    optimizer.step()
    for (name, weight), old in zip(toy.named_parameters(), Toy().parameters(), strict=True):
        assert torch.equal(weight, old) == (name in missing), name
    steps = {
        name: tensor.item()
        for key, name, tensor, _ in named_state(optimizer, dict(toy.named_parameters()))
        if key == "step"
    }
    assert all(step == (name not in missing) for name, step in steps.items())


@pytest.mark.parametrize("kind", SPECS)
def test_weight_decay_shrinks_matrices_and_no_others_and_the_rate_scales_all(kind):
    toy = Toy()
    optimizer = make_optimizer(toy, spec_of(kind))
    optimizer.set_rate(0.5)
    for weight in toy.parameters():
        weight.grad = torch.zeros_like(weight)
    optimizer.step()
    rates = {
        id(weight): group.lr * group.weight_decay
        for group in optimizer.groups
        for weight in group.weights
    }
    for weight, old in zip(toy.parameters(), Toy().parameters(), strict=True):
        assert (rates[id(weight)] > 0) == (weight.ndim >= 2)
        torch.testing.assert_close(
            weight, old * (1 - 0.5 * rates[id(weight)]), rtol=1e-6, atol=1e-7
        )


def test_frozen_weights_have_no_state():
    toy = Toy()
    toy.get_parameter("embed.weight").requires_grad_(False)
    optimizer = make_optimizer(toy, spec_of("adamw"))
    assert toy.get_parameter("embed.weight") not in optimizer.state
    assert len(optimizer.state) == len(SHAPES) - 1


@pytest.mark.parametrize("kind", ["adamw", "muon", "sgd", "sign_sgd"])
def test_a_learner_steps_with_every_kind_and_offload_changes_no_bit(kind, tmp_path):
    learners = []
    ways = [{}, {"optimizer_offload": True}]
    if kind != "muon":
        ways.append({"optimizer_offload": True, "optimizer_offload_resident": 0.5})
    for number, way in enumerate(ways):
        spec = manifest(trainer={"optimizer": SPECS[kind], "memory": MEMORY | way})
        start = write_start_weights(spec, tmp_path / str(number))
        learners.append(make_learner(spec, start))
        rows = train(learners[-1], [1, 2, 3])
        assert rows[-1]["learning_rate"] == SPECS[kind]["lr"]
        assert all(math.isfinite(row["loss"]) for row in rows)
    if kind == "adamw":  # at most half of the state stays on the device
        whole, rest = (
            sum(
                block.nbytes
                for one in learner.optimizer.offload.host.values()
                for block in one.values()
            )
            for learner in learners[1:]
        )
        assert whole / 2 <= rest < 0.9 * whole
    plain = whole_weights(learners[0])
    for learner in learners[1:]:
        for name, weight in whole_weights(learner).items():
            assert torch.equal(weight, plain[name]), name
    for name, weight in make_learner(spec, start).weights.items():
        assert not torch.equal(weight, learners[0].weights[name]), name


# Each kind and its reference ---------------------------------------------------------------------


def test_a_step_at_a_small_rate_moves_weights_in_float32_and_is_lost_in_bfloat16():
    """This is the reason that a manifest may not have weights in bfloat16."""
    moved = {}
    for dtype in (torch.float32, torch.bfloat16):
        layer = torch.nn.Linear(16, 16, bias=False, dtype=dtype)
        torch.nn.init.constant_(layer.weight, 0.02)
        optimizer = make_optimizer(
            layer, spec_of("adamw").model_copy(update={"lr": 1e-6, "weight_decay": 0.0})
        )
        before = layer.weight.detach().clone()
        for _ in range(10):
            layer.weight.grad = torch.ones_like(layer.weight)
            optimizer.step()
        moved[dtype] = int((layer.weight.detach() != before).sum())
    assert moved == {torch.float32: 256, torch.bfloat16: 0}


def reference_steps(toy: Toy, optimizer: torch.optim.Optimizer, steps: list[int]) -> None:
    for step in steps:
        for name, weight in toy.named_parameters():
            weight.grad = gradients(step)[name]
        optimizer.step()


def test_adamw_has_the_bits_of_torch():
    ours, theirs = Toy(), Toy()
    take_steps(ours, small_buckets(ours, "adamw", True), [1, 2, 3])
    split = [
        [w for w in theirs.parameters() if w.ndim >= 2],
        [w for w in theirs.parameters() if w.ndim < 2],
    ]
    options = [
        {"params": split[0], "weight_decay": ADAMW["weight_decay"]},
        {"params": split[1], "weight_decay": 0.0},
    ]
    reference_steps(
        theirs,
        torch.optim.AdamW(options, lr=1e-2, betas=(0.9, 0.99), eps=1e-8, fused=True),
        [1, 2, 3],
    )
    assert equal(ours, theirs)


@pytest.mark.parametrize("kind", ["sgd", "sgd_without_momentum"])
def test_sgd_has_the_bits_of_torch(kind):
    ours, theirs = Toy(), Toy()
    take_steps(ours, small_buckets(ours, kind, True), [1, 2, 3])
    split = [
        [w for w in theirs.parameters() if w.ndim >= 2],
        [w for w in theirs.parameters() if w.ndim < 2],
    ]
    options = [{"params": split[0], "weight_decay": 0.1}, {"params": split[1], "weight_decay": 0.0}]
    reference_steps(
        theirs,
        torch.optim.SGD(options, lr=1e-2, momentum=SPECS[kind]["momentum"], fused=True),
        [1, 2, 3],
    )
    assert equal(ours, theirs)


def test_sign_sgd_moves_each_value_by_the_rate():
    toy = Toy()
    take_steps(toy, make_optimizer(toy, spec_of("sign_sgd")), [1])
    for (name, weight), old in zip(toy.named_parameters(), Toy().parameters(), strict=True):
        kept = 1 - 1e-3 * 0.1 if old.ndim >= 2 else 1.0
        torch.testing.assert_close(
            weight, old * kept - 1e-3 * gradients(1)[name].sign(), rtol=1e-6, atol=1e-7
        )


@pytest.mark.parametrize("kind", ["muon", "muon_without_nesterov"])
def test_muon_is_torchs_where_that_is_defined_and_stacks_are_their_matrices(kind, monkeypatch):
    ours = Toy()
    take_steps(ours, make_optimizer(ours, spec_of(kind)), [1, 2, 3])
    # torch's Muon always iterates in bfloat16. Ours uses float32 on a CPU.
    monkeypatch.setattr(torch.Tensor, "bfloat16", torch.Tensor.clone)

    def parts(name, tensor):
        halves = [tensor]
        if "gate_up" in name:
            halves = tensor.chunk(2, 2 if "layers.1" in name else 1)
        return [matrix for half in halves for matrix in (half if half.ndim == 3 else [half])]

    matrices = {
        name: weight for name, weight in Toy().named_parameters() if is_block_matrix(name, weight)
    }
    assert {name for name in SHAPES if name not in matrices} == {
        "embed.weight",
        "layers.0.norm.weight",
        "layers.0.mlp.gate.weight",
        "layers.1.bias",
    }
    for name, weight in matrices.items():
        theirs = [torch.nn.Parameter(part.detach().clone()) for part in parts(name, weight)]
        reference = torch.optim.Muon(
            theirs,
            lr=2e-2,
            weight_decay=0.1,
            momentum=0.9,
            nesterov=SPECS[kind]["nesterov"],
            adjust_lr_fn="match_rms_adamw",
        )
        for step in (1, 2, 3):
            for weight_part, gradient in zip(
                theirs, parts(name, gradients(step)[name]), strict=True
            ):
                weight_part.grad = gradient.clone()
            reference.step()
        for mine, other in zip(parts(name, ours.get_parameter(name)), theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=2e-6)


def test_the_rest_of_muon_is_adamw():
    ours, theirs = Toy(), Toy()
    take_steps(ours, make_optimizer(ours, spec_of("muon")), [1, 2])
    take_steps(theirs, make_optimizer(theirs, spec_of("adamw")), [1, 2])
    for (name, mine), other in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        assert torch.equal(mine, other) == (not is_block_matrix(name, mine)), name


@pytest.mark.parametrize(
    "name",
    ["network.embed_tokens.weight", "network.lm_head.weight", "network.layers.3.mlp.gate.weight"],
)
def test_what_is_no_matrix_of_a_block(name):
    assert not is_block_matrix(name, torch.empty(4, 4))
    assert is_block_matrix("network.layers.3.mlp.gate_proj.weight", torch.empty(4, 4))


def test_the_adapter_of_a_fused_projection_is_two_matrices_where_its_weight_is():
    shapes = {
        "gate_up_proj": (2, 12, 8),
        "gate_up_lora.a": (2, 4, 8),
        "gate_up_lora.b": (2, 12, 4),
        "down_lora.b": (2, 8, 4),
    }
    toy = Toy({f"network.layers.0.mlp.experts.{name}": shape for name, shape in shapes.items()})
    weights = dict(toy.named_parameters())
    group, *_ = muon.groups(spec_of("muon"), toy, weights)
    fused = {
        name.rpartition("experts.")[2]
        for name, weight in weights.items()
        if weight in group.rule.fused
    }
    assert len(group.weights) == 4 and fused == {"gate_up_proj", "gate_up_lora.b"}


STACKS = {  # class of transformers: how to separate its gate and up projections
    "mixtral.modeling_mixtral.MixtralExperts": lambda w: w.chunk(2, dim=1),
    "gpt_oss.modeling_gpt_oss.GptOssExperts": lambda w: (w[..., ::2], w[..., 1::2]),
    "llama4.modeling_llama4.Llama4TextExperts": lambda w: w.chunk(2, dim=2),
    "aria.modeling_aria.AriaExperts": lambda w: w.chunk(2, dim=2),
}


@pytest.mark.parametrize("inner", [6, 10, 20])  # at 10, gate_up_proj is square
@pytest.mark.parametrize("kind", STACKS)
def test_stacks_of_transformers_are_two_matrices_an_expert(kind, inner):
    module, _, name = kind.rpartition(".")
    configs = importlib.import_module(f"transformers.models.{module.split('.')[0]}")
    made = importlib.import_module(f"transformers.models.{module}")
    config = {
        "MixtralExperts": "MixtralConfig",
        "GptOssExperts": "GptOssConfig",
        "Llama4TextExperts": "Llama4TextConfig",
        "AriaExperts": "AriaTextConfig",
    }[name]
    sizes = {"hidden_size": 20, "intermediate_size": inner}
    counts = {"num_local_experts": 3, "moe_num_experts": 3, "num_attention_heads": 2}
    experts = getattr(made, name)(getattr(configs, config)(**sizes, **counts))
    policy = torch.nn.Module()
    policy.layers = torch.nn.ModuleList([torch.nn.Module()])
    policy.layers[0].experts = experts
    old = torch.randn(experts.gate_up_proj.shape, generator=torch.Generator().manual_seed(0))
    gradient = torch.randn(old.shape, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        experts.gate_up_proj.copy_(old)
    experts.gate_up_proj.grad = gradient.clone()
    spec = spec_of("muon")
    make_optimizer(policy, spec).step(None)
    momentum = 1.0 - spec.momentum
    direction = gradient.lerp(momentum * gradient, spec.momentum)
    scale = spec.lr * 0.2 * max(20, inner) ** 0.5
    parts = (STACKS[kind](each) for each in (experts.gate_up_proj.detach(), old, direction))
    for found, before, towards in zip(*parts, strict=True):
        for e in range(3):
            update = newton_schulz(towards[e : e + 1], spec.num_newton_schulz_steps, torch.float32)
            wanted = before[e] * (1.0 - spec.lr * spec.weight_decay) - scale * update[0]
            torch.testing.assert_close(found[e], wanted, rtol=0, atol=1e-6)


def test_biases_and_convolutions_of_transformers_are_no_matrices_and_biases_do_not_decay():
    shapes = {
        "mlp.experts.gate_up_proj": (4, 32, 96),
        "mlp.experts.down_proj": (4, 48, 32),
        "mlp.gate_up_proj.weight": (96, 32),  # of phi3: gate above up
        "mlp.experts.gate_up_proj_bias": (4, 96),
        "temporal_block.rg_lru.input_gate_bias": (4, 8),
        "mixer.conv1d.weight": (48, 1, 4),
        "conv.conv.weight": (32, 1, 3),
        "mixer.A_log": (48, 16),
    }
    toy = Toy({f"network.body.layers.0.{name}": shape for name, shape in shapes.items()})
    weights = dict(toy.named_parameters())
    names = {
        weight: name.removeprefix("network.body.layers.0.") for name, weight in weights.items()
    }
    matrices, decayed, plain = muon.groups(spec_of("muon"), toy, weights)
    assert [names[weight] for weight in matrices.weights] == list(shapes)[:3]
    fused = {names[weight]: how.dim for weight, how in matrices.rule.fused.items()}
    assert fused == {"mlp.experts.gate_up_proj": -1, "mlp.gate_up_proj.weight": -2}
    assert [names[weight] for weight in plain.weights] == list(shapes)[
        3:5
    ] and plain.weight_decay == 0.0
    assert {names[weight] for weight in decayed.weights} == set(list(shapes)[5:])


@pytest.mark.parametrize("shape", [(3, 8, 20), (2, 20, 8), (1, 7, 7)])
def test_orthogonalised_matrices_have_singular_values_near_one_and_the_inputs_vectors(
    shape,
):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    # No singular value near zero: five steps would not bring it near 1.
    x = x + 2 * torch.eye(shape[1], shape[2])
    done = newton_schulz(x, 5, torch.float32)
    # The coefficients' own band is 0.68 to 1.13.
    assert torch.linalg.svdvals(done).sub(1).abs().max() < 0.35
    u, _, vh = torch.linalg.svd(x, full_matrices=False)
    rotated = u.mT @ done @ vh.mT  # diagonal when singular vectors are the same
    assert (rotated - torch.diag_embed(rotated.diagonal(dim1=-2, dim2=-1))).abs().max() < 1e-4


def test_bounds_are_those_of_chunk():
    for size, num_ranks in itertools.product(range(1, 12), range(1, 6)):
        sizes = [len(part) for part in torch.arange(size).chunk(num_ranks)]
        bounds = _bounds(size, num_ranks)
        assert [b - a for a, b in itertools.pairwise(bounds)] == sizes + [0] * (
            num_ranks - len(sizes)
        )


# Norms, and ranks --------------------------------------------------------------------------------


def whole_norm(names=tuple(SHAPES)) -> float:
    return math.sqrt(sum(gradients(1)[name].double().square().sum().item() for name in names))


def test_the_norm_of_unsharded_gradients_and_what_clipping_divides_by():
    toy = Toy()
    assert gradient_norm(toy.parameters(), WORLD).item() == 0.0
    for name, weight in toy.named_parameters():
        weight.grad = gradients(1)[name]
    norm = gradient_norm(toy.parameters(), WORLD)
    assert norm.dtype == torch.float32 and norm.item() == pytest.approx(whole_norm(), rel=1e-6)
    assert clip(norm, 2.0).item() == pytest.approx(whole_norm() / 2, rel=1e-6)
    assert clip(norm, 1e9).item() == 1.0


def test_the_norm_of_a_large_gradient_on_a_cpu():
    values = torch.full((1 << 25,), 1e-3).uniform_(-1e-3, 1e-3)
    weight = torch.nn.Parameter(values.view(1 << 12, -1))
    weight.grad = values.view_as(weight)
    expected = values.double().square().sum().sqrt().item()
    assert gradient_norm([weight], WORLD).item() == pytest.approx(expected, rel=1e-6)


def test_every_layout_of_shards_has_the_norm_and_the_steps_of_the_whole(tmp_path):
    ranks = run_script("optim_cases", tmp_path, 4, deadline_s=110)
    for name in ranks[0]:
        expected = (
            whole_norm([n for n in SHAPES if "q.weight" in n or "norm" in n])
            if name == "adapters only"
            else whole_norm()
        )
        for answers in ranks[: 2 if name == "dp_shard 2" else 4]:
            answer = answers[name]
            assert answer["norm"] == pytest.approx(expected, rel=1e-6), name
            for variant in [*SPECS, "adamw, offloaded", "muon, offloaded"]:
                # Muon's batches differ, and with them the order of a product's sums.
                assert answer[variant] <= (5e-7 if variant.startswith("muon") else 0.0), (
                    name,
                    variant,
                )
    assert "layers.0.norm.weight" in ranks[3]["dp_shard 4"]["empty"]
    assert "layers.0.thin.weight" in ranks[2]["dp_shard 4"]["empty"]
    assert "fully_shard over ep" in ranks[0] and "dp_shard 2" not in ranks[2]
