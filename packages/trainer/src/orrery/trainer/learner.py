"""The learner: one optimizer step from one batch's micro-batches, the same for SFT and RL.

- In: this rank's micro-batches, one by one as they arrive; every rank has equally many. Out: the weights moved, and the step's `StepResult`.
- Gradients travel between ranks once, in the backward pass of the last micro-batch; the tally in one all-reduce after it.
- Never: a step from a loss or a gradient that is not finite, or from a batch whose member counts were announced wrongly. The weights
  are then still those before the step, and the error names step, rank and tensor.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from torch import nn

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Optimizer, Trainer
from orrery.trainer.heartbeat import mark_micro_batch
from orrery.trainer.loss import COMPONENTS, StepSums, loss
from orrery.trainer.micro_batch import count_members, micro_batch
from orrery.trainer.mismatch import MismatchGuard
from orrery.trainer.optim import clip, gradient_norm, last_not_finite, make_optimizer
from orrery.trainer.parallel import compiled, context_parallel
from orrery.trainer.parallel.fsdp import release, synchronize_gradients
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy
from orrery.transport.columns import Columns
from orrery.transport.routed_experts import route_shape


@dataclass(frozen=True)
class StepResult:
    """What a step did: metrics by their names in `metrics/trainer.0.jsonl`, and when its phases began and ended (`time.time()`)."""

    metrics: dict[str, float | int | None]
    wait_s: float  # for micro-batches to arrive
    forward_backward: tuple[float, float]
    optimizer: tuple[float, float]


class Learner:
    """Policy and optimizer on this rank. `step` is the last one done: the version of the weights it holds."""

    def __init__(
        self,
        policy: Policy,
        world: World,
        trainer: Trainer,
        optimizer: Optimizer,
        max_grad_norm: float,
    ):
        self.policy, self.world, self.trainer, self.max_grad_norm = (
            policy,
            world,
            trainer,
            max_grad_norm,
        )
        self.loss = trainer.loss
        self.route_shape = route_shape(policy.network.config)
        self.shard = partial(context_parallel.shard, world=world, mesh=trainer.mesh)
        self.peak_lr = optimizer.lr
        self.optimizer = make_optimizer(policy, optimizer, trainer.memory.optimizer_offload)
        self.weights = {
            name: weight for name, weight in policy.named_parameters() if weight.requires_grad
        }
        self.step = 0
        self.base_sha256: str | None = (
            None  # of the frozen weights (`base.py`); None without adapters
        )
        # This rank's largest gradient, at the embedding's output and where cp ranks exchange theirs, in the order of its backward passes.
        self._reached: list[torch.Tensor] = []
        embedding = next(
            (module for module in policy.modules() if isinstance(module, nn.Embedding)), None
        )
        if embedding is not None:
            embedding.register_forward_hook(self._watch_embedding)
        context_parallel.watch(policy, self._watch)
        self.guard: MismatchGuard | None = None  # only for batches from engines
        self.before_step: Callable[[], float] = lambda: (
            0.0
        )  # called when nothing but the step itself is left; seconds that it took

    def learn(
        self,
        micro_batches: Iterable[Columns],
        num_micro_batches: int,
        totals: dict[str, int],
        lr_factor: float,
    ) -> StepResult:
        """Train one batch; `totals` holds N_c of the loss (`count_totals`). Raises RunFailed; OrreryError where blocks do not compile."""
        step = self.step + 1
        begin_s = time.time()
        with compiled.told(self.policy.network.config):
            tally, wait_s = self._accumulate(step, micro_batches, num_micro_batches, totals)
        # While the device is still in the backward pass, so that it need not wait for the host after it.
        norm = gradient_norm(self.weights.values(), self.world)
        divisor = clip(norm, self.max_grad_norm)
        self.optimizer.prepare()
        values = self._agree(
            step, tally, totals
        )  # reads numbers, so the device has done the backward pass by then
        grad_norm = norm.item()
        backward_s = time.time()
        if not math.isfinite(grad_norm):
            self._name_gradient(step)
        if self.guard is not None:
            values["logprob_mean_abs_diff"] = self.guard.check(step, values["mismatch_kl"])
        settle_s = self.before_step()
        self.optimizer.set_rate(lr_factor)
        self.optimizer.step(
            divisor
        )  # the last of a step that the device is told; nothing here waits for it
        self.optimizer.zero_grad()
        self.step = step
        metrics = {
            **values,
            "grad_norm": grad_norm,
            "learning_rate": self.peak_lr * lr_factor,
            "settle_s": settle_s,
        }
        return StepResult(metrics, wait_s, (begin_s, backward_s), (backward_s, time.time()))

    @torch.no_grad()
    def compare(self, micro_batches: Iterable[Columns]) -> tuple[float | None, int]:
        """Score, without training, rollouts that the engines made with the weights that stand here now.

        The largest |log π − log μ| over all ranks, None where no sample was made by these weights alone; and the number of tokens scored.
        """
        tally = StepSums.zero(self.world.device)
        for columns in micro_batches:
            batch = micro_batch(
                columns, self.step + 1, self.world.device, self.shard, self.route_shape
            )
            with compiled.told(self.policy.network.config):
                logprob, entropy = self.policy(batch)
            tally.add(
                loss(logprob, entropy, batch.loss, dict.fromkeys(COMPONENTS, 1), self.loss)[1]
            )
        release(self.policy)
        sums = self._add_up(f"version {self.step}", tally)
        peak = float(tally.peaks)
        return peak if peak >= 0 else None, int(sums["scored"])

    @torch.no_grad()
    def logprobs(self, token_ids: Sequence[int]) -> list[float]:
        """Return log p of each token after the first, at temperature 1, with the present weights.

        A collective. Blocks run uncompiled: a graph for this short length would change how later
        graphs are made.
        """
        positions = np.arange(len(token_ids), dtype=np.float32)  # as log-probs: each token's index
        columns = Columns(
            np.array([0, len(token_ids)], dtype=np.int64),
            {
                "token_id": np.asarray(token_ids, dtype=np.int32),
                "trained": positions > 0,
                "logprob": positions,
            },
            {},
        )
        batch = micro_batch(columns, self.step + 1, self.world.device, self.shard, self.route_shape)
        with torch.compiler.set_stance("force_eager"):
            logprob, _ = self.policy(batch)
        release(self.policy)
        found = torch.zeros(len(token_ids), dtype=torch.float64, device=self.world.device)
        if self.world.data_rank == 0:  # one context-parallel group is enough: all compute the same
            is_scored = batch.loss.rl_weight != 0
            found[batch.loss.engine_logprob[is_scored].long()] = logprob[is_scored].double()
        return self.world.sum(found)[1:].tolist()

    def check_weights(self) -> None:
        """Before they leave the run: the last update is followed by no loss that would tell. A collective. Raises RunFailed."""
        if blame := self._not_finite():
            raise RunFailed(
                f"step {self.step}: after its update the weight {blame} is not finite; lower the optimizer's lr or max_grad_norm"
            )

    def _accumulate(
        self, step: int, micro_batches: Iterable[Columns], count: int, totals: dict[str, int]
    ) -> tuple[StepSums, float]:
        tally, arrivals = StepSums.zero(self.world.device), _TimedIterator(micro_batches)
        self._reached.clear()
        if self.guard is not None:
            self.guard.clear()
        for index, columns in enumerate(arrivals):
            mark_micro_batch(self.world.device)
            batch = micro_batch(columns, step, self.world.device, self.shard, self.route_shape)
            synchronize_gradients(self.policy, index == count - 1, self.trainer.fsdp)
            logprob, entropy = self.policy(batch)
            value, part = loss(logprob, entropy, batch.loss, totals, self.loss)
            if index == count - 1:
                self.optimizer.prefetch()
            value.backward()
            tally.add(part)
            if self.guard is not None:
                self.guard.add(batch, logprob)
            differ = self.policy.network.num_routes_differ
            tally.count(
                batch.num_samples,
                batch.num_tokens,
                batch.routes_missing,
                batch.routes_replayed,
                differ,
            )
        release(self.policy)
        if arrivals.count != count:
            raise RunFailed(
                f"batch {step}: {arrivals.count} micro-batches arrived at rank {self.world.rank}, {count} were announced"
            )
        return tally, arrivals.wait_s

    def _agree(
        self, step: int, tally: StepSums, totals: dict[str, int]
    ) -> dict[str, float | int | None]:
        """The step's metrics over all ranks, once every rank knows that loss and counts are sound."""
        sums = self._add_up(f"step {step}", tally)
        for name in COMPONENTS:
            if sums[f"members_{name}"] != totals[name]:
                raise RunFailed(
                    f"step {step}: the batch announces {totals[name]} {name} tokens, {sums[f'members_{name}']:.0f} arrived; "
                    f"its normalisation would be wrong"
                )
        return metrics_of(sums, float(tally.peaks))

    def _add_up(self, what: str, tally: StepSums) -> dict[str, float]:
        """The sums over all ranks, all of them finite."""
        mine = tally.sums.clone()
        self.world.sum(tally.sums)
        self.world.max(tally.peaks)
        sums = tally.values()
        for position, name in enumerate(StepSums.NAMES):
            if not math.isfinite(sums[name]):
                ranks = [
                    rank
                    for rank, bad in enumerate(
                        self.world.each(int(not torch.isfinite(mine[position])))
                    )
                    if bad
                ]
                # The sum may overflow where no part does: then no single rank is to blame.
                where = ranks[0] if ranks else "none alone"
                raise RunFailed(
                    f"{what}: {name} is {sums[name]} on rank {where}{self.weights_to_blame()}"
                )
        return sums

    def weights_to_blame(self) -> str:
        """For the end of a sentence about numbers that are not finite. A collective."""
        blame = self._not_finite()
        return f" (weight {blame} is not finite)" if blame else "; all weights are finite"

    def _not_finite(self) -> str:
        worst = max(self.world.each(last_not_finite(self.weights.values())))
        return list(self.weights)[worst] if worst >= 0 else ""

    def _watch_embedding(self, embedding: nn.Module, ids: object, hidden: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            if (
                not hidden.requires_grad
            ):  # the embedding is frozen: the gradient ends here, and nobody wants it
                hidden.requires_grad_().register_post_accumulate_grad_hook(_forget)
            self._watch(hidden)

    def _watch(self, hidden: torch.Tensor) -> None:
        if hidden.requires_grad:
            hidden.register_hook(
                lambda gradient: self._reached.append(torch.linalg.vector_norm(gradient, math.inf))
            )

    def _name_gradient(self, step: int) -> None:
        """A gradient flows from the loss to the embedding, so what is not finite spoils all that stands before it: the last one is named.

        Its ranks are those whose own backward passes broke: of a cp group, whose ranks hand on what is broken, those that had it first.
        When gradients are looked at they are sums over ranks, so where none of the passes did it is only known who holds the shard.
        """
        found = self.world.each(last_not_finite(weight.grad for weight in self.weights.values()))
        broke = self.world.each(
            next(
                (place for place, one in enumerate(self._reached) if not math.isfinite(float(one))),
                -1,
            )
        )
        groups = self.world.each(self.world.data_rank)  # ranks of a cp group train the same data
        if max(found) < 0:
            raise RunFailed(
                f"step {step}: the gradient norm overflows though every gradient is finite; lower the optimizer's lr"
            )
        first: dict[int, int] = {}
        for group, place in zip(groups, broke, strict=True):
            if place >= 0:
                first[group] = min(place, first.get(group, place))
        ranks = [
            rank for rank, place in enumerate(broke) if place >= 0 and place == first[groups[rank]]
        ]
        if self.world.size == 1:
            ranks = [0]
        name = list(self.weights)[max(found)]
        where = (
            f"on rank {', '.join(map(str, ranks))}"
            if ranks
            else f"in the shard of rank {found.index(max(found))}"
        )
        raise RunFailed(
            f"step {step}: the gradient of {name} is not finite {where}; weights stay as before the step"
        )


def _forget(hidden: torch.Tensor) -> None:
    hidden.grad = None


class _TimedIterator:
    """An iterator that knows how long it waited for its items, and how many came."""

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
    """N_c over all ranks, from this rank's micro-batches: one all-reduce. Ranks that share micro-batches count them once."""
    counts = (
        [count_members(columns) for columns in micro_batches] if world.axis_rank("cp") == 0 else []
    )
    mine = torch.tensor(
        [sum(count[name] for count in counts) for name in COMPONENTS],
        dtype=torch.int64,
        device=world.device,
    )
    return dict(zip(COMPONENTS, world.sum(mine).tolist(), strict=True))


def metrics_of(sums: dict[str, float], peak: float) -> dict[str, float | int | None]:
    """A step's sums as the metrics that people read; a mean over nothing is null."""

    def mean(name: str, over: str) -> float | None:
        return sums[name] / sums[over] if sums[over] else None

    losses = {f"loss_{name}": mean(f"loss_{name}", f"members_{name}") for name in COMPONENTS}
    return {
        "loss": sum(value for value in losses.values() if value is not None),
        **losses,
        "entropy": mean("entropy", "scored"),
        "mismatch_kl": mean("mismatch_kl", "members_rl"),
        "mismatch_kl_same_weights": mean("mismatch_kl_same_weights", "same_weights"),
        "logprob_max_abs_diff_same_weights": peak if peak >= 0 else None,
        "masked_share": mean("masked", "members_rl"),
        "routes_missing": int(sums["routes_missing"])
        if sums["routes_missing"] or sums["routes_replayed"]
        else None,
        "routes_differ": mean("routes_differ", "routes_replayed"),
        "num_samples": int(sums["samples"]),
        "num_tokens": int(sums["tokens"]),
        "num_trained_tokens": int(sums["scored"]),
    }
