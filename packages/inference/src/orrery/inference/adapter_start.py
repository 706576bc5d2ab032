"""How an engine starts that takes adapters alone: with one that changes nothing, under the name that every request brings. Imports no vLLM.

Only projections that `trainer.lora.targets` names are prepared for adapters. Those of experts never are: vLLM computes their adapters with
kernels that it has on GPUs alone.
"""

import json
import shutil
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from orrery.manifest.publish import sync_tree
from orrery.manifest.schema import Manifest
from orrery.transport.weight_wire import served_model

PROJECTIONS = {
    "attention": ("q_proj", "k_proj", "v_proj", "o_proj"),
    "feed_forward": ("gate_proj", "up_proj", "down_proj"),
}
RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM makes room for


def blank_adapter(run_dir: Path, manifest: Manifest, stage: str, index: int) -> Path | None:
    """A folder with an adapter of zeros, in PEFT's format, for the engines of `stage` to start with; None where they serve weights alone.

    One folder for all of them, whoever of `index` is first: its path is part of a cached block's key, and engines may share blocks.
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
    # The published factors have the scale in them, so alpha is the rank.
    config = {
        "peft_type": "LORA",
        "r": lora.rank,
        "lora_alpha": lora.rank,
        "target_modules": [],
        "bias": "none",
    }
    (aside / "adapter_config.json").write_text(json.dumps(config))
    # vLLM wants one projection at least, whether or not it is prepared for one, and has zeros for the others.
    name = "base_model.model.model.layers.0.self_attn.o_proj"
    factors = {
        f"{name}.lora_A.weight": np.zeros(
            (lora.rank, model.num_heads * model.head_dim), np.float32
        ),
        f"{name}.lora_B.weight": np.zeros((model.hidden_size, lora.rank), np.float32),
    }
    save_file(factors, aside / "adapter_model.safetensors")
    sync_tree(aside)  # a later start trusts an existing folder
    try:
        aside.rename(folder)
    except OSError:  # another engine's is there by now
        shutil.rmtree(aside)
    return folder


def adapter_arguments(manifest: Manifest, folder: Path) -> list[str]:
    """What `vllm serve` is told of the adapter in `folder`."""
    lora = manifest.trainer.lora
    assert lora is not None, "manifest.support"
    room = next(rank for rank in RANKS if rank >= lora.rank)
    targets = [name for target in lora.targets for name in PROJECTIONS[target]]
    return [
        *("--enable-lora", "--max-loras", "1", "--max-lora-rank", str(room)),
        *("--lora-target-modules", *targets),
        *("--lora-modules", f"{served_model(manifest, 'rl')}={folder}"),
    ]
