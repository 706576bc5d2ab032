"""The init stage: the weights and the tokenizer that the run starts from, as a Hugging Face folder `weights/init`.

- The manifest's tasks are built and their prompts fitted first (`orrery.tasks.check`): a mistake in them must not cost a run.
- `orrery.models.weights.write_initial` draws them from the manifest's seed, or takes a pretrained folder's after checking its config and
  digest: one file of tensors at a time, so a model larger than this host's memory is no trouble.
- The folder appears whole; the same manifest gives the same bytes.
"""

import shutil

import torch

from orrery.manifest.publish import make_folder, publish_folder
from orrery.models import weights
from orrery.observe.process import RoleContext
from orrery.tasks.chat import write_tokenizer
from orrery.tasks.check import check


def initialize(ctx: RoleContext) -> None:
    ctx.health.doing("checking tasks")
    check(ctx.manifest)
    ctx.health.doing("initializing weights")
    model = ctx.manifest.model
    folder = ctx.run_dir / "weights" / "init"
    partial = folder.with_name("init.partial")
    shutil.rmtree(partial, ignore_errors=True)
    make_folder(partial)
    write_tokenizer(model, partial)
    num_parameters = weights.write_initial(
        model, partial, getattr(torch, ctx.manifest.trainer.param_dtype)
    )
    publish_folder(partial, folder)
    ctx.log.info("weights/init: %.2f M parameters, %s", num_parameters / 1e6, model.init.kind)
