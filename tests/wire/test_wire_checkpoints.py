"""Checkpoints, rendezvous and stored batches: files that count only once they are whole."""

import contextlib
import errno
import hashlib
import json
import os
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from wire_documents import documents, same

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.wire import checkpoints, columns, rendezvous
from orrery.wire.columns import Columns


def written(run_dir, step, whole=True):
    folder = checkpoints.checkpoint_dir(run_dir, step, 1)
    (folder / "trainer").mkdir(parents=True)
    (folder / "trainer" / "rank_0.safetensors").write_bytes(b"weights %d" % step)
    (folder / "orchestrator.json").write_text("{}")
    if whole:
        checkpoints.complete(folder)
    return folder


def test_a_checkpoint_is_due_at_every_interval_and_after_the_last_step_of_rl():
    checkpoint, rl = SimpleNamespace(interval_steps=3), SimpleNamespace(num_steps=7)
    spec = SimpleNamespace(
        trainer=SimpleNamespace(checkpoint=checkpoint), stages=SimpleNamespace(rl=rl)
    )
    assert [step for step in range(1, 8) if checkpoints.is_due(step, spec)] == [3, 6, 7]
    spec.sft = SimpleNamespace(num_steps=6)
    assert [step for step in range(1, 8) if checkpoints.is_due(step, spec, "sft")] == [3]


def test_the_stages_checkpoints_do_not_meet(tmp_path):
    for stage, step in (("rl", 2), ("sft", 4), ("sft", 6), ("rl", 8)):
        folder = checkpoints.checkpoint_dir(tmp_path, step, 1, stage)
        folder.mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
        if step != 8:
            checkpoints.complete(folder)
    assert (checkpoints.steps(tmp_path), checkpoints.steps(tmp_path, "sft")) == ([2], [4, 6])
    assert checkpoints.discard_incomplete(tmp_path, "sft") == [] and checkpoints.discard_incomplete(
        tmp_path
    ) == [8]
    assert (
        checkpoints.prune(tmp_path, 1, 1, "sft") == [4] and checkpoints.prune(tmp_path, 1, 1) == []
    )
    assert (checkpoints.steps(tmp_path)[-1], checkpoints.steps(tmp_path, "sft")[-1]) == (2, 6)
    checkpoints.verify(checkpoints.checkpoint_dir(tmp_path, 6, 1, "sft"))


def test_only_complete_checkpoints_count(tmp_path):
    assert not checkpoints.steps(tmp_path)
    for step in (2, 10):
        written(tmp_path, step)
    written(tmp_path, 12, whole=False)
    assert checkpoints.steps(tmp_path)[-1] == 10
    assert checkpoints.steps(tmp_path) == [2, 10]
    # As a killed writer leaves it.
    half = tmp_path / "checkpoints" / f".{checkpoints.LATER}.attempt_1.8.tmp"
    (half / "orchestrator").mkdir(parents=True)
    assert checkpoints.discard_incomplete(tmp_path) == [12]
    assert not half.exists()
    assert not checkpoints.checkpoint_dir(tmp_path, 12, 1).exists()


def test_a_complete_checkpoint_verifies(tmp_path):
    checkpoints.verify(written(tmp_path, 1))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (
            lambda f: (f / "trainer/rank_0.safetensors").write_bytes(b"Weights 1"),
            "rank_0.safetensors: its sha256",
        ),
        (
            lambda f: (f / "orchestrator.json").unlink(),
            "orchestrator.json: is in files.json but missing",
        ),
        (lambda f: (f / "trainer/extra").write_bytes(b""), "extra: is not in files.json"),
        (lambda f: (f / "files.json").write_text("{"), "files.json: not JSON"),
        (
            lambda f: (f / "files.json").write_text("[]"),
            "files.json: its value: should be an object",
        ),
        (
            lambda f: (f / "files.json").write_text('{"trainer/a": 1}'),
            r"files.json: trainer/a: should be a valid string",
        ),
        (lambda f: (f / "COMPLETE").unlink(), "has no COMPLETE"),
    ],
)
def test_damage_is_named(tmp_path, damage, message):
    folder = written(tmp_path, 1)
    damage(folder)
    with pytest.raises(OrreryError, match=message):
        checkpoints.verify(folder)


def test_a_killed_completion_leaves_no_file_in_the_next(tmp_path):
    folder = written(tmp_path, 1, whole=False)
    for name in (checkpoints.FILES, checkpoints.MARKER):
        (folder / f".{name}.77.tmp").write_text("{")
    checkpoints.complete(folder)
    checkpoints.verify(folder)
    assert not list(folder.glob(".*"))


def test_an_empty_checkpoint_is_not_completed(tmp_path):
    tmp_path.joinpath("step_1").mkdir()
    with pytest.raises(OrreryError, match="a checkpoint needs at least one file"):
        checkpoints.complete(tmp_path / "step_1")


def noted(run_dir, step, num_ranks=2):
    """A checkpoint whose ranks have hashed their own files, and the notes that there must be."""
    folder = written(run_dir, step, whole=False)
    for rank in range(num_ranks):
        mine = folder / "trainer" / f"rank_{rank}.safetensors"
        mine.write_bytes(b"rank %d of %d" % (rank, step))
        checkpoints.note_digests(folder / "trainer" / f"rank_{rank}.sha256.json", [mine])
    return folder, [f"trainer/rank_{rank}.sha256.json" for rank in range(num_ranks)]


def test_what_its_writer_has_hashed_is_not_read_again_and_is_verified_like_the_rest(
    tmp_path, monkeypatch
):
    folder, notes = noted(tmp_path, 1)
    hashed = []
    sha256 = checkpoints._sha256
    monkeypatch.setattr(
        checkpoints,
        "_sha256",
        lambda path, *_: hashed.append(path.relative_to(folder).as_posix()) or sha256(path),
    )
    checkpoints.complete(folder, notes)
    assert sorted(hashed) == ["orchestrator.json", *notes]
    assert json.loads((folder / "files.json").read_text()) == {
        path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in folder.rglob("*")
        if path.is_file() and path.name not in ("files.json", "COMPLETE")
    }
    hashed.clear()
    checkpoints.verify(folder)
    assert sorted(hashed) == [
        "orchestrator.json",
        *sorted([*notes, "trainer/rank_0.safetensors", "trainer/rank_1.safetensors"]),
    ]


def test_a_note_that_is_not_of_its_file_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.nfs, "VISIBLE_S", 0.0)
    folder, notes = noted(tmp_path, 1)
    file, note = folder / "trainer/rank_1.safetensors", folder / notes[1]
    whole, said = file.read_bytes(), note.read_bytes()
    file.write_bytes(b"X" + whole[1:])
    checkpoints.complete(folder, notes)
    with pytest.raises(
        OrreryError, match=r"rank_1\.safetensors: its sha256 differs from files\.json"
    ):
        checkpoints.verify(folder)
    for change, sentence in [
        (
            lambda: file.write_bytes(whole[:-1]),
            r"rank_1\.safetensors: has 10 bytes, but rank_1\.sha256\.json says 11",
        ),
        (file.unlink, r"rank_1\.safetensors: is missing, but rank_1\.sha256\.json says 11"),
        (lambda: note.write_bytes(said[:-1]), r"rank_1\.sha256\.json: must list sizes"),
        (note.unlink, r"rank_1\.sha256\.json: missing"),
    ]:
        change()
        with pytest.raises(RunFailed, match=sentence):
            checkpoints.complete(folder, notes)
        assert checkpoints.steps(tmp_path) == []


def test_shares_of_a_verification_are_all_of_it_and_deal_big_files_evenly(tmp_path, monkeypatch):
    folder, notes = noted(tmp_path, 1, num_ranks=4)
    checkpoints.complete(folder, notes)
    sha256, hashed = checkpoints._sha256, [set(), set()]
    for share in (0, 1):
        monkeypatch.setattr(
            checkpoints,
            "_sha256",
            lambda path, *_, seen=hashed[share]: seen.add(path) or sha256(path),
        )
        checkpoints.verify(folder, share=(share, 2))
    assert not hashed[0] & hashed[1] and len(hashed[0] | hashed[1]) == 9
    assert [sum(path.suffix == ".safetensors" for path in seen) for seen in hashed] == [2, 2]


def test_pruning_keeps_the_newest_and_what_is_being_written(tmp_path):
    for step in (1, 2, 3):
        written(tmp_path, step)
    written(tmp_path, 4, whole=False)
    assert checkpoints.prune(tmp_path, keep=2, attempt=1) == [1]
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step}.attempt_1" for step in (2, 3, 4)
    ]
    with pytest.raises(OrreryError, match="Keep at least 1"):
        checkpoints.prune(tmp_path, keep=0, attempt=1)


def test_a_stage_that_is_done_loses_all_its_checkpoints_though_the_first_try_was_killed(
    tmp_path, monkeypatch
):
    written(tmp_path, 4)
    for step in (4, 6, 8):
        (folder := checkpoints.checkpoint_dir(tmp_path, step, 1, "sft")).mkdir(parents=True)
        (folder / "file").write_bytes(b"x")
        checkpoints.complete(folder)
    (copied := tmp_path / "checkpoints" / "sft" / "step_6.attempt_1_good").mkdir()

    def dies(run_dir, folder):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(checkpoints, "discard", dies)  # after the first marker went
        checkpoints.discard_all(tmp_path, "sft")
    assert len(checkpoints.steps(tmp_path, "sft")) == 2
    checkpoints.checkpoint_dir(tmp_path, 9, 1, "sft").mkdir()  # an incomplete checkpoint
    assert checkpoints.discard_all(tmp_path, "sft") == [4, 6, 8, 9]
    assert checkpoints.discard_all(tmp_path, "sft") == []
    assert list((tmp_path / "checkpoints" / "sft").iterdir()) == [copied] and checkpoints.steps(
        tmp_path
    ) == [4]


def test_a_prune_that_dies_half_way_leaves_no_checkpoint_that_counts(tmp_path, monkeypatch):
    for step in (1, 2):
        written(tmp_path, step)

    def dies(folder, ignore_errors):
        raise KeyboardInterrupt

    monkeypatch.setattr(checkpoints.shutil, "rmtree", dies)
    with pytest.raises(KeyboardInterrupt):
        checkpoints.prune(tmp_path, keep=1, attempt=1)
    assert checkpoints.steps(tmp_path) == [2]


def is_in_use(monkeypatch):
    """Make every folder's removal leave its deepest files, as NFS does with open files."""

    def removes_some(folder, ignore_errors=False):
        (folder / "orchestrator.json").unlink(missing_ok=True)
        if not ignore_errors:
            raise OSError(errno.ENOTEMPTY, os.strerror(errno.ENOTEMPTY), str(folder))

    monkeypatch.setattr(checkpoints.shutil, "rmtree", removes_some)


def test_a_checkpoint_that_will_not_go_ends_nothing_and_is_not_taken_for_whole(
    tmp_path, monkeypatch
):
    for step in (1, 2):
        written(tmp_path, step)
    with monkeypatch.context() as patched:
        is_in_use(patched)
        assert checkpoints.prune(tmp_path, keep=1, attempt=1) == [1]
        assert checkpoints.steps(tmp_path) == [2]
        assert checkpoints.discard_incomplete(tmp_path) == []
    [left, _] = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left.startswith(".discarded.")
    checkpoints.discard_incomplete(tmp_path)
    assert [path.name for path in (tmp_path / "checkpoints").iterdir()] == ["step_2.attempt_1"]


def test_what_is_left_of_a_half_written_checkpoint_is_not_in_the_next_one_of_its_step(
    tmp_path, monkeypatch
):
    folder = written(tmp_path, 3, whole=False)
    (folder / "later.attempt_1").mkdir()
    (folder / "later.attempt_1" / "COMPLETE").touch()
    is_in_use(monkeypatch)
    assert checkpoints.discard_incomplete(tmp_path) == [3]
    checkpoints.verify(written(tmp_path, 3))
    assert sorted(path.name for path in folder.iterdir()) == [
        "COMPLETE",
        "files.json",
        "orchestrator.json",
        "trainer",
    ]


def test_a_marker_that_cannot_be_removed_keeps_its_checkpoint_whole(tmp_path, monkeypatch):
    for step in (1, 2):
        written(tmp_path, step)

    def refuses(path, missing_ok=False):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    with monkeypatch.context() as patched:
        patched.setattr(checkpoints.Path, "unlink", refuses)
        assert checkpoints.prune(tmp_path, keep=1, attempt=1) == []
    assert checkpoints.steps(tmp_path) == [1, 2]
    checkpoints.verify(checkpoints.checkpoint_dir(tmp_path, 1, 1))


def of_attempt(run_dir, step, attempt, whole=True):
    folder = checkpoints.checkpoint_dir(run_dir, step, attempt)
    folder.mkdir(parents=True)
    (folder / "file").write_text(f"attempt {attempt}")
    if whole:
        checkpoints.complete(folder)
    return folder


def test_an_attempt_that_goes_on_elsewhere_neither_writes_nor_prunes_what_the_next_one_has(
    tmp_path,
):
    """An unreachable node continues attempt 1, while attempt 2 continues from step 1."""
    of_attempt(tmp_path, 1, attempt=1)
    partitioned = of_attempt(tmp_path, 2, attempt=1, whole=False)
    assert checkpoints.discard_incomplete(tmp_path) == [2]
    mine = of_attempt(tmp_path, 2, attempt=2)
    assert partitioned != mine
    for step in (2, 3, 4):
        of_attempt(tmp_path, step, attempt=1)
    assert checkpoints.prune(tmp_path, keep=1, attempt=1) == [1, 2, 3]
    checkpoints.verify(mine)
    assert (mine / "file").read_text() == "attempt 2"
    assert checkpoints.latest(tmp_path) == (4, 1) and checkpoints.prune(
        tmp_path, keep=1, attempt=3
    ) == [2]


def test_a_run_goes_on_from_the_newest_step_and_of_that_from_the_newest_attempt(tmp_path):
    for step, attempt in ((4, 1), (2, 2), (4, 3)):
        of_attempt(tmp_path, step, attempt)
    of_attempt(tmp_path, 6, attempt=4, whole=False)
    assert checkpoints.latest(tmp_path) == (4, 3) and checkpoints.steps(tmp_path) == [2, 4]
    assert checkpoints.whole_dir(tmp_path, 4) == checkpoints.checkpoint_dir(tmp_path, 4, 3)
    with pytest.raises(
        OrreryError, match=r"checkpoints: no complete checkpoint of step 6; there are \[2, 4\]"
    ):
        checkpoints.whole_dir(tmp_path, 6)


# Rendezvous


def process(run_dir, role, index=0, attempt=1):
    @contextlib.contextmanager
    def waiting(what, deadline_s):
        yield

    health = SimpleNamespace(waiting=waiting)
    return SimpleNamespace(
        run_dir=run_dir,
        stage="rl",
        role=role,
        index=index,
        attempt=attempt,
        incarnation=0,
        health=health,
    )


def test_endpoints_are_found_by_index_with_what_they_say_of_themselves(tmp_path):
    for index in (1, 0):
        rendezvous.publish(
            process(tmp_path, "inference", index),
            f"http://127.0.0.1:{8000 + index}",
            devices=[index],
        )
    found = rendezvous.await_endpoints(
        process(tmp_path, "orchestrator"), "inference", 2, deadline_s=5
    )
    assert [(e.index, e.url, e.info) for e in found] == [
        (i, f"http://127.0.0.1:{8000 + i}", {"devices": [i]}) for i in (0, 1)
    ]


def test_waiting_ends_when_the_last_one_says_where_it_is(tmp_path):
    rendezvous.publish(process(tmp_path, "inference", 0), "http://a")
    late = threading.Timer(
        0.05, rendezvous.publish, (process(tmp_path, "inference", 1), "http://b")
    )
    late.start()
    assert (
        len(
            rendezvous.await_endpoints(
                process(tmp_path, "orchestrator"), "inference", 2, deadline_s=10
            )
        )
        == 2
    )
    late.join()


def test_an_earlier_attempts_endpoint_is_not_seen(tmp_path):
    rendezvous.publish(process(tmp_path, "router", attempt=1), "http://old")
    with pytest.raises(
        RunFailed,
        match=r"orchestrator 0 waited 0\.1 s for router 0 to publish its address\. "
        r"Read logs/router\.0\.log",
    ):
        rendezvous.await_endpoints(
            process(tmp_path, "orchestrator", attempt=2), "router", 1, deadline_s=0.1
        )


def test_a_second_publication_replaces_the_first(tmp_path):
    for url in ("http://a", "http://b"):
        rendezvous.publish(process(tmp_path, "router"), url)
    assert [e.url for e in rendezvous.find_endpoints(process(tmp_path, "x"), "router")] == [
        "http://b"
    ]


def test_a_damaged_endpoint_file_is_named(tmp_path):
    rendezvous.publish(process(tmp_path, "router"), "http://a")
    [path] = tmp_path.glob("stages/rl/endpoints/*.json")
    path.write_text("{}")
    with pytest.raises(RunFailed, match=r"router\.0\.json: not an endpoint file"):
        rendezvous.find_endpoints(process(tmp_path, "x"), "router")


# Stored batches


def test_a_stored_batch_is_read_back_with_its_info(tmp_path):
    parts = documents([3, 0, 70_000, 5])
    columns.write_batch(tmp_path, 7, parts, version=6)
    stored, info = columns.read_batch(tmp_path, 7)
    assert same(stored, Columns.concatenate(parts))
    assert info == {"step": 7, "version": 6}
    assert columns.batch_steps(tmp_path) == [7]


def test_a_stored_batch_is_a_safetensors_file_that_the_library_reads(tmp_path):
    parts = documents([3, 4])
    whole = Columns.concatenate(parts)
    tensors = load_file(columns.write_batch(tmp_path, 1, parts))
    expected = {"offsets": whole.offsets}
    expected |= {f"token/{name}": array for name, array in whole.token.items()}
    expected |= {f"sample/{name}": array for name, array in whole.sample.items()}
    assert tensors.keys() == expected.keys()
    for name, array in expected.items():
        assert np.array_equal(tensors[name], array) and tensors[name].dtype == array.dtype


def test_a_file_that_the_library_wrote_is_read(tmp_path):
    save_file(
        {"offsets": np.array([0, 2]), "token/token_id": np.array([5, 6], np.int32)},
        tmp_path / "x.safetensors",
    )
    stored, info = columns.read(tmp_path / "x.safetensors")
    assert stored.token["token_id"].tolist() == [5, 6] and info == {}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"short",
        b"\xff" * 64,
        (2).to_bytes(8, "little") + b"[]",
        (20).to_bytes(8, "little") + b"{}",
    ],
)
def test_a_file_that_is_no_safetensors_is_named(tmp_path, content):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(OrreryError, match=r"x\.safetensors: not a safetensors file of columns"):
        columns.read(path)


def test_a_batch_that_is_not_stored_is_named(tmp_path):
    with pytest.raises(OrreryError, match=r"step_3\.safetensors: no such file"):
        columns.read_batch(tmp_path, 3)
