"""Weights in: reads what the trainer published, loads it into the running model, and records which weights those were.

- In: the path of a published version (`orrery.transport.weight_wire`), tensors by HF name. Out: `held`, name → (fingerprint, how).
- Each tensor is fingerprinted as the model consumes it. After processing, tensors that the engine keeps as they came (embedding, norms, an
  untied output head) are fingerprinted again from the model itself ("resident"); those that it repacks can only be "as_consumed".
- Always: every tensor that the model was first loaded with must come again, and every element of every layer must be filled.
- A damaged file fails the update with the tensor's name. The engine process lives on, but `held` is empty until a whole update has gone
  through.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import torch
from safetensors import SafetensorError
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from orrery.inference.patches.vllm import forget_moe_kernels, repack_tied_heads
from orrery.transport.fingerprint import tensor_fingerprint
from orrery.transport.weight_wire import read_weights

RESIDENT, AS_CONSUMED = "resident", "as_consumed"
# Modules whose parameter stays as it was loaded (ParallelLMHead is a VocabParallelEmbedding).
KEPT_AS_THEY_CAME = (RMSNorm, VocabParallelEmbedding)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Nothing to agree on: the file says all."""


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the published version is, and which it is (for error sentences)."""

    path: str
    version: int


@dataclass(frozen=True)
class Consumed:
    """What a tensor looked like on its way in."""

    fingerprint: int
    shape: torch.Size
    dtype: torch.dtype


class FilesReceiver(WeightTransferEngine[InitInfo, UpdateInfo]):
    """vLLM's weight-transfer backend `orrery_files`."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.held: dict[str, tuple[int, str]] = {}
        self._consumed: dict[str, Consumed] = {}

    def start_weight_update(self) -> None:
        self.held = {}
        self._consumed = {}
        if self.device.type == "cpu":
            forget_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self.model.load_weights(self._fingerprinted(update_info))
            self._check_complete(update_info)
        except BaseException:
            # Parameters of half-loaded layers are placeholders now. Give them storage again, so that the process can still answer; the
            # weights are nobody's version, `held` says so by being empty, and whoever drives the update ends the run.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self.device.type == "cpu" and self.model_config.hf_text_config.tie_word_embeddings:
            repack_tied_heads(self.model)
        self.held = {name: self._attest(name, consumed) for name, consumed in self._consumed.items()}

    def shutdown(self) -> None:
        self.held = {}

    def _fingerprinted(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in read_weights(update.path):
                if name in self._consumed:
                    raise ValueError(f"weights version {update.version}: tensor {name!r} comes twice")
                self._consumed[name] = Consumed(tensor_fingerprint(tensor), tensor.shape, tensor.dtype)
                yield name, tensor.to(self.device)
        except SafetensorError as error:
            raise ValueError(f"weights version {update.version}: {damage(Path(update.path)) or error}") from error

    def _check_complete(self, update: UpdateInfo) -> None:
        """Raise ValueError naming what was not filled."""
        for name in sorted(self._expected_names() - self._consumed.keys()):
            raise ValueError(f"weights version {update.version}: tensor {name!r} is missing")
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            total = info.load_numel_total or 0
            # A layer whose every element has come is processed and reset at once; one that still waits lacks something.
            # (Not so an embedding, whose rows after the vocabulary are never loaded; it has one tensor, and its loader checks the shape.)
            if info.can_load() and 0 < info.load_numel < total and not isinstance(layer, VocabParallelEmbedding):
                raise ValueError(f"weights version {update.version}: layer {path!r} got {info.load_numel} of {total} elements")

    def _expected_names(self) -> set[str]:
        """Names in the checkpoint that the engine started from; a tied output head may be spelt out there and is not needed."""
        from safetensors import safe_open

        names: set[str] = set()
        for file in sorted(Path(self.model_config.model).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        if self.model_config.hf_text_config.tie_word_embeddings:
            names.discard("lm_head.weight")
        return names

    def _attest(self, name: str, consumed: Consumed) -> tuple[int, str]:
        """Fingerprint from the processed model where the tensor stands in it as it came, else the one taken on its way in."""
        module_path, _, attribute = name.rpartition(".")
        try:
            module = self.model.get_submodule(module_path)
        except AttributeError:  # fused under another name (q_proj in qkv_proj): repacked
            return consumed.fingerprint, AS_CONSUMED
        parameter = getattr(module, attribute, None)
        if not isinstance(module, KEPT_AS_THEY_CAME) or parameter is None or parameter.dtype != consumed.dtype:
            return consumed.fingerprint, AS_CONSUMED
        if isinstance(module, VocabParallelEmbedding):
            parameter = parameter[: consumed.shape[0]]  # rows after the vocabulary are padding
        if parameter.shape != consumed.shape:  # a tensor-parallel slice
            return consumed.fingerprint, AS_CONSUMED
        return tensor_fingerprint(parameter.detach()), RESIDENT


def damage(folder: Path) -> str | None:
    """Which tensor of a published version does not fit in its file (safetensors only says that the file is too short), or None.

    A safetensors file is a header length (u64), a JSON header of byte ranges, then the bytes. Names only: vLLM takes paths out of error
    answers.
    """
    for shard in sorted(folder.glob("*.safetensors")):
        size = shard.stat().st_size
        with shard.open("rb") as file:
            header_bytes = int.from_bytes(file.read(8), "little")
            try:
                header = msgspec.json.decode(file.read(min(header_bytes, size)))
            except msgspec.DecodeError:
                return f"{shard.name} has no readable header ({size} bytes)"
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if 8 + header_bytes + entry["data_offsets"][1] > size:
                return f"tensor {name!r} is cut off in {shard.name} ({size} bytes)"
    return None
