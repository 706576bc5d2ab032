"""Slurm's states, queue, accounting and endings of tasks, in lines that Slurm 22.05 prints."""

import asyncio
import os
import signal
import socket
import time
from dataclasses import replace
from types import SimpleNamespace

import pytest

from orrery.launcher import stage
from orrery.launcher.runs import Status, hold_lock
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.allocation import SlurmTask, Step, failed_node, task_endings
from orrery.launcher.stage import stop_run
from orrery.manifest.errors import OrreryError
from orrery.runtime.run_directory import no_requeue_path

# squeue's JOB STATE CODES, whole
DOCUMENTED = [
    *(
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "CONFIGURING",
        "COMPLETING",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
    ),
    *(
        "OUT_OF_MEMORY",
        "PENDING",
        "PREEMPTED",
        "RUNNING",
        "RESV_DEL_HOLD",
        "REQUEUE_FED",
        "REQUEUE_HOLD",
        "REQUEUED",
    ),
    *(
        "RESIZING",
        "REVOKED",
        "SIGNALING",
        "SPECIAL_EXIT",
        "STAGE_OUT",
        "STOPPED",
        "SUSPENDED",
        "TIMEOUT",
    ),
]


@pytest.mark.parametrize("word", DOCUMENTED)
def test_every_documented_state_is_mapped(word):
    states = "waiting", "running", "ending", "done", "lost", "failed"
    assert queue.state_of(word, "1") in states


def test_only_completed_is_done():
    assert [word for word in queue.STATES if queue.STATES[word] == "done"] == ["COMPLETED"]


def test_states_with_more_words():
    assert queue.state_of("CANCELLED by 1000", "1") == "failed"
    assert queue.state_of("CANCELLED+", "1") == "failed"


@pytest.mark.parametrize("word", ["", "SLEEPING", "completed"])
def test_an_unknown_state_is_an_error(word):
    with pytest.raises(OrreryError, match=r"job 7 is .* unknown"):
        queue.state_of(word, "7")


QUEUE = """12+0|run-0123456789ab.rl|RUNNING|None|node[1-2]|1:07|58:53
12+1|run-0123456789ab.rl|RUNNING|None|node[3-4]|1:07|58:53
15|other-0123456789ab.init|PENDING|Resources||0:00|10:00
"""


def test_a_heterogeneous_job_is_its_leader():
    jobs = queue.parse_queue(QUEUE)
    assert [(job.id, job.state, job.nodes) for job in jobs] == [
        ("12", "running", "node[1-2]"),
        ("15", "waiting", ""),
    ]


def test_accounting_by_leader():
    assert queue.parse_accounting("12+0|NODE_FAIL\n12+1|CANCELLED by 0\n15|COMPLETED\n") == {
        "12": "NODE_FAIL",
        "15": "COMPLETED",
    }


@pytest.mark.parametrize(
    "text, expected",
    [
        ("58:53", 3533),
        ("2:03:04", 7384),
        ("1-02:03:04", 93784),
        ("UNLIMITED", None),
        ("INVALID", None),
        ("0:07", 7),
    ],
)
def test_time_left(text, expected):
    assert queue.seconds(text) == expected


def test_names_without_brackets_need_no_slurm():
    assert queue.hostnames("a,b") == ["a", "b"]


def test_how_tasks_ended():
    said = (
        "srun: error: node3: task 1: Killed\n"
        "srun: launch/slurm: _step_signal: Terminating StepId=12.0\n"
        "srun: error: node3: tasks 0,2-3: Terminated\n"
        "srun: error: node4: task 4: Exited with exit code 75\n"
        "srun: error: node4: task 5: Exited with exit code 137\n"
        "srun: error: node4: task 6: Exited with exit code 143\n"
        "srun: error: node4: task 7: Out Of Memory\n"
        "srun: error: node3: task 1: Exited with exit code 1\n"
    )
    assert task_endings(said) == {
        1: -signal.SIGKILL, 0: -signal.SIGTERM, 2: -signal.SIGTERM, 3: -signal.SIGTERM, 4: 75,
        5: -signal.SIGKILL, 6: 143, 7: -signal.SIGKILL,
    }  # fmt: skip


def test_an_ended_srun_says_how_each_task_ended_even_if_its_log_was_just_read(tmp_path):
    step = object.__new__(Step)
    step.log, step.begin, step.is_killed = tmp_path / "step.log", 0, False
    step._read, step._looked_s = (0, {}), time.monotonic()
    step._popen = SimpleNamespace(poll=lambda: 137)
    step.log.write_text("srun: error: node1: task 0: Exited with exit code 75\n")
    task = object.__new__(SlurmTask)
    task.step, task.rank = step, 0
    assert task.poll() == 75
    task.rank = 1
    assert task.poll() == -signal.SIGTERM


def test_a_lost_node_is_named():
    assert failed_node("srun: error: Node failure on node2\nsrun: Job step aborted") == "node2"
    assert failed_node("srun: error: node3: task 1: Killed") is None


def test_jobs_are_cancelled_also_while_slurm_is_asked_about_them(monkeypatch):
    """Snakemake lets its list of jobs go while it asks, and Ctrl-C comes when it likes."""
    plugin = pytest.importorskip("snakemake_executor_plugin_orrery_slurm")
    executor = object.__new__(plugin.Executor)
    executor._going, executor._troubled, cancelled = ["12", "13"], {}, []
    executor.report_job_success = lambda info: None
    monkeypatch.setattr(plugin.queue, "cancel", lambda ids: cancelled.append(list(ids)))
    jobs = [SimpleNamespace(external_jobid=job) for job in ("12", "13")]

    def words(_ids):
        executor.cancel_jobs([])
        return {"12": "COMPLETED", "13": "RUNNING"}

    monkeypatch.setattr(plugin.queue, "slurm_states", words)

    async def check():
        return [info.external_jobid async for info in executor.check_active_jobs(jobs)]

    assert asyncio.run(check()) == ["13"]
    executor.cancel_jobs(jobs)
    assert cancelled == [["12", "13"], ["13"]]


@pytest.fixture
def two_checkouts(tmp_path, monkeypatch):
    """Two checkouts' folders of one run, a queue with the second's job, and Slurm's commands."""
    here, there = (tmp_path / name / "runs" / "run-0123456789ab" for name in ("here", "there"))
    here.mkdir(parents=True)
    rows, asked = [f"12|{queue.job_name(there, 'rl')}|RUNNING|None|node1|1:07|58:53\n"], []

    def call(*command, script=None):
        asked.append(command)
        if command[0] == "sbatch":
            rows.append(f"13|{command[1]}|PENDING|Resources||0:00|10:00\n")
            return "13\n"
        if command[0] == "scancel":
            rows[:] = [row for row in rows if row.partition("|")[0] not in command]
        return "".join(rows)

    monkeypatch.setattr(queue, "call", call)
    return here, there, asked


def test_the_same_run_in_another_checkout_keeps_its_jobs(two_checkouts):
    here, there, asked = two_checkouts
    with pytest.raises(OrreryError, match=r"is not running. Type"):
        stop_run(here, on_cluster=True)
    assert "scancel" not in {command[0] for command in asked}
    assert stop_run(there, on_cluster=True) == "run-0123456789ab: cancelled job 12 (rl, running)"


def test_a_stage_is_submitted_beside_the_job_of_another_checkout_and_once(two_checkouts):
    here, _, asked = two_checkouts
    executor = object.__new__(
        pytest.importorskip("snakemake_executor_plugin_orrery_slurm").Executor
    )
    command = ["sbatch", queue.job_name(here, "rl")]
    assert [
        (
            executor._submit(here, "rl", command).id,
            executor._submit(here, "rl", command).slurm_state,
        )
    ] == [("13", "PENDING")]
    assert [one[0] for one in asked].count("sbatch") == 1


@pytest.fixture
def completing(tmp_path, monkeypatch):
    """A run's folder, its executor, and the states that squeue reports of job 12, one a call."""
    plugin = pytest.importorskip("snakemake_executor_plugin_orrery_slurm")
    executor, told = object.__new__(plugin.Executor), []
    executor.logger = SimpleNamespace(info=told.append)
    monkeypatch.setattr(plugin, "ENDING_POLL_S", 0.0)
    states, name = [], queue.job_name(tmp_path, "rl")

    def call(*command, script=None):
        if command[0] == "sbatch":
            return "13\n"
        if command[0] != "squeue" or not (state := states.pop(0) if states[1:] else states[0]):
            return ""
        return f"12|{name}|{state}|None|node1|1:07|58:53\n"

    monkeypatch.setattr(queue, "call", call)
    return plugin, executor, states, told


@pytest.mark.parametrize(("later", "followed"), [("", "13"), ("PENDING", "12"), ("RUNNING", "12")])
def test_a_completing_job_is_not_followed_unless_slurm_queues_it_again(
    completing, tmp_path, later, followed
):
    _, executor, states, told = completing
    states += ["COMPLETING", "COMPLETING", later]
    assert executor._submit(tmp_path, "rl", ["sbatch"]).id == followed
    [line] = told
    assert line.endswith("waits until Slurm job 12 of an earlier start has completed")


def test_a_job_that_never_completes_ends_the_wait_with_one_sentence(
    completing, tmp_path, monkeypatch
):
    plugin, executor, states, _ = completing
    monkeypatch.setattr(plugin, "ENDING_S", 0.0)
    states += ["COMPLETING"]
    with pytest.raises(OrreryError, match="Slurm job 12 of an earlier start is still completing"):
        executor._submit(tmp_path, "rl", ["sbatch"])


def test_a_stop_says_that_slurm_still_cleans_up(completing, tmp_path, monkeypatch):
    _, _, states, _ = completing
    states += ["RUNNING", "COMPLETING"]
    monkeypatch.setattr(stage, "STOP_S", 0.0)
    assert stop_run(tmp_path, on_cluster=True).endswith(
        "cancelled job 12 (rl, running); Slurm still cleans up after 12 (completing)"
    )


@pytest.mark.parametrize("slurm_job", ["12", None])
def test_a_checkpoint_is_asked_of_a_launcher_that_has_started_alone(
    completing, tmp_path, slurm_job
):
    """A requeued job starts, and the status is that of the dead attempt."""
    _, _, states, _ = completing
    states += ["RUNNING"]
    dead = Status("rl", 1, "running", "", 1, socket.gethostname(), slurm_job, 0.0)
    stay = no_requeue_path(tmp_path, "rl")
    stay.parent.mkdir(parents=True)
    with stage.catch_signals() as interrupts, hold_lock(tmp_path):
        for status in (dead, replace(dead, state="stopped")):
            status.write(tmp_path)
            with pytest.raises(OrreryError, match=r"its launcher is starting. Try again"):
                stop_run(tmp_path, on_cluster=True, checkpoint=True)
        assert not stay.exists() and not interrupts.preemption_requested
        replace(dead, launcher_pid=os.getpid()).write(tmp_path)
        assert "for a checkpoint" in stop_run(tmp_path, on_cluster=True, checkpoint=True)
        assert stay.exists() and interrupts.preemption_requested == (slurm_job is None)
        replace(dead, launcher_pid=os.getpid(), stage="sft").write(tmp_path)
        with pytest.raises(OrreryError, match="needs a running rl stage, but sft is running"):
            stop_run(tmp_path, on_cluster=True, checkpoint=True)


def test_ctrl_c_at_the_terminal_does_not_reach_a_command_of_slurm(tmp_path, monkeypatch):
    command = tmp_path / "squeue"
    command.write_text('#!/bin/sh\ncut -d" " -f5 /proc/$$/stat\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert int(queue.call("squeue")) != os.getpgrp()
