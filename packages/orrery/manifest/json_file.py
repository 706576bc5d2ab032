"""Read JSON from users and other processes.

Only regular files are read, so a reader never waits for a pipe. Files beyond `MAX_BYTES` or
`MAX_DEPTH` are refused, as are NaN, infinities, NUL and unpaired surrogates.
"""

import errno
import json
import math
import os
import stat
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import TypeAdapter, ValidationError

from orrery.manifest.errors import OrreryError

T = TypeVar("T")

MAX_BYTES = 64 << 20
MAX_DEPTH = 64


def read_json(path: Path, remedy: str, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the content. Raise OrreryError with `remedy` if it is unreadable or refused."""
    try:
        return parse_json(read_regular(path), parse_constant)
    except OSError as error:
        raise OrreryError(f"{path}: cannot be read ({error.strerror}); {remedy}") from None
    except ValueError as error:
        raise OrreryError(f"{path}: not JSON ({error}); {remedy}") from None


def read_object(
    path: Path, remedy: str, parse_constant: Callable[[str], Any] | None = None
) -> dict[str, Any]:
    value = read_json(path, remedy, parse_constant)
    if not isinstance(value, dict):
        raise OrreryError(f"{path}: holds {kind_of(value)}, and an object is expected; {remedy}")
    return value


def read_as(path: Path, kind: type[T], remedy: str) -> T:
    value = read_json(path, remedy)
    try:
        return _adapter(kind).validate_json(  # type: ignore[arg-type]  # a type is hashable
            json.dumps(value), strict=True
        )
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "its value"
        raise OrreryError(
            f"{path}: {field}: {first['msg'].removeprefix('Input ').lower()}; {remedy}"
        ) from None


@cache
def _adapter(kind: Any) -> TypeAdapter[Any]:
    return TypeAdapter(kind)


def parse_json(text: str | bytes, parse_constant: Callable[[str], Any] | None = None) -> Any:
    """Return the value of `text`. Raise ValueError if it is not JSON or is refused.

    `parse_constant` replaces NaN and infinities.
    """
    try:
        value = json.loads(
            text if isinstance(text, str) else text.decode("utf-8"), parse_constant=parse_constant
        )
    except UnicodeDecodeError as error:
        raise ValueError(f"byte {error.start} is not UTF-8") from None
    except RecursionError:
        raise ValueError(f"values nested deeper than {MAX_DEPTH}") from None
    _check(value)
    return value


def kind_of(value: Any) -> str:
    kinds = {
        dict: "an object",
        list: "a list",
        str: "a text",
        bool: "a truth value",
        type(None): "null",
    }
    return kinds.get(type(value), "a number")


def _check(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        deeper: list[Any] = []
        for one in level:
            if isinstance(one, dict):
                deeper.extend(one)
                deeper.extend(one.values())
            elif isinstance(one, list):
                deeper.extend(one)
            elif isinstance(one, str):
                if "\0" in one:
                    raise ValueError("a text with a NUL character")
                if not one.isascii() and any(
                    "\ud800" <= character <= "\udfff" for character in one
                ):
                    raise ValueError("a text with half a surrogate pair")
            elif isinstance(one, float) and not math.isfinite(one):
                raise ValueError(f"a number that is not finite ({one})")
        if not deeper:
            return
        level = deeper
    raise ValueError(f"values nested deeper than {MAX_DEPTH}")


def open_regular(path: Path) -> BinaryIO:
    if path.is_dir():
        raise IsADirectoryError(errno.EISDIR, "it is a folder", str(path))
    file = open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb")  # noqa: SIM115
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise OSError(errno.EINVAL, "it is no regular file", str(path))
    return file


def read_regular(path: Path) -> bytes:
    """Raise OSError if the file is not regular or exceeds `MAX_BYTES`."""
    with open_regular(path) as file:
        if (size := os.fstat(file.fileno()).st_size) > MAX_BYTES:
            raise OSError(
                errno.EFBIG, f"it has {size} bytes, and at most {MAX_BYTES} are read", str(path)
            )
        return file.read()
