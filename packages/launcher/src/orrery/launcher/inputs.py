"""Inputs: before a stage starts, hash the files of earlier stages and compare them with the
receipt.

- In: the `outputs` of those stages in `receipt.json`, sha256 by path. Out: the verified digests in
  `stages/<stage>/inputs.json`. With adapters, every checkpoint holds the digest of the frozen
  weights (`orrery.trainer.checkpoint.base_sha256`).
- This finds accidents: a power cut, a full or failing disk, edited or copied files, a repeated
  stage. It does not stop the folder's owner, who can also change the receipt.
- Every start hashes every file once. Sizes and times cannot show that a disk has lost a block.
- Weights above `receipt.WHOLE_BYTES` have no sha256 in the receipt. Their sizes and index are
  compared.
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
from orrery.runtime.run_directory import inputs_path

CHUNK_BYTES = 8 << 20


def stages_read(stage: str, stages: Sequence[str]) -> list[str]:
    """Return the earlier stages whose files `stage` reads in a run with `stages`."""
    start = "sft" if "sft" in stages else "init"
    return {"sft": ["init"], "rl": [start], "evaluate": [start, "rl"], "report": ["evaluate"]}.get(
        stage, []
    )


def verify(
    run_dir: Path,
    stage: str,
    stages: Sequence[str],
    remedy: Callable[[str], str],
    stop: Callable[[], bool],
) -> list[str]:
    """Verify the files that `stage` reads and record their digests.

    Return the stages without a receipt, whose files are not verified. Raises OrreryError with the
    first file that differs from the receipt, and `remedy(stage that made it)`. `stop` ends the
    check early.
    """
    expected: dict[str, tuple[str, str]] = {}  # path → (stage that made it, digest)
    told, unknown = _outputs(run_dir), []
    for maker in stages_read(stage, stages):
        outputs = {
            path: digest
            for path, digest in told.get(maker, {}).items()
            if path.startswith(("weights/", "stages/"))
        }
        if not outputs:
            unknown.append(maker)
        expected |= {path: (maker, digest) for path, digest in outputs.items()}
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # hashing releases the GIL
        found = dict(
            zip(
                expected,
                pool.map(lambda path: _found(run_dir / path, expected[path][1], stop), expected),
                strict=True,
            )
        )
    if stop():
        return unknown
    for path, (maker, digest) in expected.items():
        if found[path] != digest:
            raise OrreryError(
                f"{stage}: {run_dir / path} {_how(run_dir / path, digest)}, so it is not what {maker} made; {remedy(maker)}"
            )
    file = inputs_path(run_dir, stage)
    if unknown:
        file.unlink(missing_ok=True)
    else:
        write_atomic(file, (json.dumps(found, indent=1) + "\n").encode())
    return unknown


def command(run_dir: Path, stage: str, maker: str, resume: str) -> str:
    """Return the command that runs `maker` and then `stage`.

    `resume` is the command that resumes the stage or the whole pipeline.
    """
    alone = f"orrery run {run_dir.name}"
    return f"{alone} {maker} && {resume}" if resume == f"{alone} {stage}" else resume


def _outputs(run_dir: Path) -> dict[str, Mapping[str, str]]:
    """Return the receipt's outputs of every done stage, or {} without a readable receipt."""
    try:
        stages: dict[str, Any] = (
            read_receipt(run_dir / RECEIPT)["stages"] if (run_dir / RECEIPT).exists() else {}
        )
    except OrreryError:
        return {}
    return {
        name: entry["outputs"]
        for name, entry in stages.items()
        if isinstance(entry.get("outputs"), dict)
    }


def _found(path: Path, expected: str, stop: Callable[[], bool]) -> str | None:
    """Return the file's present digest as in the receipt; None if unreadable or on `stop`."""
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
    return (
        f"is not the file whose sha256 {RECEIPT} tells"
        if _is_sha256(expected)
        else f"has {size} bytes, but {RECEIPT} says: {expected}"
    )


def _is_sha256(text: str) -> bool:
    return len(text) == 64
