"""Compare engines' log-probs with the trainer's, by the bounds of `trainer.mismatch`.

- Log a warning beyond a `warn` bound. Refuse to train the batch beyond a `stop` bound.
- KL is over the whole batch, because few unlikely tokens change it much. The mean |difference| is
  over all engines, and over each engine with at least MIN_TOKENS tokens.
- An engine names itself (`X-Orrery-Engine`), perhaps wrongly. The canary checks each address.
"""

import logging

import torch

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest
from orrery.trainer.micro_batch import MicroBatch
from orrery.trainer.parallel.world import World

MIN_TOKENS = 256
MEASURES = {
    "kl": "the KL from engines to trainer",
    "logprob_difference": "the mean difference of log-probs",
}


class MismatchGuard:
    def __init__(self, manifest: Manifest, world: World, log: logging.Logger):
        self.bounds, self.world, self.log = manifest.trainer.mismatch, world, log
        num_engines = manifest.inference.num_replicas + 1
        num_ages = manifest.orchestrator.max_off_policy_steps + 1
        # [|difference|, tokens] × engine × age in versions
        self._sums = torch.zeros(2, num_engines, num_ages, dtype=torch.float64, device=world.device)

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, batch: MicroBatch, logprob: torch.Tensor) -> None:
        """Add a micro-batch without a device sync. `logprob` f32 [M] is the trainer's."""
        _, num_engines, num_ages = self._sums.shape
        engine, age = batch.origin.unbind(1)
        known = (engine >= 0) & (engine < num_engines - 1)
        cell = torch.where(known, engine, num_engines - 1) * num_ages + age.clamp(0, num_ages - 1)
        is_member = batch.loss.rl_weight != 0
        difference = (logprob.detach() - batch.loss.engine_logprob).abs()
        difference = torch.where(is_member, difference, torch.zeros_like(difference))
        self._sums[0].view(-1).index_add_(0, cell, difference.double())
        self._sums[1].view(-1).index_add_(0, cell, is_member.double())

    def check(self, step: int, kl: float | None) -> float | None:
        """Return the mean |difference| over members of `rl`, or None without any. A collective.

        Raise RunFailed beyond a `stop` bound.
        """
        differences, tokens = self.world.sum(self._sums).cpu()
        num_tokens = float(tokens.sum())
        if not num_tokens:
            return None
        mean = float(differences.sum()) / num_tokens
        means = differences.sum(1) / tokens.sum(1).clamp(min=1)
        engines = torch.where(tokens.sum(1) >= MIN_TOKENS, means, torch.zeros(len(tokens)))
        worst = int(engines.argmax())
        where = f"step {step}: {self._describe(step, worst, differences[worst], tokens[worst])}"
        found = {"kl": kl or 0.0, "logprob_difference": max(mean, float(engines[worst]))}
        for kind, value in found.items():
            stop = getattr(self.bounds, f"stop_{kind}")
            if stop is not None and value > stop:
                raise RunFailed(
                    f"{where}; {MEASURES[kind]}, {value:.3g}, is more than "
                    f"trainer.mismatch.stop_{kind} = {stop:g}, so the batch is not trained; "
                    f"see which process answers at that engine's address, and its log"
                )
        for kind, value in found.items():
            warn = getattr(self.bounds, f"warn_{kind}")
            if warn is not None and value > warn and self.world.is_first:
                measured = f"{MEASURES[kind]}, {value:.3g},"
                bound = f"trainer.mismatch.warn_{kind} = {warn:g}"
                self.log.warning("%s; %s is more than %s", where, measured, bound)
        return mean

    def _describe(
        self, step: int, engine: int, differences: torch.Tensor, tokens: torch.Tensor
    ) -> str:
        of_version = differences / tokens.clamp(min=1)
        age = int(of_version.argmax())
        name = f"engine {engine}"
        if engine == self._sums.shape[1] - 1:
            name = "an engine that does not say which it is, or several together,"
        mean = float(differences.sum() / tokens.sum().clamp(min=1))
        return (
            f"log-probs of {int(tokens.sum())} tokens of {name} are {mean:.3g} from the trainer's "
            f"on average, of version {step - 1 - age} {float(of_version[age]):.3g}"
        )
