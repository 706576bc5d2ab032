"""Damage specs, manifests and run files; count tracebacks, hangs and half-written files.

    python benchmarks/faults/malformed.py [--cases 1000] [--seed 1]

- A case is a fresh checkout with one damaged file (`damage.py`) and one command that reads it, in a
  new process. The seed and the case's number determine it.
- A traceback, a death by signal and a failure without an error sentence count as tracebacks.
- A command that takes more than 5 s counts as a hang.
- A file that a failed command left or changed counts as half-written, as does any temporary file.
"""

import contextlib
import hashlib
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [
    str(ROOT / "benchmarks"),
    str(Path(__file__).parent),
    str(ROOT / "tests/manifest"),
]
import damage  # noqa: E402
import manifest_specs  # noqa: E402

# Import these modules before cases are forked.
from orrery.launcher import cli, describe, pipeline, runs  # noqa: E402, F401
from orrery.manifest.errors import OrreryError  # noqa: E402
from orrery.manifest.identity import (  # noqa: E402
    Workspace,
    load,
    run_dir,
)
from orrery.runtime.run_directory import begin  # noqa: E402
from orrery.wire import checkpoints  # noqa: E402

HANG_S, GIVE_UP_S = 5.0, 30.0
AREAS = ("specs", "manifests", "run files")
OWN = ("metrics/report.", "stages/report/", "logs/", ".lock")  # of stage report, and the lock


@dataclass(frozen=True)
class CaseOutcome:
    """The end of one case: `told` is the command's output, `fault` the kind of defect or ""."""

    area: str
    what: str
    told: str
    seconds: float
    fault: str


# A healthy checkout


def _write_metrics(run: Path) -> None:
    stamp, steps = {"stage": "rl", "attempt": 1}, (1, 2, 3)
    trained = {"loss": 0.1, "entropy": 1.0, "mismatch_kl": 1e-7, "step_time_s": 1.0}
    trained |= {"forward_backward_s": 0.4, "optimizer_s": 0.1, "publish_s": 0.1, "wait_s": 0.4}
    trained |= {"tokens_per_s": 9.0}
    trainer = [{**stamp, "time_s": 9.0 + step, "step": step, **trained} for step in steps]
    sft = [
        {**stamp, "stage": "sft", "time_s": float(step), "step": step, "loss": 3.0}
        for step in (1, 2)
    ]
    _rows(run / "metrics/trainer.0.jsonl", [*sft, *trainer])
    batch = {"reward_mean": 0.2, "staleness_counts": [8, 2], "staleness_max": 1}
    batch |= {"num_versions": 2, "num_mixed_rollouts": 1, "generated_tokens_per_s": 9.0}
    batch |= {"dropped": {"late": 1}}
    event = {**stamp, "event": "batch"}
    batches = [{**event, "time_s": 9.0 + step, "step": step, **batch} for step in steps]
    event = {**stamp, "event": "evaluation", "time_s": 9.0, "step": None}
    evaluation = {**event, "version": 0, "task": "words", "reward_mean": 0.3}
    _rows(run / "metrics/orchestrator.0.jsonl", [*batches, evaluation])
    usage = {"trainer.0": {"cpu_percent": 80.0, "rss_bytes": 1}}
    event = {**stamp, "event": "usage", "time_s": 9.0, "step": None}
    _rows(run / "metrics/launcher.0.jsonl", [{**event, "processes": usage}])
    span = {**stamp, "name": "optimizer", "start_s": 9.0, "end_s": 9.5, "step": 1}
    _rows(run / "metrics/trainer.0.spans.jsonl", [span])


def healthy(folder: Path) -> Workspace:
    """Make a checkout with the tests' specs, their manifests and the folder of one ended run."""
    workspace = manifest_specs.checkout(folder)
    done = os.fork()
    if not done:  # a fork would lose the threads of Jsonnet's runtime
        os._exit(_orrery(folder, ["render"]))
    if os.waitpid(done, 0)[1]:
        raise OrreryError("the healthy specs do not render")
    manifest = load(workspace.manifest_path("words"))
    run = run_dir(folder / "runs", manifest)
    begin(run)
    _json(run / "manifest.json", json.loads(workspace.manifest_path("words").read_text()))
    role = {"name": "trainer.0", "node": "here", "pid": 1, "port": 1, "cores": [0]}
    role |= {"state": "ended", "exit": "exit code 0", "restarts": 0}
    last = {"stage": "report", "attempt": 5, "state": "done", "message": "report: done"}
    last |= {"launcher_pid": 1, "host": "here", "slurm_job": None}
    last |= {"started_s": 1.0, "ended_s": 2.0, "roles": [role]}
    _json(run / "status.json", last)
    times = {"attempt": 1, "started_s": 1.0, "ended_s": 2.0, "wall_s": 1.0}
    for stage in ("init", "sft", "rl", "evaluate"):
        _json(run / "stages" / stage / "DONE", times)
    policy = {"reward_mean": 0.5, "num_rollouts": 8, "num_failed": 0, "failures": {}}
    _json(run / "stages/evaluate/result.json", {"before": policy, "after": policy, "tasks": {}})
    attempt = {"attempt": 1, "state": "done", "started_s": 1.0, "ended_s": 2.0, "message": ""}
    attempt |= {"nodes": ["here"], "images": {}}
    rl = {"attempts": [attempt], "outputs": {}, "metrics": {"loss": 0.1}}
    receipt = {"schema": 1, "run": {"name": "words", "id": "0"}, "stages": {"rl": rl}}
    _json(run / "receipt.json", receipt)
    _write_metrics(run)
    messages = [{"role": "user", "content": "ab"}, {"role": "assistant", "content": "ba"}]
    answer = {"task": "words", "problem": 1, "reward": 1.0, "messages": messages}
    answers = [{"policy": when, **answer} for when in ("before", "after")]
    _rows(run / "rollouts/evaluate.jsonl", answers)
    (run / "logs").mkdir()
    (run / "logs/trainer.0.log").write_text("step 1\nstep 2\n")
    (run / "report").mkdir()
    (run / "report/summary.txt").write_text("words: held-out reward 0.50\n")
    return workspace


def _json(path: Path, value: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=1) + "\n")


def _rows(path: Path, rows: list[dict[str, object]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


# Cases


def case(area: str, workspace: Workspace, rng: random.Random) -> tuple[str, Callable[[], int]]:
    """Damage one file of the checkout; return a description and the command that reads the file."""
    folder = workspace.root
    run = next((folder / "runs").iterdir())
    own: damage.Damage = damage.json_damage
    if area == "specs":
        file = rng.choice(sorted((folder / "jsonnet").rglob("*sonnet")))
        own = damage.jsonnet_damage
        commands = ["check", "check words", "render", "show words", "explain words seed"]
        commands += ["plan words --write plan", "diff words sums", "snakemake"]
    elif area == "manifests":
        file = workspace.manifest_path(rng.choice(("words", "words_nodes", "words_sparse")))
        commands = ["check PATH", "show PATH", "plan PATH", "diff PATH manifests/sums.json"]
        commands += ["check NAME", "plan NAME", "status NAME", "run NAME rl", "snakemake"]
    else:
        file = rng.choice([path for path in sorted(run.rglob("*")) if path.is_file()])
        commands = ["status", "status RUN", "report RUN", "report RUN --summary", "logs RUN"]
        commands += ["show RUN", "show RUN --receipt", "diff RUN sums", "adopt words_wide RUN"]
        commands += ["stop RUN"]
    words = {"PATH": str(file), "NAME": file.stem, "RUN": run.name}
    argv = [words.get(word, word) for word in rng.choice(commands).split()]
    kinds = [damage.text_damage, damage.path_damage]
    if area != "run files" or file.suffix in (".json", ".jsonl") or file.name == "DONE":
        kinds += [own] * 4
    how = rng.choice(kinds)
    how(file, rng)
    said = f"{how.__name__} of {file.relative_to(folder)}, then {' '.join(argv)}"
    return said, (lambda: _pipeline(folder)) if argv == ["snakemake"] else lambda: _orrery(
        folder, argv
    )


def _orrery(folder: Path, argv: list[str]) -> int:
    """Run `orrery argv…` in this process; return its exit code."""
    os.chdir(folder)
    sys.argv = ["orrery", *argv]
    try:
        cli.main()
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    return 0


def _pipeline(folder: Path) -> int:
    """Read the manifests as the Snakefile does; return the exit code."""
    try:
        found = pipeline.checked_in(Workspace(folder))
    except (OrreryError, OSError) as error:
        print(f"error: {error}")
        return 1
    for sentence in found.broken.values():
        print(f"warning: {sentence}")
    for one in found.manifests:
        found.describe(one, "rl")
    return 0


def files_case(run: Path, rng: random.Random) -> tuple[str, Callable[[], int]]:
    """Damage a checkpoint's `files.json`; return a description and a call that verifies it."""
    folder = run / "checkpoints" / "step_2"
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "rank_0.safetensors").write_bytes(b"weights")
    checkpoints.complete(folder)
    how = rng.choice(
        (damage.text_damage, damage.path_damage, damage.json_damage, damage.json_damage)
    )
    how(folder / checkpoints.FILES, rng)

    def verify() -> int:
        try:
            checkpoints.verify(folder)
        except OrreryError as error:
            print(f"error: {error}")
            return 2
        return 0

    return f"{how.__name__} of a checkpoint's files.json, then verify", verify


# Running


def run_cases(number: int, seed: int) -> Iterator[CaseOutcome]:
    """Yield the outcome of each of `number` cases."""
    with tempfile.TemporaryDirectory(prefix="orrery-malformed-") as scratch:
        healthy(Path(scratch) / "healthy")
        for index in range(number):
            yield run_case(Path(scratch), index, seed)


def run_case(scratch: Path, index: int, seed: int) -> CaseOutcome:
    """Run one case in a fresh copy of the healthy checkout."""
    rng, area, folder = (
        random.Random(f"{seed}/{index}"),
        AREAS[index % len(AREAS)],
        scratch / "case",
    )
    shutil.copytree(scratch / "healthy", folder)
    if area == "run files" and rng.random() < 0.1:
        what, command = files_case(next((folder / "runs").iterdir()), rng)
    else:
        what, command = case(area, Workspace(folder), rng)
    before = _tree(folder)
    code, told, seconds = _forked(command, scratch / "told")
    if seconds > HANG_S:  # try again: this machine may have been busy
        code, told, again_s = _forked(command, scratch / "told")
        seconds = min(seconds, again_s)
    changed = sorted(path for path, digest in _tree(folder).items() if before.get(path) != digest)
    fault = _fault(
        code, told, seconds, [path for path in changed if not _is_whole(folder, path, before)]
    )
    for path in folder.rglob("*"):
        if not path.is_symlink() and path.is_file():
            path.chmod(0o600)
    shutil.rmtree(folder)
    return CaseOutcome(area, what, told, seconds, fault)


def _fault(code: int, told: str, seconds: float, changed: list[str]) -> str:
    if code < 0 and seconds > GIVE_UP_S:
        return "hang"
    if (
        code < 0
        or "Traceback (most recent call last)" in told
        or (code and not any(map(_is_sentence, told.splitlines())))
    ):
        return "traceback"
    if seconds > HANG_S:
        return "hang"
    left = [path for path in changed if path.endswith((".tmp", ".partial"))]
    return "half-written" if left or (code and changed) else ""


def _is_whole(folder: Path, path: str, before: dict[str, str]) -> bool:
    """Return whether a failed command may write this file.

    It may write the report stage's own files, and files of a new run whose manifest is whole.
    """
    top, _, inside = path.partition("/")
    run, _, name = inside.partition("/")
    if top != "runs":
        return False
    if f"{name}/".startswith(OWN):
        return True
    with contextlib.suppress(OrreryError):
        return f"runs/{run}" not in before and bool(load(folder / "runs" / run / "manifest.json"))
    return not name and f"runs/{run}" not in before


def _is_sentence(line: str) -> bool:
    return line.startswith("error: ")


def _forked(command: Callable[[], int], told: Path) -> tuple[int, str, float]:
    """Run `command` in a fork; return (exit code, output, seconds).

    After GIVE_UP_S the fork and its process group are killed.
    """
    start_s = time.monotonic()
    sys.stdout.flush()
    child = os.fork()
    if not child:
        code = 70
        try:
            os.setsid()
            out = os.open(told, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(out, 1)
            os.dup2(out, 2)
            code = command()
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    while (ended := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() - start_s > GIVE_UP_S:
            os.killpg(child, signal.SIGKILL)
            ended = os.waitpid(child, 0)
            break
        time.sleep(0.01)
    return (
        os.waitstatus_to_exitcode(ended[1]),
        told.read_text(errors="replace"),
        time.monotonic() - start_s,
    )


def _tree(folder: Path) -> dict[str, str]:
    """Return the digest of each readable file in a folder, and "no file" for any other path."""
    found = {}
    for path in folder.rglob("*"):
        is_file = path.is_file() and not path.is_symlink() and os.access(path, os.R_OK)
        found[path.relative_to(folder).as_posix()] = (
            hashlib.sha256(path.read_bytes()).hexdigest() if is_file else "no file"
        )
    return found


def main() -> None:
    from record import parser_of, record

    parser = parser_of(__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument(
        "--print", action="store_true", help="record nothing; fail where there is a fault"
    )
    args = parser.parse_args()
    faults: Counter[str] = Counter()
    areas: Counter[str] = Counter()
    refused, slowest_s = 0, 0.0
    for index, outcome in enumerate(run_cases(args.cases, args.seed)):
        areas[outcome.area] += 1
        refused += "error: " in outcome.told
        slowest_s = max(slowest_s, outcome.seconds)
        if outcome.fault:
            faults[outcome.fault] += 1
            print(
                f"{index}: {outcome.fault} after {outcome.seconds:.1f} s: "
                f"{outcome.what}\n{outcome.told[-1500:]}",
                flush=True,
            )
    if args.print:
        sys.exit(f"{faults.total()} faults in {areas.total()} cases" if faults else None)
    record(
        Path(__file__).with_suffix(".json"),
        figure=(
            "damaged specs, manifests and run files that end in a traceback, a hang over 5 "
            "s or a half-written file"
        ),
        value=float(faults.total()),
        unit="cases",
        goal=0.0,
        better="lower",
        details={
            "cases": dict(areas),
            "refused_with_a_sentence": refused,
            **{fault: faults[fault] for fault in ("traceback", "hang", "half-written")},
            "slowest_s": round(slowest_s, 2),
            "seed": args.seed,
        },
    )


if __name__ == "__main__":
    main()
