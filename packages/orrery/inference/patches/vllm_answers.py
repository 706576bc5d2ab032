"""Send fewer messages from vLLM's engine core, and encode each answer once.

`registry` gives the reasons. A streamed answer has one JSON line per finished sample. The engine
core sends all held tokens before a pause or weight update, so that their versions are exact.
"""

import asyncio
import io
import math
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import cache
from operator import attrgetter
from typing import Any

import msgspec
import numpy as np

LEAST = -9999.0  # vLLM's replacement for -inf
CHUNK = 32
MERGED = ("new_token_ids", "new_logprobs", "events", "routed_experts")
LAST = (
    "request_id", "finish_reason", "stop_reason", "kv_transfer_params", "ec_transfer_params",
    "trace_headers", "num_nans_in_logits", "spec_decode_metrics",
)  # fmt: skip


def write_answers() -> None:
    from fastapi.responses import JSONResponse
    from pydantic import PrivateAttr
    from vllm.entrypoints.scale_out.token_in_token_out import api_router, serving
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseBase

    model_way = serving.ServingTokens.serve_tokens_full_generator

    class Written(GenerateResponseBase):  # type: ignore[misc]
        _body: bytes = PrivateAttr(b"")

        def model_dump(self, *_: Any, **__: Any) -> bytes:
            return self._body

    class BytesOrJson(JSONResponse):
        def render(self, content: Any) -> bytes:
            return content if isinstance(content, bytes) else super().render(content)

    async def serve_tokens_full_generator(
        self: Any, request: Any, results: AsyncIterator[Any], request_id: str, *rest: Any
    ) -> Any:
        if not is_plain(request):
            return await model_way(self, request, results, request_id, *rest)
        last = None
        try:
            async for result in results:
                last = result
        except asyncio.CancelledError:
            return self.create_error_response("Client disconnected")
        assert last is not None
        for output in last.outputs:
            self._raise_if_error(output.finish_reason, request_id)
        answer = Written.model_construct()
        answer._body = written(last, request_id, last.outputs, *rest[:1])
        return answer

    serving.ServingTokens.serve_tokens_full_generator = serve_tokens_full_generator
    api_router.JSONResponse = BytesOrJson


def stream_samples() -> None:
    from vllm.entrypoints.scale_out.token_in_token_out.serving import ServingTokens
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.parallel_sampling import ParentRequest

    token_way, all_at_once = ServingTokens.serve_tokens_stream_generator, ParentRequest.get_outputs
    streamed: set[str] = set()

    async def serve_tokens_stream_generator(
        self: Any, request: Any, results: AsyncIterator[Any], request_id: str, *rest: Any
    ) -> AsyncIterator[Any]:
        if not is_plain(request):
            async for piece in token_way(self, request, results, request_id, *rest):
                yield piece
            return
        # vLLM sends the parameters only when the first result is awaited.
        request.sampling_params.output_kind = RequestOutputKind.FINAL_ONLY
        streamed.add(request_id)
        try:
            async for result in results:
                for output in result.outputs:
                    self._raise_if_error(output.finish_reason, request_id)
                    yield written(result, request_id, [output], *rest[:1]) + b"\n"
        except Exception as error:  # status 200 is already sent, so the error is a line
            yield msgspec.json.encode({"error": {"message": str(error)}}) + b"\n"
        finally:
            streamed.discard(request_id)

    def get_outputs(self: Any, child: str, output: Any) -> tuple[list[Any], bool]:
        is_open = child in self.child_requests
        outputs, is_over = all_at_once(self, child, output)
        if self.external_req_id in streamed:
            outputs = [output] if is_open else []
        return outputs, is_over

    ServingTokens.serve_tokens_stream_generator = serve_tokens_stream_generator
    ParentRequest.get_outputs = get_outputs  # type: ignore[method-assign]


def is_plain(request: Any) -> bool:
    sampling = request.sampling_params
    asks = (
        sampling.logprobs or 0,
        sampling.prompt_logprobs is not None,
        getattr(request, "output_mode", "tokens") != "tokens",
    )
    names = ("return_token_ids", "_response_mm_placeholders")
    rare = [getattr(request, name, None) for name in names]
    rare.append(getattr(sampling, "prompt_logprob_token_ids", None))
    return not any(asks) and not any(rare)


def written(last: Any, request_id: str, outputs: list[Any], model: str | None = None) -> bytes:
    """Return the JSON that vLLM's pydantic models give for `last`, a `RequestOutput`."""
    encoder_ids = getattr(last, "encoder_prompt_token_ids", None) or ()
    num_prompt = len(last.prompt_token_ids) + len(encoder_ids)
    num_sampled = sum(len(output.token_ids) for output in outputs)
    usage: dict[str, Any] = {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_sampled,
        "total_tokens": num_prompt + num_sampled,
    }
    if last.num_cached_tokens is not None:
        usage["prompt_tokens_details"] = {"cached_tokens": last.num_cached_tokens}
    answer = {
        "request_id": request_id,
        "model": model,
        "choices": [_choice(output) for output in outputs],
        "usage": usage,
    }
    names = ("kv_transfer_params", "ec_transfer_params")
    return msgspec.json.encode(answer | {name: getattr(last, name, None) for name in names})


def _choice(output: Any) -> dict[str, Any]:
    tokens = list(output.token_ids)
    choice: dict[str, Any] = {
        "index": output.index,
        "finish_reason": output.finish_reason or "stop",
        "token_ids": tokens,
    }
    if output.logprobs is not None:
        values = [step[token].logprob for step, token in zip(output.logprobs, tokens, strict=True)]
        if any(math.isnan(value) for value in values):
            raise ValueError("a sampled token's log-prob is not a number. Look at the weights")
        content = [
            {"token_id": token, "logprob": value if value > LEAST else LEAST}
            for token, value in zip(tokens, values, strict=True)
        ]
        choice["logprobs"] = {"content": content}
    if output.routed_experts is not None:
        choice["routed_experts"] = msgspec.Raw(b'"%b"' % _file_in_base64(output.routed_experts))
    if output.weight_versions is not None:
        spans = output.weight_versions
        choice["weight_versions"] = [
            {"version": span.version, "start": span.start, "end": span.end} for span in spans
        ]
    return choice


def _file_in_base64(array: np.ndarray) -> bytes:
    import pybase64

    file = io.BytesIO()
    np.save(file, array)
    encoded: bytes = pybase64.b64encode(file.getbuffer())
    return encoded


def hold_outputs() -> None:
    from vllm.v1.engine.core import EngineCore, EngineCoreProc

    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _holding(getattr(EngineCore, name)))
    handle = _telling(EngineCoreProc._handle_client_request)
    EngineCoreProc._handle_client_request = handle  # type: ignore[method-assign]


def _holding(step: Any) -> Any:
    def step_and_hold(self: Any) -> Any:
        outputs, executed = step(self)
        if outputs:
            held = self.__dict__.setdefault("orrery_held", Held())
            for client, each in outputs.items():
                each.outputs = held.pass_on(client, each.outputs, self.scheduler.requests)
        return outputs, executed

    return step_and_hold


def _telling(handle: Any) -> Any:
    from vllm.v1.engine import EngineCoreOutputs, EngineCoreRequestType

    requests = (EngineCoreRequestType.ADD, EngineCoreRequestType.WAKEUP)

    def tell_and_handle(self: Any, request_type: Any, request: Any) -> None:
        held = self.__dict__.get("orrery_held")
        if held is not None and request_type not in requests:
            for client, outputs in held.all().items():
                found = EngineCoreOutputs(outputs=outputs, weight_version=self._weight_version)
                self.output_queue.put_nowait((client, found))
        handle(self, request_type, request)

    return tell_and_handle


@dataclass
class Held:
    """Outputs not yet sent. `parts`: {request id: (client index, outputs)}."""

    parts: dict[str, tuple[int, list[Any]]] = field(default_factory=dict)

    def pass_on(self, client: int, outputs: list[Any], requests: dict[str, Any]) -> list[Any]:
        found: list[Any] = []
        if not outputs:
            return found
        others, none = _others(outputs[0].__struct_fields__)
        for output in outputs:
            name, is_last = output.request_id, output.finish_reason is not None
            before = self.parts.get(name)
            if others(output) != none:
                parts = [] if before is None else before[1]
                found += [*([merged(parts)] if parts else ()), output]
                parts.clear()
            elif before is not None:
                parts = before[1]
                if output.routed_experts is not None:
                    # a view would keep the step's whole array in memory
                    output.routed_experts = output.routed_experts.copy()
                parts.append(output)
                if is_last or len(parts) >= CHUNK:
                    found.append(merged(parts))
                    parts.clear()
            else:
                found.append(output)
                if not is_last and _is_whole(requests.get(name)):
                    self.parts[name] = (client, [])
            if is_last:
                self.parts.pop(name, None)
        return found

    def all(self) -> dict[int, list[Any]]:
        found: dict[int, list[Any]] = {}
        for client, parts in self.parts.values():
            if parts:
                found.setdefault(client, []).append(merged(parts))
        self.parts.clear()
        return found


def merged(parts: list[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    last = parts[-1]
    logprobs: list[Any] = [part.new_logprobs for part in parts if part.new_logprobs is not None]
    routes = [part.routed_experts for part in parts if part.routed_experts is not None]
    events = [event for part in parts for event in part.events or ()]
    return msgspec.structs.replace(
        last,
        new_token_ids=[token for part in parts for token in part.new_token_ids],
        new_logprobs=_one_after_the_other(logprobs) if logprobs else None,
        events=events or None,
        routed_experts=np.concatenate(routes) if routes else None,
    )


def _one_after_the_other(logprobs: list[Any]) -> Any:
    """Concatenate steps' log-probs [positions, columns], cut to the narrowest step."""
    width = min(one.logprobs.shape[1] for one in logprobs)
    rows = (
        (one.logprob_token_ids[:, :width], one.logprobs[:, :width], one.sampled_token_ranks)
        for one in logprobs
    )
    return type(logprobs[0])(*(np.concatenate(each) for each in zip(*rows, strict=True)))


@cache
def _others(fields: tuple[str, ...]) -> tuple[Callable[[Any], Any], Any]:
    names = [name for name in fields if name not in (*MERGED, *LAST)]
    return attrgetter(*names), (None,) * len(names)


def _is_whole(request: Any) -> bool:
    from vllm.sampling_params import RequestOutputKind

    sampling = None if request is None else request.sampling_params
    # The API server needs tokens at once to search for stop strings.
    return (
        sampling is not None
        and sampling.output_kind == RequestOutputKind.FINAL_ONLY
        and not sampling.stop
    )
