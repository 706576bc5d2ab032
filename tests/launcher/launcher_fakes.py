"""Fakes for the launcher's tests: tiny roles as real processes, and a launcher as a real process.

`python -m launcher_fakes --run-dir …` is a role, whose acts `<run_dir>/script.json` has by index.
`python launcher_fakes.py launch RUN_DIR [RESTARTS [DEADLINE_SCALE]]` is a launcher with the plan in
`<run_dir>/plan.json`. A test may write an error of a wall clock in seconds into
`<run_dir>/wall_clock.<role or launcher>`. Only `launch` imports the launcher, because
that takes longer than a role's start.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

from orrery.manifest.errors import OrreryError, OutOfMemory, RunFailed
from orrery.runtime import process_control, run_directory
from orrery.runtime.network import run_token
from orrery.runtime.role_context import role_process
from orrery.runtime.run_directory import memory_prefix
from orrery.wire import rendezvous


def be_a_role() -> None:
    run_dir = Path(sys.argv[sys.argv.index("--run-dir") + 1])
    index = sys.argv[sys.argv.index("--index") + 1]
    script = json.loads((run_dir / "script.json").read_text())
    role, acts = script[index]
    set_wall_clock(run_dir / f"wall_clock.{role}")
    if acts == ["orchestrate, then block"]:
        return orchestrate_then_block()
    if acts and acts[0] == "break at import":
        raise ImportError("no module named nowhere")
    with role_process(role) as ctx:
        ctx.health.doing("acting", step=3)
        for act in acts:
            if act.isdecimal():
                ctx.metrics.write(step=1, reward=int(act))
            elif act == "serve":
                while True:
                    time.sleep(0.05)
            elif act == "wind down":
                while not process_control.preemption_requested(ctx.run_dir, ctx.stage):
                    time.sleep(0.05)
                raise process_control.Preempted(3)
            elif act == "fail":
                raise RunFailed("the moon is in the way")
            elif act == "run out of memory":
                raise OutOfMemory("rank 0 ran out of memory; set trainer.x: 1 in the run file")
            elif act == "fail of engine 0":
                raise RunFailed("engine 0 is gone (/pause: ConnectionResetError); see its log")
            elif act == "fail and stay":
                ctx.health.failed("the moon is in the way")
                while True:
                    time.sleep(0.05)
            elif act == "wait":
                with ctx.health.waiting("batch 4 from orchestrator", deadline_s=600):
                    while True:
                        time.sleep(0.05)
            elif act == "wait until asked":
                with ctx.health.waiting("batch 4 from orchestrator", deadline_s=600):
                    while not (ctx.run_dir / "go").exists():
                        time.sleep(0.05)
            elif act == "wait and fail":
                with ctx.health.waiting("batch 4 from orchestrator", deadline_s=600):
                    raise RunFailed("nothing came")
            elif act == "stall":
                with ctx.health.waiting("batch 4 from orchestrator", deadline_s=-60):
                    while True:
                        time.sleep(0.05)
            elif act == "child":  # one in the group, one that left it
                for new_session in (False, True):
                    child = subprocess.Popen(
                        [sys.executable, "-c", "import time; time.sleep(300)"],
                        start_new_session=new_session,
                    )
                    with open(ctx.run_dir / "children", "a") as file:
                        file.write(f"{child.pid}\n")
            elif act == "ignore SIGTERM":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
            elif act == "ignore SIGTERM once":
                if not ctx.incarnation:
                    signal.signal(signal.SIGTERM, signal.SIG_IGN)
            elif act == "shm":
                Path(f"/dev/shm/{memory_prefix(ctx.run_dir)}{ctx.attempt}").mkdir()
            elif act == "caches":
                made = (
                    run_directory.disk_folder(ctx.run_dir, ctx.stage)
                    / f"attempt_{ctx.attempt}"
                    / str(ctx.index)
                )
                made.mkdir(parents=True)
                (made / "block.bin").touch()
            elif act == "look":
                row = {
                    "port": ctx.port,
                    "attempt": ctx.attempt,
                    "cores": sorted(os.sched_getaffinity(0)),
                }
                row["env"] = {
                    key: os.environ[key] for key in ("OMP_NUM_THREADS", "CUDA_VISIBLE_DEVICES")
                }
                row["token_length"] = len(run_token())
                row["told"] = [
                    process.pid
                    for process in psutil.Process(os.getppid()).children(recursive=True)
                    if is_told(process)
                ]
                (ctx.run_dir / f"look.{ctx.name}.json").write_text(json.dumps(row))
            elif act == "endpoint":
                rendezvous.publish(ctx, f"http://127.0.0.1:{ctx.port}")
            elif act == "turn once":
                if not ctx.incarnation:
                    ctx.health.beat_loop(3.0)
            elif act == "until asked":
                while not (ctx.run_dir / "go").exists():
                    time.sleep(0.05)
            elif act == "ready":
                (ctx.run_dir / f"ready.{ctx.name}").write_text(str(os.getpid()))
            else:
                raise AssertionError(act)


def orchestrate_then_block() -> None:
    """Run the orchestrator's process and event loop. The file `go` blocks the loop in a call."""
    from orrery.orchestrator import __main__ as orchestrator

    async def fleet(ctx, leases=None):
        ctx.health.doing("judging", step=3)
        (ctx.run_dir / f"ready.{ctx.name}").write_text(str(os.getpid()))
        while not (ctx.run_dir / "go").exists():
            await asyncio.sleep(0.05)
        time.sleep(3600)

    orchestrator.assemble.engine_pool = fleet
    orchestrator.main()


def set_wall_clock(file: Path) -> None:
    wall = time.time
    time.time = lambda: wall() + (float(file.read_text()) if file.exists() else 0.0)


def is_told(process: psutil.Process) -> bool:
    """Return whether a readable environment or command line holds the token."""
    try:
        return run_token() in f"{process.environ()} {process.cmdline()}"
    except psutil.Error:
        return False


def launch(run_dir: Path, restarts: int = 0, deadline_scale: float = 1.0) -> int:
    from orrery.launcher.site import Network, Roles, Site
    from orrery.launcher.stage import Job
    from orrery.launcher.supervisor import run_stage
    from orrery.manifest.identity import Workspace
    from orrery.manifest.plan import ProcessPlan, StagePlan

    processes = tuple(ProcessPlan(**row) for row in json.loads((run_dir / "plan.json").read_text()))
    if not (run_dir / "manifest.json").exists():
        shutil.copy(
            Path(__file__).parents[2] / "manifests" / "reverse_text.json", run_dir / "manifest.json"
        )
    set_wall_clock(run_dir / "wall_clock.launcher")
    job = Job(
        run_dir,
        StagePlan("rl", (), processes),
        ("init", "rl", "report"),
        None,
        10,
        "make demo",
        Site(
            roles=Roles(deadline_scale=deadline_scale),
            network=Network(interface="lo", gbit_per_s=40.0),
        ),
        Workspace(run_dir),
        max_restarts=restarts,
    )
    try:
        outcome = run_stage(job)
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    print(outcome.message, file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    if sys.argv[1] == "launch":
        raise SystemExit(
            launch(Path(sys.argv[2]), *map(int, sys.argv[3:4]), *map(float, sys.argv[4:]))
        )
    be_a_role()
