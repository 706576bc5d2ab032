"""A damaged input of a stage ends in one sentence, and the command in it repairs the run."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

from orrery.manifest.identity import canonical_json, run_dir
from orrery.manifest.schema import Manifest
from orrery.runtime.run_directory import begin
from workspace import linked

ROOT = Path(__file__).resolve().parents[1]
BIN = Path(sys.executable).parent


def test_the_command_that_is_printed_for_an_empty_tokenizer_mends_the_run(tmp_path):
    """A power cut could leave this state if the weights beside `DONE` were not synced."""
    content = json.loads((ROOT / "manifests" / "reverse_text_smoke.json").read_text())
    content["stages"]["sft"]["num_steps"] = 2
    content["trainer"]["mesh"]["dp_shard"] = 1
    spec = Manifest.model_validate(content)
    folder = run_dir(linked(tmp_path) / "runs", spec)
    begin(folder)
    (folder / "manifest.json").write_bytes(canonical_json(spec))

    def typed(command: str) -> tuple[int, str]:
        env = {**os.environ, "PATH": f"{BIN}:{os.environ['PATH']}"}
        env.pop("ORRERY_RESUME", None)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            timeout=240,
        )
        return done.returncode, done.stderr

    code, said = typed(f"orrery run {folder.name} init")
    assert code == 0, said
    tokenizer = folder / "weights" / "init" / "tokenizer.json"
    whole = tokenizer.read_bytes()
    os.truncate(tokenizer, 0)
    for _ in range(2):
        code, said = typed(f"orrery run {folder.name} sft")
        assert code and "Traceback" not in said
        assert f"error: sft: {tokenizer} has 0 bytes, so it is not init's output; type `" in said
    assert not (folder / "logs" / "trainer.0.log").read_text().count("=== sft"), (
        "no process was started for it"
    )
    [command] = re.findall("type `(.+?)` to run init again and go on", said)
    code, said = typed(command)
    assert code == 0, said
    assert tokenizer.read_bytes() == whole and (folder / "stages" / "sft" / "DONE").exists()
