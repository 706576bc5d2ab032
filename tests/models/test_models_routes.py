"""Router replay: another's choices, one's own scores."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from orrery.models import build, weights
from orrery.models.layers import Router

FAMILIES = {
    "qwen3_moe": {},
    "glm4_moe": {"num_layers": 3, "tie_embeddings": False},
    "glm5": {"num_layers": 3},
}
families = pytest.mark.parametrize("family", FAMILIES)


def of_family(family, make_model, dtype=torch.float32):
    model = make_model(family, **FAMILIES[family])
    module = build(model, dtype)
    weights.initialize(module, model)
    return model, module


def own_routes(module, pack):
    """[T, layers with experts, K], as the network chooses them."""
    found, hooks = [], []
    for layer in module.layers:
        if hasattr(layer.mlp, "gate"):
            hooks.append(
                layer.mlp.gate.register_forward_hook(
                    lambda _module, _inputs, output: found.append(output[1])
                )
            )
    with torch.no_grad():
        module(*pack)
    for hook in hooks:
        hook.remove()
    return torch.stack(found, dim=1)


def learned(module, pack, routes=None):
    """(loss, gradients, choices that differ)."""
    module.zero_grad()
    target = pack[0].roll(-1)
    logprob, _ = module.log_probs(
        module(*pack, routes), target, torch.ones(len(target)), chunk_tokens=7
    )
    logprob.mean().backward()
    return (
        logprob.detach(),
        {n: one.grad.clone() for n, one in module.named_parameters() if one.requires_grad},
        module.num_routes_differ,
    )


@families
@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_own_choices_replayed_are_the_same_bits(family, dtype, make_model, make_pack):
    model, module = of_family(family, make_model)
    pack = make_pack([9, 12])
    routes = own_routes(module, pack).to(dtype)
    assert routes.shape == (
        21,
        model.num_layers - model.moe.num_dense_layers,
        model.moe.num_experts_per_token,
    )
    loss, gradients, differ = learned(module, pack)
    assert differ is None
    again, gradients_again, differ = learned(module, pack, routes)
    assert torch.equal(loss, again) and differ == 0
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@families
def test_the_order_of_a_tokens_experts_is_of_no_meaning(family, make_model, make_pack):
    _, module = of_family(family, make_model)
    pack = make_pack([9, 12])
    loss, gradients, _ = learned(module, pack)
    again, gradients_again, differ = learned(module, pack, own_routes(module, pack).flip(-1))
    assert differ == 0
    torch.testing.assert_close(again, loss, rtol=1e-6, atol=1e-6)
    for name, gradient in gradients.items():
        torch.testing.assert_close(gradients_again[name], gradient, rtol=1e-4, atol=1e-7)


@families
def test_a_token_without_a_route_is_routed_afresh_and_the_others_are_not(
    family, make_model, make_pack
):
    model, module = of_family(family, make_model)
    pack = make_pack([9, 12])
    own = own_routes(module, pack)
    other = (own + 1) % model.moe.num_experts
    missing = other.to(torch.uint8)
    missing[3:, 0] = 255
    filled = other.clone()
    filled[3:, 0] = own[3:, 0]  # layers before the first mixture are equal, hence its own choices
    found, expected = learned(module, pack, missing), learned(module, pack, filled)
    assert torch.equal(found[0], expected[0]) and found[2] == expected[2] > 0
    assert not torch.equal(found[0], learned(module, pack, other)[0])


@families
def test_a_recomputed_block_replays_the_same_routes(family, make_model, make_pack):
    model, module = of_family(family, make_model)
    pack = make_pack([9, 12])
    routes = ((own_routes(module, pack) + 1) % model.moe.num_experts).to(torch.uint8)
    routes[::4] = 255
    loss, gradients, differ = learned(module, pack, routes)
    for layer in module.layers:
        layer.forward = lambda *inputs, forward=layer.forward: checkpoint(
            forward, *inputs, use_reentrant=False
        )
    again, gradients_again, differ_again = learned(module, pack, routes)
    assert torch.equal(loss, again) and differ == differ_again
    for name, gradient in gradients.items():
        assert torch.equal(gradient, gradients_again[name]), name


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("normalize", [True, False])
def test_scores_are_the_routers_own_at_the_replayed_experts_and_a_gradient_reaches_it(
    kind, normalize
):
    router = Router(6, 5, 2, normalize, kind=kind, scale=2.5)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        router.weight.normal_(generator=generator)
        if router.expert_bias is not None:
            router.expert_bias.normal_(generator=generator)  # moves choices, and no scores
    x = torch.randn(7, 6, generator=generator)
    choice = torch.rand(7, 5, generator=generator).argsort(1)[:, :2]
    score, expert, differ = router(x, choice.to(torch.uint8))
    logit = x @ router.weight.T
    probability = logit.softmax(1) if kind == "softmax" else logit.sigmoid()
    expected = torch.stack([probability[t, choice[t]] for t in range(7)])
    expected = 2.5 * (expected / expected.sum(1, keepdim=True) if normalize else expected)
    torch.testing.assert_close(score, expected)
    assert torch.equal(expert, choice)
    own = router(x)[1]
    assert differ == sum(len(set(choice[t].tolist()) - set(own[t].tolist())) for t in range(7)) > 0
    score[:, 0].sum().backward()
    assert router.weight.grad.abs().max() > 0
