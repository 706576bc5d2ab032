"""Uploads of checkpoints: kills at any moment, damage, what is fetched back, bad targets."""

import multiprocessing
import shutil
import signal
import subprocess
import sys
from types import SimpleNamespace

import pytest
import typer
from forked_roles import import_before
from saver_cases import content, die_before, folder, offered, upload_to

from orrery.elastic.types import ElasticError
from orrery.launcher import cli
from orrery.launcher.runs import hold_lock
from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import SHARED_MEMORY, saves_prefix
from orrery.trainer import saver, uploader
from orrery.wire import checkpoints


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / "run-000000000001"
    made.mkdir()
    for step in (1, 2):
        assert saver.finish(offered(made, step, keep=2))
    yield made
    for path in SHARED_MEMORY.glob(f"{saves_prefix(made)}*"):
        shutil.rmtree(path)


def fetched(url, run_dir):
    """Return the step that a lost disk gets back."""
    disk = run_dir.parent / "other" / run_dir.name
    shutil.rmtree(disk, ignore_errors=True)
    uploader.restore(uploader.target_of(url, run_dir, "rl"), disk, "rl")
    [step] = checkpoints.steps(disk)
    found = folder(disk, step) / "trainer" / "rank_0.safetensors"
    assert found.read_bytes() == content(step)
    return step


def test_a_killed_upload_leaves_the_checkpoint_before_it_and_the_next_resumes(run_dir, tmp_path):
    import_before("saver_cases")
    context, kills, seen = multiprocessing.get_context("forkserver"), 0, set()
    newer = tmp_path / "newer"
    folder(run_dir, 2).rename(newer)
    while True:
        url = f"file://{tmp_path}/far{kills}"
        upload_to(url, run_dir)
        shutil.copytree(newer, folder(run_dir, 2))
        process = context.Process(target=die_before, args=(kills + 1, upload_to, url, run_dir))
        process.start()
        process.join(60)
        seen.add(fetched(url, run_dir))
        upload_to(url, run_dir)
        assert fetched(url, run_dir) == 2
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
        shutil.rmtree(folder(run_dir, 2))
    assert kills > 4 and seen == {1, 2}


def test_an_upload_writes_no_block_twice_and_removes_those_of_old_checkpoints(run_dir, tmp_path):
    url, written = f"file://{tmp_path}/far", []
    target = uploader.target_of(url, run_dir, "rl")
    pipe = target._files.pipe_file

    def counted(path, data):
        written.append(path)
        pipe(path, data)

    target._files.pipe_file = counted
    try:
        uploader.upload(target, run_dir, "rl", 1)
        uploader.upload(target, run_dir, "rl", 1)
    finally:
        target._files.pipe_file = pipe
    blocks = {block.sha256 for block in target.newest().blocks()}
    assert len(written) == len(set(written)) == len(blocks) + 1
    assert saver.finish(offered(run_dir, 3))
    upload_to(url, run_dir)
    blocks = {block.sha256 for block in target.newest().blocks()}
    assert set(target._sizes()) == blocks


def test_the_next_upload_removes_a_half_written_header_and_keeps_whole_ones(run_dir, tmp_path):
    url = f"file://{tmp_path}/far"
    target = uploader.target_of(url, run_dir, "rl")
    uploader.upload(target, run_dir, "rl", 2)
    whole = target._headers()
    half = whole[0].replace("_000000002", "_000000003")
    target._files.pipe_file(half, target._files.cat_file(whole[0])[:40])
    assert saver.finish(offered(run_dir, 4))
    uploader.upload(target, run_dir, "rl", 2)
    assert [path.rpartition("_")[2] for path in target._headers()] == [
        "000000002.json",
        "000000004.json",
    ]
    assert fetched(url, run_dir) == 4


def test_an_upload_after_a_rollback_removes_the_later_steps(run_dir, tmp_path):
    url = f"file://{tmp_path}/far"
    target = uploader.target_of(url, run_dir, "rl")
    assert saver.finish(offered(run_dir, 4))
    uploader.upload(target, run_dir, "rl", 2)
    shutil.rmtree(folder(run_dir, 4))  # the run goes on from step 2
    assert saver.finish(offered(run_dir, 3))
    uploader.upload(target, run_dir, "rl", 2)
    assert [path.rpartition("_")[2] for path in target._headers()] == ["000000003.json"]
    assert fetched(url, run_dir) == 3


def test_a_checkpoint_that_the_trainer_removes_meanwhile_is_uploaded(
    run_dir, tmp_path, monkeypatch
):
    describe = uploader.describe

    def removed(*args):
        header = describe(*args)
        checkpoints.discard_all(run_dir, "rl")
        return header

    monkeypatch.setattr(uploader, "describe", removed)
    upload_to(f"file://{tmp_path}/far", run_dir)
    assert fetched(f"file://{tmp_path}/far", run_dir) == 2
    assert not list((run_dir / "checkpoints").iterdir())


def test_a_damaged_block_is_found_and_a_run_with_a_checkpoint_takes_no_other(run_dir, tmp_path):
    url = f"file://{tmp_path}/far"
    upload_to(url, run_dir)
    target = uploader.target_of(url, run_dir, "rl")
    with pytest.raises(OrreryError, match=r"checkpoints: has a checkpoint, and the run resumes"):
        uploader.restore(target, run_dir, "rl")
    block = next(each for each in target.newest().blocks() if each.part.endswith("safetensors"))
    path = tmp_path / "far" / run_dir.name / "rl" / "blocks" / block.sha256
    path.write_bytes(bytes(block.size))
    disk = tmp_path / "other" / run_dir.name
    with pytest.raises(ElasticError, match=r"trainer/rank_0\.safetensors has another sha256"):
        uploader.restore(target, disk, "rl")
    assert checkpoints.steps(disk) == []


def test_a_run_that_goes_on_gets_no_checkpoint_from_elsewhere(run_dir, tmp_path, monkeypatch):
    roles = SimpleNamespace(checkpoint_target=f"file://{tmp_path}/far")
    monkeypatch.setattr("orrery.launcher.runs.find", lambda *_: SimpleNamespace(path=run_dir))
    monkeypatch.setattr("orrery.launcher.site.load_site", lambda _: SimpleNamespace(roles=roles))
    monkeypatch.setattr("orrery.manifest.identity.find_workspace", lambda: tmp_path)
    with hold_lock(run_dir), pytest.raises(OrreryError, match="another launcher is running"):
        cli.restore("it", "rl")
    with pytest.raises(typer.Exit) as end:
        cli.restore("it", "rl")
    assert end.value.exit_code == 1  # as it has a checkpoint


@pytest.mark.parametrize("url", ["nowhere://bucket/runs", "file:///proc/nowhere"])
def test_a_bad_target_is_refused_in_one_sentence(url):
    argv = [sys.executable, "-m", "orrery.trainer.uploader", "check", url]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: [roles] checkpoint_target {url!r}: ")
    assert done.stderr.count("\n") == 1 and "check the address" in done.stderr
