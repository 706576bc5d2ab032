"""The options of runs that have a row in benchmarks/trainer and in the table of docs/trainer.md, where nobody says others.

A row there that differs from its run's, such as one of the same run with the RL loss, says so on the command line.
"""

from typing import Any

SFT = {"loss": "sft"}
ROWS: dict[str, dict[str, Any]] = {
    "qwen3_30b_a3b_16k": SFT,
    "qwen3_30b_a3b_16k_offload": {"micro_batches": 8, "steps": 3, "warmup": 2},
    "qwen3_30b_a3b_32k": SFT,
    "qwen3_30b_a3b_64k": SFT,
    "qwen3_8b_8k": SFT,
    "qwen3_4b_16k": SFT,
    "qwen3_0_6b_16k": SFT,
}
