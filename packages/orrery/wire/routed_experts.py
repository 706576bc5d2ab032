"""Router replay (R3): the trainer uses the experts that an engine's routers chose.

- Row t of the token column `routed_experts`, [tokens, layers, top_k], has the experts for input
  token t, as uint8 up to 256 experts, uint16 above. Layers are in the network's order, perhaps with
  dense layers.
- A token without a route in a layer has the dtype's largest value in all slots: the last token, and
  all tokens of an engine that reports no routes. The trainer's router chooses for these tokens, and
  counts them. With 256 experts and top_k 1 it also replaces expert 255.
- Either all documents of a batch have the column, or none. `without_routes` takes no memory.
"""

from typing import NamedTuple

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Model

COLUMN = "routed_experts"


class RouteShape(NamedTuple):
    num_layers: int  # layers with experts
    top_k: int
    num_experts: int
    num_dense_layers: int = 0  # layers without experts, before the others

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 256 else np.dtype("uint16")

    @property
    def no_route(self) -> int:
        return int(np.iinfo(self.dtype).max)


class CheckedRoutes(NamedTuple):
    """Routes that fit the model. Slots without a route hold a number that is no expert's id."""

    # uint8 or int16 [tokens, layers with experts, top_k], a view if possible.
    ids: np.ndarray
    is_missing: np.ndarray  # bool [tokens]: no route in at least one layer
    num_routed: int  # number of (token, layer) pairs with a route


def route_shape(model: Model) -> RouteShape | None:
    """Return the shape of the model's routes, or None if the model has no experts."""
    moe = model.moe
    if moe is None:
        return None
    dense = moe.num_dense_layers
    return RouteShape(model.num_layers - dense, moe.num_experts_per_token, moe.num_experts, dense)


def without_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    """Return the column of tokens without routes: a read-only view of one number."""
    value = np.array(shape.no_route, dtype=shape.dtype)
    return np.broadcast_to(value, (num_tokens, shape.num_layers, shape.top_k))


def check_routes(routes: np.ndarray, shape: RouteShape, what: str) -> CheckedRoutes:
    """Return the column in the form that the network takes. `what` names it in errors.

    Raises RunFailed if the dtype, layers, top_k or an id do not fit the model.
    """
    layers = {shape.num_layers, shape.num_layers + shape.num_dense_layers}
    fits = routes.dtype == shape.dtype and routes.ndim == 3 and routes.shape[1] in layers
    if not fits or routes.shape[2] != shape.top_k:
        raise RunFailed(
            f"{what}: {COLUMN} is {routes.dtype} [tokens, "
            f"{', '.join(map(str, routes.shape[1:]))}]; this model has {shape.num_experts} experts "
            f"in each of {shape.num_layers} layers, {shape.top_k} per token, and needs "
            f"{shape.dtype} [tokens, {shape.num_layers}, {shape.top_k}]; "
            "does the engine serve another model?"
        )
    routes = routes[:, routes.shape[1] - shape.num_layers :]
    suspect = routes >= min(shape.num_experts, shape.no_route)
    suspect = suspect.reshape(len(routes), shape.num_layers * shape.top_k)
    tokens = np.flatnonzero(np.any(suspect, axis=1))  # few tokens, unless expert 255 exists
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
