"""Shared by the tests: task uses of every kind, character tokenizers, and a Qwen-like folder."""

import asyncio
import inspect
import json
import tempfile
import timeit
from collections.abc import Callable, Sequence
from pathlib import Path

import tokenizers
from tokenizers import models, pre_tokenizers

from orrery.manifest.publish import sha256_of_data
from orrery.manifest.schema import Model, TaskUse
from orrery.tasks.chat import Renderer, vocab_size, write_tokenizer
from orrery.tasks.task import Judgement, Message, Problem, Task

ALPHABET = "abcdefghijklmnopqrstuvwxyz0123456789+-*() .,?"

_folder = tempfile.TemporaryDirectory()
PROBLEMS = Path(_folder.name) / "problems.jsonl"
PROBLEMS.write_text(
    "".join(f'{{"q": "{a} + {b}", "a": "{a + b}"}}\n' for a in range(60) for b in range(60))
)
ARGS = {
    "dataset": {
        "source": {
            "kind": "source",
            "path": str(PROBLEMS),
            "sha256": sha256_of_data(PROBLEMS),
            "split": None,
        },
        "held_out": {"kind": "fraction", "fraction": 0.25},
        "split": "train",
        "where": {},
        "system": None,
        "prompt": "{q}",
        "answer": "{a}",
        "answer_pattern": None,
        "verdict": {"kind": "exact", "ignore_case": True, "pattern": None},
    },
    "reverse_text": {
        "alphabet": "abcdef",
        "min_length": 4,
        "max_length": 7,
        "instruction": "reverse ",
        "split": "train",
    },
    "calculator": {
        "max_operand": 30,
        "num_operations": 2,
        "operators": "+-*",
        "call_reward": 0.25,
        "call_syntax": "chat_format",
        "split": "train",
    },
    "reasoning_gym": {"family": "spell_backward", "config": {"min_word_len": 5}, "split": "train"},
    "reverse_words": {"min_words": 3, "max_words": 4, "instruction": "reverse ", "split": "train"},
    "few_shot": {
        "kind": "calculator",
        "args": {
            "max_operand": 30,
            "num_operations": 2,
            "operators": "+-",
            "call_reward": 0.25,
            "call_syntax": "text",
            "split": "train",
        },
        "num_examples": 2,
        "system": "be brief",
    },
    "lengths": {"median_tokens": 100, "sigma": 1.0, "max_tokens": 4000, "prompt_words": 5},
}


def fastest_s(call: Callable[[], object]) -> float:
    """Return the shortest of several times of `call`, as other programs lengthen some."""
    return min(timeit.repeat(call, number=1, repeat=20))


def judged(task: Task, problem: Problem, said: Sequence[Message]) -> Judgement:
    """Return the judgement of a chat that goes on with `said`, also if `judge` is a coroutine."""

    async def verdict() -> Judgement:
        made = task.judge(problem, [*problem.messages, *said])
        return await made if inspect.isawaitable(made) else made

    return asyncio.run(verdict())


def task_use(kind: str, seed: int = 3, **args) -> TaskUse:
    return TaskUse(
        name="it",
        kind=kind,
        args={**ARGS.get(kind, {}), **args},
        weight=1.0,
        seed=seed,
        max_turns=3,
    )


def character_model(alphabet: str = ALPHABET, **changes) -> Model:
    fields = {
        "family": "qwen3",
        "init": {"kind": "random", "seed": 0, "std": 0.02},
        "tokenizer": {"kind": "characters", "alphabet": alphabet},
        "vocab_size": vocab_size(alphabet),
        "hidden_size": 8,
        "intermediate_size": 8,
        "num_layers": 1,
        "num_heads": 1,
        "num_kv_heads": 1,
        "head_dim": 8,
        "max_positions": 64,
        "rope_theta": 1e4,
        "rms_norm_eps": 1e-6,
        "tie_embeddings": True,
        "moe": None,
        "mla": None,
        "hf_config": None,
        "num_mtp_layers": 0,
        "fp8": None,
        "rotary_fraction": 1.0,
        "rope_scaling": None,
        "attention_bias": False,
        "qk_norm": True,
    }
    return Model.model_validate(fields | changes)


def character_renderer(folder: Path, alphabet: str = ALPHABET) -> Renderer:
    write_tokenizer(character_model(alphabet), folder)
    return Renderer(folder)


CHATML = """\
{%- if tools %}
    {{- '<|im_start|>system\\nTools: ' }}{{- tools | tojson }}{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == "assistant" %}
        {%- generation %}
        {{- '<|im_start|>assistant\\n' }}{{- message.content }}
        {%- for call in message.tool_calls or [] %}
            {{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' }}
            {{- call.function.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
        {%- endgeneration %}
    {%- elif message.role == "tool" %}
        {%- if loop.first or messages[loop.index0 - 1].role != "tool" %}
            {{- '<|im_start|>user' }}
        {%- endif %}
        {{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != "tool" %}
            {{- '<|im_end|>\\n' }}
        {%- endif %}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""


def write_qwen_like(folder: Path) -> Path:
    """Write a byte-level tokenizer with ChatML turns, Hermes calls and two stop tokens."""
    folder.mkdir(parents=True, exist_ok=True)
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("h", "e"), ("l", "l"), ("he", "ll"), ("hell", "o")]
    vocab = {token: i for i, token in enumerate([*letters, *("".join(pair) for pair in merges)])}
    tokenizer = tokenizers.Tokenizer(models.BPE(vocab, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    stops = [tokenizer.token_to_id("<|endoftext|>"), tokenizer.token_to_id("<|im_end|>")]
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": {"content": "<|im_end|>"},
        "pad_token": "<|endoftext|>",
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(CHATML)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": stops}))
    return folder


def completion(renderer: Renderer, message: Message) -> list[int]:
    """Return the tokens of an assistant's message, with the end of turn."""
    return renderer.encode(renderer._assistant_text(message))
