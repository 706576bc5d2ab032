"""The model: architecture, weights and tokenizer."""

from typing import Annotated, Any, Literal

from pydantic import Field, PositiveFloat, model_validator

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema.record import Count, NonNegativeInt, PositiveInt, Record, Sha256, Size

ATTENTION: dict[str, dict[str, tuple[Any, ...]]] = {  # choices of attention by family
    "qwen3": {
        "rotary_fraction": (1.0,),
        "rope_scaling": (None,),
        "attention_bias": (False,),
        "qk_norm": (True,),
    },
    "qwen3_moe": {
        "rotary_fraction": (1.0,),
        "rope_scaling": (None,),
        "attention_bias": (False,),
        "qk_norm": (True,),
    },
    "llama": {"rotary_fraction": (1.0,), "attention_bias": (False,), "qk_norm": (False,)},
    "glm4_moe": {"rope_scaling": (None,)},
}
QWEN3_MOE = {
    "num_dense_layers": 0,
    "num_shared_experts": 0,
    "score": "softmax",
    "routed_scale": 1.0,
}  # its only experts


class RandomInit(Record):
    """Weights drawn at `init` from a normal distribution with `std`. Norms are one."""

    kind: Literal["random"]
    seed: NonNegativeInt
    std: PositiveFloat


class PretrainedInit(Record):
    """Weights of a Hugging Face checkpoint on disk.

    `sha256` is the hash of `model.safetensors`, or for several files the output of `sha256sum
    model-*.safetensors | sha256sum`.
    """

    kind: Literal["pretrained"]
    path: str
    revision: str
    sha256: Sha256


class CharacterTokenizer(Record):
    """One token per character of `alphabet`, after the special tokens of the chat format."""

    kind: Literal["characters"]
    alphabet: str


class PretrainedTokenizer(Record):
    """The tokenizer files beside the pretrained weights.

    `sha256` is the output of `sha256sum FILES | sha256sum` over the existing `chat_template.jinja`,
    `generation_config.json`, `special_tokens_map.json`, `tokenizer.json` and
    `tokenizer_config.json` in this order.
    """

    kind: Literal["pretrained"]
    path: str
    sha256: Sha256


class MoE(Record):
    """Mixture-of-experts feed-forward of every layer except the first `num_dense_layers`.

    - `score` turns router logits into weights. With "sigmoid" biases affect the choice of experts,
      not the weight.
    - `routed_scale` multiplies the routed experts' output. Shared experts serve every token,
      unscaled.
    """

    num_experts: Count
    num_experts_per_token: Count
    expert_intermediate_size: Size
    normalize_top_k: bool
    num_dense_layers: NonNegativeInt
    num_shared_experts: NonNegativeInt
    score: Literal["softmax", "sigmoid"]
    routed_scale: PositiveFloat

    @model_validator(mode="after")
    def a_token_has_its_experts(self) -> "MoE":
        if self.num_experts_per_token > self.num_experts:
            raise ValueError(
                f"num_experts_per_token {self.num_experts_per_token} exceeds num_experts "
                f"{self.num_experts}; set it to at most that"
            )
        return self


class Llama3RopeScaling(Record):
    """Llama 3.1's scaling of low rotary frequencies (arXiv 2407.21783, transformers' "llama3")."""

    kind: Literal["llama3"]
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_max_positions: PositiveInt


class Indexer(Record):
    """DeepSeek sparse attention: a query attends to the `top_k` tokens with the best scores."""

    num_heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt


class MLA(Record):
    """Multi-head latent attention. Rotary embeddings apply to `rope_head_dim` of each head."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    value_head_dim: PositiveInt
    indexer: Indexer


class Model(Record):
    """Architecture in this project's names.

    - `head_dim` is the width of queries and keys. Rotary embeddings apply to `rotary_fraction` of
      it.
    - `glm5` is GLM-5 (transformers' `glm_moe_dsa`), `glm4_moe` is GLM-4.5.
    - `hugging_face` is any causal language model of transformers, built from `hf_config`, the
      content of its `config.json`.
    """

    family: Literal["qwen3", "qwen3_moe", "llama", "glm4_moe", "glm5", "hugging_face"]
    init: Annotated[RandomInit | PretrainedInit, Field(discriminator="kind")]
    tokenizer: Annotated[CharacterTokenizer | PretrainedTokenizer, Field(discriminator="kind")]
    vocab_size: Size
    hidden_size: Size
    intermediate_size: Size
    num_layers: Count
    num_heads: Count
    num_kv_heads: Count
    head_dim: Size
    max_positions: Size
    rope_theta: PositiveFloat
    rotary_fraction: Annotated[float, Field(gt=0.0, le=1.0)]
    rope_scaling: Llama3RopeScaling | None
    rms_norm_eps: PositiveFloat
    attention_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    moe: MoE | None
    mla: MLA | None
    hf_config: dict[str, Any] | None

    @property
    def mixture(self) -> MoE:
        """Return the experts. Raise OrreryError for a dense model."""
        if self.moe is None:
            raise OrreryError(f"model.moe: null, so family {self.family!r} has no experts; set it")
        return self.moe

    @model_validator(mode="after")
    def heads_divide_and_turn(self) -> "Model":
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads {self.num_heads} is not a multiple of num_kv_heads {self.num_kv_heads}"
            )
        if (mla := self.mla) is not None and self.head_dim != mla.nope_head_dim + mla.rope_head_dim:
            raise ValueError(
                f"head_dim {self.head_dim} is not mla.nope_head_dim {mla.nope_head_dim} + "
                f"mla.rope_head_dim {mla.rope_head_dim}"
            )
        if self.family == "hugging_face":
            return self
        field, turning = "head_dim · rotary_fraction", int(self.head_dim * self.rotary_fraction)
        if mla is not None:
            field, turning = "mla.rope_head_dim", mla.rope_head_dim
        if turning % 2:
            raise ValueError(
                f"{field} {turning} is odd, and numbers turn with position in pairs; try "
                f"{turning + 1}"
            )
        return self

    @model_validator(mode="after")
    def family_has_its_parts(self) -> "Model":
        has = {
            "moe": ("qwen3_moe", "glm4_moe", "glm5"),
            "mla": ("glm5",),
            "hf_config": ("hugging_face",),
        }
        for part, families in has.items():
            value = getattr(self, part)
            if (value is not None) != (self.family in families):
                raise ValueError(
                    f"family {self.family!r} and {part} {'null' if value is None else 'set'} do "
                    "not go together"
                )
        for field, only in ATTENTION.get(self.family, {}).items():
            if (value := getattr(self, field)) not in only:
                raise ValueError(
                    f"{field} {value!r}: family {self.family!r} has {' or '.join(map(repr, only))} "
                    "only"
                )
        if self.family == "qwen3_moe" and self.moe is not None:
            for field, fixed in QWEN3_MOE.items():
                if (value := getattr(self.moe, field)) != fixed:
                    raise ValueError(
                        f"moe.{field} {value!r}: family 'qwen3_moe' has {fixed!r} only"
                    )
        return self


def head_divisors(model: Model) -> list[int]:
    """Return the numbers of ranks that the heads can be divided among.

    Ranks get equal numbers of query heads, and separate key heads or one shared key head.
    """
    heads, groups = model.num_heads, model.num_kv_heads
    return [
        n for n in range(1, heads + 1) if heads % n == 0 and (groups % n == 0 or n % groups == 0)
    ]
