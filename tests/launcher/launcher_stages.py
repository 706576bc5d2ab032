"""A stage of fake roles under a real launcher, and what tests ask of it."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil

HERE = Path(__file__).parent


def launch(
    run_dir: Path, *processes: tuple[str, list[str]], restarts: int = 0,
    deadline_scale: float = 1.0, ignored: tuple[int, ...] = (),
) -> subprocess.Popen:  # fmt: skip
    """Start a launcher over these (role, acts). Inference and router end with the stage.

    Engines are restarted `restarts` times. `ignored`: signals of SIGINT and SIGHUP
    that the launcher ignores.
    """
    plan, script = [], {}
    for index, (role, acts) in enumerate(processes):
        kind = "with_stage" if role in ("inference", "headless", "router") else "itself"
        plan.append(
            {
                "role": role,
                "index": index,
                "module": "launcher_fakes",
                "num_devices": 0,
                "ends": kind,
            }
        )
        script[index] = [role, acts]
    (run_dir / "plan.json").write_text(json.dumps(plan))
    (run_dir / "script.json").write_text(json.dumps(script))
    paths = [
        HERE,
        *(
            Path(path).resolve()
            for path in os.environ.get("PYTHONPATH", "").split(os.pathsep)
            if path
        ),
    ]
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    env |= {"WANDB_API_KEY": "a key alone asks for nothing", "WANDB_PROJECT": ""}

    def dispose() -> None:
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN if number in ignored else signal.SIG_DFL)

    return subprocess.Popen(
        [
            sys.executable,
            str(HERE / "launcher_fakes.py"),
            "launch",
            str(run_dir),
            str(restarts),
            str(deadline_scale),
        ],
        stderr=subprocess.PIPE,
        text=True,
        env=env,
        cwd=run_dir.parent,
        preexec_fn=dispose,
    )


def end(launcher: subprocess.Popen) -> tuple[int, str]:
    _, stderr = launcher.communicate(timeout=90)
    return launcher.returncode, stderr


def ready(run_dir: Path, *names: str, within_s: float = 30) -> dict[str, int]:
    """Pids of the processes, once each has said that it is there."""
    return {
        name: int(wait_for(lambda name=name: text(run_dir / f"ready.{name}"), within_s))
        for name in names
    }


def text(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def wait_for(condition, within_s: float):
    limit = time.monotonic() + within_s
    while not (value := condition()):
        assert time.monotonic() < limit, "it did not happen in time"
        time.sleep(0.02)
    return value


def alive(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
