"""Field paths such as `tasks.train[0].args.min_length`, and leaves of JSON data."""

import re
from collections.abc import Iterator
from typing import Any

from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError

Path = tuple[str | int, ...]

_ELEMENT = re.compile(r"([^.\[\]]+)|\[(\d+)\]")


def parse(text: str) -> Path:
    parts = [int(i or n) if (i or n).isdigit() else n for n, i in _ELEMENT.findall(text)]
    return tuple(parts)


def spelled(path: Path) -> str:
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path).removeprefix(".")


def leaves(data: Any, path: Path = ()) -> Iterator[tuple[Path, Any]]:
    if not data or not isinstance(data, dict | list):
        yield path, data
        return
    for key, value in data.items() if isinstance(data, dict) else enumerate(data):
        yield from leaves(value, (*path, key))


def lookup(data: Any, path: Path, where: str) -> Any:
    for depth, element in enumerate(path):
        if (isinstance(data, list) and isinstance(element, int) and element < len(data)) or (
            isinstance(data, dict) and element in data
        ):
            data = data[element]  # type: ignore[index]  # the condition says which of the two it is
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


def has(data: Any, path: Path) -> bool:
    try:
        lookup(data, path, "")
    except OrreryError:
        return False
    return True
