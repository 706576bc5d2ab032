"""Load, initialise and save weights as Hugging Face folders, on whole or sharded networks.

- `load` and `initialize` read or draw only tensors that overlap this rank's shards.
- `save` and `named_hf_tensors` are collectives on a sharded module: all ranks iterate to the end.
- Each drawn tensor has a generator seeded by the manifest's seed and the tensor's name.
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
    unwrapped_name,
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
MAX_DRAWING_THREADS = 16  # each holds a float32 tensor


@torch.no_grad()
def initialize(module: CausalLm, model: Model) -> None:
    """Fill the module by `model.init`: from a pretrained folder, or drawn.

    Drawn weights are normal with `std`, norms one, biases zero.
    """
    if model.init.kind == "pretrained":
        with _open_pretrained(module, model, model.init) as files:
            _fill(module, files)
        return
    _allocate(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(_draw(module, hf, model.init)[slices(box)])


def _draw(module: CausalLm, hf: HfTensor, init: RandomInit) -> Tensor:
    """Return the whole tensor in float32 on the CPU."""
    source = hf.name if hf.expert is None else unwrapped_name(hf.parameter_name)
    drawn = module.initial_tensor(hf.parameter_name, _seed(init, source), init.std)
    if drawn is not None:
        return drawn if hf.expert is None else hf.view_of(drawn)
    if len(hf.shape) == 1:
        return torch.full(hf.shape, 0.0 if hf.name.endswith("bias") else 1.0)
    generator = torch.Generator().manual_seed(_seed(init, hf.name))
    return torch.empty(hf.shape).normal_(std=init.std, generator=generator)


def _seed(init: RandomInit, name: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{init.seed}:{name}".encode()).digest()[:8], "big") >> 1


@torch.no_grad()
def initialize_on_device(module: CausalLm, std: float, seed: int) -> None:
    """Draw local shards on their device: fast, but not reproducible on other meshes."""
    _allocate(module)
    device = local_tensor(next(module.parameters())).device
    rank = dist.get_rank() if is_sharded(module) else 0
    generator = torch.Generator(device).manual_seed(seed + rank)
    # Stacked experts are drawn at once, because single experts take minutes.
    for name, tensor in module.state_dict().items():
        local = local_tensor(tensor.detach())
        if tensor.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        else:
            local.normal_(std=std, generator=generator)


def write_initial(
    model: Model, directory: Path | str, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write the bytes that `initialize` and `save` would. Return the parameter count."""
    directory = Path(directory)
    module = build(model, dtype, "meta")
    files = hf_folder.assign_files(hf_tensors(module), max_file_bytes)
    hf_folder.remove_weights(directory)
    # A generator uses one core, so tensors are drawn in threads. Reading is disk-bound.
    num_cores = len(os.sched_getaffinity(0)) if model.init.kind == "random" else 1
    pool = ThreadPoolExecutor(min(num_cores, MAX_DRAWING_THREADS))
    with _initial_tensors(module, model) as tensor, pool:
        for file, group in files.items():
            values = pool.map(lambda hf: tensor(hf).to(hf.dtype), group)
            tensors = {hf.name: value for hf, value in zip(group, values, strict=True)}
            hf_folder.write_file(directory / file, tensors)
            del tensors
    hf_folder.finish(directory, files, _config(model, module))
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _initial_tensors(module: CausalLm, model: Model) -> Iterator[Callable[[HfTensor], Tensor]]:
    init = model.init
    if init.kind == "random":
        yield lambda hf: _draw(module, hf, init)
        return
    with _open_pretrained(module, model, init) as files:
        yield lambda hf: hf_folder.read(files, hf)


@contextmanager
def _open_pretrained(
    module: CausalLm, model: Model, init: PretrainedInit
) -> Iterator[dict[str, Any]]:
    directory = Path(init.path)
    check_config(model, directory)
    with _open(module, directory) as files:
        hf_folder.check_digest(directory, init.sha256)
        yield files


def _allocate(module: CausalLm) -> None:
    """Allocate a module built on "meta": on its mesh's device if sharded, or on the CPU."""
    parameters = list(module.parameters())
    if not any(parameter.is_meta for parameter in parameters):
        return
    mesh, device = getattr(parameters[0], "device_mesh", None), torch.device("cpu")
    if mesh is not None and mesh.device_type != "cpu":
        device = torch.device(mesh.device_type, torch.cuda.current_device())
    module.to_empty(device=device)
    module.compute_buffers()


@torch.no_grad()
def load(
    module: CausalLm, directory: Path | str, on_tensor: Callable[[], object] = lambda: None
) -> None:
    """Fill the module from a Hugging Face folder, in the module's dtype.

    Call `on_tensor` after every tensor. Raise OrreryError, before any change, as `open_tensors`
    does.
    """
    with _open(module, Path(directory)) as files:
        _fill(module, files, on_tensor)


def _fill(
    module: CausalLm, files: dict[str, Any], on_tensor: Callable[[], object] = lambda: None
) -> None:
    _allocate(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(hf_folder.read(files, hf, box))
        on_tensor()


def _open(module: CausalLm, directory: Path) -> Any:
    config = module.config
    ignored = ignored_hf_names(config)
    return hf_folder.open_tensors(directory, hf_tensors(module), ignored, config.tie_embeddings)


def save(
    module: CausalLm, model: Model, directory: Path | str, max_file_bytes: int = MAX_FILE_BYTES
) -> None:
    """Write `config.json` and safetensors files of at most `max_file_bytes`, or one tensor.

    Other files in the folder stay. A collective on a sharded module: ranks write in parallel to a
    shared folder, and hold at most one file in host memory. Return once everything is on disk.
    """
    directory = Path(directory)
    sharded = is_sharded(module)
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if sharded else (1, 0)
    if rank == 0:
        hf_folder.remove_weights(directory)
    if sharded:
        dist.barrier()
    files = hf_folder.assign_files(hf_tensors(module), max_file_bytes)
    stream = named_hf_tensors(module)
    held: dict[str, Tensor] = {}
    held_file = ""
    for index, (file, group) in enumerate(files.items()):
        for hf in group:
            name, tensor = next(stream)
            assert name == hf.name, f"the stream gave {name} for {hf.name}"
            if index % num_ranks == rank:
                # A view would keep its whole gathered parameter.
                held[name] = torch.empty(hf.shape, dtype=hf.dtype, device="cpu").copy_(tensor)
                held_file = file
        ends_round = index % num_ranks == num_ranks - 1 or index == len(files) - 1
        if held and ends_round:
            hf_folder.write_file(directory / held_file, held)
            held = {}
    if sharded:
        dist.barrier()
    if rank == 0:
        hf_folder.finish(directory, files, _config(model, module))
    if sharded:
        dist.barrier()


def _config(model: Model, module: CausalLm) -> dict[str, Any]:
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return {**hf_config(model), "dtype": dtype}
