"""Fetch a model or a dataset by name: `orrery fetch`.

- A model becomes `weights/<Name>` and the axis `jsonnet/models/<name>_pretrained.libsonnet`.
- Only weights in safetensors, configs, the tokenizer and its chat template are fetched. Code in a
  repository is neither fetched nor run.
- A model is examined before its weights are downloaded, and again with them.
"""

import json
import os
import re
import subprocess
import sys
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from orrery.launcher import hub
from orrery.launcher.hub import Source
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.publish import write_atomic

WEIGHTS = "model*.safetensors"
SETTINGS = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "model.safetensors.index.json",
)
NEEDED = ("config.json", "tokenizer.json", "tokenizer_config.json")
LOST = (
    "family 'hugging_face' runs transformers' network: without torch.compile, adapters (LoRA), "
    "context and expert parallelism, and replay of routed experts"
)


def fetch_model(word: str, workspace: Workspace) -> list[str]:
    """Fetch OWNER/NAME[@REVISION], write its axis, and return what to print."""
    source = hub.find("model", word, (*SETTINGS, WEIGHTS))
    path = f"weights/{source.name}"
    target = workspace.root / path
    name = re.sub(r"\W+", "_", source.name.lower())
    axis = workspace.root / "jsonnet" / "models" / f"{name}_pretrained.libsonnet"
    _check_axis(axis, source)
    settings, weights = _model_files(source)
    if not hub.is_finished(source, target):
        with hub.finished_folder(source, target) as folder:
            hub.download(source, settings, folder)
            tokenizer = _ask("orrery.tasks.fetched", "tokenizer", str(folder))
            _examine(folder, path, source, tokenizer)  # before the weights, which take long
            hub.download(source, weights, folder)
            found = _examine(folder, path, source, tokenizer)
    else:
        tokenizer = _ask("orrery.tasks.fetched", "tokenizer", str(target))
        found = _examine(target, path, source, tokenizer)
    write_atomic(axis, found["axis"].encode())
    total = sum(source.files[name].num_bytes for name in (*settings, *weights))
    return [
        f"{path}: {source.title}, {hub.size_text(total)}",
        f"{workspace.shown(axis)}: family {found['family']}, {found['num_parameters']:,} "
        "parameters",
        *found["notes"],
        f"write (import 'models/{axis.name}') as the model of a run",
    ]


def _model_files(source: Source) -> tuple[list[str], list[str]]:
    settings = [name for name in SETTINGS if name in source.files]
    weights = [name for name in source.files if fnmatchcase(name, WEIGHTS) and "/" not in name]
    if not weights:
        pickles = any(name.endswith((".bin", ".pt", ".pth")) for name in source.files)
        why = "its weights are pickles, which can run code" if pickles else "it has no weights"
        raise OrreryError(f"{source.repository}: {why}; choose a repository with {WEIGHTS}")
    for name in NEEDED:
        if name not in settings:
            raise OrreryError(
                f"{source.repository}: has no {name}; choose a repository with {', '.join(NEEDED)}"
            )
    return settings, weights


def _check_axis(axis: Path, source: Source) -> None:
    """Raise OrreryError if the axis's file is not one of this repository."""
    if not axis.exists():
        return
    first = axis.read_text(errors="replace").partition("\n")[0]
    if not first.startswith(f"// model {source.repository} at "):
        raise OrreryError(
            f"{axis}: exists and is not the axis of {source.repository}; rename that file"
        )


def _examine(folder: Path, path: str, source: Source, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """Return the axis and the notes of a folder, with or without weights."""
    words = ["--path", path, "--title", source.title]
    words += ["--revision", f"{source.repository}@{source.revision.resolved}"]
    found = _ask("orrery.models.axis", str(folder), *words, "--tokenizer", tokenizer["sha256"])
    rows, notes = found["vocab_size"], []
    if tokenizer["num_words"] > rows:
        raise OrreryError(
            f"{source.repository}: its tokenizer has {tokenizer['num_words']} tokens, and the "
            f"embedding has {rows} rows (vocab_size in config.json); choose a repository whose "
            "tokenizer fits its model"
        )
    if beyond := [word for word, number in tokenizer["added"].items() if number >= rows]:
        notes.append(
            f"note: texts with {', '.join(beyond[:3])} are refused, because the model has no row "
            "for them"
        )
    if found["reason"] is not None:
        notes.append(f"note: {LOST} ({found['reason']})")
    return {**found, "notes": notes}


def _ask(module: str, *words: str) -> dict[str, Any]:
    """Return the JSON that a module of another room prints. Raise its OrreryError."""
    environment = {**os.environ, "TRANSFORMERS_VERBOSITY": "error", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-m", module, *words], capture_output=True, text=True, env=environment
    )
    last = done.stderr.strip().rpartition("\n")[2]
    if done.returncode == 0:
        return json.loads(done.stdout.strip().rpartition("\n")[2])
    if last.startswith("error: "):
        raise OrreryError(last.removeprefix("error: "))
    raise OrreryError(
        f"python -m {module} ended with code {done.returncode} ({last}); if a package is missing, "
        "type `make setup`"
    )
