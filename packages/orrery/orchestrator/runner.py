"""Run each rollout as an asyncio task, and cancel rollouts.

- `on_ended` is called once per request, except for cancelled requests.
- A rollout's unexpected exception ends the run: `check` raises it.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import groupby
from typing import Any

import numpy as np

from orrery.manifest.schema import Manifest, TaskUse
from orrery.orchestrator.dispatch import TIMEOUT, Request, TimeoutClassifier
from orrery.orchestrator.rollout import (
    ENGINE_GONE,
    Engine,
    Failed,
    Opening,
    Rollout,
    RolloutFailed,
    open_problem,
    run_episode,
)
from orrery.wire.rendezvous import request_s
from orrery.wire.routed_experts import row_shape

# Pause after a lost engine, because new rollouts would fail in a tight loop.
GONE_PAUSE_S = 1.0


class Notifier:
    """An event for all waiting tasks. Do not `await` between testing a condition and `wait`."""

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
        """`is_compared(version)`: whether the trainer may recompute the version's log-probs."""
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
            opening.exception()  # mark as read, because asyncio logs unread exceptions

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
    """Return a request's seed, which is equal for all policy versions."""
    group = request.group
    text = f"{seed}/{group.task_index}/{group.problem_index}/{request.member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
