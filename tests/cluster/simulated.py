"""Control the simulated cluster: commands as its user on the head node, power cuts, Slurm's states.

- `run` and `start` are the unprivileged user at a login shell on the head, in the copy of the
  checkout. `on` is root on a node.
- The user's files are on this machine too, under `checkout`. A node's /tmp and /dev/shm are not.
- `wait_until` polls. When it gives up, it prints what it waited for and Slurm's queue.
"""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from orrery.runtime.run_directory import whole_checkpoints

SCRIPT = Path(__file__).with_name("cluster.sh")
SLURM = ("snakemake", "--profile", "slurm")
NODES = ("node1", "node2", "node3", "node4", "node5")


@dataclass(frozen=True)
class Row:
    """One line of sacct: a job, a component of a heterogeneous one, or a step."""

    id: str
    state: str
    nodes: str
    exit_code: str


class Terminal:
    """A command that runs as the user at a terminal. `output` is its output so far."""

    def __init__(self, cluster: "Cluster", argv: tuple[str, ...], env: Mapping[str, str]):
        self.cluster = cluster
        number = len(list(cluster.terminals.glob("*.log")))
        self.log, self.pid_file = (
            cluster.terminals / f"{number}.log",
            cluster.terminals / f"{number}.pid",
        )
        self.log.touch()
        self.pid_file.touch()
        shutil.chown(self.pid_file, cluster.login)
        shell = ("bash", "-c", 'echo $$ >"$0"; exec "$@"', str(self.pid_file), *argv)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                cluster.command("user", *_with(env), *shell),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                # Tests in the background of a script ignore it, and so would their children.
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )

    @property
    def output(self) -> str:
        return self.log.read_text()

    def interrupt(self) -> None:
        """Ctrl-C: SIGINT to all of the terminal's foreground processes."""
        self._signal("INT")

    def kill(self) -> None:
        """The terminal is gone, at once and without a word."""
        if self.process.poll() is None:
            self._signal("KILL")
            self.process.wait(20)

    def wait(self, within_s: float) -> int:
        """The exit code."""
        self.cluster.wait_until(
            f"{self.process.args[4:]} ends",
            lambda: self.process.poll() is not None,
            within_s,
            lambda: self.output[-3000:],
        )
        return self.process.returncode

    def _signal(self, name: str) -> None:
        self.cluster.wait_until(
            "the command has begun",
            lambda: self.pid_file.read_text().strip() or self.process.poll() is not None,
            20,
        )
        self.cluster.on(
            "head", "kill", f"-{name}", "--", f"-{self.pid_file.read_text().strip()}", check=False
        )


class Cluster:
    """The cluster that `cluster.sh up` made."""

    def __init__(self) -> None:
        self.root = Path(os.environ.get("ORRERY_CLUSTER_ROOT", "/srv/orrery-cluster"))
        self.login = os.environ.get("ORRERY_CLUSTER_USER", "orrery")
        self.images = Path(
            os.environ.get("ORRERY_CLUSTER_IMAGES", "/var/cache/orrery-test-cluster/images")
        )
        self.home = self.root / "users" / self.login
        self.checkout = self.home / "orrery"
        self.small_disk = self.root / "small"
        self.terminals = self.root / "terminals"
        self.terminals.mkdir(mode=0o755, exist_ok=True)
        self.started: list[Terminal] = []

    @staticmethod
    def command(*argv: str) -> list[str]:
        return ["bash", str(SCRIPT), *argv]

    def run(
        self,
        *argv: str,
        check: bool = True,
        env: Mapping[str, str] | None = None,
        timeout_s: float = 60,
    ) -> subprocess.CompletedProcess:
        """The user's command on the head, to its end."""
        return _done(self.command("user", *_with(env or {}), *argv), check, timeout_s)

    def start(self, *argv: str, env: Mapping[str, str] | None = None) -> Terminal:
        """Start the user's command on the head. It ends with the test at the latest."""
        self.started.append(Terminal(self, argv, env or {}))
        return self.started[-1]

    def on(
        self, node: str, *argv: str, check: bool = True, timeout_s: float = 60
    ) -> subprocess.CompletedProcess:
        """Root's command on a node."""
        return _done(self.command("exec", node, *argv), check, timeout_s)

    def submit(self, *options: str) -> str:
        """`sbatch`: the job's id."""
        return self.run("sbatch", "--parsable", "--output=/dev/null", *options).stdout.strip()

    def crash(self, node: str) -> None:
        """A power cut."""
        _done(self.command("crash", node), True, 20)

    def boot(self, node: str) -> None:
        """Power, where it is off, and slurmd."""
        _done(self.command("start", node), True, 60)

    def end_time(self, job: str, seconds: int) -> None:
        """Move the job's time limit to so many seconds from now (Slurm checks every 30 s)."""
        self.on("head", "scontrol", "update", f"JobId={job}", f"EndTime=now+{seconds}")

    def queue(self) -> dict[str, str]:
        """Return the state of each waiting or running job (component)."""
        rows = self.run("squeue", "--noheader", "--format=%i|%T").stdout.split()
        return dict(row.split("|") for row in rows)

    def state(self, job: str) -> str:
        """Return Slurm's state of a job, also of an ended job."""
        return self.run(
            "squeue", "--states=all", "--noheader", "--format=%T", f"--jobs={job}"
        ).stdout.split()[0]

    def restarts(self, job: str) -> int:
        shown = self.run("scontrol", "show", "job", "--oneliner", job).stdout
        return int(shown.split("Restarts=")[1].split()[0])

    def accounting(self, job: str, *options: str) -> list[Row]:
        """Return sacct's rows (1 to 2 s late). `-D` adds the starts before a requeue."""
        text = self.run(
            "sacct",
            "--noheader",
            "--parsable2",
            "--format=JobID,State,NodeList,ExitCode",
            *options,
            "-j",
            job,
        ).stdout
        return [Row(*line.split("|")) for line in text.splitlines()]

    def node_states(self) -> dict[str, str]:
        rows = self.run(
            "sinfo", "--noheader", "--Node", "--partition=gpu", "--format=%N %T"
        ).stdout.splitlines()
        return dict(row.split() for row in rows)

    def any_image(self) -> Path:
        """Return the smallest built image, for tests that need any image."""
        return min(self.images.glob("*.sif"), key=lambda path: path.stat().st_size)

    def wait_until(
        self,
        what: str,
        condition: Callable[[], Any],
        within_s: float,
        explain: Callable[[], str] | None = None,
    ) -> Any:
        """Return the first true value of `condition()`."""
        deadline = time.monotonic() + within_s
        while not (value := condition()):
            if time.monotonic() > deadline:
                queue = self.run("squeue", "--states=all", check=False).stdout
                raise AssertionError(
                    f"{within_s:.0f} s passed and not yet so: "
                    f"{what}\n{explain() if explain else ''}\n{queue}"
                )
            time.sleep(0.2)
        return value

    def restore(self) -> None:
        """No jobs, no terminals, every node idle, the small disk empty."""
        while self.started:
            self.started.pop().kill()
        self.on("head", "scancel", "--user", self.login)
        for path in self.small_disk.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
        states = self.node_states()
        for node in NODES:
            if self.on(node, "pidof", "slurmd", check=False).returncode:
                self.boot(node)
            if "drain" in states[node]:
                self.on(
                    "head", "scontrol", "update", f"NodeName={node}", "State=RESUME", check=False
                )
        self.wait_until(
            "every node is idle",
            lambda: not self.queue() and set(self.node_states().values()) == {"idle"},
            60,
        )


class Run:
    """A run of the user's checkout, by name."""

    def __init__(self, cluster: Cluster, name: str):
        self.cluster, self.name = cluster, name

    @property
    def path(self) -> Path:
        return max(
            self.cluster.checkout.glob(f"runs/{self.name}-*"), key=lambda path: path.stat().st_mtime
        )

    def remove(self) -> None:
        for path in self.cluster.checkout.glob(f"runs/{self.name}-*"):
            self.cluster.run("rm", "-rf", str(path))

    def start(self, *more: str, **env: str) -> Terminal:
        return self.cluster.start(*SLURM, *more, self.name, env=env)

    def status(self) -> dict:
        try:
            return json.loads((self.path / "status.json").read_text())
        except (OSError, ValueError):
            return {}

    def rows(self, process: str) -> list[dict]:
        path = self.path / "metrics" / f"{process}.jsonl"
        return (
            [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            if path.exists()
            else []
        )

    def steps(self) -> list[int]:
        return [
            row["step"]
            for row in self.rows("trainer.0")
            if "loss" in row and row.get("stage") == "rl"
        ]

    def checkpoints(self) -> list[int]:
        return [one.step for one in whole_checkpoints(self.path)]

    def is_in(self, stage: str, terminal: Terminal) -> bool:
        if terminal.process.poll() is not None:
            raise AssertionError(f"the run ended before {stage}\n{terminal.output[-3000:]}")
        return self.status().get("stage") == stage and self.status().get("state") == "running"

    def health(self, process: str) -> dict:
        try:
            return json.loads(
                (self.path / "stages" / "rl" / "health" / f"{process}.json").read_text()
            )
        except (OSError, ValueError):
            return {}

    def job(self) -> str:
        return self.status()["slurm_job"]

    def receipt(self) -> dict:
        return json.loads((self.path / "receipt.json").read_text())

    def user(self, *argv: str) -> str:
        done = self.cluster.run(*argv, check=False)
        return done.stdout + done.stderr


def _with(env: Mapping[str, str]) -> list[str]:
    return ["env", *(f"{name}={value}" for name, value in env.items())] if env else []


def _done(argv: list[str], check: bool, timeout_s: float) -> subprocess.CompletedProcess:
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s
    )
    if check and done.returncode:
        raise AssertionError(
            f"{' '.join(argv[2:])}: exit code "
            f"{done.returncode}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"
        )
    return done
