"""Run transformer blocks under activation checkpointing and torch.compile.

- Checkpointed blocks keep their input and, with `selective`, the results of named operations.
- A compiled block is one graph with the checkpoint inside. If ranks exchange tokens or keys in
  the block, the checkpoint wraps several graphs.
- `recompute_modules` runs named modules under torch's `checkpoint`, which keeps only inputs. Hooks
  stop later operations from saving the modules' results. Blocks of one graph need no hooks.
"""

import textwrap
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orrery.kernels import (  # noqa: F401  (registers the operators named below)
    attention,
    expert_rows,
    grouped_matmul,
    sparse_index,
    sparse_mla,
)
from orrery.kernels.dense_products import linear
from orrery.kernels.fp8 import products  # noqa: F401
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model, Trainer
from orrery.models.causal_lm import TransformerBlock
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import Attention, Experts, Router
from orrery.models.lora import AdaptedLinear
from orrery.trainer.policy import Policy

SCALED_DOT_PRODUCT = (
    "flash_attention",
    "flash_attention_for_cpu",
    "efficient_attention",
    "cudnn_attention",
)
# Block kinds, with or without gradients and routes, need more graphs than torch's limit of 8.
MAX_GRAPHS = 64


def apply(policy: Policy, trainer: Trainer) -> None:
    if trainer.mesh.has_exchange:
        _name_products(policy, trainer)
        _compile(policy, trainer)
        _checkpoint(policy, trainer)
    else:
        _checkpoint(policy, trainer)
        _compile(policy, trainer)


def _name_products(policy: Policy, trainer: Trainer) -> None:
    """Make linear layers call an operator that `_Run` recognises in compiled blocks."""
    if not (trainer.compile and "projections" in trainer.kept):
        return
    for block in policy.network.layers:
        for module in block.modules():
            if type(module) is nn.Linear:
                module.forward = partial(_linear, module)
            elif isinstance(module, AdaptedLinear):
                module.product = linear


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    return linear(x, module.weight, module.bias)


def _compile(policy: Policy, trainer: Trainer) -> None:
    if not trainer.compile:
        return
    from torch._dynamo import config, disable

    config.recompile_limit = max(config.recompile_limit, MAX_GRAPHS)
    for block in policy.network.layers:
        for module in block.modules():
            for name in getattr(module, "eager", ()):  # methods with collectives stay eager
                setattr(module, name, disable(getattr(module, name)))
        block.forward = torch.compile(block.forward, fullgraph=not trainer.mesh.has_exchange)


@contextmanager
def explain_compile_error(model: Model) -> Iterator[None]:
    """Raise OrreryError if torch cannot compile a block of a transformers model."""
    try:
        yield
    except Exception as error:
        from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException

        is_from_compiler = isinstance(error, TorchDynamoException | FailOnRecompileLimitHit)
        if model.hf_config is None or not is_from_compiler or "out of memory" in str(error):
            raise
        kind = model.hf_config["model_type"]
        raise OrreryError(
            "trainer.compile true: torch cannot compile whole blocks of "
            f"model.hf_config.model_type {kind!r} "
            f"({textwrap.shorten(str(error), 240)}); set trainer.compile to false"
        ) from error


def _checkpoint(policy: Policy, trainer: Trainer) -> None:
    if not trainer.memory.recomputes_blocks:
        return
    checkpoints = trainer.memory.checkpoints
    options = checkpoint_options(trainer, policy.network.config)
    has_graphs_inside = trainer.compile and trainer.mesh.has_exchange
    for index, block in enumerate(policy.network.layers):
        if not checkpoints(index):
            continue
        run = block.forward
        if has_graphs_inside:
            run = partial(_call_without_views, run)
        # Replace only `forward`, so that FSDP's hooks stay outside the recomputation.
        block.forward = partial(checkpoint, run, use_reentrant=False, **options)


def checkpoint_options(trainer: Trainer, model: Model) -> dict[str, Any]:
    """Return arguments of torch's `checkpoint` that keep results of chosen operations.

    If a block is one graph, they also stop torch 2.11 from saving experts' activations.
    """
    kept = frozenset(operation for name in trainer.kept for operation in _operations(name))
    if model.mla is not None:  # keep chosen keys, because recomputation could choose others
        kept |= {torch.ops.orrery.select_keys.default}
    if trainer.compile and not trainer.mesh.has_exchange:
        if kept or trainer.is_one_graph(model):
            return {"context_fn": partial(create_selective_checkpoint_contexts, keeping(kept))}
        return {}
    if kept or trainer.mesh.ep > 1:
        called = _called_by_graphs(trainer, model)
        return {"context_fn": partial(recomputation_contexts, kept, called)}
    return {}


def _called_by_graphs(trainer: Trainer, model: Model) -> frozenset[Any]:
    if not trainer.compile:
        return frozenset()
    context_ranks = trainer.mesh.cp if model.mla is None else 1
    ranks = {"attention": context_ranks, "projections": 1, "experts": trainer.mesh.ep}
    names = [name for name, count in ranks.items() if count == 1]
    return frozenset(operation for name in names for operation in _operations(name))


def keeping(operations: frozenset[Any]) -> Callable[..., CheckpointPolicy]:
    def policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operation in operations:
            return CheckpointPolicy.MUST_SAVE
        return CheckpointPolicy.PREFER_RECOMPUTE

    return policy


def _call_without_views(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    def convert(value: Any) -> Any:
        return without_view(value) if isinstance(value, Tensor) else value

    return forward(*map(convert, args), **{name: convert(arg) for name, arg in kwargs.items()})


def without_view(x: Tensor) -> Tensor:
    """Return x as a non-view, because torch would compile another graph for views."""
    return _WithoutView.apply(x) if x.requires_grad else x.detach()


class _WithoutView(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def _operations(name: str) -> list[Any]:
    aten, orrery = torch.ops.aten, torch.ops.orrery
    match name:
        case "attention":
            theirs = (getattr(aten, f"_scaled_dot_product_{kind}") for kind in SCALED_DOT_PRODUCT)
            names = ("varlen_attention_forward", "sparse_mla", "select_keys")
            ours = (getattr(orrery, name).default for name in names)
            return [*ours, *(operation.default for operation in theirs)]
        case "projections":
            linears = (orrery.linear, orrery.wide_linear, orrery.fp8_linear)
            products = (aten.mm, aten.addmm, aten.linear, *linears)
            return [product.default for product in products]
        case "experts":
            names = ("grouped_matmul", "adapted_grouped_matmul", "fp8_grouped")
            return [getattr(orrery, name).default for name in names]
    raise AssertionError(f"blocks.py lacks the schema's option {name!r}")


Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def _identity(value: Tensor) -> Tensor:
    return value


_current: ContextVar["_Run | None"] = ContextVar("recomputation", default=None)
_hooks: ContextVar[tuple[Pack, Unpack]] = ContextVar("hooks", default=(_identity, _identity))


def recomputation_contexts(
    operations: Collection[Any] = (), compiled: Collection[Any] = ()
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the forward and recomputation contexts of torch's `checkpoint`.

    Keep results of `operations` without torch's selective checkpointing, because FSDP's hooks
    break it. Clone results of `compiled` operations, because graphs may overwrite them.
    """
    answers: list[Any] = []
    results: dict[Any, deque[Any]] = defaultdict(deque)
    first, again = (
        _Run(answers, is_recomputation, operations, compiled, results)
        for is_recomputation in (False, True)
    )
    return first, again


@contextmanager
def store_results_with(pack: Pack, unpack: Unpack) -> Iterator[None]:
    token = _hooks.set((pack, unpack))
    try:
        yield
    finally:
        _hooks.reset(token)


def storage_of_results() -> tuple[Pack, Unpack]:
    return _hooks.get()


def keep(answer: Any) -> Any:
    """Return `answer`. In a forward pass, also store it for `recall` in recomputation."""
    run = _current.get()
    if run is not None and not run.is_recomputation:
        run.answers.append(answer)
    return answer


def recall() -> Any:
    run = _current.get()
    if run is None or not run.is_recomputation:
        return None
    run.position += 1
    return run.answers[run.position - 1]


class _Run(TorchDispatchMode):
    def __init__(
        self,
        answers: list[Any],
        is_recomputation: bool,
        operations: Collection[Any],
        compiled: Collection[Any],
        results: dict[Any, deque[Any]],
    ) -> None:
        super().__init__()
        self.answers, self.is_recomputation, self.position = answers, is_recomputation, 0
        self._operations, self._compiled, self._results = operations, compiled, results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def __enter__(self) -> Self:
        self.position = 0
        self._token = _current.set(self)
        return super().__enter__() if self._operations else self

    def __exit__(self, *error: Any) -> None:
        if self._operations:
            super().__exit__(*error)
        _current.reset(self._token)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function not in self._operations:
            return function(*args, **(kwargs or {}))
        if self.is_recomputation:
            return tree_map_only(partial, lambda kept: kept(), self._results[function].popleft())
        result = function(*args, **(kwargs or {}))
        pack, unpack = _hooks.get()

        def store(value: Tensor) -> partial:
            value = value.detach()
            return partial(unpack, pack(value.clone() if function in self._compiled else value))

        self._results[function].append(tree_map_only(Tensor, store, result))
        return result


def recompute_modules(policy: Policy, trainer: Trainer) -> None:
    is_one_graph = trainer.compile and not trainer.mesh.has_exchange
    for index, block in enumerate(policy.network.layers):
        names = trainer.memory.recomputed_modules(index)
        if not names:
            continue
        calls = _Calls(block.forward)
        for name, module, method in _methods(block):
            if name in names:
                setattr(module, method, partial(calls.run, getattr(module, method)))
        if not is_one_graph:
            block.forward = calls.run_block


def _methods(block: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    for module in block.modules():
        match module:
            case TransformerBlock():
                yield "norms", module.input_layernorm, "forward"
                yield "norms", module.post_attention_layernorm, "forward"
            case Attention():
                yield "attention_projections", module, "project_heads"
            case LatentAttention():
                for method in ("project_queries", "absorb", "expand"):
                    yield "attention_projections", module, method
            case Router():
                yield "router", module, "forward"
            case Experts():
                yield "experts_activation", module, "activate"


class _Calls:
    def __init__(self, forward: Callable[..., Any]) -> None:
        self._forward = forward
        self._results: dict[int, Tensor] = {}  # forward results by storage address

    def run_block(self, *args: Any, **kwargs: Any) -> Any:
        pack, unpack = storage_of_results()

        def hold(tensor: Tensor) -> partial:
            result = self._results.get(tensor.untyped_storage().data_ptr())
            if result is None:
                return partial(unpack, pack(tensor))
            offset = tensor.storage_offset() - result.storage_offset()
            return partial(_recompute, result.grad_fn, tensor.shape, tensor.stride(), offset)

        try:
            with saved_tensors_hooks(hold, lambda held: held()):
                return self._forward(*args, **kwargs)
        finally:
            self._results.clear()

    def run(self, call: Callable[..., Any], *args: Any) -> Any:
        if torch.compiler.is_compiling():
            return checkpoint(call, *args, use_reentrant=False)
        options = {"use_reentrant": False, "preserve_rng_state": False}
        results = checkpoint(_save_results, call, *args, **options)
        for result in tree_leaves(results):
            if isinstance(result, Tensor) and result.grad_fn is not None and result.numel():
                self._results[result.untyped_storage().data_ptr()] = result
        return results


def _save_results(call: Callable[..., Any], *args: Any) -> Any:
    return tree_map_only(Tensor, lambda x: _Saved.apply(x) if x.requires_grad else x, call(*args))


class _Saved(torch.autograd.Function):
    """Identity that saves x. `_recompute` caches x in `ctx.recomputed` until `backward`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.recomputed = None
        return x.detach()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        ctx.recomputed = None
        return grad


def _recompute(node: Any, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    if node.recomputed is None:  # cached, because `saved_tensors` is readable only once
        (node.recomputed,) = node.saved_tensors
    result = node.recomputed
    return result.as_strided(shape, stride, result.storage_offset() + offset)
