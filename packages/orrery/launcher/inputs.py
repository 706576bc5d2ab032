"""Compare the files of earlier stages with the receipt before a stage starts.

- This detects accidents (a power cut, a bad disk, an edit), not attacks by the owner.
- Weights above `receipt.WHOLE_BYTES` are compared by file sizes and index only.
"""

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from orrery.launcher.receipt import recorded
from orrery.manifest.diff import RECEIPT
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.runtime.run_directory import STAGES, WEIGHTS, inputs_path

CHUNK_BYTES = 8 << 20


def stages_read(stage: str, stages: Sequence[str]) -> list[str]:
    start = "sft" if "sft" in stages else "init"
    read = {"sft": ["init"], "rl": [start], "evaluate": [start, "rl"], "report": ["evaluate"]}
    return read.get(stage, [])


def verify(
    run_dir: Path,
    stage: str,
    stages: Sequence[str],
    remedy: Callable[[str], str],
    stop: Callable[[], bool],
) -> list[str]:
    """Verify the files that `stage` reads, and write their digests to `inputs.json`.

    Return the earlier stages without a receipt. Raise OrreryError for the first file that differs,
    with `remedy(stage that wrote it)`. End early once `stop()` is true.
    """
    expected: dict[str, tuple[str, str]] = {}  # path → (stage that wrote it, digest)
    told, unknown = recorded(run_dir), []
    for maker in stages_read(stage, stages):
        files = told.get(maker, {}).get("outputs")
        outputs = {
            path: (maker, digest)
            for path, digest in (files.items() if isinstance(files, dict) else ())
            if path.startswith((f"{WEIGHTS}/", f"{STAGES}/"))
        }
        if not outputs:
            unknown.append(maker)
        expected |= outputs

    def hashed(path: str) -> str | None:
        return _found(run_dir / path, expected[path][1], stop)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = dict(zip(expected, pool.map(hashed, expected), strict=True))
    if stop():
        return unknown
    for path, (maker, digest) in expected.items():
        if found[path] != digest:
            raise OrreryError(
                f"{stage}: {run_dir / path} {_how(run_dir / path, digest)}, "
                f"so it is not what {maker} made; {remedy(maker)}"
            )
    file = inputs_path(run_dir, stage)
    if unknown:
        file.unlink(missing_ok=True)
    else:
        write_atomic(file, (json.dumps(found, indent=1) + "\n").encode())
    return unknown


def command(run_dir: Path, stage: str, maker: str, resume: str) -> str:
    alone = f"orrery run {run_dir.name}"
    return f"{alone} {maker} && {resume}" if resume == f"{alone} {stage}" else resume


def _found(path: Path, expected: str, stop: Callable[[], bool]) -> str | None:
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
    if _is_sha256(expected):
        return f"has another sha256 than {RECEIPT} says"
    return f"has {size} bytes, but {RECEIPT} says: {expected}"


def _is_sha256(text: str) -> bool:
    return len(text) == 64
