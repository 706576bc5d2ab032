"""`python -m orrery.orchestrator --run-dir R --stage rl|evaluate …`: the orchestrator's process."""

import asyncio

from orrery.manifest.errors import OrreryError
from orrery.observe.heartbeat import heartbeat
from orrery.observe.process import RoleProcess, role_process
from orrery.observe.wind_down import WoundDown
from orrery.orchestrator import assemble, evaluate
from orrery.orchestrator.winding_down import end_trainer


async def rl(me: RoleProcess) -> None:
    """The RL stage, from the first weights to the last evaluation, or until it is asked to wind down."""
    wire = assemble.sender(me)
    try:
        try:
            fleet = await assemble.fleet(me)
        except WoundDown as asked:  # before anything was sent
            await end_trainer(me, wire, asked.step)
        async with fleet as engines:
            await (await assemble.loop(me, engines, wire)).run()
        with me.health.waiting("the trainer to take the last batch"):
            await wire.drained(None)
    finally:
        wire.close()


STAGES = {"rl": rl, "evaluate": evaluate.run}


async def run(me: RoleProcess) -> None:
    """Run the stage under a heartbeat, because other roles wait for this event loop."""
    async with heartbeat(me.health):
        await STAGES[me.stage](me)


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it is installed: it halves what a request costs us."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    with role_process("orchestrator") as me:
        if me.stage not in STAGES:
            raise OrreryError(
                f"orchestrator: --stage {me.stage!r} is not one of mine; choose from {', '.join(STAGES)}"
            )
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(run(me))


if __name__ == "__main__":
    main()
