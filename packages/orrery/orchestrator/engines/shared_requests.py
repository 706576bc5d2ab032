"""Merge equal generation calls into one engine request for several samples, to save CPU time.

- Calls with equal `share` must have equal prompts and sampling options. They are merged if they
  begin in one pass of the event loop.
- The request is aborted once no call waits for it.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.messages import Generation

Sample = asyncio.Future[Generation]
Tokens = Sequence[int] | np.ndarray


@dataclass
class _Request:
    token_ids: Tokens
    options: dict[str, Any]
    calls: list[tuple[str, Sample]] = field(default_factory=list)
    sending: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        first = self.calls[0][0]
        return first if len(self.calls) == 1 else f"{first}+{len(self.calls) - 1}"

    @property
    def is_wanted(self) -> bool:
        return not all(sample.done() for _, sample in self.calls)

    def deliver(self, generation: Generation) -> None:
        _, sample = self.calls[generation.sample]
        if not sample.done():
            sample.set_result(generation)

    def fail(self, error: BaseException) -> None:
        for _, sample in self.calls:
            if not sample.done():
                sample.set_exception(error)


class SharedRequests:
    def __init__(
        self,
        generate_each: Callable[..., Awaitable[None]],
        abort: Callable[[list[str]], Awaitable[None]],
        max_samples: int,
    ):
        self._generate_each, self._abort, self._max_samples = generate_each, abort, max_samples
        self._open: dict[str, _Request] = {}

    async def generate(
        self, share: str, token_ids: Tokens, *, request_id: str, **options: Any
    ) -> Generation:
        request, loop = self._open.get(share), asyncio.get_running_loop()
        if request is None or len(request.calls) == self._max_samples:
            request = self._open[share] = _Request(token_ids, options)
            loop.call_soon(self._close, share, request)
        sample: Sample = loop.create_future()
        request.calls.append((request_id, sample))
        try:
            return await sample
        except asyncio.CancelledError:
            sending = request.sending
            if sending is not None and not request.is_wanted:
                request.sending = None  # so that only one cancelled call aborts
                sending.cancel()
                if len(request.calls) > 1:  # the caller of a single call aborts its request
                    with suppress(OrreryError):
                        await asyncio.shield(self._abort([request.name]))
            raise

    def _close(self, share: str, request: _Request) -> None:
        if self._open.get(share) is request:
            del self._open[share]
        request.calls = [call for call in request.calls if not call[1].done()]
        if request.calls:
            request.sending = asyncio.ensure_future(self._send(request))

    async def _send(self, request: _Request) -> None:
        num_samples, options = len(request.calls), request.options
        try:
            await self._generate_each(
                request.token_ids, num_samples, request.deliver, request_id=request.name, **options
            )
        except BaseException as error:
            request.fail(error)
            if not isinstance(error, Exception):
                raise
