"""Routes: the experts that an engine's routers chose, which the trainer's routers choose again (router replay, R3).

- The token column `routed_experts`, [tokens, layers, top_k]: row t holds what was chosen while token t was the input. uint8 up to 256
  experts, uint16 above. Layers are those with experts, in the network's order, or all of it: engines report dense layers too.
- A token and layer all of whose slots hold the dtype's largest value has no route: a rollout's last token, which was never an input, and
  tokens of an engine that reports none. The trainer routes these by itself, and counts them. Chosen experts are distinct, so no choice
  looks like that (but expert 255 of 256 where a token has one expert, which is then chosen afresh).
- In a batch either all documents have the column or none has: `without_routes` stands for what an engine did not say, and takes no memory.
"""

from typing import NamedTuple

import numpy as np

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Model

COLUMN = "routed_experts"


class RouteShape(NamedTuple):
    """What a model's routes look like."""

    num_layers: int  # with experts
    top_k: int
    num_experts: int
    num_dense_layers: int = 0  # before them

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 256 else np.dtype("uint16")

    @property
    def no_route(self) -> int:
        """What every slot of a row without a route holds."""
        return int(np.iinfo(self.dtype).max)


class Checked(NamedTuple):
    """Routes that are the model's."""

    ids: np.ndarray  # uint8 or int16 [tokens, layers with experts, top_k]; a view where it can be. No route: no expert's id in any slot
    is_missing: np.ndarray  # bool [tokens]: in some layer
    num_routed: int  # pairs of a token and a layer with a route


def route_shape(model: Model) -> RouteShape | None:
    """None for a model without experts."""
    moe = model.moe
    if moe is None:
        return None
    return RouteShape(
        model.num_layers - moe.num_dense_layers,
        moe.num_experts_per_token,
        moe.num_experts,
        moe.num_dense_layers,
    )


def without_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    """The column of tokens that have no routes: a read-only view of one number."""
    return np.broadcast_to(
        np.array(shape.no_route, dtype=shape.dtype), (num_tokens, shape.num_layers, shape.top_k)
    )


def check_routes(routes: np.ndarray, shape: RouteShape, what: str) -> Checked:
    """The column as the network takes it; `what` says whose it is.

    Raises RunFailed for routes that are not this model's: dtype, layers, top_k, or an expert that it does not have.
    """
    layers = {shape.num_layers, shape.num_layers + shape.num_dense_layers}
    if (
        routes.dtype != shape.dtype
        or routes.ndim != 3
        or routes.shape[1] not in layers
        or routes.shape[2] != shape.top_k
    ):
        raise RunFailed(
            f"{what}: {COLUMN} is {routes.dtype} [tokens, {', '.join(map(str, routes.shape[1:]))}]; "
            f"this model has {shape.num_experts} experts in each of {shape.num_layers} layers, {shape.top_k} a token, "
            f"and wants {shape.dtype} [tokens, {shape.num_layers}, {shape.top_k}]; does the engine serve another model?"
        )
    routes = routes[:, routes.shape[1] - shape.num_layers :]
    suspect = (routes >= min(shape.num_experts, shape.no_route)).reshape(
        len(routes), shape.num_layers * shape.top_k
    )
    tokens = np.flatnonzero(
        np.any(suspect, axis=1)
    )  # what is looked at closely: few, or all where an expert has the number 255
    is_missing_NL = (routes[tokens] == shape.no_route).all(axis=-1)
    bad_NL = (routes[tokens] >= shape.num_experts).any(axis=-1) & ~is_missing_NL
    if bad_NL.any():
        place, layer = (int(axis[0]) for axis in bad_NL.nonzero())
        raise RunFailed(
            f"{what}: {COLUMN} of token {tokens[place]} in layer {layer} is {routes[tokens[place], layer].tolist()}; experts are 0 to "
            f"{shape.num_experts - 1}, and a route that is missing is {shape.no_route} in all {shape.top_k} slots"
        )
    ids = routes
    if shape.num_experts > 256:  # few operations of torch take unsigned integers of two bytes
        ids = routes.view(np.int16)
    elif shape.num_experts == 256:
        ids = routes.astype(np.int16)
        at, layer_of = is_missing_NL.nonzero()
        ids[tokens[at], layer_of] = -1
    is_missing = np.zeros(len(routes), dtype=bool)
    is_missing[tokens] = is_missing_NL.any(axis=-1)
    return Checked(
        ids, is_missing, len(routes) * shape.num_layers - int(np.count_nonzero(is_missing_NL))
    )
