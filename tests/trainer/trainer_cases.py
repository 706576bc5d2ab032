"""Shared cases: a tiny manifest, random batches, learners in one and in several processes."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from forked_roles import ForkedRole, import_before

from orrery.manifest.errors import RunFailed
from orrery.manifest.schema import Manifest
from orrery.models import build, weights
from orrery.models.placement import full_tensor
from orrery.trainer import saver
from orrery.trainer.assemble import load_policy
from orrery.trainer.checkpoint_writer import CheckpointWriter
from orrery.trainer.learner import Learner
from orrery.trainer.parallel.world import World
from orrery.wire.columns import Columns
from orrery.wire.packing import pack

torch.set_num_threads(1)

# Most of the imports of a rank, for the fork server.
PRELOADED = (
    "torch._dynamo",  # imported by FSDP
    "transformers.models.gemma2.modeling_gemma2",
    "trainer_rank",
    "orrery.trainer.assemble",
    "orrery.trainer.export",
    "orrery.trainer.heartbeat",
    "orrery.trainer.out_of_memory",
    "orrery.trainer.sft",
)

ALPHABET = "abcdefgh"
MEMORY = {
    "activation_checkpointing": {"kind": "none"},
    "activation_checkpointing_every": 1,
    "activation_offload": False,
    "activation_offload_max_in_flight": 1,
    "optimizer_offload": False,
    "optimizer_offload_resident": 0.0,
    "lm_head_chunk_tokens": 16,
    "lm_head_keeps_logits": False,
    "max_tokens_per_micro_batch": 64,
}
MISMATCH = {
    "warn_kl": 2.0,
    "stop_kl": 10.0,
    "warn_logprob_difference": 1.0,
    "stop_logprob_difference": 2.0,
    "canary_logprob_difference": 1e-3,
}
# Fields of `trainer`, also in the next line.
OFFLOADED = {"memory": {**MEMORY, "optimizer_offload": True}}
HOSTED = {"fsdp": {"reshard_after_forward": True, "reduce_gradients": "step", "cpu_offload": True}}
# All that activation checkpointing of kind `modules` may name.
MODULES = ["norms", "attention_projections", "router", "experts_activation"]
MOE = {
    "num_experts": 4,
    "num_experts_per_token": 2,
    "expert_intermediate_size": 24,
    "normalize_top_k": True,
    "num_dense_layers": 0,
    "num_shared_experts": 0,
    "score": "softmax",
    "routed_scale": 1.0,
}
GLM5 = {  # sparse attention to 6 keys
    "family": "glm5",
    "num_layers": 3,
    "num_kv_heads": 2,
    "tie_embeddings": False,
    "qk_norm": False,
    "moe": {
        **MOE,
        "num_dense_layers": 1,
        "num_shared_experts": 1,
        "score": "sigmoid",
        "routed_scale": 2.5,
    },
    "mla": {
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "nope_head_dim": 12,
        "rope_head_dim": 4,
        "value_head_dim": 12,
        "indexer": {
            "num_heads": 8,
            "head_dim": 8,
            "top_k": 6,
            "types": ["full", "shared", "full"],
        },
    },
}
GEMMA2 = {  # a network of transformers: soft caps, a window, norms behind as well as before
    "model_type": "gemma2",
    "vocab_size": 8 + len(ALPHABET),
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parents[1]


def manifest(mesh=None, model=None, trainer=None, stages=None, **fields) -> Manifest:
    """Return a tiny form of the run reverse_text. Each keyword replaces fields of its object."""
    run = json.loads((REPOSITORY / "manifests/reverse_text.json").read_text())
    task = run["tasks"]["train"][0] | {"name": "reverse"}
    task["args"] |= {"alphabet": ALPHABET, "min_length": 2, "instruction": ""}
    adamw = run["trainer"]["optimizer"] | {"lr": 1e-2, "beta2": 0.99, "weight_decay": 0.01}
    constant = {"kind": "constant", "warmup_steps": 2}
    run["hardware"]["devices_per_node"] = 1
    run["model"] |= {
        "init": {"kind": "random", "seed": 3, "std": 0.1},
        "tokenizer": {"kind": "characters", "alphabet": ALPHABET},
        "vocab_size": 8 + len(ALPHABET), "hidden_size": 32, "intermediate_size": 48, "num_heads": 2,
        "num_kv_heads": 1, "head_dim": 16, "max_positions": 64, "rope_theta": 10000.0,
    } | (model or {})  # fmt: skip
    run["trainer"]["mesh"] |= mesh or {}
    run["trainer"] |= {
        "memory": MEMORY, "mismatch": MISMATCH, "optimizer": adamw, "schedule": constant,
        "checkpoint": {"interval_steps": 2, "keep": 2},
    } | (trainer or {})  # fmt: skip
    run["inference"] |= {
        "max_model_len_tokens": 64, "kv_cache_bytes": 1 << 20, "max_num_sequences": 4,
        "max_batched_tokens": 64,
    }  # fmt: skip
    run["orchestrator"] |= {"rollouts_per_batch": 4, "rollout_timeout_s": 5.0}
    run["orchestrator"]["algorithm"]["group_size"] = 2
    run["orchestrator"]["admission"]["max_in_flight"] = 4
    run["orchestrator"]["evaluation"] |= {"interval_steps": 2, "num_problems": 2}
    run["stages"]["sft"] |= {
        "num_steps": 8, "examples_per_batch": 16, "optimizer": adamw, "schedule": constant,
        "data": {"kind": "demonstrations", "task": task, "num_problems": 64},
    }  # fmt: skip
    run["stages"]["rl"]["num_steps"], run["stages"]["evaluate"]["num_problems"] = 4, 2
    run["stages"] |= stages or {}
    tasks = {"train": [task], "evaluation": [task | {"seed": 2}]}
    names = {"name": "tiny", "seed": 5, "python_lock_sha256": "0" * 64}
    return Manifest.model_validate(run | names | {"tasks": tasks} | fields)


def batch_columns(step: int, num_samples: int = 7, vocab_size: int = 16, seed: int = 0) -> Columns:
    """Return a random batch for `step`: prompts of 3 tokens, log-probs near a fresh model's."""
    rng = np.random.default_rng([seed, step])
    lengths = rng.integers(5, 20, num_samples)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    total = int(offsets[-1])
    position = np.arange(total) - np.repeat(offsets[:-1], lengths)
    trained = position >= 3
    token = {
        "token_id": rng.integers(8, vocab_size, total).astype(np.int32),
        "trained": trained,
        "logprob": np.where(trained, np.log(1 / vocab_size) + rng.normal(0, 0.3, total), 0).astype(
            np.float32
        ),
        "version": np.where(trained, step - 1, -1).astype(np.int32),
        "advantage": np.repeat(rng.normal(0, 1, num_samples), lengths).astype(np.float32),
    }
    sample = {
        "temperature": rng.uniform(0.7, 1.3, num_samples).astype(np.float32),
        # An older policy, so that these random log-probs are not compared with the trainer's.
        "dispatch_version": np.full(num_samples, step - 2, dtype=np.int32),
    }
    return Columns(offsets, token, sample)


def with_choices(routes: np.ndarray, is_chosen: np.ndarray, num_dense_layers: int) -> np.ndarray:
    """Return an engine's rows: routes [T, layers with experts, K], and keys, bool [T, I, L]."""
    dense = np.zeros((len(routes), num_dense_layers, routes.shape[2]), routes.dtype)
    whole = np.concatenate((dense, routes), axis=1).reshape(len(routes), -1).view(np.uint8)
    bits = np.packbits(is_chosen, axis=-1, bitorder="little").reshape(len(routes), -1)
    return np.concatenate((whole, bits), axis=1)[:, None]


def with_samples(routes: np.ndarray, sample: np.ndarray, num_dense_layers: int) -> np.ndarray:
    """Return an engine's rows: routes [T, layers with experts, K], and keys, i32 [T, I, S]."""
    none = np.zeros((len(routes), sample.shape[1], 0), bool)
    whole = with_choices(routes, none, num_dense_layers)[:, 0]
    return np.concatenate((whole, sample.reshape(len(routes), -1).view(np.uint8)), axis=1)[:, None]


def share(columns: Columns, num_ranks: int, rank: int, max_tokens: int = 64) -> list[Columns]:
    return [
        columns.select(samples) for samples in pack(columns.lengths, num_ranks, max_tokens)[rank]
    ]


def write_start_weights(spec: Manifest, folder: Path) -> Path:
    network = build(spec.model)
    weights.initialize(network, spec.model)
    weights.save(network, spec.model, folder)
    return folder


def make_learner(spec: Manifest, start: Path, world: World | None = None) -> Learner:
    world = world or World(0, 1, torch.device("cpu"), None)
    policy = load_policy(spec.model, spec.trainer, world, start)
    trainer = spec.trainer
    arguments = trainer, trainer.optimizer, trainer.max_grad_norm
    return Learner(policy, world, *arguments, replays_routes=True)


def whole_weights(learner: Learner) -> dict[str, torch.Tensor]:
    return {name: full_tensor(weight.detach()).clone() for name, weight in learner.weights.items()}


def rank_device(rank: int) -> torch.device:
    """Return the device of rank `rank`: a separate GPU if `run_script` got "cuda"."""
    if os.environ.get("TRAINER_TEST_DEVICE", "cpu") == "cpu":
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def run_ranks(
    num_ranks: int, folder: Path, jobs: list[dict], device: str = "cpu"
) -> list[dict[str, dict]]:
    """Run jobs (see trainer_rank.py) on `num_ranks` processes. Return each rank's answers by job.

    Jobs share the processes, because starting one takes seconds. Fails with a failed rank's stderr.
    """
    (folder / "jobs.json").write_text(json.dumps(jobs, default=str))
    return run_script("trainer_rank", folder, num_ranks, deadline_s=100, device=device)


def rank_environment() -> dict[str, str]:
    path = os.pathsep.join(filter(None, [str(HERE), *sys.path]))
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}


def forked_rank(output: Path, options: list[str]) -> ForkedRole:
    """Start a rank of the role as a fork that writes to `output`."""
    import_before(*PRELOADED)
    return ForkedRole("orrery.trainer", options, output, rank_environment())


def fresh_rank(output: Path, options: list[str]) -> subprocess.Popen:
    """Start a rank of the role as the launcher does: an interpreter that imports all it needs."""
    command = [sys.executable, "-m", "orrery.trainer", *options]
    with output.open("wb") as log:
        return subprocess.Popen(command, stderr=log, env=rank_environment(), start_new_session=True)


def run_script(
    module: str, folder: Path, num_ranks: int, deadline_s: float, device: str = "cpu"
) -> list[dict]:
    """Run `main` of `module` as every rank, with FOLDER PORT NUM_RANKS RANK as arguments.

    Return each rank's last line as JSON. If one fails, fail with the stderr of all.
    """
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    environment = rank_environment() | {"TRAINER_TEST_DEVICE": device}
    words = [module, str(folder), str(port), str(num_ranks)]
    output = folder / "ranks.log"
    import_before(*PRELOADED)
    ranks = ForkedRole("ranks", words, output, environment)
    try:
        ranks.wait(deadline_s)
    finally:
        if ranks.poll() is None:
            ranks.terminate()  # it ends its ranks
            ranks.wait()
    said = {
        stream: [path.read_text() for path in sorted(folder.glob(f"rank_?.{stream}"))]
        for stream in ("out", "err")
    }
    assert ranks.returncode == 0, "\n".join(
        text[-3000:] for text in (output.read_text(), *said["err"])
    )
    return [json.loads(text.splitlines()[-1]) for text in said["out"]]


class SaverHere(saver.Saver):
    """Saves in the thread that asks."""

    def save(self) -> None:
        if error := saver.failure(self._memory, lambda: True):
            raise RunFailed(error)


def save_checkpoint(learner: Learner, folder: Path) -> None:
    """Write the state into `folder`. A collective."""
    with CheckpointWriter(learner.world, saver=SaverHere) as writer:
        writer.copy(learner, folder)
        writer.write()
