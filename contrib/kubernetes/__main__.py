"""Write, but do not apply, Kubernetes manifests of a run's engines, for Dynamo or llm-d.

    python contrib/kubernetes dynamo RUN --image IMAGE --claim CLAIM
    python contrib/kubernetes llm_d RUN --image IMAGE --claim CLAIM --proxy-image PROXY

The engines run without Orrery's patches of vLLM's API server.
"""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import yaml

import dynamo
import llm_d
from orrery.manifest.cli import RUN, manifest_of
from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import write_atomic
from orrery.manifest.schema import Manifest
from pods import Place

Documents = dict[str, list[dict[str, object]]]  # YAML documents by file name
KINDS: dict[str, Callable[[Manifest, Place], Documents]] = {
    "dynamo": dynamo.render,
    "llm_d": llm_d.render,
}


class _Spelled(yaml.SafeDumper):
    """A dumper without YAML anchors and aliases."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python contrib/kubernetes",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("run", metavar="RUN", help=RUN)
    parser.add_argument(
        "--image",
        required=True,
        help="the engines' image: vLLM and this project (for Dynamo, Dynamo too)",
    )
    parser.add_argument(
        "--claim", required=True, help="the volume claim whose root is the folder of the weights"
    )
    parser.add_argument(
        "--proxy-image", default="", help="llm-d's routing proxy, if prefill is apart"
    )
    parser.add_argument(
        "--to", type=Path, help="the folder to write; RUN-KIND here if it is not given"
    )
    try:
        write(parser.parse_args())
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def write(given: argparse.Namespace) -> None:
    for option, value in (("--image", given.image), ("--claim", given.claim)):
        if not value.strip():
            raise OrreryError(f"{option} is empty. Name what the cluster calls it")
    manifest = manifest_of(given.run)
    documents = KINDS[given.kind](manifest, Place(given.image, given.claim, given.proxy_image))
    folder = given.to or Path(f"{manifest.name}-{given.kind}")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, parts in documents.items():
            text = yaml.dump_all(parts, Dumper=_Spelled, sort_keys=False, width=140)
            write_atomic(folder / name, text.encode())
            print(folder / name)
    except OSError as error:
        raise OrreryError(
            f"--to {folder}: {error.strerror}. Name a folder that can be written"
        ) from None


if __name__ == "__main__":
    sys.exit(main())
