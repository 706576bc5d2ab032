"""Write a stage's final policy, or a checkpoint, as a Hugging Face folder.

    python -m orrery.trainer.export RUN_DIR [--stage rl] [--step N] [--to FOLDER]

`orrery export` runs this command on one CPU, even while the stage runs.

- The folder appears only when complete.
- Memory holds at most one output file.
- Frozen weights come from the stage's initial weights, because checkpoints lack them.
"""

import argparse
import copy
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orrery.manifest.errors import OrreryError, RunFailed, explain_os_error
from orrery.manifest.identity import load
from orrery.manifest.publish import make_folder, publish_folder
from orrery.manifest.schema import Manifest, Model
from orrery.models import hf_folder
from orrery.models.causal_lm import CausalLm
from orrery.models.families import hf_config
from orrery.models.hf_folder import HfTensor, mtp_tensors
from orrery.models.lora import adapters, merged
from orrery.models.weights import MAX_FILE_BYTES, hf_tensors, open_checkpoint, save
from orrery.runtime.run_directory import MANIFEST, weights_path
from orrery.trainer.checkpoint import CheckpointReader, base_sha256
from orrery.trainer.parallel import build_network
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy
from orrery.wire import checkpoints

PREFIX = "weight/network."
BIAS_PREFIX = "bias/network."


def export_policy(policy: Policy, world: World, model: Model, start: Path, folder: Path) -> None:
    """Write the policy to the new `folder` in Hugging Face's format. A collective.

    Copy the tokenizer and multi-token-prediction layers from `start`.
    """
    partial = folder.with_name(f"{folder.name}.partial")
    if world.is_first:
        shutil.rmtree(partial, ignore_errors=True)
        make_folder(partial)
    world.barrier()
    save(policy.network, model, partial, start=start)
    if world.is_first:
        _copy_tokenizer(start, partial)
        publish_folder(partial, folder)
    world.barrier()


def _copy_tokenizer(start: Path, folder: Path) -> None:
    for file in start.iterdir():
        holds_weights = file.suffix == ".safetensors" or file.name == hf_folder.INDEX_FILE
        if file.is_file() and not holds_weights and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


def export_checkpoint(
    run_dir: Path, stage: str = "rl", step: int | None = None, to: Path | None = None
) -> Path:
    if not (run_dir / MANIFEST).exists():
        raise OrreryError(
            f"{run_dir}: has no manifest.json, so it is no run; "
            f"type `orrery status` to list the runs"
        )
    manifest = load(run_dir / MANIFEST)
    step = _choose_step(run_dir, stage, step)
    name = f"step_{step}" if stage == "rl" else f"{stage}_step_{step}"
    given, to = to, to or weights_path(run_dir, name)
    if to.exists():
        found = "exists already" if given else "holds this export already. Use it as it is"
        raise OrreryError(f"{to}: {found}. To export anew, remove it or name another with --to")
    folder = checkpoints.whole_dir(run_dir, step, stage)
    checkpoints.verify(folder, remedy="export another step with --step")
    is_first_stage = stage == "sft" or manifest.stage_before_rl == "init"
    start = weights_path(run_dir, "init" if is_first_stage else "sft")
    partial = to.with_name(f"{to.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    try:
        stored = CheckpointReader(folder / "trainer")
        _check_base(stored, run_dir, stage, start, folder)
        write(stored, manifest, start, partial)
        _copy_tokenizer(start, partial)
        publish_folder(partial, to)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return to


def _check_base(
    stored: CheckpointReader, run_dir: Path, stage: str, start: Path, folder: Path
) -> None:
    if stored.base_sha256 is None:
        return
    found = base_sha256(run_dir, stage, start)
    if stored.base_sha256 != found:
        raise RunFailed(
            f"{start}: its weights have sha256 {found}, but the adapters of {folder} were trained "
            f"on weights with sha256 {stored.base_sha256}; restore those weights"
        )


def write(
    stored: CheckpointReader,
    manifest: Manifest,
    start: Path,
    folder: Path,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    network = build_network(manifest.model, manifest.trainer, "meta")
    param_dtype = next(network.parameters()).dtype
    hf_folder.remove_weights(folder)
    with open_checkpoint(network, start) as base:
        tensors = hf_tensors(network) + mtp_tensors(network.config, base, param_dtype)
        files = hf_folder.assign_files(tensors, max_file_bytes)
        source = _Tensors(stored, network, base)
        for file, group in files.items():
            content = {hf.name: source[hf].to(hf.dtype, copy=True).contiguous() for hf in group}
            hf_folder.write_file(folder / file, content)
            del content
    dtype = str(param_dtype).removeprefix("torch.")
    hf_folder.finish(folder, files, {**hf_config(manifest.model), "dtype": dtype})


def _choose_step(run_dir: Path, stage: str, step: int | None) -> int:
    steps = checkpoints.steps(run_dir, stage)
    if not steps:
        other = {"rl": "sft", "sft": "rl"}[stage]
        hint = "it writes one every trainer.checkpoint.interval_steps steps"
        if checkpoints.steps(run_dir, other):
            hint = f"its {other} stage has one: add --stage {other}"
        result = weights_path(run_dir, "sft")
        if stage == "sft" and result.exists():
            raise OrreryError(
                f"{run_dir}: its sft stage is done, so its checkpoints are removed; "
                f"use its result {result}"
            )
        raise OrreryError(f"{run_dir}: its {stage} stage has no complete checkpoint yet; {hint}")
    if step is not None and step not in steps:
        raise OrreryError(
            f"--step: there is no complete checkpoint of step {step}; "
            f"there are {', '.join(map(str, steps))}"
        )
    return steps[-1] if step is None else step


class _Tensors:
    def __init__(self, stored: CheckpointReader, network: CausalLm, base: dict[str, Any]):
        self._stored, self._network, self._base = stored, network, base
        names = [name for name in stored.shapes if name.startswith(PREFIX)]
        held = {name.removeprefix(PREFIX) for name in names}
        parameters = network.named_parameters()
        trained = {name for name, parameter in parameters if parameter.requires_grad}
        if odd := sorted(trained ^ held):
            where = "model" if odd[0] in trained else "checkpoint"
            raise RunFailed(
                f"{odd[0]} is only in the {where}, "
                f"so the checkpoint is of another model than manifest.json"
            )
        self._names = {module: name for name, module in network.named_modules()}
        self._adapter_of = dict(adapters(network))
        self._parts: dict[str, list[HfTensor]] = {}
        for hf in hf_tensors(network):
            self._parts.setdefault(hf.parameter_name, []).append(hf)
        self._merged: tuple[str, Tensor] | None = None

    def __getitem__(self, hf: HfTensor) -> Tensor:
        name = hf.parameter_name
        if name in self._adapter_of:
            if self._merged is None or self._merged[0] != name:
                self._merged = None
                self._merged = (name, self._merge(name))
            return hf.view_of(self._merged[1])
        stored = BIAS_PREFIX + name if BIAS_PREFIX + name in self._stored.shapes else PREFIX + name
        if stored not in self._stored.shapes:
            return hf_folder.read(self._base, hf)
        part = torch.empty([stop - start for start, stop in hf.box], dtype=hf.dtype)
        self._stored.read(stored, hf.box, part)
        return part if hf.expert is None else part[0]

    def _merge(self, name: str) -> Tensor:
        like = self._network.get_parameter(name)
        weight = torch.empty_like(like, device="cpu", requires_grad=False)
        for hf in self._parts[name]:
            hf.view_of(weight).copy_(hf_folder.read(self._base, hf))
        adapter = copy.deepcopy(self._adapter_of[name]).to_empty(device="cpu").requires_grad_(False)
        prefix = f"{PREFIX}{self._names[self._adapter_of[name]]}"
        for key, parameter in adapter.named_parameters():
            box = tuple((0, size) for size in parameter.shape)
            self._stored.read(f"{prefix}.{key}", box, parameter)
        return merged(weight, adapter)


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m orrery.trainer.export", description=__doc__.splitlines()[0]
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--stage", choices=("rl", "sft"), default="rl")
    parser.add_argument("--step", type=int, help="default: the newest")
    parser.add_argument(
        "--to", type=Path, help="the folder to write; default: weights/step_<n> of the run"
    )
    args = parser.parse_args(argv)
    try:
        print(export_checkpoint(args.run_dir, args.stage, args.step, args.to))
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None
    except OSError as error:
        print(f"error: {explain_os_error(error)}", file=sys.stderr)
        raise SystemExit(1) from None


if __name__ == "__main__":
    main()
