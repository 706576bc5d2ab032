"""Routes as an engine sends them: base64 in an answer, decoded into the column that `orrery.transport.routed_experts` describes.

- In: the body of an answer of /inference/v1/generate, whose `routed_experts` is a base64 .npy file, uint8 or uint16 [rows, layers, top_k].
- Out: the column `routed_experts`: decoded once, piece by piece, into the place where it stays. The engine sends all hidden layers, the
  column has those with experts, which come last.
- Nobody looks at a number: what the experts are is the engine's and the trainer's matter.
- An answer has a row for each token that was an input, from the position that was asked for: the last sampled token has none.
- A token that no answer speaks of has no route, in the column's own way of saying so.

A rollout of 131,072 tokens, 48 layers and 8 experts a token has 50 MB of them, so the text is found in the body by its quotes (a JSON
decoder would look at every character) and decoded a piece at a time while the piece is in the processor's cache.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pybase64

from orrery.transport.routed_experts import RouteShape

PIECE = 1 << 20  # characters, a multiple of 4
_FIELD = re.compile(rb'"routed_experts"\s*:\s*"')
_HEADER_CHARACTERS = 1024  # more than a .npy header of version 1 with three dimensions has


@dataclass(frozen=True)
class Routes:
    """Routes of the tokens `start` to `start + num_rows`, not decoded yet."""

    start: int
    shape: tuple[int, int, int]  # rows, layers, experts a token
    dtype: np.dtype
    _text: memoryview  # of the whole .npy file
    _header_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def decode_into(self, rows: np.ndarray) -> None:
        """Fill `rows`, [num_rows, layers with experts, experts a token]. Raises ValueError where the text is damaged."""
        num_layers, row_bytes = rows.shape[1], int(np.prod(self.shape[1:])) * self.dtype.itemsize
        header, rest, done = self._header_bytes, np.empty(0, np.uint8), 0
        for first in range(0, len(self._text), PIECE):
            piece = np.frombuffer(
                pybase64.b64decode(self._text[first : first + PIECE], validate=True), np.uint8
            )
            header, piece = max(header - len(piece), 0), piece[header:]
            data = np.concatenate((rest, piece)) if len(rest) else piece
            n = len(data) // row_bytes
            rows[done : done + n] = (
                data[: n * row_bytes].view(self.dtype).reshape(n, *self.shape[1:])[:, -num_layers:]
            )
            done, rest = done + n, data[n * row_bytes :]


def split(body: bytes, start: int) -> tuple[bytes, Routes | None]:
    """The body with `routed_experts` empty, and the routes (of positions from `start`) that stood there; ValueError for other data."""
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
    if (
        fortran
        or len(shape) != 3
        or dtype not in (np.uint8, np.uint16)
        or head.tell() + dtype.itemsize * np.prod(shape) != num_bytes
    ):
        raise ValueError(
            f"routed_experts is {dtype} {shape} in {num_bytes} bytes, not uint8 or uint16 [rows, layers, experts a token]"
        )
    return body[:first] + body[last:], Routes(start, shape, dtype, text, head.tell())


def column(num_tokens: int, parts: Sequence[Routes], shape: RouteShape) -> np.ndarray:
    """The column of a whole conversation, [num_tokens, layers, experts a token]; where two parts have a token, the later one's stands.

    Raises ValueError where the parts are not of such a model, or reach beyond the tokens.
    """
    for part in parts:
        _, num_layers, top_k = part.shape
        end = part.start + part.num_rows
        if (
            num_layers < shape.num_layers
            or top_k != shape.top_k
            or part.dtype.itemsize > shape.dtype.itemsize
            or end > num_tokens
        ):
            raise ValueError(
                f"routes of tokens {part.start} to {end}, {num_layers} layers, {top_k} experts a token in {part.dtype} are not of "
                f"{num_tokens} tokens, {shape.num_layers} layers, {shape.top_k} experts a token in {shape.dtype}"
            )
    rows = np.empty((num_tokens, shape.num_layers, shape.top_k), shape.dtype)
    told = 0  # tokens before this have a route or none
    for part in sorted(parts, key=lambda part: part.start):
        rows[told : max(told, part.start)] = shape.no_route
        told = max(told, part.start + part.num_rows)
    rows[told:] = shape.no_route
    for part in parts:
        part.decode_into(rows[part.start : part.start + part.num_rows])
    return rows
