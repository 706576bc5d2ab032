"""Exchange messages with `orrery.trainer.verifier` over stdin and stdout.

A frame is a length in bytes (u32, little endian) and a msgpack message.
"""

import struct
from typing import BinaryIO, TypeVar

import msgspec
import numpy as np

from orrery.manifest.errors import RunFailed

T = TypeVar("T")
LENGTH = struct.Struct("<I")
MODULE = "orrery.trainer.verifier"


class Recompute(msgspec.Struct, frozen=True):
    """Request log-probs of `token_ids` i32 [n] after `prompt` i32 [p], with weights in `folder`."""

    folder: str
    prompt: bytes
    token_ids: bytes
    temperature: float


class Recomputed(msgspec.Struct, frozen=True):
    """Each token's log-prob, and the entropy and variance of log p at its position.

    Fields are f32 [n], or empty if the weights were removed.
    """

    logprob: bytes = b""
    entropy: bytes = b""
    variance: bytes = b""

    def arrays(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        logprob, entropy, variance = (
            np.frombuffer(each, np.float32) for each in (self.logprob, self.entropy, self.variance)
        )
        return logprob, entropy, variance


def frame(message: msgspec.Struct) -> bytes:
    data = msgspec.msgpack.encode(message)
    return LENGTH.pack(len(data)) + data


def read_frame(stream: BinaryIO, kind: type[T]) -> T | None:
    """Return the next message, or None at the end. Raise RunFailed for damaged data."""
    head = stream.read(LENGTH.size)
    if not head:
        return None
    data = stream.read(LENGTH.unpack(head)[0]) if len(head) == LENGTH.size else b""
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise RunFailed(f"verifier: a message was cut off or is malformed ({error})") from error
