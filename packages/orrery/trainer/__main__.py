"""Run one rank of the trainer in one stage: `python -m orrery.trainer --stage init|sft|rl`.

Torch is imported late, so that the health file and the parent watch exist while it loads.
"""

from orrery.manifest.errors import OrreryError
from orrery.manifest.support import check_supported
from orrery.runtime.role_context import RoleContext, role_process
from orrery.trainer import grow_segments


def main() -> None:
    with role_process("trainer") as ctx:
        ctx.health.doing("loading torch")
        grow_segments()
        check_supported(ctx.manifest)
        match ctx.stage:
            case "init":
                from orrery.trainer.initialize import initialize

                initialize(ctx)
            case "sft":
                run_sft(ctx)
            case "rl":
                run_rl(ctx)
            case _:
                raise OrreryError(
                    f"--stage: the trainer has no stage {ctx.stage!r}; choose from init, sft, rl"
                )


def run_sft(ctx: RoleContext) -> None:
    from orrery.trainer.assemble import assemble_learner, assemble_world
    from orrery.trainer.export import export_policy
    from orrery.trainer.heartbeat import io_stall_s
    from orrery.trainer.memory_plan.out_of_memory import explain_out_of_memory
    from orrery.trainer.sft import load_validation, sft
    from orrery.trainer.sft_data import load_examples
    from orrery.trainer.stage_checkpoints import resume

    manifest, spec = ctx.manifest, ctx.manifest.stages.sft
    if spec is None:
        raise OrreryError("--stage: the manifest has no sft stage (stages.sft is null)")
    weights = ctx.run_dir / "weights"
    start = weights / "init"
    with assemble_world(ctx) as world, explain_out_of_memory(ctx) as progress:
        learner = assemble_learner(ctx, world, start, spec.optimizer, spec.max_grad_norm)
        progress.learner = learner
        resume(ctx, learner, "sft")
        ctx.health.doing("reading chats")
        examples = load_examples(manifest, start, share=(world.rank, world.size))
        sft(learner, examples, load_validation(manifest, start, examples.chats, world), ctx)
        ctx.health.doing("exporting weights", still_s=io_stall_s(world.size))
        learner.check_weights()
        export_policy(learner.policy, world, manifest.model, start, weights / "sft")


def run_rl(ctx: RoleContext) -> None:
    from orrery.trainer.assemble import assemble_rl, assemble_world
    from orrery.trainer.memory_plan.out_of_memory import explain_out_of_memory

    with (
        assemble_world(ctx) as world,
        explain_out_of_memory(ctx) as progress,
        assemble_rl(ctx, world) as loop,
    ):
        progress.learner = loop.learner
        loop.run()


if __name__ == "__main__":
    main()
