"""Samples: rollouts for people to read, `rollouts/samples.jsonl`, and `rollouts/evaluate.jsonl`.

A line is one rollout: task, messages, reward, and which policy made it. A line is one write, so it is whole or the torn last one.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import msgspec

from orrery.manifest.publish import write_atomic
from orrery.orchestrator.rollout import Rollout


def line(rollout: Rollout, **about: Any) -> dict[str, Any]:
    return {**about, "reward": rollout.reward, "truncated": rollout.truncated, "metrics": rollout.metrics, "messages": rollout.messages}


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(msgspec.json.encode(each) + b"\n" for each in lines)
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """All lines at once, in place of what was there."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
