"""SFT's data and validation: datasets on disk, tokenisation on demand, losses without training.

`reversed_words/` is a DatasetDict of `datasets` 5.2.0: 48 training chats in 2 shards and 8
validation chats, each a word and its reversal, with a column `length` beside `messages`.
"""

import hashlib
import json
import shutil
import sys
import threading
import time
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch
from replaced import replaced
from safetensors.torch import load_file
from trainer_cases import forked_rank, make_learner, manifest

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import canonical_json
from orrery.models import build, weights
from orrery.runtime.metrics import read
from orrery.runtime.role_context import parse_role
from orrery.tasks import Message, Tool, ToolCall
from orrery.tasks.chat import CHARACTER_TEMPLATE, Renderer, write_tokenizer
from orrery.trainer import __main__ as trainer_main
from orrery.trainer import sft, sft_data
from orrery.trainer.__main__ import initialize
from orrery.trainer.parallel.world import World
from orrery.trainer.sft import ValidationSet, load_validation
from orrery.trainer.sft_data import Examples, batches, load_examples, open_chats, prefetch
from orrery.wire import checkpoints
from orrery.wire.columns import Columns

pa = pytest.importorskip("pyarrow")
WORDS = Path(__file__).parent / "reversed_words"
ALONE = World(0, 1, torch.device("cpu"), None)


def dataset(split: str | None = "train", path: Path = WORDS, **changes) -> dict:
    folder = path if split is None else path / split
    fingerprint = (
        json.loads((folder / "state.json").read_text())["_fingerprint"] if folder.exists() else "0"
    )
    return {
        "kind": "dataset",
        "path": str(path),
        "split": split,
        "column": "messages",
        "fingerprint": fingerprint,
        **changes,
    }


def sft_spec(mesh=None, data=None, **changes):
    sft = manifest().stages.sft.model_dump() | {"num_steps": 6, "data": data or dataset()} | changes
    return manifest(mesh=mesh, stages={"sft": sft})


def validated(data=None, num_examples: int = 8, interval_steps: int = 4) -> dict:
    return {
        "interval_steps": interval_steps,
        "num_examples": num_examples,
        "data": data or dataset("validation"),
    }


def opened(**fields):
    return open_chats(sft_spec(data=fields).stages.sft.data, "stages.sft.data")


def write_chats(path: Path, chats: list[list[dict]], **beside) -> dict:
    content = "".join(json.dumps({"messages": chat, **beside}) + "\n" for chat in chats).encode()
    path.write_bytes(content)
    return {"kind": "chat_file", "path": str(path), "sha256": hashlib.sha256(content).hexdigest()}


def write_arrow(folder: Path, chats: list, rows_a_batch: int = 2, **beside: list) -> dict:
    """A dataset of one file in the form of `save_to_disk`; `beside` are more columns."""
    folder.mkdir()
    table = pa.table({"messages": chats, **beside})
    with (
        pa.OSFile(str(folder / "data.arrow"), "wb") as sink,
        pa.ipc.new_stream(sink, table.schema) as stream,
    ):
        stream.write_table(table, max_chunksize=rows_a_batch)
    (folder / "state.json").write_text(
        json.dumps({"_data_files": [{"filename": "data.arrow"}], "_fingerprint": "f00d"})
    )
    return dataset(None, folder)


def word_chats(split: str) -> list[list[dict]]:
    chats = opened(**dataset(split))
    return [
        [{"role": m.role, "content": m.content} for m in chats[i].messages]
        for i in range(len(chats))
    ]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    write_tokenizer(manifest().model, folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


@pytest.fixture(scope="module")
def start(tmp_path_factory) -> Path:
    """A run's directory after its init stage."""
    run_dir = tmp_path_factory.mktemp("start")
    (run_dir / "manifest.json").write_bytes(canonical_json(sft_spec()))
    initialize(parse_role("trainer", ["--run-dir", str(run_dir), "--stage", "init"]))
    return run_dir


def start_run(folder: Path, spec, start: Path) -> Path:
    """A run after init; every spec here has the same model."""
    (folder / "weights").mkdir(parents=True)
    (folder / "weights" / "init").symlink_to(start / "weights" / "init")
    (folder / "manifest.json").write_bytes(canonical_json(spec))
    return folder


def sft_stage(run_dir: Path, *more: str) -> None:
    """Run in this process, and close the role's files as a role's end does."""
    ctx = parse_role("trainer", ["--run-dir", str(run_dir), "--stage", "sft", *more])
    with closing(ctx.metrics):
        trainer_main.run_sft(ctx)


def run_here(folder: Path, spec, start: Path) -> tuple[list[dict], bytes]:
    """(the trainer's rows, the exported weights) of the SFT stage, done in this process."""
    run_dir = start_run(folder, spec, start)
    sft_stage(run_dir)
    return read(run_dir / "metrics" / "trainer.0.jsonl"), (
        run_dir / "weights" / "sft" / "model.safetensors"
    ).read_bytes()


# Datasets on disk


def test_a_dataset_and_a_file_of_the_same_chats_are_the_same_examples(tmp_path, tokenizer):
    chats = word_chats("train")
    assert len(chats) == 48 and all(
        asked["content"] == answered["content"][::-1] for asked, answered in chats
    )
    specs = [sft_spec(), sft_spec(data=write_chats(tmp_path / "chats.jsonl", chats))]
    first, second = (load_examples(spec, tokenizer).columns(range(48)) for spec in specs)
    assert first.token["trained"].sum() == sum(
        len(answered["content"]) + 1 for _, answered in chats
    )
    for name, column in first.token.items():
        np.testing.assert_array_equal(column, second.token[name])
    np.testing.assert_array_equal(first.offsets, second.offsets)


def test_calls_and_missing_fields_of_arrow_are_messages(tmp_path):
    call = {"function": {"name": "calculator", "arguments": '{"input": "1+2"}'}}
    chats = [
        [
            {"role": "user", "content": "1+2"},
            {"role": "assistant", "content": None, "tool_calls": [call]},
        ],
        [
            {"role": "tool", "content": "3", "name": "calculator"},
            {"role": "assistant", "content": "3"},
        ],
        [{"role": "system", "content": "be brief"}],
    ]
    read_back = opened(**write_arrow(tmp_path / "calls", chats))
    assert [read_back[i].messages for i in range(3)] == [
        [
            Message("user", "1+2"),
            Message("assistant", "", (ToolCall("calculator", {"input": "1+2"}),)),
        ],
        [Message("tool", "3", name="calculator"), Message("assistant", "3")],
        [Message("system", "be brief")],
    ]


FUNCTION = {
    "name": "calculator",
    "description": "adds",
    "parameters": {
        "type": "object",
        "properties": {"input": {"type": "string", "default": "1"}, "unused": None},
    },
}
WITHOUT_NULL = FUNCTION | {
    "parameters": {"type": "object", "properties": {"input": {"type": "string", "default": "1"}}}
}
USER, ANSWER = {"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}
CALLS = {
    "role": "assistant",
    "tool_calls": [
        {
            "id": f"c{n}",
            "type": "function",
            "function": {"name": "calculator", "arguments": {"input": str(n)}},
        }
        for n in (1, 2)
    ],
}


def result(call_id: str) -> dict:
    return {"role": "tool", "content": "3", "tool_call_id": call_id}


@pytest.mark.parametrize(
    ("tools", "of_file"),
    [
        ([{"type": "function", "function": FUNCTION}], FUNCTION),
        ([FUNCTION], FUNCTION),
        (json.dumps([WITHOUT_NULL]), WITHOUT_NULL),
        ([json.dumps(WITHOUT_NULL)], WITHOUT_NULL),
    ],
    ids=["as templates have it", "bare", "text", "list of texts"],
)
def test_tools_are_read_in_every_form_and_notes_are_not(tmp_path, tools, of_file):
    notes = {"id": 7, "source": "here", "metadata": {"a": 1}, "prompt": "ab"}
    columns = {name: [value, value] for name, value in notes.items()} | {"tools": [None, tools]}
    of_dataset = opened(**write_arrow(tmp_path / "tools", [[USER, ANSWER]] * 2, **columns))
    assert of_dataset[0].tools == ()
    assert of_dataset[1].tools == (Tool(**WITHOUT_NULL),), "null is absent in Arrow"
    chat = opened(**write_chats(tmp_path / "tools.jsonl", [[USER, ANSWER]], tools=tools, **notes))[
        0
    ]
    assert (
        chat.messages
        == of_dataset[1].messages
        == [Message("user", "ab"), Message("assistant", "ba")]
    )
    assert chat.tools == (Tool(**of_file),)


def test_results_name_the_calls_that_they_answer(tmp_path):
    chat = opened(
        **write_chats(tmp_path / "calls.jsonl", [[USER, CALLS, result("c1"), result("c2"), ANSWER]])
    )[0]
    assert chat.messages[1:3] == [
        Message(
            "assistant",
            "",
            (ToolCall("calculator", {"input": "1"}), ToolCall("calculator", {"input": "2"})),
        ),
        Message("tool", "3"),
    ]


@pytest.mark.parametrize(
    ("chat", "beside", "sentence"),
    [
        (
            [USER, ANSWER | {"reasoning_content": "hm"}],
            {},
            r"message 1 \(assistant\) has the field 'reasoning_content', which is not read; remove",
        ),
        (
            [USER, {"role": "assistant", "value": "ba"}],
            {},
            r"message 1 \(assistant\) has the field 'value', which is not read",
        ),
        (
            [USER, {"role": "assistant"}],
            {},
            r"message 1 \(assistant\) has no content or tool_calls; add it",
        ),
        (
            [USER | {"tool_calls": CALLS["tool_calls"]}, ANSWER],
            {},
            r"message 0 \(user\) has the field 'tool_calls', which is not read",
        ),
        (
            [USER, CALLS, result("c2"), result("c1"), ANSWER],
            {},
            r"message 2 \(tool\) has the tool_call_id 'c2', but the next call is",
        ),
        (
            [USER, CALLS, result("c1"), result("c2"), result("c3"), ANSWER],
            {},
            r"message 4 \(tool\) has the tool_call_id 'c3', but no call before it waits for a "
            r"result",
        ),
        (
            [USER, {"role": "assistant", "tool_calls": [{"function": FUNCTION}]}],
            {},
            "a call of message 1 has the field 'description', which is not",
        ),
        (
            [USER, ANSWER],
            {"functions": [FUNCTION]},
            "'functions' would change the chat, but is not read; use messages and tools",
        ),
        (
            [USER, ANSWER],
            {"chat_template_kwargs": {"thinking": True}},
            "'chat_template_kwargs' would change the chat",
        ),
        (
            [USER, ANSWER],
            {"tools": [FUNCTION | {"strict": True}]},
            "tool 0 has the field 'strict', which is not read; remove it",
        ),
        (
            [USER, ANSWER],
            {"tools": [{"name": "calculator"}]},
            "tool 0: .*missing.*`description`; give it name",
        ),
        ([USER, ANSWER], {"tools": 3}, "not a chat of the form"),
    ],
)
def test_what_would_be_lost_is_refused_by_its_name(tmp_path, chat, beside, sentence):
    with pytest.raises(OrreryError, match=r"lost\.jsonl:1: " + sentence):
        opened(**write_chats(tmp_path / "lost.jsonl", [chat], **beside))[0]
    if beside.get("tools") != 3:
        with pytest.raises(OrreryError, match="lost: row 0: " + sentence):
            opened(
                **write_arrow(
                    tmp_path / "lost", [chat], **{name: [value] for name, value in beside.items()}
                )
            )[0]


def test_a_row_without_tools_may_say_so_with_an_empty_text(tmp_path):
    assert opened(**write_chats(tmp_path / "none.jsonl", [[USER, ANSWER]], tools=""))[0].tools == ()


def test_null_and_empty_keys_of_a_message_are_no_obstacle(tmp_path):
    empty = {"reasoning_content": None, "tool_calls": [], "refusal": None}
    chats = opened(
        **write_chats(
            tmp_path / "empty.jsonl", [[USER | empty, ANSWER | empty]], tools=None, functions=[]
        )
    )
    assert chats[0].messages == [Message("user", "ab"), Message("assistant", "ba")]
    assert chats[0].tools == ()


def test_declared_tools_stand_in_the_tokens_as_in_rl(tmp_path, tokenizer):
    function = WITHOUT_NULL | {"name": "cab"}
    data = write_chats(
        tmp_path / "tools.jsonl",
        [[USER, ANSWER]],
        tools=[{"type": "function", "function": function}],
    )
    template = (
        "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}" + CHARACTER_TEMPLATE
    )
    announcing = tmp_path / "announcing"
    shutil.copytree(tokenizer, announcing)
    (announcing / "chat_template.jinja").write_text(template)
    renderer = Renderer(announcing)
    columns = Examples(opened(**data), renderer, ("assistant",), 64, 64).columns([0])
    prompt = renderer.prompt([Message("user", "ab")], [Tool(**function)])
    assert columns.token["token_id"].tolist() == prompt + renderer.encode("ba<|end|>")
    assert renderer.decode(prompt).startswith("cab<|user|>")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"fingerprint": "beef"},
            r"data\.fingerprint: .*reversed_words/train has 5d8f9d93110c4621, the manifest "
            r"says beef",
        ),
        (
            {"split": "test"},
            r"data\.split: .*reversed_words has no 'test'. Choose from train, validation",
        ),
        (
            {"split": None},
            r"data\.split: .*reversed_words is a folder of splits. Choose from train, validation",
        ),
        (
            {"path": str(WORDS / "train")},
            r"data\.split: .*train is not a dataset of several splits.* no 'train'. Set it to null",
        ),
        (
            {"column": "chat"},
            r"data\.column: .*data-00000-of-00002.arrow has no 'chat'. Choose from length, "
            r"messages",
        ),
        ({"column": "length"}, r"reversed_words/train: row 0: not a chat of the form"),
        (
            {"path": str(WORDS / "elsewhere"), "split": None},
            r"data\.path: .*Name a folder that `Dataset.save_to_disk` wrote",
        ),
    ],
)
def test_a_dataset_that_is_not_what_the_manifest_says_is_one_sentence(tokenizer, changes, sentence):
    with pytest.raises(OrreryError, match=sentence):
        load_examples(sft_spec(data=dataset() | changes), tokenizer)


@pytest.mark.parametrize(
    ("message", "sentence"),
    [
        (
            {"role": "human", "content": "ab"},
            "row 1: not a chat .* role 'human' is none of system, user, assistant, tool",
        ),
        (
            {"role": "user", "content": "a" * 80},
            "row 1: 86 tokens do not fit trainer.memory.max_tokens_per_micro_batch 64; raise it",
        ),
        (
            {"role": "user", "thinking": "ab"},
            r"row 1: message 0 \(user\) has the field 'thinking', which is not read; "
            r"remove it, or use one of",
        ),
        ({"role": "user", "content": None}, r"row 1: message 0 \(user\) has no content; add it"),
    ],
)
def test_a_row_that_cannot_be_trained_on_is_named(tmp_path, tokenizer, message, sentence):
    answer = {"role": "assistant", "content": "ba"}
    data = write_arrow(
        tmp_path / "rows", [[{"role": "user", "content": "ab"}, answer], [message, answer]]
    )
    with pytest.raises(OrreryError, match=sentence):
        load_examples(replaced(sft_spec(data=data), "model", max_positions=4096), tokenizer)


def test_a_chat_that_is_longer_than_the_model_knows_is_named_though_a_micro_batch_holds_it(
    tmp_path, tokenizer
):
    answer = {"role": "assistant", "content": "ba"}
    chats = [[{"role": "user", "content": "a" * num}, answer] for num in (58, 59)]
    spec = sft_spec(data=write_chats(tmp_path / "chats.jsonl", chats))
    spec = replaced(spec, "trainer.memory", max_tokens_per_micro_batch=512)
    with pytest.raises(
        OrreryError,
        match=r"chats\.jsonl:2: 65 tokens do not fit model\.max_positions 64; cut the chat or "
        r"leave it out",
    ):
        load_examples(spec, tokenizer)
    assert load_examples(replaced(spec, "model", max_positions=65), tokenizer).columns(
        [0, 1]
    ).lengths.tolist() == [64, 65]


def test_a_chat_with_a_token_that_the_model_has_no_row_for_is_named(tmp_path, tokenizer):
    chats = [
        [{"role": "user", "content": text}, {"role": "assistant", "content": "ba"}]
        for text in ("ab", "ah")
    ]
    spec = replaced(
        sft_spec(data=write_chats(tmp_path / "chats.jsonl", chats)), "model", vocab_size=15
    )
    with pytest.raises(
        OrreryError,
        match=r"chats\.jsonl:2: model\.vocab_size 15: the tokenizer gives 'h' the id 15, "
        r"and the model has no such row",
    ):
        load_examples(spec, tokenizer)


def test_a_torn_file_and_a_missing_reader_are_one_sentence(tmp_path, monkeypatch):
    data = write_arrow(tmp_path / "torn", [[{"role": "user", "content": "ab"}]])
    (tmp_path / "torn" / "data.arrow").write_bytes(b"\xff\xff\xff\xff garbage")
    with pytest.raises(OrreryError, match=r"data\.path: cannot read .*torn/data\.arrow"):
        opened(**data)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(
        OrreryError,
        match=r"data\.kind: datasets are read with pyarrow, which is not installed here. Type "
        r"`make setup`",
    ):
        opened(**dataset())


# Examples tokenised when needed


class Counted(Renderer):
    """Knows which chats it has rendered, by the words of their first message."""

    seen: list[str]

    def examples(self, chats, trained_roles):
        self.seen += [messages[0].content for _, messages, _ in chats]
        return super().examples(chats, trained_roles)


def counted_examples(tokenizer: Path) -> Examples:
    renderer = Counted(tokenizer)
    renderer.seen = []
    return Examples(opened(**dataset()), renderer, ("assistant",), 64, 64)


def test_only_what_a_step_needs_is_tokenised_and_only_so_much_is_kept(tokenizer, monkeypatch):
    words = [chat[0]["content"] for chat in word_chats("train")]
    examples = counted_examples(tokenizer)
    seen = examples._renderer.seen
    first = examples.columns([7, 3])
    assert seen == [words[7], words[3]]
    np.testing.assert_array_equal(
        examples.columns([7, 3]).token["token_id"], first.token["token_id"]
    )
    assert len(seen) == 2, "what was tokenised stays"
    monkeypatch.setattr(sft_data, "KEPT_TOKENS", first.num_tokens)
    examples.columns([9])
    examples.columns([9, 3])
    assert seen[2:] == [words[9], words[9]], "what is above the limit is made again"


def test_the_look_at_start_stops_at_its_number_of_tokens(tokenizer, monkeypatch):
    examples = counted_examples(tokenizer)
    monkeypatch.setattr(sft_data, "CHECKED_TOKENS", 100)
    monkeypatch.setattr(sft_data, "CHECKED_AT_ONCE", 3)
    examples.check(range(len(examples)))
    seen = len(examples._renderer.seen)
    assert seen < len(examples) and examples.columns(range(seen)).num_tokens >= 100
    assert examples.columns(range(seen - 3)).num_tokens < 100


def test_batches_follow_the_order_from_any_step_on(tokenizer):
    spec = sft_spec(num_steps=7, examples_per_batch=20)  # seven batches are almost three epochs
    examples = load_examples(spec, tokenizer)
    order = sft_data.endless_order(48, spec.seed)
    expected = [examples.columns([next(order) for _ in range(20)]) for _ in range(7)]
    for done in (0, 3, 6, 7):
        made = list(batches(examples, spec, done))
        assert len(made) == 7 - done
        for batch, same in zip(made, expected[done:], strict=True):
            np.testing.assert_array_equal(batch.token["token_id"], same.token["token_id"])
            np.testing.assert_array_equal(batch.offsets, same.offsets)


def test_one_batch_is_made_ahead_and_its_mistake_waits_for_its_turn():
    made, asked, threads = [], threading.Semaphore(0), set()

    def items():
        for number in range(3):
            if number == 2:
                raise OrreryError("the third is broken")
            made.append(number)
            threads.add(threading.current_thread())
            asked.release()
            yield Columns(np.array([0, number]))

    with prefetch(items()) as take:
        assert asked.acquire(timeout=30), "the first is made before anybody asks"
        assert take().num_tokens == 0
        assert asked.acquire(timeout=30) and made == [0, 1], (
            "and the second while the first is used"
        )
        assert take().num_tokens == 1
        with pytest.raises(OrreryError, match="the third is broken"):
            take()
    assert threading.main_thread() not in threads


# Validation


def reference_loss(spec, folder: Path, split: str, roles) -> tuple[float, int]:
    """Cross-entropy of every chat by itself, without packing."""
    network = build(spec.model)
    weights.load(network, folder)
    renderer, total, count = Renderer(folder), 0.0, 0
    for chat in word_chats(split):
        ids, trained = renderer.example([Message(m["role"], m["content"]) for m in chat], (), roles)
        tokens = torch.from_numpy(ids.astype(np.int64))
        with torch.no_grad():
            logits = network.logits(
                tokens, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32)
            )
        logprob = torch.log_softmax(logits[:-1].double(), -1).gather(1, tokens[1:, None]).squeeze(1)
        total -= float(logprob[torch.from_numpy(trained[1:])].sum())
        count += int(trained.sum())
    return total / count, count


@pytest.mark.parametrize("max_tokens", [16, 64])
def test_the_validation_loss_is_the_mean_over_tokens_however_they_are_packed(start, max_tokens):
    roles = ["user", "assistant"]
    spec = sft_spec(trained_roles=roles, validation=validated())
    spec = replaced(spec, "trainer.memory", max_tokens_per_micro_batch=max_tokens)
    folder = start / "weights" / "init"
    validation = load_validation(spec, folder, load_examples(spec, folder).chats, ALONE)
    assert len(validation.micro_batches) == {16: 8, 64: 2}[max_tokens]
    learner = make_learner(spec, folder)
    found, expected = validation.loss(learner), reference_loss(spec, folder, "validation", roles)
    assert found[1] == expected[1]
    # float32 log-probs, summed in float64: an ulp is 6e-8.
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert all(weight.grad is None for weight in learner.weights.values())
    with torch.no_grad():
        learner.weights["network.norm.weight"][0] = float("nan")
    with pytest.raises(
        RunFailed,
        match=r"validation after step 0: cross-entropy is nan \(weight network.norm.weight is "
        r"not finite\)",
    ):
        validation.loss(learner)


def test_a_run_is_the_same_to_the_bit_with_and_without_validation(tmp_path, start):
    rows, expected = run_here(tmp_path / "without", sft_spec(), start)
    assert not [row for row in rows if row.get("event") == "validation"]
    rows, found = run_here(tmp_path / "with", sft_spec(validation=validated()), start)
    assert found == expected
    losses = {
        row["step"]: row["validation_loss"] for row in rows if row.get("event") == "validation"
    }
    assert list(losses) == [0, 4, 6], "before the first step, every interval, after the last"
    spec = sft_spec()
    for step, folder in (
        (0, start / "weights" / "init"),
        (6, tmp_path / "with" / "weights" / "sft"),
    ):
        loss, num_tokens = reference_loss(spec, folder, "validation", ("assistant",))
        assert losses[step] == pytest.approx(loss, rel=1e-6)
        assert [
            row["num_validation_tokens"] for row in rows if row.get("event") == "validation"
        ] == [num_tokens] * 3
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6]
    assert all(row["wait_s"] < row["step_time_s"] for row in rows if "loss" in row)


def test_a_stage_that_died_says_the_validation_loss_of_its_checkpoint_again_and_makes_the_same_bits(
    tmp_path, start, monkeypatch
):
    spec = sft_spec(num_steps=7, validation=validated())
    rows, expected = run_here(tmp_path / "straight", spec, start)
    run_dir, right = start_run(tmp_path / "died", spec, start), sft.learning_rate_factor

    def die(schedule, step, num_steps):
        # It becomes whole some time after its step.
        while step == 6 and checkpoints.steps(run_dir, "sft")[-1] != 4:
            time.sleep(0.01)
        if step == 6:
            raise RunFailed("killed")
        return right(schedule, step, num_steps)

    monkeypatch.setattr(sft, "learning_rate_factor", die)
    with pytest.raises(RunFailed, match="killed"):
        sft_stage(run_dir)
    monkeypatch.setattr(sft, "learning_rate_factor", right)
    sft_stage(run_dir, "--attempt", "2")
    assert (run_dir / "weights" / "sft" / "model.safetensors").read_bytes() == expected

    def validation_of(rows):
        return [
            (row["attempt"], row["step"], row["validation_loss"])
            for row in rows
            if row.get("event") == "validation"
        ]

    losses = {step: loss for _, step, loss in validation_of(rows)}
    assert validation_of(read(run_dir / "metrics" / "trainer.0.jsonl")) == [
        (1, 0, losses[0]),
        (2, 4, losses[4]),
        (2, 7, losses[7]),
    ]


def test_a_validation_task_is_checked_before_the_run_begins(tmp_path):
    task = manifest().stages.sft.data.task.model_dump() | {"seed": 9}
    task["args"] = task["args"] | {"instruction": "Z"}
    data = {"kind": "demonstrations", "task": task, "num_problems": 8}
    (tmp_path / "manifest.json").write_bytes(canonical_json(sft_spec(validation=validated(data))))
    with pytest.raises(
        OrreryError, match=r"stages\.sft\.validation\.data\.task: .*alphabet has no 'Z'"
    ):
        initialize(parse_role("trainer", ["--run-dir", str(tmp_path), "--stage", "init"]))


@pytest.fixture(scope="module")
def alone(tmp_path_factory, start):
    """(rows, exported weights) of one rank, with two roles trained."""
    changes = {"trained_roles": ["user", "assistant"], "validation": validated(num_examples=7)}
    folder = tmp_path_factory.mktemp("alone") / "run"
    rows, _ = run_here(folder, sft_spec(**changes), start)
    return changes, rows, load_file(folder / "weights" / "sft" / "model.safetensors")


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "mesh",
    [{"dp_shard": 2}, {"cp": 2, "cp_style": "ring"}],
    ids=["two parts of the data", "shared documents"],
)
def test_two_ranks_train_a_dataset_and_agree_with_one_on_its_validation_loss(
    tmp_path, start, alone, mesh
):
    changes, rows_alone, expected = alone
    run_dir = start_run(tmp_path / "two", sft_spec(mesh=mesh, **changes), start)
    options = ["--run-dir", str(run_dir), "--stage", "sft", "--attempt", "1", "--index"]
    logs = [tmp_path / f"{rank}.log" for rank in range(2)]
    ranks = [forked_rank(log, [*options, str(rank)]) for rank, log in enumerate(logs)]
    try:
        codes = [rank.wait(100) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert codes == [0, 0], logs[0].read_text() + logs[1].read_text()
    together = read(run_dir / "metrics" / "trainer.0.jsonl")

    def validation_of(rows):
        return [
            (row["step"], row["validation_loss"], row["num_validation_tokens"])
            for row in rows
            if row.get("event") == "validation"
        ]

    (first, *later), (same, *others) = validation_of(rows_alone), validation_of(together)
    assert first[0] == same[0] == 0 and first[2] == same[2]
    # The same weights; seven examples on two ranks, so one rank has more.
    assert first[1] == pytest.approx(same[1], rel=1e-6)
    # Later the weights differ by the order of sums (bounds: test_trainer_stages.py).
    for name, weight in load_file(run_dir / "weights" / "sft" / "model.safetensors").items():
        torch.testing.assert_close(weight, expected[name], rtol=0, atol=5e-5)
    assert [step for step, _, _ in later] == [step for step, _, _ in others] == [4, 6]
    assert [loss for _, loss, _ in later] == pytest.approx(
        [loss for _, loss, _ in others], rel=1e-4
    )


def test_an_example_that_is_trained_too_is_named(tmp_path, tokenizer):
    chats = word_chats("validation")
    shared = write_chats(tmp_path / "train.jsonl", [*word_chats("train"), chats[5]])
    spec = sft_spec(data=shared, validation=validated())
    examples = load_examples(spec, tokenizer)
    expected = (
        r"stages\.sft\.validation\.data: .*validation: row 5 is in the training data too, "
        r"as .*train\.jsonl:49; leave it out"
    )
    with pytest.raises(OrreryError, match=expected):
        load_validation(spec, tokenizer, examples.chats, ALONE)
    fewer = sft_spec(data=shared, validation=validated(num_examples=5))
    assert isinstance(load_validation(fewer, tokenizer, examples.chats, ALONE), ValidationSet), (
        "what is not validated may be trained"
    )


def test_too_few_validation_examples_are_refused(tokenizer):
    spec = sft_spec(validation=validated(num_examples=9))
    with pytest.raises(
        OrreryError, match=r"stages\.sft\.validation\.num_examples: 9 exceeds the 8 examples"
    ):
        load_validation(spec, tokenizer, load_examples(spec, tokenizer).chats, ALONE)


def test_without_validation_there_is_nothing_to_load(tokenizer):
    assert (
        load_validation(sft_spec(), tokenizer, load_examples(sft_spec(), tokenizer).chats, ALONE)
        is None
    )
