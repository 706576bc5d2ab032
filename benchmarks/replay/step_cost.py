"""Measure the cost of router replay in a training step, on one GPU.

The model has Qwen3-30B-A3B's shape with fewer layers, so that weights and optimizer state fit. A
batch has 16,384 tokens in documents of 4,096. Steps with and without routes alternate, so drift
affects both. The learning rate is zero, so routers keep choosing the same experts. The routes are
the network's own choices, so only replay differs. A step includes the check of routes on the host.

    python benchmarks/replay/step_cost.py

On a host without network: `benchmarks/async/gpu_host.sh python benchmarks/replay/step_cost.py`.
`--model reverse_text_moe --layers 2 --tokens 512 --document 128 --device cpu` tries it on any
machine and records nothing.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from orrery.manifest.identity import load
from orrery.manifest.schema import Model, Trainer
from orrery.models import weights
from orrery.trainer.learner import Learner, count_members
from orrery.trainer.parallel import build_policy
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import micro_batch
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import COLUMN, check_routes, route_shape

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record

GOAL_PERCENT = 1.0


def settings(name: str, layers: int) -> tuple[Model, Trainer]:
    """Return the manifest with fewer layers, one device, and weights in the compute dtype."""
    manifest = load(ROOT / "manifests" / f"{name}.json")
    model = manifest.model.model_copy(update={"num_layers": layers})
    mesh = manifest.trainer.mesh.model_copy(
        update={"dp_replicate": 1, "dp_shard": 1, "cp": 1, "ep": 1}
    )
    dtype = manifest.trainer.compute_dtype
    update = {"mesh": mesh, "param_dtype": dtype, "reduce_dtype": dtype}
    return model, manifest.trainer.model_copy(update=update)


def learner_of(model: Model, trainer: Trainer, device: torch.device) -> Learner:
    policy = build_policy(model, trainer, World(0, 1, device, None))
    weights.initialize_on_device(policy.network, 0.02, 0)
    return Learner(
        policy, World(0, 1, device, None), trainer, trainer.optimizer, trainer.max_grad_norm
    )


def batch(model: Model, tokens: int, document: int) -> Columns:
    rng = np.random.default_rng(0)
    offsets = np.arange(0, tokens + 1, document, dtype=np.int64)
    trained = np.ones(tokens, bool)
    trained[offsets[:-1]] = False
    uniform = -np.log(model.vocab_size)
    token = {
        "token_id": rng.integers(0, model.vocab_size, tokens, dtype=np.int32),
        "trained": trained,
        "logprob": rng.normal(uniform, 0.1, tokens).astype(np.float32),
        "version": np.zeros(tokens, np.int32),
        "advantage": rng.normal(0, 1, tokens).astype(np.float32),
    }
    return Columns(offsets, token, {"temperature": np.ones(len(offsets) - 1, np.float32)})


@torch.no_grad()
def own_routes(
    model: Model, trainer: Trainer, columns: Columns, device: torch.device
) -> np.ndarray:
    """Return the routers' choices without compilation; a document's last token has no route."""
    shape = route_shape(model)
    assert shape is not None, f"{model.family} has no experts"
    learner = learner_of(model, trainer.model_copy(update={"compile": False}), device)
    found: list[torch.Tensor] = []
    for layer in learner.policy.network.layers:
        if hasattr(layer.mlp, "gate"):
            layer.mlp.gate.register_forward_hook(
                lambda _module, _inputs, output: found.append(output[1])
            )
    learner.policy(micro_batch(columns, 1, device, routes=shape))
    routes = torch.stack(found, dim=1).cpu().numpy().astype(shape.dtype)
    routes[columns.offsets[1:] - 1] = shape.no_route
    return routes


def step_s(
    learner: Learner, columns: Columns, device: torch.device
) -> tuple[float, dict[str, Any]]:
    wait(device)
    begin_s = time.perf_counter()
    outcome = learner.learn([columns], 1, count_members(columns), 0.0)
    wait(device)
    return time.perf_counter() - begin_s, outcome.metrics


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="qwen3_30b_a3b_16k", help="a manifest's name")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--document", type=int, default=4_096)
    parser.add_argument("--steps", type=int, default=12, help="of each kind")
    parser.add_argument("--warmup", type=int, default=3, help="of each kind")
    parser.add_argument("--device", default="cuda")
    args = parser.parse_args()
    device = torch.device(args.device)
    model, trainer = settings(args.model, args.layers)
    plain = batch(model, args.tokens, args.document)
    routes = own_routes(model, trainer, plain, device)
    replayed = Columns(plain.offsets, {**plain.token, COLUMN: routes}, plain.sample)
    shape = route_shape(model)
    assert shape is not None, f"{args.model} has no experts"
    begin_s = time.perf_counter()
    check_routes(routes, shape, "batch 1")
    check_s = time.perf_counter() - begin_s
    learner = learner_of(model, trainer, device)
    times: dict[str, list[float]] = {"without": [], "with": []}
    metrics: dict[str, Any] = {}
    for number in range(args.warmup + args.steps):
        for name, columns in (("without", plain), ("with", replayed)):
            seconds, metrics = step_s(learner, columns, device)
            if number >= args.warmup:
                times[name].append(seconds)
    medians = {name: statistics.median(each) for name, each in times.items()}
    cost = 100 * (medians["with"] / medians["without"] - 1)
    details = {
        "model": args.model,
        "num_layers": args.layers,
        "tokens": args.tokens,
        "route_bytes": routes.nbytes,
        "check_on_host_s": check_s,
        "step_s": times,
        "median_step_s": medians,
        "routes_differ": metrics["routes_differ"],
        "routes_missing": metrics["routes_missing"],
    }
    print(
        f"step without routes {medians['without']:.4f} s, with {medians['with']:.4f} s: "
        f"{cost:+.2f} %; {details}"
    )
    if device.type == "cuda":
        record(
            Path(__file__).with_suffix(".json"),
            figure=f"cost of router replay in a step of {args.layers} layers of Qwen3-30B-A3B's "
            f"shape, {args.tokens:,} tokens, one GPU",
            value=cost,
            unit="%",
            goal=GOAL_PERCENT,
            better="lower",
            details=details,
        )


if __name__ == "__main__":
    main()
