"""The saver of copies: kills of trainer and saver at any moment, and what the next start saves."""

import json
import multiprocessing
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from forked_roles import import_before
from saver_cases import content, copied, die_before, folder, offered

from orrery.launcher.stage import finish_saves
from orrery.manifest.errors import RunFailed
from orrery.runtime.run_directory import CHECKPOINT_TARGET, SHARED_MEMORY, saves_prefix
from orrery.trainer import saver
from orrery.trainer.uploader import target_of
from orrery.wire import checkpoints


@pytest.fixture
def run_dir(tmp_path):
    made = tmp_path / f"run-{secrets.token_hex(6)}"
    (made / "logs").mkdir(parents=True)
    yield made
    for path in SHARED_MEMORY.glob(f"{saves_prefix(made)}*"):
        shutil.rmtree(path)


def newest(run_dir: Path) -> int:
    """Return the step of the newest checkpoint, after reading all of it."""
    step, attempt = checkpoints.latest(run_dir)
    found = checkpoints.checkpoint_dir(run_dir, step, attempt)
    checkpoints.verify(found)
    assert (found / "trainer" / "rank_0.safetensors").read_bytes() == content(step)
    return step


def test_a_kill_before_any_change_of_a_file_leaves_a_readable_checkpoint_and_saving_goes_on(
    run_dir,
):
    import_before("saver_cases")
    context = multiprocessing.get_context("forkserver")
    kills, seen = 0, set()
    while True:
        shutil.rmtree(run_dir / "checkpoints", ignore_errors=True)
        assert saver.finish(offered(run_dir, 1))
        memory = offered(run_dir, 2, keep=1)
        process = context.Process(target=die_before, args=(kills + 1, saver.finish, memory))
        process.start()
        process.join(60)
        seen.add(newest(run_dir))
        assert saver.finish(memory)
        assert checkpoints.steps(run_dir) == [newest(run_dir)] == [2]
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        kills += 1
    assert kills > 10 and seen == {1, 2}


TRAINER = """
import os, sys
from pathlib import Path
from saver_cases import offered
from orrery.trainer.saver import Saver
run_dir = Path(sys.argv[1])
saver = Saver(offered(run_dir, 1))
saver.save()
offered(run_dir, 2)
os.kill(os.getpid(), 9)
"""


def test_a_killed_trainer_leaves_its_copy_to_the_saver_and_the_uploader(run_dir, tmp_path):
    path = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", TRAINER, str(run_dir)],
        env=os.environ | {"PYTHONPATH": path, CHECKPOINT_TARGET: f"file://{tmp_path}/far"},
        capture_output=True,
        timeout=60,
    )  # saver and uploader inherit stderr, so the pipe ends when they do
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert newest(run_dir) == 2
    assert not list(SHARED_MEMORY.glob(f"{saves_prefix(run_dir)}*"))
    assert target_of(f"file://{tmp_path}/far", run_dir, "rl").newest().round == 2


SAVER = """
import os
from orrery.trainer.saver import Uploads
uploads = Uploads()
uploads._command = ["sleep", "60"]
uploads.begin()
print(uploads._process.pid, flush=True)
os.kill(os.getpid(), 9)
"""


def test_an_uploader_ends_with_its_saver_as_the_next_saver_starts_another():
    said = subprocess.run([sys.executable, "-c", SAVER], capture_output=True, timeout=30).stdout
    limit_s = time.monotonic() + 5
    while psutil.pid_exists(pid := int(said)) and psutil.Process(pid).status() != "zombie":
        assert time.monotonic() < limit_s
        time.sleep(0.01)


def test_a_killed_saver_is_started_again(run_dir):
    one = saver.Saver(offered(run_dir, 1))
    one.save()
    one._process.kill()
    one._process.wait()
    offered(run_dir, 2)
    one.save()
    assert newest(run_dir) == 2
    one.close()
    one.wait()


def test_a_saver_that_died_is_replaced_when_the_trainer_closes_it(run_dir):
    one = saver.Saver(offered(run_dir, 1))
    one.save()
    one._process.kill()
    one._process.wait()
    offered(run_dir, 2)
    one.close()
    one.wait()
    assert newest(run_dir) == 2


def test_a_rank_whose_files_an_earlier_saver_wrote_may_find_them_renamed(run_dir, monkeypatch):
    offered(run_dir, 1, rank=0, size=2)
    offered(run_dir, 1, rank=1, size=2)
    finish_saves(run_dir, "", lambda: False)
    memory = offered(run_dir, 1, rank=1, size=2)
    saver.partial_of(folder(run_dir, 1) / "trainer").rmdir()
    real, asked = saver._is_listed, list[Path]()

    def was_listed(path: Path) -> bool:
        asked.append(path)
        return len(asked) == 1 or real(path)

    monkeypatch.setattr(saver, "_is_listed", was_listed)
    saver.save(memory)
    assert len(asked) == 2 and newest(run_dir) == 1


def test_the_next_start_saves_what_killed_savers_of_several_ranks_have_left(run_dir):
    offered(run_dir, 1, rank=0, size=2)
    offered(run_dir, 1, rank=1, size=2)
    finish_saves(run_dir, "", lambda: False)
    assert newest(run_dir) == 1
    assert (folder(run_dir, 1) / "trainer" / "rank_1.safetensors").read_bytes() == content(1, 1)
    assert not list(SHARED_MEMORY.glob(f"{saves_prefix(run_dir)}*"))


def test_a_copy_in_the_memory_of_ended_processes_is_given_up(run_dir):
    memory = offered(run_dir, 1)
    (memory / saver.COPY).unlink()
    (memory / saver.COPY).symlink_to("/proc/self/fd/0")
    finish_saves(run_dir, "", lambda: False)
    assert "ended with its saver" in (run_dir / "logs" / "trainer.0.log").read_text()
    assert not memory.exists() and checkpoints.latest(run_dir) is None


def test_a_copy_without_those_of_other_ranks_is_given_up(run_dir, monkeypatch, capsys):
    monkeypatch.setattr(saver, "ORPHAN_S", 0.0)
    assert saver.finish(offered(run_dir, 1))
    copied(run_dir, 2, rank=1)
    assert not saver.finish(offered(run_dir, 2, size=2))
    assert "has no files of rank 1 after 0 s" in capsys.readouterr().err
    assert newest(run_dir) == 1


def test_a_checkpoint_that_a_newer_attempt_has_discarded_is_not_written_again(run_dir):
    memory = offered(run_dir, 3)
    checkpoints.discard_incomplete(run_dir)
    with pytest.raises(RunFailed, match=r"step_3.*: was removed before it was saved"):
        saver.save(memory)
    assert not folder(run_dir, 3).exists()


def test_a_saver_that_cannot_write_says_so_and_the_next_try_succeeds(run_dir):
    memory = offered(run_dir, 1)
    one = saver.Saver(memory)
    partial = saver.partial_of(folder(run_dir, 1) / "trainer")
    (partial / "rank_0.safetensors").mkdir()
    with pytest.raises(RunFailed, match=r"rank_0\.safetensors: Is a directory; the run goes on"):
        one.save()
    (partial / "rank_0.safetensors").rmdir()
    one.close()
    one.wait()
    assert newest(run_dir) == 1
    assert json.loads((folder(run_dir, 1) / "trainer" / "state.json").read_text()) == {}
