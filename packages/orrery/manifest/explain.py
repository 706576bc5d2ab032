"""Explain which file and axis gave a field its value.

An axis is a Jsonnet file for one aspect of a run, such as its model. Run files override axes.
`lib/run.libsonnet` derives all other fields. An axis is a source of a derived field if
removing the axis changes the value.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.manifest import fields
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace
from orrery.manifest.render import Evaluator, closure, import_of, quoted, render

_TOKEN = re.compile(
    r"(?P<skip>//[^\n]*|\#[^\n]*|/\*.*?\*/)"
    r"|(?P<key>(?:[A-Za-z_]\w*|'[^'\n]*'|\"[^\"\n]*\"|\[[^\]\n]*\])(?=\+?:{1,3}(?!:)))"
    r"|(?P<text>'(?:[^'\\]|\\.)*'|\"(?:[^\"\\]|\\.)*\")"
    r"|(?P<open>\{)|(?P<close>\})",
    re.DOTALL,
)


@dataclass(frozen=True)
class Place:
    file: str
    line: int | None
    axis: str | None

    def __str__(self) -> str:
        line, axis = (
            f":{self.line}" if self.line else "",
            f" (axis {self.axis})" if self.axis else "",
        )
        return f"{self.file}{line}{axis}"


@dataclass(frozen=True)
class Explanation:
    """The origin of a scalar field.

    `sources`: files that a derived value depends on, or the axis that a run file overrides.
    """

    field: str
    value: Any
    how: str
    place: Place
    sources: tuple[Place, ...]
    overrides: Any = None

    def __str__(self) -> str:
        verbs = {"axis": "set by", "run file": "set by the run file", "derived": "derived in"}
        verb = verbs[self.how]
        tail = ""
        if self.how == "derived" and self.sources:
            tail = " from " + ", ".join(map(str, self.sources))
        elif self.sources:
            tail = f", over {json.dumps(self.overrides)} of {self.sources[0]}"
        return f"{self.field} = {json.dumps(self.value)}\n    {verb} {self.place}{tail}"


def explain(workspace: Workspace, name: str, field: str) -> list[Explanation]:
    """Explain each scalar at or below `field`. Raise OrreryError if the run lacks it."""
    run = render(workspace, name)
    path = fields.parse(field)
    found = fields.lookup(run.manifest.model_dump(mode="json"), path, name)
    case = _Case(workspace, name, run.file, closure(workspace, run))
    return [case.leaf((*path, *rest), value) for rest, value in fields.leaves(found)]


def axes(workspace: Workspace, files: Iterable[Path]) -> dict[Path, str]:
    root = workspace.library[0]
    inside = {path: path.relative_to(root).parts[0] for path in files if path.is_relative_to(root)}
    return {path: kind for path, kind in inside.items() if kind not in ("lib", "runs")}


class _Case:
    def __init__(self, workspace: Workspace, name: str, file: Path, read: tuple[Path, ...]) -> None:
        self.workspace, self.name, self.file = workspace, name, file
        self.axes = axes(workspace, read)
        self.alone = {path: Evaluator(workspace)(import_of(workspace, path)) for path in self.axes}
        self.run_files = [path for path in read if path.parent.name == "runs"]
        self.library = workspace.library[0] / "lib" / "run.libsonnet"
        self.unconstrained = {workspace.library[0] / "lib" / "constraints.libsonnet": b"{}"}

    def leaf(self, path: fields.Path, value: Any) -> Explanation:
        field = fields.spelled(path)
        setters = [axis for axis in self.axes if fields.has(self.alone[axis], path)]
        over = setters[0] if setters else None
        lines = [(file, line_of(file, path, under_key=True)) for file in self.run_files]
        spelled_out = [(file, line) for file, line in lines if line]
        overridden = fields.lookup(self.alone[over], path, "") if over else None
        if spelled_out:
            place = self._place(*spelled_out[0])
        elif over is None:
            place = self._place(self.library, _nearest_line(self.library, path))
            return Explanation(field, value, "derived", place, self._follows_from(path, value))
        elif overridden == value:
            return Explanation(field, value, "axis", self._place(over, line_of(over, path)), ())
        else:
            place = self._place(self.file, None)
        sources = (self._place(over, line_of(over, path)),) if over else ()
        return Explanation(field, value, "run file", place, sources, overridden)

    def _follows_from(self, path: fields.Path, value: Any) -> tuple[Place, ...]:
        run = f"{import_of(self.workspace, self.file)}[{quoted(self.name)}]"
        whole = " + ".join(import_of(self.workspace, p) for p in (self.library, *self.axes))
        causes = [axis for axis in self.axes if not self._is(run, path, value, {axis: b"{}"})]
        if not self._is(whole, path, value, {}):
            causes.append(self.file)
        return tuple(self._place(cause, None) for cause in causes)

    def _is(self, run: str, path: fields.Path, value: Any, instead: dict[Path, bytes]) -> bool:
        reach = "".join(f"[{json.dumps(element)}]" for element in path)
        evaluate = Evaluator(self.workspace, {**self.unconstrained, **instead})
        try:
            return evaluate(f"({run}){reach}") == value
        except OrreryError:
            return False

    def _place(self, file: Path, line: int | None) -> Place:
        return Place(self.workspace.shown(file), line, self.axes.get(file))


def line_of(file: Path, path: fields.Path, under_key: bool = False) -> int | None:
    """Return the number of the line that sets `path`, or None.

    With `under_key`, a top-level key (a run's name) may precede `path`.
    """
    stack: list[str | None] = []
    key: str | None = None
    text = file.read_text(encoding="utf-8", errors="replace")
    for token in _TOKEN.finditer(text):
        if token["key"]:
            key = token["key"].strip("'\"")
            at = tuple(k for k in (*stack, key) if k)
            if at == path or (under_key and at[1:] == path):
                return text.count("\n", 0, token.start()) + 1
        elif token["open"]:
            stack.append(key)
            key = None
        elif token["close"] and stack:
            stack.pop()
    return None


def _nearest_line(file: Path, path: fields.Path) -> int | None:
    lines = (line_of(file, path[:depth]) for depth in range(len(path), 0, -1))
    return next((line for line in lines if line), None)
