"""Decodes the routed experts of an engine's answer into the column `routed_experts`.

- The field `routed_experts` of an answer of /inference/v1/generate is a base64 .npy file, uint8 or
  uint16 [rows, layers, top_k].
- The engine sends all hidden layers. The column has only the last, the layers with experts.
- Each input token from the requested position on has a row. Other tokens, such as the last sampled,
  have no route.
- The text may have tens of MB. A JSON decoder would look at every character, so it is found by its
  quotes and decoded once, in pieces that fit the cache.
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
_HEADER_CHARACTERS = 1024  # exceeds a three-dimensional .npy header of version 1


@dataclass(frozen=True)
class Routes:
    """Encoded routes of the tokens `start` to `start + num_rows`."""

    start: int
    shape: tuple[int, int, int]  # rows, layers, experts a token
    dtype: np.dtype
    _text: memoryview  # the whole .npy file
    _header_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def decode_into(self, rows: np.ndarray) -> None:
        """Fill `rows`, [num_rows, layers with experts, top_k]. Raises ValueError if damaged."""
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
    """Return the body with `routed_experts` emptied, and its routes (of positions from `start`).

    Raises ValueError if the field holds other data.
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
    """Return the column of a whole conversation, [num_tokens, layers, top_k].

    Where parts overlap, the later wins. Raises ValueError if a part is of another model or too
    long.
    """
    for part in parts:
        _, num_layers, top_k = part.shape
        end = part.start + part.num_rows
        fits = num_layers >= shape.num_layers and part.dtype.itemsize <= shape.dtype.itemsize
        if not fits or top_k != shape.top_k or end > num_tokens:
            raise ValueError(
                f"routes of tokens {part.start} to {end}, {num_layers} layers, {top_k} experts a "
                f"token in {part.dtype} are not of {num_tokens} tokens, {shape.num_layers} layers, "
                f"{shape.top_k} experts a token in {shape.dtype}"
            )
    rows = np.empty((num_tokens, shape.num_layers, shape.top_k), shape.dtype)
    filled = 0  # rows before this are set, here or by a part
    for part in sorted(parts, key=lambda part: part.start):
        rows[filled : max(filled, part.start)] = shape.no_route
        filled = max(filled, part.start + part.num_rows)
    rows[filled:] = shape.no_route
    for part in parts:
        part.decode_into(rows[part.start : part.start + part.num_rows])
    return rows
