"""Write readable rollouts, one per line: `rollouts/samples.jsonl` and `rollouts/evaluate.jsonl`.

`samples.jsonl` grows with every batch, so its messages are `shortened`.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from orrery.manifest.publish import make_folder, write_atomic
from orrery.orchestrator.rollout import Rollout
from orrery.tasks.task import Message

NUM_MESSAGES = 16  # of a conversation
TEXT_CHARACTERS = 4000  # of a message or its tool calls


def line(rollout: Rollout, **about: Any) -> dict[str, Any]:
    return {
        **about,
        "reward": rollout.reward,
        "truncated": rollout.truncated,
        "metrics": rollout.metrics,
        "messages": rollout.messages,
    }


def shortened(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the first and last messages, texts shortened, as JSON types."""
    half, left_out = NUM_MESSAGES // 2, len(messages) - NUM_MESSAGES
    if left_out <= 0:
        return [_short(message) for message in messages]
    gap = {"role": "left_out", "content": f"{left_out} messages"}
    return [*map(_short, messages[:half]), gap, *map(_short, messages[-half:])]


def _short(message: Message) -> dict[str, Any]:
    fields = {
        name: _short_text(value) if isinstance(value, str) else value
        for name, value in msgspec.to_builtins(message).items()
    }
    calls = msgspec.json.encode(message.tool_calls).decode()
    if len(calls) > TEXT_CHARACTERS:
        fields["tool_calls"] = _short_text(calls)
    return fields


def _short_text(text: str) -> str:
    half, left_out = TEXT_CHARACTERS // 2, len(text) - TEXT_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


def append(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    """Add `lines`, messages `shortened`. A torn last line stays separate."""
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(
        msgspec.json.encode({**each, "messages": shortened(each["messages"])}) + b"\n"
        for each in lines
    )
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def write(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    make_folder(path.parent)
    write_atomic(path, b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
