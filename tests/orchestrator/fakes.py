"""Fakes of engine, trainer, task, chat format and process. All fakes of this room are here."""

import asyncio
import base64
import io
import json
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from orrery.manifest.schema import FixedAdmission, Manifest
from orrery.orchestrator.dispatch import Request
from orrery.orchestrator.engines.messages import (
    EngineGone,
    EngineMetrics,
    Generation,
    GenerationFailed,
)
from orrery.orchestrator.rollout import Rollout
from orrery.tasks.task import Judgement, Message, Problem
from orrery.wire.routed_experts import Routes, split

REPOSITORY = Path(__file__).resolve().parents[2]
PROMPT_TOKENS = 3


def manifest(**orchestrator: Any) -> Manifest:
    """Return a small manifest. Keywords replace fields of `orchestrator`, or `num_steps`,
    `interval_steps`, `stop_at`, `checkpoint_steps`, `max_turns`, `weights`.

    `max_in_flight` may be less than a group, as only an adaptive limit may.
    """
    num_steps = orchestrator.pop("num_steps", 6)
    checkpoint_steps = orchestrator.pop("checkpoint_steps", 3)
    interval_steps = orchestrator.pop("interval_steps", 3)
    stop_at = orchestrator.pop("stop_at", None)
    max_turns = orchestrator.pop("max_turns", 1)
    weights = orchestrator.pop("weights", (1.0,))
    max_in_flight = orchestrator.pop("max_in_flight", 8)
    max_model_len = orchestrator.pop("max_model_len_tokens", 64)
    run = json.loads((REPOSITORY / "manifests/reverse_text.json").read_text())
    run["hardware"]["devices_per_node"] = 1
    run["model"] |= {
        "init": {"kind": "random", "seed": 0, "std": 0.02},
        "tokenizer": {"kind": "characters", "alphabet": "abc"},
        "vocab_size": 11, "hidden_size": 8, "intermediate_size": 8, "num_layers": 1,
        "num_heads": 1, "num_kv_heads": 1, "head_dim": 8, "max_positions": 64,
        "rope_theta": 10000.0,
    }  # fmt: skip
    run["trainer"]["memory"] |= {"lm_head_chunk_tokens": 64, "max_tokens_per_micro_batch": 256}
    run["trainer"]["optimizer"] |= {"lr": 1e-3, "beta2": 0.99}
    run["trainer"]["schedule"]["warmup_steps"] = 0
    run["trainer"]["mismatch"] |= {"warn_logprob_difference": 1.0, "stop_logprob_difference": 2.0}
    run["trainer"]["checkpoint"]["interval_steps"] = checkpoint_steps
    run["inference"] |= {
        "max_model_len_tokens": max_model_len, "kv_cache_bytes": 1 << 20, "max_num_sequences": 8,
        "max_batched_tokens": 256,
    }  # fmt: skip
    evaluation = {"num_problems": 3, "rollouts_per_problem": 2}
    run["orchestrator"] |= {
        "algorithm": {"kind": "grpo", "group_size": 4, "normalize_std": False},
        "rollouts_per_batch": 8, "on_timeout": "failure", "rollout_timeout_s": 30.0,
        "admission": {"kind": "fixed", "max_in_flight": max(max_in_flight, 4)},
        "evaluation": evaluation | {"interval_steps": interval_steps, "stop_at": stop_at},
    } | orchestrator  # fmt: skip
    common = {"kind": "fake", "args": {}, "max_turns": max_turns}
    tasks = [
        common | {"name": f"task{i}", "weight": weight, "seed": i}
        for i, weight in enumerate(weights)
    ]
    run |= {
        "name": "tiny", "seed": 0, "python_lock_sha256": "0" * 64,
        "tasks": {"train": tasks, "evaluation": [tasks[0] | {"name": "held_out", "seed": 99}]},
        "stages": {"sft": None, "rl": {"num_steps": num_steps}, "evaluate": evaluation},
    }  # fmt: skip
    checked = Manifest.model_validate(run)
    if max_in_flight >= 4:
        return checked
    narrow = checked.orchestrator.model_copy(
        update={"admission": FixedAdmission(kind="fixed", max_in_flight=max_in_flight)}
    )
    return checked.model_copy(update={"orchestrator": narrow})


def rollout(request: Request, versions: list[int], reward: float | None = None) -> Rollout:
    """Return a rollout whose tokens and reward depend on problem and member alone."""
    group, n = request.group, PROMPT_TOKENS + len(versions)
    key = 1000 * group.task_index + 10 * group.problem_index + request.member
    trained = np.arange(n) >= PROMPT_TOKENS
    version = np.full(n, -1, np.int32)
    version[PROMPT_TOKENS:] = versions
    return Rollout(
        token_id=(key + np.arange(n, dtype=np.int32)) % 1009,
        logprob=np.where(trained, np.float32(-0.5), np.float32(0)).astype(np.float32),
        trained=trained,
        version=version,
        reward=(request.member % 2) * 1.0 if reward is None else reward,
        truncated=False,
        messages=[Message("user", f"{key}"), Message("assistant", "said")],
        metrics={"exact": 1.0},
        **request.identity,
    )


def routes(start: int, end: int) -> Routes:
    """Return routes of 2 layers for tokens [start, end): experts t and t + 1 at position t."""
    file = io.BytesIO()
    np.save(
        file,
        (np.arange(start, end)[:, None, None] + np.array([0, 1]) + np.zeros((2, 1))).astype(
            np.uint8
        ),
    )
    _, found = split(b'{"routed_experts":"' + base64.b64encode(file.getvalue()) + b'"}', start)
    assert found is not None
    return found


def load(
    running: int,
    waiting: int = 0,
    kv_usage: float = 0.0,
    preemptions_total: int = 0,
    kv_tokens: int = 0,
    tokens: int = 0,
) -> EngineMetrics:
    """Return an engine's metrics."""
    return EngineMetrics(
        running=running, waiting=waiting, kv_usage=kv_usage, kv_tokens=kv_tokens,
        preemptions_total=preemptions_total,
        generation_tokens_total=tokens,
    )  # fmt: skip


class FakeTask:
    """A task with `replies` replies. The reward is in the last message."""

    def __init__(self, replies: int = 0, broken: str | None = None):
        self.replies, self.broken = replies, broken

    def problem(self, index: int) -> Problem:
        if self.broken == "problem":
            raise ValueError("no such problem")
        return Problem(index, (Message("user", str(index)),), answer=index)

    async def reply(self, problem: Problem, messages: list[Message]) -> list[Message] | None:
        if self.broken == "reply":
            raise OSError("the sandbox is gone")
        said = sum(message.role == "assistant" for message in messages)
        return [Message("tool", f"result {said}")] if said <= self.replies else None

    def judge(self, problem: Problem, messages: list[Message]) -> Judgement:
        if self.broken == "judge":
            raise OSError("the judge is gone")
        return Judgement(
            float(messages[-1].content.split("/")[-1]) % 2, {"turns": float(len(messages))}
        )


class FakeRenderer:
    """Three tokens a prompt, two a reply; a sampled message reads as its token ids."""

    stop_token_ids = (1,)

    def prompt(self, messages: Any, tools: Any = ()) -> list[int]:
        return [5, 6, int(messages[-1].content) % 100 + 10]

    def next_turn(self, messages: Any) -> list[int]:
        return [7, 8]

    def parse(self, token_ids: list[int]) -> Message:
        assert all(type(token) is int for token in token_ids)
        return Message("assistant", "/".join(str(token) for token in token_ids))


@dataclass
class FakePool:
    """Engines with a version. `script` maps a request id to its fate.

    Fates: "fail", "gone once", "gone, then hang", "empty", "length", "hang".
    """

    version: int = -1
    num_tokens: int = 4
    script: dict[str, str] = field(default_factory=dict)
    requests: list[dict] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)
    in_flight: Counter = field(default_factory=Counter)
    paused: bool = False
    yields: int = 2
    is_still: bool = False  # holds requests without making tokens
    num_looks: int = 0

    async def generate(
        self, token_ids: np.ndarray, *, max_tokens: int, request_id: str, **options: Any
    ) -> Generation:
        assert request_id not in self.in_flight, f"{request_id} twice in flight"
        assert max_tokens > 0 and options["temperature"] == 1.0
        self.requests.append(
            {
                "token_ids": token_ids.copy(),
                "max_tokens": max_tokens,
                "request_id": request_id,
                "version": self.version,
                **options,
            }
        )
        fate = self.script.get(request_id, "")
        self.in_flight[request_id] += 1
        try:
            if fate == "hang":
                await asyncio.Event().wait()
            if fate.startswith("gone"):
                self.script[request_id] = "hang" if fate.endswith("hang") else ""
                raise EngineGone(f"the engine was lost that had request {request_id!r}")
            if fate == "fail":
                raise GenerationFailed(f"request {request_id!r} came to nothing")
            n = 0 if fate == "empty" else min(self.num_tokens, max_tokens)
            versions = np.empty(n, np.int32)
            for token in range(n):  # token by token, so that an update falls between two
                for _ in range(self.yields):
                    await asyncio.sleep(0)
                while self.paused:
                    await asyncio.sleep(0)
                versions[token] = self.version
            ids = (np.arange(n, dtype=np.int32) + sum(map(ord, request_id))) % 50 + 20
            reason = "length" if fate == "length" or n < self.num_tokens else "stop"
            parts = (
                ()
                if options.get("routes_from") is None
                else (routes(options["routes_from"], len(token_ids) + n - 1),)
            )
            return Generation(
                request_id,
                ids,
                np.full(n, -0.25, np.float32),
                versions,
                fate if fate == "abort" else reason,
                0,
                parts,
            )
        finally:
            del self.in_flight[request_id]

    async def abort(self, request_ids: list[str]) -> None:
        assert not self.paused, "an abort while engines are paused"
        self.aborted.extend(request_ids)

    async def update(self, published: Any, on_resumed: Any = lambda: None) -> Any:
        self.paused = True
        await asyncio.sleep(0)
        self.version = published.version
        self.updates.append(published.version)
        await asyncio.sleep(0)
        self.paused = False
        on_resumed()
        return SimpleNamespace(
            paused_s=0.0,
            update_s=0.0,
            attest_s=0.0,
            attested={"resident": 1},
            canary_s=0.0,
            canary_difference=0.0,
        )

    is_serving = True
    is_proving = False

    def check(self) -> None:
        pass

    async def metrics(self) -> dict[int, Any]:
        self.num_looks += not self.is_still
        return {0: load(running=len(self.in_flight), tokens=self.num_looks)}


class FakeTrainer:
    """Both of its ends: takes batches in order and publishes the version that each makes."""

    url = "fake://"

    def __init__(self, first_version: int = 0):
        self.version, self.batches = first_version, []
        self.compared = None  # the untrained batch after the last
        self.wound_down_at = None
        self.published = [first_version]

    def latest(self) -> Any:
        return SimpleNamespace(version=self.version, digest=f"{self.version:016x}")

    async def wanted(self, at_least: int = -1) -> int:
        while self.version + 1 < at_least:
            await asyncio.sleep(0)
        return self.version + 1

    async def drained(self, deadline_s: float | None) -> None:
        assert self.compared is not None or self.wound_down_at is not None

    async def send(self, batch: Any) -> None:
        assert batch.step == self.version + 1 or batch.step == self.version + 2, (
            "more than a batch ahead"
        )
        if batch.info.get("wind_down"):
            assert batch.step == self.version + 1 and [
                list(each) for each in batch.micro_batches
            ] == [[]]
            self.wound_down_at = self.version
            return
        if batch.info.get("compare"):
            assert self.compared is None and batch.step == self.version + 1, (
                "compared before the last version was made, or twice"
            )
            self.compared = batch
            return
        self.batches.append(batch)
        asyncio.get_running_loop().call_later(0.002, self._trained, batch.step)

    def _trained(self, step: int) -> None:
        self.version = step
        self.published.append(step)


@dataclass
class FakeContext:
    """What `role_process` gives."""

    run_dir: Path
    manifest: Manifest
    attempt: int = 1
    stage: str = "rl"
    rows: list[dict] = field(default_factory=list)
    spans: list[dict] = field(default_factory=list)

    def __post_init__(self) -> None:
        import logging

        self.log = logging.getLogger("orchestrator.0")
        self.metrics = SimpleNamespace(write=self._write, add_span=self._add_span, span=self._span)
        self.health = SimpleNamespace(doing=lambda *_, **__: None, waiting=self._waiting)

    def _write(self, step: int | None, **values: Any) -> None:
        self.rows.append({"step": step, **values})

    def _add_span(
        self, name: str, start_s: float, end_s: float, step: int | None = None, **attrs: Any
    ) -> None:
        self.spans.append({"name": name, "start_s": start_s, "end_s": end_s, "step": step, **attrs})

    @contextmanager
    def _span(self, name: str, step: int | None = None, **attrs: Any):
        yield
        self._add_span(name, 0.0, 0.0, step, **attrs)

    @contextmanager
    def _waiting(self, what: str, deadline_s: float | None = None):
        # Only the trainer's steps have no deadline: its ranks' heartbeats show whether it hangs.
        assert deadline_s is not None or "trainer" in what, f"a wait for {what} without a deadline"
        yield

    def events(self, name: str) -> list[dict]:
        return [row for row in self.rows if row.get("event") == name]
