"""Weights in: reads what the trainer published, loads it into the running model, and records which weights those were.

- In: the path of a published version (`orrery.transport.weight_wire`), whichever wire it is of. Out: `held`, name → (fingerprint, how).
- From `files` come whole tensors; on a direct wire this rank receives the slices that it needs (`needs`), and puts them in place as they
  come (`loading`).
- Each tensor is fingerprinted as the model consumes it. After processing, tensors that the engine keeps as they came (embedding, norms, an
  untied output head) are fingerprinted again from the model itself ("resident"); those that it repacks can only be "as_consumed".
- Always: every tensor that the model was first loaded with must come again, and every element of every layer must be filled.
- A damaged file fails the update with the tensor's name. The engine process lives on, but `held` is empty until a whole update has gone
  through.
- No failure leaves the worker's call: workers are asked for theirs afterwards (`attestation`), and one that has all gives it up with the
  one that has not. vLLM stops reading at the first worker of an engine that raises, and takes the others' answers for those to its next
  call. Versions: 0.32 (seen).
"""

import abc
import contextlib
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec
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

from orrery.inference.loading import Loading, Run, runs
from orrery.inference.needs import Needs, learn, put_back
from orrery.inference.patches.vllm import (
    forget_moe_kernels,
    has_stale_head,
    repack_tied_heads,
    say_nothing_of_unloaded,
)
from orrery.transport.fingerprint import MASK, SliceFingerprints, SliceSpec, tensor_fingerprint
from orrery.transport.weight_wire import read_weights
from orrery.transport.weight_wire.coordinator import PartTimer
from orrery.transport.weight_wire.leases import (
    Transfer,
    TransferFailed,
    abandon_transfer,
    read_transfer,
)
from orrery.transport.weight_wire.plan import Box, TensorInfo, dtype_of
from orrery.transport.weight_wire.receiver import Round, WeightReceiver

log = logging.getLogger(__name__)

RESIDENT, AS_CONSUMED = "resident", "as_consumed"
# Modules whose parameter stays as it was loaded (ParallelLMHead is a VocabParallelEmbedding).
KEPT_AS_THEY_CAME = (RMSNorm, VocabParallelEmbedding)


@dataclass
class InitInfo(WeightTransferInitInfo):
    """How many ranks this engine has, over all of its data-parallel parts; of what is published its path says all."""

    num_ranks: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """Where the published version is, which it is, and what this engine is called among the others."""

    path: str
    version: int
    engine: str = "engine"


class Consumed(NamedTuple):
    """What a tensor looked like on its way in; `shape` is None where this rank has a part of it only."""

    fingerprint: int
    shape: torch.Size | None
    dtype: torch.dtype


class Place(NamedTuple):
    """Where a tensor stands in the processed model as it came."""

    module: torch.nn.Module
    parameter: str


class Backend(WeightTransferEngine[InitInfo, UpdateInfo]):
    """What our weight-transfer backends of vLLM have in common: how an update ends in one worker of an engine that may have several."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    held: dict[str, tuple[int, str]]
    failure: str | None = None  # why the update under way, or the last one, is not this worker's

    def start_weight_update(self) -> None:
        self.held, self.failure = {}, None
        self._start()

    def receive_weights(self, update_info: UpdateInfo) -> None:
        try:
            self._receive(update_info)
        except Exception as error:
            self.failure = str(error) or type(error).__name__
            is_ours = not isinstance(error, TransferFailed)
            log.warning("version %d is not taken: %s", update_info.version, error, exc_info=is_ours)
            if is_ours:
                with contextlib.suppress(
                    OSError
                ):  # else they wait for this worker as long as they wait for anybody
                    abandon_transfer(Path(update_info.path))

    def finish_weight_update(self) -> None:
        """Also where it failed, here or in another worker: then the weights are nobody's version, and `held` stays empty."""
        self.held = self._finish(self.failure is None)

    @abc.abstractmethod
    def _start(self) -> None:
        """Make the model ready to be loaded again."""

    @abc.abstractmethod
    def _receive(self, update: UpdateInfo) -> None:
        """Take a version in. Raises whatever keeps it from coming in whole."""

    @abc.abstractmethod
    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        """Leave a model that can compute; gives what is held of a version that `is_whole`, else nothing."""


class Receiver(Backend):
    """vLLM's weight-transfer backend `orrery`."""

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        self.held = {}
        self.parts = PartTimer()  # seconds of the last update
        self._consumed: dict[str, Consumed] = {}
        self._places: dict[str, Place | None] = {}  # by tensor, found once
        self._fingerprints: dict[
            tuple[torch.Size, torch.dtype], SliceFingerprints
        ] = {}  # of whole tensors that stand in the model
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
        taking = read_transfer(update.path)
        if taking is None:
            self.model.load_weights(self._fingerprinted(update))
            self._check_complete(update)
        else:
            # No `torch.device` around it: dynamo follows vLLM's parameter class into endless recursion beside any such mode, in the
            # function that rounds a layer to FP8. What makes tensors here says where.
            with set_current_vllm_config(self.vllm_config):
                self._take(update, taking)

    def _finish(self, is_whole: bool) -> dict[str, tuple[int, str]]:
        begin = time.perf_counter()
        is_tied = self.model_config.hf_text_config.tie_word_embeddings
        with say_nothing_of_unloaded(self.model, is_tied):
            finalize_layerwise_reload(
                self.model, self.model_config
            )  # gives half-loaded layers storage again
        if is_tied and self.device.type == "cpu":
            repack_tied_heads(self.model)
        elif is_tied and has_stale_head(self.model):
            self.failure = "the output head is tied to the embedding and has a weight of its own, which no update reaches"
            return {}
        if not is_whole:
            return {}
        resident = {
            name: self._resident(name, consumed) for name, consumed in self._consumed.items()
        }
        kept = {
            name: self._fingerprint(tensor)
            for name, tensor in resident.items()
            if tensor is not None
        }
        found = (
            dict(zip(kept, torch.cat([*kept.values()]).tolist(), strict=True)) if kept else {}
        )  # the device is waited for once
        held = {
            name: (found[name] & MASK, RESIDENT)
            if name in found
            else (consumed.fingerprint, AS_CONSUMED)
            for name, consumed in self._consumed.items()
        }
        self.parts.add("finish_s", begin)
        return held

    def shutdown(self) -> None:
        self.held = {}
        if self._target is not None:
            self._target.drop()

    def _take(self, update: UpdateInfo, taking: Transfer) -> None:
        """Receive this rank's slices of a version on a direct wire, and put them in place as they come."""
        if self._target is None:
            parallel = self.parallel_config
            rank = parallel.data_parallel_index * parallel.world_size + parallel.rank
            self._target = WeightReceiver(
                update.engine, rank, self._num_ranks or parallel.world_size_across_dp, self.device
            )
        target = self._target
        begin = time.perf_counter()
        target.join(Path(update.path).parent, self._learn)
        self.parts.add("learn_s", begin)
        loading = Loading(self.model, self._needs)
        with contextlib.closing(target.receive(taking, self.parts)) as rounds:
            for one, bucket in rounds:
                begin = time.perf_counter()
                loading.load(self._runs_of(one), bucket)
                self.parts.add("load_s", begin)
        try:
            loading.check()
        except ValueError:
            target.fail()  # as a take does that ends in its midst
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
                f"tensor {missing[0]!r} is missing from what the trainer publishes ({len(missing)} in all)"
            )
        put_back(self.model)
        self._needs: Needs = learn(self.model, tensors)
        initialize_layerwise_reload(self.model)
        self._runs: dict[int, tuple[Round, list[Run]]] = {}
        self._came_as: dict[str, tuple[torch.Size | None, torch.dtype]] = {}
        for tensor in tensors:
            whole = tuple((0, size) for size in tensor.shape)
            is_whole = all(
                each.box == whole for each in self._needs.destinations.get(tensor.name, ())
            )
            self._came_as[tensor.name] = (
                torch.Size(tensor.shape) if is_whole else None,
                dtype_of(tensor),
            )
        return {
            name: tuple(dict.fromkeys(each.box for each in found))
            for name, found in self._needs.destinations.items()
        }

    def _runs_of(self, one: Round) -> list[Run]:
        """Worked out once for a group's round."""
        assert self._target is not None
        known = self._runs.get(one.number)
        if known is None or known[0] is not one:
            known = self._runs[one.number] = (
                one,
                runs(one.slices, self._needs, self._target.tensors),
            )
        return known[1]

    def _fingerprinted(self, update: UpdateInfo) -> Iterator[tuple[str, torch.Tensor]]:
        try:
            for name, tensor in read_weights(update.path):
                if name in self._consumed:
                    raise ValueError(
                        f"weights version {update.version}: tensor {name!r} comes twice"
                    )
                here = tensor.to(self.device)
                self._consumed[name] = Consumed(
                    tensor_fingerprint(here), tensor.shape, tensor.dtype
                )
                yield name, here
        except SafetensorError as error:
            raise ValueError(
                f"weights version {update.version}: {damage(Path(update.path)) or error}"
            ) from error

    def _check_complete(self, update: UpdateInfo) -> None:
        """Raise ValueError naming what was not filled."""
        for name in sorted(self._expected_names() - self._consumed.keys()):
            raise ValueError(f"weights version {update.version}: tensor {name!r} is missing")
        for path, layer in self.model.named_modules():
            info = get_layerwise_info(layer)
            total = info.load_numel_total or 0
            # A layer whose every element has come is processed and reset at once; one that still waits lacks something.
            # (Not so an embedding, whose rows after the vocabulary are never loaded; it has one tensor, and its loader checks the shape.)
            if (
                info.can_load()
                and 0 < info.load_numel < total
                and not isinstance(layer, VocabParallelEmbedding)
            ):
                raise ValueError(
                    f"weights version {update.version}: layer {path!r} got {info.load_numel} of {total} elements"
                )

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

    def _resident(self, name: str, consumed: Consumed) -> torch.Tensor | None:
        """The tensor in the processed model where it stands there as it came; None where only the way in tells."""
        if name not in self._places:
            self._places[name] = self._place(name)
        place = self._places[name]
        if place is None or consumed.shape is None:
            return None
        parameter = getattr(place.module, place.parameter, None)
        if parameter is None or parameter.dtype != consumed.dtype:
            return None
        if isinstance(place.module, VocabParallelEmbedding):
            parameter = parameter[: consumed.shape[0]]  # rows after the vocabulary are padding
        return (
            parameter.detach() if parameter.shape == consumed.shape else None
        )  # else a tensor-parallel slice

    def _place(self, name: str) -> Place | None:
        module_path, _, attribute = name.rpartition(".")
        try:
            module = self.model.get_submodule(module_path)
        except AttributeError:  # fused under another name (q_proj in qkv_proj): repacked
            return None
        return Place(module, attribute) if isinstance(module, KEPT_AS_THEY_CAME) else None

    def _fingerprint(self, tensor: torch.Tensor) -> torch.Tensor:
        """i64 [1] on the tensor's device."""
        key = tensor.shape, tensor.dtype
        if key not in self._fingerprints:
            shape = tuple(tensor.shape)
            whole = SliceSpec(0, shape, shape, (0,) * len(shape), tensor.element_size())
            self._fingerprints[key] = SliceFingerprints([whole], tensor.device)
        return self._fingerprints[key].of(tensor.contiguous().view(-1).view(torch.uint8))


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
