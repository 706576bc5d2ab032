"""torch.compile, one block at a time: equal blocks share one compilation.

- A block is one graph (`fullgraph`), unless ranks exchange tokens or keys inside it.
- The first micro-batch length is compiled as a constant, the second as a symbol.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Model, Trainer
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

# torch's 8 a function are too few for all kinds of blocks, with and without gradients or routes.
MAX_GRAPHS = 64


def is_without_exchange(mesh: Mesh) -> bool:
    return mesh.cp == mesh.ep == 1


def is_one_graph(trainer: Trainer, model: Model) -> bool:
    """Return whether a block is one graph of our own code, with known saved tensors."""
    return trainer.compile and is_without_exchange(trainer.mesh) and model.family != "hugging_face"


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if not trainer.compile:
        return
    from torch._dynamo import config  # slow to import, and rarely needed on a CPU

    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    for block in policy.network.layers:
        block.forward = torch.compile(block.forward, fullgraph=is_without_exchange(trainer.mesh))


@contextmanager
def explain_compile_error(model: Model) -> Iterator[None]:
    """Raise OrreryError if torch cannot compile a transformers block in this context."""
    try:
        yield
    except Exception as error:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        is_from_compiler = isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)
        if model.hf_config is None or not is_from_compiler or "out of memory" in str(error):
            raise
        kind = model.hf_config["model_type"]
        raise OrreryError(
            "trainer.compile true: torch does not compile blocks of "
            f"model.hf_config.model_type {kind!r} whole "
            f"({textwrap.shorten(str(error), 240)}); set trainer.compile to false"
        ) from error
