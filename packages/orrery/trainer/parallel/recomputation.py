"""Values that a block's forward pass keeps for its recomputation.

- Answers to the host (`keep`, `recall`): the recomputation does not wait for the device again.
- Results of named operations. Unlike in torch's selective checkpointing, the other operations may
  differ between both runs, as with FSDP's hooks.
"""

from collections import defaultdict, deque
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def _identity(value: Tensor) -> Tensor:
    return value


_current: ContextVar["_Run | None"] = ContextVar("recomputation", default=None)
_hooks: ContextVar[tuple[Pack, Unpack]] = ContextVar("hooks", default=(_identity, _identity))


def contexts(
    operations: Collection[Any] = (), compiled: Collection[Any] = ()
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """Return the forward and the recomputation context for `context_fn` of torch's `checkpoint`.

    Graphs may overwrite the results of operations in `compiled`, so these are cloned.
    """
    answers: list[Any] = []
    if not operations:
        return _Run(answers, False, None), _Run(answers, True, None)
    results: dict[Any, deque[Any]] = defaultdict(deque)
    keeper = _KeepResults(operations, results, compiled)
    return _Run(answers, False, keeper), _Run(answers, True, _RecallResults(operations, results))


@contextmanager
def store_results_with(pack: Pack, unpack: Unpack) -> Iterator[None]:
    """Pass kept results through `pack`, and recalled results through `unpack`."""
    token = _hooks.set((pack, unpack))
    try:
        yield
    finally:
        _hooks.reset(token)


def keep(answer: Any) -> Any:
    """Return `answer`, and keep it in the forward pass of a checkpointed block."""
    run = _current.get()
    if run is not None and not run.is_recomputation:
        run.answers.append(answer)
    return answer


def recall() -> Any:
    """Return the next kept answer, or None outside of a recomputation."""
    run = _current.get()
    if run is None or not run.is_recomputation:
        return None
    run.position += 1
    return run.answers[run.position - 1]


class _Run(AbstractContextManager):
    def __init__(
        self, answers: list[Any], is_recomputation: bool, mode: TorchDispatchMode | None
    ) -> None:
        self.answers, self.is_recomputation = answers, is_recomputation
        self.position, self._mode = 0, mode

    def __enter__(self) -> None:
        self.position = 0
        self._token = _current.set(self)
        if self._mode is not None:
            self._mode.__enter__()

    def __exit__(self, *error: Any) -> None:
        if self._mode is not None:
            self._mode.__exit__(*error)
        _current.reset(self._token)


class _Mode(TorchDispatchMode):
    def __init__(self, operations: Collection[Any], results: dict[Any, deque[Any]]) -> None:
        super().__init__()
        self._operations, self._results = operations, results

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True  # let compiled code run


class _KeepResults(_Mode):
    def __init__(
        self, operations: Collection[Any], results: dict[Any, deque[Any]], compiled: Collection[Any]
    ) -> None:
        super().__init__(operations, results)
        self._compiled = compiled

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        result = function(*args, **(kwargs or {}))
        if function in self._operations:
            pack, unpack = _hooks.get()

            def store(value: Tensor) -> partial:
                value = value.detach()
                return partial(unpack, pack(value.clone() if function in self._compiled else value))

            self._results[function].append(tree_map_only(Tensor, store, result))
        return result


class _RecallResults(_Mode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._operations:
            return tree_map_only(partial, lambda kept: kept(), self._results[function].popleft())
        return function(*args, **(kwargs or {}))
