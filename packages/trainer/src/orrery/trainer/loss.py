"""The loss: three components, each a weighted sum over its member tokens divided by the *global* number of its members.

    L = Σ_c  (Σ_{t ∈ c} w_c[t] · ℓ_c[t]) / N_c      for c in rl, cross_entropy, reference_kl

- A token is a member of component c where `trained` is set and its weight `w_c` is not zero; N_c counts members on all ranks (at least 1).
- The trainer knows no algorithm: advantages and weights arrive as columns.
- `rl` is DPPO with the binary total-variation mask (Qi et al. 2026, "Rethinking the Trust Region in LLM Reinforcement Learning",
  arXiv 2602.04879) and the squared log-ratio penalty of Kimi K2.5 (arXiv 2602.02276).
  With π and μ the trainer's and the engine's probability of the sampled token, r = π/μ and A its advantage:
      keep = not ((A > 0 and π − μ > mask_high) or (A ≤ 0 and π − μ < −mask_low))
      ℓ_rl = −keep · A · r + penalty · (log π − log μ)²
  r is not clamped, the gradient flows through r, and the penalty stays on masked tokens.
- `reference_kl` is the same expression with A = log π_ref − log π (detached): the policy gradient of the reverse KL to a reference policy.
- `cross_entropy` is ℓ = −log π.

Everything here but a tally's sums is float32; shapes are `[M]`, one entry a scored token.
"""

from dataclasses import dataclass

import torch

from orrery.manifest.schema import DppoLoss

COMPONENTS = ("rl", "cross_entropy", "reference_kl")


@dataclass(frozen=True)
class Targets:
    """What the loss needs to know of M scored tokens besides the trainer's own log-prob; float32 [M] unless noted."""

    engine_logprob: torch.Tensor
    advantage: torch.Tensor
    reference_logprob: torch.Tensor
    rl_weight: torch.Tensor  # weights are 0 where the token is no member
    cross_entropy_weight: torch.Tensor
    reference_kl_weight: torch.Tensor
    same_weights: torch.Tensor  # bool: the engine sampled this token, and all of its sample, with exactly the weights being trained


@dataclass
class StepSums:
    """Sums over tokens that become a step's metrics; they add up over micro-batches and ranks without any per-token gather."""

    NAMES = (
        "loss_rl", "loss_cross_entropy", "loss_reference_kl", "members_rl", "members_cross_entropy", "members_reference_kl",
        "entropy", "scored", "mismatch_kl", "mismatch_kl_same_weights", "same_weights", "masked",
        "samples", "tokens", "routes_missing", "routes_replayed", "routes_differ",
    )  # fmt: skip

    sums: (
        torch.Tensor
    )  # float64 [len(NAMES)]: in float32 a sum of counts stops being exact at 2^24 tokens
    peaks: (
        torch.Tensor
    )  # float32 [1]: max |log π − log μ| over `same_weights` tokens, −1 where there are none

    @classmethod
    def zero(cls, device: torch.device) -> "StepSums":
        return cls(
            torch.zeros(len(cls.NAMES), dtype=torch.float64, device=device),
            torch.full((1,), -1.0, device=device),
        )

    def add(self, other: "StepSums") -> None:
        self.sums += other.sums
        self.peaks = torch.maximum(self.peaks, other.peaks)

    def count(
        self,
        num_samples: int,
        num_tokens: int,
        routes_missing: int,
        routes_replayed: int,
        routes_differ: torch.Tensor | None,
    ) -> None:
        for place, number in enumerate(
            (num_samples, num_tokens, routes_missing, routes_replayed, routes_differ), -5
        ):
            if number is not None:
                self.sums[place] += number

    def values(self) -> dict[str, float]:
        return dict(zip(self.NAMES, self.sums.tolist(), strict=True))


def policy_gradient(
    logprob: torch.Tensor, engine_logprob: torch.Tensor, advantage: torch.Tensor, spec: DppoLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """(ℓ [M], keep bool [M]) of the formula above; `logprob` carries the gradient, the rest are constants."""
    log_ratio = logprob - engine_logprob
    with torch.no_grad():
        shift = logprob.exp() - engine_logprob.exp()
        keep = ~torch.where(advantage > 0, shift > spec.mask_high, shift < -spec.mask_low)
        pull = keep * advantage
    # Where nothing pulls, r may overflow: 0 · inf is NaN.
    ratio = torch.where(pull != 0, log_ratio, torch.zeros_like(log_ratio)).exp()
    return -pull * ratio + spec.penalty * log_ratio.square(), keep


def loss(
    logprob: torch.Tensor,
    entropy: torch.Tensor,
    targets: Targets,
    totals: dict[str, int],
    spec: DppoLoss,
) -> tuple[torch.Tensor, StepSums]:
    """This micro-batch's share of L (scalar, with gradient) and its tally, but for `samples` and what follows it.

    `logprob` f32 [M] with gradient, `entropy` f32 [M]; `totals[c]` is N_c over all ranks and micro-batches of the step.
    Where a token is no member its inputs are replaced before the formula, so that an absent column cannot turn 0 · inf into NaN.
    """
    constant = logprob.detach()
    in_rl, in_kl = targets.rl_weight != 0, targets.reference_kl_weight != 0
    engine = torch.where(in_rl, targets.engine_logprob, constant)
    rl, keep = policy_gradient(logprob, engine, targets.advantage, spec)
    pull = torch.where(in_kl, targets.reference_logprob - constant, torch.zeros_like(constant))
    reference_kl, _ = policy_gradient(
        logprob, torch.where(in_kl, targets.engine_logprob, constant), pull, spec
    )
    parts = {
        "rl": (targets.rl_weight * rl).sum(),
        "cross_entropy": (targets.cross_entropy_weight * -logprob).sum(),
        "reference_kl": (targets.reference_kl_weight * reference_kl).sum(),
    }
    total = sum(
        (parts[name] / max(totals[name], 1) for name in COMPONENTS), start=logprob.new_zeros(())
    )
    with torch.no_grad():
        members = [getattr(targets, f"{name}_weight") != 0 for name in COMPONENTS]
        scored = members[0] | members[1] | members[2]
        log_ratio = constant - engine  # 0 but in rl
        # Of one sample; its mean over samples of the engine is KL(engine || trainer). In float64, where the ratio of a masked token fits.
        kl = log_ratio.double().exp() - 1 - log_ratio
        same = targets.same_weights & in_rl
        sums = [
            *(parts[name].detach() for name in COMPONENTS),
            *(member.sum() for member in members),
            (entropy.detach() * scored).sum(),
            scored.sum(),
            kl.sum(),
            torch.where(same, kl, torch.zeros_like(kl)).sum(),
            same.sum(),
            (~keep & in_rl).sum(),
            *logprob.new_zeros(5),
        ]
        peak = torch.where(same, log_ratio.abs(), torch.full_like(log_ratio, -1.0)).max().reshape(1)
    return total, StepSums(torch.stack([value.double() for value in sums]), peak)
