"""Turn `Columns` (packed samples) into micro-batches, and compute their log-probs.

- The LM head scores only trained tokens with a loss weight. Token t − 1's hidden state predicts t.
- A rank without samples gets one token of weight 0, so that it joins all collectives.
- `Policy` joins network and LM head in one `forward`, so that FSDP's hooks cover all weights.

T: tokens, M: scored tokens, D: hidden size
"""

from collections.abc import Callable
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from orrery.manifest.errors import RunFailed
from orrery.models.causal_lm import CausalLm
from orrery.trainer.loss import COMPONENTS, Targets
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import COLUMN, RouteShape, check_routes, split_choices

if TYPE_CHECKING:
    from orrery.trainer.parallel.fsdp import ComputeCopies

TOTALS = (*COMPONENTS, "num_tokens")
_DEFAULT_WEIGHT = {"rl": 1.0, "cross_entropy": 0.0, "reference_kl": 0.0}


@dataclass(frozen=True)
class MicroBatch:
    """Inputs of a forward pass.

    L: layers with experts, K: experts per token, I: indexers (sparse attention),
    B: bytes of a bit mask of keys
    """

    token_id: torch.Tensor  # i64 [T]
    position: torch.Tensor  # i64 [T], counted from 0 in each document
    cu_seqlens: torch.Tensor  # i32 [documents + 1]
    max_seqlen: int
    row: torch.Tensor  # i64 [M], tokens whose hidden states predict the targets
    target: torch.Tensor  # i64 [M]
    temperature: torch.Tensor  # f32 [M]
    routed_experts: torch.Tensor | None  # expert ids [T, L, K] (routes), or None if routers choose
    loss: Targets  # [M]
    origin: torch.Tensor  # i64 [M, 2]: engine (−1: unknown), age of weights in versions
    num_samples: int
    num_tokens: int
    routes_missing: int = 0  # tokens without a route, except samples' last tokens
    routes_replayed: int = 0  # valid expert ids in `routed_experts`
    engine_keys: torch.Tensor | None = None  # [T, I, B] u8 or [T, I, S] i32, see `kernels/key_bits`
    is_padding: torch.Tensor | None = None  # bool [T]: tokens that pad cp shards or empty batches
    choices_sent: int = 0  # (token, indexer) pairs that chose among more than top_k keys


def member_weights(columns: Columns) -> dict[str, np.ndarray]:
    """Return each loss component's weights f32 [T]. Untrained tokens have weight 0."""
    trained = columns.token["trained"]
    weights = {}
    for name in COMPONENTS:
        weight = columns.token.get(f"{name}_weight", _DEFAULT_WEIGHT[name])
        weights[name] = np.where(trained, weight, 0.0).astype(np.float32)
    return weights


def count_members(columns: Columns) -> dict[str, int]:
    if not columns.num_samples:
        return dict.fromkeys(TOTALS, 0)
    weights = member_weights(columns).items()
    counts = {name: int(np.count_nonzero(weight)) for name, weight in weights}
    return {**counts, "num_tokens": columns.num_tokens}


class SentKeys(NamedTuple):
    """Format of chosen keys from engines: a sample, or all `top_k` as bits, per indexer."""

    num_indexers: int
    top_k: int
    are_sampled: bool


def micro_batch(
    columns: Columns,
    step: int,
    device: torch.device,
    shard: Callable[[MicroBatch], MicroBatch] | None = None,
    routes: RouteShape | None = None,
    sent: "SentKeys | None" = None,
) -> MicroBatch:
    """Build the micro-batch that trains version `step` − 1.

    `shard` selects this context-parallel rank's tokens. `sent`: format of engines' chosen keys.
    Raise RunFailed for invalid samples or routes.
    """
    whole = _with_routes(_whole(columns, step), columns, step, routes, sent)
    return _on_device(whole if shard is None else shard(whole), device)


def _whole(columns: Columns, step: int) -> MicroBatch:
    if not columns.num_tokens:
        return unweighted_token()
    offsets, token = columns.offsets, columns.token
    starts = offsets[:-1][columns.lengths > 0]
    weights = member_weights(columns)
    scored = np.flatnonzero(np.logical_or.reduce([weight != 0 for weight in weights.values()]))
    if np.isin(scored, starts).any():
        raise RunFailed(
            f"batch {step}: the first token of a sample is marked trained, "
            f"but no earlier token predicts it"
        )
    if not len(scored):  # score one token, so that this rank joins the LM head's collectives
        scored = np.array([min(1, columns.num_tokens - 1)])
    sample_of = np.repeat(np.arange(columns.num_samples), columns.lengths)
    ones = np.ones(columns.num_samples, dtype=np.float32)
    temperature = columns.sample.get("temperature", ones)

    def scored_of(name: str) -> torch.Tensor:
        if name in token:
            return _tensor(token[name][scored])
        return torch.zeros(len(scored), dtype=torch.float32)

    targets = Targets(
        engine_logprob=scored_of("logprob"),
        advantage=scored_of("advantage"),
        reference_logprob=scored_of("reference_logprob"),
        rl_weight=_tensor(weights["rl"][scored]),
        cross_entropy_weight=_tensor(weights["cross_entropy"][scored]),
        reference_kl_weight=_tensor(weights["reference_kl"][scored]),
        same_weights=_tensor(_same_weights(columns, step, sample_of)[scored]),
    )
    return MicroBatch(
        token_id=_tensor(token["token_id"].astype(np.int64)),
        position=_tensor(np.arange(columns.num_tokens) - np.repeat(offsets[:-1], columns.lengths)),
        cu_seqlens=_tensor(np.append(starts, columns.num_tokens).astype(np.int32)),
        max_seqlen=int(columns.lengths.max()),
        row=_tensor(np.maximum(scored - 1, 0)),
        target=_tensor(token["token_id"][scored].astype(np.int64)),
        temperature=_tensor(temperature[sample_of[scored]]),
        routed_experts=None,
        loss=targets,
        origin=_tensor(_origin(columns, step, sample_of)[scored]),
        num_samples=columns.num_samples,
        num_tokens=columns.num_tokens,
    )


def _same_weights(columns: Columns, step: int, sample_of: np.ndarray) -> np.ndarray:
    """Return bool [T]: whether only version `step` − 1 sampled the token's document."""
    if "version" not in columns.token or "dispatch_version" not in columns.sample:
        return np.zeros(columns.num_tokens, dtype=bool)
    other = columns.token["trained"] & (columns.token["version"] != step - 1)
    fresh = np.bincount(sample_of[other], minlength=columns.num_samples) == 0
    return (fresh & (columns.sample["dispatch_version"] == step - 1))[sample_of]


def _origin(columns: Columns, step: int, sample_of: np.ndarray) -> np.ndarray:
    """Return i64 [T, 2], as `MicroBatch.origin` of all tokens."""
    engine, version = columns.sample.get("engine"), columns.token.get("version")
    unknown = np.full(columns.num_tokens, -1, dtype=np.int64)
    age = unknown if version is None else np.maximum(step - 1 - version.astype(np.int64), 0)
    number = unknown if engine is None else engine.astype(np.int64)[sample_of]
    return np.stack([number, age], axis=1)


def _with_routes(
    batch: MicroBatch,
    columns: Columns,
    step: int,
    shape: RouteShape | None,
    sent: "SentKeys | None",
) -> MicroBatch:
    if not columns.num_tokens or COLUMN not in columns.token:
        return batch
    if shape is None:
        raise RunFailed(
            f"batch {step}: it carries {COLUMN}, but this network has no experts; "
            f"set transport.routed_experts to false"
        )
    routes = columns.token[COLUMN]
    if sent is not None:
        routes, choices = split_choices(routes, shape, sent.num_indexers, _name(columns, step))
        if sent.are_sampled:
            choices = np.ascontiguousarray(choices).view(np.int32)
        choosing = int(np.maximum(columns.lengths - 1 - sent.top_k, 0).sum())
        count = sent.num_indexers * choosing
        batch = replace(batch, engine_keys=_tensor(choices), choices_sent=count)
    checked = check_routes(routes, shape, _name(columns, step))
    checked.is_missing[columns.offsets[1:][columns.lengths > 0] - 1] = False
    return replace(
        batch,
        routed_experts=_tensor(checked.ids),
        routes_missing=int(np.count_nonzero(checked.is_missing)),
        routes_replayed=checked.num_routed * shape.top_k,
    )


def _name(columns: Columns, step: int) -> str:
    groups = np.unique(columns.sample["group_id"]).tolist() if "group_id" in columns.sample else []
    if not groups:
        return f"batch {step}"
    more = ", …" if len(groups) > 8 else ""
    return f"batch {step}, groups {', '.join(map(str, groups[:8]))}{more}"


def unweighted_token() -> MicroBatch:
    token = {"token_id": np.zeros(1, dtype=np.int32), "trained": np.zeros(1, dtype=bool)}
    columns = Columns(np.array([0, 1], dtype=np.int64), token, {})
    is_padding = torch.ones(1, dtype=torch.bool)
    return replace(_whole(columns, 1), num_samples=0, num_tokens=0, is_padding=is_padding)


def _tensor(array: np.ndarray) -> torch.Tensor:
    """Copy the array, because columns may be read-only."""
    return torch.from_numpy(np.array(array))


def _on_device(batch: MicroBatch, device: torch.device) -> MicroBatch:
    def sent(record: MicroBatch | Targets) -> dict[str, torch.Tensor]:
        values = {field.name: getattr(record, field.name) for field in fields(record)}
        tensors = {name: v for name, v in values.items() if isinstance(v, torch.Tensor)}
        return {name: _send(tensor, device) for name, tensor in tensors.items()}

    return replace(batch, **sent(batch), loss=replace(batch.loss, **sent(batch.loss)))


def _send(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    if device.type != "cuda":
        return tensor.to(device)
    pinned = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    np.copyto(pinned.numpy(), tensor.numpy())
    return pinned.to(device, non_blocking=True)


class Policy(nn.Module):
    """Compute logits of at most `chunk_tokens` tokens at once, unless `keep_logits` is set."""

    def __init__(
        self, network: CausalLm, chunk_tokens: int | Literal["auto"], keep_logits: bool = False
    ):
        super().__init__()
        self.network, self.chunk_tokens, self.keep_logits = network, chunk_tokens, keep_logits
        self.copies: ComputeCopies | None = None

    def forward(self, batch: MicroBatch) -> tuple[Tensor, Tensor]:
        """Return log-probs and entropies, f32 [M], at each token's temperature."""
        network = self.network
        hidden_TD = network(
            batch.token_id,
            batch.position,
            batch.cu_seqlens,
            batch.routed_experts,
            max_seqlen=batch.max_seqlen,
            engine_keys_TIB=batch.engine_keys,
            is_padding_T=batch.is_padding,
        )
        hidden_MD = _SelectRows.apply(hidden_TD, batch.row)
        return network.log_probs(
            hidden_MD, batch.target, batch.temperature, self.chunk_tokens, self.keep_logits
        )


class _SelectRows(torch.autograd.Function):
    """An `index_select` of distinct rows with a deterministic backward pass."""

    @staticmethod
    def forward(ctx: Any, x_TD: Tensor, row_M: Tensor) -> Tensor:
        ctx.save_for_backward(row_M)
        ctx.num_rows = x_TD.shape[0]
        return x_TD.index_select(0, row_M)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_MD: Tensor) -> tuple[Tensor, None]:
        (row_M,) = ctx.saved_tensors
        grad_TD = grad_MD.new_zeros(ctx.num_rows, grad_MD.shape[1])
        return grad_TD.index_copy_(0, row_M, grad_MD), None
