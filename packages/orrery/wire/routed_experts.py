"""Replay routing (R3): the trainer uses the experts that an engine chose.

- Row t of column `routed_experts` [tokens, layers, top_k] has the expert ids of input token t:
  uint8, or uint16 above 256 experts.
- In a missing route, such as the last token's, all ids are the dtype's largest value. The trainer's
  router then chooses experts. With 256 experts and top_k 1, expert 255 counts as missing.
- If `trainer.indexer_choice` replays choices of sparse-attention indexers, a row is uint8 [1, X]:
  the routes of all layers, then a bit mask of chosen keys per indexer.
"""

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest, Model

COLUMN = "routed_experts"
PIECE = 1 << 20  # base64 characters decoded at once, a multiple of 4
_FIELD = re.compile(rb'"routed_experts"\s*:\s*"')
_HEADER_CHARACTERS = 1024  # fits a 3-dimensional .npy header


class RouteShape(NamedTuple):
    num_layers: int  # layers with experts
    top_k: int
    num_experts: int
    num_dense_layers: int = 0  # leading layers without experts

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 256 else np.dtype("uint16")

    @property
    def no_route(self) -> int:
        return int(np.iinfo(self.dtype).max)


class CheckedRoutes(NamedTuple):
    """Routes that fit the model, in the trainer's dtypes.

    Ids are uint8 with 255 for missing, or, from 256 experts on, int16 with −1 for missing.
    """

    ids: np.ndarray  # [tokens, layers with experts, top_k]
    is_missing: np.ndarray  # bool [tokens], whether any layer lacks a route
    num_routed: int  # (token, layer) pairs with a route


def route_shape(model: Model) -> RouteShape | None:
    moe = model.moe
    if moe is None:
        return None
    dense = moe.num_dense_layers
    return RouteShape(model.num_layers - dense, moe.num_experts_per_token, moe.num_experts, dense)


def row_shape(manifest: Manifest) -> RouteShape | None:
    """Return the shape of the column's rows, or None without replayed routing."""
    if not manifest.transport.routed_experts:
        return None
    if not manifest.choice_bytes:
        return route_shape(manifest.model)
    return RouteShape(num_layers=1, top_k=manifest.route_bytes, num_experts=256)


def split_choices(
    rows: np.ndarray, shape: RouteShape, num_indexers: int, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """Split rows into routes [tokens, layers, top_k] and key masks u8 [tokens, indexers, bytes].

    Raise RunFailed if rows do not fit the model.
    """
    num_layers, item = shape.num_dense_layers + shape.num_layers, shape.dtype.itemsize
    num_bytes = num_layers * shape.top_k * item
    is_bytes = rows.dtype == np.uint8 and rows.shape[1:2] == (1,) and rows.ndim == 3
    if not is_bytes or rows.shape[2] <= num_bytes or (rows.shape[2] - num_bytes) % num_indexers:
        raise RunFailed(
            f"{what}: {COLUMN} is {rows.dtype} [tokens, {', '.join(map(str, rows.shape[1:]))}]; "
            f"replayed indexer choices need uint8 [tokens, 1, {num_bytes} + a multiple of "
            f"{num_indexers}]; check the engine's model"
        )
    routes = np.ascontiguousarray(rows[:, 0, :num_bytes]).view(shape.dtype)
    choices = rows[:, 0, num_bytes:].reshape(len(rows), num_indexers, -1)
    return routes.reshape(len(rows), num_layers, shape.top_k), choices


def without_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    value = np.array(shape.no_route, dtype=shape.dtype)
    return np.broadcast_to(value, (num_tokens, shape.num_layers, shape.top_k))


def check_routes(routes: np.ndarray, shape: RouteShape, what: str) -> CheckedRoutes:
    """Convert routes for the trainer. Raise RunFailed if they do not fit the model."""
    layers = {shape.num_layers, shape.num_layers + shape.num_dense_layers}
    fits = routes.dtype == shape.dtype and routes.ndim == 3 and routes.shape[1] in layers
    if not fits or routes.shape[2] != shape.top_k:
        raise RunFailed(
            f"{what}: {COLUMN} is {routes.dtype} [tokens, "
            f"{', '.join(map(str, routes.shape[1:]))}]; this model has {shape.num_experts} experts "
            f"in each of {shape.num_layers} layers, {shape.top_k} per token, and needs "
            f"{shape.dtype} [tokens, {shape.num_layers}, {shape.top_k}]; "
            "check the engine's model"
        )
    routes = routes[:, routes.shape[1] - shape.num_layers :]
    suspect = routes >= min(shape.num_experts, shape.no_route)
    suspect = suspect.reshape(len(routes), shape.num_layers * shape.top_k)
    tokens = np.flatnonzero(np.any(suspect, axis=1))
    is_missing_NL = (routes[tokens] == shape.no_route).all(axis=-1)
    bad_NL = (routes[tokens] >= shape.num_experts).any(axis=-1) & ~is_missing_NL
    if bad_NL.any():
        place, layer = (int(axis[0]) for axis in bad_NL.nonzero())
        raise RunFailed(
            f"{what}: {COLUMN} of token {tokens[place]} in layer {layer} is "
            f"{routes[tokens[place], layer].tolist()}; experts are 0 to {shape.num_experts - 1}, "
            f"and a missing route is {shape.no_route} in all {shape.top_k} slots"
        )
    ids = routes
    if shape.num_experts > 256:  # torch supports few operations on uint16
        ids = routes.view(np.int16)
    elif shape.num_experts == 256:
        ids = routes.astype(np.int16)
        at, layer_of = is_missing_NL.nonzero()
        ids[tokens[at], layer_of] = -1
    is_missing = np.zeros(len(routes), dtype=bool)
    is_missing[tokens] = is_missing_NL.any(axis=-1)
    num_routed = len(routes) * shape.num_layers - int(np.count_nonzero(is_missing_NL))
    return CheckedRoutes(ids, is_missing, num_routed)


@dataclass(frozen=True)
class Routes:
    """Routes of `num_rows` input tokens from token `start`, as a base64 .npy file."""

    start: int
    shape: tuple[int, int, int]  # rows, layers, experts per token
    dtype: np.dtype
    _text: memoryview
    _header_bytes: int

    @property
    def num_rows(self) -> int:
        return self.shape[0]

    def decode_into(self, rows: np.ndarray) -> None:
        """Fill `rows` [num_rows, layers with experts, top_k]. Raise ValueError if damaged."""
        import pybase64  # installed only in the orchestrator

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
    """Cut `routed_experts`, often tens of MB, out of an engine's JSON answer.

    Return the rest, and the routes or None. Raise ValueError if the field is damaged.
    """
    import pybase64

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
            "not uint8 or uint16 [rows, layers, experts per token]"
        )
    return body[:first] + body[last:], Routes(start, shape, dtype, text, head.tell())


def column(num_tokens: int, parts: Sequence[Routes], shape: RouteShape) -> np.ndarray:
    """Join routes of a conversation's answers into a column [num_tokens, layers, top_k].

    Later answers take precedence. Raise ValueError if routes do not fit.
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
