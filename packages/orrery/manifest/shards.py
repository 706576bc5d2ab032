"""Divide the files of a fetched dataset into shards.

File i of a split, ordered by path, is in shard i mod num_shards.

A folder with only some shards has a file DATA_SUMS with the sha256 of all files of the dataset.
The manifest has the sha256 of DATA_SUMS, so sites with different shards share a manifest.
"""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path, PurePosixPath

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import data_files, sha256, sha256_of_data

SUMS = "SHA256SUMS"  # names a fetched folder's source, and its files' sha256
DATA_SUMS = "DATA_SHA256SUMS"
Shard = tuple[int, int]  # (K, N) of shard K/N


def parse_shard(word: str) -> Shard:
    found = re.fullmatch(r"([0-9]{1,6})/([1-9][0-9]{0,5})", word)
    if found is None:
        raise OrreryError(f"--shard {word}: is not K/N. Type 0/4 for the first of 4 shards")
    shard, num_shards = int(found[1]), int(found[2])
    if shard >= num_shards:
        raise OrreryError(
            f"--shard {word}: K must be below N, as it counts from 0. "
            f"Type a K from 0 to {num_shards - 1}"
        )
    return shard, num_shards


def split_of(name: str) -> str:
    return PurePosixPath(name).name.split("-")[0].split(".")[0]


def main_split(names: Iterable[str]) -> str:
    splits = [split_of(name) for name in sorted(names, key=PurePosixPath)]
    return "train" if "train" in splits else splits[0]


def files_of(names: Iterable[str], split: str, shard: Shard = (0, 1)) -> list[str]:
    ordered = sorted((name for name in names if split_of(name) == split), key=PurePosixPath)
    return ordered[shard[0] :: shard[1]]


def files_to_fetch(names: Iterable[str], shard: Shard) -> list[str]:
    names = list(names)
    split = main_split(names)
    if (count := len(files_of(names, split))) < shard[1]:
        raise OrreryError(
            f"--shard {shard[0]}/{shard[1]}: the split {split} has {count} files, and a shard "
            f"needs one. Type an N of at most {count}"
        )
    return [*files_of(names, split, shard), *(name for name in names if split_of(name) != split)]


def sums_text(digests: Mapping[str, str]) -> str:
    ordered = sorted(digests, key=PurePosixPath)
    return "".join(f"{digests[name]}  {name}\n" for name in ordered)


def read_sums(lines: Iterable[str]) -> dict[str, str]:
    return {name: digest for digest, _, name in (line.partition("  ") for line in lines)}


def write_data_sums(folder: Path, digests: Mapping[str, str]) -> None:
    (folder / DATA_SUMS).write_text(sums_text(digests))


def data_sums(folder: Path) -> dict[str, str]:
    file = folder / DATA_SUMS
    return read_sums(file.read_text().splitlines()) if file.is_file() else {}


def data_names(folder: Path) -> list[str]:
    held = (file.relative_to(folder).as_posix() for file in data_files(folder))
    return list(data_sums(folder) or held)


def checked_sha256(path: Path, num_shards: int = 1) -> str:
    """Return the sha256 of DATA_SUMS or, if it is missing, of the data.

    Raise OrreryError if a data file's sha256 differs from DATA_SUMS.
    """
    if not (digests := data_sums(path)):
        return sha256_of_data(path)
    for file in data_files(path):
        name = file.relative_to(path).as_posix()
        if sha256(file) != digests.get(name):
            beside, shard = files_of(digests, split_of(name)), None
            if name in beside and num_shards > 1:
                shard = (beside.index(name) % num_shards, num_shards)
            raise OrreryError(
                f"path: {file} has another sha256 than in {DATA_SUMS}. Move {path} away and type "
                f"`{fetch_command(path, shard)}`"
            )
    return sha256(path / DATA_SUMS)


def check_held(path: Path, split: str | None, shard: Shard | None = None) -> None:
    """Raise OrreryError if `path` lacks files of `split` and `shard`. None means all."""
    if shard and not path.is_dir():
        raise OrreryError(f"path: {path} is no folder. Type `{fetch_command(path, shard)}`")
    names = files_of(data_sums(path), split, shard or (0, 1)) if split else data_sums(path)
    missing = [name for name in names if not (path / name).is_file()]
    if missing:
        what = f"shard {shard[0]} of {shard[1]}" if shard else "the dataset"
        more = f" and {len(missing) - 1} more" if missing[1:] else ""
        raise OrreryError(
            f"path: {path} lacks {missing[0]}{more} of {what}. Type `{fetch_command(path, shard)}`"
        )


def fetch_command(folder: Path, shard: Shard | None) -> str:
    option = f" --shard {shard[0]}/{shard[1]}" if shard else ""
    sums = folder / SUMS
    first = sums.read_text().partition("\n")[0] if sums.is_file() else ""
    source = re.fullmatch(r"# dataset (\S+/(\S+)) at (\S+)", first)
    if source is None:
        return f"orrery fetch dataset OWNER/NAME{option}"
    if config := folder.name.removeprefix(source[2]).removeprefix("-"):
        option = f" --config {config}{option}"
    return f"orrery fetch dataset {source[1]}@{source[3]}{option}"
