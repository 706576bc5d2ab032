"""Measure DiLoCo's loss against synchronous data parallelism at equal tokens.

    python benchmarks/elastic/diloco.py                       40 minutes on 24 cores
    python benchmarks/elastic/diloco.py --seeds 6 --pilots 1  two hours on two cores
    python benchmarks/elastic/diloco.py --stories 2           a small batch, in its own record
    python benchmarks/elastic/diloco.py --keep FILE           a later call goes on where one stopped

Four sites train a tiny Qwen3 on stories of `text.py`. All arms (ways to train) of a seed start from
the weights and optimizer state after `warm_steps` steps of data parallelism. Their learning rate
falls to 0. Pilot seeds choose each arm's rate from RATES and outer step from OUTERS. Other seeds
then train with these. DiLoCo lags more with small batches, and while the loss falls (arXiv
2503.09799). The exchange is simulated: as in an all-to-all, the codec encodes each weight change Δ
once, then their mean once.
"""

import json
import multiprocessing
import os
import sys
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from statistics import mean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from elastic.text import story
from orrery.elastic.codecs import Codec, codec
from orrery.elastic.loop import OuterOptimizer, OuterState, weighted_mean
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.models.weights import initialize
from orrery.trainer.elastic import LearnerWeights
from orrery.trainer.learner import Learner, count_totals, learning_rate_factor
from orrery.trainer.optim import named_state
from orrery.trainer.parallel import build_policy
from orrery.trainer.parallel.world import World
from orrery.wire.columns import Columns
from record import ROOT, hardware, parser_of, record

NUM_VALIDATED, FIRST_PILOT = 256, 21
RATES, LR = (5e-4, 1e-3, 2e-3), 2e-3  # LR is that of the warm start
OUTERS = [OuterOptimizer(lr, mu, mu > 0) for lr, mu in ((0.7, 0.9), (1.0, 0.8))]
CPU = torch.device("cpu")
Warm = tuple[dict, dict, int]  # weights, optimizer state, stories used
Choice = tuple[str, str, float, OuterOptimizer]  # name, kind, inner rate, outer optimizer


@dataclass(frozen=True)
class Plan:
    inner_steps: int = 50
    num_rounds: int = 40
    warm_steps: int = 1000
    stories: int = 8  # per site and step
    curve: int = 10  # rounds between validations
    num_sites: int = 4

    @property
    def num_steps(self) -> int:
        return self.inner_steps * self.num_rounds


def manifest(lr: float = LR) -> Manifest:
    """Return the run elastic_text with a smaller network and a learning rate that falls to 0."""
    run = load(ROOT / "manifests/elastic_text.json")
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_heads": 4, "num_kv_heads": 2}
    model = run.model.model_copy(update={**sizes, "head_dim": 16})
    rate = {
        "optimizer": run.sft.optimizer.model_copy(update={"lr": lr}),
        "schedule": run.sft.schedule.model_copy(update={"warmup_steps": 0, "final_fraction": 0.0}),
    }
    sft = run.sft.model_copy(update=rate)
    stages = run.stages.model_copy(update={"sft": sft})
    return run.model_copy(update={"model": model, "stages": stages})


def make_learner(run: Manifest, seed: int) -> Learner:
    world = World(0, 1, CPU, None)
    policy = build_policy(run.model, run.trainer, world)
    init = run.model.init.model_copy(update={"seed": seed})
    initialize(policy.network, run.model.model_copy(update={"init": init}))
    return Learner(policy, world, run.trainer, run.sft.optimizer, run.trainer.max_grad_norm)


def columns(numbers: list[int], alphabet: str, seed: int) -> Columns:
    """Return stories as samples. All characters are trained, and the newline after each story."""
    known = {character: number + 8 for number, character in enumerate(alphabet)}
    texts = [f"\n{story(number, seed)}\n" for number in numbers]
    return as_columns([[known[character] for character in text] for text in texts])


def as_columns(samples: list[list[int]]) -> Columns:
    """Return samples of token ids. All tokens but the first of each sample are trained."""
    ids = [np.array(one, dtype=np.int32) for one in samples]
    trained = [np.arange(len(one)) > 0 for one in ids]
    offsets = np.cumsum([0, *map(len, ids)], dtype=np.int64)
    token = {
        "token_id": np.concatenate(ids),
        "trained": np.concatenate(trained),
        "rl_weight": np.zeros(offsets[-1], dtype=np.float32),
        "cross_entropy_weight": np.ones(offsets[-1], dtype=np.float32),
    }
    return Columns(offsets, token)


class Arm:
    """One way to train: a learner per site, and the number of the next unused story."""

    def __init__(self, run: Manifest, seed: int, num_sites: int) -> None:
        self.run, self.seed = run, seed
        self.alphabet = getattr(run.model.tokenizer, "alphabet", "")
        self.learners = [make_learner(run, seed) for _ in range(num_sites)]
        self.next_story = 0

    def step(self, learner: Learner, num_stories: int, factor: float) -> None:
        numbers = list(range(self.next_story, self.next_story + num_stories))
        self.next_story += num_stories
        learn(learner, columns(numbers, self.alphabet, self.seed), factor)

    def loss(self) -> float:
        """Return the first site's loss on stories of another seed."""
        begins = range(0, NUM_VALIDATED, 32)
        batches = (
            columns(list(range(begin, begin + 32)), self.alphabet, 1000 + self.seed)
            for begin in begins
        )
        return nats(self.learners[0], batches)


def learn(learner: Learner, batch: Columns, factor: float) -> None:
    learner.learn([batch], 1, count_totals([batch], learner.world), factor)


@torch.no_grad()
def nats(learner: Learner, batches: Iterable[Columns]) -> float:
    """Return the mean loss of a trained token."""
    total, count = 0.0, 0
    for batch in batches:
        micro = learner._micro_batch(batch)
        logprob, _ = learner.policy(micro)
        scored = micro.loss.cross_entropy_weight != 0
        total -= float(logprob[scored].double().sum())
        count += int(scored.sum())
    return total / count


def outer_round(
    held: list[LearnerWeights], state: OuterState, wire: Codec, outer: OuterOptimizer
) -> None:
    """Average the sites' weight changes, and take the outer step."""

    def passed(values: np.ndarray) -> np.ndarray:
        out = np.empty_like(values)
        wire.decode(wire.encode(values), out)
        return out

    deltas = []
    for own in held:
        now = np.empty_like(state.start)
        own.read(now)
        deltas.append(passed(state.start - now))
    state.delta[:] = passed(weighted_mean(deltas, [1] * len(held)))
    state.step(outer.step)
    for own in held:
        own.write(state.start)


def warm_start(seed: int, plan: Plan) -> Warm:
    torch.set_num_threads(1)
    arm = Arm(manifest(), seed, 1)
    for step in range(1, plan.warm_steps + 1):
        arm.step(arm.learners[0], plan.stories * plan.num_sites, min(1.0, step / 20))
    learner = arm.learners[0]
    inner = named_state(learner.optimizer, learner.weights)
    return (
        {name: value.detach().numpy() for name, value in learner.weights.items()},
        {key + name: value.numpy() for key, name, value, _ in inner},
        arm.next_story,
    )


def begin(arm: Arm, warm: Warm, num_steps: int) -> None:
    state, inner, arm.next_story = warm
    for learner in arm.learners:
        with torch.no_grad():
            for name, value in learner.weights.items():
                value.copy_(torch.from_numpy(state[name]))
            for key, name, value, _ in named_state(learner.optimizer, learner.weights):
                value.copy_(torch.from_numpy(inner[key + name]))
        learner.step = num_steps


def factor(run: Manifest, step: int, plan: Plan) -> float:
    return learning_rate_factor(run.sft.schedule, step, plan.num_steps)


def data_parallel(run: Manifest, seed: int, warm: Warm, plan: Plan) -> list[float]:
    """Return the loss after every `plan.curve` rounds."""
    arm, losses = Arm(run, seed, 1), []
    begin(arm, warm, plan.warm_steps)
    for step in range(1, plan.num_steps + 1):
        arm.step(arm.learners[0], plan.stories * plan.num_sites, factor(run, step, plan))
        if step % (plan.curve * plan.inner_steps) == 0:
            losses.append(arm.loss())
    return losses


def diloco(
    run: Manifest, seed: int, warm: Warm, plan: Plan, kind: str, outer: OuterOptimizer
) -> list[float]:
    """Return the loss after every `plan.curve` rounds."""
    arm, wire, losses = Arm(run, seed, plan.num_sites), codec(kind), []
    begin(arm, warm, plan.warm_steps)
    held = [LearnerWeights(learner) for learner in arm.learners]
    state = OuterState(held[0].num_parameters)
    held[0].read(state.start)

    for number in range(plan.num_rounds):
        for learner in arm.learners:
            for step in range(1, plan.inner_steps + 1):
                factor_now = factor(run, number * plan.inner_steps + step, plan)
                arm.step(learner, plan.stories, factor_now)
        outer_round(held, state, wire, outer)
        if (number + 1) % plan.curve == 0:
            losses.append(arm.loss())
    return losses


def measure(seed: int, warm: Warm, choice: Choice, plan: Plan, kept: Path | None) -> list[float]:
    """Train one arm, and add its losses to `kept`. Data parallelism has the kind "synchronous"."""
    torch.set_num_threads(1)
    name, kind, lr, outer = choice
    if kind == "synchronous":
        losses = data_parallel(manifest(lr), seed, warm, plan)
    else:
        losses = diloco(manifest(lr), seed, warm, plan, kind, outer)
    print(seed, name, losses, flush=True)
    if kept is not None:
        with kept.open("a") as file:
            file.write(json.dumps([asdict(plan), seed, arm_key(choice), losses, hardware()]) + "\n")
    return losses


def arm_key(choice: Choice) -> str:
    _, kind, lr, outer = choice
    return f"{kind} {lr}" + ("" if kind == "synchronous" else f" {outer.lr} {outer.momentum}")


def kept_arms(kept: Path | None, plan: Plan) -> dict[tuple[int, str], tuple[list[float], str]]:
    """Return the losses and the hardware of the finished arms of this plan, by seed and key."""
    if kept is None or not kept.exists():
        return {}
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    return {
        (seed, key): (losses, host) for of, seed, key, losses, host in lines if of == asdict(plan)
    }


def every(
    seeds: tuple[int, ...], arms: tuple[Choice, ...], plan: Plan, kept: Path | None = None
) -> dict[int, dict[str, list[float]]]:
    """Return the losses of every arm by seed. Each core trains one arm at a time."""
    before = {key: losses for key, (losses, _) in kept_arms(kept, plan).items()}
    pairs = [  # the slow arms first
        (seed, arm)
        for seed in seeds
        for arm in reversed(arms)
        if (seed, arm_key(arm)) not in before
    ]
    missing = tuple(dict.fromkeys(seed for seed, _ in pairs))
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(os.sched_getaffinity(0)), context) as processes:
        warm = dict(zip(missing, processes.map(warm_start, missing, repeat(plan)), strict=True))
        found = processes.map(
            measure,
            [seed for seed, _ in pairs],
            [warm[seed] for seed, _ in pairs],
            [arm for _, arm in pairs],
            repeat(plan),
            repeat(kept),
        )
        after = {(seed, arm_key(arm)): each for (seed, arm), each in zip(pairs, found, strict=True)}
    losses = before | after
    return {seed: {arm[0]: losses[seed, arm_key(arm)] for arm in arms} for seed in seeds}


def choose(
    plan: Plan, pilots: tuple[int, ...], kept: Path | None
) -> tuple[dict[str, float], Choice, Choice]:
    """Return mean losses of the pilot seeds, the best synchronous and the best float32 arm."""
    synchronous = [(f"synchronous, lr {lr:g}", "synchronous", lr, OUTERS[0]) for lr in RATES]
    float32 = [
        (f"lr {lr:g}, outer lr {each.lr:g}, momentum {each.momentum:g}", "float32", lr, each)
        for lr in RATES
        for each in OUTERS
    ]
    found = every(pilots, (*synchronous, *float32), plan, kept)
    means = {
        name: mean(found[seed][name][-1] for seed in pilots)
        for name, *_ in (*synchronous, *float32)
    }
    best = [min(arms, key=lambda arm: means[arm[0]]) for arms in (synchronous, float32)]
    return means, best[0], best[1]


def row(variant: str, values: list[float], goal: float) -> dict[str, object]:
    value = mean(values)
    return {"variant": variant, "value": value, "unit": "%", "goal": goal, "better": "lower"}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--stories", type=int, default=Plan.stories, help="in a site's step")
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--pilots", type=int, default=2)
    parser.add_argument("--keep", type=Path, metavar="FILE", help="losses of finished arms")
    options = parser.parse_args()
    plan = Plan(stories=options.stories)
    pilot_seeds = tuple(range(FIRST_PILOT, FIRST_PILOT + options.pilots))
    pilots, synchronous, float32 = choose(plan, pilot_seeds, options.keep)
    arms = [("synchronous", *synchronous[1:])]
    arms += [(kind, kind, *float32[2:]) for kind in ("float32", "int8_block")]
    found = every(tuple(range(1, options.seeds + 1)), tuple(arms), plan, options.keep)

    def percent(one: str, other: str, at: int = -1) -> list[float]:
        return [100 * (each[one][at] / each[other][at] - 1) for each in found.values()]

    suffix = "" if plan.stories == Plan.stories else f"_{plan.stories}_stories"
    by_round = {
        str((at + 1) * plan.curve): mean(percent("float32", "synchronous", at))
        for at in range(plan.num_rounds // plan.curve)
    }
    record(
        Path(__file__).with_name(f"diloco{suffix}.json"),
        figure="loss of DiLoCo with int8 above synchronous training at equal tokens, mean of seeds",
        value=mean(percent("int8_block", "synchronous")),
        unit="%",
        goal=1.0,
        better="lower",
        rows=[
            row("float32 over synchronous", percent("float32", "synchronous"), 1.0),
            row("int8 over float32", percent("int8_block", "float32"), 0.2),
        ],
        details={
            "plan": asdict(plan),
            "hosts": sorted({host for _, host in kept_arms(options.keep, plan).values()}),
            "chosen_on_seeds": pilot_seeds,
            "chosen": [synchronous[0], float32[0]],
            "pilot_losses": pilots,
            "validation_loss": {str(seed): each for seed, each in found.items()},
            "int8_over_synchronous": percent("int8_block", "synchronous"),
            "int8_over_float32": percent("int8_block", "float32"),
            "float32_over_synchronous_by_round": by_round,
        },
    )


if __name__ == "__main__":
    main()
