"""torch.compile, one block at a time: blocks are alike, so one compilation serves all of a kind.

- A block is one graph without a break (`fullgraph`); its attention and its grouped products are operators of `orrery.kernels`.
- So is a block of transformers, or it is refused when it is first compiled (`told`): torch would run one that it cannot compile as it is.
- Where ranks exchange tokens or keys inside a block, the exchange stays outside of the graph, and a block is what stands around it.
- The first length of a micro-batch is compiled as it is, the second for every length to come.
- A graph each for blocks of other kinds, with and without gradients, with and without routes to replay, for a micro-batch without samples:
  more than the eight that torch allows, beyond which a whole block would end the run, and any other be slow without a word.
"""

import textwrap
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Mesh, Model, Trainer
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

GRAPHS = 64  # of one kind of function at most; each is compiled once, and found by its guards


def is_whole(mesh: Mesh) -> bool:
    """Whether a block computes all by itself, so that it can be one graph."""
    return mesh.cp == mesh.ep == 1


def is_one_graph(trainer: Trainer, model: Model) -> bool:
    """Whether a block is one graph of our own code, of which is known what it keeps."""
    return trainer.compile and is_whole(trainer.mesh) and model.family != "hugging_face"


def apply(policy: Policy, world: World, trainer: Trainer) -> None:
    if trainer.compile:
        from torch._dynamo import (
            config,
        )  # here: to import it takes a while, and runs on CPUs hardly ever need it

        config.recompile_limit = max(config.recompile_limit, GRAPHS)
        for block in policy.network.layers:
            block.forward = torch.compile(block.forward, fullgraph=is_whole(trainer.mesh))


@contextmanager
def explain_compile_error(model: Model) -> Iterator[None]:
    """Around forward and backward passes: what torch's compiler raises of a network of transformers becomes OrreryError, a sentence."""
    try:
        yield
    except Exception as error:
        from torch._dynamo.exc import (
            FailOnRecompileLimitHit,
            TorchDynamoException,
        )  # here: as above

        is_compilers = isinstance(
            error, TorchDynamoException | FailOnRecompileLimitHit
        ) and "out of memory" not in str(error)
        if model.hf_config is None or not is_compilers:
            raise
        raise OrreryError(
            f"trainer.compile true: torch does not compile blocks of model.hf_config.model_type {model.hf_config['model_type']!r} whole "
            f"({textwrap.shorten(str(error), 240)}); set trainer.compile to false"
        ) from error
