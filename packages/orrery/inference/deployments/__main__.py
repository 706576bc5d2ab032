"""Write a deployment's documents and print their paths.

`python -m orrery.inference.deployments KIND MANIFEST --image … --claim … --to FOLDER`
"""

import argparse
import sys
from pathlib import Path

import yaml

from orrery.inference.deployments import KINDS
from orrery.inference.deployments.engine import Place
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.publish import write_atomic


class _Spelled(yaml.SafeDumper):
    """A dumper without YAML references."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(prog="orrery deployment", description=__doc__)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("manifest", type=Path)
    parser.add_argument("--image", required=True)
    parser.add_argument("--claim", required=True)
    parser.add_argument("--proxy-image", default="")
    parser.add_argument("--to", type=Path, required=True)
    given = parser.parse_args()
    try:
        documents = KINDS[given.kind](
            load(given.manifest), Place(given.image, given.claim, given.proxy_image)
        )
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    try:
        given.to.mkdir(parents=True, exist_ok=True)
        for name, parts in documents.items():
            write_atomic(
                given.to / name,
                yaml.dump_all(parts, Dumper=_Spelled, sort_keys=False, width=140).encode(),
            )
            print(given.to / name)
    except OSError as error:
        print(
            f"error: --to {given.to}: {error.strerror}; name a folder that can be written",
            file=sys.stderr,
        )
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
