"""Compare two manifests or receipts field by field.

A receipt (`receipt.json`) records all attempts of a run's stages. Times, job ids, messages and
all attempts but the last are compared only on request.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.manifest.check import leaves, spelled
from orrery.manifest.errors import OrreryError
from orrery.manifest.json_file import read_object
from orrery.manifest.schema import Manifest

RECEIPT, RECEIPT_SCHEMA = "receipt.json", 1
KINDS = ("state", "images", "code", "versions", "nodes", "metrics", "outputs", "restarts")
TIMES = ("attempt", "started_s", "ended_s", "slurm_job_id")
ALWAYS_DIFFERENT = (*TIMES, "message", "report/index.html")
_ABSENT = object()

Receipt = dict[str, Any]
Leaf = tuple[str | int, ...]


@dataclass(frozen=True)
class Difference:
    """A field and its two values as JSON, or "absent"."""

    field: str
    before: str
    after: str

    def __str__(self) -> str:
        return f"{self.field}: {self.before} → {self.after}"


def diff(before: Manifest, after: Manifest) -> list[Difference]:
    a, b = (dict(leaves(m.model_dump(mode="json"))) for m in (before, after))
    found = []
    for path in sorted(a.keys() | b.keys(), key=spelled):
        x, y = a.get(path, _ABSENT), b.get(path, _ABSENT)
        if x != y:
            found.append(Difference(spelled(path), _shown(x), _shown(y)))
    return found


def read_receipt(path: Path) -> Receipt:
    remedy = "remove it, the next stage writes a new one"
    receipt = read_object(path, remedy)
    try:
        schema = receipt["schema"]
        whole = isinstance(receipt["run"]["id"], str) and all(
            _has_attempts(stage) for stage in receipt["stages"].values()
        )
    except (KeyError, TypeError, AttributeError) as error:
        raise OrreryError(f"{path}: not a receipt ({error!r}); {remedy}") from None
    if schema != RECEIPT_SCHEMA:
        raise OrreryError(
            f"{path}: the receipt's format is {schema}, and this Orrery reads {RECEIPT_SCHEMA}. "
            "Read it with the Orrery that wrote it"
        )
    if not whole:
        raise OrreryError(f"{path}: not a receipt (it lacks the run's id or attempts); {remedy}")
    return receipt


def _has_attempts(stage: Any) -> bool:
    attempts = stage["attempts"]
    is_list = isinstance(attempts, list) and bool(attempts)
    return is_list and all(isinstance(attempt, dict) for attempt in attempts)


def diff_receipts(before: Receipt, after: Receipt, everything: bool = False) -> list[Difference]:
    """Return the differences, as fields `receipt.<kind>.<stage>.<field>`.

    A difference that all stages share appears once, without the stage.
    """
    a, b = (_facts(receipt, everything) for receipt in (before, after))
    stages = list(dict.fromkeys([*before["stages"], *after["stages"]]))
    found: dict[Leaf, dict[str, tuple[Any, Any]]] = {}
    for kind, stage, rest in {**a, **b}:
        key = kind, stage, rest
        found.setdefault((kind, *rest), {})[stage] = a.get(key, _ABSENT), b.get(key, _ABSENT)
    result = []
    for field in sorted(found, key=lambda field: (_rank(field[0]), spelled(field))):
        by_stage = found[field]
        if len(by_stage) > 1 and len({(_shown(x), _shown(y)) for x, y in by_stage.values()}) == 1:
            by_stage = {"": next(iter(by_stage.values()))}
        for stage in ["", *stages]:
            x, y = by_stage.get(stage, (_ABSENT, _ABSENT))
            if x != y:
                name = spelled(("receipt", field[0], *((stage,) if stage else ()), *field[1:]))
                result.append(Difference(name, _shown(x), _shown(y)))
    return result


def _facts(receipt: Receipt, everything: bool) -> dict[tuple[str, str, Leaf], Any]:
    facts: dict[tuple[str, str, Leaf], Any] = {}
    for stage, entry in receipt["stages"].items():
        said = entry["attempts"][-1] | entry
        del said["attempts"]
        if everything and len(entry["attempts"]) > 1:
            said["attempts_before"] = entry["attempts"][:-1]
        for kind, value in said.items():
            facts |= {(kind, stage, path): leaf for path, leaf in leaves(value)}
    return {
        key: leaf
        for key, leaf in facts.items()
        if everything or not {key[0], *key[2]} & set(ALWAYS_DIFFERENT)
    }


def _rank(kind: str | int) -> tuple[int, str]:
    return (KINDS.index(kind) if kind in KINDS else len(KINDS)), str(kind)


def _shown(value: Any) -> str:
    return "absent" if value is _ABSENT else json.dumps(value)
