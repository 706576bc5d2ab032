"""A task of two turns, both as long as the manifest says: the second's prompt is all of the first, which other rollouts may have driven out
of an engine's cache since, or which another engine has. A kind of its own where `put_on_path` has made a folder for PYTHONPATH."""

from collections.abc import Sequence
from pathlib import Path

from orrery.tasks.lengths import Lengths
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
