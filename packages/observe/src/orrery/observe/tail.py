"""Tail: the rows that roles have appended since the last look.

- In: `metrics/*.jsonl` of one run (not the spans). Out: `(process, row)` in the order of each file, every whole row once.
- A torn last line stays in the file until it is whole, or is passed over when the next row follows it.
"""

from collections.abc import Iterator
from pathlib import Path

from orrery.manifest.json_file import open_regular
from orrery.observe.metrics import Row, parse_row


class MetricsTail:
    """Remembers how far each file was read; files may appear later."""

    def __init__(self, run_dir: Path, from_end: bool = False):
        self._folder = run_dir / "metrics"
        self._offsets: dict[Path, int] = {}
        if from_end:
            self._offsets = {path: path.stat().st_size for path in self._paths()}

    def _paths(self) -> list[Path]:
        return sorted(
            path for path in self._folder.glob("*.jsonl") if not path.name.endswith(".spans.jsonl")
        )

    def new_rows(self) -> Iterator[tuple[str, Row]]:
        """Raises OSError, after the rows of all other files, where one cannot be read now; its rows come at the next look that can."""
        trouble: OSError | None = None
        for path in self._paths():
            try:
                lines = self._new_lines(path)
            except OSError as error:
                trouble = error
                continue
            for line in lines:
                if (row := parse_row(line)) is not None and "time_s" in row:
                    yield path.name.removesuffix(".jsonl"), row
        if trouble is not None:
            raise trouble

    def _new_lines(self, path: Path) -> list[bytes]:
        offset = self._offsets.get(path, 0)
        if path.stat().st_size == offset:
            return []
        with open_regular(path) as file:
            file.seek(offset)
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = offset + whole
        return data[:whole].split(b"\n")
