"""Patch vLLM: encode an answer of /inference/v1/generate once, without a model for each token.

Otherwise requests that end together wait for one another. The answer omits a token's own entry
among its top log-probs. Requests for more log-probs go vLLM's way.
"""

import asyncio
import io
import math
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import numpy as np

LEAST = -9999.0  # vLLM's value for -inf


def write_answers() -> None:
    """Apply in the API server's process, before the server is made."""
    from fastapi.responses import JSONResponse
    from pydantic import PrivateAttr
    from vllm.entrypoints.scale_out.token_in_token_out import api_router, serving
    from vllm.entrypoints.scale_out.token_in_token_out.protocol import GenerateResponseBase

    model_way = serving.ServingTokens.serve_tokens_full_generator

    class Written(GenerateResponseBase):  # type: ignore[misc]
        """An encoded answer. The endpoint checks for this base class."""

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
        answer._body = written(last, request_id, *rest[:1])
        return answer

    serving.ServingTokens.serve_tokens_full_generator = serve_tokens_full_generator
    api_router.JSONResponse = BytesOrJson


def is_plain(request: Any) -> bool:
    """Return whether the request asks only for tokens and their log-probs."""
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


def written(last: Any, request_id: str, model: str | None = None) -> bytes:
    """Return the JSON of vLLM's models for a request's whole output."""
    encoder_ids = getattr(last, "encoder_prompt_token_ids", None) or ()
    num_prompt = len(last.prompt_token_ids) + len(encoder_ids)
    num_sampled = sum(len(output.token_ids) for output in last.outputs)
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
        "choices": [_choice(output) for output in last.outputs],
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
            raise ValueError("a sampled token's log-prob is not a number; look at the weights")
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
    """Return a .npy file in base64."""
    import pybase64

    file = io.BytesIO()
    np.save(file, array)
    encoded: bytes = pybase64.b64encode(file.getbuffer())
    return encoded
