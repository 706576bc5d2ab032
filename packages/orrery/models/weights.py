"""Load, initialise and save weights, whole or sharded, as Hugging Face folders.

A Hugging Face ("HF") tensor is a slice ("box") of a parameter or buffer, with adapters merged.
"""

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orrery.manifest.schema import Model, PretrainedInit, RandomInit
from orrery.models import hf_folder
from orrery.models.causal_lm import CausalLm
from orrery.models.families import build, hf_config, hf_names, is_ignored
from orrery.models.hf_folder import HfTensor, check_config, check_layers, is_mtp_name, mtp_tensors
from orrery.models.lora import adapters, merged
from orrery.models.placement import (
    Box,
    full_tensor,
    intersection,
    is_sharded,
    local_box,
    local_tensor,
    relative,
    slices,
)

MAX_FILE_BYTES = 5_000_000_000
MAX_DRAWING_THREADS = 16  # each thread holds one float32 tensor
# Activation checkpointing and torch.compile insert these into names.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")


@torch.no_grad()
def initialize(module: CausalLm, model: Model) -> None:
    """Load pretrained weights, or draw normal values. Norm weights start at 1, biases at 0.

    Drawn values depend on seed and tensor name, not on the mesh.
    """
    if model.init.kind == "pretrained":
        with _open_pretrained(module, model, model.init) as files:
            _fill(module, files)
        return
    _allocate(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(_draw(module, hf, model.init)[slices(box)])


def _draw(module: CausalLm, hf: HfTensor, init: RandomInit) -> Tensor:
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
def initialize_on_device(
    module: CausalLm, std: float, seed: int, device: torch.device | None = None
) -> None:
    """Draw weights on `device` (default: the parameters'). Values depend on device and mesh."""
    _allocate(module)
    device = device or local_tensor(next(module.parameters())).device
    rank = dist.get_rank() if is_sharded(module) else 0
    generator = torch.Generator(device).manual_seed(seed + rank)
    for name, tensor in module.state_dict().items():
        local = local_tensor(tensor.detach())
        if tensor.ndim == 1:
            local.fill_(0.0 if name.endswith("bias") else 1.0)
        elif local.device == device:
            local.normal_(std=std, generator=generator)
        else:
            local.copy_(
                torch.empty_like(local, device=device).normal_(std=std, generator=generator)
            )


def write_initial(
    model: Model, directory: Path | str, dtype: torch.dtype, max_file_bytes: int = MAX_FILE_BYTES
) -> int:
    """Write the initial weights as `save` does. Return the parameter count."""
    directory = Path(directory)
    module = build(model, dtype, "meta")
    hf_folder.remove_weights(directory)
    # The disk limits reading of pretrained weights, so one thread suffices.
    num_cores = len(os.sched_getaffinity(0)) if model.init.kind == "random" else 1
    pool = ThreadPoolExecutor(min(num_cores, MAX_DRAWING_THREADS))
    with _initial_tensors(module, model) as (tensors, tensor), pool:
        files = hf_folder.assign_files(tensors, max_file_bytes)
        for file, group in files.items():
            values = pool.map(lambda hf: tensor(hf).to(hf.dtype), group)
            content = {hf.name: value for hf, value in zip(group, values, strict=True)}
            hf_folder.write_file(directory / file, content)
            del content
    hf_folder.finish(directory, files, _config(model, module))
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def _initial_tensors(
    module: CausalLm, model: Model
) -> Iterator[tuple[list[HfTensor], Callable[[HfTensor], Tensor]]]:
    init, tensors = model.init, hf_tensors(module)
    if init.kind == "random":
        yield tensors, lambda hf: _draw(module, hf, init)
        return
    with _open_pretrained(module, model, init) as files:
        carried = mtp_tensors(model, files, next(module.parameters()).dtype)
        yield tensors + carried, lambda hf: hf_folder.read(files, hf)


@contextmanager
def _open_pretrained(
    module: CausalLm, model: Model, init: PretrainedInit
) -> Iterator[dict[str, Any]]:
    directory = Path(init.path)
    check_config(model, directory)
    with open_checkpoint(module, directory) as files:
        hf_folder.check_digest(directory, init.sha256)
        yield files


def _allocate(module: CausalLm) -> None:
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
    """Fill the module from a Hugging Face folder. Keep the module's dtype.

    Call `on_tensor` after every tensor. Raise OrreryError before any change if the folder does
    not match.
    """
    with open_checkpoint(module, Path(directory)) as files:
        _fill(module, files, on_tensor)


def _fill(
    module: CausalLm, files: dict[str, Any], on_tensor: Callable[[], object] = lambda: None
) -> None:
    _allocate(module)
    for hf, box, local in named_hf_slices(module):
        local.copy_(hf_folder.read(files, hf, box))
        on_tensor()


@contextmanager
def open_checkpoint(module: CausalLm, directory: Path) -> Iterator[dict[str, Any]]:
    """Yield {tensor name: open file}. Raise OrreryError unless the tensors match the module."""
    config = module.config

    def is_expected(name: str) -> bool:
        return is_mtp_name(config, name) or is_ignored(config, name)

    wanted = hf_tensors(module)
    with hf_folder.open_tensors(directory, wanted, is_expected, config.tie_embeddings) as files:
        check_layers(config, directory, files)
        yield files


def save(
    module: CausalLm,
    model: Model,
    directory: Path | str,
    max_file_bytes: int = MAX_FILE_BYTES,
    start: Path | None = None,
) -> None:
    """Write `config.json` and safetensors files of at most `max_file_bytes`, or one larger tensor.

    Copy MTP (multi-token-prediction) layers from folder `start`. A rank buffers at most one file.
    """
    directory = Path(directory)
    sharded = is_sharded(module)
    num_ranks, rank = (dist.get_world_size(), dist.get_rank()) if sharded else (1, 0)
    if rank == 0:
        hf_folder.remove_weights(directory)
    if sharded:
        dist.barrier()
    with _open_start(module, start) as base:
        dtype = next(module.parameters()).dtype
        carried = mtp_tensors(model, base, dtype)
        files = hf_folder.assign_files(hf_tensors(module) + carried, max_file_bytes)
        stream = named_hf_tensors(module)
        held: dict[str, Tensor] = {}
        held_file = ""
        for index, (file, group) in enumerate(files.items()):
            is_mine = index % num_ranks == rank
            for hf in group:
                if hf.parameter_name:
                    name, tensor = next(stream)
                    assert name == hf.name, f"the stream gave {name} for {hf.name}"
                elif is_mine:
                    tensor = hf_folder.read(base, hf)
                if is_mine:
                    # A view would keep the gathered parameter in memory.
                    tensor = torch.empty(hf.shape, dtype=hf.dtype, device="cpu").copy_(tensor)
                    held[hf.name], held_file = tensor, file
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


@contextmanager
def _open_start(module: CausalLm, start: Path | None) -> Iterator[dict[str, Any]]:
    if not module.config.num_mtp_layers:
        yield {}
        return
    assert start is not None, "MTP layers are not in the module, so their folder must be named"
    with open_checkpoint(module, start) as files:
        yield files


def _config(model: Model, module: CausalLm) -> dict[str, Any]:
    dtype = str(next(module.parameters()).dtype).removeprefix("torch.")
    return {**hf_config(model), "dtype": dtype}


def unwrapped_name(parameter_name: str) -> str:
    for wrapper in _WRAPPERS:
        parameter_name = parameter_name.replace(wrapper, "")
    return parameter_name


def hf_tensors(module: CausalLm) -> list[HfTensor]:
    """Return a checkpoint's tensors in `save`'s order, without a collective."""
    tensors = []
    for name, tensor in _checkpoint_state(module).items():
        key, layer = unwrapped_name(name), ""
        if key.startswith("layers."):
            layer = key.split(".")[1]
            key = key.replace(f"layers.{layer}.", "layers.{layer}.", 1)
        parts = hf_names(module, key)
        for index, part in enumerate(parts):
            tensors += _split(part.replace("{layer}", layer), name, tensor, index, len(parts))
    return tensors


def _split(hf_name: str, name: str, tensor: Tensor, part: int, num_parts: int) -> list[HfTensor]:
    is_stacked, dtype = "{expert}" in hf_name, tensor.dtype
    sides = [(0, size) for size in tensor.shape]
    if num_parts > 1:
        size = tensor.shape[is_stacked] // num_parts
        sides[is_stacked] = (part * size, (part + 1) * size)
    sizes = tuple(stop - start for start, stop in sides)
    if not is_stacked:
        return [HfTensor(hf_name, name, tuple(sides), sizes, dtype)]
    experts = []
    for e in range(tensor.shape[0]):
        box = ((e, e + 1), *sides[1:])
        experts.append(HfTensor(hf_name.replace("{expert}", str(e)), name, box, sizes[1:], dtype))
    return experts


def _checkpoint_state(module: CausalLm) -> dict[str, Tensor]:
    """Return persistent buffers, and parameters except adapters."""
    adapting = {parameter for _, adapter in adapters(module) for parameter in adapter.parameters()}
    named = module.named_parameters()
    state: dict[str, Tensor] = {name: one for name, one in named if one not in adapting}
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                state[name] = buffer
    return state


@torch.no_grad()
def named_hf_tensors(module: CausalLm) -> Iterator[tuple[str, Tensor]]:
    """Yield (HF name, detached unsharded tensor) in `hf_tensors`' order.

    Without sharding or adapters, tensors are views of parameters.
    """
    state, adapter_of = _checkpoint_state(module), dict(adapters(module))
    # A parameter's tensors are adjacent, so each parameter is gathered once.
    for parameter_name, group in groupby(hf_tensors(module), key=lambda hf: hf.parameter_name):
        whole = full_tensor(state[parameter_name].detach())
        if (adapter := adapter_of.get(parameter_name)) is not None:
            whole = merged(whole, adapter)
        for hf in group:
            yield hf.name, hf.view_of(whole)
        del whole


@torch.no_grad()
def named_peft_tensors(module: CausalLm, dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield (PEFT name, tensor in `dtype`) of all adapters. A collective if they are sharded.

    `lora_A` is [rank, in]. `lora_B` is [out, rank] and scaled. Experts are not supported.
    """
    groups = groupby(hf_tensors(module), key=lambda hf: hf.parameter_name)
    parts = {name: list(group) for name, group in groups}
    for parameter_name, adapter in adapters(module):
        a, b = full_tensor(adapter.a.detach()), full_tensor(adapter.b.detach()) * adapter.scale
        for hf in parts[parameter_name]:
            prefix = f"base_model.model.{hf.name.removesuffix('.weight')}"
            yield f"{prefix}.lora_A.weight", a.to(dtype)
            yield f"{prefix}.lora_B.weight", b[slices(hf.box[:1])].to(dtype)


@torch.no_grad()
def named_hf_slices(
    module: CausalLm, replacements: Mapping[str, Tensor] | None = None
) -> Iterator[tuple[HfTensor, Box, Tensor]]:
    """Yield (HF tensor, box in it, this rank's data of that box) without gather or copy.

    Replicas yield equal boxes. `replacements` maps parameter names to shards to yield instead.
    """
    state = _checkpoint_state(module)
    boxes = {name: local_box(tensor) for name, tensor in state.items()}
    for hf in hf_tensors(module):
        held = boxes[hf.parameter_name]
        common = intersection(held, hf.box)
        if common is None:
            continue
        shard = (replacements or {}).get(hf.parameter_name, state[hf.parameter_name])
        local = local_tensor(shard.detach())[slices(relative(common, held))]
        box = relative(common, hf.box)
        yield (hf, box, local) if hf.expert is None else (hf, box[1:], local[0])
