"""A Hugging Face folder on disk: safetensors files, an index where there are several, and `config.json`.

- Each file is written under another name, flushed to disk and renamed. `config.json` goes first and comes last: a folder without it is
  not weights.
- Reading is lazy: a tensor, or a box of it, at a time. What is missing, unexpected or misshaped is refused by name before any is read.
"""

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from orrery.manifest.digest import sha256_of
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.publish import publish_file, write_atomic
from orrery.models.hf_tensors import HfTensor
from orrery.models.placement import Box, slices

SINGLE_FILE, INDEX_FILE, CONFIG_FILE = (
    "model.safetensors",
    "model.safetensors.index.json",
    "config.json",
)
TIED_HEAD = "lm_head.weight"


# Read ---------------------------------------------------------------------------------------------------------------


@contextmanager
def opened(
    directory: Path, wanted: Sequence[HfTensor], ignored: Sequence[str] = (), tied: bool = False
) -> Iterator[dict[str, Any]]:
    """HF name to the open file that has it, for exactly the tensors of `wanted`; `read` takes a box out of it.

    Tensors whose names match an expression of `ignored`, and the head of a tied model, which some writers store, may stand beside them.
    Raises OrreryError that names the tensor: missing, unexpected, of another shape, or in a file that cannot be read.
    """
    with ExitStack() as stack:
        found = {}
        for path in weight_files(directory):
            try:
                file = stack.enter_context(safe_open(path, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise OrreryError(
                    f"{path}: not a readable safetensors file ({error}); copy the directory again"
                ) from error
            found.update(dict.fromkeys(file.keys(), file))
        if tied:
            found.pop(TIED_HEAD, None)
        names = {hf.name for hf in wanted}
        _refuse(directory, "has no tensor", [hf.name for hf in wanted if hf.name not in found])
        expressions = [re.compile(one) for one in ignored]
        odd = [
            name
            for name in found
            if name not in names and not any(one.fullmatch(name) for one in expressions)
        ]
        _refuse(directory, "has a tensor that this model lacks:", odd)
        for hf in wanted:
            if (shape := tuple(found[hf.name].get_slice(hf.name).get_shape())) != hf.shape:
                raise OrreryError(
                    f"{directory}: tensor {hf.name} is {list(shape)}, the manifest's model needs {list(hf.shape)}"
                )
        yield {name: found[name] for name in names}


def read(files: dict[str, Any], hf: HfTensor, box: Box | None = None) -> Tensor:
    """The box `box` of a tensor, or all of it, in the folder's own dtype."""
    file = files[hf.name]
    return (
        file.get_tensor(hf.name) if box is None or not box else file.get_slice(hf.name)[slices(box)]
    )


def _refuse(directory: Path, sentence: str, names: list[str]) -> None:
    if names:
        more = f" (and {len(names) - 1} more)" if len(names) > 1 else ""
        raise OrreryError(
            f"{directory}: {sentence} {names[0]}{more}; is it the directory of this manifest's model?"
        )


def weight_files(directory: Path) -> list[Path]:
    """The files that a folder's tensors are read from: the single one, else those of the index."""
    index = directory / INDEX_FILE
    if not (directory / CONFIG_FILE).exists():
        raise OrreryError(
            f"{directory}: no {CONFIG_FILE}, so not a finished Hugging Face directory; run the stage that writes it again"
        )
    if (directory / SINGLE_FILE).exists():
        return [directory / SINGLE_FILE]
    if index.exists():
        try:
            names = sorted(
                set(read_object(index, "copy the directory again")["weight_map"].values())
            )
        except (KeyError, AttributeError, TypeError) as error:
            raise OrreryError(
                f"{index}: not a safetensors index ({error!r}); copy the directory again"
            ) from error
        return [directory / name for name in names]
    raise OrreryError(
        f"{directory}: neither {SINGLE_FILE} nor {INDEX_FILE}; name a Hugging Face directory"
    )


def check_digest(directory: Path, expected: str) -> None:
    """Raises OrreryError unless the folder's weights, which are read whole, have the digest that `model.init` names."""
    if (found := sha256_of(weight_files(directory))) != expected:
        raise OrreryError(
            f"model.init.sha256 {expected}: the weights of {directory} have {found}; "
            "write that if they are the ones that you mean, else fetch the manifest's revision again"
        )


# Write --------------------------------------------------------------------------------------------------------------


def divide(tensors: Sequence[HfTensor], max_file_bytes: int) -> dict[str, list[HfTensor]]:
    """File name to the tensors in it, in order; a tensor above the limit has a file to itself."""
    groups: list[list[HfTensor]] = [[]]
    used = 0
    for hf in tensors:
        if groups[-1] and used + hf.num_bytes > max_file_bytes:
            groups.append([])
            used = 0
        groups[-1].append(hf)
        used += hf.num_bytes
    if len(groups) == 1:
        return {SINGLE_FILE: groups[0]}
    return {
        f"model-{i:05d}-of-{len(groups):05d}.safetensors": group
        for i, group in enumerate(groups, start=1)
    }


def begin(directory: Path) -> None:
    """The folder without weights: what was there of them is gone, other files stay."""
    directory.mkdir(parents=True, exist_ok=True)
    (directory / CONFIG_FILE).unlink(missing_ok=True)
    for stale in directory.glob("model*.safetensors*"):
        stale.unlink()


def write_file(path: Path, tensors: dict[str, Tensor]) -> None:
    _publish(path, partial(save_file, tensors, metadata={"format": "pt"}))


def finish(directory: Path, files: dict[str, list[HfTensor]], config: dict[str, Any]) -> None:
    """Index and `config.json`, once every file is there."""
    if len(files) > 1:
        total = sum(hf.num_bytes for group in files.values() for hf in group)
        index = {
            "metadata": {"total_size": total},
            "weight_map": {hf.name: file for file, group in files.items() for hf in group},
        }
        _publish_json(directory / INDEX_FILE, index)
    _publish_json(directory / CONFIG_FILE, config)


def _publish(path: Path, write: Callable[[Path], object]) -> None:
    """Write under another name, flush to disk, rename."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(temporary)
        temporary.chmod(0o666 & ~_umask())  # safetensors leaves a file to its owner alone
        publish_file(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def _umask() -> int:
    now = os.umask(0o022)
    os.umask(now)
    return now


def _publish_json(path: Path, content: dict) -> None:
    write_atomic(path, (json.dumps(content, indent=2) + "\n").encode())
