"""A worker thread: calls run in order, cancelling withdraws them, and none delays the exit."""

import asyncio
import subprocess
import sys
import threading

import pytest

from orrery.orchestrator.rollout import WorkerThread


def test_calls_come_one_after_another_and_one_that_is_taken_back_never():
    beside, go, done = WorkerThread("tests"), threading.Event(), []

    def first():
        assert go.wait(60.0)
        done.append(1)
        return "one"

    async def run():
        calls = [
            asyncio.create_task(beside(call))
            for call in (first, lambda: done.append(2), lambda: done.append(3))
        ]
        await asyncio.sleep(0.01)
        calls[1].cancel()
        await asyncio.sleep(0)
        go.set()
        return await calls[0], await calls[2]

    assert asyncio.run(run()) == ("one", None) and done == [1, 3]
    with pytest.raises(SystemExit, match="7"):
        asyncio.run(beside(lambda: sys.exit(7)))
    assert asyncio.run(beside(lambda: 8)) == 8


def test_a_call_that_hangs_keeps_no_process_from_its_end():
    program = (
        "import asyncio, threading; from orrery.orchestrator.rollout import WorkerThread\n"
        "async def main():\n"
        "    call = asyncio.create_task(WorkerThread('tests')(threading.Event().wait))\n"
        "    await asyncio.sleep(0.1)\n"
        "    assert not call.done()\n"
        "asyncio.run(main()); print('main is done')"
    )
    ended = subprocess.run(
        [sys.executable, "-c", program], timeout=60.0, capture_output=True, text=True
    )
    assert (ended.returncode, ended.stdout) == (0, "main is done\n")
