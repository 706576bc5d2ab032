"""Routes: the experts that an engine's routers chose, which the trainer's routers choose again (router replay, R3).

- The token column `routed_experts`, [tokens, layers, top_k]: row t holds what was chosen while token t was the input. Layers are those
  with experts, in the network's order; uint8 up to 255 experts, uint16 above.
- A token and layer all of whose slots hold the dtype's largest value has no route: a rollout's last token, which was never an input, and
  tokens of an engine that reports none. The trainer routes these by itself, and counts them.
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

    @property
    def dtype(self) -> np.dtype:
        return np.dtype("uint8") if self.num_experts <= 255 else np.dtype("uint16")

    @property
    def no_route(self) -> int:
        """What every slot of a row without a route holds."""
        return int(np.iinfo(self.dtype).max)


def route_shape(model: Model) -> RouteShape | None:
    """None for a model without experts."""
    moe = model.moe
    return None if moe is None else RouteShape(model.num_layers - moe.num_dense_layers, moe.num_experts_per_token, moe.num_experts)


def without_routes(num_tokens: int, shape: RouteShape) -> np.ndarray:
    """The column of tokens that have no routes: a read-only view of one number."""
    return np.broadcast_to(np.array(shape.no_route, dtype=shape.dtype), (num_tokens, shape.num_layers, shape.top_k))


def check_routes(routes: np.ndarray, shape: RouteShape, what: str) -> tuple[np.ndarray, int]:
    """(bool [tokens]: whether a layer's route is missing, number of routed tokens and layers); `what` says whose they are.

    Raises RunFailed for routes that are not this model's: dtype, layers, top_k, or an expert that it does not have.
    """
    expected = (shape.num_layers, shape.top_k)
    if routes.dtype != shape.dtype or routes.shape[1:] != expected:
        raise RunFailed(
            f"{what}: {COLUMN} is {routes.dtype} [tokens, {', '.join(map(str, routes.shape[1:]))}]; "
            f"this model has {shape.num_experts} experts in each of {shape.num_layers} layers, {shape.top_k} a token, "
            f"and wants {shape.dtype} [tokens, {expected[0]}, {expected[1]}]; does the engine serve another model?"
        )
    beyond_T = np.any((routes >= shape.num_experts).reshape(len(routes), shape.num_layers * shape.top_k), axis=1)
    tokens = np.flatnonzero(beyond_T)
    beyond_NLK = routes[tokens] >= shape.num_experts
    is_missing_NL = (routes[tokens] == shape.no_route).all(axis=-1)
    if (bad := beyond_NLK.any(axis=-1) & ~is_missing_NL).any():
        token, layer = (int(axis[0]) for axis in bad.nonzero())
        row = routes[tokens[token], layer]
        raise RunFailed(
            f"{what}: {COLUMN} of token {tokens[token]} in layer {layer} is {row.tolist()}; experts are 0 to {shape.num_experts - 1}, "
            f"and a route that is missing is {shape.no_route} in all {shape.top_k} slots"
        )
    return beyond_T, len(routes) * shape.num_layers - int(np.count_nonzero(is_missing_NL))
