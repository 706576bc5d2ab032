"""Explain which file and axis gave a field its value.

An axis is a Jsonnet file for one aspect of a run, such as its model. Run files override axes.
`lib/run.libsonnet` derives all other fields. An axis is a source of a derived field whose value
changes without the axis.
"""

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.manifest.check import FieldPath, has_field, leaves, lookup, parse_path, spelled
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
_LITERAL = re.compile(
    r"\+?:+\s*(?:(?P<json>-?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?|true|false|null)"
    r"|(?P<quote>['\"])(?P<text>[^'\"\\\n]*)(?P=quote))\s*[,}]"
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

    `sources`: the files that determine a derived value, or the overridden axis.
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
    path = parse_path(field)
    found = lookup(run.manifest.model_dump(mode="json"), path, name)
    case = _Case(workspace, name, run.file, closure(workspace, run))
    return [case.leaf((*path, *rest), value) for rest, value in leaves(found)]


def axes(workspace: Workspace, files: Iterable[Path]) -> dict[Path, str]:
    root = workspace.library[0]
    inside = {path: path.relative_to(root).parts[0] for path in files if path.is_relative_to(root)}
    return {path: kind for path, kind in inside.items() if kind not in ("lib", "runs")}


class _Case:
    def __init__(self, workspace: Workspace, name: str, file: Path, read: tuple[Path, ...]) -> None:
        self.workspace, self.name, self.file = workspace, name, file
        self.axes = axes(workspace, read)
        self.alone = {path: Evaluator(workspace)(import_of(workspace, path)) for path in self.axes}
        run_files = [path for path in read if path.parent.name == "runs"]
        self.run_files = sorted(run_files, key=lambda path: path == file)  # this run's file is last
        self.library = workspace.library[0] / "lib" / "run.libsonnet"
        self.whole = " + ".join(import_of(workspace, p) for p in (self.library, *self.axes))
        self.unconstrained = {workspace.library[0] / "lib" / "constraints.libsonnet": b"{}"}

    def leaf(self, path: FieldPath, value: Any) -> Explanation:
        field = spelled(path)
        setters = [axis for axis in self.axes if has_field(self.alone[axis], path)]
        over = setters[0] if setters else None
        overridden = lookup(self.alone[over], path, "") if over else None
        found = self._found(path, value)
        is_own = found is not None and found[1].keys[0] == self.name
        is_axis = over is not None and overridden == value
        is_unset = found is None and (is_axis or over is None)
        if is_unset or (not is_own and self._is(self.whole, path, value, {})):
            if over is not None and is_axis:
                return Explanation(field, value, "axis", self._place(over, line_of(over, path)), ())
            place = self._place(self.library, _nearest_line(self.library, path))
            return Explanation(field, value, "derived", place, self._follows_from(path, value))
        place = self._place(self.file, None)
        if found is not None:
            place = self._place(found[0], found[1].line if found[1].literal else None)
        sources = (self._place(over, line_of(over, path)),) if over else ()
        return Explanation(field, value, "run file", place, sources, overridden)

    def _found(self, path: FieldPath, value: Any) -> tuple[Path, "_Setting"] | None:
        """Return the setting of a run file that most likely gave `path` its value.

        Skip settings with another literal, which are overridden or belong to other runs. Prefer,
        in order: the run's own block, settings outside other runs' blocks, the last setting.
        """
        found = [
            (file, setting)
            for file in self.run_files
            for setting in _settings(file)
            if path in (setting.keys, setting.keys[1:]) and setting.literal in (None, (value,))
        ]

        def rank(file: Path, keys: FieldPath) -> int:
            if keys == (self.name, *path):
                return 2
            return int(file != self.file or keys == path or str(keys[0]).startswith("["))

        found.sort(key=lambda each: rank(each[0], each[1].keys))
        return found[-1] if found else None

    def _follows_from(self, path: FieldPath, value: Any) -> tuple[Place, ...]:
        run = f"{import_of(self.workspace, self.file)}[{quoted(self.name)}]"
        causes = [axis for axis in self.axes if not self._is(run, path, value, {axis: b"{}"})]
        if not self._is(self.whole, path, value, {}):
            causes.append(self.file)
        return tuple(self._place(cause, None) for cause in causes)

    def _is(self, run: str, path: FieldPath, value: Any, instead: dict[Path, bytes]) -> bool:
        reach = "".join(f"[{json.dumps(element)}]" for element in path)
        evaluate = Evaluator(self.workspace, {**self.unconstrained, **instead})
        try:
            return evaluate(f"({run}){reach}") == value
        except OrreryError:
            return False

    def _place(self, file: Path, line: int | None) -> Place:
        return Place(self.workspace.shown(file), line, self.axes.get(file))


@dataclass(frozen=True)
class _Setting:
    """A line that sets field `keys`. `literal`: (value,), or None if computed."""

    keys: tuple[str, ...]
    line: int
    literal: tuple[Any] | None


def line_of(file: Path, path: FieldPath) -> int | None:
    return next((each.line for each in _settings(file) if each.keys == path), None)


def _settings(file: Path) -> Iterator[_Setting]:
    stack: list[str | None] = []
    key: str | None = None
    text = file.read_text(encoding="utf-8", errors="replace")
    for token in _TOKEN.finditer(text):
        if token["key"]:
            key = token["key"].strip("'\"")
            keys = tuple(k for k in (*stack, key) if k)
            line = text.count("\n", 0, token.start()) + 1
            yield _Setting(keys, line, _literal(text, token.end()))
        elif token["open"]:
            stack.append(key)
            key = None
        elif token["close"] and stack:
            key = stack.pop()


def _literal(text: str, start: int) -> tuple[Any] | None:
    if (found := _LITERAL.match(text, start)) is None:
        return None
    return (json.loads(found["json"]) if found["json"] else found["text"],)


def _nearest_line(file: Path, path: FieldPath) -> int | None:
    lines = (line_of(file, path[:depth]) for depth in range(len(path), 0, -1))
    return next((line for line in lines if line), None)
