"""Exports of checkpoints: the bytes of the live policy, and an error for every mistake."""

import shutil

import pytest
import torch
from replaced import replaced
from safetensors.torch import load_file, save_file
from test_trainer_memory import MOE
from trainer_cases import make_learner, manifest, save_checkpoint, write_start_weights
from trainer_rank import train

from orrery.manifest.identity import canonical_json
from orrery.models import weights
from orrery.trainer import export
from orrery.trainer.checkpoint import CheckpointReader
from orrery.wire import checkpoints

LORA = {"rank": 4, "alpha": 8.0, "targets": ["attention", "experts"], "seed": 11}
GLM = {"family": "glm4_moe", "rotary_fraction": 0.5, "attention_bias": True}
GLM |= {"moe": {**MOE, "num_dense_layers": 1, "num_shared_experts": 1, "score": "sigmoid"}}
# No process group.
WHOLE = {"reshard_after_forward": False, "reduce_gradients": "micro_batch", "cpu_offload": False}
PRETRAINED = {"kind": "pretrained", "path": "not read", "revision": "main", "sha256": "0" * 64}
CASES = {
    "dense": {},
    "bfloat16": {
        "trainer": {
            "lora": {**LORA, "targets": ["attention"]},
            "compute_dtype": "bfloat16",
            "fsdp": WHOLE,
        }
    },
    "moe": {"model": {"family": "qwen3_moe", "moe": MOE}},
    "buffers": {"model": GLM},
    "router biases": {"model": GLM, "trainer": {"expert_bias_rate": 0.125}},
    "mtp layer": {"model": {**GLM, "num_mtp_layers": 1, "init": PRETRAINED}},
    "adapters": {"model": {"family": "qwen3_moe", "moe": MOE}, "trainer": {"lora": LORA}},
}


def run_with_checkpoints(run_dir, steps, **fields):
    """(manifest, learner after the last of `steps`, run directory with a checkpoint of each)."""
    spec = manifest(**{"stages": {"sft": None}, **fields})
    drawn = {"num_mtp_layers": 0, "init": manifest().model.init}
    plain = replaced(spec, "model", **drawn)
    start = write_start_weights(plain, run_dir / "weights" / "init")
    if spec.model.num_mtp_layers:
        file = start / "model.safetensors"
        layer = {f"model.layers.{spec.model.num_layers}.eh_proj.weight": torch.ones(8, 4)}
        save_file(load_file(file) | layer, file)
    learner = make_learner(spec, start)
    (run_dir / "weights" / "init" / "tokenizer.json").write_text("{}")
    (run_dir / "manifest.json").write_bytes(canonical_json(spec))
    for step in steps:
        train(learner, [step])
        folder = checkpoints.checkpoint_dir(run_dir, step, 1)
        save_checkpoint(learner, folder / "trainer")
        checkpoints.complete(folder)
    return spec, learner, run_dir


@pytest.mark.parametrize("case", CASES)
def test_an_export_has_the_bytes_of_the_policy_that_was_saved(tmp_path, case):
    spec, learner, run_dir = run_with_checkpoints(tmp_path / "run", [1], **CASES[case])
    start, most = run_dir / "weights" / "init", weights.MAX_FILE_BYTES
    weights.save(learner.policy.network, spec.model, tmp_path / "saved", most, start)
    found = export.export_checkpoint(run_dir)
    assert found == run_dir / "weights" / "step_1"
    for file in (tmp_path / "saved").iterdir():
        assert (found / file.name).read_bytes() == file.read_bytes(), file.name
    assert (found / "tokenizer.json").read_text() == "{}"
    assert (found / "model.safetensors").read_bytes() != (
        run_dir / "weights" / "init" / "model.safetensors"
    ).read_bytes()
    weights.save(learner.policy.network, spec.model, tmp_path / "in_parts", 20_000, start)
    (tmp_path / "parts").mkdir()
    export.write(
        CheckpointReader(run_dir / "checkpoints" / "step_1.attempt_1" / "trainer"),
        spec,
        start,
        tmp_path / "parts",
        20_000,
    )
    files = {file.name: file.read_bytes() for file in (tmp_path / "parts").iterdir()}
    assert len(files) > 3
    assert files == {file.name: file.read_bytes() for file in (tmp_path / "in_parts").iterdir()}


def test_steps_are_chosen_and_mistakes_are_sentences(tmp_path, capsys):
    _, learner, run_dir = run_with_checkpoints(tmp_path / "run", [1, 2])

    def exported(*words: str) -> tuple[int, str]:
        try:
            export.main(list(map(str, words)))
        except SystemExit as end:
            return end.code, capsys.readouterr().err.strip()
        return 0, capsys.readouterr().out.strip()

    assert exported(run_dir, "--step", 1) == (0, str(run_dir / "weights" / "step_1"))
    assert exported(run_dir, "--to", tmp_path / "newest") == (0, str(tmp_path / "newest"))
    newest = dict(weights.named_hf_tensors(learner.policy.network))["model.norm.weight"]
    assert torch.equal(checkpoint_tensor(tmp_path / "newest", "model.norm.weight"), newest)
    assert not torch.equal(
        checkpoint_tensor(run_dir / "weights" / "step_1", "model.norm.weight"), newest
    )
    (
        damaged := checkpoints.checkpoint_dir(run_dir, 2, 1) / "trainer" / "rank_0.safetensors"
    ).write_bytes(b"torn")
    shutil.copytree(run_dir, tmp_path / "young", ignore=shutil.ignore_patterns("checkpoints"))
    shutil.copytree(tmp_path / "young", tmp_path / "tuned")
    (tmp_path / "tuned" / "weights" / "sft").mkdir()
    for words, code, sentence in [
        ((tmp_path / "none",), 2, "has no manifest.json, so it is no run"),
        ((tmp_path / "young",), 2, "its rl stage has no complete checkpoint yet"),
        ((run_dir, "--stage", "sft"), 2, "its sft stage has no complete checkpoint yet"),
        (
            (tmp_path / "tuned", "--stage", "sft"),
            2,
            f"use its result {tmp_path / 'tuned' / 'weights' / 'sft'}",
        ),
        (
            (run_dir, "--step", 3),
            2,
            "--step: there is no complete checkpoint of step 3; there are 1, 2",
        ),
        (
            (run_dir, "--step", 1),
            2,
            f"{run_dir / 'weights' / 'step_1'}: holds this export already. Use it as it is. "
            "To export anew, remove it or name another with --to",
        ),
        ((run_dir, "--to", tmp_path / "newest"), 2, f"{tmp_path / 'newest'}: exists already. To"),
        (
            (run_dir,),
            2,
            f"{damaged}: its sha256 differs from files.json, so it is damaged; export "
            f"another step with --step",
        ),
    ]:
        found, said = exported(*words)
        assert (found, said.count("\n"), sentence in said) == (code, 0, True), said
    assert not list(run_dir.glob("weights/*.partial"))


def checkpoint_tensor(folder, name):
    from safetensors import safe_open

    with safe_open(folder / "model.safetensors", framework="pt") as file:
        return file.get_tensor(name)
