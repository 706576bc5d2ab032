"""Render Jsonnet run files to checked manifests.

Each key of a run file is a run. Import paths are relative to `jsonnet/` or to the checkout.
"""

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from orrery.manifest.check import check, meant, misspelt, nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace, pretty_json
from orrery.manifest.json_file import kind_of, parse_json
from orrery.manifest.publish import write_atomic
from orrery.manifest.schema import TARGETS, Manifest

T = TypeVar("T")
MAX_NESTING = 500
PRETRAINED = "_pretrained.libsonnet"
FETCHED = "_fetched.libsonnet"
# `_import` returns this failing code, because the binding garbles Python exceptions.
_FAILS = b"error 'import'"
_MISSING = re.compile(r"(?P<field>[\w.]+): say it in the run file")  # lib/run.libsonnet's error
# errors of lib/constraints.libsonnet about misspelt settings
_UNKNOWN = re.compile(
    r"(?P<said>.*there is no (?:setting )?(?P<given>\w+))[^;]*; \w+.* (?:are|has) "
)
_IN_LIBRARY = re.compile(r" \(jsonnet/lib/(?P<file>\w+)\.libsonnet:\d+\)$")
_FRAME = re.compile(r"^\t*(?P<file>[^\t\n]+?):\(?(?P<line>\d+):\d+", re.MULTILINE)


@dataclass(frozen=True)
class Rendered:
    manifest: Manifest
    file: Path


class Evaluator:
    """Evaluate Jsonnet. `closure`: imported files. `instead`: {path: content to use}."""

    def __init__(self, workspace: Workspace, instead: Mapping[Path, bytes] | None = None) -> None:
        self.workspace = workspace
        self.instead = dict(instead or {})
        self.closure: list[Path] = []
        self._lost = self._importer = ""  # a failed import's error and place (" (FILE:LINE)" or "")

    def __call__(self, expression: str) -> Any:
        """Raise OrreryError with Jsonnet's message and line if the evaluation fails."""
        import _gojsonnet

        try:
            value = parse_json(
                _gojsonnet.evaluate_snippet("<orrery>", expression, import_callback=self._import)
            )
        except RuntimeError as error:
            raise OrreryError(self._sentence(str(error))) from None
        except ValueError as error:
            raise OrreryError(
                f"{self.workspace.shown(self.closure[0])}: its value is refused ({error})"
            ) from None
        if self._lost:  # Jsonnet is lazy and did not use the failed import
            raise OrreryError(self._lost + self._importer)
        return value

    def _import(self, _directory: str, name: str) -> tuple[str, bytes]:
        for folder in self.workspace.library:
            path = folder / name
            if path.is_file():
                if path not in self.closure:
                    self.closure.append(path)
                try:
                    data = self.instead[path] if path in self.instead else path.read_bytes()
                except OSError as error:
                    shown = self.workspace.shown(path)
                    return self._fail(name, f"{shown}: cannot be read ({error.strerror})")
                # Jsonnet's parser crashes on deep nesting.
                if path.suffix.endswith("sonnet") and _nesting(data) > MAX_NESTING:
                    return self._fail(
                        name,
                        f"{self.workspace.shown(path)}: brackets nested deeper than {MAX_NESTING}; "
                        "is the file damaged?",
                    )
                return str(path), data
        paths = [folder / name for folder in self.workspace.library]
        if any(path.exists() or path.is_symlink() for path in paths):
            said = f"import {name!r}: this file under jsonnet/ cannot be read; restore it"
            return self._fail(name, said)
        root = self.workspace.library[0]
        near = nearest(name, [str(path.relative_to(root)) for path in root.rglob("*sonnet")])
        hint = f"; did you mean {near!r}?" if near else ""
        where = "under jsonnet/"
        if name.endswith(PRETRAINED):
            hint = "; type `orrery fetch model NAME`, such as Qwen/Qwen3-0.6B, which writes it"
        elif name.endswith(FETCHED):
            hint = "; type `orrery fetch dataset NAME`, such as openai/gsm8k, which writes it"
        elif not name.endswith("sonnet"):
            hint, where = "; put it there, or name another file", "in the checkout"
        said = f"import {name!r}: no such file {where}{hint}"
        return self._fail(name, said, self._place_of_import(name))

    def _fail(self, name: str, said: str, importer: str = "") -> tuple[str, bytes]:
        self._lost, self._importer = said, importer
        return name, _FAILS

    def _place_of_import(self, name: str) -> str:
        """Return the import's " (FILE:LINE)", which Jsonnet omits for a missing `importstr`."""
        wanted = re.compile(rf"""\bimport(?:str|bin)?\s*(['"]){re.escape(name)}\1""")
        for path in self.closure:
            text = path.read_text(encoding="utf-8", errors="replace")
            if path.suffix.endswith("sonnet") and (found := wanted.search(text)):
                line = text.count("\n", 0, found.start()) + 1
                return f" ({self.workspace.shown(path)}:{line})"
        return ""

    def _sentence(self, text: str) -> str:
        head = text.splitlines()[0]
        if self._importer:
            return self._lost + self._importer
        message = self._lost or head.removeprefix("RUNTIME ERROR: ")
        if found := _FRAME.match(message):  # syntax errors begin with file and line
            place = f"{self.workspace.shown(found['file'])}:{found['line']}"
            return f"{place}: {message.split(' ', 1)[-1]}"
        for frame in _FRAME.finditer(text.split("\n", 1)[-1]):
            if Path(frame["file"]) in self.closure:
                return f"{message} ({self.workspace.shown(frame['file'])}:{frame['line']})"
        return message


def _nesting(data: bytes) -> int:
    depth = deepest = 0
    for bracket in re.findall(rb"[\[({\])}]", data):
        depth += 1 if bracket in b"[({" else -1
        deepest = max(deepest, depth)
    return deepest


def quoted(text: str) -> str:
    return json.dumps(text)


def import_of(workspace: Workspace, path: Path) -> str:
    return f"(import {quoted(str(path.relative_to(workspace.library[0])))})"


def run_files(workspace: Workspace) -> dict[str, Path]:
    def of_file(path: Path) -> dict[str, Path]:
        return dict.fromkeys(_names(workspace, path), path)

    return _of_all_files(workspace, of_file, workspace.run_files)


def _names(workspace: Workspace, path: Path) -> list[str]:
    return Evaluator(workspace)(f"std.objectFields({import_of(workspace, path)})")


def _of_all_files(
    workspace: Workspace, of_file: Callable[[Path], Mapping[str, T]], paths: Sequence[Path]
) -> dict[str, T]:
    found: dict[str, T] = {}
    files: dict[str, Path] = {}
    for path in paths:
        if path.stem in TARGETS:
            raise OrreryError(
                f"{workspace.shown(path)}: the pipeline has a rule called {path.stem!r}. Give the "
                "file another name"
            )
        for name, value in of_file(path).items():
            if name in found:
                raise OrreryError(
                    f"{workspace.shown(path)}: run {name!r} is also in "
                    f"{workspace.shown(files[name])}. Rename one of them"
                )
            found[name], files[name] = value, path
    return found


def file_of(workspace: Workspace, name: str) -> Path | None:
    """Return the file of run `name`. Ignore broken files."""

    def of_file(path: Path) -> dict[str, Path]:
        with suppress(OrreryError):
            return {name: path} if name in _names(workspace, path) else {}
        return {}

    return _of_all_files(workspace, of_file, workspace.run_files).get(name)


def locate(workspace: Workspace, name: str) -> Path:
    likely = workspace.root / "jsonnet" / "runs" / f"{name}.jsonnet"
    if likely in workspace.run_files and name in _names(workspace, likely):
        return likely
    if (found := file_of(workspace, name)) is not None:
        return found
    names = list(run_files(workspace))  # raises for broken files, which may define the run
    if likely in workspace.run_files:
        has = ", ".join(_names(workspace, likely))
        raise OrreryError(f"run {name!r}: {workspace.shown(likely)} has the runs {has}; name one")
    raise OrreryError(f"run {name!r}: there is no such run; {meant(name, names)}")


def render(workspace: Workspace, name: str) -> Rendered:
    path = locate(workspace, name)
    return _rendered(workspace, name, _value(workspace, path, name), path)


def _value(workspace: Workspace, path: Path, name: str) -> Any:
    run = _run_of(workspace, path, name)
    try:
        return Evaluator(workspace)(run)
    except OrreryError as error:
        if found := _MISSING.match(str(error)):
            parents = "".join(f"[{quoted(each)}]" for each in found["field"].split(".")[:-1])
            given = Evaluator(workspace)(f"std.objectFields({run}{parents})")
            if text := misspelt(found["field"], given):
                raise OrreryError(f"{workspace.shown(path)}: {name}: {text}") from None
        if found := _IN_LIBRARY.search(str(error)):
            where, said = f"{workspace.shown(path)}: {name}", str(error)
            if found["file"] == "constraints":
                said = _suggested(said[: found.start()])
            raise OrreryError(f"{where}: {said}") from None
        raise


def _suggested(said: str) -> str:
    if found := _UNKNOWN.match(said):
        known = re.findall(r"\w+", said[found.end() :])
        if near := nearest(found["given"], known):
            return f"{found['said']}; did you mean {near!r}?"
    return said


def closure(workspace: Workspace, run: Rendered) -> tuple[Path, ...]:
    evaluate = Evaluator(workspace)
    evaluate(_run_of(workspace, run.file, run.manifest.name))
    return tuple(evaluate.closure)


def render_file(workspace: Workspace, path: Path) -> list[Rendered]:
    with _each_run(workspace, [path]):
        return _all_rendered(workspace, path, Evaluator(workspace)(import_of(workspace, path)))


def render_all(workspace: Workspace, run_files: Sequence[Path] | None = None) -> list[Rendered]:
    run_files = workspace.run_files if run_files is None else run_files
    files = ", ".join(f"{quoted(str(path))}: {import_of(workspace, path)}" for path in run_files)
    with _each_run(workspace, run_files):
        runs_of = Evaluator(workspace)(f"{{{files}}}")

    def rendered(path: Path) -> dict[str, Rendered]:
        return {
            run.manifest.name: run for run in _all_rendered(workspace, path, runs_of[str(path)])
        }

    runs = _of_all_files(workspace, rendered, run_files)
    return [runs[name] for name in sorted(runs)]


@contextmanager
def _each_run(workspace: Workspace, paths: Sequence[Path]) -> Iterator[None]:
    """If the library refuses a run, evaluate all runs singly, so that the error names it."""
    try:
        yield
    except OrreryError as error:
        if _MISSING.match(str(error)) or _IN_LIBRARY.search(str(error)):
            for path in paths:
                for name in _names(workspace, path):
                    _value(workspace, path, name)
        raise


def _run_of(workspace: Workspace, path: Path, name: str) -> str:
    return f"{import_of(workspace, path)}[{quoted(name)}]"


def _all_rendered(workspace: Workspace, path: Path, runs: Any) -> list[Rendered]:
    if not isinstance(runs, dict):
        raise OrreryError(
            f"{workspace.shown(path)}: holds {kind_of(runs)}, and a run file is an object of runs "
            "by name, as in jsonnet/runs/reverse_text.jsonnet"
        )
    return [_rendered(workspace, name, data, path) for name, data in runs.items()]


def _rendered(workspace: Workspace, name: str, data: Any, path: Path) -> Rendered:
    manifest = check(data, f"{workspace.shown(path)}: {name}")
    if manifest.name != name:
        raise OrreryError(
            f"{workspace.shown(path)}: a run's name is {manifest.name!r}, and the key is {name!r}. "
            "Wrap the runs in lib/named.libsonnet"
        )
    return Rendered(manifest, path)


def write(
    workspace: Workspace,
    runs: Iterable[Rendered],
    wrote: Callable[[Path, bool], None] | None = None,
) -> list[Path]:
    paths = []
    for run in list(runs):
        path, text = workspace.manifest_path(run.manifest.name), pretty_json(run.manifest)
        changed = not path.is_file() or path.read_bytes() != text.encode()
        if changed:
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(path, text.encode())
        if wrote:
            wrote(path, changed)
        paths.append(path)
    return paths
