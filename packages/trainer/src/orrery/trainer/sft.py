"""SFT: examples as the same columns that RL trains on, with all weight on the cross-entropy component.

- In: the task's own demonstrations, or chats from a JSONL file. Trained are the assistant's tokens.
- Batch n takes the n-th run of `examples_per_batch` examples of an endless order: one permutation an epoch, drawn from
  (manifest.seed, epoch). Every rank computes the same plan and keeps its own part: no rank tells another what to train.
- So the position in the data is the number of steps done, and a stage that was killed goes on from its newest checkpoint to the same bits.
"""

import hashlib
import json
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import ChatFile, Demonstrations, Manifest
from orrery.observe.process import RoleProcess
from orrery.tasks import Message, ToolCall, make
from orrery.tasks.chat import Renderer
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.pulse import still_s
from orrery.trainer.schedule import factor
from orrery.trainer.stage_checkpoints import StageCheckpoints
from orrery.transport import checkpoints
from orrery.transport.columns import Columns
from orrery.transport.packing import pack, quadratic_cost


def sft(learner: Learner, examples: Columns, me: RoleProcess) -> None:
    """Train what is left of `stages.sft.num_steps` on `examples`."""
    manifest, spec = me.manifest, me.manifest.stages.sft
    limit, quadratic = manifest.trainer.memory.max_tokens_per_micro_batch, quadratic_cost(manifest.model)
    order = islice(endless_order(examples.num_samples, manifest.seed), learner.step * spec.examples_per_batch, None)
    first_step = learner.step + 1
    with StageCheckpoints(me, learner, "sft") as saving:
        for step in range(first_step, spec.num_steps + 1):
            saving.check()
            begin_s = time.time()
            me.health.doing("sft", step=step, still_s=still_s(step == first_step, learner.world.size))
            chosen = np.fromiter(order, dtype=np.int64, count=spec.examples_per_batch)
            plan = pack(examples.lengths[chosen], learner.world.num_data_ranks, limit, quadratic)
            mine = [examples.select(chosen[samples]) for samples in plan[learner.world.data_rank]]
            outcome = learner.learn(mine, len(mine), count_totals(mine, learner.world), factor(spec.schedule, step, spec.num_steps))
            is_due = checkpoints.is_due(step, manifest, "sft")
            blocked_s = saving.copy() if is_due else 0.0
            if learner.world.is_first:
                step_s = time.time() - begin_s
                speed = {"step_time_s": step_s, "checkpoint_blocked_s": blocked_s, "tokens_per_s": outcome.metrics["num_tokens"] / step_s}
                me.metrics.write(step, **outcome.metrics, **speed)
                if step % 20 == 0 or step == spec.num_steps:
                    me.log.info("sft step %d of %d: loss %.4f", step, spec.num_steps, outcome.metrics["loss"])
            if is_due:
                saving.write()


def endless_order(num_examples: int, seed: int) -> Iterator[int]:
    epoch = 0
    while True:
        yield from np.random.default_rng([seed, epoch]).permutation(num_examples).tolist()
        epoch += 1


def load_examples(manifest: Manifest, tokenizer: Path) -> Columns:
    """All examples of `stages.sft.data` as columns. Raises OrreryError for a chat that cannot be trained on, naming it."""
    data, renderer = manifest.stages.sft.data, Renderer(tokenizer)
    limit, parts = manifest.trainer.memory.max_tokens_per_micro_batch, []
    for where, messages, tools in _demonstrations(data) if data.kind == "demonstrations" else _chats(data):
        try:
            ids, trained = renderer.example(messages, tools)
        except OrreryError as error:
            raise OrreryError(f"{where}: {error}") from error
        if len(ids) > limit:
            raise OrreryError(
                f"{where}: {len(ids)} tokens do not fit trainer.memory.max_tokens_per_micro_batch {limit}; raise it or leave the chat out"
            )
        token = {
            "token_id": np.asarray(ids, dtype=np.int32),
            "trained": np.asarray(trained, dtype=bool),
            "rl_weight": np.zeros(len(ids), dtype=np.float32),
            "cross_entropy_weight": np.ones(len(ids), dtype=np.float32),
        }
        parts.append(Columns(np.array([0, len(ids)], dtype=np.int64), token))
    if not parts:
        raise OrreryError("stages.sft.data: there is not one chat to train on")
    return Columns.concatenate(parts)


def _demonstrations(data: Demonstrations) -> Iterator[tuple[str, list[Message], tuple]]:
    task = make(data.task)
    if not hasattr(task, "demonstration"):
        raise OrreryError(f"stages.sft.data.task: {data.task.kind!r} has no demonstrations; use a chat file, or set stages.sft to null")
    for index in range(data.num_problems):
        yield f"demonstration {index} of {data.task.name}", task.demonstration(index), tuple(task.problem(index).tools)


def _chats(data: ChatFile) -> Iterator[tuple[str, list[Message], tuple]]:
    path = Path(data.path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise OrreryError(f"stages.sft.data.path: {error}") from error
    if (found := hashlib.sha256(content).hexdigest()) != data.sha256:
        raise OrreryError(f"stages.sft.data.sha256: {path} has {found}, the manifest says {data.sha256}")
    for number, line in enumerate(content.split(b"\n"), 1):  # not splitlines: JSON strings may hold U+2028 and its like
        if line.strip():
            try:
                yield f"{path}:{number}", [_message(entry) for entry in json.loads(line.decode())["messages"]], ()
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                form = '{"messages": [{"role", "content"}]}'
                raise OrreryError(f"{path}:{number}: not a chat of the form {form} ({error!r})") from error


def _message(entry: dict) -> Message:
    calls = (call["function"] for call in entry.get("tool_calls") or ())
    arguments = ((call["name"], call["arguments"]) for call in calls)
    parsed = tuple(ToolCall(name, json.loads(given) if isinstance(given, str) else given) for name, given in arguments)
    return Message(entry["role"], entry.get("content") or "", parsed, entry.get("name"))
