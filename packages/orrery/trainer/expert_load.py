"""Count each expert's tokens (load) in a step, and balance experts by router biases.

A step changes an expert's bias by rate · sign(mean load − load), as in DeepSeek-V3
(https://arxiv.org/abs/2412.19437, section 2.1.2). Loads are integer sums over ranks, so all ranks
compute equal biases.

L: layers with experts, E: experts
"""

import torch
from torch import Tensor

from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy


class ExpertLoad:
    """Each step, call `clear`, `add` per forward pass, then `reduce`, `metrics` and `balance`."""

    def __init__(self, policy: Policy, world: World, rate: float | None):
        self._world, self._rate = world, rate
        self.biases: dict[str, Tensor] = {}
        if rate is not None:
            named = policy.named_buffers()
            self.biases = {name: one for name, one in named if name.endswith(".expert_bias")}
        self._load_LE: Tensor | None = None
        self._figures_3L: Tensor | None = None

    def clear(self) -> None:
        self._load_LE = self._figures_3L = None

    def add(self, load_LE: Tensor | None) -> None:
        if load_LE is not None:
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE

    def reduce(self) -> None:
        """Sum loads over ranks, without a device sync. A collective."""
        if self._load_LE is not None:
            load_LE = self._world.sum(self._load_LE)
            share_LE = load_LE.double() / load_LE.sum(1, keepdim=True).clamp(min=1)
            entropy_L = -torch.xlogy(share_LE, share_LE).sum(1)
            self._figures_3L = torch.stack((share_LE.amax(1), share_LE.amin(1), entropy_L))

    def metrics(self) -> dict[str, list[float] | None]:
        """Return by layer: maximum, minimum and entropy (nats) of the experts' token shares."""
        names = ("expert_load_max", "expert_load_min", "expert_load_entropy")
        if self._figures_3L is None:
            return dict.fromkeys(names)
        return dict(zip(names, self._figures_3L.tolist(), strict=True))

    @torch.no_grad()
    def balance(self) -> None:
        if self._rate is None or self._load_LE is None:
            return
        num_experts = self._load_LE.shape[1]
        missing_LE = self._load_LE.sum(1, keepdim=True) - num_experts * self._load_LE
        for bias_E, move_E in zip(self.biases.values(), missing_LE.sign(), strict=True):
            bias_E.add_(move_E.to(bias_E.dtype), alpha=self._rate)
