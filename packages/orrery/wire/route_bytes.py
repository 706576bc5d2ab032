"""Decode the routed experts of an engine's answer into the column `routed_experts`.

- The field `routed_experts` of an answer of /inference/v1/generate is a base64 .npy file, uint8 or
  uint16 [rows, layers, top_k].
- The engine sends all layers. The column keeps only the layers with experts, which are the last.
- Each input token from the requested position on has a row. The last sampled token is never an
  input, so it has no row.
- The field may have tens of MB. A JSON decoder would look at every character. So `split` finds the
  field by its quotes, and it is decoded once, in pieces that fit the cache.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pybase64

from orrery.wire.routed_experts import RouteShape

PIECE = 1 << 20  # characters, a multiple of 4
_FIELD = re.compile(rb'"routed_experts"\s*:\s*"')
_HEADER_CHARACTERS = 1024  # more than the .npy header (version 1) of a 3-dimensional array


@dataclass(frozen=True)
class Routes:
    """Encoded routes of the tokens `start` to `start + num_rows`."""

    start: int
    shape: tuple[int, int, int]  # rows, layers, experts a token
    dtype: np.dtype
    _text: memoryview
    _header_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def decode_into(self, rows: np.ndarray) -> None:
        """Decode into `rows` [num_rows, layers with experts, top_k]. Raises ValueError if bad."""
        num_layers, row_bytes = rows.shape[1], int(np.prod(self.shape[1:])) * self.dtype.itemsize
        header, rest, done = self._header_bytes, np.empty(0, np.uint8), 0
        for first in range(0, len(self._text), PIECE):
            text = self._text[first : first + PIECE]
            piece = np.frombuffer(pybase64.b64decode(text, validate=True), np.uint8)
            header, piece = max(header - len(piece), 0), piece[header:]
            data = np.concatenate((rest, piece)) if len(rest) else piece
            n = len(data) // row_bytes
            decoded = data[: n * row_bytes].view(self.dtype).reshape(n, *self.shape[1:])
            rows[done : done + n] = decoded[:, -num_layers:]
            done, rest = done + n, data[n * row_bytes :]


def split(body: bytes, start: int) -> tuple[bytes, Routes | None]:
    """Return the body without the content of `routed_experts`, and the routes in it.

    The routes begin at token `start`. Raises ValueError if the field is not such a .npy file.
    """
    field = _FIELD.search(body)
    if field is None:
        return body, None
    first, last = field.end(), body.find(b'"', field.end())
    text = memoryview(body)[first:last]
    head = io.BytesIO(pybase64.b64decode(text[:_HEADER_CHARACTERS], validate=True))
    if np.lib.format.read_magic(head) != (1, 0):
        raise ValueError("routed_experts is a .npy file of an unknown version")
    shape, fortran, dtype = np.lib.format.read_array_header_1_0(head)
    num_bytes = 3 * (len(text) // 4) - bytes(text[-2:]).count(b"=")
    is_route = not fortran and len(shape) == 3 and dtype in (np.uint8, np.uint16)
    if not is_route or head.tell() + dtype.itemsize * np.prod(shape) != num_bytes:
        raise ValueError(
            f"routed_experts is {dtype} {shape} in {num_bytes} bytes, "
            "not uint8 or uint16 [rows, layers, experts a token]"
        )
    return body[:first] + body[last:], Routes(start, shape, dtype, text, head.tell())


def column(num_tokens: int, parts: Sequence[Routes], shape: RouteShape) -> np.ndarray:
    """Return the column of a whole conversation, [num_tokens, layers, top_k], from its parts.

    A later part overwrites an earlier part. Raises ValueError if a part does not fit the model or
    exceeds the conversation.
    """
    for part in parts:
        _, num_layers, top_k = part.shape
        end = part.start + part.num_rows
        fits = num_layers >= shape.num_layers and part.dtype.itemsize <= shape.dtype.itemsize
        if not fits or top_k != shape.top_k or end > num_tokens:
            raise ValueError(
                f"the engine sent routes for tokens {part.start} to {end}, {num_layers} layers, "
                f"{top_k} experts per token, as {part.dtype}; this conversation has {num_tokens} "
                f"tokens, and the model {shape.num_layers} layers with experts, {shape.top_k} "
                f"experts per token, as {shape.dtype}"
            )
    rows = np.empty((num_tokens, shape.num_layers, shape.top_k), shape.dtype)
    filled = 0
    for part in sorted(parts, key=lambda part: part.start):
        rows[filled : max(filled, part.start)] = shape.no_route
        filled = max(filled, part.start + part.num_rows)
    rows[filled:] = shape.no_route
    for part in parts:
        part.decode_into(rows[part.start : part.start + part.num_rows])
    return rows
