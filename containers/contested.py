"""Says which packages write a file that another writes otherwise, a name a line in the order of names: `contested.py FOLDER`.

uv lays packages out side by side, and the one that comes last has its way, another at every installation. Installed once more, one after
the other, they leave the same files everywhere.
"""

import csv
import re
import sys
from collections import defaultdict
from pathlib import Path


def contested(folder: Path) -> list[str]:
    """Normalised names of distributions, by the hashes in their RECORD files."""
    writers: dict[str, dict[str, str]] = defaultdict(dict)  # path → name → hash
    for record in folder.glob("*.dist-info/RECORD"):
        name = re.sub(r"[-_.]+", "-", record.parent.name.partition("-")[0]).lower()
        with record.open(newline="") as file:
            for path, digest, _ in csv.reader(file):
                writers[path][name] = digest
    return sorted({name for each in writers.values() if len({*each.values()}) > 1 for name in each})


if __name__ == "__main__":
    print(*contested(Path(sys.argv[1])), sep="\n")
