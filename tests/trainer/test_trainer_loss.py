"""The loss against a slow reference: the formula in plain Python, one token at a time."""

import math

import pytest
import torch

from orrery.manifest.schema import DppoLoss
from orrery.trainer.loss import COMPONENTS, Targets, loss, policy_gradient

SPEC = DppoLoss(kind="dppo", mask_low=0.1, mask_high=0.2, penalty=0.01)


def tokens(num=200, seed=0):
    draw = torch.Generator().manual_seed(seed)
    logprob = -4 * torch.rand(num, generator=draw) ** 2
    weights = torch.rand(3, num, generator=draw) * (torch.rand(3, num, generator=draw) < 0.6)
    targets = Targets(
        engine_logprob=-4 * torch.rand(num, generator=draw) ** 2,
        advantage=torch.randn(num, generator=draw),
        reference_logprob=-4 * torch.rand(num, generator=draw) ** 2,
        rl_weight=weights[0],
        cross_entropy_weight=weights[1],
        reference_kl_weight=weights[2],
        same_weights=torch.rand(num, generator=draw) < 0.1,
    )
    return logprob, torch.rand(num, generator=draw), targets


def slow_policy_gradient(
    p: float, q: float, advantage: float, spec: DppoLoss
) -> tuple[float, float, bool]:
    """(ℓ, ∂ℓ/∂log π, kept)."""
    shift, ratio = math.exp(p) - math.exp(q), math.exp(p - q)
    kept = not (
        (advantage > 0 and shift > spec.mask_high) or (advantage <= 0 and shift < -spec.mask_low)
    )
    value = -kept * advantage * ratio + spec.penalty * (p - q) ** 2
    return value, -kept * advantage * ratio + 2 * spec.penalty * (p - q), kept


def slow_loss(logprob, targets: Targets, totals: dict[str, int], spec: DppoLoss):
    total, gradient, sums = 0.0, [], dict.fromkeys(COMPONENTS, 0.0)
    masked = kl = 0.0
    for t in range(len(logprob)):
        p, q, reference = (
            logprob[t].item(),
            targets.engine_logprob[t].item(),
            targets.reference_logprob[t].item(),
        )
        slope = 0.0
        if (w := targets.rl_weight[t].item()) != 0:
            value, d, kept = slow_policy_gradient(p, q, targets.advantage[t].item(), spec)
            sums["rl"] += w * value
            slope += w * d / totals["rl"]
            masked += not kept
            kl += math.exp(p - q) - 1 - (p - q)
        if (w := targets.cross_entropy_weight[t].item()) != 0:
            sums["cross_entropy"] += -w * p
            slope += -w / totals["cross_entropy"]
        if (w := targets.reference_kl_weight[t].item()) != 0:
            value, d, _ = slow_policy_gradient(p, q, reference - p, spec)
            sums["reference_kl"] += w * value
            slope += w * d / totals["reference_kl"]
        gradient.append(slope)
    total = sum(sums[name] / totals[name] for name in COMPONENTS)
    return total, gradient, sums, masked, kl


def check_by_the_formula(logprob, entropy, targets, totals):
    """Compare loss, gradient and sums with `slow_loss`. Return the tally."""
    value, tally = loss(logprob, entropy, targets, totals, SPEC)
    value.backward()
    total, gradient, sums, masked, kl = slow_loss(logprob.detach(), targets, totals, SPEC)
    # float32 against float64 sums of 200 terms of size ~1: 200 · 6e-8 is 1e-5.
    assert value.item() == pytest.approx(total, rel=2e-5, abs=1e-5)
    torch.testing.assert_close(logprob.grad, torch.tensor(gradient), rtol=1e-5, atol=1e-7)
    values = tally.values()
    for name in COMPONENTS:
        assert values[f"loss_{name}"] == pytest.approx(sums[name], rel=2e-5, abs=1e-4)
    assert values["masked"] == masked
    assert values["mismatch_kl"] == pytest.approx(kl, rel=1e-4)
    return tally


@pytest.mark.parametrize("seed", range(5))
def test_value_gradient_and_tally_are_those_of_the_formula_token_by_token(seed):
    logprob, entropy, targets = tokens(seed=seed)
    logprob.requires_grad_()
    totals = {"rl": 300, "cross_entropy": 70, "reference_kl": 11}
    tally = check_by_the_formula(logprob, entropy, targets, totals)
    values = tally.values()
    assert values["masked"] > 0
    for name in COMPONENTS:
        assert values[f"members_{name}"] == (getattr(targets, f"{name}_weight") != 0).sum()
    scored = (
        (targets.rl_weight != 0)
        | (targets.cross_entropy_weight != 0)
        | (targets.reference_kl_weight != 0)
    )
    assert values["entropy"] == pytest.approx(entropy[scored].sum().item(), rel=1e-5)
    same = targets.same_weights & (targets.rl_weight != 0)
    assert tally.peaks.item() == pytest.approx(
        (logprob - targets.engine_logprob)[same].abs().max().item()
    )


@pytest.mark.parametrize(
    ("p", "q", "advantage", "kept"),
    [
        (0.9, 0.5, 1.0, False),  # already much likelier, and the advantage wants more
        (0.9, 0.5, -1.0, True),  # the advantage pulls it back
        (0.3, 0.5, -1.0, False),  # already less likely, and the advantage wants less
        (0.3, 0.5, 0.0, False),  # zero advantage counts as the lower side
        (0.3, 0.5, 1.0, True),
        (0.65, 0.5, 1.0, True),  # inside both bounds
        (0.45, 0.5, -1.0, True),
    ],
)
def test_the_mask_drops_only_what_moves_further_away_and_the_penalty_stays(p, q, advantage, kept):
    logprob = torch.tensor([math.log(p)], requires_grad=True)
    value, keep = policy_gradient(
        logprob, torch.tensor([math.log(q)]), torch.tensor([advantage]), SPEC
    )
    value.sum().backward()
    penalty_slope = 2 * SPEC.penalty * (math.log(p) - math.log(q))
    assert keep.item() is kept
    assert logprob.grad.item() == pytest.approx(
        penalty_slope - (advantage * p / q if kept else 0.0), rel=1e-5
    )


@pytest.mark.parametrize(
    ("advantage", "reference", "rl_weight", "kl_weight"),
    [(1.0, -0.5, 0.5, 0.0), (0.0, -0.5, 0.5, 0.0), (-1.0, 0.5, 0.0, 0.5), (-1.0, -0.01, 0.0, 0.5)],
    ids=["masked", "advantage of 0", "masked in reference_kl", "reference that agrees"],
)
def test_a_ratio_that_overflows_adds_nothing_where_nothing_pulls(
    advantage, reference, rl_weight, kl_weight
):
    logprob, entropy, targets = tokens()
    logprob[0], targets.engine_logprob[0] = -0.01, -95.0  # exp(94.99) is more than float32 holds
    targets.advantage[0], targets.reference_logprob[0] = advantage, reference
    targets.rl_weight[0], targets.reference_kl_weight[0], targets.same_weights[0] = (
        rl_weight,
        kl_weight,
        False,
    )
    logprob.requires_grad_()
    tally = check_by_the_formula(logprob, entropy, targets, dict.fromkeys(COMPONENTS, 100))
    assert math.isfinite(tally.values()["mismatch_kl_same_weights"])


def test_what_stands_in_columns_of_non_members_cannot_reach_the_loss():
    logprob, entropy, targets = tokens()
    none = targets.rl_weight == 0
    totals = dict.fromkeys(COMPONENTS, 10)
    clean = loss(logprob, entropy, targets, totals, SPEC)[0]
    broken = targets.engine_logprob.clone()
    broken[none & (targets.reference_kl_weight == 0)] = -float("inf")
    reference = torch.where(
        targets.reference_kl_weight == 0, torch.tensor(float("inf")), targets.reference_logprob
    )
    weights = (getattr(targets, f"{name}_weight") for name in COMPONENTS)
    dirty = Targets(broken, targets.advantage, reference, *weights, targets.same_weights)
    value, tally = loss(logprob, entropy, dirty, totals, SPEC)
    assert value.item() == clean.item()
    assert torch.isfinite(tally.sums).all()


def test_a_component_without_members_adds_nothing_and_divides_by_one():
    logprob, entropy, targets = tokens()
    zero = torch.zeros_like(logprob)
    nothing = Targets(
        targets.engine_logprob,
        targets.advantage,
        targets.reference_logprob,
        zero,
        zero,
        zero,
        targets.same_weights,
    )
    value, tally = loss(logprob, entropy, nothing, dict.fromkeys(COMPONENTS, 0), SPEC)
    assert value.item() == 0.0
    assert tally.peaks.item() == -1.0
