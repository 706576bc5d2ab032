"""Remove times, the random id and the builder's user from the header of a SIF file.

    python containers/normalise.py IMAGE.sif

Offsets follow the Singularity Image Format 01 (github.com/apptainer/sif, pkg/sif/sif.go).
All fields are little-endian and packed.
- Global header, 128 bytes: magic 32:42, version 42:45, arch 45:48, id 48:64, created 64:72,
  modified 72:80, free descriptors 80:88, all descriptors 88:96, offset of descriptors 96:104.
- Descriptor, 585 bytes: type 0:4, used 4:5, id 5:9, group 9:13, link 13:17, offset 17:25,
  size 25:33, padded size 33:41, created 41:49, modified 49:57, user 57:65, group 65:73.
"""

import struct
import sys
from pathlib import Path

HEADER_BYTES, DESCRIPTOR_BYTES = 128, 585
ID_AND_TIMES = slice(48, 80)
TIMES_AND_OWNER = slice(41, 73)


def normalise(path: Path) -> None:
    """Rewrite `path` in place. Raise ValueError if it is not a SIF file of version 01."""
    with path.open("r+b") as file:
        header = bytearray(file.read(HEADER_BYTES))
        if header[32:45] != b"SIF_MAGIC\x0001\x00":
            raise ValueError(f"{path}: this is no SIF file of version 01")
        header[ID_AND_TIMES] = bytes(32)
        num_descriptors, at = struct.unpack_from("<qq", header, 88)
        file.seek(at)
        table = bytearray(file.read(num_descriptors * DESCRIPTOR_BYTES))
        for start in range(0, len(table), DESCRIPTOR_BYTES):
            table[start + TIMES_AND_OWNER.start : start + TIMES_AND_OWNER.stop] = bytes(32)
        file.seek(0)
        file.write(header)
        file.seek(at)
        file.write(table)


if __name__ == "__main__":
    normalise(Path(sys.argv[1]))
