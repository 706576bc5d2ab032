"""The base of adapters: the sha256 of the frozen weights that a stage begins with.

A checkpoint of adapters does not hold the base, so it is valid only with the same base. Each
checkpoint names its base, and a checkpoint of another base is refused.
"""

import hashlib
import json
from pathlib import Path

from orrery.manifest.digest import sha256
from orrery.manifest.run_folder import inputs_path
from orrery.models.hf_folder import weight_files


def base_sha256(run_dir: Path, stage: str, start: Path) -> str:
    """Return the digest of the weights in the folder `start`.

    It is the sha256 of the lines "digest  name", sorted by name. The launcher has just hashed the
    files (`inputs.json`). In a stage that is started by hand they are hashed here.
    """
    file = inputs_path(run_dir, stage)
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    digest = hashlib.sha256()
    for path in sorted(weight_files(start)):
        name = path.relative_to(run_dir).as_posix() if path.is_relative_to(run_dir) else path.name
        digest.update(f"{known.get(name) or sha256(path)}  {path.name}\n".encode())
    return digest.hexdigest()
