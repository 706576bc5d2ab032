"""Read plain text for SFT.

- A stop token precedes and follows each document.
- Long documents are cut into parts that overlap by one token.
- The loss excludes each part's first token, so each token is trained once an epoch.
"""

import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, TextData
from orrery.manifest.shards import Shard, check_held, checked_sha256, data_names, files_of
from orrery.tasks import Message
from orrery.tasks.chat import Renderer
from orrery.tasks.rows import DataRows, Joined, open_rows
from orrery.trainer.sft_data import Chat
from orrery.wire.columns import Columns

if TYPE_CHECKING:
    from orrery.trainer.elastic import SiteTraining

CHECKED_CHARACTERS = 1_000_000


class TextDocuments:
    """Documents as chats, so that `sft.refuse_shared` can compare training and validation data."""

    def __init__(self, texts: "Texts") -> None:
        self._texts = texts

    def __len__(self) -> int:
        return len(self._texts)

    def __getitem__(self, index: int) -> Chat:
        return Chat(self._texts.rows.place(index), [Message("user", self._texts.text(index))])


class Texts:
    """Text documents by index. With `is_partial`, files of other DiLoCo sites may be missing."""

    def __init__(
        self,
        data: TextData,
        field: str,
        renderer: Renderer,
        max_tokens: int,
        is_partial: bool = False,
    ) -> None:
        self._data, self._field = data, field
        self._renderer, self._max_tokens = renderer, max_tokens
        self.chats = TextDocuments(self)
        path = Path(data.path)
        try:
            found = checked_sha256(path, data.num_shards)
            if not is_partial:
                check_held(path, data.split)
        except OrreryError as error:
            raise OrreryError(f"{field}.{error}") from error
        except OSError as error:
            raise OrreryError(
                f"{field}.path: {data.path}: {error.strerror}; name a file or a folder of text"
            ) from error
        if found != data.sha256:
            raise OrreryError(
                f"{field}.sha256: {data.path} has {found}, the manifest says {data.sha256}; "
                "restore the file, or write the new one into the spec"
            )

    @cached_property
    def rows(self) -> DataRows:
        try:
            if self._data.shard_by == "file":
                rows: DataRows = Joined(list(self._parts_by_file.values()))
            else:
                rows = open_rows(Path(self._data.path), self._data.split)
        except OrreryError as error:
            raise OrreryError(f"{self._field}.{error}") from error
        if not len(rows):
            raise OrreryError(f"{self._field}.path: {self._data.path} has no rows; add documents")
        return rows

    @cached_property
    def _parts_by_file(self) -> dict[str, DataRows]:
        path, split = Path(self._data.path), self._data.split
        if split is None or not path.is_dir():
            raise OrreryError(
                f'shard_by "file": needs a folder of `orrery fetch dataset` and its split, not '
                f"{path} and {json.dumps(split)}. Name them, or leave shard_by out"
            )
        held = [name for name in files_of(data_names(path), split) if (path / name).is_file()]
        if not held:
            open_rows(path, split)  # raises for an unknown split
        return {name: open_rows(path / name) for name in held}

    def __len__(self) -> int:
        return len(self.rows)

    def check(self, indices: Sequence[int]) -> None:
        """Raise OrreryError if a document is malformed. Stop after CHECKED_CHARACTERS."""
        num_characters = 0
        for index in indices:
            num_characters += len(self.text(index))
            self.columns([index])
            if num_characters >= CHECKED_CHARACTERS:
                return

    def documents(self, shard: int | None) -> Sequence[int]:
        """Return the document indices of `shard` (None: all).

        Raise OrreryError if the shard is empty or lacks a file.
        """
        if shard is None:
            return range(len(self.rows))
        num_shards, most = self._data.num_shards, len(self.rows)
        found: Sequence[int] = range(shard, most, num_shards)
        if self._data.shard_by == "file":
            found, most = self._documents_of_files((shard, num_shards))
        if not found:
            raise OrreryError(
                f"{self._field}.num_shards {num_shards}: shard {shard} has no "
                f"document; set it to at most {most}"
            )
        return found

    def _documents_of_files(self, shard: Shard) -> tuple[Sequence[int], int]:
        path, split = Path(self._data.path), self._data.split or ""
        try:
            check_held(path, split, shard)
        except OrreryError as error:
            raise OrreryError(
                f"{self._field}.{error}, or `orrery join` with the --shard of your files"
            ) from error
        names, found, begin = data_names(path), array("q"), 0
        mine = set(files_of(names, split, shard))
        for name, rows in self._parts_by_file.items():
            if name in mine:
                found.extend(range(begin, begin + len(rows)))
            begin += len(rows)
        return found, len(files_of(names, split))

    def columns(self, documents: Iterable[int]) -> Columns:
        parts = [part for index in documents for part in self._parts(index)]
        offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64)
        trained = np.ones(offsets[-1], dtype=bool)
        trained[offsets[:-1]] = False
        token = {
            "token_id": np.concatenate(parts),
            "trained": trained,
            "rl_weight": np.zeros(offsets[-1], dtype=np.float32),
            "cross_entropy_weight": np.ones(offsets[-1], dtype=np.float32),
        }
        return Columns(offsets, token)

    def text(self, index: int) -> str:
        row = self.rows[index]
        found = row.get(self._data.column)
        if not isinstance(found, str):
            raise OrreryError(
                f"{self._field}.column: {self.rows.place(index)} has no text in "
                f"{self._data.column!r}; choose from {', '.join(row)}"
            )
        return found

    def _parts(self, index: int) -> Iterator[np.ndarray]:
        end = self._renderer.stop_token_ids[0]
        ids = np.array([end, *self._encoded(index), end], dtype=np.int32)
        for begin in range(0, len(ids) - 1, self._max_tokens - 1):
            yield ids[begin : begin + self._max_tokens]

    def _encoded(self, index: int) -> list[int]:
        try:
            return self._renderer.encode(self.text(index))
        except OrreryError as error:
            raise OrreryError(f"{self.rows.place(index)}: {error}") from error


def open_texts(manifest: Manifest, field: str, data: TextData, tokenizer: Path) -> Texts:
    has_sites = manifest.trainer.elastic is not None and manifest.sft.data is data
    is_partial = has_sites and data.shard_by == "file"
    renderer = Renderer(tokenizer, manifest.model.vocab_size)
    return Texts(data, field, renderer, manifest.max_text_tokens, is_partial)


def text_order(documents: Sequence[int], seed: int, shard: int | None, start: int) -> Iterator[int]:
    """Yield `documents` endlessly from position `start`, permuted anew each epoch."""
    epoch, begin = divmod(start, len(documents))
    while True:
        draw = np.random.default_rng([seed, epoch, 0 if shard is None else 1 + shard])
        yield from (documents[i] for i in draw.permutation(len(documents))[begin:])
        epoch, begin = epoch + 1, 0


def text_batches(
    texts: Texts, manifest: Manifest, num_done: int, site: "SiteTraining | None"
) -> Iterator[Columns]:
    spec = manifest.sft
    shard, start = None, num_done * spec.examples_per_batch
    if site is not None:
        shard, start = site.shard, site.start
    order = text_order(texts.documents(shard), manifest.seed, shard, start)
    for _ in range(num_done, spec.num_steps):
        yield texts.columns(islice(order, spec.examples_per_batch))
