import pytest
import torch

from orrery.manifest.schema import Model

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def make_model():
    """A tiny manifest model of any family; keywords replace fields."""

    def make(family="qwen3", **fields) -> Model:
        moe = {
            "num_experts": 6,
            "num_experts_per_token": 2,
            "expert_intermediate_size": 20,
            "normalize_top_k": True,
            "num_dense_layers": 0,
            "num_shared_experts": 0,
            "score": "softmax",
            "routed_scale": 1.0,
        }
        glm = {
            "num_dense_layers": 1,
            "num_shared_experts": 1,
            "score": "sigmoid",
            "routed_scale": 1.5,
        }
        moe["num_experts"] = fields.pop("num_experts", moe["num_experts"])
        is_latent = family in ("glm5", "deepseek_v3", "deepseek_v32", "kimi_k2")
        glm_moe = {**moe, **glm} if is_latent or family == "glm4_moe" else None
        moe = moe if family == "qwen3_moe" else glm_moe
        indexer = {"num_heads": 8, "head_dim": 12, "top_k": 8, "types": None}
        indexer.update(fields.pop("indexer", {}))
        mla = {
            "q_lora_rank": 24,
            "kv_lora_rank": 20,
            "nope_head_dim": 10,
            "rope_head_dim": 6,
            "value_head_dim": 14,
            "indexer": indexer if family in ("glm5", "deepseek_v32") else None,
        }
        return Model.model_validate(
            {
                "family": family,
                "init": {"kind": "random", "seed": 3, "std": 0.2},
                "tokenizer": {"kind": "characters", "alphabet": "abc"},
                "vocab_size": 61,
                "hidden_size": 32,
                "intermediate_size": 56,
                "num_layers": 2,
                "num_heads": 4,
                "num_kv_heads": 4 if is_latent else 2,
                "head_dim": 16,
                "max_positions": 256,
                "rope_theta": 50000.0,
                "rms_norm_eps": 1e-6,
                "tie_embeddings": not is_latent,
                "moe": moe,
                "mla": mla if is_latent else None,
                "hf_config": None,
                "num_mtp_layers": 0,
                "fp8": None,
                "rotary_fraction": 0.5 if family == "glm4_moe" else 1.0,
                "rope_scaling": None,
                "attention_bias": family == "glm4_moe",
                "qk_norm": not is_latent and family != "llama",
                **fields,
            }
        )

    return make


@pytest.fixture(scope="session")
def make_pack():
    """(token_ids, positions, cu_seqlens) of documents of the given lengths."""

    def make(lengths, vocab_size=61, seed=0):
        token_ids = torch.randint(
            0, vocab_size, (sum(lengths),), generator=torch.Generator().manual_seed(seed)
        )
        positions = torch.cat([torch.arange(length) for length in lengths])
        return token_ids, positions, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)

    return make
