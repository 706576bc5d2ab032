"""Rollout: plays one episode of a task and returns it as arrays.

- The prompt comes from the renderer; every later turn appends tokens to what the engine sampled, which stays verbatim: a token is
  never decoded and encoded again on its way to the trainer.
- Each sampled token carries log-prob and policy version; tokens of prompts and tools are untrained, version −1.
- Where routes are replayed, each turn brings those of the tokens that became inputs in it, and they are decoded once, at the end.
- `truncated`: the last turn was cut by a length limit. Such a rollout is judged as it stands.
- What is not the policy's doing is never a reward: an empty generation, an engine or task or judge that raises (or calls `exit`) is
  `RolloutFailed(reason)`. A broken judge (`JudgeBroken`) ends the run.
- Cancelling `run_episode` aborts the request in the engine.
"""

import asyncio
import inspect
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Sampling
from orrery.observe.process import Terminated
from orrery.orchestrator.concurrency import WorkerThread
from orrery.orchestrator.engines.messages import UNKNOWN_ENGINE, EngineGone
from orrery.tasks.task import JudgeBroken, Message
from orrery.transport.route_bytes import Routes, column
from orrery.transport.routed_experts import RouteShape

PROBLEMS = WorkerThread("problems")  # a hard puzzle takes seconds to make
NO_POLICY = -1  # version of a token that no policy sampled
ENGINE_GONE = "engine_gone"  # the reason of a rollout that was lost with its engine


class RolloutFailed(Exception):
    """This episode came to nothing: a word to count and the sentence behind it."""

    def __init__(self, reason: str, detail: str):
        super().__init__(detail)
        self.reason, self.detail = reason, detail


# Exceptions that pass through a task's code: our failures, a broken judge, an end from outside.
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
    """One finished episode; the arrays have one entry a token of the whole conversation."""

    token_id: np.ndarray  # i32 [n]
    logprob: np.ndarray  # f32 [n]
    trained: np.ndarray  # bool [n]
    version: np.ndarray  # i32 [n]
    reward: float
    truncated: bool
    messages: list[Message]
    metrics: dict[str, float] = field(default_factory=dict)
    routed_experts: np.ndarray | None = (
        None  # as `orrery.transport.routed_experts` has it, [n, layers, top_k]; None where the run carries none
    )
    engine: int = UNKNOWN_ENGINE  # the engine that sampled all turns

    @property
    def num_tokens(self) -> int:
        return len(self.token_id)

    @property
    def sampled_versions(self) -> np.ndarray:
        """Versions of the sampled tokens; there is at least one."""
        return self.version[self.trained]


class Engine(Protocol):
    """What a rollout needs of `orrery.orchestrator.engines.pool.EnginePool`."""

    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any: ...

    async def abort(self, request_ids: list[str]) -> None: ...


class _Tokens:
    """The conversation so far, in chunks; concatenated once a turn."""

    def __init__(self, prompt: list[int]):
        self.chunks = [self._untrained(prompt)]
        self.length = len(prompt)
        self.routes: list[Routes] = []
        self.engines: set[int] = set()

    @staticmethod
    def _untrained(ids: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        n = len(ids)
        return (
            np.asarray(ids, dtype=np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.bool_),
            np.full(n, NO_POLICY, np.int32),
        )

    def append(self, ids: list[int]) -> None:
        self.chunks.append(self._untrained(ids))
        self.length += len(ids)

    def append_sampled(self, generation: Any) -> None:
        n = len(generation.token_ids)
        self.chunks.append(
            (generation.token_ids, generation.logprobs, np.ones(n, np.bool_), generation.versions)
        )
        self.length += n
        self.routes += generation.routes
        self.engines.add(generation.engine)

    @property
    def routes_from(self) -> int:
        """The first token whose experts no turn has told: the last of the turn before, which is an input only now."""
        return max((part.start + part.num_rows for part in self.routes), default=0)

    def column(self, index: int) -> np.ndarray:
        return np.concatenate([chunk[index] for chunk in self.chunks])


async def run_episode(
    *,
    task: Any,
    problem_index: int,
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
) -> Rollout:
    """One episode of problem `problem_index`, from its prompt to its judgement. Raises RolloutFailed.

    `name` is unique among rollouts in flight; with `seed`, turn t samples with `seed + t`. With `routes`, which say
    what the model's look like, the rollout has its `routed_experts`; a turn asks for those of the tokens that no turn before has had.
    """
    problem = await PROBLEMS(lambda: _guard("task", lambda: task.problem(problem_index)))
    messages = list(problem.messages)
    tokens = _Tokens(_guard("task", lambda: renderer.prompt(messages, problem.tools)))
    if tokens.length >= max_model_len_tokens:
        raise RolloutFailed(
            "prompt_too_long",
            f"problem {problem_index} has a prompt of {tokens.length} tokens; inference.max_model_len_tokens is {max_model_len_tokens}",
        )
    truncated = False
    for turn in range(max_turns):
        generation = await _generate(
            engine,
            f"{name}-{turn}",
            tokens.column(0),
            session=name,
            max_tokens=min(
                problem.exact_tokens or sampling.max_tokens_per_turn,
                max_model_len_tokens - tokens.length,
            ),
            temperature=sampling.temperature,
            cache_salt=cache_salt,
            stop_token_ids=() if problem.exact_tokens else renderer.stop_token_ids,
            ignore_eos=problem.exact_tokens is not None,
            seed=None if seed is None else seed + turn,
            timeout_s=timeout_s,
            **({} if routes is None else {"routes_from": tokens.routes_from}),
        )
        tokens.append_sampled(generation)
        messages.append(
            _guard("task", lambda ids=generation.token_ids: renderer.parse(ids.tolist()))
        )
        truncated = generation.finish_reason == "length" and problem.exact_tokens is None
        if truncated or turn + 1 == max_turns:
            break
        reply = await _guard_async("task", lambda: task.reply(problem, messages))
        if reply is None:
            break
        turn_tokens = _guard("task", lambda reply=reply: renderer.next_turn(reply))
        if tokens.length + len(turn_tokens) >= max_model_len_tokens:
            truncated = True  # no room for an answer, so the reply is not said either
            break
        messages.extend(reply)
        tokens.append(turn_tokens)
    judgement = await _guard_async("judge", lambda: task.judge(problem, messages))
    reward, metrics = _guard(
        "judge",
        lambda: (
            float(judgement.reward),
            {str(name): float(value) for name, value in judgement.metrics.items()},
        ),
    )
    if not np.isfinite(
        [reward, *metrics.values()]
    ).all():  # JSON has no such numbers: checkpoints could not hold them
        raise RolloutFailed(
            "judge",
            f"problem {problem_index} was judged {reward} with {metrics}; rewards and metrics are finite numbers",
        )
    routed_experts = (
        None
        if routes is None
        else _guard("engine", lambda: column(tokens.length, tokens.routes, routes))
    )
    return Rollout(
        tokens.column(0), tokens.column(1), tokens.column(2), tokens.column(3), reward, truncated, messages, metrics, routed_experts,
        tokens.engines.pop() if len(tokens.engines) == 1 else UNKNOWN_ENGINE,
    )  # fmt: skip


async def _generate(engine: Engine, request_id: str, token_ids: np.ndarray, **options: Any) -> Any:
    try:
        generation = await engine.generate(token_ids, request_id=request_id, **options)
    except asyncio.CancelledError:
        # A closed connection ends the request in an engine; one that a router holds open must be named to end.
        await asyncio.shield(_abort(engine, request_id))
        raise
    except OrreryError as error:
        raise RolloutFailed(
            ENGINE_GONE if isinstance(error, EngineGone) else "engine", str(error)
        ) from error
    if generation.finish_reason == "abort":
        raise RolloutFailed("aborted", f"request {request_id} was aborted in the engine")
    if len(generation.token_ids) == 0:
        raise RolloutFailed("empty", f"request {request_id} came back without a token")
    if (generation.versions < 0).any():
        raise RolloutFailed(
            "unversioned", f"request {request_id} came back with tokens of no published version"
        )
    return generation


async def _abort(engine: Engine, request_id: str) -> None:
    with suppress(OrreryError):  # an engine that is gone has no requests left
        await engine.abort([request_id])


def _guard(reason: str, call: Any) -> Any:
    """`call()`, with whatever it raises as `RolloutFailed(reason)`: tasks are the one open door."""
    try:
        return call()
    except NOT_THE_TASKS:
        raise
    except (
        BaseException
    ) as error:  # an exit of a task, or a panic of a library in Rust, is no end of the run
        raise RolloutFailed(reason, f"{reason} raised {type(error).__name__}: {error}") from error


async def _guard_async(reason: str, call: Any) -> Any:
    result = _guard(reason, call)
    if not inspect.isawaitable(result):
        return result
    try:
        return await result
    except NOT_THE_TASKS:
        raise
    except BaseException as error:
        raise RolloutFailed(reason, f"{reason} raised {type(error).__name__}: {error}") from error
