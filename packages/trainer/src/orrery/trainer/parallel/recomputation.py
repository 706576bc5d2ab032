"""What a block's forward pass keeps for when activation checkpointing runs the block again: answers to the host, results of operations.

- A device answers the host only once it has done all work before. A recomputation that need not ask again keeps the host from waiting:
  `keep` and `recall`, in the order of the calls.
- Results of named operations are kept as torch's selective checkpointing does, which insists that both runs do the very same operations;
  here those that are not named may differ, as FSDP's hooks inside a block do.
- Compiled code that calls a named operation writes over the result as soon as it has no more use for it, with nobody told (a router's
  softmax stood where its logits had been). Of operations that are called there, copies are kept.
- Autograd does not know of these results. Who wants them elsewhere meanwhile, as activation offload does, says so with `setting_aside`.
- Outside of checkpointing nothing is kept, and nothing is recalled.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_map, tree_unflatten

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

_now: ContextVar["_Run | None"] = ContextVar("recomputation", default=None)
_aside: ContextVar[tuple[Pack, Unpack] | None] = ContextVar("aside", default=None)


def contexts(operations: Collection[Any] = (), compiled: Collection[Any] = ()) -> tuple[AbstractContextManager, AbstractContextManager]:
    """For `context_fn` of torch's `checkpoint`: around the forward pass, and around its recomputation.

    `compiled`: those of `operations` that compiled code calls.
    """
    answers: list[Any] = []
    results: dict[Any, deque[Any]] = defaultdict(deque)
    modes = (_Keeps(operations, results, compiled), _Recalls(operations, results)) if operations else (None, None)
    return _Run(answers, False, modes[0]), _Run(answers, True, modes[1])


@contextmanager
def setting_aside(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Results that are kept in here go through `pack`, and through `unpack` when they are recalled."""
    token = _aside.set((pack, unpack))
    try:
        yield
    finally:
        _aside.reset(token)


def keep(answer: Any) -> Any:
    if (now := _now.get()) is not None and not now.is_again:
        now.answers.append(answer)
    return answer


def recall() -> Any:
    """The answer that the forward pass kept here, or None where this is no recomputation."""
    if (now := _now.get()) is None or not now.is_again:
        return None
    now.position += 1
    return now.answers[now.position - 1]


class _Run(AbstractContextManager):
    """One run of a block. Entered again, it recalls from the beginning."""

    def __init__(self, answers: list[Any], is_again: bool, mode: TorchDispatchMode | None) -> None:
        self.answers, self.is_again, self.position, self._mode = answers, is_again, 0, mode

    def __enter__(self) -> None:
        self.position = 0
        self._token = _now.set(self)
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        _now.reset(self._token)


class _Mode(TorchDispatchMode):
    def __init__(self, operations: Collection[Any], results: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._operations, self._results = operations, results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # what is compiled stays compiled, and is looked into where it calls operations by name


class _Keeps(_Mode):
    def __init__(self, operations: Collection[Any], results: dict[Any, deque[Any]], compiled: Collection[Any]) -> None:
        super().__init__(operations, results)
        self._compiled = compiled

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self._operations:
            kept = tree_map(_copied if function in self._compiled else _detached, result)
            self._results[function].append(_Aside.of(kept) if _aside.get() is not None else kept)
        return result


class _Recalls(_Mode):
    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function in self._operations:
            kept = self._results[function].popleft()
            return kept.back() if isinstance(kept, _Aside) else kept
        return function(*args, **(kwargs or {}))


class _Aside:
    """Results that are elsewhere."""

    def __init__(self, leaves: list[Any], spec: TreeSpec, unpack: Unpack) -> None:
        self._leaves, self._spec, self._unpack = leaves, spec, unpack

    @classmethod
    def of(cls, kept: Any) -> "_Aside":
        aside = _aside.get()
        assert aside is not None
        pack, unpack = aside
        leaves, spec = tree_flatten(kept)
        return cls([(True, pack(leaf)) if isinstance(leaf, Tensor) else (False, leaf) for leaf in leaves], spec, unpack)

    def back(self) -> Any:
        return tree_unflatten([self._unpack(leaf) if is_packed else leaf for is_packed, leaf in self._leaves], self._spec)


def _detached(value: Any) -> Any:
    """The result without its place in the forward pass's graph; the recomputation gives it one in its own."""
    return value.detach() if isinstance(value, Tensor) else value


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else value
