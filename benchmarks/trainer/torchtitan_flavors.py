"""Add a Qwen3 flavor with fewer layers to torchtitan (`--experimental.custom_import`)."""

import os
from dataclasses import replace

from torchtitan.models.qwen3 import qwen3_args

flavor, layers = os.environ["ORRERY_PEER_FLAVOR"], int(os.environ["ORRERY_PEER_LAYERS"])
qwen3_args[f"{flavor}-{layers}L"] = replace(qwen3_args[flavor], n_layers=layers)
