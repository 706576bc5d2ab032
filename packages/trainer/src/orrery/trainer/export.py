"""Export: a complete checkpoint as a Hugging Face folder, made on one CPU, beside a run that goes on or after one that has ended.

    python -m orrery.trainer.export RUN_DIR [--stage rl] [--step N] [--to FOLDER]       (`orrery export RUN …` calls it)

- One file of tensors at a time is in memory, never the model; boxes are read out of the ranks' files, whatever mesh wrote them.
- What the checkpoint does not hold (weights under adapters, buffers) comes from the folder that the stage began with. Adapters are merged.
- The bytes are those that the stage itself would write as `weights/<stage>` after that step (merging on another device rounds otherwise).
  The folder appears whole.
"""

import argparse
import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import load
from orrery.manifest.publish import make_folder, publish_folder
from orrery.manifest.schema import Manifest
from orrery.models import hf_folder
from orrery.models.causal_lm import CausalLm
from orrery.models.families import hf_config, ignored_hf_names
from orrery.models.hf_tensors import HfTensor, hf_tensors
from orrery.models.lora import adapters, merged
from orrery.models.weights import MAX_FILE_BYTES
from orrery.observe.system_error import explain
from orrery.trainer.base import base_sha256
from orrery.trainer.parallel import build_network
from orrery.trainer.publish import copy_tokenizer
from orrery.trainer.stored import CheckpointReader
from orrery.transport import checkpoints

PREFIX = "weight/network."  # how a checkpoint names a parameter of the network


def export_checkpoint(
    run_dir: Path, stage: str = "rl", step: int | None = None, to: Path | None = None
) -> Path:
    """Write the policy after `step` of `stage` (the newest complete checkpoint's) as the folder `to`; returns it. Raises OrreryError."""
    if not (run_dir / "manifest.json").exists():
        raise OrreryError(
            f"{run_dir}: holds no manifest.json, so no run has begun there; `orrery status` says which have"
        )
    manifest = load(run_dir / "manifest.json")
    step = _choose(run_dir, stage, step)
    name = f"step_{step}" if stage == "rl" else f"{stage}_step_{step}"
    to = to or run_dir / "weights" / name
    if to.exists():
        raise OrreryError(f"{to}: is there already; remove it, or name another folder with --to")
    folder = checkpoints.whole_dir(run_dir, step, stage)
    checkpoints.verify(folder, remedy="export another step with --step")
    start = (
        run_dir / "weights" / ("init" if stage == "sft" or manifest.stages.sft is None else "sft")
    )
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        stored = CheckpointReader(folder / "trainer")
        if stored.base_sha256 is not None and stored.base_sha256 != (
            found := base_sha256(run_dir, stage, start)
        ):
            raise RunFailed(
                f"{start}: its weights have sha256 {found}, but the adapters of {folder} were trained on {stored.base_sha256}; "
                f"put those weights back"
            )
        write(stored, manifest, start, partial)
        copy_tokenizer(start, partial)
        publish_folder(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return to


def write(
    stored: CheckpointReader,
    manifest: Manifest,
    start: Path,
    folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """The weights of `stored`, over those of the folder `start`, and `config.json`."""
    network = build_network(manifest.model, manifest.trainer, "meta")
    tensors = hf_tensors(network)
    files = hf_folder.divide(tensors, max_file_bytes)
    hf_folder.begin(folder)
    with hf_folder.opened(
        start, tensors, ignored_hf_names(network.config), network.config.tie_embeddings
    ) as base:
        source = _Tensors(stored, network, base)
        for file, group in files.items():
            hf_folder.write_file(
                folder / file,
                {hf.name: source[hf].to(hf.dtype, copy=True).contiguous() for hf in group},
            )
    dtype = str(next(network.parameters()).dtype).removeprefix("torch.")
    hf_folder.finish(folder, files, {**hf_config(manifest.model), "dtype": dtype})


def _choose(run_dir: Path, stage: str, step: int | None) -> int:
    steps = checkpoints.steps(run_dir, stage)
    if not steps:
        others = {"rl": "sft", "sft": "rl"}
        hint = "trainer.checkpoint.interval_steps says when it has"
        if checkpoints.steps(run_dir, others[stage]):
            hint = f"its {others[stage]} stage has: add --stage {others[stage]}"
        if stage == "sft" and (run_dir / "weights" / "sft").exists():
            raise OrreryError(
                f"{run_dir}: its sft stage is done: {run_dir / 'weights' / 'sft'} is what it made, and it has no checkpoints"
            )
        raise OrreryError(f"{run_dir}: its {stage} stage has no complete checkpoint yet; {hint}")
    if step is not None and step not in steps:
        raise OrreryError(
            f"--step: there is no complete checkpoint of step {step}; there are {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


class _Tensors:
    """Any tensor of the policy. Asked for in the order of `hf_tensors`, it reads every byte once."""

    def __init__(self, stored: CheckpointReader, network: CausalLm, base: dict[str, Any]):
        self._stored, self._network, self._base = stored, network, base
        self._held = {
            name.removeprefix(PREFIX) for name in stored.shapes if name.startswith(PREFIX)
        }
        trained = {
            name for name, parameter in network.named_parameters() if parameter.requires_grad
        }
        if odd := sorted(trained ^ self._held):
            where = "model" if odd[0] in trained else "checkpoint"
            raise RunFailed(
                f"{odd[0]} is only in the {where}; the checkpoint is of another model than manifest.json"
            )
        self._names = {module: name for name, module in network.named_modules()}
        self._adapter_of = dict(adapters(network))
        self._parts: dict[str, list[HfTensor]] = {}
        for hf in hf_tensors(network):
            self._parts.setdefault(hf.parameter_name, []).append(hf)
        self._merged: tuple[str, Tensor] | None = (
            None  # the adapted parameter that was asked for last
        )

    def __getitem__(self, hf: HfTensor) -> Tensor:
        name = hf.parameter_name
        if name in self._adapter_of:
            if self._merged is None or self._merged[0] != name:
                self._merged = None  # never two at a time
                self._merged = (name, self._merge(name))
            return hf.of(self._merged[1])
        if name not in self._held:
            return hf_folder.read(self._base, hf)
        part = torch.empty([stop - start for start, stop in hf.box], dtype=hf.dtype)
        self._stored.read(PREFIX + name, hf.box, part)
        return part if hf.expert is None else part[0]

    def _merge(self, name: str) -> Tensor:
        """A whole frozen parameter with its adapter in it, by the same lines as in the trainer."""
        weight = torch.empty_like(
            self._network.get_parameter(name), device="cpu", requires_grad=False
        )
        for hf in self._parts[name]:
            hf.of(weight).copy_(hf_folder.read(self._base, hf))
        adapter = copy.deepcopy(self._adapter_of[name]).to_empty(device="cpu").requires_grad_(False)
        for key, parameter in adapter.named_parameters():
            box = tuple((0, size) for size in parameter.shape)
            self._stored.read(
                f"{PREFIX}{self._names[self._adapter_of[name]]}.{key}", box, parameter
            )
        return merged(weight, adapter)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m orrery.trainer.export", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", choices=("rl", "sft"), default="rl")
    parser.add_argument("--step", type=int, help="the newest without it")
    parser.add_argument(
        "--to", type=Path, help="the folder to write; without it weights/step_<n> of the run"
    )
    args = parser.parse_args(argv)
    try:
        print(export_checkpoint(args.run_dir, args.stage, args.step, args.to))
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"error: {explain(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
