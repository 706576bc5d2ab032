"""`python -m orrery.tasks check MANIFEST…`: print one line per task that fits, or one error."""

import argparse
import sys

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.tasks.check import check


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orrery.tasks", description=__doc__)
    parser.add_argument("command", choices=["check"])
    parser.add_argument("manifests", nargs="+", metavar="MANIFEST")
    args = parser.parse_args()
    try:
        for manifest in args.manifests:
            print(*check(load(manifest)), sep="\n")
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
