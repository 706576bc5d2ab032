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
from functools import partial
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]


def _as_it_is(value: Tensor) -> Tensor:
    return value


_now: ContextVar["_Run | None"] = ContextVar("recomputation", default=None)
_aside: ContextVar[tuple[Pack, Unpack]] = ContextVar("aside", default=(_as_it_is, _as_it_is))


def contexts(
    operations: Collection[Any] = (), compiled: Collection[Any] = ()
) -> tuple[AbstractContextManager, AbstractContextManager]:
    """For `context_fn` of torch's `checkpoint`: around the forward pass, and around its recomputation.

    `operations` return tensors, perhaps beside numbers; `compiled` are those that compiled code calls.
    """
    answers: list[Any] = []
    results: dict[Any, deque[Any]] = defaultdict(deque)
    modes = (
        (_Keeps(operations, results, compiled), _Recalls(operations, results))
        if operations
        else (None, None)
    )
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
            pack, unpack = _aside.get()

            def set_by(value: Tensor) -> partial:
                value = value.detach()  # without its place in the forward pass's graph; the recomputation gives it one in its own
                return partial(unpack, pack(value.clone() if function in self._compiled else value))

            self._results[function].append(tree_map_only(Tensor, set_by, result))
        return result


class _Recalls(_Mode):
    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function in self._operations:
            return tree_map_only(partial, lambda kept: kept(), self._results[function].popleft())
        return function(*args, **(kwargs or {}))
