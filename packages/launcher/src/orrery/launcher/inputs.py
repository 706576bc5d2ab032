"""Inputs: what a stage reads of earlier ones is hashed before its first process starts, and must be what the receipt says.

- In: `outputs` of those stages in `receipt.json`: sha256 by path. Out: `stages/<stage>/inputs.json`, the digests that were found right.
  The trainer keeps the digest of frozen weights, which it adds adapters to, in every checkpoint (`orrery.trainer.base`).
- The threat is an accident: a power cut, a full or failing disk, files that were edited or copied from elsewhere, a stage that was made
  again. An owner of the folder can write the receipt as well, so against that nothing here helps.
- Every file is hashed once a start and no digest is remembered: size and times say nothing of a disk that has lost a block.
- Weights above `receipt.WHOLE_BYTES` have no sha256 there; their sizes and the index are compared.
"""

import hashlib
import json
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from orrery.manifest.diff import RECEIPT, read_receipt
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.manifest.run_folder import inputs_path

CHUNK_BYTES = 8 << 20


def stages_read(stage: str, stages: Sequence[str]) -> list[str]:
    """Return the earlier stages whose files `stage` reads, of a run with `stages`."""
    start = "sft" if "sft" in stages else "init"
    return {"sft": ["init"], "rl": [start], "evaluate": [start, "rl"], "report": ["evaluate"]}.get(stage, [])


def verify(run_dir: Path, stage: str, stages: Sequence[str], remedy: Callable[[str], str], stop: Callable[[], bool]) -> list[str]:
    """Hash what `stage` reads, and write down what was found right; returns the stages that no receipt tells of, which are not verified.

    Raises OrreryError that names a file which is not the receipt's, with `remedy(stage that made it)`. `stop` ends it early.
    """
    expected: dict[str, tuple[str, str]] = {}  # path: (stage that made it, digest)
    told, unknown = _outputs(run_dir), []
    for maker in stages_read(stage, stages):
        outputs = {path: digest for path, digest in told.get(maker, {}).items() if path.startswith(("weights/", "stages/"))}
        if not outputs:
            unknown.append(maker)
        expected |= {path: (maker, digest) for path, digest in outputs.items()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing lets go of the interpreter
        found = dict(zip(expected, pool.map(lambda path: _found(run_dir / path, expected[path][1], stop), expected), strict=True))
    if stop():
        return unknown
    for path, (maker, digest) in expected.items():
        if found[path] != digest:
            raise OrreryError(f"{stage}: {run_dir / path} {_how(run_dir / path, digest)}, so it is not what {maker} made; {remedy(maker)}")
    file = inputs_path(run_dir, stage)
    if unknown:
        file.unlink(missing_ok=True)
    else:
        write_atomic(file, (json.dumps(found, indent=1) + "\n").encode())
    return unknown


def command(run_dir: Path, stage: str, maker: str, resume: str) -> str:
    """Return the command that runs `maker` and goes on with `stage`; `resume` goes on with the stage alone, or with the whole pipeline."""
    alone = f"orrery run {run_dir.name}"
    return f"{alone} {maker} && {resume}" if resume == f"{alone} {stage}" else resume


def _outputs(run_dir: Path) -> dict[str, Mapping[str, str]]:
    """What the receipt says of every stage that is done, by stage; nothing where there is no receipt that can be read."""
    try:
        stages: dict[str, Any] = read_receipt(run_dir / RECEIPT)["stages"] if (run_dir / RECEIPT).exists() else {}
    except OrreryError:
        return {}
    return {name: entry["outputs"] for name, entry in stages.items() if isinstance(entry.get("outputs"), dict)}


def _found(path: Path, expected: str, stop: Callable[[], bool]) -> str | None:
    """What the receipt would say of the file now; None where it cannot be read, or where `stop` says so."""
    try:
        if not _is_sha256(expected):
            return f"not hashed, {path.stat().st_size} bytes"
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if stop():
                    return None
                digest.update(chunk)
        return digest.hexdigest()
    except OSError:
        return None


def _how(path: Path, expected: str) -> str:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if size == 0:
        return "has 0 bytes"
    return f"is not the file whose sha256 {RECEIPT} tells" if _is_sha256(expected) else f"has {size} bytes, but {RECEIPT} says: {expected}"


def _is_sha256(text: str) -> bool:
    return len(text) == 64
