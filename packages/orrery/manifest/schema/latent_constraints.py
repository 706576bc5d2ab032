"""Check the constraints of latent attention, and of sparse attention in engines."""

from collections.abc import Iterator
from typing import TYPE_CHECKING

from orrery.manifest.schema.model import EXPERT_GROUPS, MLA, Model

if TYPE_CHECKING:
    from orrery.manifest.schema.manifest import Manifest

INDEXER_BLOCK_TOKENS = 64  # size of the blocks that vLLM's indexers read
CHOSEN_KEYS_BLOCK = 128  # number of chosen keys that FlashMLA reads at a time
MOST_CHOICE_TOKENS = 16384  # maximum sequence length: a bit per token is 2 KiB per query


def latent_misfits(model: Model, mla: MLA) -> Iterator[str]:
    if model.num_kv_heads != model.num_heads:
        yield (
            f"model.num_kv_heads {model.num_kv_heads}: latent attention has a key for each of "
            f"num_heads {model.num_heads}; set it to that"
        )
    moe, indexer = model.moe, mla.indexer
    num_groups, num_kept = EXPERT_GROUPS.get(model.family, (1, 1))
    if moe and num_groups > 1 and (moe.num_experts % num_groups or moe.num_experts == num_groups):
        yield (
            f"model.moe.num_experts {moe.num_experts}: family {model.family!r} divides experts "
            f"into {num_groups} groups of at least two; set it to {2 * num_groups} or another "
            "multiple"
        )
    elif moe and moe.num_experts_per_token > moe.num_experts // num_groups * num_kept:
        yield (
            f"model.moe.num_experts_per_token {moe.num_experts_per_token}: a token uses "
            f"{num_kept} of {num_groups} groups of experts; set it to at most "
            f"{moe.num_experts // num_groups * num_kept}"
        )
    if indexer is None:
        if model.family in ("glm5", "deepseek_v32"):
            yield (
                f"model.mla.indexer null: family {model.family!r} chooses keys with it; write it, "
                "or choose family 'deepseek_v3'"
            )
        return
    if model.family == "deepseek_v32" and indexer.types is not None:
        yield (
            "model.mla.indexer.types is set: each layer of family 'deepseek_v32' has an indexer; "
            "set it to null"
        )
    if mla.rope_head_dim > indexer.head_dim:
        yield (
            f"model.mla.indexer.head_dim {indexer.head_dim} is less than mla.rope_head_dim "
            f"{mla.rope_head_dim}, which turns in it; set it to at least that"
        )
    if indexer.types is None:
        return
    if len(indexer.types) != model.num_layers or indexer.types[0] != "full":
        yield (
            f"model.mla.indexer.types has {len(indexer.types)} layers, of which the first is "
            f"{indexer.types[:1]}; name all {model.num_layers} layers, the first 'full', or set it "
            "to null"
        )


def sparse_engine_misfits(run: "Manifest") -> Iterator[str]:
    accelerator, inference, mla = run.hardware.accelerator, run.inference, run.model.mla
    if accelerator == "cpu" or mla is None or mla.indexer is None:
        return
    for field, value, only in (
        ("model.mla.kv_lora_rank", mla.kv_lora_rank, 512),
        ("model.mla.rope_head_dim", mla.rope_head_dim, 64),
        ("model.mla.indexer.head_dim", mla.indexer.head_dim, 128),
        ("inference.dtype", inference.dtype, "bfloat16"),
    ):
        if value != only:
            yield (
                f"{field} {value!r}: engines on {accelerator} have kernels of sparse attention for "
                f"{only!r} only; set it to that"
            )
    for field, value, block in (
        ("model.mla.indexer.top_k", mla.indexer.top_k, CHOSEN_KEYS_BLOCK),
        ("inference.kv_block_tokens", inference.kv_block_tokens, INDEXER_BLOCK_TOKENS),
    ):
        if value % block:
            yield (
                f"{field} {value}: sparse attention on {accelerator} reads keys in blocks of "
                f"{block}; set it to {-(-value // block) * block}"
            )


def choice_misfits(run: "Manifest") -> Iterator[str]:
    if run.trainer.indexer_choice == "own":
        return
    what = f"trainer.indexer_choice {run.trainer.indexer_choice!r}"
    off = "set trainer.indexer_choice to 'own'"
    if not run.model.num_indexers:
        yield f"{what}: family {run.model.family!r} has no indexers here; {off}"
    if not run.transport.routed_experts:
        yield f"{what}: choices travel with routes; set transport.routed_experts to true, or {off}"
    if (longest := run.inference.max_model_len_tokens) > MOST_CHOICE_TOKENS:
        yield (
            f"{what} with inference.max_model_len_tokens {longest}: a choice has a bit for each "
            f"token, for at most {MOST_CHOICE_TOKENS} tokens; {off}"
        )
