"""An engine with block-scaled FP8 weights on any CPU: `python -m fp8_engine`.

vLLM's products need AMX or a GPU. Here they are plain products of dequantized blocks. vLLM itself
quantizes an update layer by layer, in place. The quantizing function is traced as on a GPU, by a
backend without a compiler.
"""

import os
from typing import Any
from unittest import mock

import torch

from orrery.inference import __main__, assemble
from orrery.inference.patches import registry

BLOCK = 128
server_arguments, correct = __main__.server_arguments, registry.correct_server


def whole(blocks: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """float32 [rows, columns], of FP8 numbers and a scale for every block of 128 × 128."""
    spread = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return blocks.float() * spread[: blocks.shape[0], : blocks.shape[1]]


def quantised_arguments(manifest: Any, *where: Any) -> list[str]:
    """Return the arguments of a GPU's engine. A manifest for a CPU has no FP8."""
    inference = manifest.inference.model_copy(update={"quantization": "fp8"})
    fp8 = manifest.model_copy(update={"inference": inference})
    return [
        *server_arguments(manifest, *where),
        *(part for pair in assemble._spread(fp8).items() for part in pair),
    ]


def correct_and_multiply_plainly(manifest: Any) -> None:
    correct(manifest)
    from vllm.model_executor.kernels import linear
    from vllm.model_executor.kernels.linear.scaled_mm.BlockScaledMMLinearKernel import (
        Fp8BlockScaledMMLinearKernel,
    )
    from vllm.model_executor.layers.quantization.online import fp8
    from vllm.platforms import PlatformEnum

    class Plain(Fp8BlockScaledMMLinearKernel):
        apply_input_quant = False

        @classmethod
        def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
            return True, None

        def apply_block_scaled_mm(
            self, A: torch.Tensor, B: torch.Tensor, As: torch.Tensor, Bs: torch.Tensor
        ) -> torch.Tensor:
            return A @ whole(B, Bs).T.to(A.dtype)

    linear._POSSIBLE_FP8_BLOCK_KERNELS[PlatformEnum.CPU] = [Plain]
    fp8.per_block_cast_to_fp8 = traced(fp8.per_block_cast_to_fp8)


def traced(function: Any) -> Any:
    from torch._dynamo import config

    with mock.patch.dict(os.environ, TORCHDYNAMO_DISABLE="0"):
        compiled = torch.compile(function, dynamic=True, backend="eager")

    def call(*arguments: Any, **options: Any) -> Any:
        with config.patch(disable=False):
            return compiled(*arguments, **options)

    return call


if __name__ == "__main__":
    __main__.server_arguments, registry.correct_server = (
        quantised_arguments,
        correct_and_multiply_plainly,
    )
    __main__.main()
