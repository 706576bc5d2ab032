"""Weights in and out of Hugging Face directories, one tensor at a time, whole or sharded.

- Our parameters are HF's by name (`<family>/weights.py`); an HF tensor may be a box of ours: one expert's gate in all experts' gates and ups.
- On a sharded module every function is a collective: all ranks call it, and iterate to the end. Rank 0 writes.
- `save` writes each file under another name, flushes it to disk and renames it; `config.json` goes first and comes last: a directory
  without it is not weights. `load` reads only what this rank holds, and refuses what is missing, unexpected or misshaped by name.
- `initialize` draws each HF tensor from its own generator, seeded by the manifest's seed and the tensor's name.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sync, write_atomic
from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.families import hf_config, hf_names
from orrery.models.placement import Box, full_tensor, intersection, local_box, local_tensor, relative

MAX_SHARD_BYTES = 5_000_000_000
# What activation checkpointing and torch.compile put into the names of the parameters that they wrap.
_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")
SINGLE_FILE, INDEX_FILE, CONFIG_FILE = "model.safetensors", "model.safetensors.index.json", "config.json"


@dataclass(frozen=True)
class HfTensor:
    """One tensor of a checkpoint: the box `box` of our parameter; without its first dimension where that is one expert's."""

    name: str
    parameter_name: str
    box: Box
    shape: tuple[int, ...]

    @property
    def expert(self) -> int | None:
        return self.box[0][0] if len(self.shape) < len(self.box) else None

    def of(self, whole: Tensor) -> Tensor:
        """This tensor, a view of the whole parameter."""
        part = whole[_slices(self.box)]
        return part if self.expert is None else part[0]


def hf_tensors(module: CausalLm) -> list[HfTensor]:
    """Every tensor of the module's checkpoint in writing order; sizes only, no data, no collective."""
    patterns = hf_names(module.config)
    tensors = []
    for name, parameter in _state(module).items():
        plain = name
        for wrapper in _WRAPPERS:
            plain = plain.replace(wrapper, "")
        layer = plain.split(".")[1] if plain.startswith("layers.") else ""
        hf_name = patterns[plain.replace(f"layers.{layer}.", "layers.{layer}.", 1)]
        parts = (hf_name,) if isinstance(hf_name, str) else hf_name
        for index, part in enumerate(parts):
            tensors += _taken_apart(part.replace("{layer}", layer), name, tuple(parameter.shape), index, len(parts))
    return tensors


def _taken_apart(hf_name: str, name: str, shape: tuple[int, ...], part: int, num_parts: int) -> list[HfTensor]:
    stacked = "{expert}" in hf_name
    sides = [(0, size) for size in shape]
    if num_parts > 1:
        size = shape[stacked] // num_parts
        sides[stacked] = (part * size, (part + 1) * size)
    sizes = tuple(stop - start for start, stop in sides)
    if not stacked:
        return [HfTensor(hf_name, name, tuple(sides), sizes)]
    return [HfTensor(hf_name.replace("{expert}", str(e)), name, ((e, e + 1), *sides[1:]), sizes[1:]) for e in range(shape[0])]


def _state(module: CausalLm) -> dict[str, Tensor]:
    """What a checkpoint holds: parameters, then the buffers that are not computed."""
    state = dict(module.named_parameters())
    for prefix, owner in module.named_modules():
        for name, buffer in owner.named_buffers(prefix, recurse=False):
            if name.rpartition(".")[2] not in owner._non_persistent_buffers_set:
                state[name] = buffer
    return state


def _slices(box: Box) -> tuple[slice, ...]:
    return tuple(slice(*side) for side in box)


@torch.no_grad()
def named_hf_tensors(module: CausalLm, full: bool = True) -> Iterator[tuple[str, Tensor]]:
    """(HF name, detached tensor) of every checkpoint tensor, in `hf_tensors` order; one parameter is gathered at a time.

    Views of the parameters where nothing is sharded: copy what must outlive the next optimizer step. With `full=False` only what this
    rank holds, without any collective: `named_hf_slices` says where it belongs.
    """
    if not full:
        for hf, _, local in named_hf_slices(module):
            yield hf.name, local
        return
    state = _state(module)
    # The tensors of a parameter follow one another, so one gathered parameter is alive at a time.
    for parameter_name, group in groupby(hf_tensors(module), key=lambda hf: hf.parameter_name):
        whole = full_tensor(state[parameter_name].detach())
        for hf in group:
            yield hf.name, hf.of(whole)
        del whole


@torch.no_grad()
def named_hf_slices(module: CausalLm) -> Iterator[tuple[HfTensor, Box, Tensor]]:
    """(checkpoint tensor, box of it, this rank's data in that box), for all that this rank holds; no collective, no copy.

    The box has one `[start, stop)` a dimension of `HfTensor.shape`. Replicas yield the same boxes.
    """
    state = _state(module)
    boxes = {name: local_box(tensor) for name, tensor in state.items()}
    for hf in hf_tensors(module):
        held = boxes[hf.parameter_name]
        common = intersection(held, hf.box)
        if common is None:
            continue
        local = local_tensor(state[hf.parameter_name].detach())[_slices(relative(common, held))]
        box = relative(common, hf.box)
        yield (hf, box, local) if hf.expert is None else (hf, box[1:], local[0])


# Initialise ---------------------------------------------------------------------------------------------------------


def initialize(module: CausalLm, model: Model) -> None:
    """The weights that the manifest's `model.init` names: drawn (normal with `std`, norms one, biases zero), or a pretrained directory's."""
    if model.init.kind == "pretrained":
        directory = Path(model.init.path)
        _check_digest(directory, model.init.sha256)
        load(module, directory)
        return
    _give_storage(module)
    for hf, box, local in named_hf_slices(module):
        if len(hf.shape) == 1:
            local.fill_(0.0 if hf.name.endswith("bias") else 1.0)
            continue
        seed = hashlib.sha256(f"{model.init.seed}:{hf.name}".encode()).digest()[:8]
        generator = torch.Generator().manual_seed(int.from_bytes(seed, "big") >> 1)
        whole = torch.empty(hf.shape).normal_(std=model.init.std, generator=generator)
        local.copy_(whole[_slices(box)])


def _check_digest(directory: Path, expected: str) -> None:
    path = directory / INDEX_FILE if (directory / INDEX_FILE).exists() else directory / SINGLE_FILE
    if not path.exists():
        raise OrreryError(f"model.init.path: {directory} holds neither {INDEX_FILE} nor {SINGLE_FILE}; name a Hugging Face directory")
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise OrreryError(f"model.init.sha256: {path} has {found}, the manifest says {expected}; fetch the manifest's revision again")


def _give_storage(module: CausalLm) -> None:
    """Storage for a module that was built on "meta", on the device of its mesh where it is sharded, else on the CPU."""
    parameters = list(module.parameters())
    if any(parameter.is_meta for parameter in parameters):
        mesh = getattr(parameters[0], "device_mesh", None)
        device = "cpu" if mesh is None or mesh.device_type == "cpu" else torch.device(mesh.device_type, torch.cuda.current_device())
        module.to_empty(device=device)


# Load ---------------------------------------------------------------------------------------------------------------


@torch.no_grad()
def load(module: CausalLm, directory: Path | str) -> None:
    """Fill the module with a Hugging Face directory's weights, in the module's dtype; nothing is changed if anything does not fit.

    Raises OrreryError that names the tensor: missing, unexpected, of another shape, or in a file that cannot be read.
    """
    directory = Path(directory)
    wanted = {hf.name: hf for hf in hf_tensors(module)}
    with ExitStack() as stack:
        files = {}
        for path in _safetensors_files(directory):
            try:
                files[path] = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise OrreryError(f"{path}: not a readable safetensors file ({error}); copy the directory again") from error
        found = {name: file for file in files.values() for name in file.keys()}  # noqa: SIM118  (safe_open has no iterator)
        if module.config.tie_embeddings:
            # Some writers store the head of a tied model beside the embedding; it is the same tensor.
            found.pop("lm_head.weight", None)
        _refuse(directory, "has no tensor", [name for name in wanted if name not in found])
        _refuse(directory, "has a tensor that this model lacks:", [name for name in found if name not in wanted])
        for name, hf in wanted.items():
            shape = tuple(found[name].get_slice(name).get_shape())
            if shape != hf.shape:
                raise OrreryError(f"{directory}: tensor {name} is {list(shape)}, the manifest's model needs {list(hf.shape)}")
        _give_storage(module)
        for hf, box, local in named_hf_slices(module):
            part = found[hf.name].get_slice(hf.name)
            local.copy_(part[_slices(box)])


def _refuse(directory: Path, sentence: str, names: list[str]) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise OrreryError(f"{directory}: {sentence} {names[0]}{more}; is it the directory of this manifest's model?")


def _safetensors_files(directory: Path) -> list[Path]:
    index = directory / INDEX_FILE
    if not (directory / CONFIG_FILE).exists():
        raise OrreryError(f"{directory}: no {CONFIG_FILE}, so not a finished Hugging Face directory; run the stage that writes it again")
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if index.exists():
        try:
            names = sorted(set(json.loads(index.read_text())["weight_map"].values()))
        except (ValueError, KeyError, AttributeError) as error:
            raise OrreryError(f"{index}: not a safetensors index ({error!r}); copy the directory again") from error
        return [directory / name for name in names]
    raise OrreryError(f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; name a Hugging Face directory")


# Save ---------------------------------------------------------------------------------------------------------------


def save(module: CausalLm, model: Model, directory: Path | str, max_shard_bytes: int = MAX_SHARD_BYTES) -> None:
    """Write `config.json` and safetensors, one file up to `max_shard_bytes` or several with an index; other files stay.

    A collective on a sharded module: all ranks call it, rank 0 writes and the others return when it has.
    """
    directory = Path(directory)
    sharded = any(hasattr(parameter, "device_mesh") for parameter in module.parameters())
    writes = not sharded or dist.get_rank() == 0
    dtype = next(module.parameters()).dtype
    files = _divide(hf_tensors(module), dtype.itemsize, max_shard_bytes)
    if writes:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / CONFIG_FILE).unlink(missing_ok=True)
        for stale in directory.glob("model*.safetensors*"):
            stale.unlink()
    stream = named_hf_tensors(module)
    for file_name, names in files.items():
        tensors = {}
        for name in names:
            streamed, tensor = next(stream)
            assert streamed == name, f"stream gave {streamed} for {name}"
            if writes:
                # An expert's view would drag its whole stacked parameter along, and a gathered one is freed at the next.
                tensors[name] = (
                    tensor.to("cpu").contiguous() if tensor.untyped_storage().nbytes() == tensor.nbytes else tensor.cpu().clone()
                )
        if writes:
            _publish(directory / file_name, partial(save_file, tensors, metadata={"format": "pt"}))
    if writes:
        if len(files) > 1:
            total = sum(torch.Size(hf.shape).numel() * dtype.itemsize for hf in hf_tensors(module))
            index = {"metadata": {"total_size": total}, "weight_map": {name: file for file, names in files.items() for name in names}}
            _publish_json(directory / INDEX_FILE, index)
        _publish_json(directory / CONFIG_FILE, {**hf_config(model), "dtype": str(dtype).removeprefix("torch.")})
    if sharded:
        dist.barrier()


def _divide(tensors: list[HfTensor], item_bytes: int, max_shard_bytes: int) -> dict[str, list[str]]:
    """File name to the tensor names in it, in order; a tensor above the limit has a file to itself."""
    groups: list[list[str]] = [[]]
    used = 0
    for hf in tensors:
        size = torch.Size(hf.shape).numel() * item_bytes
        if groups[-1] and used + size > max_shard_bytes:
            groups.append([])
            used = 0
        groups[-1].append(hf.name)
        used += size
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {f"model-{i:05d}-of-{len(groups):05d}.safetensors": group for i, group in enumerate(groups, start=1)}


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write under another name, flush to disk, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        sync(temporary)
        temporary.rename(path)
    finally:
        temporary.unlink(missing_ok=True)
    sync(path.parent)


def _publish_json(path: Path, content: dict) -> None:
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())
