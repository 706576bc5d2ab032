"""Write start weights and tokenizer as the Hugging Face folder `weights/init`.

Weights are drawn from the seed or taken from a pretrained folder, one file at a time. The same
manifest gives the same bytes.
"""

import shutil

import torch

from orrery.manifest.publish import make_folder, publish_folder
from orrery.models import weights
from orrery.runtime.role_context import RoleContext
from orrery.tasks.check import check
from orrery.tasks.tokenizer import write_tokenizer


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
    dtype = getattr(torch, ctx.manifest.trainer.param_dtype)
    num_parameters = weights.write_initial(model, partial, dtype)
    publish_folder(partial, folder)
    ctx.log.info("weights/init: %.2f M parameters, %s", num_parameters / 1e6, model.init.kind)
