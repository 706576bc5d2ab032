"""Measure how far engine and trainer differ on the same weights, with and without router replay.

The run is `reverse_text_moe_replay`, from a fresh policy through SFT to RL. vLLM in bfloat16 gives
samples and routes, which a trainer in float32 replays. This program trains the same batches again,
which must give the same weights to the bit. Between the steps it scores the version's rollouts
twice, with the engine's routes and with the trainer's own. Only rollouts of a single version count.
A trainer in bfloat16 is measured too.

- Mismatch KL: mean of r − 1 − log r over sampled tokens, r = trainer over engine (Schulman's k3).
- Tokens of several runs are pooled, since few tokens decide the mean. `--run DIR …` reads finished
  runs instead of making them.   Usage: python benchmarks/replay/mismatch.py
"""

import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from orrery.launcher.pipeline import checked_in
from orrery.manifest.identity import find_workspace, load
from orrery.manifest.schema import Manifest
from orrery.models import build, weights
from orrery.observe.report.data import RunData
from orrery.trainer.assemble import load_policy
from orrery.trainer.learner import Learner, count_members, learning_rate_factor
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy, micro_batch
from orrery.wire.columns import Columns, read_batch
from orrery.wire.packing import pack_for
from orrery.wire.routed_experts import COLUMN, route_shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record
from workspace import linked

RUN = "reverse_text_moe_replay"
GOAL = 5.0


class Scores(NamedTuple):
    """One pass over sampled tokens: log π − log μ of each, and the changed routing choices."""

    log_ratio: np.ndarray
    differing: int


def one_version(columns: Columns) -> dict[int, list[int]]:
    """Return samples by version, if one version dispatched them and sampled all tokens."""
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
        columns = Columns(
            columns.offsets,
            {name: one for name, one in columns.token.items() if name != COLUMN},
            columns.sample,
        )
    batch = micro_batch(columns, 1, torch.device("cpu"), routes=route_shape(policy.network.config))
    logprob, _ = policy(batch)
    differ = policy.network.num_routes_differ
    return Scores(
        (logprob - batch.loss.engine_logprob).double().numpy(), 0 if differ is None else int(differ)
    )


def learner_of(manifest: Manifest, start: Path) -> Learner:
    world = World(0, 1, torch.device("cpu"), None)
    policy = load_policy(manifest.model, manifest.trainer, world, start)
    return Learner(
        policy, world, manifest.trainer, manifest.trainer.optimizer, manifest.trainer.max_grad_norm
    )


def in_bfloat16(learner: Learner, manifest: Manifest) -> Policy:
    """Return a copy of the current policy in bfloat16."""
    network = build(manifest.model, torch.bfloat16)
    with torch.no_grad():
        for name, one in network.named_parameters():
            one.copy_(learner.policy.network.get_parameter(name))
    return Policy(network, manifest.trainer.memory.lm_head_chunk_tokens)


def train(learner: Learner, manifest: Manifest, step: int, columns: Columns) -> None:
    """Repeat the run's step with the same micro-batches in the same order."""
    [plan] = pack_for(manifest, columns.lengths)
    rate = learning_rate_factor(manifest.trainer.schedule, step, manifest.stages.rl.num_steps)
    learner.learn(
        [columns.select(samples) for samples in plan], len(plan), count_members(columns), rate
    )


def check_same(learner: Learner, manifest: Manifest, folder: Path) -> None:
    theirs = build(manifest.model)
    weights.load(theirs, folder)
    for name, one in learner.policy.network.named_parameters():
        if not torch.equal(one, theirs.get_parameter(name)):
            raise SystemExit(
                f"error: {name} is not the run's after the same steps; "
                "its rollouts would be scored by other weights"
            )


@dataclass
class Found:
    """Scores of finished runs of one manifest, by trainer's dtype, with and without routes."""

    scores: dict[tuple[str, bool], list[Scores]] = field(default_factory=dict)
    num_choices: int = 0
    ratios: list[float] = field(default_factory=list)  # KL without over with routes, by run
    held_out: list[dict[int, float]] = field(default_factory=list)


def mismatch_kl(scores: list[Scores]) -> float:
    log_ratio = np.concatenate([one.log_ratio for one in scores])
    return float(np.mean(np.expm1(log_ratio) - log_ratio))


def measure(run: Path, found: Found) -> None:
    manifest = load(run / "manifest.json")
    learner = learner_of(manifest, run / "weights" / "sft")
    num_steps = manifest.stages.rl.num_steps
    batches = {step: read_batch(run, step)[0] for step in range(1, num_steps + 1)}
    of_version: dict[int, list[Columns]] = {}
    for columns in batches.values():
        for version, samples in one_version(columns).items():
            of_version.setdefault(version, []).append(columns.select(samples))
    scores: dict[tuple[str, bool], list[Scores]] = {}
    for version in range(num_steps + 1):
        policies = {"float32": learner.policy, "bfloat16": in_bfloat16(learner, manifest)}
        for columns in of_version.get(version, []):
            shape = columns.token[COLUMN].shape
            found.num_choices += (columns.num_tokens - columns.num_samples) * shape[1] * shape[2]
            for dtype, policy in policies.items():
                for with_routes in (False, True):
                    scores.setdefault((dtype, with_routes), []).append(
                        score(policy, columns, with_routes)
                    )
        if version < num_steps:
            train(learner, manifest, version + 1, batches[version + 1])
    check_same(learner, manifest, run / "weights" / "rl")
    for variant, each in scores.items():
        found.scores.setdefault(variant, []).extend(each)
    found.ratios.append(
        mismatch_kl(scores["float32", False]) / mismatch_kl(scores["float32", True])
    )
    found.held_out.append(held_out_rewards(run))


def pooled(manifest: Manifest, found: Found) -> dict[str, Any]:
    """Return all results by variant, over the tokens of all runs."""
    rows = []
    for (dtype, with_routes), each in found.scores.items():
        log_ratio = np.concatenate([one.log_ratio for one in each])
        rows.append(
            {
                "variant": f"trainer in {dtype}, {'with' if with_routes else 'without'} replay",
                "trainer_dtype": dtype,
                "replay": with_routes,
                "mismatch_kl": mismatch_kl(each),
                "logprob_max_abs_diff": float(np.abs(log_ratio).max()),
                "logprob_mean_abs_diff": float(np.abs(log_ratio).mean()),
                "routes_differ": sum(one.differing for one in each) / found.num_choices
                if with_routes
                else None,
            }
        )
    return {
        "rows": rows,
        "num_sampled_tokens": int(sum(len(one.log_ratio) for one in found.scores["float32", True])),
        "ratio_of_each_run": found.ratios,
        "num_layers": manifest.model.num_layers,
        "experts": f"{manifest.model.mixture.num_experts_per_token} "
        f"of {manifest.model.mixture.num_experts}",
        "engine": f"vLLM in {manifest.inference.dtype} on {manifest.hardware.accelerator}",
        "held_out_reward_by_version": found.held_out,
    }


def held_out_rewards(run: Path) -> dict[int, float]:
    rows = sorted(RunData.load(run).evaluations, key=lambda row: row["version"])
    return {row["version"]: row["reward_mean"] for row in rows}


def make_run(workspace: Path) -> Path:
    linked(workspace)
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    if code := subprocess.run(
        ["snakemake", "--profile", "local", RUN], cwd=workspace, env=env
    ).returncode:
        raise SystemExit(
            f"error: the run ended with code {code}; it and its logs are left in {workspace}"
        )
    [folder] = checked_in(find_workspace(ROOT)).folders[RUN]
    return workspace / "runs" / folder


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--run", type=Path, nargs="+", default=[], help=f"folders of finished runs of {RUN}"
    )
    parser.add_argument(
        "--runs",
        type=int,
        default=5,
        help="to make where none is named; a few tokens decide the mean of one",
    )
    args = parser.parse_args()
    torch.set_num_threads(1)
    all_runs = Found()
    for run in args.run:
        measure(run, all_runs)
    for _ in range(0 if args.run else args.runs):
        with tempfile.TemporaryDirectory() as folder:
            measure(make_run(Path(folder)), all_runs)
    found = pooled(load(ROOT / "manifests" / f"{RUN}.json"), all_runs)
    by_variant = {(row["trainer_dtype"], row["replay"]): row for row in found["rows"]}
    for row in found["rows"]:
        row["value"] = by_variant[row["trainer_dtype"], False]["mismatch_kl"] / row["mismatch_kl"]
        row["goal"] = (
            GOAL if row["replay"] else None
        )  # rows without replay are the baseline of the other rows
        print(
            f"{row['variant']}: KL {row['mismatch_kl']:.3g}, "
            f"at most {row['logprob_max_abs_diff']:.3g} of a log-prob apart"
        )
    record(
        Path(__file__).with_suffix(".json"),
        figure="mismatch KL of engine (vLLM, bfloat16, CPU) and trainer (float32) "
        "without router replay, over that with it",
        value=by_variant["float32", True]["value"],
        unit="×",
        goal=GOAL,
        better="higher",
        details={name: value for name, value in found.items() if name != "rows"},
        rows=found["rows"],
    )


if __name__ == "__main__":
    main()
