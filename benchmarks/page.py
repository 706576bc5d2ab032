"""Write docs/benchmarks.md: every record under benchmarks/, a table a topic.

    python benchmarks/page.py            write the page
    python benchmarks/page.py --check    exit with 1 if the page is not what the records say

`TOPICS` holds the order and the wording. All numbers, units, goals and dates come from the records.
"""

import argparse
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any

from orrery.launcher.bench import Figure

FOLDER = Path(__file__).resolve().parent
PAGE = FOLDER.parent / "docs/benchmarks.md"
HEAD = """\
# Benchmarks

`make bench-page` generates this page from the records, the JSON files under `benchmarks/`. Each
record was written by the script beside it and holds the command, versions, commit and details.

- `orrery bench AREA/FIGURE` measures a figure again.
- `orrery bench --table` prints all figures with their goals in the terminal.
- A commit that ends in `-dirty` is older than the rule that records need a clean checkout."""


@dataclass(frozen=True)
class Line:
    """A line of a table: a record's own value, or the value of one of its variants."""

    record: str  # path below benchmarks/, without .json
    title: str
    variant: str | None = None
    peer: str | None = None  # name of the compared system, whose value is that of `peer_variant`
    peer_variant: str | None = None
    peer_detail: tuple[str, ...] = ()  # path of its value in the record's details instead


def titan(row: str, title: str, suffix: str, variant: str) -> Line:
    """Return a line of the trainer beside torchtitan's ratio on the same GPUs."""
    ratio = f"ratio to torchtitan {suffix}"
    return Line(f"trainer/{row}", title, f"{variant} {suffix}", "torchtitan", ratio)


TOPICS: dict[str, tuple[str, list[Line]]] = {
    "Learning": (
        "Held-out reward is the mean over problems that no training step used.",
        [
            Line("demo/learning", "The demo: reward after RL, lowest of three seeds"),
            Line("async/starting_reward", "SmolLM2-135M before RL, lowest of three tasks"),
            Line("async/learning", "SmolLM2: rise of reward, reverse_words", "reverse_words"),
            Line("async/learning", "SmolLM2: rise of reward, arithmetic", "arithmetic"),
            Line("async/learning", "SmolLM2: rise of reward, calculator", "calculator"),
            Line("async/problems_h100", "SmolLM2, a file of problems: rise of reward, worst seed"),
            Line("async/problems_h100", "… lowest entropy, share of its start", "entropy"),
            Line("async/problems_h100", "… share of truncated answers", "truncated"),
            Line("async/problems_h200", "The same on an H200: rise of reward, worst seed"),
            Line("async/problems_h200", "… lowest entropy, share of its start", "entropy"),
            Line("async/problems_h200", "… share of truncated answers", "truncated"),
            Line("async/glm5", "A GLM-5 in FP8 reverses words: reward, lowest of three seeds"),
            Line(
                "async/glm5_mismatch",
                "… mismatch KL with replayed keys, relative to dense attention",
                "KL, replay, over dense",
            ),
            Line("async/glm5_mismatch", "… without replay", "KL, own choice, over dense"),
            Line(
                "async/long_choices",
                "… engine's keys that the trainer does not choose, 131,072 tokens",
            ),
            Line(
                "async/sweep_h100", "Largest rise in 24 steps, by SFT batches before RL and by lr"
            ),
            Line("async/sweep_h100", "… 25 batches, lr 1e-5", "25 warm-start batches, lr 1e-05"),
            Line("async/sweep_h100", "… 25 batches, lr 3e-5", "25 warm-start batches, lr 3e-05"),
            Line("async/sweep_h100", "… 50 batches, lr 1e-5", "50 warm-start batches, lr 1e-05"),
            Line("async/sweep_h100", "… 50 batches, lr 3e-5", "50 warm-start batches, lr 3e-05"),
            Line("async/sweep_h100", "… 120 batches, lr 1e-5", "120 warm-start batches, lr 1e-05"),
            Line("async/sweep_h100", "… 120 batches, lr 3e-5", "120 warm-start batches, lr 3e-05"),
            Line("async/staleness", "Reward with max_off_policy_steps 0", "bound 0"),
            Line("async/staleness", "Reward with max_off_policy_steps 8", "bound 8"),
        ],
    ),
    "The whole loop": (
        "Trained tokens a second, end to end, with random weights and answers of drawn lengths. "
        "Each shape of hardware has its own model and batch, so do not compare the lines.",
        [
            Line("async/whole_loop_cpu", "Tiny model, two CPU cores"),
            Line("async/whole_loop_h200_1", "Both roles on one H200"),
            Line("async/memory_h100", "One-GPU runs measured that fit a card of 80 GB"),
            Line("async/memory_h100", "… smallest card, SmolLM2", "smollm2_problems_seed_1"),
            Line("async/memory_h100", "… Qwen3-0.6B with LoRA", "gsm8k_qwen3_0_6b_lora"),
            Line("async/memory_h100", "… Qwen3-4B with LoRA", "gsm8k_qwen3_4b"),
            Line("async/memory_h200", "… Qwen3-0.6B in full, on an H200", "gsm8k_qwen3_0_6b"),
            Line("async/trl_h200", "SmolLM2 on a file of problems, relative to TRL 1.16, one H200"),
            Line("async/trl_h200", "… trained tokens/s", "orrery", "TRL 1.16", "TRL"),
            Line(
                "async/trl_h200",
                "… trained tokens/s if groups without signal are dropped",
                "orrery, groups with signal",
            ),
            Line("async/trl_h100", "The same on one H100, measured with slower scoring of answers"),
            Line("async/trl_h100", "… trained tokens/s", "orrery", "TRL 1.16", "TRL"),
            Line("async/whole_loop_h200_2", "Two H200"),
            Line("async/whole_loop_h200_2_fp8", "Two H200, FP8 engine"),
            Line("async/whole_loop_h200_4", "Four H200"),
            Line("async/asynchrony_cpu", "Asynchronous relative to synchronous, CPU"),
            Line("async/asynchrony_h200_4", "Asynchronous relative to synchronous, four H200"),
            Line("demo/wall_time", "The demo: wall time of all stages"),
            Line("demo/wall_time", "The demo: RL stage of 100 steps", "stage rl"),
            Line("demo/wall_time", "The demo: trainer busy during RL", "RL: trainer busy"),
        ],
    ),
    "Inference": (
        "An engine of Qwen3-30B-A3B's shape on one H200, or a tiny one on a CPU.",
        [
            Line(
                "inference/throughput",
                "Output tokens/s through client, router and log-probs, relative to plain vLLM",
                None,
                "vLLM 0.32 with log-probs",
                "plain vLLM, log-probs",
            ),
            Line("inference/throughput_cpu", "The same on two CPU cores, shared with the client"),
            Line("inference/planned", "Largest error of the planned speed of an engine"),
            Line("inference/engine_plan", "Error of the planned memory of an engine"),
            Line("inference/loading", "Bytes that a rank of eight reads to load its weights"),
            Line(
                "orchestrator/overhead", "Tokens/s through orchestrator and router, share of direct"
            ),
            Line(
                "orchestrator/rollout_cost",
                "API server and orchestrator: processor time a short rollout",
                "shared",
                "a request each",
                "single",
            ),
            Line(
                "inference/answer_cost",
                "API server: processor time a token",
                "ours",
                "vLLM",
                "theirs",
            ),
            Line("inference/routes_cost", "Share of tokens/s that returning routes costs"),
            Line("orchestrator/routes", "Routes from answers into a column, rate of one core"),
            Line("inference/admission", "Adaptive admission, share of the best fixed limit, CPU"),
            Line("inference/admission_h200", "Adaptive admission, share of the best fixed limit"),
            Line(
                "inference/adapter_cost_cpu",
                "Engine with a LoRA adapter, share of full weights, CPU",
            ),
            Line(
                "inference/adapter_cost_qwen3_4b",
                "Engine with a LoRA adapter, share of full weights",
            ),
            Line("inference/engine_loss", "A killed engine: seconds until it serves again, files"),
            Line(
                "inference/engine_loss_nccl", "A killed engine: seconds until it serves again, NCCL"
            ),
            Line(
                "inference/engine_loss_reverse_text_prefill_decode",
                "A killed prefill engine: seconds until it serves again",
            ),
            Line(
                "inference/engine_loss_wide",
                "One of two nodes of an engine killed: seconds until it serves again, CPU",
            ),
            Line(
                "inference/choice",
                "Prompt tokens that prefill ranks have cached, chosen by cost, CPU",
                peer="round robin",
                peer_detail=("round_robin", "cached_share"),
            ),
            Line(
                "inference/dynamo_router",
                "Log-probs through Dynamo's router, difference from the trainer's network, CPU",
            ),
        ],
    ),
    "Weights and the wires": (
        "Weight updates happen while requests are in flight.",
        [
            Line("transport/weight_update", "Engine paused, demo model, files", "files"),
            Line("transport/weight_update", "Engine paused, demo model, NCCL wire", "nccl"),
            Line("transport/weight_update", "Engine paused, demo model, NIXL wire", "nixl"),
            Line("transport/weight_update_smollm2_smoke", "Engine paused, SmolLM2 adapters"),
            Line(
                "transport/weight_update_qwen3_4b_16k_1_to_1", "Engine paused, Qwen3-4B, 1 to 1 GPU"
            ),
            Line(
                "transport/weight_update_qwen3_30b_a3b_16k_1_to_1",
                "Engine paused, Qwen3-30B-A3B, 1 to 1 GPU",
            ),
            Line(
                "transport/weight_update_qwen3_30b_a3b_16k_2_to_2_shared",
                "Engine paused, Qwen3-30B-A3B, 2 trainer ranks and 2 engine ranks on 2 GPUs",
            ),
            Line("transport/pack_and_wire", "Pack, send and receive rollouts on one core"),
            Line("transport/fingerprint_cpu", "Weight fingerprints, one CPU thread"),
            Line("transport/fingerprint_gpu", "Weight fingerprints, share of the memory bound"),
            Line(
                "elastic/codecs", "Quantize Δ to int8, blocks of 256, native", "int8_block native"
            ),
            Line("elastic/codecs", "… in torch operators, ±3σ", "torch operators, ±3σ"),
            Line("elastic/codecs", "… to fp8 in torch operators", "torch operators, fp8 rows"),
            Line("elastic/codec_error", "Error of a sum over 14 sites in int8, Gaussian"),
            Line(
                "elastic/exchange", "Ring of 2 sites, 100 Mb/s to 1 Gb/s, 1 to 100 ms, worst share"
            ),
            Line("elastic/exchange", "… at 1 Gb/s, 1 ms", "2 sites, 1 Gb/s, 1 ms"),
            Line("elastic/exchange", "… at 1 Gb/s, 100 ms", "2 sites, 1 Gb/s, 100 ms"),
            Line("elastic/exchange", "… with 0.1 % loss", "2 sites, 1 Gb/s, 10 ms, 0.1 % loss"),
            Line("elastic/exchange", "… without a limit, of 4 Gb/s", "2 sites, no limit"),
            Line(
                "elastic/exchange",
                "… a slow pair over a third site",
                "3 sites, a slow pair over the third",
            ),
            Line(
                "elastic/exchange",
                "… a slow pair outside the ring",
                "4 sites, a slow pair outside the ring",
            ),
            Line("elastic/exchange", "… 4 sites, 1 GB each, at 1 Gb/s", "4 sites, 1 GB, 1 Gb/s"),
            Line("elastic/failover", "Eight sites until rounds go on, slowest of four losses"),
            Line("elastic/recovery", "A joiner of 1 GB at 1 Gb/s: seconds until it has all"),
            Line(
                "elastic/recovery",
                "… slow-down of the others",
                "slow-down of a site's step, wall time",
            ),
            Line("elastic/churn", "30 minutes, 100 joins, leaves, kills and cuts: loss above calm"),
            Line(
                "elastic/churn",
                "… sites that ended by themselves",
                "sites that ended by themselves",
            ),
            Line("elastic/churn", "… rounds that forked", "rounds with other bits at a site"),
            Line("elastic/churn", "… documents trained twice", "phases that share documents"),
            Line("elastic/diloco", "DiLoCo with int8, loss above synchronous, 4 sites, H 50"),
            Line("elastic/diloco", "… int8 above float32", "int8 over float32"),
            Line("elastic/diloco_2_stories", "… int8 above synchronous, a quarter of the batch"),
            Line("elastic/guests", "One site trains, three lend engines: held-out reward after RL"),
            Line("elastic/oracle", "Difference of weights from torchft 0.2.0 after 8 rounds"),
            Line("elastic/utilisation", "Ten billion parameters on INTELLECT-1's links, simulated"),
            Line("elastic/utilisation", "… USA, one exchange", "USA, 4 Gb/s, one exchange"),
            Line("elastic/utilisation", "… global, streaming", "global, 0.5 Gb/s, streaming"),
            Line("replay/mismatch", "Mismatch KL without router replay over with, float32 trainer"),
            Line("replay/receipt", "Decoding an answer's routes, processor time"),
            Line("replay/step_cost", "Share of a training step that router replay costs"),
        ],
    ),
    "Trainer": (
        "Tokens a second a GPU. The peer is torchtitan on the same GPUs and the same depth.",
        [
            titan("qwen3_0_6b_16k", "Qwen3-0.6B, 16k", "on 1 GPUs", "natural routing"),
            titan("qwen3_4b_16k", "Qwen3-4B, 16k", "on 2 GPUs", "natural routing"),
            titan("qwen3_8b_8k", "Qwen3-8B, 8k", "on 4 GPUs", "natural routing"),
            titan(
                "qwen3_30b_a3b_16k",
                "Qwen3-30B-A3B, 16k",
                "on 4 GPUs, 24 layers",
                "balanced routing",
            ),
            titan(
                "qwen3_30b_a3b_32k",
                "Qwen3-30B-A3B, 32k",
                "on 2 GPUs, 12 layers",
                "balanced routing",
            ),
            titan(
                "qwen3_30b_a3b_64k", "Qwen3-30B-A3B, 64k", "on 2 GPUs, 8 layers", "balanced routing"
            ),
            Line("trainer/qwen3_30b_a3b_131k", "Qwen3-30B-A3B, 131k, 12 layers"),
            Line("trainer/qwen3_30b_a3b_16k_rl", "Qwen3-30B-A3B, 16k, RL loss, 12 layers"),
            Line("trainer/qwen3_30b_a3b_64k_rl", "Qwen3-30B-A3B, 64k, RL loss, 8 layers"),
            Line("trainer/qwen3_30b_a3b_16k_offload", "Qwen3-30B-A3B, 16k, offload, 12 layers"),
            Line("trainer/qwen3_30b_a3b_lora_16k", "Qwen3-30B-A3B, 16k, LoRA"),
            Line("trainer/qwen3_30b_a3b_lora_64k", "Qwen3-30B-A3B, 64k, LoRA, 12 layers"),
            Line(
                "trainer/memory_options_qwen3_30b_a3b_16k",
                "The run with each memory option in turn",
            ),
            Line(
                "trainer/memory_options_qwen3_30b_a3b_16k_one_gpu",
                "… on one GPU, with 5 layers",
            ),
            Line(
                "trainer/memory_options_qwen3_30b_a3b_16k_planned",
                "Planned peak memory of a GPU, Qwen3-30B-A3B",
            ),
            Line("trainer/planned", "Recorded steps whose planned time is within a tenth"),
            Line(
                "trainer/published",
                "Published runs on several nodes whose planned speed is within a quarter",
            ),
            Line("trainer/checkpoint", "Training blocked by a checkpoint"),
            Line("trainer/sft_data", "SFT: chats to tokens, beside training"),
            Line("trainer/gpu_checks", "Reference checks on a GPU that pass"),
            Line("trainer/offload", "Speed with optimizer state on the host, 2 micro-batches"),
            Line("trainer/offload", "… 8 micro-batches", "streamed, 8 micro-batches"),
            Line(
                "trainer/offload",
                "… with a quarter of the state on the device, 2 micro-batches",
                "a quarter resident, 2 micro-batches",
            ),
            Line("trainer/offload", "… 8 micro-batches", "a quarter resident, 8 micro-batches"),
            Line("trainer/fp8_layers", "FP8 relative to bfloat16, Qwen3-8B with 12 layers"),
            Line(
                "trainer/fp8_layers",
                "FP8 relative to bfloat16, Qwen3-30B-A3B with 5 layers",
                "mixture: FP8 / bfloat16",
            ),
        ],
    ),
    "Kernels": (
        "The bound is the larger of operations over peak rate and bytes over bandwidth.",
        [
            Line("kernels/attention", "Attention forward and backward, 32,768 tokens"),
            Line("kernels/experts", "Experts of a mixture, forward and backward"),
            Line(
                "kernels/experts",
                "… an exchange's sort, gather and sum of rows, 65,536 tokens",
                "local parts, triton, 65536 tokens, balanced",
            ),
            Line(
                "kernels/experts",
                "… with an exchange on one rank, lengths known in advance",
                "exchange, known lengths, 65536 tokens, balanced",
            ),
            Line(
                "kernels/experts",
                "… lengths awaited in each layer",
                "exchange, lengths by layer, 65536 tokens, balanced",
            ),
            Line("kernels/lm_head", "LM head, loss and gradient"),
            Line("kernels/adapters", "LoRA on experts, forward and backward"),
            Line("kernels/sparse_mla", "Sparse latent attention, backward, 131,072 keys"),
            Line(
                "kernels/sparse_mla",
                "… half local, half shared keys",
                "backward, hopper, local, 131072 keys",
            ),
            Line(
                "kernels/sparse_mla",
                "… forward, FlashMLA",
                "forward, flash_mla, random, 131072 keys",
            ),
            Line(
                "kernels/sparse_mla",
                "… forward, half local, half shared keys",
                "forward, flash_mla, local, 131072 keys",
            ),
            Line("kernels/sparse_index", "Choice of keys by an indexer, 131,072 keys"),
            Line("trainer/context_rank", "Latent attention on one of four context-parallel ranks"),
            Line("trainer/glm5_rank", "An MoE layer of GLM-5 on one rank, 131,072 tokens"),
            Line(
                "kernels/optimizer", "AdamW with its state in host memory, relative to the copies"
            ),
        ],
    ),
    "Failures and security": (
        "Defects count, so the goal of most lines is 0.",
        [
            Line("faults/kills", "Killed processes: lost or doubled batches, unnamed ends"),
            Line("faults/strangers", "Attempts of a stranger that change or read anything"),
            Line("faults/malformed", "Damaged inputs: tracebacks, hangs, half-written files"),
            Line("faults/authentication", "Authentication, share of a run's CPU time"),
            Line("faults/canary_cost", "Canary prompts, share of a run's CPU time"),
            Line("faults/scorers", "Scoring an answer in its own process"),
        ],
    ),
    "Specs, Snakemake and Slurm": (
        "The Slurm cluster is simulated on two cores, so its lines show overhead, not speed.",
        [
            Line("manifest/render", "Render, check and hash 100 runs"),
            Line("pipeline/dry_run", "`snakemake -n reverse_text_seeds`"),
            Line("cluster/gpu_slurm", "The GPU demo as Slurm jobs on one H100, without containers"),
            Line("cluster/wide", "Reward with wide engines over nodes, a kill and a lost node"),
            Line("cluster/overhead", "What jobs in containers add to the demo's local processes"),
            Line("images/build", "Build all CPU images again, packages fetched before"),
        ],
    ),
}
UNITS = {
    "times": "×",
    "us/token": "µs/token",
    "of the bound": "× bound",
    "share of time": "share",
    "Gb/s of a core": "Gb/s",
    "Gb/s of processor time": "Gb/s",
}
NO_UNIT = ("reward", "characters", "batches", "defects", "cases")  # units that lines' titles name


# Lines that wait for a host of 2, 4 or 8 GPUs. The page shows each once its record exists.
HOST = (
    "On one host of several GPUs",
    "Layouts, sites and updates that need two, four or eight GPUs.",
    [
        Line("elastic/two_sites_2", "Device memory that a second site adds, 2 sites × 1 GPU"),
        Line("elastic/two_sites_4", "Device memory that a second site adds, 2 sites × 2 GPUs"),
        Line("trainer/context_expert_2", "GLM-5's widths: gradients of cp 2 × ep 2 to one rank"),
        Line("trainer/context_expert_8", "GLM-5's widths: gradients of cp 4 × ep 8 to one rank"),
        Line("trainer/glm5_slice", "GLM-5, five layers, 131,072 tokens, cp 4 × ep 8: tokens/s/GPU"),
        Line(
            "trainer/qwen3_30b_a3b_16k_kitchen_sink",
            "Qwen3-30B-A3B, 16k, every memory lever: tokens/s/GPU",
        ),
        Line("trainer/qwen3_30b_a3b_16k_cpu_offload", "… fsdp.cpu_offload: tokens/s/GPU"),
        Line("cluster/two_nodes_sft", "SFT over two nodes, one lost: lost steps"),
        Line("cluster/two_nodes_sft_pair", "… with one GPU a node"),
        Line(
            "cluster/two_nodes_replay",
            "RL over two nodes, one lost: lost, repeated and wrong batches",
        ),
        Line("cluster/two_nodes_replay_pair", "… with one GPU a node"),
        Line("inference/store", "Blocks found in a Mooncake Store by an engine on another node"),
        *(
            Line(f"inference/wide{run}", f"GLM-5's widths, {ranks}: routes and keys not replayed")
            for run, ranks in {
                "": "engines of 8 and of 2 + 6 ranks",
                "_wide_glm5_8": "one engine of 8 ranks",
                "_wide_glm5_2_6": "2 ranks prefill, 6 decode",
                "_wide_glm5_2_6_deepep": "… with DeepEP",
            }.items()
        ),
        Line("async/whole_loop_h200_8", "The loop on eight H200, trained tokens/s"),
        Line("async/asynchrony_h200_2", "Asynchronous relative to synchronous, two H200"),
        Line("async/asynchrony_h200_8", "Asynchronous relative to synchronous, eight H200"),
        Line(
            "async/asynchrony_glm5_4",
            "GLM-5's attention, FP8, one engine of two ranks: asynchronous to synchronous",
        ),
        Line("async/asynchrony_glm5_8", "… on eight GPUs, one engine of four ranks"),
        Line(
            "transport/weight_update_qwen3_30b_a3b_16k_fp8_2_to_2",
            "Engine paused, Qwen3-30B-A3B in FP8, 2 to 2 GPUs",
        ),
        Line(
            "transport/weight_update_qwen3_30b_a3b_16k_fp8_4_to_4",
            "Engine paused, Qwen3-30B-A3B in FP8, 4 to 4 GPUs",
        ),
    ],
)


# Why a goal is missed, by record and variant
REASONS: dict[tuple[str, str | None], str] = {
    ("async/trl_h100", None): "It was measured before several processes scored answers.",
    (
        "elastic/utilisation",
        None,
    ): "With one exchange for all weights, the last bytes are sent when "
    "no computation is left to hide them. Streaming reaches the goal.",
    ("trainer/planned", None): "The one step outside is nearly out of memory, and its allocator "
    "retries stop the device.",
    ("trainer/published", None): "Rows of the record have a probable reason each: power limits, "
    "unknown networks, waits for token counts.",
    ("trainer/offload", None): "Copies of all state last longer than the backward pass that hides "
    "them. With a quarter of the state on the device, the goal is reached.",
    (
        "trainer/fp8_layers",
        None,
    ): "FP8 speeds products up. Attention, LM head and optimizer take as "
    "long as in bfloat16, and quantization reads and writes every activation.",
    ("trainer/fp8_layers", "mixture: FP8 / bfloat16"): "Products are a sixth of the bfloat16 step, "
    "so the goal would be missed if they took no time.",
    (
        "kernels/sparse_mla",
        "backward, hopper, local, 131072 keys",
    ): "The kernel writes a gradient for "
    "each query and key, and sums them in a fixed order. Both are limited by the memory's rate.",
    (
        "kernels/sparse_mla",
        "forward, flash_mla, random, 131072 keys",
    ): "This is the library's own speed on this host.",
    ("trainer/glm5_rank", None): "The bound counts each product once. Recomputation repeats the "
    "forward pass, and the fixed order of the key gradients' sums costs passes over memory for "
    "each query and key. The record lists the longest kernels.",
}


def number(value: float, unit: str) -> str:
    """Format a value: shares as per cent, large numbers with separators, others with 3 digits."""
    unit = UNITS.get(unit, unit)
    if unit == "share":
        return f"{100 * value:.3g} %"
    shown = f"{value:,.0f}" if abs(value) >= 1000 or value == int(value) else f"{value:.3g}"
    return shown if any(word in unit for word in NO_UNIT) else f"{shown} {unit}"


def goal(figure: Figure) -> str:
    """Return the goal in words, marked if the value misses it; "" without a goal."""
    if figure.goal is None:
        return ""
    words = f"{figure.sign} {number(figure.goal, figure.unit)}"
    return words if figure.holds else f"{words}, **missed**"


def hardware(record: dict[str, Any]) -> str:
    """Shorten a record's hardware to its GPUs, or without any to its processor."""
    words = record["hardware"] if isinstance(record["hardware"], str) else "see the record"
    parts = words.split(", ")
    return parts[-1].replace("NVIDIA ", "") if "NVIDIA" in words else ", ".join(parts[:2])


def figure(line: Line, record: dict[str, Any], variant: str | None) -> Figure:
    """Return a record's figure, or a variant's. A variant has its own goal or none."""
    row = record
    if variant is not None:
        [row] = [one for one in record["rows"] if one.get("variant") == variant]
    return Figure(
        name=line.record,
        variant=variant or "",
        value=row["value"],
        unit=row.get("unit", record["unit"]),
        goal=row.get("goal"),
        better=row.get("better") or record["better"],
        hardware=hardware(record),
        measured_at=record["measured_at"][:10],
    )


def row(line: Line, record: dict[str, Any]) -> str:
    shown, peer = figure(line, record, line.variant), ""
    if line.peer_detail:
        value = reduce(getitem, line.peer_detail, record["details"])
        peer = f"{line.peer}: {number(value, shown.unit)}"
    elif line.peer is not None:
        other = figure(line, record, line.peer_variant)
        limit = goal(other)
        peer = f"{line.peer}: {number(other.value, other.unit)}" + (f" ({limit})" if limit else "")
    title = f"[{line.title}](../benchmarks/{line.record}.json)"
    cells = [title, number(shown.value, shown.unit), goal(shown), peer]
    return f"|{'|'.join([*cells, shown.hardware, shown.measured_at])}|"


def reasons(lines: list[Line], records: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the title and the reason of each missed goal that has one in `REASONS`."""
    for line in lines:
        reason = REASONS.get((line.record, line.variant))
        if reason and not figure(line, records[line.record], line.variant).holds:
            yield line.title, reason


def page() -> str:
    """Return the page's text. Raise SystemExit if `TOPICS` misses a record or names none."""
    paths = sorted(FOLDER.glob("*/*.json"))
    records = {f"{each.parent.name}/{each.stem}": json.loads(each.read_text()) for each in paths}
    name, text, waiting = HOST
    measured = [line for line in waiting if line.record in records]
    topics = TOPICS | ({name: (text, measured)} if measured else {})
    named = {line.record for _, lines in topics.values() for line in lines}
    if differs := named ^ set(records):
        raise SystemExit(f"error: TOPICS of benchmarks/page.py: add or remove {sorted(differs)}")
    parts = [HEAD]
    for topic, (text, lines) in topics.items():
        head = ["", f"## {topic}", "", text, ""]
        head += ["|figure|value|goal|peer|hardware|date|", "|---|--:|--:|---|---|---|"]
        parts += [*head, *(row(line, records[line.record]) for line in lines)]
        missed = [
            f"- {title.removeprefix('… ')}: {reason}" for title, reason in reasons(lines, records)
        ]
        parts += ["", "Why goals are missed:", "", *missed] if missed else []
    plots = sorted(each.relative_to(FOLDER) for each in FOLDER.glob("*/*.png"))
    parts += ["", "## Plots", "", *(f"![{one.stem}](../benchmarks/{one})\n" for one in plots)]
    return "\n".join(parts).rstrip() + "\n"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the page is older")
    if parser.parse_args().check:
        if PAGE.read_text() != page():
            sys.exit(
                "error: docs/benchmarks.md: it is older than the records; type: make bench-page"
            )
    else:
        PAGE.write_text(page())
