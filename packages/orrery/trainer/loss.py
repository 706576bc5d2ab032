"""Compute the RL, cross-entropy and reference-KL losses of scored tokens.

    L = Σ_c  (Σ_{t ∈ c} w_c[t] · ℓ_c[t]) / N_c    c in rl, cross_entropy, reference_kl

Component c covers trained tokens with w_c[t] ≠ 0. N_c is their number on all ranks, at least 1.
A: advantage, π: token's probability in the trainer, μ: in the engine
`rl` is DPPO with the binary total-variation mask (arXiv 2602.04879) and Kimi K2.5's penalty
(arXiv 2602.02276):
    keep = not ((A > 0 and π − μ > mask_high) or (A ≤ 0 and π − μ < −mask_low))
    ℓ_rl = −keep · A · π/μ + penalty · (log π − log μ)²    π/μ: unclamped, with gradient
`reference_kl` is `rl` with A = log π_ref − log π, detached. `cross_entropy` is −log π.
"""

from dataclasses import dataclass

import torch

from orrery.manifest.schema import DppoLoss

COMPONENTS = ("rl", "cross_entropy", "reference_kl")


@dataclass(frozen=True)
class Targets:
    """Loss inputs, float32 [M scored tokens]. Weight 0 excludes a token from a loss."""

    engine_logprob: torch.Tensor
    advantage: torch.Tensor
    reference_logprob: torch.Tensor
    rl_weight: torch.Tensor
    cross_entropy_weight: torch.Tensor
    reference_kl_weight: torch.Tensor
    same_weights: torch.Tensor  # bool [M]: whether current weights sampled the whole document


@dataclass
class StepSums:
    NAMES = (
        "loss_rl", "loss_cross_entropy", "loss_reference_kl",
        "members_rl", "members_cross_entropy", "members_reference_kl",
        "entropy", "scored", "mismatch_kl", "mismatch_kl_same_weights", "same_weights", "masked",
        "samples", "tokens", "routes_missing", "routes_replayed", "routes_differ",
        "choices_sent", "choices_known", "choices_differ", "indexer_kl",
    )  # fmt: skip

    sums: torch.Tensor  # float64 [len(NAMES)], because float32 counts exactly only to 2^24
    peaks: torch.Tensor  # float32 [1]: max |log π − log μ| of `same_weights` tokens, −1 if none

    @classmethod
    def zero(cls, device: torch.device) -> "StepSums":
        sums = torch.zeros(len(cls.NAMES), dtype=torch.float64, device=device)
        return cls(sums, torch.full((1,), -1.0, device=device))

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
        choices_sent: int,
        choices_differ: torch.Tensor | None,
        indexer_kl: torch.Tensor | None,
    ) -> None:
        """Add a micro-batch's counts to the sums of the last nine `NAMES`. None adds 0.

        `choices_differ`: the counts i64 [2] of `kernels.key_bits.engine_keys`.
        """
        known, differ = (None, None) if choices_differ is None else choices_differ
        counts = (
            num_samples,
            num_tokens,
            routes_missing,
            routes_replayed,
            routes_differ,
            choices_sent,
            known,
            differ,
            None if indexer_kl is None else indexer_kl.detach(),
        )
        for index, number in enumerate(counts, -len(counts)):
            if number is not None:
                self.sums[index] += number

    def values(self) -> dict[str, float]:
        return dict(zip(self.NAMES, self.sums.tolist(), strict=True))


def policy_gradient(
    logprob: torch.Tensor, engine_logprob: torch.Tensor, advantage: torch.Tensor, spec: DppoLoss
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the RL loss [M] and its mask `keep`, bool [M]. Only `logprob` has a gradient."""
    log_ratio = logprob - engine_logprob
    with torch.no_grad():
        shift = logprob.exp() - engine_logprob.exp()
        keep = ~torch.where(advantage > 0, shift > spec.mask_high, shift < -spec.mask_low)
        kept_advantage = keep * advantage
    # Masked ratios must be 1, because they may overflow, and 0 · inf is NaN.
    ratio = torch.where(kept_advantage != 0, log_ratio, torch.zeros_like(log_ratio)).exp()
    return -kept_advantage * ratio + spec.penalty * log_ratio.square(), keep


def loss(
    logprob: torch.Tensor,
    entropy: torch.Tensor,
    targets: Targets,
    totals: dict[str, int],
    spec: DppoLoss,
) -> tuple[torch.Tensor, StepSums]:
    """Return this micro-batch's share of the loss (scalar f32, with gradient) and its `StepSums`.

    `logprob`, `entropy`: f32 [M scored tokens]. `totals`: all ranks' token counts by component.
    """
    constant = logprob.detach()
    in_rl, in_kl = targets.rl_weight != 0, targets.reference_kl_weight != 0
    # Replace excluded tokens' values, because they may be infinite, and 0 · inf is NaN.
    engine = torch.where(in_rl, targets.engine_logprob, constant)
    rl, keep = policy_gradient(logprob, engine, targets.advantage, spec)
    kl_advantage = torch.where(
        in_kl, targets.reference_logprob - constant, torch.zeros_like(constant)
    )
    kl_engine = torch.where(in_kl, targets.engine_logprob, constant)
    reference_kl, _ = policy_gradient(logprob, kl_engine, kl_advantage, spec)
    parts = {
        "rl": (targets.rl_weight * rl).sum(),
        "cross_entropy": (targets.cross_entropy_weight * -logprob).sum(),
        "reference_kl": (targets.reference_kl_weight * reference_kl).sum(),
    }
    shares = (parts[name] / max(totals[name], 1) for name in COMPONENTS)
    total = sum(shares, start=logprob.new_zeros(()))
    with torch.no_grad():
        members = [getattr(targets, f"{name}_weight") != 0 for name in COMPONENTS]
        scored = members[0] | members[1] | members[2]
        log_ratio = constant - engine
        # KL(engine || trainer), in float64, because masked ratios may overflow float32
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
            *logprob.new_zeros(9),
        ]
        peak = torch.where(same, log_ratio.abs(), torch.full_like(log_ratio, -1.0)).max().reshape(1)
    return total, StepSums(torch.stack([value.double() for value in sums]), peak)
