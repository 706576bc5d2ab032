"""Run each Snakemake rule of the pipeline as one Slurm job.

The executor waits for requeued jobs, never resubmits, and cancels its jobs when interrupted.

This plugin replaces snakemake-executor-plugin-slurm, which lacks heterogeneous jobs and treats an
unknown job state as success.
"""

import errno
import os
import re
import shutil
import sys
import time
from collections.abc import AsyncGenerator
from pathlib import Path

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.jobs import JobExecutorInterface
from snakemake_interface_executor_plugins.settings import CommonSettings

from orrery.launcher.containers import images_of
from orrery.launcher.process import last_line
from orrery.launcher.runs import find, read_status
from orrery.launcher.site import check_network, cluster, load_site
from orrery.launcher.slurm import queue
from orrery.launcher.slurm.queue import batch_job
from orrery.manifest import plan
from orrery.manifest.errors import OrreryError, explain_os_error
from orrery.manifest.identity import find_workspace
from orrery.manifest.plan import check_supported
from orrery.runtime.run_directory import log_path, logs_dir

PAUSES_S = (2.0, 10.0, 30.0)
NO_ANSWER = "no answer within|unable to contact|timed out|Connection refused|try again"
AWAY = re.compile(NO_ANSWER, re.IGNORECASE)
LOST_S = 120.0  # limit until Slurm requeues a job of a lost node
ENDING_S, ENDING_POLL_S = 300.0, 2.0  # limit for Slurm to clean up an earlier job
UNKNOWN_S = 300.0  # limit for a missing job state: accounting may be late
TOO_LITTLE_BYTES = 64 << 10  # with less free space, an empty log means a full disk

common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=True,
    pass_default_resources_args=True,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
    init_seconds_before_status_checks=1,
)


class Executor(RemoteExecutor):
    def __post_init__(self) -> None:
        try:
            self.workspace = find_workspace()
            self.site, poll_s = load_site(self.workspace), cluster(self.workspace).poll_s
        except OrreryError as error:
            raise SystemExit(f"error: {error}") from None
        self.next_seconds_between_status_checks = poll_s
        self._troubled: dict[str, float] = {}  # job id → time when its state became lost or unknown
        # Slurm jobs to cancel, because `active_jobs` is empty during state checks.
        self._going: list[str] = []

    def run_job(self, job: JobExecutorInterface) -> None:
        run, stage = job.wildcards["run"], job.rule.name
        info = SubmittedJobInfo(job)
        try:  # report errors before a job waits in the queue
            one = find(run, self.workspace)
            stage_plan = plan.stage(one.manifest, stage)
            check_supported(one.manifest, stage_plan)
            check_network(self.site, stage_plan.num_nodes, f"{stage} of {one.manifest.name}")
            images_of(self.site.containers, self.workspace, one.manifest.hardware, stage_plan)
        except OrreryError as error:
            self._fail(info, f"{run} {stage}: {error}")
            return
        logs_dir(one.path).mkdir(parents=True, exist_ok=True)
        options = str(job.resources["sbatch"])
        try:
            command, script = batch_job(
                one.path, stage, options, job.shellcmd, self.site, Path.cwd()
            )
            going = self._submit(one.path, stage, command, script)
        except OrreryError as error:
            self._fail(info, f"{run} {stage}: {error}")
            return
        info.external_jobid = going.id
        self._going.append(going.id)
        already = f" already, {going.slurm_state.lower()}" if going.slurm_state else ""
        self.logger.info(f"{stage} of {run} is Slurm job {going.id}{already}")
        self.report_job_submission(info)

    def _submit(
        self, run_dir: Path, stage: str, command: list[str], script: str | None = None
    ) -> queue.SlurmJob:
        """Return the stage's job of an earlier Snakemake process, or submit one."""

        def submit() -> queue.SlurmJob:
            if job := self._earlier_job(run_dir, stage):
                return job
            name = queue.job_name(run_dir, stage)
            job_id = queue.call(*command, script=script).strip().split(";")[0]
            return queue.SlurmJob(job_id, name, "", "", "", "", "")

        return queue.retry(submit, PAUSES_S, lambda error: AWAY.search(str(error)))

    def _earlier_job(self, run_dir: Path, stage: str) -> queue.SlurmJob | None:
        """Return the stage's waiting or running job, or None.

        Wait while the only job is COMPLETING, because Slurm will forget or requeue it.
        """
        limit_s, is_told = time.monotonic() + ENDING_S, False
        while True:
            jobs = [job for job in queue.run_jobs(run_dir) if job.stage == stage]
            if going := [job for job in jobs if job.state != "ending"]:
                return going[0]
            if not jobs:
                return None
            ended = f"Slurm job {jobs[0].id} of an earlier start"
            if time.monotonic() > limit_s:
                raise OrreryError(
                    f"{ended} is still completing after {ENDING_S:.0f} s. Type `squeue --me` to "
                    "see its nodes, and ask the cluster's operators to end it"
                )
            if not is_told:
                self.logger.info(f"{stage} of {run_dir.name} waits until {ended} has completed")
                is_told = True
            time.sleep(ENDING_POLL_S)

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        try:
            words = queue.slurm_states(str(info.external_jobid) for info in active_jobs)
        except OrreryError as error:
            self.logger.warning(f"Slurm did not answer; asking again: {error}")
            for info in active_jobs:
                yield info
            return
        for info in active_jobs:
            job = str(info.external_jobid)
            word = words.get(job)
            try:
                state = None if word is None else queue.state_of(word, job)
            except OrreryError as error:
                self._fail(info, str(error))
                continue
            if state in ("waiting", "running", "ending"):
                self._troubled.pop(job, None)
                yield info
            elif state == "done":
                self._going.remove(job)
                self.report_job_success(info)
            elif state == "failed":
                self._fail(info, self._why(info, word))
            elif self._troubled_for(job) < (UNKNOWN_S if state is None else LOST_S):
                yield info
            else:
                unknown = f"Slurm no longer reports job {job}"
                self._fail(info, unknown if state is None else self._why(info, word))

    def _troubled_for(self, job: str) -> float:
        return time.monotonic() - self._troubled.setdefault(job, time.monotonic())

    def _why(self, info: SubmittedJobInfo, word: str | None) -> str:
        run_dir, stage = Path("runs") / info.job.wildcards["run"], info.job.rule.name
        said = read_status(run_dir)
        is_own = said is not None and said.slurm_job == info.external_jobid
        if said and is_own and said.state in ("failed", "stopped") and said.message:
            return said.message
        log = log_path(run_dir, f"slurm.{info.external_jobid}")
        line = last_line(log, 0).removeprefix("error: ")
        if not line and shutil.disk_usage(run_dir).free < TOO_LITTLE_BYTES:
            line = explain_os_error(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(run_dir)))
        ended = f"{stage}: job {info.external_jobid} ended with {word}"
        return ended + (f": {line}" if line else "") + f"; its output is {log}"

    def _fail(self, info: SubmittedJobInfo, sentence: str) -> None:
        if info.external_jobid:
            self._going.remove(str(info.external_jobid))
        print(f"error: {sentence}", file=sys.stderr, flush=True)
        self.report_job_error(info, msg=f"{sentence}. ")

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        ids = list(self._going)
        try:
            queue.cancel(ids)
        except OrreryError as error:
            jobs = ", ".join(ids)
            raise WorkflowError(f"Slurm jobs {jobs} may still run: {error}") from None
        if ids:
            print(f"cancelled Slurm job {', '.join(ids)}", file=sys.stderr, flush=True)
