"""Weights in and out of Hugging Face folders, whole or sharded, and weights from the manifest's `model.init`.

- `load` and `initialize` fill what this rank holds, reading or drawing no more than the tensors that it has a part of.
- `save` gathers one parameter at a time and deals the files over the ranks: no rank keeps more than one file of tensors in host memory.
- `write_initial` makes the folder that a run starts from without any network in memory, one file of tensors at a time.
- On a sharded module `save` and `named_hf_tensors` are collectives: all ranks call them, and iterate to the end.
- A drawn HF tensor comes from its own generator, seeded by the manifest's seed and the tensor's name: not from world size or order.
"""

import hashlib
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orrery.manifest.schema import Model, PretrainedInit, RandomInit
from orrery.models import hf_folder
from orrery.models.causal_lm import CausalLm
from orrery.models.families import build, hf_config, ignored_hf_names
from orrery.models.hf_tensors import (
    HfTensor,
    hf_tensors,
    named_hf_slices,
    named_hf_tensors,
    plain_name,
)
from orrery.models.placement import is_sharded, local_tensor, slices
from orrery.models.pretrained import check_config

__all__ = [
    "MAX_FILE_BYTES",
    "HfTensor",
    "hf_tensors",
    "initialize",
    "initialize_on_device",
    "load",
    "named_hf_slices",
    "named_hf_tensors",
    "save",
    "write_initial",
]

MAX_FILE_BYTES = 5_000_000_000
MOST_DRAWN_AT_ONCE = 16  # each of them in float32, beside the file that they go to


# Initialise ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def initialize(module: CausalLm, model: Model) -> None:
    """The weights of the manifest's `model.init`: drawn (normal with `std`, norms one, biases zero), or a pretrained folder's."""
    if model.init.kind == "pretrained":
        with _pretrained(module, model, model.init) as found:
            _fill(module, found)
        return
    _give_storage(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(_drawn(module, hf, model.init)[slices(box)])


def _drawn(module: CausalLm, hf: HfTensor, init: RandomInit) -> Tensor:
    """The whole tensor in float32 on the CPU."""
    own = module.drawn(
        hf.parameter_name,
        _seed(init, hf.name if hf.expert is None else plain_name(hf.parameter_name)),
        init.std,
    )
    if own is not None:
        return own if hf.expert is None else hf.of(own)
    if len(hf.shape) == 1:
        return torch.full(hf.shape, 0.0 if hf.name.endswith("bias") else 1.0)
    return torch.empty(hf.shape).normal_(
        std=init.std, generator=torch.Generator().manual_seed(_seed(init, hf.name))
    )


def _seed(init: RandomInit, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{init.seed}:{name}".encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def initialize_on_device(module: CausalLm, std: float, seed: int) -> None:
    """For benchmarks only: local shards drawn where they are, in a moment. Other weights on every device, world size and layout."""
    _give_storage(module)
    device = local_tensor(next(module.parameters())).device
    generator = torch.Generator(device).manual_seed(
        seed + (dist.get_rank() if is_sharded(module) else 0)
    )
    # Stacks of experts at once: tensor by tensor, as files have them, a model of many experts takes minutes of a benchmark's time.
    for name, tensor in module.state_dict().items():
        local = local_tensor(tensor.detach())
        if tensor.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            local.normal_(std=std, generator=generator)


def write_initial(
    model: Model, directory: Path | str, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write what `initialize` and `save` of a network in `dtype` would, byte for byte; returns its number of parameters."""
    directory = Path(directory)
    module = build(model, dtype, "meta")
    files = hf_folder.divide(hf_tensors(module), max_file_bytes)
    hf_folder.begin(directory)
    # Each tensor has its own generator, which draws on one core; reading is as fast as the disk.
    cores = len(os.sched_getaffinity(0)) if model.init.kind == "random" else 1
    with (
        _initial(module, model) as tensor,
        ThreadPoolExecutor(min(cores, MOST_DRAWN_AT_ONCE)) as pool,
    ):
        for file, group in files.items():
            values = pool.map(lambda hf: tensor(hf).to(hf.dtype), group)
            hf_folder.write_file(
                directory / file, {hf.name: value for hf, value in zip(group, values, strict=True)}
            )
    hf_folder.finish(directory, files, _config(model, module))
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _initial(module: CausalLm, model: Model) -> Iterator[Callable[[HfTensor], Tensor]]:
    init = model.init
    if init.kind == "random":
        yield lambda hf: _drawn(module, hf, init)
        return
    with _pretrained(module, model, init) as found:
        yield lambda hf: hf_folder.read(found, hf)


@contextmanager
def _pretrained(module: CausalLm, model: Model, init: PretrainedInit) -> Iterator[dict[str, Any]]:
    """The open folder of `model.init`, once it is known to be the manifest's: its config and tensors first, which is quick."""
    directory = Path(init.path)
    check_config(model, directory)
    with _opened(module, directory) as found:
        hf_folder.check_digest(directory, init.sha256)
        yield found


def _give_storage(module: CausalLm) -> None:
    """Storage for a module that was built on "meta", on the device of its mesh where it is sharded, else on the CPU."""
    parameters = list(module.parameters())
    if any(parameter.is_meta for parameter in parameters):
        mesh = getattr(parameters[0], "device_mesh", None)
        device = (
            "cpu"
            if mesh is None or mesh.device_type == "cpu"
            else torch.device(mesh.device_type, torch.cuda.current_device())
        )
        module.to_empty(device=device)
        module.compute_buffers()


# Load ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(
    module: CausalLm, directory: Path | str, each: Callable[[], object] = lambda: None
) -> None:
    """Fill the module with a Hugging Face folder's weights, in the module's dtype; nothing is changed if anything does not fit.

    `each` is called after every tensor.

    Raises OrreryError that names the tensor: missing, unexpected, of another shape, or in a file that cannot be read.
    """
    with _opened(module, Path(directory)) as found:
        _fill(module, found, each)


def _fill(
    module: CausalLm, found: dict[str, Any], each: Callable[[], object] = lambda: None
) -> None:
    _give_storage(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(hf_folder.read(found, hf, box))
        each()


def _opened(module: CausalLm, directory: Path) -> Any:
    return hf_folder.opened(
        directory, hf_tensors(module), ignored_hf_names(module.config), module.config.tie_embeddings
    )


# Save ---------------------------------------------------------------------------------------------------------------


def save(
    module: CausalLm, model: Model, directory: Path | str, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write `config.json` and safetensors, one file up to `max_file_bytes` or several with an index; other files in the folder stay.

    A collective on a sharded module: files are dealt to the ranks in rounds, a file each, and written at the same time. The folder must
    be one that all ranks see. All return when all is on disk.
    """
    directory = Path(directory)
    sharded = is_sharded(module)
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if sharded else (1, 0)
    if rank == 0:
        hf_folder.begin(directory)
    if sharded:
        dist.barrier()
    files = hf_folder.divide(hf_tensors(module), max_file_bytes)
    stream = named_hf_tensors(module)
    mine: dict[str, Tensor] = {}
    for index, (file, group) in enumerate(files.items()):
        for hf in group:
            name, tensor = next(stream)
            assert name == hf.name, f"the stream gave {name} for {hf.name}"
            if index % num_ranks == rank:
                # A copy: a view would drag its whole parameter along, and a gathered one is freed at the next.
                mine[name] = torch.empty(hf.shape, dtype=hf.dtype, device="cpu").copy_(tensor)
        if index % num_ranks == rank:
            mine_file = file
        if mine and (
            index % num_ranks == num_ranks - 1 or index == len(files) - 1
        ):  # the end of a round
            hf_folder.write_file(directory / mine_file, mine)
            mine = {}
    if sharded:
        dist.barrier()
    if rank == 0:
        hf_folder.finish(directory, files, _config(model, module))
    if sharded:
        dist.barrier()


def _config(model: Model, module: CausalLm) -> dict[str, Any]:
    return {
        **hf_config(model),
        "dtype": str(next(module.parameters()).dtype).removeprefix("torch."),
    }
