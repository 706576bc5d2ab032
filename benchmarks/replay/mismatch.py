"""How far engine and trainer are apart on the same weights, with and without router replay: on the rollouts of a run that learned.

The run is `reverse_text_moe_replay`: vLLM in bfloat16 samples and tells which experts it chose, a trainer in float32 takes the same; both
are the pipeline's own, from a fresh policy through SFT to RL. This program then trains the run's batches once more, which makes the same
weights to the bit (it ends in an error where it does not), and between the steps scores the rollouts of the version at hand twice: on the
engine's routes, and on the trainer's own. Only rollouts count that one version sampled whole, so that nothing but arithmetic differs.
A trainer in bfloat16 stands beside it.

- Mismatch KL: the mean of r − 1 − log r over sampled tokens, with r the trainer's probability over the engine's (Schulman's k3).
- `--run DIR` reads a finished run instead of making one, which takes a quarter of an hour on a quiet machine of two cores.

    python benchmarks/replay/mismatch.py
"""

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from orrery.launcher.pipeline import checked_in
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.manifest.workspace import find_workspace
from orrery.models import build, weights
from orrery.observe.report.data import RunData
from orrery.trainer.assemble import load_policy
from orrery.trainer.learner import Learner, count_members
from orrery.trainer.micro_batch import micro_batch
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy
from orrery.trainer.schedule import factor
from orrery.transport.columns import Columns
from orrery.transport.packing import pack, quadratic_cost
from orrery.transport.rollout_store import read_batch
from orrery.transport.routed_experts import COLUMN, route_shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, record

RUN = "reverse_text_moe_replay"
GOAL = 5.0


class Scores(NamedTuple):
    """Of one pass over sampled tokens: log π − log μ of each, and choices that the network would have made otherwise."""

    log_ratio: np.ndarray
    differing: int


def one_version(columns: Columns) -> dict[int, list[int]]:
    """Samples by version, of those that were dispatched and in every token sampled at one."""
    found: dict[int, list[int]] = {}
    for index in range(columns.num_samples):
        tokens = slice(columns.offsets[index], columns.offsets[index + 1])
        versions = set(columns.token["version"][tokens][columns.token["trained"][tokens]].tolist())
        if versions == {dispatched := int(columns.sample["dispatch_version"][index])}:
            found.setdefault(dispatched, []).append(index)
    return found


@torch.no_grad()
def score(policy: Policy, columns: Columns, with_routes: bool) -> Scores:
    if not with_routes:
        columns = Columns(columns.offsets, {name: one for name, one in columns.token.items() if name != COLUMN}, columns.sample)
    batch = micro_batch(columns, 1, torch.device("cpu"), routes=route_shape(policy.network.config))
    logprob, _ = policy(batch)
    differ = policy.network.num_routes_differ
    return Scores((logprob - batch.loss.engine_logprob).double().numpy(), 0 if differ is None else int(differ))


def learner_of(manifest: Manifest, start: Path) -> Learner:
    world = World(0, 1, torch.device("cpu"), None)
    policy = load_policy(manifest.model, manifest.trainer, world, start)
    return Learner(policy, world, manifest.trainer, manifest.trainer.optimizer, manifest.trainer.max_grad_norm)


def in_bfloat16(learner: Learner, manifest: Manifest) -> Policy:
    """The policy as it stands, computed in bfloat16."""
    network = build(manifest.model, torch.bfloat16)
    with torch.no_grad():
        for name, one in network.named_parameters():
            one.copy_(learner.policy.network.get_parameter(name))
    return Policy(network, manifest.trainer.memory.lm_head_chunk_tokens)


def train(learner: Learner, manifest: Manifest, step: int, columns: Columns) -> None:
    """The run's step, of the same micro-batches in the same order."""
    limit = manifest.trainer.memory.max_tokens_per_micro_batch
    [plan] = pack(columns.lengths, 1, limit, quadratic_cost(manifest.model))
    rate = factor(manifest.trainer.schedule, step, manifest.stages.rl.num_steps)
    learner.learn([columns.select(samples) for samples in plan], len(plan), count_members(columns), rate)


def check_same(learner: Learner, manifest: Manifest, folder: Path) -> None:
    theirs = build(manifest.model)
    weights.load(theirs, folder)
    for name, one in learner.policy.network.named_parameters():
        if not torch.equal(one, theirs.get_parameter(name)):
            raise SystemExit(f"error: {name} is not the run's after the same steps; its rollouts would be scored by other weights")


def measure(run: Path) -> dict[str, Any]:
    """Everything that is known of a finished run, by variant: trainer's dtype, with routes or without."""
    manifest = load(run / "manifest.json")
    learner = learner_of(manifest, run / "weights" / "sft")
    num_steps = manifest.stages.rl.num_steps
    batches = {step: read_batch(run, step)[0] for step in range(1, num_steps + 1)}
    of_version: dict[int, list[Columns]] = {}
    for columns in batches.values():
        for version, samples in one_version(columns).items():
            of_version.setdefault(version, []).append(columns.select(samples))
    scores: dict[tuple[str, bool], list[Scores]] = {}
    num_choices = 0
    for version in range(num_steps + 1):
        policies = {"float32": learner.policy, "bfloat16": in_bfloat16(learner, manifest)}
        for columns in of_version.get(version, []):
            shape = columns.token[COLUMN].shape
            num_choices += (columns.num_tokens - columns.num_samples) * shape[1] * shape[2]
            for dtype, policy in policies.items():
                for with_routes in (False, True):
                    scores.setdefault((dtype, with_routes), []).append(score(policy, columns, with_routes))
        if version < num_steps:
            train(learner, manifest, version + 1, batches[version + 1])
    check_same(learner, manifest, run / "weights" / "rl")
    rows = []
    for (dtype, with_routes), each in scores.items():
        log_ratio = np.concatenate([one.log_ratio for one in each])
        rows.append(
            {
                "variant": f"trainer in {dtype}, {'with' if with_routes else 'without'} replay",
                "trainer_dtype": dtype,
                "replay": with_routes,
                "mismatch_kl": float(np.mean(np.expm1(log_ratio) - log_ratio)),
                "logprob_max_abs_diff": float(np.abs(log_ratio).max()),
                "logprob_mean_abs_diff": float(np.abs(log_ratio).mean()),
                "routes_differ": sum(one.differing for one in each) / num_choices if with_routes else None,
            }
        )
    return {
        "rows": rows,
        "num_sampled_tokens": int(sum(len(one.log_ratio) for one in scores["float32", True])),
        "num_versions": len(of_version),
        "num_layers": manifest.model.num_layers,
        "experts": f"{manifest.model.moe.num_experts_per_token} of {manifest.model.moe.num_experts}",
        "engine": f"vLLM in {manifest.inference.dtype} on {manifest.hardware.accelerator}",
        "held_out_reward_by_version": held_out_rewards(run),
    }


def held_out_rewards(run: Path) -> dict[int, float]:
    rows = sorted(RunData.load(run).evaluations, key=lambda row: row["version"])
    return {row["version"]: row["reward_mean"] for row in rows}


def make_run(workspace: Path) -> Path:
    for name in ("jsonnet", "manifests", "locks", "local", "Snakefile"):
        (workspace / name).symlink_to(ROOT / name)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if code := subprocess.run(["snakemake", "--profile", "local", RUN], cwd=workspace, env=env).returncode:
        raise SystemExit(f"error: the run ended with code {code}; it and its logs are left in {workspace}")
    [folder] = checked_in(find_workspace(ROOT)).folders[RUN]
    return workspace / "runs" / folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, help=f"the folder of a finished run of {RUN}")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.run is not None:
        found = measure(args.run)
    else:
        with tempfile.TemporaryDirectory() as folder:
            found = measure(make_run(Path(folder)))
    by_variant = {(row["trainer_dtype"], row["replay"]): row for row in found["rows"]}
    for row in found["rows"]:
        row["value"] = by_variant[row["trainer_dtype"], False]["mismatch_kl"] / row["mismatch_kl"]
        print(f"{row['variant']}: KL {row['mismatch_kl']:.3g}, at most {row['logprob_max_abs_diff']:.3g} of a log-prob apart")
    record(
        Path(__file__).with_suffix(".json"),
        figure="mismatch KL of engine (vLLM, bfloat16, CPU) and trainer (float32) without router replay, over that with it",
        value=by_variant["float32", True]["value"],
        unit="×",
        goal=GOAL,
        better="higher",
        details={name: value for name, value in found.items() if name != "rows"},
        rows=found["rows"],
    )


if __name__ == "__main__":
    main()
