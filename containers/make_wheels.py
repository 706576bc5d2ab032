"""Makes a wheel of every source archive in a folder, beside it; runs in an image that has a compiler: `make_wheels.py FOLDER`.

- The packages' own `setup.py` says what is in a wheel; the setuptools that builds it is the one of the lock, on PYTHONPATH.
- Archives are unpacked under fixed paths, so that no name of a folder of the host is in what is compiled.
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
            file.extractall(source.parent)  # its sha256 is that of the lock
        os.chdir(source)
        sys.argv = ["setup.py"]
        print(archive.name, "→", build_meta.build_wheel(str(folder)))
