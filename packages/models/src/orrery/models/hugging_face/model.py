"""Any causal language model of transformers behind the interface of our own networks.

T tokens · D hidden · n documents · L longest document

- A pack is taken apart into a padded batch [n, L] and put together again, which is right on every model that looks back only: padding
  stands behind its document. It costs n · L tokens of compute and activations for the T that are there; documents of like lengths, or one
  of our own families, cost less.
- Attention is whatever transformers chooses; context and expert parallelism, router replay and our kernels but the LM head's are not here.
- Names in files are transformers' own. Experts that a network stacks stand one by one in most files (`_names_of_parts`); architectures
  whose files hold their tensors in any other parts are refused.
- What looks ahead is refused, as far as it says so: networks with a module whose `is_decoder` is false, and the types of `LOOKS_AHEAD`.
  Values are not looked at, of which a network has none when it is built.
- Fields of the manifest's model that the config has too must say the same, since work and memory are counted from the manifest's.
- Positions of a network without a rotation end where the config says: most such networks have a table of them.
- Rotations that transformers chooses by the longest row of a batch are refused beyond the length up to which they are one.
- Buffers that no file holds, such as rotary frequencies, are computed by transformers' own initialisation (`compute_buffers`).
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from orrery.kernels.attention import Documents
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.hugging_face.head import Head
from orrery.models.names import Names

try:  # what transformers does to names when it saves; not documented as an interface
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:
    revert_weight_conversion = None

LOOKS_AHEAD = (
    "cpmant",
    "xlnet",
)  # model types that transformers calls causal language models, with no `is_decoder` to tell
SAME_IN_CONFIG = {  # fields of the manifest's model, and what configs of transformers call them; which of these one has is its type's
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
PROBED = (
    12,
    2,
)  # rows and columns of an expert, where it is asked how files hold a stack of them: rows that 2, 3 and 4 divide
POSITIONS = (
    "n_positions",
    "max_position_embeddings",
    "max_seq_len",
)  # what configs call the length of a table of positions

_GLOBAL_GENERATOR = (
    threading.Lock()
)  # transformers draws from torch's own generator, of which a process has one


class HuggingFaceLm(CausalLm):
    def __init__(self, config: Model) -> None:
        super().__init__(config)
        content = copy.deepcopy(config.hf_config or {})  # into which transformers writes
        for told in ("dtype", "torch_dtype"):
            content.pop(told, None)
        if "model_type" not in content:
            raise OrreryError(
                "model.hf_config: no model_type; give the content of the model's config.json"
            )
        settings = _taken(AutoConfig.for_model, **content)
        _check_type(settings)
        _check_equal(config, settings)
        _check_positions(config, settings)
        network = _taken(AutoModelForCausalLM.from_config, settings)
        _check_causal(network)
        _check_head_dim(config, network)
        head_name = next(
            name for name, one in network.named_modules() if one is network.get_output_embeddings()
        )
        body_name = network.base_model_prefix
        self.body = getattr(network, body_name)
        self.lm_head = Head(
            network,
            body_name,
            head_name,
            self.body.get_input_embeddings() if config.tie_embeddings else None,
        )
        self.body.eval()
        self._drawn: tuple[tuple[str, int, float], Tensor] | None = None
        self._network = (
            network,
        )  # in a tuple, and so not a part: it initialises, and body and head are parts already
        ours = {f"{body_name}.{name}": f"body.{name}" for name in self.body.state_dict()}
        ours |= {f"{head_name}.{name}": f"lm_head.{name}" for name in self.lm_head.state_dict()}
        state = network.state_dict(keep_vars=True)
        if config.tie_embeddings:
            del state[f"{head_name}.weight"]
        if odd := sorted(state.keys() - ours.keys()):
            raise OrreryError(
                f"model.hf_config: {odd[0]} of this architecture is neither in its body nor in its head; it is not built"
            )
        self.names = {
            ours[name]: in_file for name, in_file in _names_in_files(network, state).items()
        }

    def train(self, mode: bool = True) -> "HuggingFaceLm":
        """Nothing is dropped in either mode: the trainer's log-probs must be the engine's."""
        super().train(mode)
        self.body.eval()
        return self

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        blocks = [
            one
            for one in self.body.modules()
            if isinstance(one, nn.ModuleList) and len(one) == self.config.num_layers
        ]
        return blocks[0]

    @property
    def lm_head_weight(self) -> Tensor:
        return self.lm_head._weight()

    def forward(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        cu_seqlens: Tensor | None = None,
        routed_experts_TLK: Tensor | None = None,
        max_seqlen: int | None = None,
        documents: Documents | None = None,
    ) -> Tensor:
        if routed_experts_TLK is not None:
            raise ValueError("a network of transformers cannot replay experts' choices")
        if documents is None:
            assert cu_seqlens is not None, "cu_seqlens or documents"
            documents = Documents(cu_seqlens, max_seqlen)
        # One document of one token where there is none: the blocks must run all the same, for their gradients and collectives.
        num_rows, longest = max(len(documents.cu_seqlens) - 1, 1), max(documents.max_seqlen, 1)
        index_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
        row_T = torch.searchsorted(documents.cu_seqlens[1:].long(), index_T, right=True)
        cell_T = row_T * longest + index_T - documents.cu_seqlens.long()[row_T]
        token_ids_NL = (
            token_ids_T.new_zeros(num_rows * longest)
            .index_put((cell_T,), token_ids_T)
            .view(num_rows, longest)
        )
        # No mask and no positions: both are transformers' own for whole rows, which lets it take its fastest causal attention.
        hidden_NLD = self.body(input_ids=token_ids_NL, use_cache=False).last_hidden_state
        return hidden_NLD.flatten(0, 1).index_select(0, cell_T)

    @torch.no_grad()
    def compute_buffers(self) -> None:
        network = self._network[0]
        for name, owner in self.body.named_modules():
            computed = {
                key: owner._buffers[key]
                for key in owner._non_persistent_buffers_set
                if owner._buffers.get(key) is not None
            }
            if not computed:
                continue
            double = _double(owner)
            network._init_weights(double)
            for key, buffer in computed.items():
                if buffer.is_floating_point() and double._buffers[key].isnan().any():
                    raise OrreryError(
                        f"model.hf_config: transformers does not say how to compute {name}.{key}; it is not built"
                    )
                buffer.copy_(double._buffers[key])

    @torch.no_grad()
    def drawn(self, parameter_name: str, seed: int, std: float) -> Tensor:
        """As transformers initialises it, with the manifest's `std`. The last one stays, for one expert after another is asked for."""
        network, which = self._network[0], (parameter_name, seed, std)
        owner_name, _, key = parameter_name.rpartition(".")
        with _GLOBAL_GENERATOR, torch.random.fork_rng(devices=[]):
            if self._drawn is not None and self._drawn[0] == which:
                return self._drawn[1]
            double = _double(
                _linear(self.lm_head) if owner_name == "lm_head" else self.get_submodule(owner_name)
            )
            before = getattr(network.config, "initializer_range", None)
            torch.manual_seed(seed)
            network.config.initializer_range = std
            network._init_weights(double)
            network.config.initializer_range = before
            value = double._parameters[key] if key in double._parameters else double._buffers[key]
            assert value is not None
            if value.isnan().any():
                raise OrreryError(
                    f"model.init: transformers does not say how to initialise {parameter_name}; start from a pretrained folder"
                )
            self._drawn = which, value.detach().float()
            return self._drawn[1]


def _taken(make: Callable[..., Any], *args: Any, **content: Any) -> Any:
    """What transformers makes of the config; raises OrreryError with what it says, whose exceptions are of many kinds."""
    try:
        return make(*args, **content)
    except Exception as error:
        said = " ".join(str(error).split())
        raise OrreryError(
            f"model.hf_config: transformers refuses it ({said}); give the content of the model's config.json"
        ) from error


def _check_type(settings: PreTrainedConfig) -> None:
    kind = settings.model_type
    if type(settings) not in MODEL_FOR_CAUSAL_LM_MAPPING:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: transformers has no causal language model of it; choose one that it has"
        )
    if (text := settings.get_text_config()) is not settings:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: a model of several parts; give the config of its text model, of type {text.model_type!r}"
        )


def _check_causal(network: PreTrainedModel) -> None:
    kind = network.config.model_type
    if kind in LOOKS_AHEAD:
        raise OrreryError(
            f"model.hf_config.model_type {kind!r}: its tokens look ahead; choose a causal language model"
        )
    if any(getattr(one, "is_decoder", None) is False for one in network.modules()):
        raise OrreryError(
            f"model.hf_config: a {kind!r} like this is no decoder, and its tokens look ahead; set is_decoder to true in it"
        )


def _named(settings: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    """The first of `names` that this type of config has and that is set; not one that is there and nothing reads."""
    known = {*dir(type(settings)), *settings.attribute_map, *(one.name for one in fields(settings))}
    return next(
        (name for name in names if name in known and getattr(settings, name) is not None), None
    )


def _check_equal(config: Model, settings: PreTrainedConfig) -> None:
    for ours, names in SAME_IN_CONFIG.items():
        said, theirs = getattr(config, ours), _named(settings, names)
        if theirs is not None and (found := getattr(settings, theirs)) != said:
            raise OrreryError(
                f"model.{ours} {said!r}: model.hf_config.{theirs} is {found!r}; write the same"
            )
    found = [one["rope_theta"] for one in _rotations(settings) if "rope_theta" in one]
    if found and config.rope_theta not in found:
        values = " and ".join(map(repr, found))
        raise OrreryError(
            f"model.rope_theta {config.rope_theta!r}: model.hf_config.rope_theta is {values}; write the same"
        )


def _rotations(settings: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(settings, "rope_parameters", None) or {}
    by_layer_type = [one for one in rope.values() if isinstance(one, dict)]
    return by_layer_type or [rope]  # else one rotation for all layers


def _check_positions(config: Model, settings: PreTrainedConfig) -> None:
    field = None if getattr(settings, "rope_parameters", None) else _named(settings, POSITIONS)
    if (
        field is not None and config.max_positions > (most := getattr(settings, field)) > 0
    ):  # xlnet says -1
        raise OrreryError(
            f"model.max_positions {config.max_positions}: model.hf_config.{field} is {most}, and this network is for no more; "
            f"write {most}, or less"
        )
    for rope in _rotations(settings):
        kind = rope.get("rope_type", "default")
        if kind == "longrope":
            field, most = (
                "original_max_position_embeddings",
                rope["original_max_position_embeddings"],
            )
        elif "dynamic" in kind:
            field, most = "max_position_embeddings", settings.max_position_embeddings
        else:
            continue
        if config.max_positions > most:
            raise OrreryError(
                f"model.max_positions {config.max_positions}: model.hf_config.{field} is {most}, beyond which rope_type {kind!r} "
                f"rotates a whole pack by its longest document; write {most}, or less"
            )


def _check_head_dim(config: Model, network: PreTrainedModel) -> None:
    """Of the network's modules, for many configs say nothing of it."""
    found = sorted(
        {
            one.head_dim
            for one in network.modules()
            if isinstance(getattr(one, "head_dim", None), int)
        }
    )
    if found and config.head_dim not in found:
        values = " and ".join(map(str, found))
        raise OrreryError(
            f"model.head_dim {config.head_dim}: the heads that model.hf_config makes are of {values}; write the same"
        )


def _names_in_files(network: PreTrainedModel, state: dict[str, Tensor]) -> Names:
    """The network's names to those that transformers writes; most are the same."""
    if revert_weight_conversion is None:
        return {name: name for name in state}
    written = {
        id(tensor): name for name, tensor in revert_weight_conversion(network, dict(state)).items()
    }
    return {
        name: written.get(id(tensor)) or _names_of_parts(network, name, tensor)
        for name, tensor in state.items()
    }


def _names_of_parts(network: PreTrainedModel, name: str, stack: Tensor) -> str | tuple[str, ...]:
    """What files hold of `stack`, which they do not hold as it is: experts one by one, each in parts of even size.

    Found out with a small stack of as many experts, whose values say where in it they stand; raises OrreryError for any other taking apart.
    """
    num_experts = len(stack) if stack.ndim == 3 else 0
    probe = torch.arange(num_experts * PROBED[0] * PROBED[1], device="cpu").reshape(
        num_experts, *PROBED
    )
    found = revert_weight_conversion(network, {name: probe}) if num_experts else {}
    by_first = {part.flatten()[0].item(): there for there, part in found.items()}
    num_parts = len(found) // max(1, num_experts)
    patterns: list[str] = []
    for part_E in probe.chunk(num_parts, dim=1) if num_parts and PROBED[0] % num_parts == 0 else ():
        names = [by_first.get(one[0, 0].item(), "") for one in part_E]
        first, last = names[0].split("."), names[-1].split(".")
        at = next(
            (
                at
                for at, words in enumerate(zip(first, last, strict=False))
                if words == ("0", str(num_experts - 1))
            ),
            len(first),
        )
        pattern = ".".join((*first[:at], "{expert}", *first[at + 1 :]))
        if all(
            name == pattern.replace("{expert}", str(e)) and torch.equal(found[name], part_E[e])
            for e, name in enumerate(names)
        ):
            patterns.append(pattern)
    if not patterns or len(patterns) < num_parts:
        raise OrreryError(
            f"model.hf_config.model_type {network.config.model_type!r}: its files hold in parts what its network has in {name}, and not "
            "expert by expert in even parts, which is not supported; choose a model whose files are its network tensor by tensor"
        )
    return patterns[0] if num_parts == 1 else tuple(patterns)


def _linear(head: Head) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
    linear._parameters = {"weight": head.weight, "bias": head.bias}
    return linear


def _double(owner: nn.Module) -> nn.Module:
    """The module with parameters and buffers of its own on the CPU, all NaN; its children are the same."""
    double = copy.copy(owner)
    double._parameters = {
        key: one if one is None else nn.Parameter(_nan(one), one.requires_grad)
        for key, one in owner._parameters.items()
    }
    double._buffers = {
        key: one if one is None else _nan(one) for key, one in owner._buffers.items()
    }
    return double


def _nan(tensor: Tensor) -> Tensor:
    dtype = tensor.dtype
    return torch.full(
        tensor.shape, torch.nan if dtype.is_floating_point else 0, dtype=dtype, device="cpu"
    )
