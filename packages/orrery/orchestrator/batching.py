"""Turn a `TrainBatch` into micro-batches, a metrics row and lines of `rollouts/*.jsonl`."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from orrery.manifest.publish import make_folder, write_atomic
from orrery.manifest.schema import Manifest
from orrery.orchestrator.rollout import Rollout
from orrery.orchestrator.scheduler import TrainBatch
from orrery.tasks.task import Message
from orrery.wire.columns import Columns
from orrery.wire.packing import micro_batches, pack_for
from orrery.wire.rollout_wire import Batch
from orrery.wire.routed_experts import COLUMN

_NONE = np.float32(0.0)
NUM_MESSAGES = 16
TEXT_CHARACTERS = 4000


def document(rollout: Rollout, temperature: float) -> Columns:
    routes = {} if rollout.routed_experts is None else {COLUMN: rollout.routed_experts}
    return Columns(
        np.array([0, rollout.num_tokens], dtype=np.int64),
        {
            "token_id": rollout.token_id,
            "trained": rollout.trained,
            "logprob": rollout.logprob,
            "version": rollout.version,
            "advantage": np.where(rollout.trained, np.float32(rollout.known_advantage), _NONE),
            **routes,
        },
        {
            "temperature": np.array([temperature], dtype=np.float32),
            "engine": np.array([rollout.engine], dtype=np.int32),
            "dispatch_version": np.array([rollout.dispatch_version], dtype=np.int32),
            "reward": np.array([rollout.reward], dtype=np.float32),
            "group_id": np.array([rollout.group_id], dtype=np.int64),
            "task_index": np.array([rollout.task_index], dtype=np.int32),
        },
    )


def digests(rollouts: Sequence[Rollout], known: dict[int, str]) -> dict[str, str]:
    """Return {str(version): weight digest} of the versions that sampled `rollouts`."""
    versions = np.unique(np.concatenate([each.sampled_versions for each in rollouts]))
    return {str(version): known[version] for version in versions.tolist()}


def packed(step: int, documents: Sequence[Columns], manifest: Manifest, info: dict) -> Batch:
    """Pack documents (rollouts) into a batch.

    Ranks of a context-parallel group get the same micro-batches.
    """
    lengths = np.array([each.num_tokens for each in documents], dtype=np.int64)
    mesh, shares = manifest.trainer.mesh, micro_batches(documents, pack_for(manifest, lengths))
    num_trained = int(sum(np.count_nonzero(each.token["trained"]) for each in documents))
    totals: dict[str, int | float] = {
        "rl": num_trained,
        "cross_entropy": 0,
        "reference_kl": 0,
        "num_samples": len(documents),
        "num_tokens": int(lengths.sum()),
        "num_trained_tokens": num_trained,
    }
    of_ranks = [shares[mesh.data_rank(rank)] for rank in range(mesh.world_size)]
    return Batch(step, of_ranks, totals, info)


def row(batch: TrainBatch, manifest: Manifest, now_s: float) -> dict:
    rollouts, tally = batch.rollouts, batch.tally
    versions = [rollout.sampled_versions for rollout in rollouts]
    behind = batch.step - 1 - np.concatenate(versions)
    task_of = np.array([task for task, _, _ in tally.rewards], dtype=np.int64)
    rewards = np.array([reward for _, reward, _ in tally.rewards], dtype=np.float64)
    by_task = {
        f"reward/{task.name}": float(rewards[task_of == i].mean())
        for i, task in enumerate(manifest.tasks.train)
        if (task_of == i).any()
    }
    trained_mean = float(np.mean([rollout.reward for rollout in rollouts]))
    elapsed_s = now_s - (tally.since_s if tally.since_s is not None else now_s)
    return {
        "event": "batch",
        # Include dropped groups, to avoid bias.
        "reward_mean": float(rewards.mean()) if len(rewards) else trained_mean,
        "batch_reward_mean": trained_mean,
        "num_sampled": len(tally.rewards),
        "num_without_signal": sum(not has_signal for _, _, has_signal in tally.rewards),
        "num_zero_advantage": sum(rollout.advantage == 0 for rollout in rollouts),
        **by_task,
        "staleness_mean": float(behind.mean()),
        "staleness_max": int(behind.max()),
        "staleness_counts": np.bincount(np.maximum(behind, 0)).tolist(),
        "num_versions": len(np.unique(np.concatenate(versions))),
        "num_mixed_rollouts": sum(int(each.min() != each.max()) for each in versions),
        "completion_tokens_mean": float(np.mean([len(each) for each in versions])),
        "truncated_share": float(np.mean([rollout.truncated for rollout in rollouts])),
        "generated_tokens_per_s": tally.generated_tokens / elapsed_s if elapsed_s > 0 else None,
    }


def sample(rollout: Rollout, **about: Any) -> dict[str, Any]:
    return {
        **about,
        "reward": rollout.reward,
        "truncated": rollout.truncated,
        "metrics": rollout.metrics,
        "messages": rollout.messages,
    }


def shortened(messages: Sequence[Message]) -> list[dict[str, Any]]:
    half, left_out = NUM_MESSAGES // 2, len(messages) - NUM_MESSAGES
    if left_out <= 0:
        return [_short(message) for message in messages]
    gap = {"role": "left_out", "content": f"{left_out} messages"}
    return [*map(_short, messages[:half]), gap, *map(_short, messages[-half:])]


def _short(message: Message) -> dict[str, Any]:
    fields = {
        name: _short_text(value) if isinstance(value, str) else value
        for name, value in msgspec.to_builtins(message).items()
    }
    calls = msgspec.json.encode(message.tool_calls).decode()
    if len(calls) > TEXT_CHARACTERS:
        fields["tool_calls"] = _short_text(calls)
    return fields


def _short_text(text: str) -> str:
    half, left_out = TEXT_CHARACTERS // 2, len(text) - TEXT_CHARACTERS
    if left_out <= 0:
        return text
    return f"{text[:half]}\n[… {left_out} characters left out …]\n{text[-half:]}"


def append_samples(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    data = b"".join(
        msgspec.json.encode({**each, "messages": shortened(each["messages"])}) + b"\n"
        for each in lines
    )
    with open(path, "ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            if file.read(1) != b"\n":
                data = b"\n" + data
        file.write(data)


def write_samples(path: Path, lines: Iterable[dict[str, Any]]) -> None:
    make_folder(path.parent)
    write_atomic(path, b"".join(msgspec.json.encode(each) + b"\n" for each in lines))
