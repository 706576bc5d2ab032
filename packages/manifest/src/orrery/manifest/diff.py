"""Diff: two manifests, field by field."""

import json
from dataclasses import dataclass
from typing import Any

from orrery.manifest.fields import leaves, spelled
from orrery.manifest.schema import Manifest

_ABSENT = object()


@dataclass(frozen=True)
class Difference:
    """One field that differs; `before` or `after` is "absent" where only one of the two has it, else JSON."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before} → {self.after}"


def diff(before: Manifest, after: Manifest) -> list[Difference]:
    """The fields whose values differ, sorted by name."""
    a, b = (dict(leaves(m.model_dump(mode="json"))) for m in (before, after))
    paths = sorted((p for p in a.keys() | b.keys() if a.get(p, _ABSENT) != b.get(p, _ABSENT)), key=spelled)
    return [Difference(spelled(p), _shown(a.get(p, _ABSENT)), _shown(b.get(p, _ABSENT))) for p in paths]


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
