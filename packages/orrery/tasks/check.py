"""Check the tasks of manifests before a run starts: `python -m orrery.tasks.check MANIFEST…`.

- A task must create its first problems within a CPU time limit.
- If the tokenizer's files are present, problems and tool replies must fit its alphabet, the
  vocabulary and the context length.
- All rows of a task's file are checked.
- Evaluation tasks must differ from training and SFT tasks in kind, args or seed, and share no row
  or prompt of a file with them.

`--tokenizer FOLDER` and `--dataset FOLDER` print facts of a fetched folder as JSON.
"""

import argparse
import json
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.publish import data_files, sha256_of
from orrery.manifest.schema import Manifest, Model, TaskUse
from orrery.manifest.shards import checked_sha256, data_names, split_of
from orrery.tasks import FewShot, make
from orrery.tasks.chat import FETCH, FILES, Renderer, write_tokenizer
from orrery.tasks.dataset import Dataset
from orrery.tasks.rows import open_rows, splits
from orrery.tasks.task import Message, Problem, Role, Task, ToolCall

NUM_PROBLEMS = 16
MAX_CPU_S = 6.0
BYTES_PER_S = 1_000_000  # a tenth of the slowest format's read speed
NUM_MEASURED = 256
NOTE = "  note: "


def task_uses(manifest: Manifest) -> Iterator[tuple[str, TaskUse]]:
    for side in ("train", "evaluation"):
        for i, use in enumerate(getattr(manifest.tasks, side)):
            yield f"tasks.{side}[{i}]", use
    if (sft := manifest.stages.sft) is not None:
        if sft.data.kind == "demonstrations":
            yield "stages.sft.data.task", sft.data.task
        if sft.validation is not None and sft.validation.data.kind == "demonstrations":
            yield "stages.sft.validation.data.task", sft.validation.data.task


def check(manifest: Manifest) -> list[str]:
    """Return a line per task, then notes. Raise OrreryError for an invalid task."""
    renderer, sft = _renderer(manifest.model), manifest.stages.sft
    tokenizer = manifest.model.tokenizer
    lines: list[str] = []
    notes: list[str] = []
    for path, use in task_uses(manifest):
        roles = sft.trained_roles if sft is not None and path.startswith("stages.sft") else ()
        longest = _checked_use(path, use, renderer, roles)
        context = manifest.inference.max_model_len_tokens
        turn = manifest.orchestrator.sampling.max_tokens_per_turn
        if renderer is not None and longest + turn > context:
            raise OrreryError(
                f"{path}: a prompt of {longest} tokens and a turn of {turn} do not fit "
                f"inference.max_model_len_tokens {context}. Set it (in Jsonnet context_tokens) to "
                f"{longest + turn} or more"
            )
        num_rows = _checked_rows(path, use, renderer, context - turn)
        rows = "" if num_rows is None else f" {num_rows} rows,"
        length = f"up to {longest} tokens"
        if renderer is None:
            length = "not counted: the tokenizer is not here"
        lines.append(f"{path}: {use.kind} {use.name!r},{rows} prompts {length}")
        if num_rows is not None and path.startswith("tasks.train") and renderer is not None:
            notes += _long_answers(path, use, renderer, turn, num_rows)
        if num_rows is not None and path == "tasks.train[0]" and renderer is None:
            assert tokenizer.kind == "pretrained"
            notes.append(
                f"{NOTE}{path}: the lengths of prompts and answers are unchecked, because there is "
                f"no tokenizer in {tokenizer.path!r} (model.tokenizer.path). {FETCH}. Otherwise "
                "the init stage checks them"
            )
        if num_rows is not None and path == "tasks.evaluation[0]":
            notes += _repeated_problems(manifest, num_rows)
        if num_rows is not None and path == "stages.sft.data.task":
            notes += _repeated_demonstrations(manifest, num_rows)
    _check_sides(manifest)
    return lines + notes


def _checked_use(path: str, use: TaskUse, renderer: Renderer | None, roles: Sequence[Role]) -> int:
    try:
        with _limited(use):
            return _longest_prompt_tokens(use, renderer, roles)
    except OrreryError as error:
        raise OrreryError(f"{path}: {error}") from error
    except Exception as error:  # plug-ins may raise any exception
        raise OrreryError(
            f"{path}: task {use.name!r}: no problems can be made with these args ({error!r}). "
            f"Correct {path}.args"
        ) from error


def _checked_rows(
    path: str, use: TaskUse, renderer: Renderer | None, max_tokens: int
) -> int | None:
    check_rows = getattr(_task(use.model_dump_json()), "check_rows", None)
    if check_rows is None:
        return None

    tokens = None
    if renderer is not None:
        prompt = renderer.prompt

        def tokens(problem: Problem) -> int:
            return len(prompt(problem.messages, problem.tools))

    try:
        return check_rows(tokens, max_tokens)
    except OrreryError as error:
        raise OrreryError(f"{path}: task {use.name!r}: args.{error}") from error


def _long_answers(
    path: str, use: TaskUse, renderer: Renderer, turn: int, num_rows: int
) -> Iterator[str]:
    demonstrate = getattr(_task(use.model_dump_json()), "demonstration", None)
    # The answers of these verdicts are not replies.
    if demonstrate is None or _verdict(use) in ("json_schema", "python"):
        return
    answers = [demonstrate(index)[-1].content for index in range(min(num_rows, NUM_MEASURED))]
    lengths = [len(one) + 1 for one in renderer.tokenizer.encode_batch(answers)]  # + 1: end of turn
    if num_longer := sum(length > turn for length in lengths):
        yield (
            f"{NOTE}{path}: {num_longer} of {len(lengths)} answers are longer than a turn, with up "
            f"to {max(lengths)} tokens. A reply of that length is cut off. Set "
            f"orchestrator.sampling.max_tokens_per_turn ({turn}) to {max(lengths)} or more, and "
            "raise context_tokens by the difference"
        )


def _verdict(use: TaskUse) -> str | None:
    return _problems(use)[1].get("verdict", {}).get("kind")


def _repeated_problems(manifest: Manifest, num_rows: int) -> Iterator[str]:
    if len(manifest.tasks.evaluation) > 1:
        return
    evaluation = manifest.orchestrator.evaluation
    for field, asked in (
        ("orchestrator.evaluation", evaluation.num_problems),
        ("stages.evaluate", manifest.stages.evaluate.num_problems),
    ):
        if asked > num_rows:
            yield (
                f"{NOTE}{field}.num_problems {asked}: only {num_rows} rows are held out, so some "
                f"are asked again. Set it to {num_rows} or fewer"
            )


def _repeated_demonstrations(manifest: Manifest, num_rows: int) -> Iterator[str]:
    sft = manifest.stages.sft
    if sft is None or sft.data.kind != "demonstrations" or sft.data.num_problems <= num_rows:
        return
    yield (
        f"{NOTE}stages.sft.data.num_problems {sft.data.num_problems}: the side has only {num_rows} "
        f"rows, so some are shown again in an epoch. Set it to {num_rows} or fewer"
    )


def _check_sides(manifest: Manifest) -> None:
    sides = ("tasks.train", "stages.sft.data")
    trained = [(path, use) for path, use in task_uses(manifest) if path.startswith(sides)]
    for i, use in enumerate(manifest.tasks.evaluation):
        for path, other in trained:
            if _problems(use) == _problems(other):
                raise OrreryError(
                    f"tasks.evaluation[{i}]: has the same problems as {path}. "
                    "Give it another seed or split"
                )
    _check_rows_of_sides(manifest, trained)


def _check_rows_of_sides(manifest: Manifest, trained: Sequence[tuple[str, TaskUse]]) -> None:
    evaluated = [
        (i, use, rows) for i, use in enumerate(manifest.tasks.evaluation) if (rows := _dataset(use))
    ]
    if not evaluated:
        return
    digests = {path: rows.digests for path, use in trained if (rows := _dataset(use))}
    for i, use, rows in evaluated:
        try:
            rows.check_against(digests)
        except OrreryError as error:
            raise OrreryError(f"tasks.evaluation[{i}]: task {use.name!r}: args.{error}") from error


def _dataset(use: TaskUse) -> Dataset | None:
    task = _task(use.model_dump_json())
    inner = task.task if isinstance(task, FewShot) else task
    return inner if isinstance(inner, Dataset) else None


def _problems(use: TaskUse) -> tuple[str, dict[str, Any], int]:
    if use.kind == "few_shot":
        return use.args["kind"], use.args["args"], use.seed
    return use.kind, use.args, use.seed


def _renderer(model: Model) -> Renderer | None:
    tokenizer = model.tokenizer
    if tokenizer.kind == "pretrained" and not Path(tokenizer.path, "tokenizer.json").is_file():
        return None
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(model, Path(folder))
        return Renderer(Path(folder), model.vocab_size)


class _TooLong(BaseException):
    """Interrupt a task, even if it catches Exception."""


@contextmanager
def _limited(use: TaskUse) -> Iterator[None]:
    """Raise OrreryError if the body exceeds its CPU limit. Needs the main thread."""
    limit_s = MAX_CPU_S + _file_bytes(use.args) / BYTES_PER_S

    def stop(*_: Any) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    except _TooLong:
        raise OrreryError(
            f"task {use.name!r}: args {use.args}: its first {NUM_PROBLEMS} problems take more than "
            f"{limit_s:g} s of CPU time. Make them smaller"
        ) from None
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def _file_bytes(args: dict[str, Any]) -> int:
    found = 0
    for value in args.values():
        if isinstance(value, dict):
            found += _file_bytes(value)
            if value.get("kind") == "source" and (path := Path(str(value.get("path")))).exists():
                files = data_files(path) if path.is_dir() else [path]
                found += sum(file.stat().st_size for file in files)
    return found


@cache  # a task caches its problems
def _task(use: str) -> Task:
    return make(TaskUse.model_validate_json(use))


def _longest_prompt_tokens(
    use: TaskUse, renderer: Renderer | None, trained_roles: Sequence[Role]
) -> int:
    task, longest = _task(use.model_dump_json()), 0
    demonstrate = getattr(task, "demonstration", None)
    for index in range(NUM_PROBLEMS):
        problem = task.problem(index)
        if trained_roles and demonstrate is None:
            raise OrreryError(
                f"task {use.name!r}: kind {use.kind} has no demonstrations. "
                "Use stages.sft.data of kind chat_file or sft: null"
            )
        example = demonstrate(index) if demonstrate is not None and trained_roles else None
        if renderer is None:
            continue
        longest = max(longest, len(renderer.prompt(problem.messages, problem.tools)))
        for name in [tool.name for tool in problem.tools] + ["no such tool"] * bool(problem.tools):
            nonsense = Message("assistant", "", (ToolCall(name, {"input": "?"}),))
            replies = task.reply(problem, [*problem.messages, nonsense])
            if isinstance(replies, list):
                renderer.next_turn(replies)
        if example is not None:
            renderer.example(example, problem.tools, trained_roles)
    return longest


def tokenizer_facts(folder: Path) -> dict[str, Any]:
    """Return `sha256`, the vocabulary size without added tokens, and added tokens' ids."""
    renderer = Renderer(folder)
    added = renderer.tokenizer.get_added_tokens_decoder()
    files = [folder / name for name in FILES if (folder / name).is_file()]
    return {
        "sha256": sha256_of(files),
        "num_words": renderer.tokenizer.get_vocab_size(with_added_tokens=False),
        "added": {token.content: number for number, token in added.items()},
    }


def dataset_facts(folder: Path) -> dict[str, Any]:
    """Return `sha256`, notes on unreadable splits, and other splits' rows and columns."""
    found: dict[str, Any] = {}
    notes = []
    order = [split_of(name) for name in data_names(folder)]
    for split in sorted(splits(folder), key=order.index):
        try:
            rows = open_rows(folder, split)
        except OrreryError as error:
            notes.append(str(error))
            continue
        found[split] = {"num_rows": len(rows), "columns": list(rows[0]) if len(rows) else []}
    if not found:
        raise OrreryError(notes[0])
    return {"sha256": checked_sha256(folder), "splits": found, "notes": notes}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m orrery.tasks.check", description=__doc__)
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument("manifests", nargs="*", metavar="MANIFEST", default=[])
    given.add_argument("--tokenizer", type=Path, metavar="FOLDER")
    given.add_argument("--dataset", type=Path, metavar="FOLDER")
    args = parser.parse_args()
    try:
        for manifest in args.manifests:
            print(*check(load(manifest)), sep="\n")
        if args.tokenizer is not None:
            print(json.dumps(tokenizer_facts(args.tokenizer)))
        if args.dataset is not None:
            print(json.dumps(dataset_facts(args.dataset)))
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
