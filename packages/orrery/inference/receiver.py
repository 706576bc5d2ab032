"""Load a published weight version into the running model, and fingerprint its tensors.

- A version comes in files (whole tensors or LoRA factors) or by direct transfer (slices).
- A fingerprint is a 64-bit hash of the tensor in the model ("resident") or, if the engine repacks
  or slices it, of the tensor on arrival ("as_consumed").
- Workers never raise, because vLLM 0.32 would mix up their results. If one worker fails, all
  discard the update.
"""

import abc
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from safetensors import SafetensorError
from vllm.config import set_current_vllm_config
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.layernorm import RMSNorm
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

from orrery.inference.loading import Loading, Needs, Run, learn, put_back, runs
from orrery.inference.patches.vllm import (
    forget_moe_kernels,
    has_stale_head,
    keep_adapters,
    repack_tied_heads,
    say_nothing_of_unloaded,
)
from orrery.wire.columns import split_header
from orrery.wire.fingerprint import MASK, SliceFingerprints, SliceSpec, tensor_fingerprint
from orrery.wire.weight_wire import read_weights
from orrery.wire.weight_wire.coordinator import PartTimer, fail_transfer
from orrery.wire.weight_wire.fp8_blocks import SliceDecoder, decoded, plain_tensors, with_scales
from orrery.wire.weight_wire.leases import TransferFailed, WireFailed
from orrery.wire.weight_wire.plan import Box, Slice, TensorInfo, dtype_of
from orrery.wire.weight_wire.transfer import Round, WeightReceiver

log = logging.getLogger(__name__)

RESIDENT, AS_CONSUMED = "resident", "as_consumed"
# vLLM does not repack these modules.
UNCHANGED = (RMSNorm, VocabParallelEmbedding)


@dataclass
class InitInfo(WeightTransferInitInfo):
    num_ranks: int | None = None  # data-parallel × tensor-parallel ranks


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    path: str
    version: int
    engine: str = "engine"
    transfer: int = 0  # number of the direct transfer, or 0 for files


class Consumed(NamedTuple):
    """A published tensor as it arrived. `shape` is None if this rank receives only a part."""

    fingerprint: int
    shape: torch.Size | None
    dtype: torch.dtype


class RoundRuns(NamedTuple):
    """A transfer round: FP8 slices to decode, and copies into the model."""

    scales: list[Slice]
    values: list[Slice]
    wide: list[Run]  # copies of decoded values
    plain: list[Run]  # copies of all other slices


class Place(NamedTuple):
    """The parameter of a published tensor that vLLM neither fuses nor repacks."""

    module: torch.nn.Module
    parameter: str


class Backend(WeightTransferEngine[InitInfo, UpdateInfo]):
    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    held: dict[str, tuple[int, str]]
    failure: str | None = None

    def start_weight_update(self) -> None:
        self.held, self.failure = {}, None
        self._start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self._receive(update_info)
        except Exception as error:
            self.failure = str(error) or type(error).__name__
            is_ours = not isinstance(error, TransferFailed)
            log.warning("version %d not loaded: %s", update_info.version, error, exc_info=is_ours)
            if is_ours and update_info.transfer:
                with contextlib.suppress(WireFailed, RuntimeError):
                    fail_transfer(Path(update_info.path), update_info.transfer)

    def finish_weight_update(self) -> None:
        self.held = self._finish(self.failure is None)

    @abc.abstractmethod
    def _start(self) -> None:
        pass

    @abc.abstractmethod
    def _receive(self, update: UpdateInfo) -> None:
        """Receive a whole version. `receive_weights` catches errors."""

    @abc.abstractmethod
    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        """End the reload. Return the fingerprints, or {} if the update is incomplete."""


class Receiver(Backend):
    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.held = {}
        self.parts = PartTimer()
        self._consumed: dict[str, Consumed] = {}
        self._places: dict[str, Place | None] = {}
        self._fingerprints: dict[tuple[torch.Size, torch.dtype], SliceFingerprints] = {}
        self._num_ranks = init_info.num_ranks
        self._target: WeightReceiver | None = None

    def _start(self) -> None:
        self.parts = PartTimer()
        self._consumed = {}
        begin = time.perf_counter()
        if self.device.type == "cpu":
            forget_moe_kernels(self.model)
        initialize_layerwise_reload(self.model)
        self.parts.add("start_s", begin)

    def _receive(self, update: UpdateInfo) -> None:
        if not update.transfer:
            self.model.load_weights(decoded(self._fingerprinted(update)))
            self._check_complete(update)
        else:
            # In a `torch.device` context, dynamo recurses endlessly in vLLM's FP8 rounding.
            with set_current_vllm_config(self.vllm_config):
                self._take(update)

    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        begin = time.perf_counter()
        is_tied = self.model_config.hf_text_config.tie_word_embeddings
        with say_nothing_of_unloaded(self.model, is_tied):
            finalize_layerwise_reload(self.model, self.model_config)
        if is_tied and self.device.type == "cpu":
            repack_tied_heads(self.model)
        elif is_tied and has_stale_head(self.model):
            self.failure = (
                "the output head is tied to the embedding, but has a separate weight, and updates "
                "do not reach this weight"
            )
            return {}
        if not is_whole:
            return {}
        held = {name: (each.fingerprint, AS_CONSUMED) for name, each in self._consumed.items()}
        resident: dict[str, torch.Tensor] = {}
        for name, consumed in self._consumed.items():
            if (tensor := self._resident(name, consumed)) is not None:
                resident[name] = self._fingerprint(tensor)
        if resident:
            values = torch.cat([*resident.values()]).tolist()
            for name, value in zip(resident, values, strict=True):
                held[name] = (value & MASK, RESIDENT)
        self.parts.add("finish_s", begin)
        return held

    def shutdown(self) -> None:
        self.held = {}
        if self._target is not None:
            self._target.drop()

    def _take(self, update: UpdateInfo) -> None:
        if self._target is None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            num_ranks = self._num_ranks or parallel.world_size_across_dp
            self._target = WeightReceiver(update.engine, rank, num_ranks, self.device)
        target = self._target
        begin = time.perf_counter()
        target.join(Path(update.path), self._learn)
        self.parts.add("learn_s", begin)
        loading = Loading(self.model, self._needs)
        with contextlib.closing(target.receive(update.transfer, self.parts)) as rounds:
            for one, bucket in rounds:
                begin = time.perf_counter()
                self._load(loading, one, bucket)
                self.parts.add("load_s", begin)
        self._decoder.clear()
        try:
            loading.check()
        except ValueError:
            target.fail()
            raise
        begin = time.perf_counter()
        self._consumed = {
            name: Consumed(fingerprint, *self._came_as[name])
            for name, fingerprint in target.attest().items()
        }
        self.parts.add("attest_s", begin)

    def _learn(self, tensors: list[TensorInfo]) -> dict[str, tuple[Box, ...]]:
        names = {tensor.name for tensor in tensors}
        if missing := sorted(self._expected_names() - names):
            raise ValueError(
                f"the trainer does not publish tensor {missing[0]!r} ({len(missing)} in all)"
            )
        put_back(self.model)
        plain = plain_tensors(tensors)
        self._needs: Needs = learn(self.model, plain)
        initialize_layerwise_reload(self.model)
        self._runs: dict[int, tuple[Round, RoundRuns]] = {}
        self._plain = {tensor.name: tensor for tensor in plain}
        self._decoder = SliceDecoder({tensor.name: tensor for tensor in tensors}, self.device)
        self._came_as: dict[str, tuple[torch.Size | None, torch.dtype]] = {}
        for tensor in tensors:
            whole = tuple((0, size) for size in tensor.shape)
            destinations = self._needs.destinations.get(tensor.name, ())
            is_whole = all(each.box == whole for each in destinations)
            shape = torch.Size(tensor.shape) if is_whole else None
            self._came_as[tensor.name] = (shape, dtype_of(tensor))
        boxes = {
            name: tuple(dict.fromkeys(each.box for each in found))
            for name, found in self._needs.destinations.items()
        }
        return with_scales(boxes, tensors)

    def _load(self, loading: Loading, one: Round, bucket: torch.Tensor) -> None:
        known = self._runs.get(one.number)
        if known is None or known[0] is not one:
            scales, values, others = self._decoder.divide(one.slices)
            wide = runs(self._decoder.widened(values), self._needs, self._plain)
            plain = runs(others, self._needs, self._plain)
            known = self._runs[one.number] = (one, RoundRuns(scales, values, wide, plain))
        of = known[1]
        loading.load(of.plain, bucket)
        if of.scales or of.values:
            loading.load(of.wide, self._decoder.decode(of.scales, of.values, bucket))

    def _fingerprinted(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        what = f"weights version {update.version}"
        try:
            for name, tensor in read_weights(update.path):
                if name in self._consumed:
                    raise ValueError(f"{what}: tensor {name!r} comes twice")
                here = tensor.to(self.device)
                fingerprint = tensor_fingerprint(here)
                self._consumed[name] = Consumed(fingerprint, tensor.shape, tensor.dtype)
                yield name, here
        except SafetensorError as error:
            raise ValueError(f"{what}: {damage(Path(update.path)) or error}") from error

    def _check_complete(self, update: UpdateInfo) -> None:
        for name in sorted(self._expected_names() - self._consumed.keys()):
            raise ValueError(f"weights version {update.version}: tensor {name!r} is missing")
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            total = info.load_numel_total or 0
            # vLLM resets `load_numel` of complete layers. Padded embeddings never look complete.
            is_begun = info.can_load() and 0 < info.load_numel < total
            if is_begun and not isinstance(layer, VocabParallelEmbedding):
                raise ValueError(
                    f"weights version {update.version}: layer {path!r} got {info.load_numel} of "
                    f"{total} elements"
                )

    def _expected_names(self) -> set[str]:
        """Return the initial checkpoint's tensor names, without a tied LM head."""
        from safetensors import safe_open

        names: set[str] = set()
        for file in sorted(Path(self.model_config.model).glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                names.update(opened.keys())
        if self.model_config.hf_text_config.tie_word_embeddings:
            names.discard("lm_head.weight")
        return names

    def _resident(self, name: str, consumed: Consumed) -> torch.Tensor | None:
        """Return the parameter that holds tensor `name`, or None if vLLM repacked or sliced it."""
        if name not in self._places:
            self._places[name] = self._place(name)
        place = self._places[name]
        if place is None or consumed.shape is None:
            return None
        parameter = getattr(place.module, place.parameter, None)
        if parameter is None or parameter.dtype != consumed.dtype:
            return None
        if isinstance(place.module, VocabParallelEmbedding):
            parameter = parameter[: consumed.shape[0]]  # the other rows are padding
        is_whole = parameter.shape == consumed.shape  # not a tensor-parallel slice
        return parameter.detach() if is_whole else None

    def _place(self, name: str) -> Place | None:
        module_path, _, attribute = name.rpartition(".")
        try:
            module = self.model.get_submodule(module_path)
        except AttributeError:  # fused into another module (q_proj into qkv_proj)
            return None
        return Place(module, attribute) if isinstance(module, UNCHANGED) else None

    def _fingerprint(self, tensor: torch.Tensor) -> torch.Tensor:
        key = tensor.shape, tensor.dtype
        if key not in self._fingerprints:
            shape = tuple(tensor.shape)
            whole = SliceSpec(0, shape, shape, (0,) * len(shape), tensor.element_size())
            self._fingerprints[key] = SliceFingerprints([whole], tensor.device)
        return self._fingerprints[key].of(tensor.contiguous().view(-1).view(torch.uint8))


class AdapterReceiver(Backend):
    """Overwrite the factors of the engine's adapter while the engine is paused.

    vLLM's `load_inplace` is unsuitable: a request from before the update would reload old files.
    """

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.held = {}
        self._tensors: dict[str, torch.Tensor] = {}
        keep_adapters(self.model.lora_manager)

    def _start(self) -> None:
        self._tensors = {}

    def _receive(self, update: UpdateInfo) -> None:
        what = f"adapters version {update.version}"
        try:
            tensors = dict(read_weights(update.path))
        except SafetensorError as error:
            raise ValueError(f"{what}: {damage(Path(update.path)) or error}") from error
        places = self._buffers().keys()
        for names, verb in (
            (tensors.keys() - places, "has no place in this model"),
            (places - tensors.keys(), "is missing"),
        ):
            if names:
                raise ValueError(f"{what}: tensor {min(names)!r} {verb}")
        self._tensors = tensors

    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        if not is_whole:
            return {}
        slots = enumerate(self.model.lora_manager.lora_index_to_id)
        [slot] = [index for index, adapter in slots if adapter is not None]
        for module, parts in self._adapted():
            a, b = ([self._tensors[_names(part)[factor]] for part in parts] for factor in (0, 1))
            module.set_lora(slot, *((a, b) if len(parts) > 1 else (a[0], b[0])))
        buffers = self._buffers()
        held = {
            name: _attest(tensor, buffers[name][slot, 0]) for name, tensor in self._tensors.items()
        }
        self._tensors = {}
        return held

    def shutdown(self) -> None:
        self.held = {}

    def _adapted(self) -> Iterator[tuple[Any, list[str]]]:
        manager = self.model.lora_manager
        for name, module in manager.modules.items():
            yield module, manager.packed_modules.get(name) or [name]

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return LoRA buffers by PEFT name: A [slots, 1, rank, in], B [slots, 1, out, rank]."""
        found: dict[str, torch.Tensor] = {}
        for module, parts in self._adapted():
            pairs = zip(module.lora_a_stacked, module.lora_b_stacked, strict=True)
            for part, pair in zip(parts, pairs, strict=True):
                found.update(zip(_names(part), pair, strict=True))
        return found


def _names(module: str) -> tuple[str, str]:
    return f"base_model.model.{module}.lora_A.weight", f"base_model.model.{module}.lora_B.weight"


def _attest(tensor: torch.Tensor, buffer: torch.Tensor) -> tuple[int, str]:
    """Return a LoRA factor's fingerprint, and whether it is of vLLM's `buffer` or the factor."""
    sizes = zip(tensor.shape, buffer.shape, strict=True)
    if tensor.dtype != buffer.dtype or any(size > room for size, room in sizes):
        return tensor_fingerprint(tensor), AS_CONSUMED
    return tensor_fingerprint(buffer[: tensor.shape[0], : tensor.shape[1]].contiguous()), RESIDENT


def damage(folder: Path) -> str | None:
    """Return a message about a damaged safetensors file, or None.

    The message names no folders, because vLLM removes paths from error answers.
    """
    for shard in sorted(folder.glob("*.safetensors")):
        size = shard.stat().st_size
        try:
            header, data = split_header(np.memmap(shard, np.uint8, "r"))
        except ValueError:
            return f"{shard.name} has no readable header ({size} bytes)"
        header.pop("__metadata__", None)
        for name, entry in sorted(header.items(), key=lambda item: item[1]["data_offsets"]):
            if entry["data_offsets"][1] > len(data):
                return f"tensor {name!r} is cut off in {shard.name} ({size} bytes)"
    return None
