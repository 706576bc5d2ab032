"""Mismatch: compare the engines' log-probs with the trainer's, against the manifest's bounds.

- In: the log-probs of trainer and engine of every trained token. Out: a warning, or RunFailed.
  RunFailed comes before the optimizer step, so a batch beyond a `stop` bound is never trained.
- The KL is over the whole batch, because a few unlikely tokens change it much. The mean
  |difference| is per engine, over all its versions.
- An engine with fewer than MIN_TOKENS tokens in the batch counts only in the mean over all engines.
- The engine's name comes from its own answer (`X-Orrery-Engine`), so an engine can give another's
  name. The canary (`orrery.transport.canary`) asks each engine at its own address.
"""

import logging

import torch

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest
from orrery.trainer.micro_batch import MicroBatch
from orrery.trainer.parallel.world import World

MIN_TOKENS = 256


class MismatchGuard:
    """The sums of one step on this rank; `check` adds those of all ranks."""

    def __init__(self, manifest: Manifest, world: World, log: logging.Logger):
        self.bounds, self.world, self.log = manifest.trainer.mismatch, world, log
        num_ages = manifest.orchestrator.max_off_policy_steps + 1
        # [|difference|, tokens] × engine (the last row: unknown) × age in versions
        self._sums = torch.zeros(
            2,
            manifest.inference.num_replicas + 1,
            num_ages,
            dtype=torch.float64,
            device=world.device,
        )

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, batch: MicroBatch, logprob: torch.Tensor) -> None:
        """Add a micro-batch's scored tokens without a device sync. `logprob` f32 [M] is ours."""
        _, num_engines, num_ages = self._sums.shape
        engine, age = batch.origin.unbind(1)
        known = (engine >= 0) & (engine < num_engines - 1)
        place = torch.where(known, engine, num_engines - 1) * num_ages + age.clamp(0, num_ages - 1)
        is_member = batch.loss.rl_weight != 0
        difference = (logprob.detach() - batch.loss.engine_logprob).abs()
        self._sums[0].view(-1).index_add_(
            0, place, torch.where(is_member, difference, torch.zeros_like(difference)).double()
        )
        self._sums[1].view(-1).index_add_(0, place, is_member.double())

    def check(self, step: int, kl: float | None) -> float | None:
        """Return the mean |difference| over all trained tokens, or None if there are none.

        A collective. Raises RunFailed beyond a `stop` bound.
        """
        differences, tokens = self.world.sum(self._sums).cpu()
        num_tokens = float(tokens.sum())
        if not num_tokens:
            return None
        mean = float(differences.sum()) / num_tokens
        engines = torch.where(
            tokens.sum(1) >= MIN_TOKENS,
            differences.sum(1) / tokens.sum(1).clamp(min=1),
            torch.zeros(len(tokens)),
        )
        furthest = int(engines.argmax())
        worst = max(mean, float(engines[furthest]))
        name = f"step {step}: {self._name(step, furthest, differences[furthest], tokens[furthest])}"
        found = {"kl": kl or 0.0, "logprob_difference": worst}
        for kind, value in found.items():
            if (stop := getattr(self.bounds, f"stop_{kind}")) is not None and value > stop:
                raise RunFailed(
                    f"{name}; {self._measured(kind, value)} is more than trainer.mismatch.stop_{kind} = {stop:g}, "
                    "so the batch is not trained; see which process answers at that engine's address, and its log"
                )
        for kind, value in found.items():
            if (
                (warn := getattr(self.bounds, f"warn_{kind}")) is not None
                and value > warn
                and self.world.is_first
            ):
                self.log.warning(
                    "%s; %s is more than trainer.mismatch.warn_%s = %g",
                    name,
                    self._measured(kind, value),
                    kind,
                    warn,
                )
        return mean

    @staticmethod
    def _measured(kind: str, value: float) -> str:
        return f"{'the KL from engines to trainer' if kind == 'kl' else 'the mean difference of log-probs'}, {value:.3g},"

    @staticmethod
    def _mean(differences: torch.Tensor, tokens: torch.Tensor) -> float:
        return float(differences.sum() / tokens.sum().clamp(min=1))

    def _name(self, step: int, engine: int, differences: torch.Tensor, tokens: torch.Tensor) -> str:
        """Describe the engine that is furthest off, and its worst version."""
        of_version = differences / tokens.clamp(min=1)
        age = int(of_version.argmax())
        who = (
            f"engine {engine}"
            if engine < self._sums.shape[1] - 1
            else "an engine that does not say which it is, or several together,"
        )
        return (
            f"log-probs of {int(tokens.sum())} tokens of {who} are {self._mean(differences, tokens):.3g} from the trainer's on average, "
            f"of version {step - 1 - age} {float(of_version[age]):.3g}"
        )
