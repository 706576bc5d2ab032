"""A stage does not start if a file of an earlier stage differs from the receipt."""

import hashlib
import json
from pathlib import Path

import pytest
from launcher_stages import end, launch

from orrery.launcher import receipt
from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import inputs_path

STAGES = ("init", "rl", "evaluate", "report")


def made(
    run_dir: Path, stage: str, files: dict[str, bytes], outputs: dict[str, str] | None = None
) -> None:
    """Write the files of a stage and their receipt."""
    for name, content in files.items():
        (run_dir / name).parent.mkdir(parents=True, exist_ok=True)
        (run_dir / name).write_bytes(content)
    path = run_dir / "receipt.json"
    receipt = (
        json.loads(path.read_text())
        if path.exists()
        else {"schema": 1, "run": {"name": "x", "id": "x-0"}, "stages": {}}
    )
    outputs = outputs or {
        name: hashlib.sha256(content).hexdigest() for name, content in files.items()
    }
    receipt["stages"][stage] = {
        "attempts": [{"attempt": 1, "state": "unrecorded"}],
        "outputs": outputs,
    }
    path.write_text(json.dumps(receipt))
    (run_dir / "stages" / stage).mkdir(parents=True, exist_ok=True)
    (run_dir / "stages" / stage / "DONE").write_text("{}")


def verify(run_dir: Path, stage: str, stages=STAGES) -> list[str]:
    (run_dir / "stages" / stage).mkdir(parents=True, exist_ok=True)
    return receipt.verify(
        run_dir, stage, stages, lambda maker: f"make {maker} again", lambda: False
    )


@pytest.mark.parametrize(
    ("damage", "sentence"),
    [
        (
            lambda path: path.write_bytes(b""),
            "has 0 bytes, so it is not init's output; make init again",
        ),
        (
            lambda path: path.write_bytes(b"Weights"),
            "has another sha256 than receipt.json says, so it is not init's output",
        ),
        (
            lambda path: path.unlink(),
            "cannot be read (No such file or directory), so it is not init's output",
        ),
    ],
)
def test_a_file_that_is_not_what_its_stage_made_is_named(run_dir, damage, sentence):
    made(
        run_dir,
        "init",
        {"weights/init/model.safetensors": b"weights", "weights/init/tokenizer.json": b"{}"},
    )
    assert verify(run_dir, "rl") == []
    assert (
        json.loads(inputs_path(run_dir, "rl").read_text())
        == json.loads((run_dir / "receipt.json").read_text())["stages"]["init"]["outputs"]
    )
    damage(path := run_dir / "weights/init/model.safetensors")
    with pytest.raises(OrreryError) as refused:
        verify(run_dir, "rl")
    assert str(refused.value).startswith(f"rl: {path} {sentence}")


def test_a_stage_reads_what_comes_before_it_and_not_more(run_dir):
    made(run_dir, "init", {"weights/init/model.safetensors": b"init"})
    made(run_dir, "sft", {"weights/sft/model.safetensors": b"sft"})
    made(
        run_dir,
        "rl",
        {"weights/rl/model.safetensors": b"rl", "checkpoints/step_4.attempt_1/files.json": b"{}"},
    )
    stages = ("init", "sft", *STAGES[1:])
    (run_dir / "weights/init/model.safetensors").write_bytes(b"gone")
    (run_dir / "checkpoints/step_4.attempt_1/files.json").unlink()
    assert verify(run_dir, "rl", stages) == verify(run_dir, "evaluate", stages) == []
    with pytest.raises(OrreryError, match=r"sft: .*/weights/init/model"):
        verify(run_dir, "sft", stages)
    (run_dir / "weights/rl/model.safetensors").write_bytes(b"RL")
    with pytest.raises(OrreryError, match=r"evaluate: .*/weights/rl/model"):
        verify(run_dir, "evaluate", stages)


def test_weights_that_are_too_large_to_hash_are_told_by_their_sizes(run_dir):
    made(
        run_dir,
        "init",
        {"weights/init/1.safetensors": b"12345"},
        {"weights/init/1.safetensors": "not hashed, 5 bytes"},
    )
    assert verify(run_dir, "rl") == []
    (run_dir / "weights/init/1.safetensors").write_bytes(b"1234")
    with pytest.raises(
        OrreryError, match=r"has 4 bytes, but receipt\.json says: not hashed, 5 bytes"
    ):
        verify(run_dir, "rl")


def test_without_a_receipt_nothing_is_verified_and_the_stage_says_so(run_dir):
    inputs_path(run_dir, "rl").parent.mkdir(parents=True)
    inputs_path(run_dir, "rl").write_text('{"weights/init/model.safetensors": "stale"}')
    assert verify(run_dir, "rl") == ["init"] and not inputs_path(run_dir, "rl").exists()
    code, stderr = end(launch(run_dir, ("trainer", [])))
    assert code == 0, stderr
    assert "rl: the files of init are not verified: receipt.json does not list them" in stderr


def test_a_stage_whose_input_is_damaged_starts_no_process_and_says_what_to_type(run_dir):
    made(run_dir, "init", {"weights/init/tokenizer.json": b"{}"})
    (run_dir / "weights/init/tokenizer.json").write_bytes(b"")
    code, stderr = end(launch(run_dir, ("trainer", ["ready"])))
    assert code == 2 and not (run_dir / "ready.trainer.0").exists()
    assert (
        f"rl: {run_dir}/weights/init/tokenizer.json has 0 bytes, so it is not init's output"
        in stderr
    )
    assert (
        f"type `rm {run_dir}/stages/init/DONE && make demo` to run init again and go on" in stderr
    )
    assert json.loads((run_dir / "status.json").read_text())["state"] == "failed"


def test_the_command_that_makes_a_stage_again_runs_it_where_the_resume_alone_would_not(tmp_path):
    run = tmp_path / "words-0123456789ab"
    assert (
        receipt.command(run, "rl", "init", f"orrery run {run.name} rl")
        == f"orrery run {run.name} init && orrery run {run.name} rl"
    )
    assert (
        receipt.command(run, "rl", "init", "snakemake --profile local words")
        == "snakemake --profile local words"
    )
