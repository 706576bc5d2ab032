"""The end of an error sentence: which name was probably meant."""

import difflib
from collections.abc import Iterable


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean 'x'?`, or all the known names where none is near (the first twelve)."""
    known = sorted(known)
    near = difflib.get_close_matches(name, known, n=1)
    if near:
        return f"did you mean {near[0]!r}?"
    return (
        f"choose from {', '.join(known[:12])}{' …' if len(known) > 12 else ''}"
        if known
        else "there are none"
    )
