"""Check data against the schema, explain the first bad field, and find fields by path.

A path is written as `tasks.train[0].args.min_length`.
"""

import difflib
import json
import re
from collections.abc import Iterator, Mapping
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import SCHEMA_VERSION, Manifest

FieldPath = tuple[str | int, ...]

_ELEMENT = re.compile(r"([^.\[\]]+)|\[(\d+)\]")
_URGENCY = {"extra_forbidden": 0, "missing": 2}


def check(data: Any, where: str) -> Manifest:
    version = data.get("schema_version") if isinstance(data, dict) else SCHEMA_VERSION
    if type(version) is int and version != SCHEMA_VERSION:
        raise OrreryError(
            f"{where}: schema_version {version}: this Orrery reads {SCHEMA_VERSION}. Type `orrery "
            "render` and begin a new run, or finish this one with the Orrery that began it"
        )
    try:
        return Manifest.model_validate(data)
    except ValidationError as error:
        raise OrreryError(f"{where}: {sentence(error)}") from None


def nearest(name: str, among: list[str]) -> str | None:
    close = difflib.get_close_matches(name, among, n=1, cutoff=0.5)
    return close[0] if close else None


def meant(name: str, among: list[str]) -> str:
    near = nearest(name, among) or next((each for each in among if name in each), None)
    if near is not None:
        return f"did you mean {near!r}?"
    return (
        f"none of the {len(among)} runs has a similar name (`ls manifests jsonnet/runs` lists them)"
    )


def sentence(error: ValidationError) -> str:
    """Describe the most urgent error. Unknown fields come first, missing fields last."""
    errors = sorted(error.errors(include_url=False), key=lambda e: _URGENCY.get(e["type"], 1))
    first = errors[0]
    path, siblings, kind = _walk(first["loc"])
    others = _num_mistakes(errors) - 1
    more = f" (and {others} more error{'s' * (others > 1)})" if others else ""
    message = first["msg"].removeprefix("Value error, ").removeprefix("Input ")
    if first["type"] == "extra_forbidden":
        name = str(first["loc"][-1])
        missing = [
            str(e["loc"][-1])
            for e in errors
            if e["type"] == "missing" and e["loc"][:-1] == first["loc"][:-1]
        ]
        close = nearest(name, missing) or nearest(name, siblings)
        text = f"{path} = {_short(first['input'])}: there is no such field; " + (
            f"did you mean {close!r}?" if close else f"the fields here are {', '.join(siblings)}"
        )
    elif first["type"] == "missing":
        text = f"{path}: is missing; every field is required, and defaults live in Jsonnet only"
        beside = [e for e in errors if e["loc"][:-1] == first["loc"][:-1]]
        parent = path.rpartition(".")[0].rpartition(".")[2]
        if len(beside) > 1 and parent.isidentifier():
            text += f". If the spec has `{parent}: {{…}}`, write `{parent}+:` to keep its defaults"
    elif first["type"] == "union_tag_invalid":
        kinds = [one.strip(" '") for one in first["ctx"]["expected_tags"].split(",")]
        close = nearest(str(first["ctx"]["tag"]), kinds)
        hint = f"did you mean {close!r}?" if close else f"the kinds here are {', '.join(kinds)}"
        text = f"{path}.kind = {_short(first['ctx']['tag'])}: there is no such kind; {hint}"
    elif first["type"] in ("model_attributes_type", "union_tag_not_found"):
        kinds = [_tag(member) for member in _members(kind)]
        given, known = _short(first["input"]), ", ".join(filter(None, kinds))
        text = f"{path} = {given}: should be an object whose kind is one of {known}"
        if isinstance(first["input"], dict) and (name := path.rpartition(".")[2]).isidentifier():
            text += f". If the spec has `{name}: {{…}}`, write `{name}+:` to keep its defaults"
    elif first["type"] == "model_type" and first["input"] is None:
        fields = list(kind.model_fields)
        text = f"{path} = null: it cannot be left out; write an object with {', '.join(fields)}"
    elif first["type"] == "value_error":
        text = f"{path}: {message}" if path else message
    else:
        text = f"{path or 'manifest'} = {_short(first['input'])}: {message}"
    return text + more


def _num_mistakes(errors: list[Any]) -> int:
    """Count distinct mistakes. Copies of a task for training, evaluation and SFT count once."""

    def follows(e: Any) -> bool:  # pydantic drops a tuple's invalid items, then finds it too short
        inside = (o["loc"] for o in errors if len(o["loc"]) > len(e["loc"]))
        return e["type"] == "too_short" and any(loc[: len(e["loc"])] == e["loc"] for loc in inside)

    return len({(e["msg"], e["loc"][-1:], _short(e["input"])) for e in errors if not follows(e)})


def _short(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 60 else text[:57] + "..."


def with_values(manifest: Manifest, values: Mapping[str, Any]) -> Manifest:
    """Return a copy with `values` ({dotted path: value}). Raise ValidationError if invalid."""
    data = manifest.model_dump(mode="json")
    for path, value in values.items():
        *parents, name = path.split(".")
        place = data
        for parent in parents:
            place = place[parent]
        place[name] = value
    return Manifest.model_validate(data)


def misspelt(path: str, given: list[str]) -> str | None:
    *parents, name = path.split(".")
    siblings = _walk((*parents, name))[1]
    unknown = [each for each in given if each not in siblings]
    close = nearest(name, unknown)
    if close is None:
        return None
    return f"{'.'.join([*parents, close])}: there is no such field; did you mean {name!r}?"


def _walk(loc: tuple[int | str, ...]) -> tuple[str, list[str], Any]:
    """Return (dotted path, sibling fields, type) of the field at a pydantic error's `loc`."""
    kind: Any = Manifest
    path = ""
    siblings: list[str] = []
    for element in loc:
        members = _members(kind)
        if len(members) > 1 and (chosen := [m for m in members if _tag(m) == element]):
            kind = chosen[0]
            continue
        kind = members[0] if members else None
        if isinstance(element, int):
            path += f"[{element}]"
            kind = next((a for a in get_args(kind) if a is not Ellipsis), None)
            siblings = []
            continue
        path += f".{element}" if path else element
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            siblings = list(kind.model_fields)
            field = kind.model_fields.get(element)
            kind = field.annotation if field else None
        else:
            kind, siblings = None, []
    return path, siblings, kind


def _members(kind: Any) -> list[Any]:
    if get_origin(kind) is Annotated:
        return _members(get_args(kind)[0])
    if get_origin(kind) in (Union, UnionType):
        return [m for part in get_args(kind) if part is not type(None) for m in _members(part)]
    return [] if kind is None else [kind]


def _tag(member: Any) -> str | None:
    field: FieldInfo | None = getattr(member, "model_fields", {}).get("kind")
    return get_args(field.annotation)[0] if field else None


def parse_path(text: str) -> FieldPath:
    parts = [int(i or n) if (i or n).isdigit() else n for n, i in _ELEMENT.findall(text)]
    return tuple(parts)


def spelled(path: FieldPath) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def leaves(data: Any, path: FieldPath = ()) -> Iterator[tuple[FieldPath, Any]]:
    if not data or not isinstance(data, dict | list):
        yield path, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from leaves(value, (*path, key))


def lookup(data: Any, path: FieldPath, where: str) -> Any:
    for depth, element in enumerate(path):
        if (isinstance(data, list) and isinstance(element, int) and element < len(data)) or (
            isinstance(data, dict) and element in data
        ):
            data = data[element]  # type: ignore[index]  # the condition checks both types
        else:
            names = list(data) if isinstance(data, dict) else []
            if isinstance(data, list):
                names = [f"[{i}]" for i in range(len(data))]
            near = nearest(str(element), names)
            before = spelled(path[:depth])
            if near:
                hint = f"did you mean {spelled((*path[:depth], near))!r}?"
            elif names:
                hint = f"{before or 'a manifest'} has {', '.join(names)}"
            else:
                hint = f"{before} is a plain value"
            raise OrreryError(f"{where}: there is no field {spelled(path[: depth + 1])!r}; {hint}")
    return data


def has_field(data: Any, path: FieldPath) -> bool:
    try:
        lookup(data, path, "")
    except OrreryError:
        return False
    return True
