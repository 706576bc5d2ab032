"""Parameters by unit of FSDP, counted on the manifest's network, which is built without storage for it."""

from dataclasses import dataclass

import torch
from torch import nn

from orrery.manifest.schema import Lora, Model
from orrery.models import build, expert_modules, fsdp_units, lora


@dataclass(frozen=True)
class Unit:
    """Numbers of parameters, `experts` of them in routed experts; `adapted` are the frozen ones that have adapters."""

    trained: int = 0
    frozen: int = 0
    trained_experts: int = 0
    frozen_experts: int = 0
    adapted: int = 0

    def whole(self, ep: int) -> int:
        """What one rank holds of this unit once it is gathered: all, but its share alone of experts that are spread over `ep` ranks."""
        experts = self.trained_experts + self.frozen_experts
        return self.trained + self.frozen - experts + experts // ep

    def whole_trained(self, ep: int) -> int:
        return self.trained - self.trained_experts + self.trained_experts // ep


@dataclass(frozen=True)
class Sizes:
    """Units in the order of the forward pass. With tied embeddings, `before` and `after` have none and `root` has what they would.

    `largest_in_a_layer`: parameters of the largest weight there that is trained, a stack of experts being one.
    """

    before: Unit
    layers: tuple[Unit, ...]
    after: Unit
    root: Unit
    largest_in_a_layer: int

    @property
    def units(self) -> tuple[Unit, ...]:
        return self.before, *self.layers, self.after, self.root


def sizes(model: Model, adapters: Lora | None) -> Sizes:
    """Raises OrreryError where the network cannot be built here, as one of transformers without transformers."""
    network = build(model, torch.float32, "meta")
    if adapters is not None:
        lora.adapt(network, adapters, torch.float32)
    experts = {id(weight) for module in expert_modules(network) for weight in module.parameters()}
    adapted = {id(network.get_parameter(name)) for name, _ in lora.adapters(network)}
    counted: set[int] = set()

    def count(modules: list[nn.Module]) -> Unit:
        found = {"trained": 0, "frozen": 0, "trained_experts": 0, "frozen_experts": 0, "adapted": 0}
        for module in modules:
            for weight in module.parameters():
                if id(weight) not in counted:
                    counted.add(id(weight))
                    kind = "trained" if weight.requires_grad else "frozen"
                    found[kind] += weight.numel()
                    found[f"{kind}_experts"] += weight.numel() if id(weight) in experts else 0
                    found["adapted"] += weight.numel() if id(weight) in adapted else 0
        return Unit(**found)

    layers = list(network.layers)
    groups = fsdp_units(network)
    first = next(index for index, unit in enumerate(groups) if unit[0] is layers[0])
    before = count([module for unit in groups[:first] for module in unit])
    middle = tuple(count(groups[first + index]) for index in range(len(layers)))
    after = count([module for unit in groups[first + len(layers) :] for module in unit])
    largest = max(
        (
            weight.numel()
            for layer in layers
            for weight in layer.parameters()
            if weight.requires_grad
        ),
        default=0,
    )
    return Sizes(before, middle, after, count([network]), largest)
