"""Run the orchestrator: `python -m orrery.orchestrator --run-dir R --stage rl|evaluate …`."""

import asyncio
import gc

from orrery.manifest.errors import OrreryError
from orrery.orchestrator import assemble, evaluate
from orrery.orchestrator.loop import stop_trainer
from orrery.runtime.health import beating_loop
from orrery.runtime.process_control import Preempted
from orrery.runtime.role_context import RoleContext, role_process


async def rl(ctx: RoleContext) -> None:
    wire = assemble.sender(ctx)
    try:
        try:
            pool = await assemble.engine_pool(ctx, assemble.leases(ctx, wire))
        except Preempted as preempted:
            await stop_trainer(ctx, wire, preempted.step)
        async with pool as engines, assemble.guests(ctx, pool):
            loop = await assemble.loop(ctx, engines, wire)
            gc.freeze()
            if pool.guests is not None:
                pool.guests.on_refused = loop.scheduler.drop_engine
            await loop.run()
        with ctx.health.waiting("the trainer to take the last batch"):
            await wire.drained(None)
    finally:
        wire.close()


STAGES = {"rl": rl, "evaluate": evaluate.run}


async def run(ctx: RoleContext) -> None:
    async with beating_loop(ctx.health):
        await STAGES[ctx.stage](ctx)


def event_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


def main() -> None:
    with role_process("orchestrator") as ctx:
        if ctx.stage not in STAGES:
            names = ", ".join(STAGES)
            raise OrreryError(
                f"--stage: the orchestrator has no stage {ctx.stage!r}; choose from {names}"
            )
        with asyncio.Runner(loop_factory=event_loop) as runner:
            runner.run(run(ctx))


if __name__ == "__main__":
    main()
