"""List the codecs for exchanged weight changes."""

from orrery.elastic.codecs.base import Codec
from orrery.elastic.codecs.formats import (
    Float32Codec,
    Int4BlockCodec,
    Int8BlockCodec,
    Int8CodebookCodec,
    TopK2BitCodec,
)
from orrery.elastic.types import ElasticError

CODECS: dict[str, type[Codec]] = {
    each.kind: each
    for each in (Float32Codec, Int8BlockCodec, Int8CodebookCodec, Int4BlockCodec, TopK2BitCodec)
}

__all__ = ["CODECS", "Codec", "codec"]


def codec(kind: str, num_threads: int = 1) -> Codec:
    if kind not in CODECS:
        raise ElasticError(
            f"trainer.elastic.codec: {kind!r} is unknown to this version; choose from "
            f"{', '.join(CODECS)}, or install the run's version of orrery"
        )
    return CODECS[kind](num_threads)
