"""Write and read the orchestrator's part of a checkpoint, `step_<n>.attempt_<k>/orchestrator/`.

- `queue.safetensors` has the tokens of groups that wait for a batch. `state.json` has the rest.
- The files of step n are written before batch n is sent, so every trainer checkpoint has them.
- At a preemption after the checkpoint, newer state goes to `later.attempt_<k>/orchestrator/` in
  the checkpoint. A resumed run reads the newest state.
"""

import shutil
from pathlib import Path
from typing import Any

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import make_folder, publish_folder
from orrery.orchestrator.batching import document
from orrery.orchestrator.dispatch import GroupRequest
from orrery.orchestrator.rollout import Rollout
from orrery.orchestrator.scheduler import Snapshot
from orrery.tasks.task import Message
from orrery.wire import checkpoints, columns
from orrery.wire.columns import Columns
from orrery.wire.routed_experts import COLUMN

FORMAT = 4


class _QueuedRollout(msgspec.Struct):
    group: int  # index in [*queue, *spare]
    member: int
    advantage: float
    reward: float
    truncated: bool
    messages: list[Message]
    metrics: dict[str, float]


class _State(msgspec.Struct):
    format: int
    step: int
    next_batch: int
    cursors: list[int]
    in_flight: list[GroupRequest]
    evaluated: int
    num_evaluation_groups: int
    digests: dict[int, str]
    queue: list[_QueuedRollout]
    num_spare_groups: int
    num_sampled: int
    num_batches: int
    rewards: list[tuple[int, float, bool]]


def folder(run_dir: Path, step: int, attempt: int) -> Path:
    return checkpoints.checkpoint_dir(run_dir, step, attempt) / "orchestrator"


def write(run_dir: Path, step: int, attempt: int, snapshot: Snapshot, temperature: float) -> Path:
    return _write(folder(run_dir, step, attempt), step, snapshot, temperature)


def write_now(
    run_dir: Path, step: int, attempt: int, snapshot: Snapshot, temperature: float, is_resumed: bool
) -> Path:
    """Write the state after batch `step`, the last batch sent.

    `is_resumed`: this attempt resumed from `step` and has sent no batch.
    """
    if is_resumed:
        checkpoint = checkpoints.whole_dir(run_dir, step)
    elif folder(run_dir, step, attempt).exists():
        checkpoint = checkpoints.checkpoint_dir(run_dir, step, attempt)
    else:
        return write(run_dir, step, attempt, snapshot, temperature)
    later = checkpoints.later_dir(checkpoint, attempt)
    aside = checkpoint.with_name(f".{later.name}.{step}.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    _write(aside / "orchestrator", step, snapshot, temperature)
    checkpoints.complete(aside)
    # A run killed between these calls resumes from older state.
    checkpoints.discard(run_dir, later)
    publish_folder(aside, later)
    return later / "orchestrator"


def _later(checkpoint: Path) -> Path | None:
    attempts = [
        path.parent.name.rpartition("_")[2]
        for path in checkpoint.glob(f"{checkpoints.LATER}.attempt_*/{checkpoints.MARKER}")
    ]
    newest = max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=None)
    return None if newest is None else checkpoints.later_dir(checkpoint, newest)


def _write(target: Path, step: int, snapshot: Snapshot, temperature: float) -> Path:
    groups = enumerate([*snapshot.queue, *snapshot.spare])
    rollouts = [(number, each) for number, group in groups for each in group]
    queue = [
        _QueuedRollout(
            group=number,
            member=rollout.member,
            advantage=rollout.known_advantage,
            reward=rollout.reward,
            truncated=rollout.truncated,
            messages=rollout.messages,
            metrics=rollout.metrics,
        )
        for number, rollout in rollouts
    ]
    state = _State(
        format=FORMAT,
        step=step,
        next_batch=snapshot.next_batch,
        cursors=snapshot.cursors,
        in_flight=snapshot.in_flight,
        evaluated=snapshot.evaluated,
        num_evaluation_groups=snapshot.num_evaluation_groups,
        digests=snapshot.digests,
        queue=queue,
        num_spare_groups=len(snapshot.spare),
        num_sampled=snapshot.num_sampled,
        num_batches=snapshot.num_batches,
        rewards=snapshot.rewards,
    )
    aside = target.with_name(".orchestrator.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside)
    (aside / "state.json").write_bytes(msgspec.json.encode(state))
    documents = [document(rollout, temperature) for _, rollout in rollouts]
    columns.write(aside / "queue.safetensors", documents, sync=False)
    publish_folder(aside, target)
    return target


def read(checkpoint: Path, step: int) -> Snapshot:
    """Return the newest orchestrator state in the checkpoint of `step`.

    Raise OrreryError if the state is incomplete or of another step.
    """
    path = checkpoint / "orchestrator"
    remedy = f"remove {checkpoint} to go on from the checkpoint before it"
    if (later := _later(checkpoint)) is not None:
        path = later / "orchestrator"
        remedy = f"remove {later} to resume from the state before batch {step} was sent; "
        remedy += "the step's checkpoint itself stays"
        checkpoints.verify(later, remedy)
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=_State)
        stored, _ = columns.read(path / "queue.safetensors")
    except (OSError, msgspec.MsgspecError, OrreryError) as error:
        raise OrreryError(
            f"{path}: not a snapshot of the orchestrator ({error}); {remedy}"
        ) from error
    if state.format != FORMAT or state.step != step or stored.num_samples != len(state.queue):
        raise OrreryError(
            f"{path}: format {state.format} of step {state.step} with {stored.num_samples} of "
            f"{len(state.queue)} samples; expected format {FORMAT} of step {step}; {remedy}"
        )
    groups: list[list[Rollout]] = []
    for index, kept in enumerate(state.queue):
        if kept.group == len(groups):
            groups.append([])
        groups[kept.group].append(_rollout(stored, index, kept))
    num_queued = len(groups) - state.num_spare_groups
    return Snapshot(
        next_batch=state.next_batch,
        cursors=state.cursors,
        in_flight=state.in_flight,
        queue=groups[:num_queued],
        spare=groups[num_queued:],
        num_sampled=state.num_sampled,
        evaluated=state.evaluated,
        num_evaluation_groups=state.num_evaluation_groups,
        digests=state.digests,
        num_batches=state.num_batches,
        rewards=state.rewards,
    )


def _rollout(columns: Columns, index: int, kept: _QueuedRollout) -> Rollout:
    tokens = slice(columns.offsets[index], columns.offsets[index + 1])
    # Copy, because a memory-mapped NFS file becomes unreadable if another node removes it.
    arrays: dict[str, Any] = {
        name: columns.token[name][tokens].copy()
        for name in ("token_id", "logprob", "trained", "version")
    }
    routes = columns.token[COLUMN][tokens].copy() if COLUMN in columns.token else None
    group_id, task_index, dispatch_version, engine = (
        int(columns.sample[name][index])
        for name in ("group_id", "task_index", "dispatch_version", "engine")
    )
    return Rollout(
        **arrays,
        reward=kept.reward,
        truncated=kept.truncated,
        messages=kept.messages,
        metrics=kept.metrics,
        routed_experts=routes,
        engine=engine,
        advantage=kept.advantage,
        group_id=group_id,
        member=kept.member,
        task_index=task_index,
        dispatch_version=dispatch_version,
    )
