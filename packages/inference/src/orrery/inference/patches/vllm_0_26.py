"""Corrections to vLLM 0.26, which 0.32 does not need. None touches vLLM's files; each is one call before the engine client is built,
the third in every process of an engine, the last where tiers are made.

1. `keep_signal_handlers`. Upstream: `uvicorn.Server.serve` installs its own SIGTERM handler over the one with which `serve_http` stops the
   engine; requests in flight then hold the server for as long as they take (vllm-project/vllm#49668). Versions: 0.26 (read). Remove with
   0.26: 0.32 has `NoSignalServer`.
2. `keep_account`. Upstream: the engine has no word for which weights sampled a token; 0.32 has `/finish_weight_update` with a
   `weight_version` and answers with `weight_versions`. Here the API server keeps that account: weights change only while generation is
   paused, and before any call of an update every output of the old weights is put on its way (`vllm_whole_answers`), in order, on the
   socket that the end of the update also comes by. So a mark put among the outputs when the update has finished parts the tokens exactly.
   Versions: 0.26 (read; held against 0.32's own account in `test_inference_routes.py`). Remove with 0.26.
3. `meet_by_file`. Upstream: workers of an engine meet by torch's TCPStore, which listens on every interface and has no token, an engine of
   one worker too. Versions: 0.26 (seen: `test_servers_listen_on_loopback_only`, `test_inference_wide_engine.py`). Remove with 0.26: in 0.32
   they have a file.
4. `store_nothing_of_the_ended`. Upstream: when a request has ended, tiers are given what of its prompt they have not got. Of one that was
   aborted before it was computed there are no blocks, and the engine ends over an assertion (vllm-project/vllm#49118); of one that a full
   tier has refused before, the account is closed, and it ends over a KeyError (vllm-project/vllm#49635). What can be stored has been by
   then, in the step that computed it. Versions: 0.26 (seen: `test_inference_kv_offload.py`). Remove with 0.26: 0.32 counts what is there.
"""

import contextlib
import secrets
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

UNNAMED = "default"  # as 0.32 calls the weights that an engine was started with


def keep_signal_handlers() -> None:
    """Have uvicorn leave SIGTERM and SIGINT to vLLM."""
    import uvicorn

    @contextlib.contextmanager
    def leave_alone(_self: Any) -> Iterator[None]:
        yield

    if not hasattr(uvicorn.Server, "capture_signals"):
        raise RuntimeError("uvicorn has no Server.capture_signals any more; see orrery/inference/patches/vllm_0_26.py")
    uvicorn.Server.capture_signals = leave_alone  # type: ignore[method-assign,assignment]


def meet_by_file() -> None:
    """Have the workers of an engine meet by a file, as in 0.32: they are on one node."""
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    def address(_host: str, _port: int) -> str:
        # On CPU what stands behind the last colon names shared memory, where it must have no slash.
        return f"file://{tempfile.gettempdir()}/orrery-workers:{secrets.token_hex(16)}"

    uniproc_executor.get_distributed_init_method = multiproc_executor.get_distributed_init_method = address


@dataclass(frozen=True)
class Span:
    """Output tokens from `start` to before `end` are the work of `version`: 0.32's `WeightVersionSpan`."""

    version: str
    start: int
    end: int


class Account:
    """Which version sampled which token of the requests in flight. One an API server, as there is one engine client."""

    def __init__(self) -> None:
        self.version = UNNAMED
        self._loading: str | None = None  # what the update under way brings

    def loading(self, update_info: dict[str, Any]) -> None:
        """An update names its version with everything it loads."""
        if "version" not in update_info:
            raise ValueError(f"update_info {sorted(update_info)} names no version; tokens sampled from these weights would have none")
        self._loading = str(update_info["version"])

    def mark(self, processor: Any) -> Callable[[], None]:
        """What to put among the outputs: where it is met, tokens so far are the old version's and those to come the new one's."""
        version, self._loading = self._loading, None

        def met() -> None:
            for state in processor.request_states.values():
                if state.detokenizer is not None:
                    state.__dict__.setdefault("cuts", []).append((self.version, state.detokenizer.num_output_tokens()))
            self.version = self.version if version is None else version

        return met

    def spans(self, state: Any) -> list["Span"]:
        """Over a request's output tokens, none empty."""
        ends = [*getattr(state, "cuts", ()), (self.version, state.detokenizer.num_output_tokens())]
        spans: list[Span] = []
        start = 0
        for version, end in ends:
            if end > start:
                spans.append(Span(version, start, end))
            start = end
        return spans


def keep_account() -> None:
    """Have the outputs of finished requests say which weights sampled which token: `weight_versions`, which `vllm_answers` writes."""
    from vllm.v1.engine.async_llm import AsyncLLM
    from vllm.v1.engine.core_client import AsyncMPClient
    from vllm.v1.engine.output_processor import RequestState

    account = Account()
    update_weights, finish_weight_update = AsyncLLM.update_weights, AsyncLLM.finish_weight_update

    async def update(self: Any, request: Any) -> None:
        account.loading(request.update_info)
        await update_weights(self, request)

    async def finish(self: Any, *args: Any, **kwargs: Any) -> None:
        await finish_weight_update(self, *args, **kwargs)
        self.engine_core.outputs_queue.put_nowait(account.mark(self.output_processor))

    AsyncLLM.update_weights, AsyncLLM.finish_weight_update = update, finish  # type: ignore[method-assign]
    _meet_marks(AsyncMPClient)
    _attach_spans(RequestState, account)


def _meet_marks(client: Any) -> None:
    """Outputs are taken one after another, each processed before the next is asked for: a mark is met between two."""
    get_output = client.get_output_async

    async def get_output_async(self: Any) -> Any:
        while callable(output := await get_output(self)):
            output()
        return output

    client.get_output_async = get_output_async


def _attach_spans(request_state: Any, account: Account) -> None:
    new_completion_output = request_state._new_completion_output

    def with_spans(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = new_completion_output(self, *args, **kwargs)
        output.weight_versions = None if output.finish_reason is None else account.spans(self)
        return output

    request_state._new_completion_output = with_spans


def store_nothing_of_the_ended() -> None:
    """Have tiers take a request's blocks while it lives."""
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.scheduler import OffloadingConnectorScheduler

    finish = OffloadingConnectorScheduler.request_finished
    if getattr(finish, "orrery", False):
        return

    def finish_and_close(self: Any, request: Any) -> Any:
        answer = finish(self, request)
        status = self._req_status.get(request.request_id)
        for group in status.group_states if status is not None else ():
            group.next_stored_chunk_idx = len(group.offload_keys)
        return answer

    finish_and_close.orrery = True  # type: ignore[attr-defined]
    OffloadingConnectorScheduler.request_finished = finish_and_close  # type: ignore[method-assign]
