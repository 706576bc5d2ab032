"""Measure DiLoCo's loss against synchronous data parallelism at equal tokens.

    python benchmarks/elastic/diloco.py            seeds 1 to 3, and the record
    python benchmarks/elastic/diloco.py pilot      the choice of the rates, on seeds 11 and 12

Four sites train a tiny Qwen3 on stories of `text.py`. All arms of a seed start from the same
weights and optimizer state, after WARM_STEPS steps of data parallelism, and their rate falls to 0.
LR is the best of RATES for data parallelism, OUTER the best of OUTERS for DiLoCo with that LR.
The exchange is simulated: each Δ passes the codec once on its way to the mean, and the mean once
on its way back, as in an all-to-all.
"""

import multiprocessing
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from elastic.text import story
from orrery.elastic.codecs import codec
from orrery.elastic.outer import OuterOptimizer, OuterState, weighted_mean
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.models.weights import initialize
from orrery.trainer.elastic import LearnerWeights
from orrery.trainer.learner import Learner, learning_rate_factor
from orrery.trainer.optim import named_state
from orrery.trainer.parallel import build_policy
from orrery.trainer.parallel.world import World
from orrery.wire.columns import Columns
from record import ROOT, record

NUM_SITES, INNER_STEPS, NUM_ROUNDS, WARM_STEPS = 4, 50, 30, 800
STORIES, NUM_VALIDATED, SEEDS, PILOTS = 2, 256, (1, 2, 3), (11, 12)
RATES, LR = (1e-3, 2e-3, 4e-3), 2e-3
OUTERS = [OuterOptimizer(lr, mu, mu > 0) for lr, mu in ((0.7, 0.9), (0.7, 0.6), (1.0, 0.0))]
OUTER = OUTERS[1]
CURVE = 10  # rounds between validations
CPU = torch.device("cpu")
Warm = tuple[dict, dict, int]  # weights, optimizer state, stories used
Choice = tuple[str, str, float, OuterOptimizer]  # name, kind, inner rate, outer optimizer


def manifest(lr: float = LR) -> Manifest:
    """Return the run elastic_text with a smaller network and a rate that falls to 0."""
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
    """Return stories as samples. Every character is trained, and the newline that ends a story."""
    known = {character: number + 8 for number, character in enumerate(alphabet)}
    texts = [f"\n{story(number, seed)}\n" for number in numbers]
    ids = [np.array([known[character] for character in text], dtype=np.int32) for text in texts]
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
    """One way to train: `sites` learners, and the stories that each has used."""

    def __init__(self, run: Manifest, seed: int, num_sites: int) -> None:
        self.run, self.seed = run, seed
        self.alphabet = getattr(run.model.tokenizer, "alphabet", "")
        self.learners = [make_learner(run, seed) for _ in range(num_sites)]
        self.next_story = 0

    def step(self, learner: Learner, num_stories: int, factor: float) -> float:
        numbers = list(range(self.next_story, self.next_story + num_stories))
        self.next_story += num_stories
        batch = columns(numbers, self.alphabet, self.seed)
        count = {"rl": 0, "cross_entropy": int(batch.token["trained"].sum()), "reference_kl": 0}
        result = learner.learn([batch], 1, count, factor)
        return float(result.metrics["loss"] or 0.0)

    @torch.no_grad()
    def loss(self) -> float:
        """Return the first site's nats a character on stories of another seed."""
        total, count = 0.0, 0
        for begin in range(0, NUM_VALIDATED, 32):
            batch = columns(list(range(begin, begin + 32)), self.alphabet, 1000 + self.seed)
            micro = self.learners[0]._micro_batch(batch)
            logprob, _ = self.learners[0].policy(micro)
            scored = micro.loss.cross_entropy_weight != 0
            total -= float(logprob[scored].double().sum())
            count += int(scored.sum())
        return total / count


def warm_start(run: Manifest, seed: int) -> Warm:
    arm = Arm(run, seed, 1)
    for step in range(1, WARM_STEPS + 1):
        arm.step(arm.learners[0], STORIES * NUM_SITES, min(1.0, step / 20))
    learner = arm.learners[0]
    state = {name: value.detach().clone() for name, value in learner.weights.items()}
    inner = {
        key + name: value.clone()
        for key, name, value, _ in named_state(learner.optimizer, learner.weights)
    }
    return state, inner, arm.next_story


def begin(arm: Arm, warm: Warm) -> None:
    state, inner, arm.next_story = warm
    for learner in arm.learners:
        with torch.no_grad():
            for name, value in learner.weights.items():
                value.copy_(state[name])
            for key, name, value, _ in named_state(learner.optimizer, learner.weights):
                value.copy_(inner[key + name])
        learner.step = WARM_STEPS


def factor(run: Manifest, step: int) -> float:
    return learning_rate_factor(run.sft.schedule, step, INNER_STEPS * NUM_ROUNDS)


def data_parallel(run: Manifest, seed: int, warm: Warm) -> list[float]:
    """Return the loss after every CURVE rounds."""
    arm, losses = Arm(run, seed, 1), []
    begin(arm, warm)
    for step in range(1, INNER_STEPS * NUM_ROUNDS + 1):
        arm.step(arm.learners[0], STORIES * NUM_SITES, factor(run, step))
        if step % (CURVE * INNER_STEPS) == 0:
            losses.append(arm.loss())
    return losses


def diloco(run: Manifest, seed: int, warm: Warm, kind: str, outer: OuterOptimizer) -> list[float]:
    """Return the loss after every CURVE rounds."""
    arm, wire, losses = Arm(run, seed, NUM_SITES), codec(kind), []
    begin(arm, warm)
    held = [LearnerWeights(learner) for learner in arm.learners]
    state = OuterState(held[0].num_parameters)
    held[0].read(state.start)

    def passed(values: np.ndarray) -> np.ndarray:
        out = np.empty_like(values)
        wire.decode(wire.encode(values), out)
        return out

    for number in range(NUM_ROUNDS):
        deltas = []
        for learner, own in zip(arm.learners, held, strict=True):
            for step in range(1, INNER_STEPS + 1):
                arm.step(learner, STORIES, factor(run, number * INNER_STEPS + step))
            now = np.empty_like(state.start)
            own.read(now)
            deltas.append(passed(state.start - now))
        state.delta[:] = passed(weighted_mean(deltas, [1] * NUM_SITES))
        state.step(outer.step)
        for own in held:
            own.write(state.start)
        if (number + 1) % CURVE == 0:
            losses.append(arm.loss())
    return losses


def measure(seed: int, arms: tuple[Choice, ...]) -> dict[str, list[float]]:
    """Train every arm, one after the other. Data parallelism has the kind "synchronous"."""
    torch.set_num_threads(1)
    warm, found = warm_start(manifest(), seed), {}
    for name, kind, lr, outer in arms:
        run = manifest(lr)
        if kind == "synchronous":
            found[name] = data_parallel(run, seed, warm)
        else:
            found[name] = diloco(run, seed, warm, kind, outer)
        print(seed, name, found[name], flush=True)
    return found


def every(seeds: tuple[int, ...], arms: tuple[Choice, ...]) -> dict[int, dict[str, list[float]]]:
    with ProcessPoolExecutor(2, multiprocessing.get_context("spawn")) as processes:
        return dict(zip(seeds, processes.map(measure, seeds, [arms] * len(seeds)), strict=True))


def pilot() -> None:
    arms = [(f"synchronous {lr:g}", "synchronous", lr, OUTER) for lr in RATES]
    arms += [(f"float32 {each.lr:g} {each.momentum:g}", "float32", LR, each) for each in OUTERS]
    found = every(PILOTS, tuple(arms))
    for name, *_ in arms:
        print(f"{name}: {mean(each[name][-1] for each in found.values()):.5f}")


def row(variant: str, values: list[float], goal: float) -> dict[str, object]:
    value = mean(values)
    return {"variant": variant, "value": value, "unit": "%", "goal": goal, "better": "lower"}


def main() -> None:
    kinds = ("synchronous", "float32", "int8_block")
    found = every(SEEDS, tuple((kind, kind, LR, OUTER) for kind in kinds))

    def percent(one: str, other: str, at: int = -1) -> list[float]:
        return [100 * (each[one][at] / each[other][at] - 1) for each in found.values()]

    by_round = {
        str((at + 1) * CURVE): mean(percent("float32", "synchronous", at))
        for at in range(NUM_ROUNDS // CURVE)
    }
    record(
        Path(__file__).with_suffix(".json"),
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
            "sites": NUM_SITES,
            "inner_steps": INNER_STEPS,
            "rounds": NUM_ROUNDS,
            "warm_steps": WARM_STEPS,
            "lr": LR,
            "outer": asdict(OUTER),
            "chosen": "LR and OUTER on seeds 11 and 12, by `diloco.py pilot`",
            "validation_loss": {str(seed): each for seed, each in found.items()},
            "int8_over_synchronous": percent("int8_block", "synchronous"),
            "int8_over_float32": percent("int8_block", "float32"),
            "float32_over_synchronous_by_round": by_round,
        },
    )


if __name__ == "__main__":
    pilot() if sys.argv[1:] == ["pilot"] else main()
