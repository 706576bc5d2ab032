"""Train one batch in one optimizer step, for SFT and RL.

- All ranks have equally many micro-batches, and train each when it arrives.
- A step raises RunFailed before weights change if a bound `trainer.mismatch.stop_*` is exceeded, a
  number is not finite, or a token count differs from the announced count.
"""

import logging
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest, Optimizer, Schedule, Trainer
from orrery.trainer.heartbeat import mark_micro_batch
from orrery.trainer.loss import COMPONENTS, StepSums, loss
from orrery.trainer.optim import clip, gradient_norm, last_not_finite, make_optimizer
from orrery.trainer.optim.optimizer import stream_state
from orrery.trainer.parallel import blocks, context_parallel
from orrery.trainer.parallel.expert_parallel import ExchangePlan
from orrery.trainer.parallel.fsdp import reshard_all, set_gradient_sync
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import (
    TOTALS,
    MicroBatch,
    Policy,
    SentKeys,
    count_members,
    micro_batch,
)
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import route_shape

Metrics = dict[str, Any]
MIN_TOKENS = 256
MEASURES = {
    "kl": "the KL from engines to trainer",
    "logprob_difference": "the mean difference of log-probs",
}


class MismatchGuard:
    def __init__(self, manifest: Manifest, world: World, log: logging.Logger):
        self.bounds, self.world, self.log = manifest.trainer.mismatch, world, log
        num_engines = manifest.inference.num_replicas + 1
        num_ages = manifest.orchestrator.max_off_policy_steps + 1
        # [2 (sum of |log-prob difference|, token count), engines + 1 (unknown engine), ages]
        self._sums = torch.zeros(2, num_engines, num_ages, dtype=torch.float64, device=world.device)

    def clear(self) -> None:
        self._sums.zero_()

    def add(self, batch: MicroBatch, logprob: torch.Tensor) -> None:
        """Add a micro-batch without a device sync. `logprob`: f32 [M tokens]."""
        _, num_engines, num_ages = self._sums.shape
        engine, age = batch.origin.unbind(1)
        known = (engine >= 0) & (engine < num_engines - 1)
        cell = torch.where(known, engine, num_engines - 1) * num_ages + age.clamp(0, num_ages - 1)
        is_member = batch.loss.rl_weight != 0
        difference = (logprob.detach() - batch.loss.engine_logprob).abs()
        difference = torch.where(is_member, difference, torch.zeros_like(difference))
        self._sums[0].view(-1).index_add_(0, cell, difference.double())
        self._sums[1].view(-1).index_add_(0, cell, is_member.double())

    def check(self, step: int, kl: float | None) -> float | None:
        """Return the mean |log-prob difference| to engines over `rl` tokens, or None without any.

        Raise RunFailed if a `stop` bound is exceeded. A collective.
        """
        differences, tokens = self.world.sum(self._sums).cpu()
        num_tokens = float(tokens.sum())
        if not num_tokens:
            return None
        mean = float(differences.sum()) / num_tokens
        means = differences.sum(1) / tokens.sum(1).clamp(min=1)
        engines = torch.where(tokens.sum(1) >= MIN_TOKENS, means, torch.zeros(len(tokens)))
        worst = int(engines.argmax())
        where = f"step {step}: {self._describe(step, worst, differences[worst], tokens[worst])}"
        found = {"kl": kl or 0.0, "logprob_difference": max(mean, float(engines[worst]))}
        for kind, value in found.items():
            stop = getattr(self.bounds, f"stop_{kind}")
            if stop is not None and value > stop:
                raise RunFailed(
                    f"{where}; {MEASURES[kind]}, {value:.3g}, is more than "
                    f"trainer.mismatch.stop_{kind} = {stop:g}, so the batch is not trained; "
                    f"see which process answers at that engine's address, and its log. If it is "
                    f"the run's engine, its version may be too old: lower trainer.optimizer.lr or "
                    f"orchestrator.max_off_policy_steps"
                )
        for kind, value in found.items():
            warn = getattr(self.bounds, f"warn_{kind}")
            if warn is not None and value > warn and self.world.is_first:
                measured = f"{MEASURES[kind]}, {value:.3g},"
                bound = f"trainer.mismatch.warn_{kind} = {warn:g}"
                self.log.warning("%s; %s is more than %s", where, measured, bound)
        return mean

    def _describe(
        self, step: int, engine: int, differences: torch.Tensor, tokens: torch.Tensor
    ) -> str:
        of_version = differences / tokens.clamp(min=1)
        age = int(of_version.argmax())
        name = f"engine {engine}"
        if engine == self._sums.shape[1] - 1:
            name = "several or unknown engines"
        mean = float(differences.sum() / tokens.sum().clamp(min=1))
        return (
            f"log-probs of {int(tokens.sum())} tokens of {name} differ from the trainer's by "
            f"{mean:.3g} on average, in version {step - 1 - age} by {float(of_version[age]):.3g}"
        )


class ExpertLoad:
    """Count each expert's tokens (load) in a step, and balance experts by router biases.

    A step changes an expert's bias by rate · sign(mean load − load) (DeepSeek-V3, arXiv 2412.19437,
    section 2.1.2). Loads are integer sums over ranks, so all ranks keep equal biases.

    Each step, call `clear`, `add` per forward pass, then `reduce`, `metrics` and `balance`.
    L: layers with experts, E: experts
    """

    def __init__(self, policy: Policy, world: World, rate: float | None):
        self._world, self._rate = world, rate
        self.biases: dict[str, Tensor] = {}
        if rate is not None:
            named = policy.named_buffers()
            self.biases = {name: one for name, one in named if name.endswith(".expert_bias")}
        self._load_LE: Tensor | None = None
        self._figures_3L: Tensor | None = None

    def clear(self) -> None:
        self._load_LE = self._figures_3L = None

    def add(self, load_LE: Tensor | None) -> None:
        if load_LE is not None:
            self._load_LE = load_LE if self._load_LE is None else self._load_LE + load_LE

    def reduce(self) -> None:
        """Sum loads over ranks, without a device sync. A collective."""
        if self._load_LE is not None:
            load_LE = self._world.sum(self._load_LE)
            share_LE = load_LE.double() / load_LE.sum(1, keepdim=True).clamp(min=1)
            entropy_L = -torch.xlogy(share_LE, share_LE).sum(1)
            self._figures_3L = torch.stack((share_LE.amax(1), share_LE.amin(1), entropy_L))

    def metrics(self) -> dict[str, list[float] | None]:
        """Return each layer's maximum, minimum and entropy (nats) of experts' token shares."""
        names = ("expert_load_max", "expert_load_min", "expert_load_entropy")
        if self._figures_3L is None:
            return dict.fromkeys(names)
        return dict(zip(names, self._figures_3L.tolist(), strict=True))

    @torch.no_grad()
    def balance(self) -> None:
        if self._rate is None or self._load_LE is None:
            return
        num_experts = self._load_LE.shape[1]
        missing_LE = self._load_LE.sum(1, keepdim=True) - num_experts * self._load_LE
        for bias_E, move_E in zip(self.biases.values(), missing_LE.sign(), strict=True):
            bias_E.add_(move_E.to(bias_E.dtype), alpha=self._rate)


@dataclass(frozen=True)
class StepResult:
    """`forward_backward`, `optimizer`: begin and end, in Unix seconds."""

    metrics: Metrics
    wait_s: float
    forward_backward: tuple[float, float]
    optimizer: tuple[float, float]

    @property
    def num_tokens(self) -> int:
        return self.metrics["num_tokens"]


class Learner:
    """Train a policy. `step` counts optimizer steps, and is the weights' version.

    `replays_routes`: batches hold the engines' routes.
    """

    def __init__(
        self,
        policy: Policy,
        world: World,
        trainer: Trainer,
        optimizer: Optimizer,
        max_grad_norm: float,
        replays_routes: bool = False,
    ):
        self.policy, self.world, self.trainer = policy, world, trainer
        self.loss, self.max_grad_norm, self.peak_lr = trainer.loss, max_grad_norm, optimizer.lr
        self.route_shape = route_shape(policy.network.config)
        self.sent_keys: SentKeys | None = None
        if trainer.indexer_choice != "own" and (mla := policy.network.config.mla) and mla.indexer:
            self.sent_keys = SentKeys(
                policy.network.config.num_indexers,
                mla.indexer.top_k,
                are_sampled=trainer.indexer_choice == "compare",
            )
        self.shard = partial(context_parallel.shard, world=world, mesh=trainer.mesh)
        self.exchange_plan = ExchangePlan(policy, world.device) if replays_routes else None
        memory = trainer.memory
        away = memory.optimizer_offload, memory.optimizer_offload_resident
        self.optimizer = make_optimizer(policy, optimizer, *away)
        self.state_stream = stream_state(self.optimizer.offload, policy.network, trainer)
        parameters = policy.named_parameters()
        self.weights = {name: weight for name, weight in parameters if weight.requires_grad}
        self.expert_load = ExpertLoad(policy, world, trainer.expert_bias_rate)
        self.step = 0
        self.outer_momentum: dict[str, torch.Tensor] = {}  # DiLoCo's momentum, in host memory
        self.outer_start: dict[str, torch.Tensor] = {}  # weights after DiLoCo's last round
        self.base_sha256: str | None = None
        self.guard: MismatchGuard | None = None
        self.before_step: Callable[[], float] = lambda: 0.0  # returns the seconds it took
        # Maximum |gradient| at context-parallel exchanges and the embedding, to find a NaN's rank.
        self._max_gradients: list[torch.Tensor] = []
        embeddings = (module for module in policy.modules() if isinstance(module, nn.Embedding))
        if (embedding := next(embeddings, None)) is not None:
            embedding.register_forward_hook(self._watch_embedding)
        context_parallel.watch(policy, self._watch)

    def learn(
        self,
        micro_batches: Iterable[Columns],
        num_micro_batches: int,
        totals: dict[str, int],
        lr_factor: float,
    ) -> StepResult:
        """Train one batch. `totals`: counts of `TOTALS` over all ranks.

        Raise OrreryError if compilation fails.
        """
        step = self.step + 1
        begin_s = time.time()
        with blocks.explain_compile_error(self.policy.network.config):
            sums, wait_s = self._accumulate(step, micro_batches, num_micro_batches, totals)
        # Queue the norm's kernels before `_check_sums` waits for the device.
        norm = gradient_norm(self.weights.values(), self.world)
        divisor = clip(norm, self.max_grad_norm)
        self.optimizer.prepare()
        values = self._check_sums(step, sums, totals)
        grad_norm = norm.item()
        backward_s = time.time()
        if not math.isfinite(grad_norm):
            self._name_gradient(step)
        if self.guard is not None:
            values["logprob_mean_abs_diff"] = self.guard.check(step, values["mismatch_kl"])
        settle_s = self.before_step()
        self.optimizer.set_rate(lr_factor)
        self.optimizer.step(divisor)
        self.optimizer.zero_grad()
        self.expert_load.balance()
        self.step = step
        rate = self.peak_lr * lr_factor
        values |= {"grad_norm": grad_norm, "learning_rate": rate, "settle_s": settle_s}
        return StepResult(values, wait_s, (begin_s, backward_s), (backward_s, time.time()))

    @torch.no_grad()
    def compare(self, micro_batches: Iterable[Columns]) -> tuple[float | None, int]:
        """Return (maximum log-prob difference to engines, number of scored tokens). A collective.

        The maximum covers samples of the current version. Without such samples it is None.
        """
        sums = StepSums.zero(self.world.device)
        totals = dict.fromkeys(COMPONENTS, 1)
        for columns in micro_batches:
            batch = self._micro_batch(columns)
            with blocks.explain_compile_error(self.policy.network.config):
                logprob, entropy = self.policy(batch)
            sums.add(loss(logprob, entropy, batch.loss, totals, self.loss)[1])
        reshard_all(self.policy)
        values = self._add_up(f"version {self.step}", sums)
        peak = float(sums.peaks)
        return peak if peak >= 0 else None, int(values["scored"])

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p of each token after the first, at temperature 1. A collective.

        Blocks run eagerly, because compiling for this length would change later compilations.
        """
        # Context parallel reorders tokens, so the logprob column holds their positions.
        positions = np.arange(len(token_ids), dtype=np.float32)
        token = {
            "token_id": np.asarray(token_ids, dtype=np.int32),
            "trained": positions > 0,
            "logprob": positions,
        }
        offsets = np.array([0, len(token_ids)], dtype=np.int64)
        batch = self._micro_batch(Columns(offsets, token, {}))
        with torch.compiler.set_stance("force_eager"):
            logprob, _ = self.policy(batch)
        reshard_all(self.policy)
        found = torch.zeros(len(token_ids), dtype=torch.float64, device=self.world.device)
        if self.world.data_rank == 0:
            is_scored = batch.loss.rl_weight != 0
            found[batch.loss.engine_logprob[is_scored].long()] = logprob[is_scored].double()
        return self.world.sum(found)[1:].tolist()

    def check_weights(self) -> None:
        """Raise RunFailed if a weight is not finite. A collective."""
        if name := self._not_finite():
            raise RunFailed(
                f"step {self.step}: after its update the weight {name} is not finite; "
                f"lower the optimizer's lr or max_grad_norm"
            )

    def weights_to_blame(self) -> str:
        """Return text that names a non-finite weight, or says that all are finite. A collective."""
        name = self._not_finite()
        return f" (weight {name} is not finite)" if name else "; all weights are finite"

    def _micro_batch(self, columns: Columns) -> MicroBatch:
        replayed = self.route_shape, self.sent_keys
        batch = micro_batch(columns, self.step + 1, self.world.device, self.shard, *replayed)
        if self.exchange_plan is not None:
            self.exchange_plan.set(batch.routed_experts)
        return batch

    def _accumulate(
        self, step: int, micro_batches: Iterable[Columns], count: int, totals: dict[str, int]
    ) -> tuple[StepSums, float]:
        sums, arrivals = StepSums.zero(self.world.device), _TimedIterator(micro_batches)
        self._max_gradients.clear()
        self.expert_load.clear()
        if self.guard is not None:
            self.guard.clear()
        for index, columns in enumerate(arrivals):
            is_last = index == count - 1
            mark_micro_batch(self.world.device)
            batch = self._micro_batch(columns)
            set_gradient_sync(self.policy, is_last, self.trainer.fsdp)
            if self.state_stream is not None:
                self.state_stream.begin(index, count)
            logprob, entropy = self.policy(batch)
            value, part = loss(logprob, entropy, batch.loss, totals, self.loss)
            if (indexer_kl := self.policy.network.indexer_kl) is not None:
                value = value + indexer_kl / max(1, totals["num_tokens"])
            if is_last:
                self.optimizer.prefetch()
            value.backward()
            sums.add(part)
            self.expert_load.add(self.policy.network.expert_load_LE)
            if self.guard is not None:
                self.guard.add(batch, logprob)
            sums.count(
                batch.num_samples,
                batch.num_tokens,
                batch.routes_missing,
                batch.routes_replayed,
                self.policy.network.num_routes_differ,
                batch.choices_sent,
                self.policy.network.choices_differ,
                indexer_kl,
            )
        reshard_all(self.policy)
        if arrivals.count != count:
            raise RunFailed(
                f"batch {step}: rank {self.world.rank} received {arrivals.count} micro-batches, "
                f"but {count} were announced; read logs/orchestrator.0.log"
            )
        return sums, arrivals.wait_s

    def _check_sums(self, step: int, sums: StepSums, totals: dict[str, int]) -> Metrics:
        self.expert_load.reduce()
        values = self._add_up(f"step {step}", sums)
        found = {name: values[f"members_{name}"] for name in COMPONENTS}
        found["num_tokens"] = values["tokens"]
        for name, count in found.items():
            if count != totals[name]:
                what = name if name in COMPONENTS else "packed"
                raise RunFailed(
                    f"step {step}: the batch announces {totals[name]} {what} tokens, but has "
                    f"{count:.0f}, so its loss would be normalised wrongly"
                )
        has_kl = self.trainer.indexer == "train"
        more: Metrics = {
            "indexer_kl": values["indexer_kl"] / values["tokens"] if has_kl else None,
            **self.expert_load.metrics(),
        }
        if (keys := self.sent_keys) is not None:
            known, sent = values["choices_known"], values["choices_sent"]
            share = values["choices_differ"] / (known * keys.top_k) if known else None
            more |= {"choices_missing": int(sent - known), "choices_differ": share}
        return _metrics(values, float(sums.peaks)) | more

    def _add_up(self, what: str, sums: StepSums) -> dict[str, float]:
        """Sum `sums` in place over ranks. Raise RunFailed if a sum is not finite. A collective."""
        mine = sums.sums.clone()
        self.world.sum(sums.sums)
        self.world.max(sums.peaks)
        values = sums.values()
        for index, name in enumerate(StepSums.NAMES):
            if not math.isfinite(values[name]):
                is_bad = self.world.all_gather(int(not torch.isfinite(mine[index])))
                where = "in the sum over ranks, but finite on each rank"
                if any(is_bad):
                    where = f"on rank {is_bad.index(1)}"
                blame = self.weights_to_blame()
                raise RunFailed(f"{what}: {name} is {values[name]} {where}{blame}")
        return values

    def _not_finite(self) -> str:
        last = max(self.world.all_gather(last_not_finite(self.weights.values())))
        return list(self.weights)[last] if last >= 0 else ""

    def _watch_embedding(self, embedding: nn.Module, ids: object, hidden: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            if not hidden.requires_grad:
                hidden.requires_grad_().register_post_accumulate_grad_hook(_drop_gradient)
            self._watch(hidden)

    def _watch(self, hidden: torch.Tensor) -> None:
        def record(gradient: torch.Tensor) -> None:
            self._max_gradients.append(torch.linalg.vector_norm(gradient, math.inf))

        if hidden.requires_grad:
            hidden.register_hook(record)

    def _name_gradient(self, step: int) -> None:
        """Raise RunFailed with the weight and ranks of a non-finite gradient.

        Backward passes spread NaN towards the embedding, so name the weight nearest to the LM head.
        """
        found = self.world.all_gather(
            last_not_finite(weight.grad for weight in self.weights.values())
        )
        if max(found) < 0:
            raise RunFailed(
                f"step {step}: the gradient norm overflows though every gradient is finite; "
                f"lower the optimizer's lr"
            )
        ranks = [0] if self.world.size == 1 else self._ranks_that_broke()
        where = f"in the shard of rank {found.index(max(found))}"
        if ranks:
            where = f"on rank {', '.join(map(str, ranks))}"
        raise RunFailed(
            f"step {step}: the gradient of {list(self.weights)[max(found)]} is not finite {where}; "
            f"weights stay as before the step"
        )

    def _ranks_that_broke(self) -> list[int]:
        maxima = [float(value) for value in self._max_gradients]
        own = next((index for index, value in enumerate(maxima) if not math.isfinite(value)), -1)
        broke = self.world.all_gather(own)
        groups = self.world.all_gather(self.world.data_rank)
        first: dict[int, int] = {}
        for group, index in zip(groups, broke, strict=True):
            if index >= 0:
                first[group] = min(index, first.get(group, index))
        pairs = enumerate(zip(groups, broke, strict=True))
        return [rank for rank, (group, index) in pairs if index >= 0 and index == first[group]]


def _drop_gradient(hidden: torch.Tensor) -> None:
    hidden.grad = None


class _TimedIterator:
    def __init__(self, items: Iterable[Columns]):
        self._items, self.wait_s, self.count = iter(items), 0.0, 0

    def __iter__(self) -> Iterator[Columns]:
        return self

    def __next__(self) -> Columns:
        begin_s = time.monotonic()
        try:
            item = next(self._items)
        finally:
            self.wait_s += time.monotonic() - begin_s
        self.count += 1
        return item


def count_totals(micro_batches: Iterable[Columns], world: World) -> dict[str, int]:
    """Return the counts of `TOTALS` over all ranks. A collective."""
    counts = []
    if world.axis_rank("cp") == 0:
        counts = [count_members(columns) for columns in micro_batches]
    mine = [sum(count[name] for count in counts) for name in TOTALS]
    totals = world.sum(torch.tensor(mine, dtype=torch.int64, device=world.device))
    return dict(zip(TOTALS, totals.tolist(), strict=True))


def _metrics(sums: dict[str, float], peak: float) -> Metrics:

    def mean(name: str, over: str) -> float | None:
        return sums[name] / sums[over] if sums[over] else None

    losses = {f"loss_{name}": mean(f"loss_{name}", f"members_{name}") for name in COMPONENTS}
    has_routes = sums["routes_missing"] or sums["routes_replayed"]
    return {
        "loss": sum(value for value in losses.values() if value is not None),
        **losses,
        "entropy": mean("entropy", "scored"),
        "mismatch_kl": mean("mismatch_kl", "members_rl"),
        "mismatch_kl_same_weights": mean("mismatch_kl_same_weights", "same_weights"),
        "logprob_max_abs_diff_same_weights": peak if peak >= 0 else None,
        "masked_share": mean("masked", "members_rl"),
        "routes_missing": int(sums["routes_missing"]) if has_routes else None,
        "routes_differ": mean("routes_differ", "routes_replayed"),
        "num_samples": int(sums["samples"]),
        "num_tokens": int(sums["tokens"]),
        "num_trained_tokens": int(sums["scored"]),
    }


def learning_rate_factor(schedule: Schedule, step: int, num_steps: int) -> float:
    """Return the fraction of the peak learning rate at `step` (from 1)."""
    if step < schedule.warmup_steps:
        return step / schedule.warmup_steps
    if schedule.kind == "constant":
        return 1.0
    start = schedule.warmup_steps
    if schedule.kind == "wsd":
        start = max(num_steps - schedule.decay_steps, start)
    span = num_steps - start
    progress = min(max((step - start) / span, 0.0), 1.0) if span > 0 else 0.0
    rest = 1.0 - progress
    if schedule.kind == "cosine":
        rest = 0.5 * (1.0 + math.cos(math.pi * progress))
    return schedule.final_fraction + (1.0 - schedule.final_fraction) * rest
