"""Start an engine with a blank adapter for the first weight update. Imports no vLLM.

Only `trainer.lora.targets` take adapters, never experts: vLLM's kernels for them need a GPU.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from orrery.manifest.publish import sync_tree
from orrery.manifest.schema import Manifest
from orrery.wire.weight_wire import served_model

PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("gate_proj", "up_proj", "down_proj"),
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # vLLM's values of --max-lora-rank


def blank_adapter(run_dir: Path, manifest: Manifest, stage: str, index: int) -> Path | None:
    """Return a folder with an adapter of zeros in PEFT's format, or None without adapters.

    All engines of a stage share its path, a part of a cached block's key.
    """
    model, lora = manifest.model, manifest.trainer.lora
    if served_model(manifest, stage) is None or lora is None:
        return None
    folder = run_dir / "stages" / stage / "blank_adapter"
    if folder.is_dir():
        return folder
    aside = folder.with_name(f".{folder.name}.{index}")
    shutil.rmtree(aside, ignore_errors=True)
    aside.mkdir(parents=True)
    # The published factors contain the scale, so alpha is the rank.
    config = {"peft_type": "LORA", "r": lora.rank, "lora_alpha": lora.rank}
    config |= {"target_modules": [], "bias": "none"}
    (aside / "adapter_config.json").write_text(json.dumps(config))
    # vLLM requires one projection, and fills the others with zeros.
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    shapes = {
        "A": (lora.rank, model.num_heads * model.head_dim),
        "B": (model.hidden_size, lora.rank),
    }
    factors = {
        f"{name}.lora_{factor}.weight": np.zeros(shape, np.float32)
        for factor, shape in shapes.items()
    }
    save_file(factors, aside / "adapter_model.safetensors")
    sync_tree(aside)  # a later start trusts an existing folder
    try:
        aside.rename(folder)
    except OSError:  # another engine made it
        shutil.rmtree(aside)
    return folder


def adapter_arguments(manifest: Manifest, folder: Path) -> list[str]:
    lora = manifest.trainer.lora
    assert lora is not None, "manifest.support"
    room = next(rank for rank in RANKS if rank >= lora.rank)
    targets = [name for target in lora.targets for name in PROJECTIONS[target]]
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)),
        *("--lora-target-modules", *targets),
        *("--lora-modules", f"{served_model(manifest, 'rl')}={folder}"),
    ]
