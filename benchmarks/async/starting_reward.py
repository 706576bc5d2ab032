"""Measure a pretrained policy's reward on held-out problems before training, without an engine.

    python benchmarks/async/starting_reward.py smollm2_arithmetic_seed_1 smollm2_calculator_seed_1

- The policy is transformers' model of `model.init.path` (benchmarks/async/smollm2.py) in float32.
  Sampling, prompts, replies, parsing and judging are those of the orchestrator.
- A task suits RL if its mean reward is between 0.05 and 0.3. The figure is the lowest mean.
- The common beginning of all prompts is computed once. The rollouts of a turn run as one batch.
"""

import asyncio
import copy
import inspect
import os
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest, PretrainedInit
from orrery.tasks import make
from orrery.tasks.chat import Renderer
from orrery.tasks.task import Judgement, Message, Problem, Task

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, parser_of, record


class Policy:
    """Sample continuations of token lists, all as one batch."""

    def __init__(self, folder: Path, stops: list[int], temperature: float, seed: int):
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.stops, self.temperature = stops, temperature
        self.generator = torch.Generator().manual_seed(seed)

    @torch.inference_mode()
    def sample(self, prompts: list[list[int]], max_tokens: int) -> list[list[int]]:
        """Return each prompt's sampled tokens, up to `max_tokens` or its stop token, inclusive."""
        first = prompts[0]
        shared = min(
            next(
                (i for i, token in enumerate(each) if i >= len(first) or token != first[i]),
                len(each),
            )
            for each in prompts
        )
        # Each prompt keeps its last token, because sampling continues from there.
        shared = min(shared, min(map(len, prompts)) - 1)
        cache = DynamicCache()
        if shared:
            cache = self.model(
                torch.tensor([first[:shared]]), past_key_values=cache, use_cache=True
            ).past_key_values
            cache.batch_repeat_interleave(len(prompts))
        rest = [each[shared:] for each in prompts]
        width = max(map(len, rest))
        tokens = torch.tensor([[self.stops[0]] * (width - len(each)) + each for each in rest])
        # 1 for tokens, 0 for padding.
        own = torch.tensor([[0] * (width - len(each)) + [1] * len(each) for each in rest])
        mask = torch.cat([torch.ones(len(prompts), shared, dtype=torch.int64), own], dim=1)
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, shared:]
        sampled: list[list[int]] = [[] for _ in prompts]
        for _ in range(max_tokens):
            out = self.model(
                tokens,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
            )
            cache = out.past_key_values
            probabilities = torch.softmax(out.logits[:, -1].float() / self.temperature, dim=-1)
            following = torch.multinomial(probabilities, 1, generator=self.generator)
            for said, token in zip(sampled, following[:, 0].tolist(), strict=True):
                if not said or said[-1] not in self.stops:
                    said.append(token)
            if all(said[-1] in self.stops for said in sampled):
                break
            tokens, positions = following, positions[:, -1:] + 1
            mask = torch.cat([mask, torch.ones_like(following)], dim=1)
        return sampled


async def judged(
    task: Task, problems: list[Problem], chats: list[list[Message]]
) -> list[Judgement]:
    verdicts = [task.judge(problem, chat) for problem, chat in zip(problems, chats, strict=True)]
    return [await verdict if inspect.isawaitable(verdict) else verdict for verdict in verdicts]


def play(
    manifest: Manifest, policy: Policy, renderer: Renderer, num_problems: int
) -> list[dict[str, Any]]:
    """Return a row per held-out task: mean reward with its standard error, metrics, samples."""
    limit = manifest.orchestrator.sampling.max_tokens_per_turn
    rows = []
    for use in manifest.tasks.evaluation:
        task, start_s = make(use), time.perf_counter()
        problems = [task.problem(index) for index in range(num_problems)]
        chats: list[list[Message]] = [list(problem.messages) for problem in problems]
        prompts = [renderer.prompt(problem.messages, problem.tools) for problem in problems]
        going, num_tokens = list(range(num_problems)), 0
        for turn in range(use.max_turns):
            said = policy.sample([prompts[i] for i in going], limit)
            still = []
            for i, ids in zip(going, said, strict=True):
                num_tokens += len(ids)
                chats[i].append(renderer.parse(ids))
                ended = ids[-1] in renderer.stop_token_ids
                reply = (
                    task.reply(problems[i], chats[i])
                    if ended and turn + 1 < use.max_turns
                    else None
                )
                if reply:
                    assert isinstance(reply, list), "the tasks measured here do not await"
                    prompts[i] = [*prompts[i], *ids, *renderer.next_turn(reply)]
                    chats[i] += reply
                    still.append(i)
            going = still
            if not going:
                break
        verdicts = asyncio.run(judged(task, problems, chats))
        rewards = np.array([verdict.reward for verdict in verdicts])
        rows.append(
            {
                "variant": manifest.name
                if len(manifest.tasks.evaluation) == 1
                else f"{manifest.name}/{use.name}",
                "value": float(rewards.mean()),
                "unit": "reward",
                "goal": 0.05,
                "better": "higher",
                "standard_error": float(rewards.std(ddof=1) / np.sqrt(len(rewards))),
                "num_rollouts": len(rewards),
                "share_above_zero": float((rewards > 0).mean()),
                "metrics": {
                    name: float(np.mean([verdict.metrics[name] for verdict in verdicts]))
                    for name in verdicts[0].metrics
                },
                "mean_sampled_tokens": num_tokens / num_problems,
                "prompt_tokens": max(map(len, prompts)),
                "wall_s": time.perf_counter() - start_s,
                "said": [
                    [message.content for message in chat[len(p.messages) :]]
                    for p, chat in zip(problems[:4], chats[:4], strict=True)
                ],
            }
        )
        print(rows[-1], flush=True)
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "manifests", nargs="+", metavar="RUN", help="names of checked-in manifests, or their files"
    )
    parser.add_argument("--problems", type=int, default=48, metavar="N")
    parser.add_argument("--seed", type=int, default=0, metavar="S", help="of the sampling")
    parser.add_argument(
        "--out", type=Path, default=Path(__file__).with_suffix(".json"), metavar="FILE"
    )
    options = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    rows: list[dict[str, Any]] = []
    policy: Policy | None = None
    source: dict[str, str] = {}
    for name in options.manifests:
        manifest = load(name if name.endswith(".json") else ROOT / "manifests" / f"{name}.json")
        init = manifest.model.init
        assert isinstance(init, PretrainedInit), f"{name}: its weights are random"
        source = {"policy": init.path, "revision": init.revision}
        folder = ROOT / init.path
        renderer = Renderer(folder)
        if policy is None:
            policy = Policy(
                folder,
                renderer.stop_token_ids,
                manifest.orchestrator.sampling.temperature,
                options.seed,
            )
        rows += play(manifest, copy.copy(policy), renderer, options.problems)
    record(
        options.out,
        figure="reward of the unmodified pretrained policy on held-out problems, "
        "lowest of the tasks",
        value=min(row["value"] for row in rows),
        unit="reward",
        goal=0.05,
        better="higher",
        rows=rows,
        details=source,
    )


if __name__ == "__main__":
    main()
