"""`python -m orrery.orchestrator --run-dir R --stage rl|evaluate …`: the orchestrator's process."""

import asyncio

from orrery.manifest.errors import OrreryError
from orrery.observe.heartbeat import heartbeat
from orrery.observe.process import RoleContext, role_process
from orrery.observe.wind_down import WoundDown
from orrery.orchestrator import assemble, evaluate
from orrery.orchestrator.preemption import stop_trainer


async def rl(ctx: RoleContext) -> None:
    """The RL stage, from the first weights to the last evaluation, or until it is asked to wind down."""
    wire = assemble.sender(ctx)
    try:
        try:
            fleet = await assemble.fleet(ctx)
        except WoundDown as asked:  # before anything was sent
            await stop_trainer(ctx, wire, asked.step)
        async with fleet as engines:
            await (await assemble.loop(ctx, engines, wire)).run()
        with ctx.health.waiting("the trainer to take the last batch"):
            await wire.drained(None)
    finally:
        wire.close()


STAGES = {"rl": rl, "evaluate": evaluate.run}


async def run(ctx: RoleContext) -> None:
    """Run the stage under a heartbeat, because other roles wait for this event loop."""
    async with heartbeat(ctx.health):
        await STAGES[ctx.stage](ctx)


def event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's, where it is installed: it halves what a request costs us."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    with role_process("orchestrator") as ctx:
        if ctx.stage not in STAGES:
            raise OrreryError(
                f"orchestrator: --stage {ctx.stage!r} is not one of mine; choose from {', '.join(STAGES)}"
            )
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(run(ctx))


if __name__ == "__main__":
    main()
