"""Compare the plan with published training speeds on several nodes.

`RUNS` quotes each source. If a source names no network rate, the plan's default of 400 Gb/s a GPU
is used. Other rates come from `manifest/devices.py`. No rate was fitted to these runs. `differs`
names probable reasons for an error. An error above 0 means that the plan is too fast.

The value is the share of rows with an error of at most 25 %. The goal was set before the first
comparison. If a source also has the speed on one node, a second error compares the ratio of both
speeds, which depends on the network only.

    python benchmarks/trainer/published.py
"""

import argparse
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from orrery.manifest.budget.run import NETWORK_BYTES
from orrery.manifest.budget.trainer_time import links, step_s
from orrery.manifest.devices import rates_of
from orrery.manifest.identity import load
from orrery.manifest.schema import Model, Trainer
from record import ROOT, parser_of, record

TOLERANCE, GOAL = 0.25, 0.75
NONE, FULL = {"kind": "none"}, {"kind": "full"}
MATRICES = {"kind": "selective", "keep": ["attention", "projections"]}
FP8 = ["attention", "feed_forward"]
BFLOAT16 = {"param_dtype": "bfloat16"}


def llama(hidden: int, inner: int, layers: int, kv_heads: int, vocab: int) -> dict[str, Any]:
    """Return the fields of a Llama, whose heads are 128 wide."""
    return {
        "family": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_layers": layers,
        "num_heads": hidden // 128,
        "num_kv_heads": kv_heads,
        "vocab_size": vocab,
        "qk_norm": False,
    }


LLAMA_2_7B = llama(4096, 11_008, 32, 32, 32_000)
LLAMA_2_70B = llama(8192, 28_672, 80, 8, 32_000)
LLAMA_3_8B = llama(4096, 14_336, 32, 8, 128_256)
LLAMA_3_70B = llama(8192, 28_672, 80, 8, 128_256)
LLAMA_15B = llama(5120, 17_920, 40, 8, 128_256)
GPT_OSS_120B = llama(2880, 2880, 36, 8, 201_088) | {
    "family": "qwen3_moe",
    "num_heads": 64,
    "head_dim": 64,
    "attention_bias": True,
    "moe": {
        "num_experts": 128,
        "num_experts_per_token": 4,
        "expert_intermediate_size": 2880,
        "normalize_top_k": True,
        "num_dense_layers": 0,
        "num_shared_experts": 0,
        "score": "softmax",
        "routed_scale": 1.0,
    },
}
TITAN = "https://github.com/pytorch/torchtitan/blob/"
IBM = "https://github.com/foundation-model-stack/fms-fsdp/blob/"
NEMO = "https://github.com/NVIDIA-NeMo/Automodel/blob/main/"


@dataclass(frozen=True)
class Run:
    """A published run. `tokens_per_s` is of one GPU.

    `mesh`, `trainer`: fields that differ from one FSDP group in mixed precision, with weights
    freed after the forward pass. `documents`: of `document_tokens` in a group's micro-batch.
    `network_gbps`: of a GPU. `one_node_tokens_per_s`: the same run on one node.
    """

    name: str
    source: str
    date: str
    tokens_per_s: float
    model: dict[str, Any]
    accelerator: str
    mesh: dict[str, Any]
    checkpointing: dict[str, Any]
    document_tokens: int
    documents: int
    differs: str
    micro_batches: int = 1
    devices_per_node: int = 8
    network_gbps: float = 8 * NETWORK_BYTES / 1e9
    reduces_once: bool = False
    one_node_tokens_per_s: float | None = None
    trainer: dict[str, Any] = field(default_factory=dict)


RUNS = (
    Run(
        name="Llama 3.1 8B, 128 × H100, torchtitan",
        source=TITAN + "main/benchmarks/llama3_h100_202412_torchtitan.md, table 3",
        date="2024-12-26",
        tokens_per_s=6514,
        model=LLAMA_3_8B,
        accelerator="h100",
        mesh={"dp_shard": 128},
        checkpointing=MATRICES,
        document_tokens=8192,
        documents=2,
        one_node_tokens_per_s=6667,
        differs="GPUs of 500 W and 2.4 TB/s, below the data sheet; every second product recomputed",
    ),
    Run(
        name="Llama 3.1 8B, 128 × H100, Float8, torchtitan",
        source=TITAN + "main/benchmarks/llama3_h100_202412_torchtitan.md, table 3",
        date="2024-12-26",
        tokens_per_s=8380,
        model=LLAMA_3_8B | {"fp8": FP8},
        accelerator="h100",
        mesh={"dp_shard": 128},
        checkpointing=MATRICES,
        document_tokens=8192,
        documents=2,
        one_node_tokens_per_s=8532,
        differs="GPUs of 500 W and 2.4 TB/s, below the data sheet; one scale a tensor, not a block",
    ),
    Run(
        name="Llama 3 70B, 64 × A100, torchtitan",
        source=TITAN + "041336434916bdc0f88c1f89fda176fd3c2092e4/docs/performance.md",
        date="2024",
        tokens_per_s=331,
        model=LLAMA_3_70B,
        accelerator="a100_80gb",
        mesh={"dp_shard": 64},
        checkpointing=FULL,
        document_tokens=8192,
        documents=1,
        differs="A100s may reach a larger share of their data sheet than an H200; compile unknown",
        trainer={"compile": False},
    ),
    Run(
        name="Llama 2 7B, 96 × H100, HSDP, IBM",
        source=IBM + "ed74fd5/README.md",
        date="2024-05-09",
        tokens_per_s=9600,
        model=LLAMA_2_7B,
        accelerator="h100",
        mesh={"dp_replicate": 12, "dp_shard": 8},
        checkpointing=NONE,
        document_tokens=4096,
        documents=2,
        differs="the plan hides no reduction among replicas; 800 Gb/s are taken as a node's",
        network_gbps=100,
        trainer={"reduce_dtype": "bfloat16"},
    ),
    Run(
        name="Llama 2 70B, 96 × H100, IBM",
        source=IBM + "4ffb9bd/README.md",
        date="2024-03-21",
        tokens_per_s=800,
        model=LLAMA_2_70B,
        accelerator="h100",
        mesh={"dp_shard": 96},
        checkpointing=FULL,
        document_tokens=4096,
        documents=2,
        differs="800 Gb/s are taken as a node's; an older attention kernel",
        network_gbps=100,
        trainer={"reduce_dtype": "bfloat16", "compile": False},
    ),
    Run(
        name="Llama of 14.8B, 8 × H200 of 2 nodes, KempnerForge",
        source="https://github.com/KempnerInstitute/KempnerForge/blob/main/"
        "benchmarks/mfu_scaling/mfu_scaling.md, row 8",
        date="2026-04-05",
        tokens_per_s=35_405 / 8,
        model=LLAMA_15B,
        accelerator="h200",
        mesh={"dp_shard": 8},
        checkpointing=FULL,
        document_tokens=4096,
        documents=4,
        differs="the source names InfiniBand, but no rate",
        micro_batches=4,
        devices_per_node=4,
        reduces_once=True,
        trainer=BFLOAT16 | {"compile": False},
    ),
    Run(
        name="Llama 3.1 70B, 64 × H100, CP 2, NeMo AutoModel",
        source=NEMO + "docs/performance-summary.mdx",
        date="2026-06-12",
        tokens_per_s=866.77,
        model=LLAMA_3_70B,
        accelerator="h100",
        mesh={"dp_shard": 32, "cp": 2, "cp_style": "ring"},
        checkpointing=FULL,
        document_tokens=8192,
        documents=1,
        differs="NeMo prefetches up to two blocks; with CP, the plan hides gathers behind half of "
        "the computation",
        micro_batches=4,
        trainer=BFLOAT16,
    ),
    Run(
        name="GPT-OSS 120B, 64 × H100, EP 64, NeMo AutoModel",
        source=NEMO + "docs/performance-summary.mdx; ep_size in "
        "examples/benchmark/configs/gptoss_120b_te_deepep.yaml",
        date="2025-10-02",
        tokens_per_s=7626,
        model=GPT_OSS_120B,
        accelerator="h100",
        mesh={"dp_shard": 64, "ep": 64, "ep_backend": "deepep"},
        checkpointing=NONE,
        document_tokens=4096,
        documents=2,
        differs="the plan's wait for token counts is that of two GPUs; it sends a token to each "
        "rank over the network, DeepEP once to a node; half of the layers attend to 128 keys only",
        micro_batches=4,
        reduces_once=True,
        trainer=BFLOAT16 | {"compile": False},
    ),
)


def planned(run: Run) -> tuple[Model, Trainer, dict[str, float]]:
    """Return the run's model and trainer, and the plan's seconds of a step by kind of work."""
    base = load(ROOT / "manifests/qwen3_8b_8k.json")
    model = Model.model_validate(base.model.model_dump(mode="json") | run.model)
    fields = base.trainer.model_dump(mode="json")
    fields["mesh"] |= run.mesh
    fields["fsdp"] |= {
        "reshard_after_forward": True,
        "reduce_gradients": "step" if run.reduces_once else "micro_batch",
    }
    fields["memory"] |= {
        "activation_checkpointing": run.checkpointing,
        "max_tokens_per_micro_batch": run.documents * run.document_tokens // fields["mesh"]["cp"],
    }
    trainer = Trainer.model_validate(fields | run.trainer)
    rates = rates_of(run.accelerator)
    link = links(trainer, rates, run.devices_per_node, run.network_gbps * 1e9 / 8)
    lengths = [run.document_tokens] * (run.documents * run.micro_batches)
    return model, trainer, step_s(model, trainer, run.micro_batches, lengths, rates, link)


def compared(run: Run) -> dict[str, Any]:
    _, trainer, parts = planned(run)
    mesh = trainer.mesh
    tokens = run.documents * run.micro_batches * run.document_tokens / mesh.cp
    ratio_error = None
    if run.one_node_tokens_per_s is not None:
        alone = replace(run, mesh=run.mesh | {"dp_shard": run.devices_per_node})
        ratio = planned(alone)[2]["step"] / parts["step"]
        ratio_error = ratio / (run.tokens_per_s / run.one_node_tokens_per_s) - 1
    return {
        "variant": run.name,
        "value": tokens / parts["step"] / run.tokens_per_s - 1,
        "unit": "error of the tokens/s",
        "goal": None,
        "published_tokens_per_s": run.tokens_per_s,
        "planned_tokens_per_s": tokens / parts["step"],
        "one_node_tokens_per_s": run.one_node_tokens_per_s,
        "error_of_ratio_to_one_node": ratio_error,
        "source": run.source,
        "date": run.date,
        "differs": run.differs,
        "gpus": f"{mesh.world_size} × {run.accelerator}, {run.devices_per_node} a node",
        "network_gbps": run.network_gbps,
        "mesh": {name: getattr(mesh, name) for name in ("dp_replicate", "dp_shard", "cp", "ep")},
        "checkpointing": run.checkpointing,
        "compile": trainer.compile,
        "fp8": run.model.get("fp8"),
        "document_tokens": run.document_tokens,
        "documents": run.documents,
        "micro_batches": run.micro_batches,
        "planned_parts_s": parts,
    }


def parser() -> argparse.ArgumentParser:
    one = parser_of(__doc__)
    one.add_argument("--out", type=Path, default=Path(__file__).resolve().parent)
    return one


def main() -> None:
    out = parser().parse_args().out
    rows = [compared(run) for run in RUNS]
    print(f"{'tokens/s of a GPU':56}{'published':>10}{'planned':>10}{'error':>9}")
    for row in rows:
        speeds = f"{row['published_tokens_per_s']:10,.0f}{row['planned_tokens_per_s']:10,.0f}"
        print(f"{row['variant']:56}{speeds}{row['value']:+9.1%}\n    {row['differs']}")
        if (error := row["error_of_ratio_to_one_node"]) is not None:
            print(f"    error of the ratio to one node: {error:+.1%}")
    errors = [abs(row["value"]) for row in rows]
    record(
        out / "published.json",
        figure="trainer: published runs on several nodes whose planned speed is within a quarter",
        value=sum(error <= TOLERANCE for error in errors) / len(errors),
        unit="share",
        goal=GOAL,
        better="higher",
        details={"rows": len(rows), "largest_error": max(errors)},
        rows=rows,
    )


if __name__ == "__main__":
    main()
