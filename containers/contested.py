"""Print the packages that install a file with another content than another package does.

uv installs packages in parallel, so the last writer of such a file differs between installations.
python.sh installs the printed packages again, one after another, which fixes the order.

    python containers/contested.py FOLDER
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path


def contested(folder: Path) -> list[str]:
    """Return normalised names of distributions, by the hashes in their RECORD files."""
    writers: dict[str, dict[str, str]] = defaultdict(dict)  # path → name → hash
    for record in folder.glob("*.dist-info/RECORD"):
        name = re.sub(r"[-_.]+", "-", record.parent.name.partition("-")[0]).lower()
        with record.open(newline="") as file:
            for path, digest, _ in csv.reader(file):
                writers[path][name] = digest
    return sorted({name for each in writers.values() if len({*each.values()}) > 1 for name in each})


if __name__ == "__main__":
    print(*contested(Path(sys.argv[1])), sep="\n")
