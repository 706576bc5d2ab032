"""Run episodes of tasks as asyncio tasks, and return each as a `Rollout`.

- Prompt tokens and tool results are not trained. Their policy version is NO_VERSION.
- A rollout that reaches a length limit is `truncated`, but still judged.
- `RolloutFailed`: the engine, the task or the judge failed.
- `RolloutRunner` calls `on_ended` once per request, unless the request was cancelled. Its `check`
  raises unexpected exceptions of rollouts, to end the run.
"""

import asyncio
import hashlib
import inspect
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import groupby
from logging import Logger
from queue import SimpleQueue
from typing import Any, Protocol

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Manifest, Sampling, TaskUse
from orrery.orchestrator.dispatch import TIMEOUT, Request, TimeoutClassifier
from orrery.orchestrator.engines.messages import UNKNOWN_ENGINE, EngineGone
from orrery.runtime.role_context import Terminated
from orrery.tasks.task import JudgeBroken, Message, Problem
from orrery.wire.rendezvous import request_s
from orrery.wire.routed_experts import Routes, RouteShape, column, row_shape

NO_VERSION = -1
ENGINE_GONE = "engine_gone"
SITE_REFUSED = "site_refused"
# Pause after a lost engine, to avoid a failure loop.
GONE_PAUSE_S = 1.0


class WorkerThread:
    """Run calls in order in one daemon thread. Skip calls cancelled before their turn."""

    def __init__(self, name: str) -> None:
        self._calls: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=name, daemon=True)
        self._lock = threading.Lock()

    async def __call__(self, call: Callable[[], Any]) -> Any:
        with self._lock:
            if not self._thread.ident:
                self._thread.start()
        future: Future[Any] = Future()
        self._calls.put((future, call))
        return await asyncio.wrap_future(future)

    def _work(self) -> None:
        while True:
            future, call = self._calls.get()
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(call())
                except BaseException as error:
                    future.set_exception(error)


PROBLEMS = WorkerThread("problems")  # some problems take seconds to create


@dataclass(frozen=True)
class Failed:
    """A failed rollout. If `is_zero`, mean rewards include it as 0."""

    reason: str
    detail: str
    is_zero: bool = False

    def warn(self, log: Logger, name: str) -> None:
        log.warning("rollout %s failed (%s): %s", name, self.reason, self.detail)


class RolloutFailed(Exception):
    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


NOT_THE_TASKS = (
    RolloutFailed,
    JudgeBroken,
    asyncio.CancelledError,
    GeneratorExit,
    KeyboardInterrupt,
    Terminated,
)


@dataclass(frozen=True)
class Rollout:
    """A finished episode. The arrays have one entry per token of the conversation.

    `advantage` is None until the group is complete.
    """

    token_id: np.ndarray  # i32 [n]
    logprob: np.ndarray  # f32 [n]
    trained: np.ndarray  # bool [n]
    version: np.ndarray  # i32 [n]
    reward: float
    truncated: bool
    messages: list[Message]
    metrics: dict[str, float] = field(default_factory=dict)
    routed_experts: np.ndarray | None = None  # [n, layers, top_k]
    engine: int = UNKNOWN_ENGINE  # engine index, if one engine sampled all turns
    advantage: float | None = None
    group_id: int = -1
    member: int = -1
    task_index: int = -1
    problem_index: int = -1
    dispatch_version: int = NO_VERSION

    @property
    def num_tokens(self) -> int:
        return len(self.token_id)

    @property
    def known_advantage(self) -> float:
        if self.advantage is None:
            raise ValueError(f"group {self.group_id}: member {self.member} has no advantage yet")
        return self.advantage

    @property
    def sampled_versions(self) -> np.ndarray:
        return self.version[self.trained]

    @cached_property
    def oldest_version(self) -> int:
        return int(self.sampled_versions.min())


class Engine(Protocol):
    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any: ...

    async def abort(self, request_ids: list[str]) -> None: ...


class _Tokens:
    def __init__(self, prompt: list[int]):
        self.chunks: list[tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]] = []
        self.length = 0
        self.routes: list[Routes] = []
        self.engines: set[int] = set()
        self.append(prompt)

    def append(self, ids: list[int]) -> None:
        n = len(ids)
        zeros, untrained = np.zeros(n, np.float32), np.zeros(n, np.bool_)
        versions = np.full(n, NO_VERSION, np.int32)
        self.chunks.append((np.asarray(ids, dtype=np.int32), zeros, untrained, versions))
        self.length += n

    def append_sampled(self, generation: Any) -> None:
        n, trained = len(generation.token_ids), np.ones(len(generation.token_ids), np.bool_)
        chunk = (generation.token_ids, generation.logprobs, trained, generation.versions)
        self.chunks.append(chunk)
        self.length += n
        self.routes += generation.routes
        self.engines.add(generation.engine)

    @property
    def routes_from(self) -> int:
        """Return the first position without known routed experts (MoE)."""
        return max((part.start + part.num_rows for part in self.routes), default=0)

    def column(self, index: int) -> np.ndarray:
        return np.concatenate([chunk[index] for chunk in self.chunks])


@dataclass(frozen=True)
class Opening:
    problem: Problem
    prompt: list[int]


async def open_problem(task: Any, problem_index: int, renderer: Any) -> Opening:
    problem = await PROBLEMS(lambda: _guard("task", lambda: task.problem(problem_index)))
    prompt = _guard("task", lambda: renderer.prompt(list(problem.messages), problem.tools))
    return Opening(problem, prompt)


async def run_episode(
    *,
    task: Any,
    opening: Opening,
    max_turns: int,
    renderer: Any,
    engine: Engine,
    sampling: Sampling,
    max_model_len_tokens: int,
    cache_salt: str,
    name: str,
    timeout_s: float,
    seed: int | None = None,
    routes: RouteShape | None = None,
    share: str | None = None,
) -> Rollout:
    """Sample and judge a rollout, or raise RolloutFailed.

    - `seed`: turn t is sampled with `seed + t`.
    - `routes`: shape of the routed experts (MoE) that training replays.
    - `share`: passed to `EnginePool.generate`, equal for rollouts of one prompt.
    """
    problem, messages = opening.problem, list(opening.problem.messages)
    tokens = _Tokens(opening.prompt)
    if tokens.length >= max_model_len_tokens:
        detail = f"problem {problem.index} has a prompt of {tokens.length} tokens; "
        detail += f"inference.max_model_len_tokens is {max_model_len_tokens}"
        raise RolloutFailed("prompt_too_long", detail)
    max_tokens = problem.exact_tokens or sampling.max_tokens_per_turn
    truncated = False
    for turn in range(max_turns):
        generation = await _generate(
            engine,
            f"{name}-{turn}",
            tokens.column(0),
            session=name,
            max_tokens=min(max_tokens, max_model_len_tokens - tokens.length),
            temperature=sampling.temperature,
            cache_salt=cache_salt,
            stop_token_ids=() if problem.exact_tokens else renderer.stop_token_ids,
            ignore_eos=problem.exact_tokens is not None,
            seed=None if seed is None else seed + turn,
            timeout_s=timeout_s,
            **({} if routes is None else {"routes_from": tokens.routes_from}),
            **({} if share is None else {"share": share}),
        )
        tokens.append_sampled(generation)
        sampled = generation.token_ids.tolist()
        messages.append(_guard("task", lambda ids=sampled: renderer.parse(ids)))
        truncated = generation.finish_reason == "length" and problem.exact_tokens is None
        if truncated or turn + 1 == max_turns:
            break
        reply = await _guard_async("task", lambda: task.reply(problem, messages))
        if reply is None:
            break
        turn_tokens = _guard("task", lambda reply=reply: renderer.next_turn(reply))
        if tokens.length + len(turn_tokens) >= max_model_len_tokens:
            truncated = True
            break
        messages.extend(reply)
        tokens.append(turn_tokens)
    reward, metrics = await _judge(task, problem, messages)
    routed_experts = None
    if routes is not None:
        routed_experts = _guard("engine", lambda: column(tokens.length, tokens.routes, routes))
    return Rollout(
        token_id=tokens.column(0),
        logprob=tokens.column(1),
        trained=tokens.column(2),
        version=tokens.column(3),
        reward=reward,
        truncated=truncated,
        messages=messages,
        metrics=metrics,
        routed_experts=routed_experts,
        engine=tokens.engines.pop() if len(tokens.engines) == 1 else UNKNOWN_ENGINE,
    )


async def _judge(
    task: Any, problem: Problem, messages: list[Message]
) -> tuple[float, dict[str, float]]:
    judgement = await _guard_async("judge", lambda: task.judge(problem, messages))
    reward = _guard("judge", lambda: float(judgement.reward))
    metrics: dict[str, float] = _guard(
        "judge", lambda: {str(name): float(value) for name, value in judgement.metrics.items()}
    )
    # Batches hold float32, and checkpoints JSON without infinity or NaN.
    if not (np.abs([reward, *metrics.values()]) <= np.finfo(np.float32).max).all():
        detail = f"problem {problem.index} was judged {reward} with {metrics}; "
        raise RolloutFailed("judge", detail + "rewards and metrics must be finite float32")
    return reward, metrics


async def _generate(engine: Engine, request_id: str, token_ids: np.ndarray, **options: Any) -> Any:
    try:
        generation = await engine.generate(token_ids, request_id=request_id, **options)
    except asyncio.CancelledError:
        # A router does not report disconnects to the engine.
        await asyncio.shield(_abort(engine, request_id))
        raise
    except OrreryError as error:
        reason = ENGINE_GONE if isinstance(error, EngineGone) else "engine"
        raise RolloutFailed(reason, str(error)) from error
    request = f"request {request_id}"
    if generation.finish_reason == "abort":
        raise RolloutFailed("aborted", f"{request} was aborted in the engine")
    if len(generation.token_ids) == 0:
        raise RolloutFailed("empty", f"{request} returned no token")
    if (generation.versions < 0).any():
        detail = f"{request} came back with tokens of no published version"
        raise RolloutFailed("unversioned", detail)
    return generation


async def _abort(engine: Engine, request_id: str) -> None:
    with suppress(OrreryError):
        await engine.abort([request_id])


def _failed(reason: str, error: BaseException) -> RolloutFailed:
    return RolloutFailed(reason, f"{reason} raised {type(error).__name__}: {error}")


def _guard(reason: str, call: Any) -> Any:
    """Return `call()`. Convert the task's exceptions, even SystemExit, to RolloutFailed."""
    try:
        return call()
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise _failed(reason, error) from error


async def _guard_async(reason: str, call: Any) -> Any:
    result = _guard(reason, call)
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise _failed(reason, error) from error


class Notifier:
    """An event that wakes all waiting tasks.

    Do not `await` between testing a condition and `wait`, or `wait` may miss a notification.
    """

    def __init__(self) -> None:
        self._event = asyncio.Event()

    def notify_all(self) -> None:
        self._event.set()
        self._event = asyncio.Event()

    async def wait(self, timeout_s: float) -> None:
        # asyncio.wait_for of Python 3.11 loses a cancellation that arrives with the event.
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()


class RolloutRunner:
    def __init__(
        self,
        manifest: Manifest,
        tasks: dict[str, Sequence[Any]],
        renderer: Any,
        engine: Engine,
        on_ended: Callable[[Request, Rollout | Failed], None],
        is_compared: Callable[[int], bool] = lambda version: False,
    ):
        """`is_compared(version)`: whether the trainer may recompute log-probs of that version."""
        self.manifest, self.tasks, self.renderer, self.engine = manifest, tasks, renderer, engine
        self.on_ended = on_ended
        self._routes = row_shape(manifest)
        self._is_compared = is_compared
        self._running: dict[str, asyncio.Task[None]] = {}
        self._generating: set[str] = set()
        self._leaving: set[asyncio.Task[None]] = set()
        self._openings: set[asyncio.Future[Opening]] = set()
        self._error: BaseException | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_generating(self, request: Request) -> bool:
        return request.name in self._generating

    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any:
        name = options["session"]
        self._generating.add(name)
        try:
            return await self.engine.generate(token_ids, **options)
        finally:
            self._generating.discard(name)

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    def start(self, requests: Iterable[Request]) -> None:
        for group, members in groupby(requests, key=lambda request: request.group):
            task = self.tasks[group.purpose][group.task_index]
            opening = asyncio.ensure_future(open_problem(task, group.problem_index, self.renderer))
            self._openings.add(opening)
            opening.add_done_callback(self._opened)
            for request in members:
                running = asyncio.create_task(self._run(request, opening), name=request.name)
                self._running[request.name] = running
                running.add_done_callback(self._ended)

    def _opened(self, opening: "asyncio.Future[Opening]") -> None:
        self._openings.discard(opening)
        if not opening.cancelled():
            opening.exception()  # otherwise asyncio logs an unretrieved exception

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._leaving.discard(task)
        if self._running.get(task.get_name()) is task:
            del self._running[task.get_name()]

    def cancel(self, requests: Iterable[Request]) -> "asyncio.Future[list]":
        names = [request.name for request in requests]
        return self._cancel([self._running[name] for name in names if name in self._running])

    def end_expired(
        self, expired: Sequence[Request], timeouts: TimeoutClassifier, now_s: float
    ) -> None:
        for request, reason, detail in timeouts.reasons(expired, self.is_generating, now_s):
            is_zero = reason == TIMEOUT and self.manifest.orchestrator.on_timeout == "zero"
            self.on_ended(request, Failed(reason, detail, is_zero))
            self.cancel([request])

    async def close(self) -> None:
        for opening in self._openings:
            opening.cancel()
        await self._cancel(list(self._running.values()))

    def _cancel(self, tasks: "list[asyncio.Task[None]]") -> "asyncio.Future[list]":
        for task in tasks:
            task.cancel()
            self._leaving.add(task)
        return asyncio.gather(*self._leaving, return_exceptions=True)

    def check(self) -> None:
        if self._error is not None:
            raise self._error

    async def _run(self, request: Request, opening: "asyncio.Future[Opening]") -> None:
        try:
            outcome: Rollout | Failed
            try:
                outcome = replace(await self._rollout(request, opening), **request.identity)
            except RolloutFailed as error:
                outcome = Failed(error.reason, error.detail)
                if outcome.reason == ENGINE_GONE:
                    await asyncio.sleep(GONE_PAUSE_S)
            self.on_ended(request, outcome)
        except Exception as error:
            self._error = self._error or error

    async def _rollout(self, request: Request, opening: "asyncio.Future[Opening]") -> Rollout:
        group, manifest = request.group, self.manifest
        use: TaskUse = getattr(manifest.tasks, group.purpose)[group.task_index]
        is_train = group.purpose == "train"
        needs_routes = is_train or self._is_compared(request.version)
        return await run_episode(
            task=self.tasks[group.purpose][group.task_index],
            opening=await asyncio.shield(opening),
            max_turns=use.max_turns,
            renderer=self.renderer,
            engine=self,
            sampling=manifest.orchestrator.sampling,
            max_model_len_tokens=manifest.inference.max_model_len_tokens,
            cache_salt=str(request.version),
            name=request.name,
            timeout_s=request_s(manifest),
            seed=None if is_train else evaluation_seed(manifest.seed, request),
            routes=self._routes if needs_routes else None,
            share=f"{group.key}-{request.version}" if is_train and use.max_turns == 1 else None,
        )


def evaluation_seed(seed: int, request: Request) -> int:
    """Return an evaluation request's seed, equal for all policy versions."""
    group = request.group
    text = f"{seed}/{group.task_index}/{group.problem_index}/{request.member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
