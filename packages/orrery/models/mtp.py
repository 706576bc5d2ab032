"""Copy layers for multi-token prediction (MTP) from checkpoint to checkpoint.

GLM and DeepSeek store `model.num_mtp_layers` MTP layers after the last decoder layer, with names
like `model.layers.<num_layers>.eh_proj.weight`. Engines draft tokens with them (DeepSeek-V3,
https://arxiv.org/abs/2412.19437, section 2.2). The trainer neither computes nor trains them.

- Copied tensors keep their dtype and bytes. Only FP8 blocks change: they are dequantized to the
  network's dtype.
- Engines read MTP layers from the stage's start weights. Weight updates do not contain them.
"""

import re
from pathlib import Path
from typing import Any

import torch

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.manifest.schema.constraints import MTP_FAMILIES
from orrery.models.hf_folder import FP8, HfTensor
from orrery.wire.weight_wire.fp8_blocks import SCALE

JOIN = "eh_proj.weight"  # joins embedding and hidden state, so each MTP layer has it
LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")
DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def is_mtp_name(model: Model, name: str) -> bool:
    found = LAYER.fullmatch(name)
    return model.family in MTP_FAMILIES and found is not None and int(found[1]) >= model.num_layers


def num_mtp_layers(names: Any, num_layers: int) -> int:
    """Return the number of MTP layers in a checkpoint whose tensors are `names`."""
    found = [LAYER.fullmatch(name) for name in names]
    indices = [int(one[1]) for one in found if one is not None and one[2] == JOIN]
    return max([index + 1 - num_layers for index in indices if index >= num_layers], default=0)


def check_layers(model: Model, directory: Path, names: Any) -> None:
    """Raise OrreryError unless a folder has as many MTP layers as `model.num_mtp_layers`.

    `names` are the folder's tensors. Families without MTP support are not checked.
    """
    if model.family not in MTP_FAMILIES:
        return
    if (found := num_mtp_layers(names, model.num_layers)) != model.num_mtp_layers:
        raise OrreryError(
            f"model.num_mtp_layers {model.num_mtp_layers}: {directory} has {found} layers for "
            f"multi-token prediction. Write model.num_mtp_layers: {found}"
        )


def mtp_tensors(model: Model, files: dict[str, Any], dtype: torch.dtype) -> list[HfTensor]:
    """Return descriptions of the MTP tensors in `files`, which are from `hf_folder.open_tensors`.

    FP8 tensors get `dtype`, other tensors their own. Scales of FP8 tensors are left out. Raise
    OrreryError for dtypes that `DTYPES` lacks.
    """
    tensors = []
    for name in sorted(name for name in files if is_mtp_name(model, name)):
        if name.endswith(SCALE) and name.removesuffix(SCALE) in files:
            continue
        part = files[name].get_slice(name)
        kept = dtype if (kind := part.get_dtype()) == FP8 else DTYPES.get(kind)
        if kept is None:
            raise OrreryError(
                f"model.num_mtp_layers {model.num_mtp_layers}: tensor {name} is in {kind}; convert "
                f"it to one of {', '.join(DTYPES)}, or take its layer out of the checkpoint"
            )
        shape = tuple(part.get_shape())
        tensors.append(HfTensor(name, "", tuple((0, size) for size in shape), shape, kept))
    return tensors
