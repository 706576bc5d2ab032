"""Run one trainer rank in one stage: `python -m orrery.trainer --stage init|sft|rl`."""

import gc
import shutil
from importlib import import_module

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import make_folder, publish_folder
from orrery.runtime.role_context import RoleContext, role_process
from orrery.runtime.run_directory import weights_path
from orrery.trainer import grow_segments


def main() -> None:
    with role_process("trainer") as ctx:
        ctx.health.doing("loading torch")
        grow_segments()
        if ctx.stage not in STAGES:
            raise OrreryError(
                f"--stage: the trainer has no stage {ctx.stage!r}; choose from {', '.join(STAGES)}"
            )
        gc.disable()  # collection frees nothing during imports
        import_module("orrery.trainer.assemble" if ctx.stage != "init" else "orrery.models.weights")
        gc.freeze()
        gc.enable()
        STAGES[ctx.stage](ctx)


def initialize(ctx: RoleContext) -> None:
    import torch

    from orrery.models import weights
    from orrery.tasks.chat import write_tokenizer
    from orrery.tasks.check import check

    ctx.health.doing("checking tasks")
    check(ctx.manifest)
    ctx.health.doing("initializing weights")
    model = ctx.manifest.model
    folder = weights_path(ctx.run_dir, "init")
    partial = folder.with_name("init.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    write_tokenizer(model, partial)
    dtype = getattr(torch, ctx.manifest.trainer.param_dtype)
    num_parameters = weights.write_initial(model, partial, dtype)
    publish_folder(partial, folder)
    ctx.log.info("weights/init: %.2f M parameters, %s", num_parameters / 1e6, model.init.kind)


def run_sft(ctx: RoleContext) -> None:
    from orrery.trainer.assemble import assemble_learner, assemble_site, assemble_world
    from orrery.trainer.checkpoint_writer import resume
    from orrery.trainer.export import export_policy
    from orrery.trainer.heartbeat import io_stall_s
    from orrery.trainer.out_of_memory import explain_out_of_memory
    from orrery.trainer.sft import load_validation, sft
    from orrery.trainer.sft_data import load_examples

    manifest, spec = ctx.manifest, ctx.manifest.stages.sft
    if spec is None:
        raise OrreryError("--stage: the manifest has no sft stage (stages.sft is null)")
    start, made = weights_path(ctx.run_dir, "init"), weights_path(ctx.run_dir, "sft")
    with assemble_world(ctx) as world, explain_out_of_memory(ctx) as progress:
        learner = assemble_learner(ctx, world, start, spec.optimizer, spec.max_grad_norm)
        progress.learner = learner
        resumed = resume(ctx, learner, "sft")
        ctx.health.doing("reading data")
        examples = load_examples(manifest, start, share=(world.rank, world.size))
        validation = load_validation(manifest, start, examples.chats, world)
        with assemble_site(ctx, learner, resumed) as site:
            sft(learner, examples, validation, ctx, site)
        ctx.health.doing("exporting weights", still_s=io_stall_s(world.size))
        learner.check_weights()
        export_policy(learner.policy, world, manifest.model, start, made)


def run_rl(ctx: RoleContext) -> None:
    from orrery.trainer.assemble import assemble_rl, assemble_world
    from orrery.trainer.out_of_memory import explain_out_of_memory

    with (
        assemble_world(ctx) as world,
        explain_out_of_memory(ctx) as progress,
        assemble_rl(ctx, world) as loop,
    ):
        progress.learner = loop.learner
        loop.run()


STAGES = {"init": initialize, "sft": run_sft, "rl": run_rl}

if __name__ == "__main__":
    main()
