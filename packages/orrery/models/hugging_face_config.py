"""Check `model.hf_config` against the manifest, because its fields determine work and memory."""

from collections.abc import Callable
from dataclasses import fields
from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, PreTrainedConfig, PreTrainedModel

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model

# transformers lists these as causal, without `is_decoder`, but tokens attend to later tokens.
NOT_CAUSAL = ("cpmant", "xlnet")
# Fields of the manifest's model, and their names in configs. A config type has one name.
FIELDS = {
    "vocab_size": ("vocab_size",),
    "hidden_size": ("hidden_size",),
    "num_layers": ("num_hidden_layers",),
    "tie_embeddings": ("tie_word_embeddings",),
    "num_heads": ("num_attention_heads",),
    "num_kv_heads": ("num_key_value_heads",),
    "intermediate_size": ("intermediate_size", "ffn_dim"),
    "rms_norm_eps": (
        "rms_norm_eps",
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
}
POSITIONS = ("n_positions", "max_position_embeddings", "max_seq_len")


def call_transformers(make: Callable[..., Any], *args: Any, **content: Any) -> Any:
    """Raise OrreryError with the message of any exception."""
    try:
        return make(*args, **content)
    except Exception as error:
        message = " ".join(str(error).split())
        raise OrreryError(
            f"model.hf_config: transformers refuses it ({message}). "
            "Give the content of the model's config.json"
        ) from error


def check_config(model: Model, config: PreTrainedConfig) -> None:
    """Raise OrreryError unless `config` is of one causal model and agrees with the manifest."""
    check_type(config)
    _check_fields(model, config)
    _check_positions(model, config)


def check_network(model: Model, network: PreTrainedModel) -> None:
    """Raise OrreryError if a token's output depends on later tokens, or head sizes are wrong.

    A network on "meta" cannot run, so the model type and `is_decoder` tell what tokens see.
    """
    kind = network.config.model_type
    if kind in NOT_CAUSAL:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: its tokens attend to later tokens. "
            "Choose a causal language model"
        )
    if any(getattr(one, "is_decoder", None) is False for one in network.modules()):
        raise OrreryError(
            f"model.hf_config: with is_decoder false, tokens of {kind!r} attend to later tokens. "
            "Set model.hf_config.is_decoder to true"
        )
    sizes = {getattr(one, "head_dim", None) for one in network.modules()}
    found = sorted(size for size in sizes if isinstance(size, int))
    if found and model.head_dim not in found:
        values = " and ".join(map(str, found))
        raise OrreryError(
            f"model.head_dim {model.head_dim}: model.hf_config has head sizes "
            f"{values}. Set model.head_dim to that size"
        )


def check_type(config: PreTrainedConfig) -> None:
    kind = config.model_type
    if type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: transformers has no causal language model of "
            "this type. Choose another type"
        )
    if (text := config.get_text_config()) is not config:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: a model of several parts. Give the config of "
            f"its text model, of type {text.model_type!r}"
        )


def find_field(config: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that this type of config defines and sets.

    Configs also keep unknown fields, unused by code.
    """
    known = {*dir(type(config)), *config.attribute_map, *(one.name for one in fields(config))}
    found = (name for name in names if name in known and getattr(config, name) is not None)
    return next(found, None)


def _check_fields(model: Model, config: PreTrainedConfig) -> None:
    for ours, names in FIELDS.items():
        said, theirs = getattr(model, ours), find_field(config, names)
        if theirs is not None and (found := getattr(config, theirs)) != said:
            raise OrreryError(
                f"model.{ours} {said!r}: model.hf_config.{theirs} is {found!r}. Write the same"
            )
    found = [one["rope_theta"] for one in rotations(config) if "rope_theta" in one]
    if found and model.rope_theta not in found:
        values = " and ".join(map(repr, found))
        raise OrreryError(
            f"model.rope_theta {model.rope_theta!r}: model.hf_config.rope_theta is {values}. "
            "Write the same"
        )


def rotations(config: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [one for one in rope.values() if isinstance(one, dict)] or [rope]


def _check_positions(model: Model, config: PreTrainedConfig) -> None:
    """Raise OrreryError if the network cannot compute `max_positions`.

    Most networks without a rotation have a table of positions. Beyond a length, `longrope` and
    `dynamic` rotations depend on a batch's longest row.
    """
    field = None if getattr(config, "rope_parameters", None) else find_field(config, POSITIONS)
    most = 0 if field is None else getattr(config, field)
    if model.max_positions > most > 0:  # xlnet says -1
        raise OrreryError(
            f"model.max_positions {model.max_positions}: model.hf_config.{field} is {most}, "
            f"the most positions of this network. Set model.max_positions to {most} or less"
        )
    for rope in rotations(config):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            field = "original_max_position_embeddings"
            most = rope[field]
        elif "dynamic" in kind:
            field, most = "max_position_embeddings", config.max_position_embeddings
        else:
            continue
        if model.max_positions > most:
            raise OrreryError(
                f"model.max_positions {model.max_positions}: model.hf_config.{field} is {most}, "
                f"beyond which rope_type {kind!r} rotates a whole pack by its longest document. "
                f"Set model.max_positions to {most} or less"
            )
