"""Lend an inference engine on this machine to a run at another site.

`orrery.orchestrator.guests.lend` connects the engine to the run.
"""

import json
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

from orrery.launcher.preemption import catch_signals
from orrery.launcher.process import Process, environment
from orrery.launcher.runs import Run, check_address, find
from orrery.launcher.serve import CUDA, STOP_S
from orrery.launcher.site import load_site
from orrery.launcher.stage import Interrupts, end_strays
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import Workspace, pretty_json
from orrery.manifest.plan import ProcessPlan, check_supported
from orrery.runtime.health import read_health
from orrery.runtime.network import free_ports
from orrery.runtime.run_directory import (
    MANIFEST,
    SITE_FILE,
    begin,
    endpoints_dir,
    logs_dir,
    memory_prefix,
    remove_memory,
    weights_path,
)

STAGE = "rl"
POLL_S = 0.1
ENGINE = ProcessPlan("inference", 0, "orrery.inference", 0, "with_stage")
AGENT = ProcessPlan("orchestrator", 0, "orrery.orchestrator.guests.lend", 0, "itself")


def lend(
    word: str, address: str, listen: str, name: str, certificates: Path, workspace: Workspace
) -> int:
    """Lend an engine until the run ends or a signal arrives. Return the exit code.

    Raise OrreryError if the manifest does not set `orchestrator.guests`.
    """
    run = find(word, workspace)
    if run.manifest.orchestrator.guests is None:
        raise OrreryError(
            f"orchestrator.guests: null in {run.manifest.name}, so it takes no engines of other "
            "sites; choose a run with the axis jsonnet/elastic/guests.libsonnet"
        )
    check_supported(run.manifest)
    check_address("ADDRESS:PORT", address)
    if listen:
        check_address("--listen", listen)
    place = {"listen": listen, "join": address, "name": name, "shard": None}
    place |= {"certificates": str(certificates.resolve())}
    weights = _first_weights(run)
    run_dir = Path(tempfile.mkdtemp(prefix="orrery-lend-"))
    has_failed, processes = True, list[Process]()
    start = secrets.token_hex(8)
    try:
        with catch_signals() as interrupts:
            try:
                _prepare(run_dir, run, weights, place)
                _start(processes, run_dir, start, workspace)
                _await_end(processes, run_dir, interrupts)
            finally:
                _end(processes, interrupts)
                end_strays(processes, start)
        has_failed = False
        return 128 + interrupts.received[0] if interrupts.received else 0
    finally:
        remove_memory(memory_prefix(run_dir))
        if not has_failed:
            shutil.rmtree(run_dir, ignore_errors=True)


def _first_weights(run: Run) -> Path:
    for stage in (run.manifest.stage_before_rl, "init"):
        if ((path := weights_path(run.path, stage)) / "config.json").is_file():
            return path
    raise OrreryError(
        f"{run.path.name}: no weights to start an engine with; type `orrery run "
        f"{run.manifest.name} init`"
    )


def _prepare(run_dir: Path, run: Run, weights: Path, place: Mapping[str, object]) -> None:
    begin(run_dir)
    (run_dir / MANIFEST).write_text(pretty_json(run.manifest))
    (run_dir / SITE_FILE).write_text(json.dumps(place))
    logs_dir(run_dir).mkdir()
    endpoints_dir(run_dir, STAGE).mkdir(parents=True)
    link = weights_path(run_dir, run.manifest.stage_before_rl)
    link.parent.mkdir()
    link.symlink_to(weights.resolve())


def _start(processes: list[Process], run_dir: Path, start: str, workspace: Workspace) -> None:
    token, cores = secrets.token_hex(16), frozenset(os.sched_getaffinity(0))
    env = environment(os.environ, load_site(workspace), start, cores, None)
    env.pop(CUDA)
    env |= {CUDA: os.environ[CUDA]} if CUDA in os.environ else {}
    for plan, port in zip((ENGINE, AGENT), free_ports(2), strict=True):
        processes.append(Process(plan, run_dir, STAGE, 1, port, None, env, token))
    logs = ", ".join(str(process.log) for process in processes)
    print(f"starting an engine to lend; logs: {logs}", file=sys.stderr, flush=True)


def _await_end(processes: list[Process], run_dir: Path, interrupts: Interrupts) -> None:
    engine, agent = processes
    while not interrupts.received:
        if agent.poll() == 0:
            print("the run is over", file=sys.stderr)
            return
        for process in (agent, engine):
            if process.poll() is not None:
                health = read_health(run_dir, STAGE).get(process.name)
                error = (health.error if health else None) or f"it ended: {process.last_output()}"
                raise RunFailed(f"{error}. Its log is {process.log}")
        time.sleep(POLL_S)


def _end(processes: list[Process], interrupts: Interrupts) -> None:
    for process in processes:
        process.signal(signal.SIGTERM)
    limit_s = time.monotonic() + STOP_S
    while any(process.poll() is None for process in processes):
        if time.monotonic() > limit_s or len(interrupts.received) > 1:
            break
        time.sleep(POLL_S)
    for process in processes:
        process.kill()
        process.wait(STOP_S)
