"""Count the parameters of a built network, by FSDP unit."""

import torch
from torch import nn

from orrery.manifest.budget import parameters
from orrery.manifest.budget.parameters import ParameterCounts, UnitParameters
from orrery.manifest.schema import Lora, Model
from orrery.models import lora
from orrery.models.families import build, expert_modules, fsdp_units


def count_parameters(model: Model, adapters: Lora | None) -> ParameterCounts:
    """Raise OrreryError if it cannot be built, for example without the package transformers."""
    if model.family != "hugging_face":
        return parameters.count_parameters(model, adapters)
    return count_built(model, adapters)


def count_built(model: Model, adapters: Lora | None) -> ParameterCounts:
    network = build(model, torch.float32, "meta")
    if adapters is not None:
        lora.adapt(network, adapters, torch.float32)
    experts = {id(weight) for module in expert_modules(network) for weight in module.parameters()}
    adapted = {id(network.get_parameter(name)) for name, _ in lora.adapters(network)}
    counted: set[int] = set()

    def count(modules: list[nn.Module]) -> UnitParameters:
        found = {"trained": 0, "frozen": 0, "trained_experts": 0, "frozen_experts": 0, "adapted": 0}
        for weight in (weight for module in modules for weight in module.parameters()):
            if id(weight) in counted:
                continue
            counted.add(id(weight))
            kind = "trained" if weight.requires_grad else "frozen"
            found[kind] += weight.numel()
            found[f"{kind}_experts"] += weight.numel() if id(weight) in experts else 0
            found["adapted"] += weight.numel() if id(weight) in adapted else 0
        return UnitParameters(**found)

    layers = list(network.layers)
    groups = fsdp_units(network)
    first = next(index for index, unit in enumerate(groups) if unit[0] is layers[0])
    before = count([module for unit in groups[:first] for module in unit])
    middle = tuple(count(groups[first + index]) for index in range(len(layers)))
    after = count([module for unit in groups[first + len(layers) :] for module in unit])
    in_layers = (weight for layer in layers for weight in layer.parameters())
    largest = max((weight.numel() for weight in in_layers if weight.requires_grad), default=0)
    return ParameterCounts(before, middle, after, count([network]), largest)
