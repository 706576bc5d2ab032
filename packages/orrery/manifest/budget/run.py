"""Plan each role's memory, the time of a step, and the bytes between roles.

Memory is planned for rollouts of maximum length, time for rollouts of mean length. Fields with
`spread_` are for exponential lengths, truncated at the maximum (the distribution of largest
entropy).

Trainer and engines overlap, so the slower role sets the step's time. On shared devices they take
turns.

Staleness follows from Little's law: with N rollouts in flight and batches of B, a rollout lasts
N / B steps. Its tokens are N / 2B steps old on average, plus half a step to fill the batch.
"""

import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from orrery.manifest.budget import engine, trainer_time
from orrery.manifest.budget.engine import Serving
from orrery.manifest.budget.options import FRAGMENTATION, memory_misfits, unplanned_bytes
from orrery.manifest.budget.parameters import ParameterCounts, count_parameters
from orrery.manifest.budget.trainer_memory import (
    MemoryPlan,
    num_states,
    plan_memory,
    stage_workload,
)
from orrery.manifest.devices import Rates, rates_of, usable_bytes
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Inference, Manifest
from orrery.manifest.schema.inference import rank_token_bytes, token_bytes
from orrery.manifest.schema.manifest import DIRECT_KINDS
from orrery.manifest.schema.model import DTYPE_BYTES

Bytes = dict[str, int]
NETWORK_BYTES = 50e9  # default network bytes/s of a device (400 Gb/s)
MEAN_SHARE = 0.25  # default mean rollout tokens / max_model_len_tokens
COLUMN_BYTES = 17  # bytes of a batch per token: id, mask, log-prob, version, advantage
UPDATE_BYTES = 100e9  # maximum bytes/s of 'nccl' and 'nixl' weight updates
UPDATE_S = 0.05  # time to pause and resume engines
LENGTHS = 256  # quantiles of exponential rollout lengths
FILE_BYTES = 1e9  # bytes/s at which a node reads or writes files
COPY_BYTES = 8.8e9  # bytes/s of a rank's checkpoint to the host: benchmarks/trainer/checkpoint.json
WEIGHTS = "weights to engines"
KINDS = {  # kind of trainer memory → categories of `MemoryPlan`
    "weights": ("weights", "gathered weights"),
    "gradients": ("gradients", "reduction"),
    "optimizer": ("optimizer state",),
    "activations": ("activations", "recomputation"),
    "logits": ("LM head",),
}


@dataclass(frozen=True)
class RoleBudget:
    """A role's bytes: device `memory` by use, host memory and scratch disk per node."""

    role: str
    num_devices: int
    memory: Bytes
    host_bytes: int
    pinned_bytes: int
    scratch_bytes: int

    @property
    def total_bytes(self) -> int:
        return sum(self.memory.values())


@dataclass(frozen=True)
class RunBudget:
    roles: tuple[RoleBudget, ...]
    capacity_bytes: int | None  # None on a CPU
    shares_devices: bool
    tokens: dict[str, float]  # mean tokens of a rollout: "all", "prompt", "sampled"
    trainer_s: dict[str, float]
    trainer_tokens_per_s: float
    engines: dict[str, float]
    step_s: float
    slower: str
    num_steps: int
    spread_step_s: float
    longest_step_s: float  # for rollouts of maximum length
    staleness: float
    spread_staleness: float
    too_old: dict[str, float]  # for exponential lengths: see `RunPlan.too_old`
    update: dict[str, float]
    loading: dict[str, dict[str, float]]  # by role: "bytes" and "seconds" of reading weights
    checkpoint: dict[str, float]
    traffic_bytes: dict[str, float]  # per step, by direction
    # bytes that trainer ranks send per step, by collective and link
    collective_bytes: dict[str, dict[str, float]]
    layer_gather_bytes: dict[str, int]
    other_ep: dict[str, Bytes]  # {"with ep N": {kind: change of memory}}
    assumptions: tuple[str, ...]
    misfits: tuple[str, ...]

    @property
    def num_devices(self) -> int:
        counts = [role.num_devices for role in self.roles]
        return max(counts) if self.shares_devices else sum(counts)

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


def plan_run(
    manifest: Manifest, tokens: float | None = None, network: float | None = None
) -> RunBudget:
    """Plan a run. `tokens`: a rollout's mean. `network`: a device's bytes/s between nodes."""
    longest = manifest.inference.max_model_len_tokens
    if tokens is not None and tokens > longest:
        raise OrreryError(
            f"--tokens {tokens:g}: a rollout has at most inference.max_model_len_tokens "
            f"{longest}; type at most that"
        )
    one = RunPlan(manifest, tokens, network)
    step_s, slower, staleness = one.pace()
    spread = RunPlan(manifest, tokens, network, one.counted, is_spread=True)
    most = RunPlan(manifest, one.longest, network, one.counted)
    return RunBudget(
        roles=one.roles(),
        capacity_bytes=usable_bytes(manifest.hardware.accelerator),
        shares_devices=manifest.hardware.shared_devices,
        tokens={"all": one.tokens, "prompt": one.prompt, "sampled": one.tokens - one.prompt},
        trainer_s=one.trainer_s,
        trainer_tokens_per_s=one.batch_tokens / one.trainer_s["step"],
        engines=one.engines,
        step_s=step_s,
        slower=slower,
        num_steps=manifest.stages.rl.num_steps,
        spread_step_s=spread.pace()[0],
        longest_step_s=most.pace()[0],
        staleness=staleness,
        spread_staleness=spread.spread_staleness(),
        too_old=spread.too_old(),
        update=one.update(),
        loading=one.loading(),
        checkpoint=one.checkpoint(),
        traffic_bytes=one.traffic(),
        collective_bytes=one.collectives(),
        layer_gather_bytes=one.layer_gather(),
        other_ep=one.other_ep(),
        assumptions=one.assumptions(),
        misfits=tuple(memory_misfits(manifest)),
    )


def trainer_plan(manifest: Manifest, counted: ParameterCounts) -> MemoryPlan:
    trainer, load = stage_workload(manifest, "rl")
    capacity = usable_bytes(manifest.hardware.accelerator) or 0
    return plan_memory(manifest.model, trainer, load, capacity, counted)


def spread_lengths(mean: float, longest: int, count: int) -> list[float]:
    """Return quantiles of the exponential distribution with this mean, truncated at `longest`."""
    low, high = -200.5, 200.0  # bounds of rate · longest. Bisection never tries 0.
    for _ in range(60):
        rate = (low + high) / 2
        top = -math.expm1(-rate)
        found = [
            -math.log1p(-top * (number + 0.5) / count) / rate * longest for number in range(count)
        ]
        low, high = (rate, high) if sum(found) > mean * count else (low, rate)
    scale = mean * count / sum(found)  # Bisection cannot reach extreme means.
    return [min(float(longest), scale * length) for length in found]


class RunPlan:
    """The plan of a run. `is_spread`: rollout lengths are exponential instead of equal."""

    def __init__(
        self,
        manifest: Manifest,
        tokens: float | None = None,
        network: float | None = None,
        counted: ParameterCounts | None = None,
        is_spread: bool = False,
    ) -> None:
        self.manifest, self.model = manifest, manifest.model
        self.trainer, self.inference = manifest.trainer, manifest.inference
        self.counted = counted or count_parameters(self.model, self.trainer.lora)
        self.rates: Rates = rates_of(manifest.hardware.accelerator)
        self.is_gpu = manifest.hardware.accelerator != "cpu"
        self.network = network or min(NETWORK_BYTES, self.rates.link_bytes)
        self.longest = longest = self.inference.max_model_len_tokens
        self.tokens = min(float(longest), tokens or MEAN_SHARE * longest)
        self.is_spread = is_spread
        self.turns = max(use.max_turns for use in manifest.tasks.train)
        sampled = manifest.orchestrator.sampling.max_tokens_per_turn * self.turns
        prompt = longest - sampled if sampled < longest else longest // 2
        self.prompt = prompt if self.tokens == longest else min(prompt, self.tokens / 2)
        self.batch_tokens = manifest.orchestrator.rollouts_per_batch * self.tokens

    def roles(self) -> tuple[RoleBudget, ...]:
        hardware, mesh = self.manifest.hardware, self.trainer.mesh
        plan = trainer_plan(self.manifest, self.counted)
        fullest = plan.moments[plan.fullest]
        memory = {kind: sum(fullest[each] for each in names) for kind, names in KINDS.items()}
        memory |= unplanned_bytes(self.manifest, plan)
        here = min(mesh.world_size, hardware.devices_per_node)
        copy = int(self.checkpoint()["rank_bytes"])
        trainer = RoleBudget(
            "trainer", mesh.world_size, memory, here * (plan.host_bytes + copy),
            here * plan.host_bytes * self.is_gpu, 0,
        )  # fmt: skip
        return trainer, *self._engine_roles()

    def _engine_roles(self) -> Iterator[RoleBudget]:
        one, groups = self.inference, self.manifest.group_devices
        if one.prefill is None:
            yield self._engine_role("inference", one.num_devices, one)
        else:
            yield self._engine_role("decode", groups["decode"], one)
            yield self._engine_role("prefill", groups["prefill"], one.of_engine(0))

    def _engine_role(self, name: str, devices: int, inference: Inference) -> RoleBudget:
        offload, hardware = inference.kv_offload, self.manifest.hardware
        per_node = min(devices, hardware.devices_per_node)
        replicas = max(1, per_node // inference.devices_per_replica)
        nodes = min(inference.nodes_per_replica, hardware.num_nodes)
        ranks = inference.data_parallel // nodes
        host = disk = 0
        if offload.kind == "tiers":
            host, disk = ranks * offload.host_bytes, ranks * offload.disk_bytes
        elif offload.kind == "mooncake":
            host = offload.segment_bytes // nodes
        kept = inference.kv_cache_bytes // token_bytes(self.model, inference)
        kept *= ranks * self.manifest.choice_bytes
        return RoleBudget(
            name, devices, engine.memory_of(self.manifest, inference), replicas * (host + kept),
            replicas * host * self.is_gpu, replicas * disk,
        )  # fmt: skip

    @cached_property
    def work(self) -> tuple[int, list[int]]:
        """Return a context-parallel group's (micro-batches per step, tokens of each rollout)."""
        mesh, orchestrator = self.trainer.mesh, self.manifest.orchestrator
        per_group = -(-orchestrator.rollouts_per_batch // mesh.num_data_ranks)
        room = max(1, int(self.trainer.memory.max_tokens_per_micro_batch // self.tokens))
        return -(-per_group // room), [int(length) for length in self.lengths(per_group)]

    def lengths(self, count: int) -> list[float]:
        if self.is_spread:
            return spread_lengths(self.tokens, self.longest, count)
        return [self.tokens] * count

    @cached_property
    def trainer_s(self) -> dict[str, float]:
        micro_batches, lengths = self.work
        per_node = self.manifest.hardware.devices_per_node
        link = trainer_time.links(self.trainer, self.rates, per_node, self.network)
        capacity = usable_bytes(self.manifest.hardware.accelerator) or 0
        return trainer_time.step_s(
            self.model, self.trainer, micro_batches, lengths, self.rates, link, self.counted,
            capacity, knows_routes=self.manifest.transport.routed_experts,
        )  # fmt: skip

    @property
    def sampled_again(self) -> float:
        """Return a rollout's sampled tokens that prefill engines compute again in later turns."""
        one = self.inference
        sampled = (self.tokens - self.prompt) / self.turns
        if not one.prefill_replicas or sampled <= one.max_local_prefill_tokens:
            return 0.0
        return sampled * (self.turns - 1)

    @cached_property
    def engines(self) -> dict[str, float]:
        """Return the engines' speeds. "step_s": time to generate a batch."""
        inference, model = self.inference, self.model
        prefills = inference.prefill_replicas
        decoding = inference.num_replicas - prefills
        in_flight = self.manifest.orchestrator.admission.max_in_flight / decoding
        sampled = self.tokens - self.prompt
        answers = [max(0.0, length - self.prompt) for length in self.lengths(LENGTHS)]
        # A length-biased mean, because longer answers are in flight for longer.
        in_flight_sampled = sum(each * each for each in answers) / sum(answers)
        load = Serving(self.prompt, in_flight_sampled, in_flight)
        batch = engine.batch_size(model, inference, load)
        rates, network = self.rates, self.network
        step = engine.decode_s(model, inference, batch, load.mean_context, rates, network)
        other = inference.of_engine(0)
        prefill = engine.prefill_s(model, other, self.prompt, rates, network)
        rollouts = self.manifest.orchestrator.rollouts_per_batch
        group = self.manifest.orchestrator.algorithm.group_size
        decode_s = sampled * step / batch
        here = 0.0 if prefills else prefill / group
        per_s = decoding * inference.data_parallel / (decode_s + here)
        prefill_batch_s = 0.0
        if prefills:
            each = prefill / group + prefill * self.sampled_again / self.prompt
            prefill_batch_s = rollouts * each / (prefills * other.data_parallel)
            per_s = min(per_s, rollouts / prefill_batch_s)
        return {
            "sequences_a_rank": batch,
            "decode_step_s": step,
            "cache_tokens_of_a_rank": inference.kv_cache_bytes / token_bytes(model, inference),
            "prefill_tokens_per_s_of_a_rank": self.prompt / prefill,
            "decode_tokens_per_s_of_a_rank": batch / step,
            "rollouts_per_s": per_s,
            "sampled_tokens_per_s": per_s * sampled,
            "step_s": rollouts / per_s,
            "prefill_s": prefill_batch_s,
        }

    def pace(self) -> tuple[float, str, float]:
        """Return (seconds of a step, slower role, mean staleness in steps).

        If the trainer is slower, each of `max_batches_ahead` batches adds a step of staleness.
        """
        orchestrator = self.manifest.orchestrator
        engines_s = self.engines["step_s"]
        if self.manifest.transport.weights in DIRECT_KINDS:
            engines_s += self.update()["seconds"]
        sides = {"the trainer": self.trainer_s["step"], "the engines": engines_s}
        slower = max(sides, key=sides.__getitem__)
        half = orchestrator.admission.max_in_flight / orchestrator.rollouts_per_batch / 2
        staleness = self._staleness(half, slower)
        step_s = sides[slower]
        if self.manifest.hardware.shared_devices:
            step_s, slower = sum(sides.values()), "both, on the same devices"
        return step_s, slower, staleness

    def _staleness(self, steps: float, slower: str) -> float:
        """Return the age of tokens, sampled `steps` steps before their batch began to fill."""
        orchestrator = self.manifest.orchestrator
        ahead = orchestrator.max_batches_ahead if slower == "the trainer" else 0
        return min(steps + 0.5 + ahead, float(orchestrator.max_off_policy_steps))

    def spread_staleness(self) -> float:
        """Return the mean age of a trained token, in steps. A group waits for its longest rollout.

        The longest of G independent lengths is at most the i-th of N quantiles with probability
        (i / N)^G. The mean position of a token in its rollout is E[L²] / 2 E[L].
        """
        step_s, slower, _ = self.pace()
        group = self.manifest.orchestrator.algorithm.group_size
        lengths = [max(0.0, length - self.prompt) for length in self.lengths(LENGTHS)]
        chance = [((i + 1) / LENGTHS) ** group - (i / LENGTHS) ** group for i in range(LENGTHS)]
        longest = sum(each * length for each, length in zip(chance, lengths, strict=True))
        sampled = sum(each * each for each in lengths) / (2 * sum(lengths))
        steps = (longest - sampled) * self.engines["decode_step_s"] / step_s
        return self._staleness(steps, slower)

    def too_old(self) -> dict[str, float]:
        """Return the share of dropped "groups", and the `max_off_policy_steps` that drops none.

        The orchestrator drops a group whose longest rollout lasts more than this number + 1 steps.
        With 0, the run waits for its rollouts.
        """
        orchestrator, step_s = self.manifest.orchestrator, self.pace()[0]
        most, group = orchestrator.max_off_policy_steps, orchestrator.algorithm.group_size
        lengths, token_s = [*self.lengths(LENGTHS), self.longest], self.engines["decode_step_s"]
        *steps, oldest = [(length - self.prompt) * token_s / step_s for length in lengths]
        kept = sum(each <= most + 1 for each in steps) / LENGTHS if most else 1.0
        return {"groups": 1 - kept**group, "steps": math.ceil(oldest) - 1}

    def update(self) -> dict[str, float]:
        kind, replicas = self.manifest.transport.weights, self.inference.num_replicas
        value_bytes = DTYPE_BYTES[self.inference.dtype]
        adapters = sum(unit.trained for unit in self.counted.units) * value_bytes
        if kind == "adapters":
            return {"bytes": replicas * adapters, "seconds": UPDATE_S + adapters / FILE_BYTES}
        values = self.counted.total - (adapters // value_bytes if self.trainer.lora else 0)
        whole = values * value_bytes
        experts = value_bytes * self.counted.experts
        if kind not in DIRECT_KINDS:
            seconds = UPDATE_S + 2 * whole / FILE_BYTES
            return {"bytes": replicas * whole, "seconds": seconds}
        apart = self.manifest.hardware.num_nodes > 1
        link = min(UPDATE_BYTES, self.network if apart else self.rates.link_bytes)
        shapes = self.inference, self.inference.of_engine(0)
        received = [
            (whole - experts) / shape.tensor_parallel + experts / shape.devices_per_replica
            for shape in shapes
        ]
        prefills = self.inference.prefill_replicas
        ranks = [shape.devices_per_replica for shape in shapes]
        total = (replicas - prefills) * ranks[0] * received[0] + prefills * ranks[1] * received[1]
        seconds = UPDATE_S + max(*received, total / self.trainer.mesh.world_size) / link
        return {"bytes": total, "seconds": seconds}

    def loading(self) -> dict[str, dict[str, float]]:
        """Return bytes and seconds of a node's reads of initial weights, by role.

        A node reads each byte once, into its page cache.
        """
        manifest, mesh, counted = self.manifest, self.trainer.mesh, self.counted
        is_whole = manifest.stage_before_rl == "init" and self.model.init.kind == "pretrained"
        size = 2 if is_whole else DTYPE_BYTES[self.trainer.param_dtype]
        ranks = min(manifest.hardware.devices_per_node, mesh.world_size)
        shards = mesh.dp_shard * mesh.cp
        found = {"trainer": counted.total * min(1.0, ranks / shards)}
        experts = counted.experts
        shapes = {"engine": self.inference}
        if self.inference.prefill is not None:
            shapes = {"decode": self.inference, "prefill": self.inference.of_engine(0)}
        for name, shape in shapes.items():
            apart = shape.nodes_per_replica if shape.expert_parallel else 1
            found[name] = counted.total - experts + experts / apart
        return {
            name: {"bytes": size * values, "seconds": size * values / FILE_BYTES}
            for name, values in found.items()
        }

    def checkpoint(self) -> dict[str, float]:
        """Return bytes and seconds of saving a checkpoint. Training waits only for "waits_s".

        "disk_bytes": maximum on disk in an RL stage, including an unfinished checkpoint.
        """
        values = sum(unit.trained for unit in self.counted.units)
        values += num_states(self.trainer.optimizer, self.counted)
        whole = values * DTYPE_BYTES[self.trainer.param_dtype]
        mesh = self.trainer.mesh
        rank = whole / (mesh.dp_shard * mesh.cp)
        per_node = self.manifest.hardware.devices_per_node
        nodes = max(1, mesh.dp_shard * mesh.cp // per_node)
        saved, num_steps = self.trainer.checkpoint, self.manifest.stages.rl.num_steps
        count = min(saved.keep + 1, math.ceil(num_steps / saved.interval_steps))
        return {
            "bytes": whole,
            "disk_bytes": whole * count,
            "rank_bytes": rank,
            "waits_s": rank / COPY_BYTES,
            "writes_s": whole / nodes / FILE_BYTES,
        }

    def traffic(self) -> dict[str, float]:
        found = {
            WEIGHTS: self.update()["bytes"],
            "batches to trainer": self.batch_tokens * COLUMN_BYTES,
        }
        if self.inference.prefill_replicas:
            prompts = self.manifest.orchestrator.rollouts_per_batch * self.prompt
            found["caches to decode engines"] = prompts * rank_token_bytes(
                self.model, self.inference
            )
        if self.manifest.transport.routed_experts and (moe := self.model.moe) is not None:
            layers, choice = self.model.num_layers, self.manifest.choice_bytes
            layer_bytes = (self.manifest.route_bytes - choice) // layers
            if not choice:  # rows cover dense layers only if they include chosen keys
                layers -= moe.num_dense_layers
            found["routed experts to trainer"] = self.batch_tokens * layers * layer_bytes
        if self.manifest.choice_bytes:
            found["chosen keys to trainer"] = self.batch_tokens * self.manifest.choice_bytes
        return found

    def collectives(self) -> dict[str, dict[str, float]]:
        micro_batches, lengths = self.work
        per_node = self.manifest.hardware.devices_per_node
        tokens = sum(lengths) / self.trainer.mesh.cp
        return trainer_time.step_bytes(
            self.model, self.trainer, self.counted, micro_batches, tokens, per_node
        )

    def layer_gather(self) -> dict[str, int]:
        """Return the bytes that a rank gathers for the largest block, without and with `ep`."""
        if self.trainer.mesh.world_size == 1:
            return {}
        c, ep = DTYPE_BYTES[self.trainer.compute_dtype], self.trainer.mesh.ep
        largest = max(self.counted.layers, key=lambda unit: unit.total)
        found = {"without expert parallel": c * largest.gathered(1)}
        return found | ({f"with ep {ep}": c * largest.gathered(ep)} if ep > 1 else {})

    def other_ep(self) -> dict[str, Bytes]:
        """Return the change of the trainer's peak memory with another `ep`.

        The other `ep` is 1 or, if `ep` is 1, the largest of 8, 4, 2 that divides dp_shard · cp.
        """
        mesh, moe = self.trainer.mesh, self.model.moe
        ranks = mesh.dp_shard * mesh.cp
        other = 1 if mesh.ep > 1 else next((n for n in (8, 4, 2) if ranks % n == 0), 1)
        if moe is None or other == mesh.ep or moe.num_experts % other:
            return {}
        changed = self.trainer.model_copy(update={"mesh": mesh.model_copy(update={"ep": other})})
        plans = [
            trainer_plan(self.manifest.model_copy(update={"trainer": trainer}), self.counted)
            for trainer in (self.trainer, changed)
        ]
        now, then = (
            plan.moments[plan.fullest] | {"fragmentation": int(FRAGMENTATION * plan.peak_bytes)}
            for plan in plans
        )
        return {f"with ep {other}": {kind: then[kind] - now[kind] for kind in now}}

    def assumptions(self) -> tuple[str, ...]:
        accelerator = self.manifest.hardware.accelerator
        said = [
            f"all rollouts have {self.tokens:,.0f} tokens, their mean; --tokens N plans another",
            f"{self.prompt:,.0f} of them are a prompt, which a group prefills once",
            f"rates of {accelerator}: {self.rates.source}",
            f"files at {FILE_BYTES / 1e9:g} GB/s a node",
        ]
        if self.turns > 1:
            turns = f"up to {self.turns} turns"
            held = "caches hold earlier turns, tools take no time"
            if self.sampled_again:
                held = "prefill engines compute earlier turns' samples again, tools take no time"
            said.insert(2, f"{turns}; {held}")
        shape = self.inference
        if self.model.moe is not None and shape.devices_per_replica > shape.tensor_parallel:
            said.append(f"published latencies and rates of {shape.all2all_backend}")
        if self.manifest.hardware.num_nodes > 1:
            said.append(f"network of {8 * self.network / 1e9:,.0f} Gb/s a device")
        return tuple(said)
