"""Give any causal language model of transformers the interface of our networks.

Documents are padded to equal length. Only causal models ignore padding, so others are refused.
Context and expert parallelism and router replay are not supported.
"""

import copy
import threading
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
)

from orrery.kernels.attention import Documents
from orrery.kernels.token_logprob import ChunkTokens, auto_chunk_tokens, token_logprob, wide_matmul
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm, Names

# listed as causal by transformers, but tokens attend to later tokens
NOT_CAUSAL = ("cpmant", "xlnet")
# Our field → names in transformers' configs
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
    try:
        return make(*args, **content)
    except Exception as error:
        message = " ".join(str(error).split())
        raise OrreryError(
            f"model.hf_config: transformers refuses this config ({message}). "
            "Copy the model's config.json"
        ) from error


def decode_floats(value: Any) -> Any:
    """Replace {"__float__": "Infinity"} and similar by floats, as transformers does."""
    if isinstance(value, list):
        return [decode_floats(one) for one in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {"__float__"} and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
        return float(value["__float__"])
    return {key: decode_floats(one) for key, one in value.items()}


def check_config(model: Model, config: PreTrainedConfig) -> None:
    check_type(config)
    _check_fields(model, config)
    _check_positions(model, config)


def check_network(model: Model, network: PreTrainedModel) -> None:
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
            f"{values}. Set model.head_dim to one of these"
        )


def find_body(network: PreTrainedModel) -> str:
    """Return the name of the child module that computes hidden states.

    Raise OrreryError if transformers does not name it, and no single child has the embedding.
    """
    children = dict(network.named_children())
    if network.base_model_prefix in children:
        return network.base_model_prefix
    embedding = _embedding(network)
    found = [name for name, child in children.items() if embedding in list(child.modules())]
    if len(found) != 1 or children[found[0]] is embedding:
        raise OrreryError(
            f"model.hf_config.model_type {network.config.model_type!r}: no part of its network "
            "holds all layers below the head. Choose another model"
        )
    return found[0]


def _embedding(module: Any) -> nn.Module:
    try:
        return module.get_input_embeddings()
    except NotImplementedError as error:
        raise OrreryError(
            f"model.hf_config.model_type {module.config.model_type!r}: transformers does not say "
            "which module embeds its tokens. Choose another model"
        ) from error


def check_layers(config: PreTrainedConfig, source: str) -> None:
    if names := sorted(getattr(config, "per_layer_attributes", None) or ()):
        raise OrreryError(
            f"{source}: layers of {config.model_type!r} differ in {' and '.join(names)}, "
            "which is not supported. Choose another model"
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
            f"model.hf_config.model_type {kind!r}: this model has several parts. Give the config "
            f"of its text model, of type {text.model_type!r}"
        )


def find_field(config: PreTrainedConfig, names: tuple[str, ...]) -> str | None:
    """Return the first of `names` that is declared by `config`'s class and not None."""
    known = {*dir(type(config)), *config.attribute_map, *(one.name for one in fields(config))}
    found = (name for name in names if name in known and getattr(config, name) is not None)
    return next(found, None)


def _check_fields(model: Model, config: PreTrainedConfig) -> None:
    for ours, names in FIELDS.items():
        said, theirs = getattr(model, ours), find_field(config, names)
        if theirs is not None and (found := getattr(config, theirs)) != said:
            raise OrreryError(
                f"model.{ours} {said!r}: model.hf_config.{theirs} is {found!r}. Make them equal"
            )
    found = [one["rope_theta"] for one in rotations(config) if "rope_theta" in one]
    if found and model.rope_theta not in found:
        values = " and ".join(map(repr, found))
        raise OrreryError(
            f"model.rope_theta {model.rope_theta!r}: model.hf_config.rope_theta is {values}. "
            "Make them equal"
        )


def rotations(config: PreTrainedConfig) -> list[dict[str, Any]]:
    rope = getattr(config, "rope_parameters", None) or {}
    return [one for one in rope.values() if isinstance(one, dict)] or [rope]


def _check_positions(model: Model, config: PreTrainedConfig) -> None:
    """Raise OrreryError if the network supports fewer than `max_positions` positions.

    Above a limit, rotary angles of kinds `longrope` and `dynamic` depend on the batch's longest
    document.
    """
    field = None if getattr(config, "rope_parameters", None) else find_field(config, POSITIONS)
    most = 0 if field is None else getattr(config, field)
    if model.max_positions > most > 0:  # xlnet's −1 means no limit
        raise OrreryError(
            f"model.max_positions {model.max_positions}: model.hf_config.{field} is {most}, "
            f"the maximum of this network. Set model.max_positions to {most} or less"
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
                f"and above it, angles of rope_type {kind!r} depend on the longest document. "
                f"Set model.max_positions to {most} or less"
            )


try:  # a private function that renames tensors as `save_pretrained` does
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:
    revert_weight_conversion = None

PROBE_SHAPE = (12, 2)  # a probed expert's shape: 12 rows divide into 2, 3 or 4 parts

_global_generator = threading.Lock()  # held during draws from torch's global generator


class HuggingFaceLm(CausalLm):
    def __init__(self, model: Model, content: dict[str, Any]) -> None:
        super().__init__(model)
        content = decode_floats(copy.deepcopy(content))
        if "model_type" not in content:
            raise OrreryError("model.hf_config: no model_type. Copy the model's config.json")
        config = call_transformers(AutoConfig.for_model, **content)
        check_layers(config, "model.hf_config")
        check_config(model, config)
        network = call_transformers(AutoModelForCausalLM.from_config, config)
        check_network(model, network)
        head = network.get_output_embeddings()
        head_name = next(name for name, one in network.named_modules() if one is head)
        body_name = find_body(network)
        self.body = network.get_submodule(body_name)
        embedding = _embedding(self.body) if model.tie_embeddings else None
        self.lm_head = Head(network, body_name, head_name, embedding)
        self.body.eval()
        self._latest_draw: tuple[tuple[str, int, float], Tensor] | None = None
        self._network = (network,)  # a tuple, so that `nn.Module` does not register it
        ours = {f"{body_name}.{name}": f"body.{name}" for name in self.body.state_dict()}
        ours |= {f"{head_name}.{name}": f"lm_head.{name}" for name in self.lm_head.state_dict()}
        state = network.state_dict(keep_vars=True)
        if model.tie_embeddings:
            del state[f"{head_name}.weight"]
        if odd := sorted(state.keys() - ours.keys()):
            raise OrreryError(
                f"model.hf_config: tensor {odd[0]} is in neither the body nor the head of this "
                "architecture. Choose another model"
            )
        in_files = _names_in_files(network, state)
        self.names = {ours[name]: in_file for name, in_file in in_files.items()}

    def train(self, mode: bool = True) -> "HuggingFaceLm":
        """Set the mode of all modules except the body, where dropout stays off as in engines."""
        super().train(mode)
        self.body.eval()
        return self

    @property
    def layers(self) -> nn.ModuleList:  # type: ignore[override]
        lists = [one for one in self.body.modules() if isinstance(one, nn.ModuleList)]
        return [one for one in lists if len(one) == self.config.num_layers][0]  # noqa: RUF015

    @property
    def lm_head_weight(self) -> Tensor:
        return self.lm_head.head_weight()

    def hidden_states(
        self,
        token_ids_T: Tensor,
        positions_T: Tensor,
        documents: Documents,
        routes: Tensor | None,
        engine_keys_TIB: Tensor | None = None,
    ) -> Tensor:
        if routes is not None or engine_keys_TIB is not None:
            raise ValueError("a network of transformers cannot replay an engine's choices")
        # In an empty batch, compute one token, so that gradients and collectives still run.
        num_rows, longest = max(len(documents.cu_seqlens) - 1, 1), max(documents.max_seqlen, 1)
        index_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
        row_T = torch.searchsorted(documents.cu_seqlens[1:].long(), index_T, right=True)
        cell_T = row_T * longest + index_T - documents.cu_seqlens.long()[row_T]
        cells = token_ids_T.new_zeros(num_rows * longest).index_put((cell_T,), token_ids_T)
        # Without mask and positions, transformers uses its fastest causal attention.
        output = self.body(input_ids=cells.view(num_rows, longest), use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, cell_T)

    @torch.no_grad()
    def compute_buffers(self) -> None:
        init_weights, unknown = self._network[0]._init_weights, {}
        for name, owner in self.body.named_modules():
            keys = owner._non_persistent_buffers_set
            buffers = {key: owner._buffers.get(key) for key in keys}
            if all(buffer is None for buffer in buffers.values()):
                continue
            filled = _nan_copy(owner)
            init_weights(filled)
            for key, buffer in buffers.items():
                if buffer is None:
                    continue
                buffer.copy_(filled._buffers[key])
                if buffer.is_floating_point() and filled._buffers[key].isnan().any():
                    unknown[f"{name}.{key}"] = buffer
        if unknown:  # the body's init may fill buffers of layers, which its copy shares
            init_weights(_nan_copy(self.body))
        for name, buffer in unknown.items():
            if buffer.isnan().any():
                raise OrreryError(
                    f"model.hf_config: transformers does not say how to compute {name}. "
                    "Choose another model"
                )

    @torch.no_grad()
    def initial_tensor(self, parameter_name: str, seed: int, std: float) -> Tensor:
        network, key = self._network[0], (parameter_name, seed, std)
        owner_name, _, attribute = parameter_name.rpartition(".")
        with _global_generator, torch.random.fork_rng(devices=[]):
            if self._latest_draw is not None and self._latest_draw[0] == key:
                return self._latest_draw[1]
            is_head = owner_name == "lm_head"
            owner = _as_linear(self.lm_head) if is_head else self.get_submodule(owner_name)
            filled = _nan_copy(owner)
            before = getattr(network.config, "initializer_range", None)
            torch.manual_seed(seed)
            try:
                network.config.initializer_range = std
                network._init_weights(filled)
            finally:
                network.config.initializer_range = before
            value = {**filled._buffers, **filled._parameters}[attribute]
            assert value is not None
            if value.isnan().any():
                raise OrreryError(
                    f"model.init: transformers does not say how to initialise {parameter_name}. "
                    "Start from a pretrained folder"
                )
            self._latest_draw = key, value.detach().float()
            return self._latest_draw[1]


class _BodyOutput:
    def __init__(self, hidden_NLD: Tensor) -> None:
        self.last_hidden_state = hidden_NLD

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]

    def __getattr__(self, name: str) -> None:
        return None


class _PassthroughBody(nn.Module):
    """Return `inputs_embeds`. Numeric attributes are the body's, all others are `self`."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self._body = (body,)  # a tuple, to avoid registration

    def forward(self, *_: Any, inputs_embeds: Tensor, **__: Any) -> _BodyOutput:
        return _BodyOutput(inputs_embeds)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._body[0], name, None)
        return value if isinstance(value, int | float) else self


class _PassthroughHead(nn.Identity):
    """Identity with a `weight`, because some networks cast inputs to its dtype."""

    weight = torch.empty(0)


class Head(nn.Module):
    """A transformers network's LM head with the interface of `LmHead`.

    With bias or soft-capping, the backward pass recomputes chunks of logits.
    """

    def __init__(
        self, network: PreTrainedModel, body_name: str, head_name: str, embedding: nn.Module | None
    ) -> None:
        super().__init__()
        body, head = network.get_submodule(body_name), network.get_submodule(head_name)
        self._embedding = (embedding,)  # a tuple, to avoid registration
        self.weight = head.weight if embedding is None else None
        self.bias = head.bias
        shell = copy.copy(network)
        replaced = {body_name: _PassthroughBody(body), head_name: _PassthroughHead()}
        shell._modules = {**network._modules, **replaced}
        self._shell = (shell,)
        probe = torch.linspace(-300.0, 300.0, 8, device="cpu")[None]
        try:
            with torch.device("cpu"), torch.no_grad():
                transformed = self._transform(probe)
        except Exception as error:
            raise OrreryError(
                f"model.hf_config.model_type {network.config.model_type!r}: its logits cannot be "
                f"computed without its body ({' '.join(str(error).split())}). Choose another model"
            ) from error
        self.is_plain = self.bias is None and torch.equal(transformed, probe)

    def forward(
        self,
        hidden_TD: Tensor,
        target_T: Tensor,
        temperature_T: Tensor,
        chunk_tokens: ChunkTokens,
        keep_logits: bool = False,
    ) -> tuple[Tensor, Tensor]:
        rows, weight_VD = (target_T, temperature_T), self.head_weight()
        if self.is_plain:
            return token_logprob(hidden_TD, weight_VD, *rows, chunk_tokens, keep_logits=keep_logits)
        if keep_logits:
            return self._chunk(hidden_TD, *rows)
        if chunk_tokens == "auto":
            chunk_tokens = auto_chunk_tokens(hidden_TD.device, weight_VD.shape[0])
        chunks = zip(*(x.split(chunk_tokens) for x in (hidden_TD, *rows)), strict=True)
        results = [checkpoint(self._chunk, *chunk, use_reentrant=False) for chunk in chunks]
        logprobs, entropies = zip(*results, strict=True)
        return torch.cat(logprobs), torch.cat(entropies)

    def logits(self, hidden_TD: Tensor) -> Tensor:
        logits_TV = _WideLinear.apply(hidden_TD, self.head_weight())
        return self._transform(logits_TV if self.bias is None else logits_TV + self.bias).float()

    def head_weight(self) -> Tensor:
        embedding = self._embedding[0]
        return self.weight if embedding is None else embedding.weight

    def _chunk(
        self, hidden_TD: Tensor, target_T: Tensor, temperature_T: Tensor
    ) -> tuple[Tensor, Tensor]:
        logprob_TV = (self.logits(hidden_TD) / temperature_T[:, None]).log_softmax(dim=-1)
        entropy_T = -(logprob_TV.exp() * logprob_TV).sum(dim=-1)
        return logprob_TV.gather(1, target_T[:, None])[:, 0], entropy_T

    def _transform(self, logits_TV: Tensor) -> Tensor:
        return self._shell[0](inputs_embeds=logits_TV[None], use_cache=False).logits[0]


class _WideLinear(torch.autograd.Function):
    """hidden · weightᵀ in float32 (float64 for float64), with gradients in input dtype."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_TD, weight_VD)
        return wide_matmul(hidden_TD, weight_VD.T)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_logits_TV: Tensor) -> tuple[Tensor | None, Tensor | None]:
        hidden_TD, weight_VD = ctx.saved_tensors
        grad_TV = grad_logits_TV.to(hidden_TD.dtype)
        wants_hidden, wants_weight = ctx.needs_input_grad
        grad_hidden_TD = grad_TV @ weight_VD if wants_hidden else None
        return grad_hidden_TD, grad_TV.T @ hidden_TD if wants_weight else None


def _names_in_files(network: PreTrainedModel, state: dict[str, Tensor]) -> Names:
    if revert_weight_conversion is None:
        return {name: name for name in state}
    converted = revert_weight_conversion(network, dict(state))
    unchanged = {id(tensor): name for name, tensor in converted.items()}
    names: Names = {}
    for name, tensor in state.items():
        names[name] = unchanged.get(id(tensor)) or _expert_names(network, name, tensor)
    return names


def _expert_names(network: PreTrainedModel, name: str, stack: Tensor) -> str | tuple[str, ...]:
    """Return the checkpoint name of a tensor in `stack`, with `{expert}` for the expert's index.

    Return a tuple if checkpoints split it into equal parts. Raise OrreryError for other splits.
    """
    num_experts = len(stack) if stack.ndim == 3 else 0
    probe = torch.arange(num_experts * PROBE_SHAPE[0] * PROBE_SHAPE[1], device="cpu")
    probe = probe.reshape(num_experts, *PROBE_SHAPE)
    found = revert_weight_conversion(network, {name: probe}) if num_experts else {}
    num_parts = len(found) // max(1, num_experts)
    patterns: list[str] = []
    if num_parts and PROBE_SHAPE[0] % num_parts == 0:
        matched = (_pattern(found, part_E) for part_E in probe.chunk(num_parts, dim=1))
        patterns = [pattern for pattern in matched if pattern]
    if not patterns or len(patterns) < num_parts:
        raise OrreryError(
            f"model.hf_config.model_type {network.config.model_type!r}: its files do not store "
            f"{name} as equal parts of each expert. Choose another model"
        )
    return patterns[0] if num_parts == 1 else tuple(patterns)


def _pattern(found: dict[str, Tensor], part_E: Tensor) -> str | None:
    by_first = {tensor.flatten()[0].item(): name for name, tensor in found.items()}
    names = [by_first.get(one[0, 0].item(), "") for one in part_E]
    first, last = names[0].split("."), names[-1].split(".")
    pairs = list(zip(first, last, strict=False))
    ends = ("0", str(len(part_E) - 1))
    at = pairs.index(ends) if ends in pairs else len(first)
    pattern = ".".join((*first[:at], "{expert}", *first[at + 1 :]))
    for e, name in enumerate(names):
        if name != pattern.replace("{expert}", str(e)) or not torch.equal(found[name], part_E[e]):
            return None
    return pattern


def _as_linear(head: Head) -> nn.Linear:
    linear = nn.Linear(1, 1, bias=head.bias is not None, device="meta")
    linear._parameters = {"weight": head.weight, "bias": head.bias}
    return linear


def _nan_copy(owner: nn.Module) -> nn.Module:
    """Return a shallow copy with NaN tensors on CPU, to find uninitialised values."""
    filled = copy.copy(owner)
    filled._parameters, filled._buffers = {}, {}
    for key, one in owner._parameters.items():
        parameter = None if one is None else nn.Parameter(_nan_like(one), one.requires_grad)
        filled._parameters[key] = parameter
    for key, one in owner._buffers.items():
        filled._buffers[key] = None if one is None else _nan_like(one)
    return filled


def _nan_like(tensor: Tensor) -> Tensor:
    value = torch.nan if tensor.dtype.is_floating_point else 0
    return torch.full(tensor.shape, value, dtype=tensor.dtype, device="cpu")
