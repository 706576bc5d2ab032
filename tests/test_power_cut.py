"""Published files are whole after a power cut at any moment, and every sync in the source is
needed.

`power_cut.Disk` computes the states after a cut. Each case publishes files with the project's code.
The last test leaves out each sync of the source in turn, and expects a case to fail.
"""

import ast
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType

import pytest
import torch
from power_cut import Disk, Found
from trainer_cases import (
    SaverHere,
    make_learner,
    manifest,
    save_checkpoint,
    write_start_weights,
)

from orrery.inference.assemble import blank_adapter
from orrery.launcher import containers
from orrery.launcher.runs import (
    Run,
    adopt,
    find,
)
from orrery.launcher.site import Roles, Site
from orrery.launcher.stage import Job
from orrery.launcher.supervisor import run_stage
from orrery.manifest.identity import (
    Workspace,
    canonical_json,
    load,
    pretty_json,
    run_dir,
)
from orrery.manifest.plan import StagePlan
from orrery.manifest.publish import make_folder, sync, write_atomic
from orrery.manifest.schema import Manifest
from orrery.models import weights
from orrery.orchestrator import snapshot
from orrery.orchestrator.scheduler import Scheduler, Snapshot
from orrery.runtime import run_directory
from orrery.runtime.role_context import parse_role
from orrery.trainer import checkpoint_writer, saver
from orrery.trainer.__main__ import initialize
from orrery.trainer.export import export_checkpoint, export_policy
from orrery.trainer.parallel.world import World
from orrery.wire import checkpoints, columns
from orrery.wire.columns import Columns
from workspace import linked

ROOT = Path(__file__).resolve().parents[1]

pytestmark = pytest.mark.timeout(300)
ALONE = World(0, 1, torch.device("cpu"), None)
SYNCS = ("fsync", "sync", "sync_tree", "sync_folders")
WIRE = "packages/orrery/wire/weight_wire/files.py"  # syncs to find a full disk
Tree = dict[str, bytes]


@dataclass(frozen=True)
class Case:
    """`act` publishes files in a folder filled by `prepare`. Paths are relative, `*` is one name.

    - `whole`: paths whose content must be whole in every state that has them.
    - `vouches`: (marker, path) pairs; the path must be whole in every state that has the marker.
    - `safe`: paths that must survive a cut once `act` has returned.
    """

    act: Callable[[Path], object]
    prepare: Callable[[Path], object] = lambda root: None
    whole: tuple[str, ...] = ()
    vouches: tuple[tuple[str, str], ...] = ()
    safe: tuple[str, ...] = ()


# Cases


def start_weights(root: Path) -> Path:
    folder = write_start_weights(manifest(), root / "start")
    (folder / "tokenizer.json").write_text("{}")
    return folder


def begun(root: Path) -> Path:
    run = root / "run"
    run.mkdir(exist_ok=True)
    (run / "manifest.json").write_bytes(canonical_json(manifest()))
    return run


def init(root: Path) -> None:
    initialize(parse_role("trainer", ["--run-dir", str(root / "run"), "--stage", "init"]))


def start_of_rl(root: Path) -> None:
    shutil.copytree(root / "run" / "weights" / "init", root / "run" / "weights" / "sft")


def write_policy(root: Path) -> None:
    learner = make_learner(manifest(), root / "start")
    export_policy(
        learner.policy, ALONE, manifest().model, root / "start", root / "run" / "weights" / "rl"
    )


def save_in_parts(root: Path) -> None:
    learner = make_learner(manifest(), root / "start")
    weights.save(learner.policy.network, manifest().model, root / "model", 20_000)


def trainers_half(root: Path) -> None:
    learner = make_learner(manifest(), root / "start")
    learner.step = 2
    save_checkpoint(learner, checkpoints.checkpoint_dir(root / "run", 2, 1) / "trainer")


def whole_checkpoint(root: Path) -> None:
    learner = make_learner(manifest(), root / "start")
    for learner.step in (2, 4):
        folder = checkpoints.checkpoint_dir(root / "run", learner.step, 1)
        snapshot.write(root / "run", learner.step, 1, of_orchestrator(learner.step + 1), 1.0)
        with checkpoint_writer.CheckpointWriter(ALONE, saver=SaverHere) as writer:
            writer.copy(learner, folder / "trainer", {"more.json": b"{}"})
            writer.write(completion=saver.Completion(str(root / "run"), "rl", 1, 2))


def of_orchestrator(next_batch: int) -> Snapshot:
    return replace(Scheduler(manifest()).snapshot(), next_batch=next_batch)


def complete_what_is_not_synced(root: Path) -> None:
    for step in (1, 2):
        folder = checkpoints.checkpoint_dir(root / "run", step, 1)
        (folder / "trainer").mkdir(parents=True)
        (folder / "trainer" / "weights").write_bytes(b"weights")
        (folder / "more").write_bytes(b"more")
        (folder / "trainer" / "noted").write_bytes(b"noted")
        sync(folder / "trainer" / "noted")  # as the rank itself does
        checkpoints.note_digests(folder / "trainer" / "note", [folder / "trainer" / "noted"])
        checkpoints.complete(folder, ["trainer/note"])


def remove_them(root: Path) -> None:
    run = root / "run"
    checkpoints.prune(run, keep=1, attempt=1)
    checkpoints.discard_all(run, "rl")


def wind_down(root: Path) -> None:
    for evaluated in (1, 2):
        state = replace(of_orchestrator(5), evaluated=evaluated)
        snapshot.write_now(root / "run", 4, 2, state, 1.0, is_resumed=True)


def keep_a_batch(root: Path) -> None:
    ids = torch.arange(4, dtype=torch.int32).numpy()
    for step in (1, 2):
        columns.write_batch(
            root / "run",
            step,
            Columns(ids[:2] * 0 + ids[[0, 3]].astype("int64"), {"token_id": ids[:3]}, {}),
        )


def copy_code(root: Path) -> None:
    room = root / "packages" / "orrery" / "room"
    room.mkdir(parents=True)
    (room / "__init__.py").write_text("x = 1\n")
    (root / "pyproject.toml").write_text('[project]\nname = "orrery"\nversion = "1"\n')
    containers.snapshot(Workspace(root), root / "run")


def checkout(root: Path) -> None:
    linked(root, "manifests", "jsonnet", "locks", "local")
    make_folder(root / "runs")


def a_run_and_another(root: Path) -> tuple[Run, Run]:
    other = find("reverse_text", Workspace(root))
    content = other.manifest.model_dump(mode="json") | {"name": "elsewhere"}
    mine = Manifest.model_validate(content)
    return Run(mine, run_dir(root / "runs", mine)), other


def run_that_can_be_adopted(root: Path) -> None:
    checkout(root)
    _, other = a_run_and_another(root)
    run_directory.begin(other.path)
    (other.path / "manifest.json").write_text(pretty_json(other.manifest))
    for name in ("stages/init/DONE", "weights/init/model.safetensors", "metrics/trainer.0.jsonl"):
        (other.path / name).parent.mkdir(parents=True)
        (other.path / name).write_text("{}")


def adopt_it(root: Path) -> None:
    adopt(*a_run_and_another(root))


def end_a_stage(root: Path) -> None:
    """Run a stage whose role has published weights; other processes made the folders above them."""
    run = root / "runs" / "run"
    (run / "stages" / "rl").mkdir(parents=True)
    run_directory.begin(run)
    write_atomic(run / "manifest.json", canonical_json(manifest()))
    (run / "weights").mkdir()
    learner = make_learner(manifest(), root / "start")
    export_policy(learner.policy, ALONE, manifest().model, root / "start", run / "weights" / "rl")
    job = Job(
        run,
        StagePlan("rl", (), ()),
        ("rl",),
        None,
        1,
        "again",
        Site(roles=Roles()),
        Workspace(root),
    )
    assert run_stage(job).state == "done"


def a_ranks_file(root: Path) -> None:
    """Write a rank's file as on another node. Completing the checkpoint does not sync it."""
    folder = root / "run" / "checkpoints" / "step_1.attempt_1"
    make_folder(folder / "trainer")
    written = saver.write(folder / "trainer" / "rank_1", [b"weights"])
    checkpoints.write_note(folder / "trainer" / "note", {"rank_1": written})
    checkpoints.complete(folder, ["trainer/note"])


def start_adapters(root: Path) -> None:
    blank_adapter(
        root / "run", load(ROOT / "manifests" / "reverse_text_adapters.json"), "rl", "inference.0"
    )


CASES = {
    "a file": Case(
        lambda root: [write_atomic(root / "file", content) for content in (b"one", b"two")],
        whole=("file",),
        safe=("file",),
    ),
    "a new run": Case(
        lambda root: run_directory.begin(root / "runs" / "run"),
        whole=("runs/run/layout",),
        safe=("runs",),
    ),
    "an attempt": Case(
        lambda root: run_directory.begin_attempt(root / "run"), begun, safe=("run/attempts",)
    ),
    "init": Case(init, begun, whole=("run/weights/init",), safe=("run/weights",)),
    "weights in parts": Case(
        save_in_parts,
        lambda root: (start_weights(root), (root / "model").mkdir()),
        vouches=(("model/config.json", "model"),),
        safe=("model",),
    ),
    "the policy": Case(
        write_policy,
        lambda root: (start_weights(root), begun(root)),
        whole=("run/weights/rl",),
        safe=("run/weights",),
    ),
    "a checkpoint's half": Case(
        trainers_half,
        lambda root: (start_weights(root), begun(root)),
        whole=("run/checkpoints/*/trainer",),
        safe=("run/checkpoints",),
    ),
    "a checkpoint": Case(
        whole_checkpoint,
        lambda root: (start_weights(root), begun(root)),
        whole=("run/checkpoints/*/orchestrator",),
        safe=("run/checkpoints",),
    ),
    "a checkpoint of files that are not synced": Case(
        complete_what_is_not_synced,
        lambda root: (begun(root) / "checkpoints").mkdir(),
        safe=("run/checkpoints/*",),
    ),
    "checkpoints that go": Case(
        remove_them, lambda root: (begun(root), complete_what_is_not_synced(root))
    ),
    "a state of later": Case(
        wind_down,
        lambda root: (start_weights(root), begun(root), whole_checkpoint(root)),
        safe=("run/checkpoints",),
    ),
    "a checkpoint as a folder": Case(
        lambda root: export_checkpoint(root / "run"),
        lambda root: (
            start_weights(root),
            begun(root),
            init(root),
            start_of_rl(root),
            whole_checkpoint(root),
        ),
        whole=("run/weights/step_4",),
        safe=("run/weights/step_4",),
    ),
    "batches": Case(
        keep_a_batch,
        begun,
        whole=("run/rollouts/step_1.safetensors", "run/rollouts/step_2.safetensors"),
        safe=("run",),
    ),
    "code": Case(copy_code, begun, whole=("run/code/*",), safe=("run",)),
    "an adopted run": Case(
        adopt_it, run_that_can_be_adopted, whole=("runs/elsewhere-*",), safe=("runs/elsewhere-*",)
    ),
    "a stage": Case(
        end_a_stage,
        lambda root: (start_weights(root), (root / "runs").mkdir()),
        whole=("runs/run/stages/rl/DONE",),
        vouches=(("runs/run/stages/rl/DONE", "runs/run/weights/rl"),),
        safe=("runs/run/stages/rl/DONE", "runs/run/weights/rl"),
    ),
    "a rank's file": Case(a_ranks_file, begun),
    "a blank adapter": Case(start_adapters, begun, whole=("run/stages/rl/blank_adapter",)),
}


# Checks -------------------------------------------------------------------------------------------


class Watch:
    """Record at each look the case's paths in some state, with the content that every state has."""

    def __init__(self, case: Case):
        self._case, self.broken = case, []
        self._seen: list[tuple[str, int, Tree]] = []

    def look(self, disk: Disk) -> None:
        self._checkpoints(disk)
        for pattern in self._case.whole:
            for path, found in _like(disk, pattern):
                self._seen.append((path, found.inode, _surely(disk, found)))
        for marker, folder in self._case.vouches:
            if disk.may_exist(marker):
                within = Path(os.path.commonpath([Path(marker).parent, folder]))
                for path, found in disk.may_exist(folder):
                    is_named = (disk.root / folder).exists() and disk.is_named(Path(folder), within)
                    itself = (
                        {}
                        if within != Path(folder)
                        else {Path(marker).name: (disk.root / marker).read_bytes()}
                    )
                    self._seen.append(
                        (path, found.inode, itself | _surely(disk, found) if is_named else {})
                    )

    def end(self, disk: Disk) -> list[str]:
        """Return one sentence for each path that is broken in some state."""
        for path, inode, tree in self._seen:
            live = disk.root / path
            if live.exists() and live.stat().st_ino == inode:
                for name, content in _tree(live).items():
                    if tree.get(name) != content:
                        self.broken.append(
                            f"{path} may be there, and {name or 'it'} lost or not whole"
                        )
        for pattern in self._case.safe:
            for path in disk.root.glob(pattern):
                if not disk.is_safe(path):
                    self.broken.append(f"{pattern} may be lost though its writer has returned")
        return sorted(set(self.broken))

    def _checkpoints(self, disk: Disk) -> None:
        for pattern in ("run/checkpoints/*", "run/checkpoints/*/*"):
            for path, folder in disk.may_exist(pattern):
                if not Path(path).name.startswith(("step_", "later.")) or "/." in path:
                    continue
                if not any(name == checkpoints.MARKER for name, _ in folder.children()):
                    continue
                listed = folder.surely(checkpoints.FILES)
                for name, digest in (
                    json.loads(listed).items() if listed else ((checkpoints.FILES, ""),)
                ):
                    content = folder.surely(name)
                    if content is None or hashlib.sha256(content).hexdigest() != digest:
                        self.broken.append(
                            f"{path} may be marked complete, and {name} lost or not whole"
                        )


def _like(disk: Disk, pattern: str) -> list[tuple[str, Found]]:
    """Return `may_exist(pattern)` without unfinished names; the last name may end with `*`."""
    folder, _, last = pattern.rpartition("/")
    found = disk.may_exist(f"{folder}/*" if folder else "*")
    names = [
        (path, one)
        for path, one in found
        if Path(path).name == last or (last.endswith("*") and Path(path).name.startswith(last[:-1]))
    ]
    return [
        (path, one)
        for path, one in names
        if not Path(path).name.startswith(".") and not path.endswith(".partial")
    ]


def _surely(disk: Disk, found: Found) -> Tree:
    """Return the files below `found` that every state has."""
    if (content := disk._bytes.get(found.inode)) is not None:
        return {"": content}
    return {
        f"{name}/{rest}".rstrip("/"): content
        for name, child in found.children()
        if child.is_sure
        for rest, content in _surely(disk, child).items()
    }


def _tree(path: Path) -> Tree:
    if path.is_file():
        return {"": path.read_bytes()}
    files = [file for file in path.rglob("*") if file.is_file() and not file.is_symlink()]
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in files
        if file.name != ".lock"
    }


def play(
    name: str, root: Path, skip: Callable[[FrameType], bool] = lambda frame: False
) -> list[str]:
    """Play the case `name`; return a sentence for each path that a power cut may break."""
    case, watch = CASES[name], Watch(CASES[name])
    shutil.rmtree(root, ignore_errors=True)
    root.mkdir()
    case.prepare(root)
    with Disk(root, watch.look, skip) as disk:
        case.act(root)
        return watch.end(disk)


@pytest.mark.parametrize("name", CASES)
def test_whatever_a_marker_vouches_for_is_whole_after_a_power_cut_at_any_moment(tmp_path, name):
    assert play(name, tmp_path / "disk") == []


# Every sync is needed


def syncs() -> dict[tuple[str, int], str]:
    """Return (file, line) → source line for every sync in the rooms, except in `WIRE`."""
    found = {}
    for path in sorted((ROOT / "packages" / "orrery").glob("**/*.py")):
        text, short = path.read_text(), path.relative_to(ROOT).as_posix()
        for node in ast.walk(ast.parse(text)) if "sync" in text and short != WIRE else ():
            if (
                isinstance(node, ast.Call)
                and getattr(node.func, "id", getattr(node.func, "attr", "")) in SYNCS
            ):
                found[str(path), node.lineno] = (
                    f"{short}:{node.lineno}: {text.splitlines()[node.lineno - 1].strip()}"
                )
    return found


def callers(frame: FrameType | None) -> set[tuple[str, int]]:
    found = set()
    while frame is not None:
        found.add((frame.f_code.co_filename, frame.f_lineno))
        frame = frame.f_back
    return found


def test_every_sync_of_the_source_is_needed_for_that(tmp_path):
    """If any one sync is left out, a case breaks."""
    every = syncs()
    used: dict[tuple[str, int], set[str]] = {site: set() for site in every}

    for name in CASES:

        def note(frame: FrameType, name: str = name) -> bool:
            for site in callers(frame) & every.keys():
                used[site].add(name)
            return False

        play(name, tmp_path / "disk", note)
    needless = []
    for site, names in used.items():
        if not any(
            play(name, tmp_path / "disk", lambda frame, site=site: site in callers(frame))
            for name in sorted(names)
        ):
            needless.append(every[site] + (" (in no case)" if not names else ""))
    assert len(every) > 15 and not needless, "\n".join(needless)
