"""Snapshot files: the orchestrator's share of a checkpoint, `checkpoints/step_<n>.attempt_<k>/orchestrator/`.

- `queue.safetensors`: finished groups that are not trained yet, with and without signal, as columns; `state.json`: the rest.
- The folder appears whole (written aside, renamed).
- Always: step n's files are written before batch n is sent, so a checkpoint that the trainer completes has them.
- A wind-down after batch n writes the state of now, not of the cut. If step n has its files
  already, they stay, since the step is complete with them. The newer state goes to
  `later.attempt_<k>/orchestrator/` in that checkpoint, with its own marker. A resumed run reads it.
  The checkpoint is an earlier attempt's if attempt k winds down before it has sent a batch.
"""

import shutil
from pathlib import Path

import msgspec

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import make_folder, publish_folder
from orrery.orchestrator.batching import document
from orrery.orchestrator.buffer import Sample
from orrery.orchestrator.requests import GroupRequest
from orrery.orchestrator.rollout import Rollout
from orrery.orchestrator.scheduler import Snapshot
from orrery.tasks.task import Message
from orrery.transport import checkpoints, safetensors_columns
from orrery.transport.columns import Columns
from orrery.transport.routed_experts import COLUMN

FORMAT = 4


class _QueuedSample(msgspec.Struct):
    """What columns do not hold of a queued sample."""

    group: int  # number of its group; spare groups come after the queue's
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
    queue: list[_QueuedSample]
    num_spare_groups: int
    num_sampled: int
    num_batches: int
    rewards: list[tuple[int, float, bool]]


def folder(run_dir: Path, step: int, attempt: int) -> Path:
    return checkpoints.checkpoint_dir(run_dir, step, attempt) / "orchestrator"


def write(run_dir: Path, step: int, attempt: int, snapshot: Snapshot, temperature: float) -> Path:
    """Write step `step`'s folder; returns it."""
    return _write(folder(run_dir, step, attempt), step, snapshot, temperature)


def write_now(
    run_dir: Path, step: int, attempt: int, snapshot: Snapshot, temperature: float, is_resumed: bool
) -> Path:
    """Write the state between sending batch `step` and cutting batch `step + 1`; return its folder.

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
    # A kill between these two leaves an older, valid state: groups that ended since are repeated.
    checkpoints.discard(run_dir, later)
    publish_folder(aside, later)
    return later / "orchestrator"


def _later(checkpoint: Path) -> Path | None:
    """Return the newest attempt's later state in a checkpoint, or None."""
    attempts = [
        path.parent.name.rpartition("_")[2]
        for path in checkpoint.glob(f"{checkpoints.LATER}.attempt_*/{checkpoints.MARKER}")
    ]
    newest = max((int(attempt) for attempt in attempts if attempt.isdecimal()), default=None)
    return None if newest is None else checkpoints.later_dir(checkpoint, newest)


def _write(target: Path, step: int, snapshot: Snapshot, temperature: float) -> Path:
    samples = [
        (number, sample)
        for number, group in enumerate([*snapshot.queue, *snapshot.spare])
        for sample in group
    ]
    state = _State(
        FORMAT, step, snapshot.next_batch, snapshot.cursors, snapshot.in_flight, snapshot.evaluated, snapshot.num_evaluation_groups,
        snapshot.digests,
        [
            _QueuedSample(
                number, sample.member, sample.advantage, sample.rollout.reward,
                sample.rollout.truncated, sample.rollout.messages, sample.rollout.metrics,
            )
            for number, sample in samples
        ],
        len(snapshot.spare), snapshot.num_sampled, snapshot.num_batches, snapshot.rewards,
    )  # fmt: skip
    aside = target.with_name(".orchestrator.tmp")
    shutil.rmtree(aside, ignore_errors=True)
    make_folder(aside)
    (aside / "state.json").write_bytes(msgspec.json.encode(state))
    safetensors_columns.write(
        aside / "queue.safetensors",
        [document(sample, temperature) for _, sample in samples],
        sync=False,
    )
    publish_folder(aside, target)
    return target


def read(checkpoint: Path, step: int) -> Snapshot:
    """Return the newest state in `checkpoint` of `step`. Raises OrreryError if it is not whole."""
    path, remedy = (
        checkpoint / "orchestrator",
        f"remove {checkpoint} to go on from the checkpoint before it",
    )
    if (later := _later(checkpoint)) is not None:
        path, remedy = (
            later / "orchestrator",
            f"remove {later} to go on from when batch {step} was cut; the step's checkpoint itself stays",
        )
        checkpoints.verify(later, remedy)
    try:
        state = msgspec.json.decode((path / "state.json").read_bytes(), type=_State)
        columns, _ = safetensors_columns.read(path / "queue.safetensors")
    except (OSError, msgspec.MsgspecError, OrreryError) as error:
        raise OrreryError(
            f"{path}: not a snapshot of the orchestrator ({error}); {remedy}"
        ) from error
    if state.format != FORMAT or state.step != step or columns.num_samples != len(state.queue):
        raise OrreryError(
            f"{path}: format {state.format} of step {state.step} with {columns.num_samples} of {len(state.queue)} samples; "
            f"expected format {FORMAT} of step {step}; {remedy}"
        )
    groups: list[list[Sample]] = []
    for index, kept in enumerate(state.queue):
        if kept.group == len(groups):
            groups.append([])
        groups[kept.group].append(_sample(columns, index, kept))
    num_queued = len(groups) - state.num_spare_groups
    return Snapshot(
        state.next_batch, state.cursors, state.in_flight, groups[:num_queued], groups[num_queued:], state.num_sampled,
        state.evaluated, state.num_evaluation_groups, state.digests, state.num_batches, state.rewards,
    )  # fmt: skip


def _sample(columns: Columns, index: int, kept: _QueuedSample) -> Sample:
    tokens = slice(columns.offsets[index], columns.offsets[index + 1])
    # Copies, so that nothing is left of the mapping: a file that another node removes cannot be read on a network file system.
    token_id, logprob, trained, version = (
        columns.token[name][tokens].copy() for name in ("token_id", "logprob", "trained", "version")
    )
    routes = columns.token[COLUMN][tokens].copy() if COLUMN in columns.token else None
    group_id, task_index, dispatch_version, engine = (
        int(columns.sample[name][index])
        for name in ("group_id", "task_index", "dispatch_version", "engine")
    )
    rollout = Rollout(
        token_id,
        logprob,
        trained,
        version,
        kept.reward,
        kept.truncated,
        kept.messages,
        kept.metrics,
        routes,
        engine,
    )
    return Sample(rollout, kept.advantage, group_id, kept.member, task_index, dispatch_version)
