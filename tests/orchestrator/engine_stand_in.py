"""A server that answers as scripted in place of an engine, and remembers what it was asked."""

import asyncio
from collections import Counter
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from aiohttp import web

from orrery.wire.fingerprint import digest

HELD = {"a": ["0000000000000001", "resident"], "b": ["ffffffffffffffff", "as_consumed"]}


def answer(token_ids, spans, logprobs=None, cached=5, index=0):
    logprobs = [-0.5] * len(token_ids) if logprobs is None else logprobs
    return {
        "request_id": "generate-tokens-r",
        "usage": {"prompt_tokens": 2, "prompt_tokens_details": {"cached_tokens": cached}},
        "choices": [
            {
                "index": index,
                "finish_reason": "length",
                "token_ids": token_ids,
                "weight_versions": [{"version": v, "start": s, "end": e} for v, s, e in spans],
                "logprobs": {
                    "content": [
                        {"token_id": t, "logprob": p, "rank": 1}
                        for t, p in zip(token_ids, logprobs, strict=True)
                    ]
                },
            }
        ],
    }


def attested(held):
    return {
        "digest": digest({name: int(value, 16) for name, (value, _) in held.items()}),
        "how": dict(Counter(how for _, how in held.values())),
    }


@dataclass
class StandIn:
    """Answers as scripted, and remembers what it was asked."""

    generated: object = field(default_factory=lambda: answer([7, 8], [("3", 0, 2)]))
    streamed: list = field(default_factory=list)  # pieces of the bytes of a streamed answer
    cuts: bool = False
    held: dict = field(default_factory=lambda: HELD)
    fail: dict = field(default_factory=dict)  # path → (status, body)
    untaken: list = field(default_factory=lambda: [None])  # why each worker has not taken a version
    untaken_at_first: list = field(default_factory=list)  # the same, one a call
    before: dict = field(default_factory=dict)  # path → called with the body, in a thread
    hang: set = field(default_factory=set)  # paths without an answer
    delay_s: float = 0.0
    # The log-probs it gives of a prompt's tokens after the first.
    canary: list = field(default_factory=list)
    asked: list = field(default_factory=list)

    async def handle(self, request):
        body = await request.json() if request.can_read_body else None
        self.asked.append((request.path_qs, body))
        if request.path in self.hang:
            await asyncio.sleep(60)
        if request.path in self.before:
            await asyncio.to_thread(self.before[request.path], body)
        if request.path in self.fail:
            status, content = self.fail[request.path]
            return web.json_response(content, status=status)
        if request.path == "/inference/v1/generate":
            await asyncio.sleep(self.delay_s)
            if "prompt_logprobs" in body["sampling_params"]:
                rows = [
                    {str(token): {"logprob": p}}
                    for token, p in zip(body["token_ids"][1:], self.canary, strict=False)
                ]
                return web.json_response(self.generated | {"prompt_logprobs": [None, *rows]})
            if body.get("stream"):
                return await self.stream(request)
            return web.json_response(self.generated)
        if request.path == "/collective_rpc":
            return web.json_response({"results": self.answers(body["method"])})
        if request.path == "/metrics":
            return web.Response(
                text="# TYPE vllm:num_requests_running gauge\n"
                'vllm:num_requests_running{engine="0",model_name="policy"} 3.0\n'
                'vllm:num_requests_waiting{engine="0",model_name="policy"} 2.0\n'
                'vllm:num_requests_waiting_by_reason{reason="capacity"} 9.0\n'
                'vllm:kv_cache_usage_perc{engine="0"} 0.25\n'
                'vllm:kv_cache_usage_perc{engine="1"} 0.75\n'
                'vllm:cache_config_info{block_size="32",engine="0",num_gpu_blocks="100",'
                'num_gpu_blocks_override="None"} 1.0\n'
                'vllm:cache_config_info{block_size="32",engine="1",num_gpu_blocks="100",'
                'num_gpu_blocks_override="7"} 1.0\n'
                'vllm:generation_tokens_total{engine="0"} 1e+03\n'
                'vllm:prompt_tokens_total{engine="0"} 500.0\n'
                'vllm:prompt_tokens_total{engine="1"} 300.0\n'
                'vllm:prefix_cache_hits_total{engine="0"} 640.0\n'
                'vllm:external_prefix_cache_queries_total{engine="0"} 320.0\n'
                'vllm:external_prefix_cache_hits_total{engine="0"} 64.0\n'
                'vllm:external_prefix_cache_hits_total{engine="1"} 32.0\n'
            )
        return web.json_response({})

    async def stream(self, request):
        """Send the pieces of `streamed` one by one. If `cuts`, then break the connection."""
        response = web.StreamResponse()
        await response.prepare(request)
        for piece in self.streamed:
            await response.write(piece)
            await asyncio.sleep(0.01)
        if self.cuts:
            request.transport.close()
        else:
            await response.write_eof()
        return response

    def answers(self, method):
        """Return the workers' answers to `method`."""
        if method == "untaken":
            return self.untaken_at_first.pop(0) if self.untaken_at_first else self.untaken
        every = {"fingerprints": self.held, "attested": attested(self.held), "give_up_update": None}
        return [every[method]] * len(self.untaken)

    def calls(self):
        """Return the methods that the workers were asked for."""
        return [body["method"] for path, body in self.asked if path == "/collective_rpc"]

    def paths(self):
        return [path for path, _ in self.asked]


@asynccontextmanager
async def served(stand_ins):
    """Serve the stand-ins on loopback, and yield their URLs."""
    runners = []
    for each in stand_ins:
        application = web.Application()
        application.router.add_route("*", "/{tail:.*}", each.handle)
        runners.append(web.AppRunner(application, shutdown_timeout=0.1))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
    try:
        yield [f"http://127.0.0.1:{runner.addresses[0][1]}" for runner in runners]
    finally:
        for runner in runners:
            await runner.cleanup()
