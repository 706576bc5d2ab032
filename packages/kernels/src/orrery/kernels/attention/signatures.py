"""Whether torch's private operators are the ones that this room was written against."""

import logging
from functools import cache

import torch

log = logging.getLogger("orrery.kernels.attention")


def takes(signatures: dict[str, str]) -> bool:
    """Whether `torch.ops.aten` has these operators with these parameters, in this order; a missing or changed one is logged once.

    Parameters behind the listed ones do not matter: they have defaults, or the call fails loudly.
    """
    return all(_takes(name, tuple(parameters.split())) for name, parameters in signatures.items())


@cache
def _takes(name: str, expected: tuple[str, ...]) -> bool:
    operator = getattr(torch.ops.aten, name, None)
    if operator is None:
        log.warning(
            "aten::%s is not in torch %s: another form of attention runs in its place",
            name,
            torch.__version__,
        )
        return False
    found = tuple(argument.name for argument in operator.default._schema.arguments)
    if found[: len(expected)] != expected:
        log.warning(
            "aten::%s of torch %s takes (%s) and not (%s): another form of attention runs in its place",
            name,
            torch.__version__,
            ", ".join(found),
            ", ".join(expected),
        )
        return False
    return True
