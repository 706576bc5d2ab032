"""Router replay (R3): the experts that an engine's routers chose, for the trainer to choose again.

- Row t of the token column `routed_experts`, [tokens, layers, top_k], is the choice with token t
  as the input. uint8 up to 256 experts, uint16 above. Layers are in the network's order, with or
  without the dense layers that engines report too.
- If all slots of a token and layer hold the dtype's largest value, there is no route: for the
  last token, never an input, and from engines that report none. The trainer routes and counts
  these. Real choices are distinct, so only expert 255 of 256 with top_k 1 looks so, and is chosen
  afresh.
- All documents of a batch have the column or none has. `without_routes` takes no memory.
"""

from typing import NamedTuple

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Model

COLUMN = "routed_experts"


class RouteShape(NamedTuple):
    num_layers: int  # with experts
    top_k: int
    num_experts: int
    num_dense_layers: int = 0  # before them

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 256 else np.dtype("uint16")

    @property
    def no_route(self) -> int:
        """The value of every slot without a route."""
        return int(np.iinfo(self.dtype).max)


class CheckedRoutes(NamedTuple):
    """Routes that fit the model. A row without a route has no expert's id in any slot."""

    # uint8 or int16 [tokens, layers with experts, top_k], a view if possible.
    ids: np.ndarray
    is_missing: np.ndarray  # bool [tokens], in some layer
    num_routed: int  # pairs of a token and a layer with a route


def route_shape(model: Model) -> RouteShape | None:
    """Return the shape of the model's routes, or None without experts."""
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
    """Return the column as the network takes it. `what` names it in errors.

    Raises RunFailed if the dtype, layers, top_k or an id do not fit the model.
    """
    layers = {shape.num_layers, shape.num_layers + shape.num_dense_layers}
    fits = routes.dtype == shape.dtype and routes.ndim == 3 and routes.shape[1] in layers
    if not fits or routes.shape[2] != shape.top_k:
        raise RunFailed(
            f"{what}: {COLUMN} is {routes.dtype} [tokens, "
            f"{', '.join(map(str, routes.shape[1:]))}]; this model has {shape.num_experts} experts "
            f"in each of {shape.num_layers} layers, {shape.top_k} a token, and wants "
            f"{shape.dtype} [tokens, {shape.num_layers}, {shape.top_k}]; "
            "does the engine serve another model?"
        )
    routes = routes[:, routes.shape[1] - shape.num_layers :]
    suspect = routes >= min(shape.num_experts, shape.no_route)
    suspect = suspect.reshape(len(routes), shape.num_layers * shape.top_k)
    tokens = np.flatnonzero(np.any(suspect, axis=1))  # few, unless an expert has the number 255
    is_missing_NL = (routes[tokens] == shape.no_route).all(axis=-1)
    bad_NL = (routes[tokens] >= shape.num_experts).any(axis=-1) & ~is_missing_NL
    if bad_NL.any():
        place, layer = (int(axis[0]) for axis in bad_NL.nonzero())
        raise RunFailed(
            f"{what}: {COLUMN} of token {tokens[place]} in layer {layer} is "
            f"{routes[tokens[place], layer].tolist()}; experts are 0 to {shape.num_experts - 1}, "
            f"and a route that is missing is {shape.no_route} in all {shape.top_k} slots"
        )
    ids = routes
    if shape.num_experts > 256:  # torch has few operations on uint16
        ids = routes.view(np.int16)
    elif shape.num_experts == 256:
        ids = routes.astype(np.int16)
        at, layer_of = is_missing_NL.nonzero()
        ids[tokens[at], layer_of] = -1
    is_missing = np.zeros(len(routes), dtype=bool)
    is_missing[tokens] = is_missing_NL.any(axis=-1)
    num_routed = len(routes) * shape.num_layers - int(np.count_nonzero(is_missing_NL))
    return CheckedRoutes(ids, is_missing, num_routed)
