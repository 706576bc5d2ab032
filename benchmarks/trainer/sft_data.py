"""Measure how fast SFT's chats become tokens, so that a step never waits for them.

The chats are Python's own sources (five messages, about 2,000 tokens each), in JSONL and in Arrow
files as `save_to_disk` writes them. The tokenizer is a byte-level BPE of 32,000 tokens with a
ChatML template. Measured are tokens a second of the prefetch thread by loss mask, the Python speed
left to other threads, opening the data, comparing it with validation examples, and the wait of a
step at an 8-GPU host's speed (a sleep).

    python benchmarks/trainer/sft_data.py
"""

import hashlib
import json
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.schema import ChatDataset, ChatFile
from orrery.tasks.chat import Renderer
from orrery.trainer import sft_data
from orrery.trainer.parallel.world import World
from orrery.trainer.sft import refuse_shared
from orrery.trainer.sft_data import Chat, Chats, Examples, open_chats, prefetch
from record import parser_of, record

VOCABULARY, CHAT_CHARACTERS, NUM_CHATS, BATCH = 32_000, 7_000, 1_500, 64
STEP_TOKENS_PER_S = 8 * 9_000  # an 8-GPU host that trains 9,000 tokens a second on each
TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m.role + '\\n' + m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
WORDS = (
    r"'(?:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def source_text() -> str:
    folder = Path(sysconfig.get_path("stdlib"))
    texts, size = [], 0
    for path in sorted(folder.glob("*.py")) + sorted(folder.glob("*/*.py")):
        if "site-packages" not in path.parts:
            texts.append(path.read_text(errors="ignore"))
            size += len(texts[-1])
            if size > NUM_CHATS * CHAT_CHARACTERS:
                break
    return "".join(texts)


def write_tokenizer(folder: Path, text: str) -> Renderer:
    tokenizer = tokenizers.Tokenizer(models.BPE())
    split = pre_tokenizers.Split(tokenizers.Regex(WORDS), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [split, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<|im_start|>", "<|im_end|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=specials,
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        (text[at : at + 10_000] for at in range(0, len(text), 10_000)), trainer
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"eos_token": "<|im_end|>", "chat_template": TEMPLATE})
    )
    return Renderer(folder)


def chats_of(text: str) -> Iterator[list[dict[str, str]]]:
    quarter = CHAT_CHARACTERS // 4
    for index in range(NUM_CHATS):
        begin = index * CHAT_CHARACTERS % max(1, len(text) - CHAT_CHARACTERS)
        parts = [text[begin + n * quarter : begin + (n + 1) * quarter] for n in range(4)]
        yield [
            {"role": role, "content": part}
            for role, part in zip(("system", "user", "assistant", "user"), parts, strict=True)
        ] + [{"role": "assistant", "content": "Yes."}]


def write_file(path: Path, chats: list[Any]) -> ChatFile:
    path.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return ChatFile(
        kind="chat_file", path=str(path), sha256=hashlib.sha256(path.read_bytes()).hexdigest()
    )


def write_dataset(folder: Path, chats: list[Any]) -> ChatDataset:
    import pyarrow as pa

    folder.mkdir()
    table = pa.table({"messages": chats})
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=1000)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "0"})
    )
    return ChatDataset(
        kind="dataset", path=str(folder), split=None, column="messages", fingerprint="0"
    )


def seconds(work: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def tokenising(chats: Chats, renderer: Renderer, roles: tuple) -> dict[str, Any]:
    """Measure tokens a second over all chats, a batch at a time."""
    examples = Examples(chats, renderer, roles, 1 << 20, 1 << 20)
    begin = time.perf_counter()
    num_tokens = sum(
        examples.columns(range(at, min(at + BATCH, len(chats)))).num_tokens
        for at in range(0, len(chats), BATCH)
    )
    spent = time.perf_counter() - begin
    return {
        "variant": f"{type(chats).__name__}, {'+'.join(roles)}",
        "value": num_tokens / spent,
        "unit": "tokens/s",
        "chats_per_s": len(chats) / spent,
        "tokens_per_chat": num_tokens / len(chats),
    }


def left_to_others(chats: Chats, renderer: Renderer) -> dict[str, Any]:
    """Measure a Python loop's speed beside the tokenising thread, as a share of its speed alone."""

    def turns_per_s(until: Callable[[], bool]) -> float:
        turns, begin = 0, time.perf_counter()
        while not until():
            turns += 1
        return turns / (time.perf_counter() - begin)

    end = time.perf_counter() + 1
    alone = turns_per_s(lambda: time.perf_counter() > end)
    with ThreadPoolExecutor(1) as pool:
        job = pool.submit(tokenising, chats, renderer, ("assistant",))
        beside = turns_per_s(lambda: job.done() and time.perf_counter() > 0)
    return {
        "variant": "Python of another thread meanwhile",
        "value": beside / alone,
        "unit": "share of its speed alone",
    }


def waiting(chats: Chats, renderer: Renderer) -> dict[str, Any]:
    """Measure the share of a step spent waiting for tokens, at an 8-GPU host's speed."""
    examples = Examples(chats, renderer, ("assistant",), 1 << 20, 1 << 20)
    num_steps, waited, trained = 6, 0.0, 0.0
    with prefetch(
        examples.columns(range(step * BATCH, (step + 1) * BATCH)) for step in range(num_steps)
    ) as take:
        for step in range(num_steps):
            begin = time.perf_counter()
            columns = take()
            if step:  # step 0 has no training to overlap
                waited += time.perf_counter() - begin
            step_s = columns.num_tokens / STEP_TOKENS_PER_S
            time.sleep(step_s)
            trained += step_s
    return {
        "variant": f"waited for, beside steps of {STEP_TOKENS_PER_S} tokens/s",
        "value": waited / trained,
        "unit": "share of a step",
    }


def main() -> None:
    parser_of(__doc__).parse_args()
    sft_data.KEPT_TOKENS = 0  # keep no tokens
    torch.set_num_threads(1)
    text = source_text()
    with tempfile.TemporaryDirectory() as folder:
        at = Path(folder)
        renderer, held = write_tokenizer(at, text), list(chats_of(text))
        data: list[ChatFile | ChatDataset] = [
            write_file(at / "chats.jsonl", held),
            write_dataset(at / "dataset", held),
        ]
        num_bytes = (at / "chats.jsonl").stat().st_size
        rows: list[dict[str, Any]] = []
        opened: dict[str, Chats] = {}
        for one in data:
            begin_s = time.perf_counter()
            opened[one.kind] = open_chats(one, "data")
            spent = time.perf_counter() - begin_s
            rows.append(
                {"variant": f"open {one.kind}", "value": spent, "unit": "s", "bytes": num_bytes}
            )
        for chats in opened.values():
            rows.append(tokenising(chats, renderer, ("assistant",)))
            alone = World(0, 1, torch.device("cpu"), None)
            other = [Chat("", chats[0].messages[:1])]
            spent = seconds(partial(refuse_shared, other, chats, alone))
            rows.append(
                {
                    "variant": f"compare {type(chats).__name__}",
                    "value": len(chats) / spent,
                    "unit": "chats/s",
                }
            )
        file = opened["chat_file"]
        rows.append(tokenising(file, renderer, ("system", "user", "assistant", "tool")))
        rows += [left_to_others(file, renderer), waiting(file, renderer)]
    record(
        Path(__file__).with_suffix(".json"),
        figure="SFT: chats become tokens",
        value=next(
            row["value"] for row in rows if row["variant"].startswith("FileChats, assistant")
        ),
        unit="tokens/s",
        goal=STEP_TOKENS_PER_S,
        better="higher",
        details={"chats": NUM_CHATS, "vocabulary": VOCABULARY, "batch": BATCH, "bytes": num_bytes},
        rows=rows,
    )
    for row in rows:
        print(f"  {row['variant']}: {row['value']:.4g} {row['unit']}")


if __name__ == "__main__":
    main()
