"""Examine a fetched folder for `orrery fetch`, and print JSON.

- `tokenizer FOLDER`: `sha256`, vocabulary size without added tokens, and the added tokens' ids.
- `dataset FOLDER`: `sha256`, and each split's rows and columns.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of
from orrery.manifest.shards import checked_sha256, data_names, split_of
from orrery.tasks.chat import FILES, Renderer
from orrery.tasks.rows import open_rows, splits


def tokenizer(folder: Path) -> dict[str, Any]:
    renderer = Renderer(folder)
    added = renderer.tokenizer.get_added_tokens_decoder()
    files = [folder / name for name in FILES if (folder / name).is_file()]
    return {
        "sha256": sha256_of(files),
        "num_words": renderer.tokenizer.get_vocab_size(with_added_tokens=False),
        "added": {token.content: number for number, token in added.items()},
    }


def dataset(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = {}
    notes = []
    order = [split_of(name) for name in data_names(folder)]
    for split in sorted(splits(folder), key=order.index):
        try:
            rows = open_rows(folder, split)
        except OrreryError as error:
            notes.append(str(error))
            continue
        found[split] = {"num_rows": len(rows), "columns": list(rows[0]) if len(rows) else []}
    if not found:
        raise OrreryError(notes[0])
    return {"sha256": checked_sha256(folder), "splits": found, "notes": notes}


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m orrery.tasks.fetched", description=__doc__)
    parser.add_argument("kind", choices=("tokenizer", "dataset"))
    parser.add_argument("folder", type=Path)
    args = parser.parse_args(words)
    try:
        print(json.dumps((tokenizer if args.kind == "tokenizer" else dataset)(args.folder)))
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
