"""Run rollouts: plays requests as asyncio tasks, one a rollout, and takes them off again.

- In: `Request`s that hold a permit. Out: exactly one call of `on_finished` or `on_failed` for each, unless it is cancelled.
- Who awaits `cancel` knows that the requests have left the engine, so that an update that follows does not race with their ends.
- What escapes by another way than `RolloutFailed`, also from those two calls, ends the run: `check` raises it in the loop.
"""

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from orrery.manifest.schema import Manifest, TaskUse
from orrery.orchestrator.requests import Request
from orrery.orchestrator.rollout import ENGINE_GONE, Engine, Rollout, RolloutFailed, run_episode
from orrery.transport.engine_api import request_s
from orrery.transport.routed_experts import route_shape

# A dead engine refuses at once; without a pause the permits would spin until the launcher has noticed.
GONE_PAUSE_S = 1.0


class RolloutRunner:
    """Rollouts in flight."""

    def __init__(
        self,
        manifest: Manifest,
        tasks: dict[str, Sequence[Any]],
        renderer: Any,
        engine: Engine,
        on_finished: Callable[[Request, Rollout], None],
        on_failed: Callable[[Request, str, str], None],
        is_compared: Callable[[int], bool] = lambda version: False,
    ):
        """Take the built tasks by purpose, in the manifest's order.

        `is_compared` tells whether the trainer may compare log-probs on evaluations of a version.
        """
        self.manifest, self.tasks, self.renderer, self.engine = manifest, tasks, renderer, engine
        self.on_finished, self.on_failed = on_finished, on_failed
        self._routes = route_shape(manifest.model) if manifest.transport.routed_experts else None
        self._is_compared = is_compared
        self._running: dict[str, asyncio.Task[None]] = {}
        self._generating: set[str] = set()  # requests in an engine
        self._leaving: set[asyncio.Task[None]] = set()  # cancelled, but still in the engine
        self._defect: BaseException | None = None

    @property
    def num_running(self) -> int:
        return len(self._running)

    def is_generating(self, request: Request) -> bool:
        """Return whether an engine has this rollout now, rather than its task or judge."""
        return request.name in self._generating

    async def generate(self, token_ids: np.ndarray, **options: Any) -> Any:
        """Call `Engine.generate` and note it while it lasts. `session` is the rollout's name."""
        name = options["session"]
        self._generating.add(name)
        try:
            return await self.engine.generate(token_ids, **options)
        finally:
            self._generating.discard(name)

    async def abort(self, request_ids: list[str]) -> None:
        await self.engine.abort(request_ids)

    def start(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._running[request.name] = task = asyncio.create_task(
                self._run(request), name=request.name
            )
            task.add_done_callback(self._ended)  # also of one that is cancelled before it begins

    def _ended(self, task: "asyncio.Task[None]") -> None:
        self._leaving.discard(task)
        if (
            self._running.get(task.get_name()) is task
        ):  # by then the same request may be played again
            del self._running[task.get_name()]

    def cancel(self, requests: Iterable[Request]) -> "asyncio.Future[list]":
        """End these rollouts at once, without a result.

        The returned awaitable ends when no cancelled rollout is left in an engine.
        """
        return self._cancel(
            [task for request in requests if (task := self._running.get(request.name)) is not None]
        )

    async def close(self) -> None:
        """End all."""
        await self._cancel(list(self._running.values()))

    def _cancel(self, tasks: "list[asyncio.Task[None]]") -> "asyncio.Future[list]":
        for task in tasks:
            task.cancel()
            self._leaving.add(task)
        return asyncio.gather(*self._leaving, return_exceptions=True)

    def check(self) -> None:
        if self._defect is not None:
            raise self._defect

    async def _run(self, request: Request) -> None:
        try:
            try:
                rollout = await self._rollout(request)
            except RolloutFailed as failed:
                if failed.reason == ENGINE_GONE:
                    await asyncio.sleep(GONE_PAUSE_S)
                self.on_failed(request, failed.reason, failed.detail)
            else:
                self.on_finished(request, rollout)
        except Exception as error:
            self._defect = self._defect or error

    async def _rollout(self, request: Request) -> Rollout:
        group, settings = request.group, self.manifest.orchestrator
        use: TaskUse = getattr(self.manifest.tasks, group.purpose)[group.task_index]
        return await run_episode(
            task=self.tasks[group.purpose][group.task_index],
            problem_index=group.problem_index,
            max_turns=use.max_turns,
            renderer=self.renderer,
            engine=self,
            sampling=settings.sampling,
            max_model_len_tokens=self.manifest.inference.max_model_len_tokens,
            cache_salt=str(request.version),
            name=request.name,
            timeout_s=request_s(self.manifest),
            seed=evaluation_seed(self.manifest.seed, request)
            if group.purpose == "evaluation"
            else None,
            routes=self._routes
            if group.purpose == "train" or self._is_compared(request.version)
            else None,
        )


def evaluation_seed(seed: int, request: Request) -> int:
    """Evaluations sample with a seed of their own a rollout, the same at every version: two policies differ by their weights alone."""
    group = request.group
    text = f"{seed}/{group.task_index}/{group.problem_index}/{request.member}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "little") >> 1
