"""Define the schema's field types, and the model's fields."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    PositiveFloat,
    SerializerFunctionWrapHandler,
    model_serializer,
)

from orrery.manifest.errors import OrreryError

MAX_INT = 2**53  # Jsonnet's largest exact integer
MAX_COUNT = 2**16  # maximum ranks, devices, layers, heads or experts
MAX_STEPS = 10**9
MAX_S = 365 * 86_400  # longer times may overflow clocks and sockets
MAX_SIZE = 2**24
# model family → (groups of experts, groups that a token uses)
EXPERT_GROUPS = {"deepseek_v3": (8, 4), "deepseek_v32": (8, 4)}
FP8_BLOCK = 128  # FP8 weights have a scale per 128 × 128 block

PositiveInt = Annotated[int, Field(gt=0, le=MAX_INT)]
NonNegativeInt = Annotated[int, Field(ge=0, le=MAX_INT)]
Count = Annotated[int, Field(gt=0, le=MAX_COUNT)]
Steps = Annotated[int, Field(gt=0, le=MAX_STEPS)]
Size = Annotated[int, Field(gt=0, le=MAX_SIZE)]
Probability = Annotated[float, Field(ge=0.0, le=1.0)]
Bound = PositiveFloat | None
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]  # factor of a moving average
Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
TemplateVariable = Annotated[str, Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
DType = Literal["float32", "bfloat16"]
DTYPE_BYTES = {"float32": 4, "bfloat16": 2}


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class RandomInit(Record):
    """Normally distributed weights with standard deviation `std`. Norm weights are 1."""

    kind: Literal["random"]
    seed: NonNegativeInt
    std: PositiveFloat


class PretrainedInit(Record):
    """Weights of a Hugging Face checkpoint on disk.

    `sha256`: hash of `model.safetensors` or, for several files, output of `sha256sum
    model-*.safetensors | sha256sum`.
    """

    kind: Literal["pretrained"]
    path: str
    revision: str
    sha256: Sha256


class CharacterTokenizer(Record):
    """One token per character of `alphabet`, after the chat format's special tokens."""

    kind: Literal["characters"]
    alphabet: str


class PretrainedTokenizer(Record):
    """The tokenizer files beside the pretrained weights.

    `sha256`: output of `sha256sum FILES | sha256sum`. FILES: existing files among
    `chat_template.jinja`, `generation_config.json`, `special_tokens_map.json`, `tokenizer.json`,
    `tokenizer_config.json`.
    """

    kind: Literal["pretrained"]
    path: str
    sha256: Sha256
    chat_template_kwargs: dict[TemplateVariable, bool | int | float | str | None] = {}

    @model_serializer(mode="wrap")
    def _without_default(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        fields = handler(self)
        if not self.chat_template_kwargs:
            del fields["chat_template_kwargs"]
        return fields


class MoE(Record):
    """Mixture of experts in all layers except the first `num_dense_layers`.

    `score`: function from router logits to expert weights. With "sigmoid", a bias affects the
    choice of experts, not their weights. `routed_scale`: factor of the routed experts' output.
    """

    num_experts: Count
    num_experts_per_token: Count
    expert_intermediate_size: Size
    normalize_top_k: bool
    num_dense_layers: NonNegativeInt
    num_shared_experts: NonNegativeInt
    score: Literal["softmax", "sigmoid"]
    routed_scale: PositiveFloat


class Llama3RopeScaling(Record):
    """Llama 3.1's scaling of low rotary frequencies (arXiv 2407.21783, transformers' "llama3")."""

    kind: Literal["llama3"]
    factor: PositiveFloat
    low_frequency_factor: PositiveFloat
    high_frequency_factor: PositiveFloat
    original_max_positions: PositiveInt


class YarnRopeScaling(Record):
    """DeepSeek-V3's YaRN (arXiv 2309.00071, transformers' "yarn").

    Frequencies with more than `fast_turns` turns in the original context are unchanged. With fewer
    than `slow_turns` turns, they are divided by `factor`.

    Let s(x) = 0.1 · x · log(factor) + 1. Attention scores are multiplied by s(score_scale)², and
    cosines and sines by s(angle_scale) / s(score_scale).
    """

    kind: Literal["yarn"]
    factor: Annotated[float, Field(ge=1.0)]
    fast_turns: PositiveFloat
    slow_turns: PositiveFloat
    angle_scale: PositiveFloat
    score_scale: PositiveFloat
    original_max_positions: PositiveInt


RopeScaling = Annotated[Llama3RopeScaling | YarnRopeScaling, Field(discriminator="kind")]


class Indexer(Record):
    """DeepSeek sparse attention: a query attends to the indexer's `top_k` best tokens.

    `types`: one value per layer. A "full" layer has an indexer. A "shared" layer uses the previous
    layer's choice (GLM-5.1). Null: all layers are "full".
    """

    num_heads: PositiveInt
    head_dim: PositiveInt
    top_k: PositiveInt
    types: list[Literal["full", "shared"]] | None


class MLA(Record):
    """Multi-head latent attention."""

    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    nope_head_dim: PositiveInt
    rope_head_dim: PositiveInt
    value_head_dim: PositiveInt
    indexer: Indexer | None


Fp8Part = Literal["attention", "feed_forward", "experts"]


Family = Literal[
    "qwen3",
    "qwen3_moe",
    "llama",
    "glm4_moe",
    "glm5",
    "deepseek_v3",
    "deepseek_v32",
    "kimi_k2",
    "hugging_face",
]


class Model(Record):
    """The architecture.

    - `head_dim`: width of a head's queries and keys. RoPE rotates `rotary_fraction` of it.
    - `family` "glm5": GLM-5 (transformers' `glm_moe_dsa`). "kimi_k2": DeepSeek-V3 without groups of
      experts. "hugging_face": any causal LM of transformers, with its `config.json` as `hf_config`.
    - `num_mtp_layers`: untrained layers for multi-token prediction. Exports copy them from `init`.
    - `fp8`: layers that trainer and engines compute in block-scaled FP8. "feed_forward" includes
      shared experts. Routers, LM head, embedding and norms never use FP8.
    """

    family: Family
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
    rope_scaling: RopeScaling | None
    rms_norm_eps: PositiveFloat
    attention_bias: bool
    qk_norm: bool
    tie_embeddings: bool
    moe: MoE | None
    mla: MLA | None
    hf_config: dict[str, Any] | None
    num_mtp_layers: NonNegativeInt
    fp8: list[Fp8Part] | None

    @property
    def latent(self) -> MLA:
        if self.mla is None:
            raise OrreryError(f"model.mla: null, but family {self.family!r} needs it; set it")
        return self.mla

    @property
    def num_indexers(self) -> int:
        if self.mla is None or (indexer := self.mla.indexer) is None:
            return 0
        return self.num_layers if indexer.types is None else indexer.types.count("full")

    @property
    def mixture(self) -> MoE:
        if self.moe is None:
            raise OrreryError(f"model.moe: null, so family {self.family!r} has no experts. Set it")
        return self.moe
