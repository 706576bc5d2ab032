"""Compare a step of GLM-5 on context- and expert-parallel ranks with the same step on one rank.

    python benchmarks/trainer/context_expert.py              cp 4 × ep 8 on eight GPUs
    python benchmarks/trainer/context_expert.py --cpu        tiny shapes over gloo, no record
    python benchmarks/trainer/context_expert.py --dry-run    print layout, model and sizes

- The value is the norm of the difference of all gradients, over the norm of one rank's gradients.
  All ranks replay the experts and keys that one rank chose. `error_own` is the value without
  replay: bfloat16 sums in another order may choose other experts for some tokens.
- The model has GLM-5's widths, with `EXPERTS` experts and `LAYERS` layers to fit on one rank.
- `orrery bench trainer` measures speed and memory.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).parents[1]))
from elastic.diloco import as_columns
from orrery.manifest.identity import load
from orrery.manifest.schema import Model, Trainer
from orrery.models import build, weights
from orrery.models.latent_attention import KeyIndexer
from orrery.models.layers import Router
from orrery.models.placement import full_tensor
from orrery.runtime.network import free_ports
from orrery.trainer.assemble import load_policy
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.parallel.world import destroy_world, init_world
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import COLUMN
from record import ROOT, parser_of, record

EXPERTS, LAYERS, TOKENS = 32, 4, 4096
DIFFER = "routes_differ", "choices_differ"  # shares of one rank's choices that others did not make
GOAL, GOAL_CPU = 0.02, 1e-4  # bf16 products are summed in another order; float32 on a CPU


def layout(gpus: int) -> dict[str, int]:
    """Return cp and ep: all ranks share the experts, and at most four share a document."""
    cp = min(4, gpus)
    return {"cp": cp, "ep": gpus, "dp_shard": gpus // cp, "dp_replicate": 1}


def specs(cpu: bool, mesh: dict[str, int]) -> tuple[Model, Trainer]:
    manifest = load(ROOT / f"manifests/{'glm5_smoke' if cpu else 'glm5_run'}.json")
    model = manifest.model.model_dump(mode="json")
    if not cpu:
        model["moe"]["num_experts"], model["num_layers"] = EXPERTS, LAYERS
        if types := model["mla"]["indexer"]["types"]:
            model["mla"]["indexer"]["types"] = types[:LAYERS]
        model["num_mtp_layers"] = 0
        model["init"] = {"kind": "random", "seed": 1, "std": 0.02}
    trainer = manifest.trainer.model_dump(mode="json")
    trainer["mesh"] |= mesh | {"cp_style": "dsa", "ep_backend": "torch"}
    trainer |= {"compile": False, "indexer_choice": "replay"}
    trainer["memory"] |= {"optimizer_offload": False}
    return Model.model_validate(model), Trainer.model_validate(trainer)


def documents(model: Model, count: int, num_tokens: int) -> list[Columns]:
    """Return one document for each of `count` data ranks."""
    draw = np.random.default_rng(1)
    return [
        as_columns([draw.integers(0, model.vocab_size, num_tokens).tolist()]) for _ in range(count)
    ]


def choose(learner: Learner, document: Columns) -> Columns:
    """Return the document with the experts and keys that this network chooses."""
    routes: list[np.ndarray] = []
    keys: list[np.ndarray] = []

    def routed(module: Router, given: Any, out: Any) -> None:
        routes.append(out[1].cpu().numpy().astype(np.uint8))

    def chosen(module: KeyIndexer, given: Any, out: Any) -> None:
        ids = out.chosen_TK.cpu().numpy()
        is_chosen = np.zeros((len(ids), -(-document.num_tokens // 8) * 8), dtype=bool)
        token, slot = np.nonzero(ids >= 0)
        is_chosen[token, ids[token, slot]] = True
        keys.append(np.packbits(is_chosen, axis=1, bitorder="little"))

    hooks = [
        module.register_forward_hook(routed if isinstance(module, Router) else chosen)
        for module in learner.policy.network.modules()
        if isinstance(module, Router | KeyIndexer)
    ]
    with torch.no_grad():
        learner.policy(learner._micro_batch(document))
    for hook in hooks:
        hook.remove()
    assert learner.route_shape is not None
    num_dense = learner.route_shape.num_dense_layers
    dense = np.zeros((len(routes[0]), num_dense * routes[0].shape[1]), dtype=np.uint8)
    rows = np.concatenate([dense, *routes, *keys], axis=1)[: document.num_tokens, None]
    return Columns(document.offsets, document.token | {COLUMN: rows})


def distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    square = sum(float((found[name] - each).square().sum()) for name, each in wanted.items())
    return (square / sum(float(each.square().sum()) for each in wanted.values())) ** 0.5


def gradients(rank: int, size: int, port: int, folder: Path, options: Any) -> None:
    """Train one step as rank `rank` of `size`. The first rank writes or compares gradients."""
    mesh = layout(options.gpus)
    num_data = mesh["dp_shard"]
    alone = {name: 1 for name in mesh}
    model, trainer = specs(options.cpu, mesh if size > 1 else alone)
    device = torch.device("cpu") if options.cpu else torch.device("cuda", rank)
    if not options.cpu:
        torch.cuda.set_device(rank)
    store = dist.TCPStore("127.0.0.1", port, size, rank == 0, wait_for_workers=False)
    world = init_world(trainer.mesh, rank, device, store)
    policy = load_policy(model, trainer, world, folder / "start")
    learner = Learner(policy, world, trainer, trainer.optimizer, 1e9)
    found: dict[str, torch.Tensor] = {}

    def keep(*_: object) -> None:
        for name, weight in learner.weights.items():
            whole = full_tensor(weight.grad)
            if rank == 0:
                found[name] = whole.float().cpu()

    learner.optimizer.step = keep  # type: ignore[method-assign]
    batch = documents(model, num_data, 64 if options.cpu else TOKENS)
    if size == 1:
        replayed = [choose(learner, each) for each in batch]
        np.save(folder / "choices.npy", np.stack([each.token[COLUMN] for each in replayed]))
    else:
        rows = np.load(folder / "choices.npy")
        replayed = [
            Columns(each.offsets, each.token | {COLUMN: row})
            for each, row in zip(batch, rows, strict=True)
        ]
    answer = {}
    for name, all_documents in (("_own", batch), ("", replayed)):
        mine = all_documents if size == 1 else [all_documents[world.data_rank]]
        metrics = learner.learn(mine, len(mine), count_totals(mine, world), 1.0).metrics
        if rank == 0 and size == 1:
            torch.save({"loss": metrics["loss"], "gradients": found}, folder / f"alone{name}.pt")
        elif rank == 0:
            reference = torch.load(folder / f"alone{name}.pt")
            answer[f"error{name}"] = distance(found, reference["gradients"])
            answer |= {f"loss{name}": metrics["loss"], f"loss_alone{name}": reference["loss"]}
            answer |= {key: metrics[key] for key in DIFFER if metrics.get(key) is not None}
            (folder / "answer.json").write_text(json.dumps(answer))
    destroy_world(world)


def run_ranks(size: int, folder: Path, words: list[str]) -> None:
    [port] = free_ports(1)
    environment = os.environ | ({"OMP_NUM_THREADS": "1"} if "--cpu" in words else {})
    ranks = []
    for rank in range(size):
        place = ["--rank", str(rank), str(size), str(port), str(folder)]
        command = [sys.executable, __file__, *words, *place]
        ranks.append(subprocess.Popen(command, env=environment))
    codes = [rank.wait() for rank in ranks]
    if any(codes):
        raise SystemExit(f"error: ranks ended with {codes}; read the messages above")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=8)
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    parser.add_argument("--rank", nargs=4, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank:
        rank, size, port = map(int, options.rank[:3])
        gradients(rank, size, port, Path(options.rank[3]), options)
        return
    model, trainer = specs(options.cpu, layout(options.gpus))
    if options.dry_run:
        shown = {"mesh": trainer.mesh.model_dump(), "moe": model.mixture.model_dump()}
        print(json.dumps(shown | {"num_layers": model.num_layers, "tokens": TOKENS}, indent=2))
        return
    words = ["--gpus", str(options.gpus), *(["--cpu"] if options.cpu else [])]
    goal = GOAL_CPU if options.cpu else GOAL
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        network = build(model)
        weights.initialize(network, model)
        weights.save(network, model, folder / "start")
        del network
        for size in (1, options.gpus):
            run_ranks(size, folder, words)
        answer = json.loads((folder / "answer.json").read_text())
    print(answer)
    if not options.cpu:
        mesh = layout(options.gpus)
        record(
            options.out / f"context_expert_{options.gpus}.json",
            figure=f"gradients of GLM-5's widths, cp {mesh['cp']} × ep {mesh['ep']} to one rank",
            value=answer["error"],
            unit="of the norm",
            goal=goal,
            better="lower",
            details={
                **answer,
                "mesh": mesh,
                "reduced": f"{EXPERTS} experts, {LAYERS} layers, {TOKENS} tokens, bf16 products",
            },
        )
    if not answer["error"] <= goal:
        raise SystemExit(f"error: gradients differ by {answer['error']:.3g}; the goal is {goal}")


if __name__ == "__main__":
    main()
