"""Change a part of a manifest without checks, as no manifest file can."""

from typing import TypeVar

from pydantic import BaseModel

Part = TypeVar("Part", bound=BaseModel)


def replaced(part: Part, path: str, /, **fields: object) -> Part:
    """Return a copy with other `fields` of the object at the dotted `path`."""
    name, _, rest = path.partition(".")
    inner = getattr(part, name)
    new = replaced(inner, rest, **fields) if rest else inner.model_copy(update=fields)
    return part.model_copy(update={name: new})
