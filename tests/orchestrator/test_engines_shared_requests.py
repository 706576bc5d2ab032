"""Test which calls share a request, what each call returns, and what aborts the request."""

import asyncio

import numpy as np
import pytest

from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.messages import Generation, GenerationFailed
from orrery.orchestrator.engines.requests import SharedRequests

PROMPT = np.array([1, 2], np.int32)


class Engine:
    """Record requests and aborts. A test calls `deliver` when a sample is to end."""

    def __init__(self):
        self.requests, self.aborted, self.deliver, self.ended = [], [], {}, {}

    async def generate_each(self, token_ids, num_samples, deliver, *, request_id, **options):
        self.requests.append((request_id, num_samples, options))
        self.deliver[request_id] = lambda sample: deliver(generation(sample))
        self.ended[request_id] = asyncio.get_running_loop().create_future()
        await self.ended[request_id]

    async def abort(self, request_ids):
        self.aborted += request_ids


def generation(sample):
    empty = np.zeros(0, np.int32)
    return Generation("r", empty, np.zeros(0, np.float32), empty, "stop", 0, sample=sample)


def drive(scenario, max_samples=8):
    async def main():
        engine = Engine()
        abort = lambda names: engine.abort(names)  # noqa: E731
        shared = SharedRequests(engine.generate_each, abort, max_samples)

        def call(name, share="group-3"):
            return asyncio.create_task(
                shared.generate(share, PROMPT, request_id=name, temperature=1.0)
            )

        await asyncio.wait_for(scenario(engine, call), 10)

    asyncio.run(main())


async def passes(count=4):
    for _ in range(count):
        await asyncio.sleep(0)


def test_calls_of_one_pass_share_a_request_and_each_ends_with_its_own_sample():
    async def scenario(engine, call):
        first, second, other = call("a"), call("b"), call("c", share="group-4")
        await passes()
        assert engine.requests == [
            ("a+1", 2, {"temperature": 1.0}),
            ("c", 1, {"temperature": 1.0}),
        ]
        engine.deliver["a+1"](1)
        assert (await second).sample == 1
        assert not first.done() and not other.done()
        late = call("d")
        await passes()
        assert [name for name, *_ in engine.requests] == ["a+1", "c", "d"]
        for name in ("a+1", "c", "d"):
            engine.deliver[name](0)
        assert [each.sample for each in await asyncio.gather(first, other, late)] == [0, 0, 0]
        assert engine.aborted == []

    drive(scenario)


def test_a_request_has_no_more_samples_than_an_engine_takes():
    async def scenario(engine, call):
        calls = [call(f"r{number}") for number in range(5)]
        await passes()
        assert [request[:2] for request in engine.requests] == [("r0+1", 2), ("r2+1", 2), ("r4", 1)]
        for name, samples, _ in engine.requests:
            for sample in range(samples):
                engine.deliver[name](sample)
        await asyncio.gather(*calls)

    drive(scenario, max_samples=2)


def test_a_request_is_aborted_with_its_last_call_and_not_before():
    async def scenario(engine, call):
        calls = [call(name) for name in "abc"]
        await passes()
        for each in calls[:2]:
            each.cancel()
        await passes()
        assert engine.aborted == [] and not engine.ended["a+2"].cancelled()
        engine.deliver["a+2"](0)  # its call is cancelled
        calls[2].cancel()
        await asyncio.gather(*calls, return_exceptions=True)
        assert engine.aborted == ["a+2"] and engine.ended["a+2"].cancelled()

    drive(scenario)


def test_a_cancelled_call_ends_as_cancelled_when_an_engine_is_gone_and_leaves_its_own_id_alone():
    async def scenario(engine, call):
        async def abort(request_ids):
            engine.aborted += request_ids
            raise OrreryError("the engine is gone")

        engine.abort = abort
        calls = [call(name) for name in "ab"]
        alone = call("c", share="group-4")
        await passes()
        for each in (*calls, alone):
            each.cancel()
        await asyncio.gather(*calls, alone, return_exceptions=True)
        await passes()
        assert all(each.cancelled() for each in (*calls, alone))
        assert engine.aborted == ["a+1"] and engine.ended["c"].cancelled()

    drive(scenario)


def test_calls_cancelled_before_the_request_is_sent_are_not_part_of_it():
    async def scenario(engine, call):
        first, second = call("a"), call("b")
        alone = [call(name, share="group-4") for name in "cd"]
        await passes(1)
        for each in (first, *alone):
            each.cancel()
        await passes()
        assert [request[:2] for request in engine.requests] == [("b", 1)]
        engine.deliver["b"](0)
        assert (await second).sample == 0
        assert [each.cancelled() for each in (first, *alone)] == [True] * 3

    drive(scenario)


def test_a_failure_reaches_all_calls_whose_sample_has_not_ended():
    async def scenario(engine, call):
        calls = [call(name) for name in "abc"]
        await passes()
        engine.deliver["a+2"](1)
        engine.ended["a+2"].set_exception(GenerationFailed("the engine refused it"))
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert results[1].sample == 1
        for index in (0, 2):
            with pytest.raises(GenerationFailed, match="the engine refused it"):
                raise results[index]

    drive(scenario)
