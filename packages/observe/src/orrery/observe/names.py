"""Names of processes, many at once."""

from collections.abc import Iterable


def listed(names: Iterable[str]) -> str:
    """`trainer.0-7, router.0`: processes by role, runs of indices drawn together."""
    by_role: dict[str, list[int]] = {}
    for name in names:
        role, _, index = name.rpartition(".")
        by_role.setdefault(role, []).append(int(index))
    return ", ".join(
        f"{role}.{run}" for role, indices in by_role.items() for run in _runs(sorted(indices))
    )


def _runs(indices: list[int]) -> list[str]:
    first, found = indices[0], []
    for index, following in zip(indices, [*indices[1:], None], strict=True):
        if following != index + 1:
            found.append(f"{first}" if first == index else f"{first}-{index}")
            first = following
    return found
