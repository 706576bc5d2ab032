"""Run one stage, from its first process to its marker file `DONE`.

- If a process fails or a server ends early, the stage ends within seconds. Only engines can restart
  (`failure.py`).
- If the launcher is killed, its processes end too. The next start removes their files.
- A stage is never retried, but Slurm may requeue its job.
"""

import hashlib
import json
import math
import os
import secrets
import shutil
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack, suppress
from dataclasses import replace

from orrery.launcher import failure, receipt
from orrery.launcher.failure import EngineRestarts
from orrery.launcher.process import (
    Process,
    check_packages,
    environment,
    share_cores,
    share_devices,
)
from orrery.launcher.runs import (
    LOOKED_AT_S,
    Run,
    find,
    hold_lock,
    newest_checkpoint,
    read_status,
    resume_command,
)
from orrery.launcher.site import check_network, cluster, load_site
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.allocation import allocation
from orrery.launcher.slurm.queue import IN_JOB, script_facts
from orrery.launcher.stage import (
    Interrupts,
    Job,
    Outcome,
    Preemption,
    RunningStage,
    catch_signals,
    check_target,
    end_all,
    end_leftovers,
    end_strays,
    finish_saves,
    remove_scratch,
    remove_weights,
    requeue,
    scratch_prefixes,
)
from orrery.manifest.errors import OrreryError, explain_os_error
from orrery.manifest.identity import Workspace, find_workspace, pretty_json
from orrery.manifest.machine import gpus, refuse_other_device
from orrery.manifest.plan import ENGINE_ROLES, check_supported
from orrery.manifest.plan import stage as stage_plan_of
from orrery.manifest.publish import sync_folders, write_atomic
from orrery.manifest.schema import Manifest
from orrery.observe import hang_detector
from orrery.observe.hang_detector import STILL_S, RankStallDetector
from orrery.observe.progress import Observer, Progress, View
from orrery.runtime import run_directory
from orrery.runtime.health import DONE, FAILED, HANG_S, listed
from orrery.runtime.metrics import PERIOD_S, MetricsFile, Sampler
from orrery.runtime.network import free_ports
from orrery.runtime.process_control import adopt_orphans, hide_memory
from orrery.runtime.role_context import log_level
from orrery.runtime.run_directory import (
    MANIFEST,
    begin,
    begin_attempt,
    done_path,
    fence_dir,
    health_dir,
    logs_dir,
    no_requeue_path,
    request_path,
)
from orrery.runtime.timing import HAND_OVER_S, Pace, duration

POLL_S, LOOK_S = 0.1, 0.5
HUNG_S = 5.0  # maximum wait for a failed process to end
SERVERS_END_S, FAILED_END_S, STOPPED_END_S = 10.0, 4.0, 10.0
SITE_END_S = STOPPED_END_S + HAND_OVER_S  # grace period of a run over several sites
SAVES_S = 3.0  # announce a longer wait for checkpoints to be saved
RESTART_LOCK_S = 90.0  # maximum wait for the lock, which a lost node's launcher may hold


def job(word: str, stage_name: str, workspace: Workspace | None = None) -> Job:
    workspace = workspace or find_workspace()
    run = find(word, workspace)
    stage_plan, site = stage_plan_of(run.manifest, stage_name), load_site(workspace)
    check_supported(run.manifest, stage_plan)
    hardware = run.manifest.hardware
    inside = None
    if IN_JOB in os.environ:
        inside = allocation(site, cluster(workspace), hardware, workspace)
        check_network(site, stage_plan.num_nodes, f"{stage_name} of {run.manifest.name}")
    elif stage_plan.num_nodes > 1:
        raise OrreryError(
            f"hardware.num_nodes = {hardware.num_nodes}: {stage_name} needs {stage_plan.num_nodes} "
            f"nodes, but this is one. Type `snakemake --profile slurm {run.manifest.name}` on a "
            "cluster, or choose a hardware axis of one node"
        )
    _check_lock(run, workspace)
    if hardware.accelerator != "cpu":
        for gpu in gpus().values():
            refuse_other_device(run.manifest, gpu.name)
    _begin(run)
    sft, rl = run.manifest.stages.sft, run.manifest.stages.rl
    return Job(
        run_dir=run.path,
        plan=stage_plan,
        stages=run.stages,
        num_devices=None if hardware.accelerator == "cpu" else hardware.devices_per_node,
        num_steps={"sft": sft.num_steps if sft else None, "rl": rl.num_steps}.get(stage_name),
        resume=resume_command(run, stage_name, workspace, "slurm" if inside else "local"),
        site=site,
        workspace=workspace,
        allocation=inside,
        max_restarts=run.manifest.inference.max_restarts,
    )


def _begin(run: Run) -> None:
    is_new = not run.path.exists()
    try:
        begin(run.path)
        if not (run.path / MANIFEST).exists():
            write_atomic(run.path / MANIFEST, pretty_json(run.manifest).encode())
    except OSError:
        if is_new:
            shutil.rmtree(run.path, ignore_errors=True)
        raise


def _check_lock(run: Run, workspace: Workspace) -> None:
    lock_file = lock_of(run.manifest)
    lock_bytes = (workspace.root / lock_file).read_bytes()
    if hashlib.sha256(lock_bytes).hexdigest() == run.manifest.python_lock_sha256:
        return
    name, adopt = run.manifest.name, ""
    if run.finished():
        adopt = f" and `orrery adopt {name} {run.path.name}` to copy this run's state into it"
    raise OrreryError(
        f"{run.path.name}: {lock_file} differs from the lock of its manifest. Type "
        f"`orrery render {name}` for a run of the current lock{adopt}, or check out the old lock "
        "and type `make setup`"
    )


def lock_of(manifest: Manifest) -> str:
    return f"locks/{'cpu' if manifest.hardware.accelerator == 'cpu' else 'cuda'}.txt"


def run_stage(job: Job) -> Outcome:
    log_level()  # raises for an unknown log level
    restarted = job.allocation is not None and job.allocation.restarts > 0
    os.umask(os.umask(0o077) | 0o002)  # users outside the group may not write
    with ExitStack() as stack:
        interrupts = stack.enter_context(catch_signals())
        within_s = RESTART_LOCK_S if restarted else LOOKED_AT_S
        stack.enter_context(hold_lock(job.run_dir, within_s))
        for before in job.plan.after:
            marker = done_path(job.run_dir, before)
            if not marker.exists():
                command = receipt.command(job.run_dir, job.plan.name, before, job.resume)
                missing = f"{job.plan.name}: {before} is not done ({marker} is missing)"
                raise OrreryError(f"{missing}. Type `{command}` to run the stages in order")
        marker = done_path(job.run_dir, job.plan.name)
        if marker.exists():
            text = f"{job.plan.name}: done already; remove {marker} to run it again"
            return Outcome("done", text, 0)
        return Supervisor(job, interrupts).run()


class Supervisor:
    def __init__(self, job: Job, interrupts: Interrupts):
        self.job, run_dir = job, job.run_dir
        self.last = read_status(run_dir)
        self.scratch = scratch_prefixes(run_dir)
        if self.last is not None:
            end_leftovers(run_dir, self.last)
        target = job.site.roles.checkpoint_target
        finish_saves(run_dir, target, lambda: bool(interrupts.received))
        if target and job.site.containers is None:
            check_target(target)
        self._remove_files()
        self.stage = RunningStage(job, interrupts, begin_attempt(run_dir))
        hide_memory()
        self.token, self.start = secrets.token_hex(16), secrets.token_hex(8)
        self.preemption = Preemption(self.stage)
        self.restarts = EngineRestarts(self.stage, self.start)
        scale = self.stage.deadline_scale
        self.rank_stalls = RankStallDetector(STILL_S * scale, HANG_S * scale)
        self.code = receipt.code_state(run_dir, job.workspace.root)
        self.images: receipt.ImageReader | None = None
        self.software: Future[receipt.Software] | None = None
        self.began_s, self.wall_s = time.monotonic(), 0.0

    def _remove_files(self) -> None:
        remove_weights(self.job.run_dir)
        remove_scratch(self.scratch, self.job.site)

    def run(self) -> Outcome:
        stage, run_dir, name = self.stage, self.stage.run_dir, self.stage.name
        self._clear_folders()
        adopt_orphans()
        stage.metrics = MetricsFile(run_dir, name, "launcher", 0, stage.attempt)
        finished = [one for one in self.job.stages if done_path(run_dir, one).exists()]
        progress = Progress(
            *(run_dir.name, name, stage.attempt, self.job.stages, finished),
            *(self.job.num_steps, stage.status.started_s),
            newest_checkpoint(run_dir, name) or 0,
        )
        observer, view = Observer(run_dir, progress), View(progress)
        outcome = Outcome("failed", f"{name}: the launcher failed", 1)
        try:
            self._tell_restart()
            self._tell_changes()
            self._verify_inputs()
            outcome = stage.stopped() if stage.interrupts.received else self._start_and_watch(view)
            stage.write_status("stopping", outcome.message)
        except OrreryError as error:
            outcome = Outcome("failed", str(error), error.exit_code)
        except OSError as error:
            outcome = Outcome(
                "failed", f"{name}: {explain_os_error(error)}; {stage.resume_hint()}", 1
            )
        finally:
            outcome = self._end(outcome, observer, view)
        if outcome.state == "done":
            row: dict[str, float | None] = {"attempt": stage.attempt}
            row |= {
                "started_s": stage.status.started_s,
                "ended_s": stage.status.ended_s,
                "wall_s": self.wall_s,
            }
            sync_folders(run_dir)  # all files must be durable before DONE exists
            write_atomic(done_path(run_dir, name), (json.dumps(row) + "\n").encode())
        return outcome

    def _clear_folders(self) -> None:
        run_dir, name = self.stage.run_dir, self.stage.name
        health, fenced = health_dir(run_dir, name), fence_dir(run_dir, name)
        for folder in (health, self.stage.endpoints, fenced):
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
        request_path(run_dir, name).unlink(missing_ok=True)
        no_requeue_path(run_dir, name).unlink(missing_ok=True)
        logs_dir(run_dir).mkdir(exist_ok=True)

    def _end(self, outcome: Outcome, observer: Observer, view: View) -> Outcome:
        stage, allocation = self.stage, self.job.allocation
        is_site = (stage.run_dir / run_directory.SITE_FILE).exists()
        stopped_s = SITE_END_S if is_site else STOPPED_END_S
        grace_s = {"done": SERVERS_END_S, "failed": FAILED_END_S}.get(outcome.state, stopped_s)
        if stuck := end_all(stage, grace_s):
            outcome = replace(outcome, message=f"{outcome.message}; {stuck}")
        outcome = self._finish_saves(outcome)
        if outcome.requeue == "ask" and allocation is not None:
            requeue(stage)  # first, because Slurm may end this process during cleanup
        observer.close()
        view.close()
        stage.metrics.close()
        end_strays(stage.processes, self.start)
        if allocation is not None:
            shared = run_directory.memory_prefix(stage.run_dir).removesuffix("-")
            allocation.clean(*self.scratch, shared)  # removes checkpoint copies too
        self._remove_files()
        stage.status.ended_s, self.wall_s = time.time(), time.monotonic() - self.began_s
        with suppress(OSError):  # the disk may be full
            stage.write_status(outcome.state, outcome.message)
        stage.log(outcome.message)
        try:
            self._write_receipt(outcome)
        except Exception as error:  # a receipt error must not fail the stage
            why = explain_os_error(error) if isinstance(error, OSError) else repr(error)
            stage.log(f"no receipt: {why}")
        return outcome

    def _finish_saves(self, outcome: Outcome) -> Outcome:
        """Wait until checkpoint copies are saved, or until the next Ctrl-C.

        Before a requeue, wait no longer than the Slurm job's time allows.
        """
        stage, received = self.stage, len(self.stage.interrupts.received)
        limit_s = self.preemption.saved_by_s if outcome.requeue == "ask" else math.inf
        tell_s = time.monotonic() + SAVES_S

        def is_cut_short() -> bool:
            nonlocal tell_s
            if (now_s := time.monotonic()) > tell_s:
                tell_s = math.inf
                stage.tell("waiting for copied checkpoints to be saved; Ctrl-C ends this wait")
            return len(stage.interrupts.received) > received or now_s > limit_s

        before = newest_checkpoint(stage.run_dir, stage.name)
        target = self.job.site.roles.checkpoint_target
        finish_saves(stage.run_dir, target, is_cut_short)
        after = newest_checkpoint(stage.run_dir, stage.name)
        if after == before or outcome.state == "done":
            return outcome
        text = f"{outcome.message}; the checkpoint of step {after} was saved afterwards"
        return replace(outcome, message=text)

    def _write_receipt(self, outcome: Outcome) -> None:
        stage, allocation = self.stage, self.job.allocation
        if outcome.state == "done" and self.images is not None:
            self.images.wait()
        status = stage.status
        receipt.record(
            *(stage.run_dir, stage.name, stage.attempt, outcome.state, outcome.message),
            *(status.started_s, status.ended_s),
            nodes=sorted({process.node for process in stage.processes}),
            images=self.images.facts() if self.images else {},
            slurm_job_id=allocation.job if allocation else None,
            job_script=script_facts(self.job.site.slurm, self.job.workspace.root)
            if allocation
            else None,
            network=network.model_dump() if (network := self.job.site.network) else None,
            workspace_root=self.job.workspace.root,
            code=self.code,
            software=self.software.result() if self.software else None,
            secrets=[self.token],
            engine_restarts=stage.engine_restarts,
            endings={process.name: process.ending for process in stage.processes},
        )

    def _tell_restart(self) -> None:
        allocation, stage, last = self.job.allocation, self.stage, self.last
        if last is None or allocation is None or last.slurm_job != allocation.job:
            return
        job, roles = allocation.job, last.roles
        nodes = {role.node for role in roles}
        lost = sorted(nodes & {*queue.lost_nodes(job), *queue.unusable_nodes(sorted(nodes))})
        held = []
        for node in lost:
            names = listed(role.name for role in roles if role.node == node)
            held.append(f"{node} with {names} was lost")
        before = last.message.removeprefix(f"{stage.name}: ").split("; ")[0]
        why = "; ".join(held) or before or "the job was requeued"
        text = f"started again by Slurm (job {job}): {why}; {stage.resume_point()}"
        stage.log(f"{stage.name}: {text}")
        print(f"{stage.name}: {text}", file=sys.stderr, flush=True)

    def _tell_changes(self) -> None:
        job, stage = self.job, self.stage
        images = job.allocation.images(job.plan) if job.allocation else {}
        if changes := receipt.changes(stage.run_dir, job.stages, stage.name, self.code, images):
            stage.tell(f"continues with {changes}; {receipt.RECEIPT} records both versions")

    def _verify_inputs(self) -> None:
        stage, run_dir = self.stage, self.stage.run_dir

        def remedy(maker: str) -> str:
            command = receipt.command(run_dir, stage.name, maker, self.job.resume)
            again = f"rm {done_path(run_dir, maker)} && {command}"
            return f"type `{again}` to run {maker} again and go on"

        stage.write_status("running", "")
        received = stage.interrupts.received
        unknown = receipt.verify(
            run_dir, stage.name, self.job.stages, remedy, lambda: bool(received)
        )
        if unknown:
            makers = " and ".join(unknown)
            stage.tell(
                f"the files of {makers} are not verified: {receipt.RECEIPT} does not list them"
            )

    def _start_and_watch(self, view: View) -> Outcome:
        stage, allocation, plan = self.stage, self.job.allocation, self.job.plan
        if allocation is not None:
            tasks = allocation.start(plan, stage.run_dir, stage.attempt, self.start, self.token)
            self.images = receipt.ImageReader(stage.run_dir, allocation.images(plan))
            stage.processes = tasks
            for node in dict.fromkeys(task.node for task in tasks):
                stage.log(f"{node}: {listed(task.name for task in tasks if task.node == node)}")
        else:
            self._start_local()
        in_images = self.images is not None and bool(self.images.facts())
        self.software = ThreadPoolExecutor(1, "software").submit(receipt.host_software, in_images)
        stage.write_status("running", "")
        return self._watch(view)

    def _start_local(self) -> None:
        stage, plans = self.stage, self.job.plan.processes
        check_packages(stage.run_name, self.job.num_devices is not None)
        cores = share_cores(sorted(os.sched_getaffinity(0)), plans)
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        offered = [str(index) for index in range(self.job.num_devices or 0)]
        if visible:
            offered = visible.split(",")
        try:
            devices = {} if self.job.num_devices is None else share_devices(offered, plans)
        except ValueError as error:
            remedy = "lower trainer.mesh or inference.num_replicas"
            if visible:
                remedy = "name others in CUDA_VISIBLE_DEVICES"
            raise OrreryError(f"{stage.name}: {error}; {remedy}") from None
        started: list[Process] = []
        stage.processes = started
        for plan, port in zip(plans, free_ports(len(plans)), strict=True):
            key = plan.role, plan.index
            own = cores.get(key)
            env = environment(os.environ, self.job.site, self.start, own, devices.get(key))
            process = Process(
                plan, stage.run_dir, stage.name, stage.attempt, port, own, env, self.token
            )
            started.append(process)
            on = sorted(own) if own else "any"
            stage.log(f"{process.name}: pid {process.pid}, port {port}, cores {on}")

    def _watch(self, view: View) -> Outcome:
        stage = self.stage
        roles = [process.pid for process in stage.processes]
        usage = Sampler(os.getpid(), without=roles)  # roles record their own usage
        look_at_s, pace = 0.0, Pace(PERIOD_S, time.monotonic())
        while True:
            if stage.interrupts.received:
                return stage.stopped()
            if (outcome := self.preemption.poll()) is not None:
                return outcome
            if any(map(stage.has_failed, stage.processes)) and not self.restarts.restart_ended():
                return failure.failure_outcome(stage, self.restarts.refusal)
            if all(one.poll() == 0 for one in stage.processes if one.plan.ends == "itself"):
                took = duration(time.monotonic() - self.began_s)
                return Outcome("done", f"{stage.name}: done in {took}", 0)
            now_s = time.monotonic()
            if now_s >= look_at_s:
                look_at_s = now_s + LOOK_S
                if (outcome := self._look()) is not None:
                    return outcome
            if pace.due(now_s):
                stage.metrics.write(event="usage", processes={"launcher.0": usage.sample()})
            states = {process.name: process.ending or "running" for process in stage.processes}
            view.draw(stage.health, states)
            time.sleep(POLL_S)

    def _look(self) -> Outcome | None:
        stage = self.stage
        seen = stage.read_health()
        self.restarts.kill_fenced()
        running = {process.name for process in stage.processes if process.poll() is None}
        for name in running & seen.keys():
            health = seen[name]
            if health.doing == FAILED and stage.health_view.now_s - health.time_s > HUNG_S:
                if health.role not in ENGINE_ROLES or not self.job.max_restarts:
                    return failure.failure_outcome(stage, self.restarts.refusal)
                next(process for process in stage.processes if process.name == name).kill()
        self.restarts.look(seen, running)
        scale = stage.deadline_scale
        known = {
            name: one
            for name, one in seen.items()
            if (name in running and name not in stage.fenced) or one.doing == DONE
        }
        stall = hang_detector.find_stall(
            known,
            stage.health_view.now_s,
            hang_detector.GRACE_S * scale,
            hang_detector.DEADLOCK_S * scale,
        )
        living = {name: health for name, health in stage.health.items() if name in running}
        stall = stall or self.rank_stalls.look(living, time.monotonic())
        return None if stall is None else failure.stall_outcome(stage, stall.sentence)
