"""Simulate an engine with cache blocks, as vLLM schedules them, for closed loops in tests.

A step gives every running request one token. A request that needs a block when none is free
preempts the newest. That one loses its blocks, goes to the front of the queue and is prefilled
again. Queued requests start in order while there are blocks.
"""

import random
from collections import deque
from dataclasses import dataclass

import orchestrator_fakes as fakes


@dataclass
class Sequence:
    prompt: int
    length: int  # of the prompt and all that it will sample
    tokens: int = 0  # prompt and sampled so far
    blocks: int = 0

    def __post_init__(self):
        self.tokens = self.prompt


@dataclass
class Costs:
    """Seconds. The defaults are near a GPU's: steps of 20 ms, 30,000 prompt tokens/s."""

    step_s: float = 0.02
    sequence_s: float = 0.0001
    prefill_token_s: float = 1 / 30_000


class SimulatedEngine:
    def __init__(self, num_blocks, block_tokens=16, max_running=100_000, costs=None):
        self.num_blocks, self.block_tokens, self.max_running, self.costs = (
            num_blocks,
            block_tokens,
            max_running,
            costs or Costs(),
        )
        self.free, self.running, self.waiting = num_blocks, [], deque()
        self.preemptions, self.generated, self.now_s = 0, 0, 0.0

    def submit(self, sequence):
        self.waiting.append(sequence)

    def load(self):
        usage = 1 - self.free / self.num_blocks
        return fakes.load(
            len(self.running),
            len(self.waiting),
            usage,
            self.preemptions,
            self.num_blocks * self.block_tokens,
        )

    def _blocks(self, tokens):
        return -(-tokens // self.block_tokens)

    def step(self):
        """One forward pass; the sequences that it finished."""
        index, preempted = 0, False
        while index < len(self.running):
            sequence = self.running[index]
            want = self._blocks(sequence.tokens + 1) - sequence.blocks
            while want > self.free:
                victim = self.running.pop()
                self.free += victim.blocks
                victim.blocks = 0
                self.waiting.appendleft(victim)
                self.preemptions, preempted = self.preemptions + 1, True
                if victim is sequence:
                    break
            else:
                self.free -= want
                sequence.blocks += want
                index += 1
        prefilled = 0
        while (
            not preempted
            and self.waiting
            and len(self.running) < self.max_running
            and prefilled < 8192
        ):
            want = self._blocks(self.waiting[0].tokens + 1)
            if want > self.free:
                break
            sequence = self.waiting.popleft()
            self.free -= want
            sequence.blocks = want
            prefilled += sequence.tokens
            self.running.append(sequence)
        self.now_s += (
            self.costs.step_s
            + self.costs.sequence_s * len(self.running)
            + self.costs.prefill_token_s * prefilled
        )
        finished = []
        for sequence in self.running:
            sequence.tokens += 1
            self.generated += 1
            if sequence.tokens >= sequence.length:
                finished.append(sequence)
                self.free += sequence.blocks
        self.running = [sequence for sequence in self.running if sequence.tokens < sequence.length]
        return finished


@dataclass(frozen=True)
class Simulation:
    """Figures of the time after the warm-up."""

    tokens_per_s: float
    preemptions_per_rollout: float
    limits: list[int]  # at every look


def simulate(
    admission,
    engines,
    lengths,
    duration_s,
    warm_up_s,
    look_s=0.5,
    seed=0,
    on_look=lambda now_s: None,
):
    """Use all permits, each on the idlest engine. `lengths(random)` gives (prompt, length)."""
    chance, limits, next_look_s, num_finished = random.Random(seed), [], 0.0, 0
    totals = None
    while (now_s := min(engine.now_s for engine in engines)) < duration_s:
        if totals is None and now_s >= warm_up_s:
            totals = (
                now_s,
                sum(engine.generated for engine in engines),
                sum(engine.preemptions for engine in engines),
            )
            num_finished, limits = 0, []
        while admission.free:
            min(engines, key=lambda engine: len(engine.running) + len(engine.waiting)).submit(
                Sequence(*lengths(chance))
            )
            admission.take()
        finished = len(min(engines, key=lambda engine: engine.now_s).step())
        num_finished += finished
        admission.give_back(finished)
        if now_s >= next_look_s:
            on_look(now_s)
            admission.observe({index: engine.load() for index, engine in enumerate(engines)})
            limits.append(admission.limit)
            next_look_s += look_s
    seconds = now_s - totals[0]
    return Simulation(
        (sum(engine.generated for engine in engines) - totals[1]) / seconds,
        (sum(engine.preemptions for engine in engines) - totals[2]) / num_finished,
        limits,
    )
