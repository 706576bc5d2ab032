# ruff: noqa: F401
"""The manifest: all settings that determine a run's result.

Every field is required, so that reviewers see every value. Hosts, mounts, ports and log levels are
in the cluster's site file. Names carry units: `_s`, `_bytes`, `_tokens`, `_steps`, `num_`.
"""

from orrery.manifest.schema.constraints import TARGETS
from orrery.manifest.schema.inference import Inference, disk_block_bytes, on_disk_bytes
from orrery.manifest.schema.manifest import (
    SCHEMA_VERSION,
    AdaptiveAdmission,
    Algorithm,
    ChatDataset,
    ChatFile,
    Demonstrations,
    Evaluate,
    FixedAdmission,
    Grpo,
    GuestEngines,
    Hardware,
    Manifest,
    MaxRl,
    Orchestrator,
    Sampling,
    SftData,
    TaskUse,
    TextData,
)
from orrery.manifest.schema.model import (
    MLA,
    Count,
    Indexer,
    Llama3RopeScaling,
    Model,
    MoE,
    PositiveInt,
    PretrainedInit,
    Probability,
    RandomInit,
    Record,
    RopeScaling,
    YarnRopeScaling,
)
from orrery.manifest.schema.trainer import (
    AdamW,
    Checkpoint,
    ConstantSchedule,
    CosineSchedule,
    DppoLoss,
    Elastic,
    Fsdp,
    FullCheckpointing,
    LinearSchedule,
    Lora,
    Memory,
    Mesh,
    ModuleCheckpointing,
    Muon,
    Optimizer,
    Schedule,
    SelectiveCheckpointing,
    Sgd,
    SignSgd,
    Trainer,
    WsdSchedule,
)
from orrery.manifest.schema.trainer_constraints import context_misfits, trainer_misfits
