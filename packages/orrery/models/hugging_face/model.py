"""Any causal language model of transformers behind the interface of our own networks.

- A pack becomes a padded batch and back. Padding follows its document, so this is exact on causal
  models. Others are refused.
- No context or expert parallelism, router replay, or own kernels except the LM head's.
- Stacked experts may be separate in files. Other differences from the files are refused.

T tokens · E experts
"""

import copy
import threading

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from orrery.kernels.attention import Documents
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Model
from orrery.models.causal_lm import CausalLm
from orrery.models.hf_names import Names, hugging_face_config
from orrery.models.hugging_face.config import call_transformers, check_config, check_network
from orrery.models.hugging_face.head import Head

try:  # how transformers renames tensors when it saves (private)
    from transformers.core_model_loading import revert_weight_conversion
except ImportError:
    revert_weight_conversion = None

PROBE_SHAPE = (12, 2)  # of an expert in a probe. 2, 3 and 4 divide its rows

_global_generator = threading.Lock()  # transformers draws from torch's global generator


class HuggingFaceLm(CausalLm):
    def __init__(self, model: Model) -> None:
        super().__init__(model)
        content = copy.deepcopy(hugging_face_config(model))
        if "model_type" not in content:
            raise OrreryError(
                "model.hf_config: no model_type; give the content of the model's config.json"
            )
        config = call_transformers(AutoConfig.for_model, **content)
        check_config(model, config)
        network = call_transformers(AutoModelForCausalLM.from_config, config)
        check_network(model, network)
        head = network.get_output_embeddings()
        head_name = next(name for name, one in network.named_modules() if one is head)
        body_name = network.base_model_prefix
        self.body = getattr(network, body_name)
        embedding = self.body.get_input_embeddings() if model.tie_embeddings else None
        self.lm_head = Head(network, body_name, head_name, embedding)
        self.body.eval()
        self._latest_draw: tuple[tuple[str, int, float], Tensor] | None = None
        self._network = (network,)  # in a tuple, so not a submodule
        ours = {f"{body_name}.{name}": f"body.{name}" for name in self.body.state_dict()}
        ours |= {f"{head_name}.{name}": f"lm_head.{name}" for name in self.lm_head.state_dict()}
        state = network.state_dict(keep_vars=True)
        if model.tie_embeddings:
            del state[f"{head_name}.weight"]
        if odd := sorted(state.keys() - ours.keys()):
            raise OrreryError(
                f"model.hf_config: {odd[0]} of this architecture is neither in its body nor in "
                "its head; it is not built"
            )
        in_files = _names_in_files(network, state)
        self.names = {ours[name]: in_file for name, in_file in in_files.items()}

    def train(self, mode: bool = True) -> "HuggingFaceLm":
        """Keep dropout off, as in the engine."""
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
        # An empty pack runs one token, because gradients and collectives are still needed.
        num_rows, longest = max(len(documents.cu_seqlens) - 1, 1), max(documents.max_seqlen, 1)
        index_T = torch.arange(len(token_ids_T), device=token_ids_T.device)
        row_T = torch.searchsorted(documents.cu_seqlens[1:].long(), index_T, right=True)
        cell_T = row_T * longest + index_T - documents.cu_seqlens.long()[row_T]
        cells = token_ids_T.new_zeros(num_rows * longest).index_put((cell_T,), token_ids_T)
        # Without a mask and positions, transformers takes its fastest causal attention.
        output = self.body(input_ids=cells.view(num_rows, longest), use_cache=False)
        return output.last_hidden_state.flatten(0, 1).index_select(0, cell_T)

    @torch.no_grad()
    def compute_buffers(self) -> None:
        for name, owner in self.body.named_modules():
            keys = owner._non_persistent_buffers_set
            buffers = {key: owner._buffers.get(key) for key in keys}
            if all(buffer is None for buffer in buffers.values()):
                continue
            filled = _nan_copy(owner)
            self._network[0]._init_weights(filled)
            for key, buffer in buffers.items():
                if buffer is None:
                    continue
                if buffer.is_floating_point() and filled._buffers[key].isnan().any():
                    raise OrreryError(
                        f"model.hf_config: transformers does not say how to compute {name}.{key}; "
                        "it is not built"
                    )
                buffer.copy_(filled._buffers[key])

    @torch.no_grad()
    def initial_tensor(self, parameter_name: str, seed: int, std: float) -> Tensor:
        """Draw as transformers does, with the manifest's `std`. Cached for a stack's experts."""
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
            network.config.initializer_range = std
            network._init_weights(filled)
            network.config.initializer_range = before
            value = {**filled._buffers, **filled._parameters}[attribute]
            assert value is not None
            if value.isnan().any():
                raise OrreryError(
                    f"model.init: transformers does not say how to initialise {parameter_name}; "
                    "start from a pretrained folder"
                )
            self._latest_draw = key, value.detach().float()
            return self._latest_draw[1]


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
    """Return the names of a stack's experts in files, each in one or several even parts.

    Converts a small probe and finds each part by its values. Raise OrreryError for any other
    conversion.
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
            f"model.hf_config.model_type {network.config.model_type!r}: its files hold in parts "
            f"what its network has in {name}, and not expert by expert in even parts, which is "
            "not supported; choose a model whose files are its network tensor by tensor"
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
    """Copy a module with NaN parameters and buffers on the CPU. Children are shared."""
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
