"""The base of adapters: the sha256 of the frozen weights that a stage begins with.

A checkpoint under adapters holds the adapters alone, so it is of use with the same base only. Each checkpoint names the base that its
adapters were trained on, and one of another base is refused.
"""

import hashlib
import json
from pathlib import Path

from orrery.manifest.digest import sha256
from orrery.manifest.run_folder import inputs_path
from orrery.models.hf_folder import weight_files


def base_sha256(run_dir: Path, stage: str, start: Path) -> str:
    """Return the digest of the weights in the folder `start`: of the lines "digest  name", in the order of the names.

    The launcher has just hashed them (`inputs.json`). Where it has not, as in a stage that is started by hand, they are hashed here.
    """
    file = inputs_path(run_dir, stage)
    known: dict[str, str] = json.loads(file.read_text()) if file.exists() else {}
    digest = hashlib.sha256()
    for path in sorted(weight_files(start)):
        name = path.relative_to(run_dir).as_posix() if path.is_relative_to(run_dir) else path.name
        digest.update(f"{known.get(name) or sha256(path)}  {path.name}\n".encode())
    return digest.hexdigest()
