"""A task of two turns whose lengths the manifest sets.

The second prompt contains the first turn, so an engine may find its cache outside the device.
"""

from collections.abc import Sequence
from pathlib import Path

from orrery.tasks.synthetic import Lengths
from orrery.tasks.task import Message, Problem


class TwoTurns(Lengths):
    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message]:  # type: ignore[override]
        return [Message("user", "again")]


def put_on_path(folder: Path) -> None:
    """Lay it out as `pip install` would."""
    info = folder / "two_turns-0.1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: two-turns\nVersion: 0.1.0\n")
    (info / "entry_points.txt").write_text("[orrery.tasks]\ntwo_turns = two_turns:TwoTurns\n")
    (folder / "two_turns.py").symlink_to(__file__)
