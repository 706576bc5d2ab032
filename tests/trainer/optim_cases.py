"""A toy policy for optimizer tests, its made-up gradients, and ranks that step it when sharded.

A rank (`optim_cases.py FOLDER PORT WORLD_SIZE RANK`) prints by layout the gradient norm, the empty
shards, and the largest error of weights by kind.
"""

import json
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from pydantic import TypeAdapter
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor

from orrery.manifest import schema
from orrery.models.placement import local_box, local_tensor
from orrery.trainer.optim import BucketedOptimizer, gradient_norm, make_optimizer
from orrery.trainer.parallel.world import World

ADAMW = {"kind": "adamw", "lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
MUON = {
    "kind": "muon",
    "lr": 2e-2,
    "momentum": 0.9,
    "nesterov": True,
    "weight_decay": 0.1,
    "num_newton_schulz_steps": 5,
    "rest": ADAMW,
}
SPECS = {
    "adamw": ADAMW,
    "muon": MUON,
    "muon_without_nesterov": MUON | {"nesterov": False},
    "sgd": {"kind": "sgd", "lr": 1e-2, "momentum": 0.9, "weight_decay": 0.1},
    "sgd_without_momentum": {"kind": "sgd", "lr": 1e-2, "momentum": 0.0, "weight_decay": 0.1},
    "sign_sgd": {"kind": "sign_sgd", "lr": 1e-3, "weight_decay": 0.1},
}
SHAPES = {
    "embed.weight": (16, 12),
    "layers.0.norm.weight": (3,),  # smaller than a mesh of four: the last rank has no part
    "layers.0.thin.weight": (2, 40),  # the first matrix of Muon's, which two of four ranks lack
    "layers.0.q.weight": (10, 12),  # does not divide by four
    "layers.0.mlp.gate.weight": (4, 12),
    "layers.0.mlp.experts.gate_up_proj": (4, 12, 8),
    "layers.0.mlp.experts.down_proj": (4, 8, 6),
    "layers.1.q.weight": (12, 10),
    "layers.1.mlp.experts.gate_up_proj": (4, 8, 16),  # [E, D, 2·I], as in some transformers models
    "layers.1.mlp.experts.down_proj": (4, 8, 8),
    "layers.1.bias": (700,),
}


def spec_of(name: str) -> schema.Optimizer:
    return TypeAdapter(schema.Optimizer).validate_python(SPECS[name])


class Toy(nn.Module):
    """A module with random weights of these `shapes`, equal in each process."""

    def __init__(self, shapes: dict[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            *path, last = name.split(".")
            owner: nn.Module = self
            for part in path:
                if part not in owner._modules:
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            setattr(owner, last, nn.Parameter(torch.randn(shape, generator=generator)))


def gradients(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(100 + step)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def take_steps(
    toy: nn.Module,
    optimizer: BucketedOptimizer,
    steps: list[int],
    divisor: float | None = None,
    prefetch: bool = False,
) -> None:
    for step in steps:
        whole = gradients(step)
        for name, weight in toy.named_parameters():
            weight.grad = like(weight, whole[name])
        if prefetch:
            optimizer.prefetch()
        optimizer.step(
            None if divisor is None else torch.tensor(divisor, device=next(toy.parameters()).device)
        )
        optimizer.zero_grad()


def like(weight: Tensor, whole: Tensor) -> Tensor:
    """`whole` as this rank holds it where it is sharded like `weight`."""
    if not isinstance(weight, DTensor):
        return whole.to(weight.device, copy=True)
    part = whole[tuple(slice(start, stop) for start, stop in local_box(weight))].clone()
    return DTensor.from_local(
        part,
        weight.device_mesh,
        weight.placements,
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def sharded(
    toy: Toy,
    mesh: DeviceMesh,
    placements: list[Placement],
    experts: tuple[DeviceMesh, list[Placement]] | None = None,
) -> Toy:
    for name, weight in list(toy.named_parameters()):
        owner = toy.get_submodule(name.rpartition(".")[0])
        on, how = experts if experts is not None and "experts" in name else (mesh, placements)
        setattr(
            owner,
            name.rpartition(".")[2],
            nn.Parameter(distribute_tensor(weight.detach(), on, how)),
        )
    return toy


def cut_twice(mesh: DeviceMesh, first: int, second: int) -> Toy:
    """Cut matrices along dim −`first` on one axis and −`second` on the other, vectors on one."""
    toy = Toy()
    for name, weight in list(toy.named_parameters()):
        how = [Shard(0), Replicate()]
        if weight.ndim > 1:
            how = [Shard(weight.ndim - first), Shard(weight.ndim - second)]
        cut = nn.Parameter(distribute_tensor(weight.detach(), mesh, how))
        setattr(toy.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2], cut)
    return toy


def fully_sharded(mesh: DeviceMesh, ep_mesh: DeviceMesh, expert_fsdp_mesh: DeviceMesh) -> Toy:
    """Shard as the trainer: experts by expert parallel and FSDP, the rest by FSDP."""
    toy = Toy()
    experts = toy.get_submodule("layers.0.mlp.experts")
    for name, weight in list(experts.named_parameters()):
        setattr(
            experts, name, nn.Parameter(distribute_tensor(weight.detach(), ep_mesh, [Shard(0)]))
        )
    fully_shard(experts, mesh=expert_fsdp_mesh)
    fully_shard(toy, mesh=mesh)
    return toy


def layouts() -> dict[str, Toy | None]:
    """By name; None where this rank has no part in it."""
    four, two = DeviceMesh("cpu", list(range(4))), DeviceMesh("cpu", [0, 1])
    replicated = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp_replicate", "dp_shard"))
    expert_mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_fsdp", "ep"))
    repeated_experts = init_device_mesh(
        "cpu", (2, 1, 2), mesh_dim_names=("dp_replicate", "expert_fsdp", "ep")
    )
    halves = sharded(Toy(), two, [Shard(0)]) if dist.get_rank() < 2 else None
    lora = sharded(Toy(), four, [Shard(0)])
    for name, weight in lora.named_parameters():
        weight.requires_grad_("q.weight" in name or "norm" in name)
    return {
        "one": Toy(),
        "dp_shard 2": halves,
        "dp_shard 4": sharded(Toy(), four, [Shard(0)]),
        "dp_replicate 2, dp_shard 2": sharded(Toy(), replicated, [Replicate(), Shard(0)]),
        "columns": sharded(Toy(), four, [Shard(0)], (expert_mesh, [Shard(1), Shard(0)])),
        "rows and columns": cut_twice(expert_mesh, 2, 1),
        "rows over both axes": cut_twice(expert_mesh, 2, 2),
        "fully_shard over ep": fully_sharded(four, expert_mesh["ep"], expert_mesh["expert_fsdp"]),
        "fully_shard over ep, dp_replicate 2": fully_sharded(
            replicated, repeated_experts["ep"], repeated_experts["dp_replicate", "expert_fsdp"]
        ),
        "adapters only": lora,
    }


def try_layout(toy: Toy, world: World) -> dict:
    """Return the norm, which shards are empty, and the errors after two steps of each kind."""
    for name, weight in toy.named_parameters():
        weight.grad = like(weight, gradients(1)[name]) if weight.requires_grad else None
    norm = gradient_norm(toy.parameters(), world)
    answer: dict = {
        "norm": norm.item(),
        "empty": [
            name for name, weight in toy.named_parameters() if not local_tensor(weight).numel()
        ],
    }
    start = {name: local_tensor(weight).detach().clone() for name, weight in toy.named_parameters()}
    for kind in SPECS:
        alone = Toy()
        take_steps(alone, make_optimizer(alone, spec_of(kind)), [1, 2], divisor=2.0)
        for offload in (False, True) if kind in ("adamw", "muon") else (False,):
            with torch.no_grad():
                for name, weight in toy.named_parameters():
                    local_tensor(weight).copy_(start[name])
            take_steps(toy, make_optimizer(toy, spec_of(kind), offload), [1, 2], divisor=2.0)
            errors = [
                (local_tensor(weight) - local_tensor(like(weight, whole.detach()))).abs().max()
                for weight, whole in zip(toy.parameters(), alone.parameters(), strict=True)
                if weight.requires_grad and local_tensor(weight).numel()
            ]
            # NaN where one is.
            answer[f"{kind}{', offloaded' if offload else ''}"] = (
                torch.stack(errors).max().item() if errors else 0.0
            )
    return answer


def main() -> None:
    folder, _, size, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), size)
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=60)
    )
    world = World(rank, size, torch.device("cpu"), DeviceMesh("cpu", list(range(size))))
    answers = {name: try_layout(toy, world) for name, toy in layouts().items() if toy is not None}
    dist.barrier()
    dist.destroy_process_group()
    print(json.dumps(answers))
