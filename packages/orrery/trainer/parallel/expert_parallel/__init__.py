"""Expert parallel: each ep rank holds 1/ep of every layer's experts, and tokens travel to them.

`apply` replaces `MixtureOfExperts.exchange` and makes expert parameters DTensors with Shard(0) on
the mesh axis `ep`. The backward pass is the inverse exchange, so an expert's gradient covers all ep
ranks' tokens.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Trainer
from orrery.models import expert_modules
from orrery.models.mixture import MixtureOfExperts
from orrery.trainer.parallel.expert_parallel.deepep import DeepEpExchange
from orrery.trainer.parallel.expert_parallel.torch_exchange import TorchExchange
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

KINDS: dict[str, Callable[[dist.ProcessGroup, int], nn.Module]] = {
    "torch": TorchExchange,
    "deepep": DeepEpExchange,
}


def make_exchange(backend: str, group: dist.ProcessGroup, num_experts: int) -> nn.Module:
    """Return the exchange over `group`. Rank i holds the i-th share of `num_experts`.

    Raise OrreryError if `backend` is unknown or not installed.
    """
    if backend not in KINDS:
        choices = ", ".join(KINDS)
        raise OrreryError(
            f"trainer.mesh.ep_backend: {backend!r} is no exchange; choose from {choices}"
        )
    return KINDS[backend](group, num_experts)


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.mesh.ep == 1:
        return
    mesh, moe = world.expert_mesh, policy.network.config.moe
    if moe is None:
        raise OrreryError(
            f"trainer.mesh.ep {trainer.mesh.ep}: {policy.network.config.family} has no experts; "
            "set trainer.mesh.ep to 1"
        )
    assert mesh is not None
    for experts in expert_modules(policy.network):
        _shard(experts, mesh["ep"])
    for module in policy.network.modules():
        if isinstance(module, MixtureOfExperts):
            backend, group = trainer.mesh.ep_backend, mesh.get_group("ep")
            module.exchange = make_exchange(backend, group, moe.num_experts)


def _shard(experts: nn.Module, mesh: DeviceMesh) -> None:
    for module in experts.modules():
        for name, parameter in list(module.named_parameters(recurse=False)):
            # Each rank cuts its own share: "meta" has no data to send.
            share = distribute_tensor(parameter.detach(), mesh, [Shard(0)], src_data_rank=None)
            module.register_parameter(
                name, nn.Parameter(share, requires_grad=parameter.requires_grad)
            )
    forward = experts.forward

    def on_local_shares(*args: Any) -> Tensor:
        with _local_shares(experts):
            return forward(*args)

    # On `forward`, inside FSDP's hooks, because these read the parameters.
    experts.forward = on_local_shares


@contextmanager
def _local_shares(experts: nn.Module) -> Iterator[None]:
    """Replace DTensor parameters by their local tensors. Gradients reach the parameters."""
    found = [
        (module, name, parameter)
        for module in experts.modules()
        for name, parameter in module._parameters.items()
    ]
    try:
        for module, name, parameter in found:
            if isinstance(parameter, DTensor):
                module._parameters[name] = parameter.to_local()  # type: ignore[assignment]
        yield
    finally:
        for module, name, parameter in found:
            module._parameters[name] = parameter
