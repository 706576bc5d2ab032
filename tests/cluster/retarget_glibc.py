"""Let ELF programs that need only the C23 `strtol` family of glibc 2.38 load on an older glibc.

- In: paths of 64-bit little-endian ELF files, changed in place. Their length and layout stay.
- The loader then looks up every symbol `__isoc23_NAME` as `NAME`, and version 2.38 as 2.2.5.
- Another symbol of 2.38 raises ValueError. (The functions differ only in reading "0b101".)
"""

import struct
import sys
from pathlib import Path
from typing import NamedTuple

# Section types: ELF gABI and Linux Standard Base, "Symbol Versioning".
DYNSYM, VERNEED, VERSYM = (
    11,
    0x6FFFFFFE,
    0x6FFFFFFF,
)
C23_PREFIX = "__isoc23_"
NEW, OLD = "GLIBC_2.38", "GLIBC_2.2.5"


class Section(NamedTuple):
    """One entry of the section header table, as it is laid out in the file."""

    name: int
    type: int
    flags: int
    address: int
    offset: int
    size: int
    link: int
    info: int
    alignment: int
    entry_size: int


def retarget(data: bytearray) -> list[str]:
    """Change one ELF image in place. Return the renamed symbols, [] if it needs no glibc 2.38."""
    if data[:6] != b"\x7fELF\x02\x01":
        raise ValueError("this is no 64-bit little-endian ELF file")
    sections = _sections(data)
    symbols = next(section for section in sections if section.type == DYNSYM)
    versions = next(section for section in sections if section.type == VERSYM)
    needs = next(section for section in sections if section.type == VERNEED)
    strings = sections[symbols.link]

    new_indices = _point_versions_at_old(data, needs, strings)
    changed = []
    for number in range(symbols.size // symbols.entry_size):
        (version,) = struct.unpack_from("<H", data, versions.offset + 2 * number)
        if version & 0x7FFF not in new_indices:
            continue
        at = symbols.offset + symbols.entry_size * number
        (name_offset,) = struct.unpack_from("<I", data, at)
        name = _string(data, strings, name_offset)
        if not name.startswith(C23_PREFIX):
            raise ValueError(f"{name} of {NEW} has no older twin")
        # The old name is the tail of the new one.
        struct.pack_into("<I", data, at, name_offset + len(C23_PREFIX))
        changed.append(name)
    return changed


def sysv_hash(name: str) -> int:
    """The hash of a version name that the loader compares (System V gABI, "Hash Table")."""
    value = 0
    for character in name.encode():
        value = (value << 4) + character
        high = value & 0xF0000000
        value = (value ^ (high >> 24)) & ~high & 0xFFFFFFFF
    return value


def _sections(data: bytearray) -> list[Section]:
    (table,) = struct.unpack_from("<Q", data, 0x28)
    entry_size, count = struct.unpack_from("<HH", data, 0x3A)
    return [
        Section(*struct.unpack_from("<IIQQQQIIQQ", data, table + entry_size * number))
        for number in range(count)
    ]


def _string(data: bytearray, strings: Section, offset: int) -> str:
    start = strings.offset + offset
    return data[start : data.index(0, start)].decode()


def _point_versions_at_old(data: bytearray, needs: Section, strings: Section) -> set[int]:
    """Rewrite the needed version 2.38 to 2.2.5. Return the indices that symbols use for it."""
    old = data.find(b"\0" + OLD.encode() + b"\0", strings.offset, strings.offset + strings.size)
    indices = set()
    library_at = needs.offset
    for _ in range(needs.info):
        _, count, _, first, step = struct.unpack_from("<HHIII", data, library_at)
        at = library_at + first
        for _ in range(count):
            _, flags, index, name_offset, following = struct.unpack_from("<IHHII", data, at)
            if _string(data, strings, name_offset) == NEW:
                if old < 0:
                    raise ValueError(
                        f"{OLD} is not among the strings, so there is nothing to point to"
                    )
                indices.add(index)
                struct.pack_into(
                    "<IHHI", data, at, sysv_hash(OLD), flags, index, old + 1 - strings.offset
                )
            at += following
        library_at += step
    return indices


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        image = bytearray(path.read_bytes())
        names = retarget(image)
        path.write_bytes(image)
        print(f"{path.name}: {', '.join(names) or 'nothing to do'}")
