"""Measure the loss of an engine: seconds from `kill -9` until it serves again, tokens meanwhile.

- The script runs the whole RL stage of an untrained model: launcher, two engines behind
  vllm-router, orchestrator, trainer. It kills one of the engines `--kills` times in turn.
- For each loss: seconds until the orchestrator fences the engine, until the launcher restarts it,
  and until it gets requests with the current version. Tokens/s of batches in that time are compared
  with 30 s before the first kill. The pause is that of the longest update meanwhile.

    python benchmarks/inference/engine_loss.py                # quiet machine, about 4 minutes
    python benchmarks/inference/engine_loss.py --wire nccl    # weights over a direct wire
    python benchmarks/inference/engine_loss.py --manifest reverse_text_prefill_decode
    python benchmarks/inference/engine_loss.py --wide    # one engine over two local "nodes" on CPU
    benchmarks/async/gpu_host.sh figure ../inference/engine_loss.py \\
        --manifest asynchrony_h200_4 --wire nccl    # four GPUs
"""

import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import rows as all_rows
from record import parser_of, record
from workspace import workspace_with

ROOT = Path(__file__).parents[2]
BASE = "reverse_text_smoke"
NAME = "engine_loss"
# One engine of a mixture: a server with two ranks, and a process with the ranks of a second node.
WIDE_BASE = "reverse_text_moe"
WIDE = {
    "num_replicas": 1,
    "data_parallel": 4,
    "nodes_per_replica": 2,
    "expert_parallel": True,
    "router": {"kind": "none"},
}
NEVER = 100_000  # steps
WARM_STEPS = 4
LIMIT_S = 600.0


def manifest(base: str, kills: int, wire: str, wide: bool) -> Manifest:
    """Return `base` without an end, a warm start or evaluations.

    `base` has two engines or more. With `wide` it has the one engine of WIDE, and returns routes.
    """
    content = json.loads((ROOT / "manifests" / f"{base}.json").read_text())
    if wide:
        content["inference"] |= WIDE
        content["transport"]["routed_experts"] = True
    elif content["inference"]["num_replicas"] < 2:
        raise SystemExit(
            f"--manifest {base}: it has one engine, so no engine would serve meanwhile; choose one "
            "with two or more"
        )
    content["name"] = NAME
    content["inference"]["max_restarts"] = kills
    content["transport"]["weights"] = wire
    content["trainer"]["checkpoint"]["interval_steps"] = NEVER
    content["orchestrator"]["drop_zero_advantage_groups"] = False
    content["orchestrator"]["evaluation"] = {
        "interval_steps": NEVER,
        "num_problems": 1,
        "rollouts_per_problem": 1,
        "stop_at": None,
    }
    content["stages"]["sft"] = None
    content["stages"]["rl"] = {"num_steps": NEVER}
    return Manifest.model_validate(content)


class Run:
    """A run in its own workspace."""

    def __init__(self, workspace: Path, what: Manifest):
        self.workspace, self.folder = workspace, workspace_with(workspace, what)

    def start(self, stage: str) -> subprocess.Popen[bytes]:
        env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
        return subprocess.Popen(
            [sys.executable, "-m", "orrery.launcher.cli", "run", NAME, stage],
            cwd=self.workspace,
            env=env,
        )

    def rows(self, role: str, event: str) -> list[dict]:
        path = self.folder / "metrics" / f"{role}.0.jsonl"
        return [row for row in all_rows(path) if row.get("event") == event] if path.exists() else []

    def pid(self, name: str) -> int:
        roles = json.loads((self.folder / "status.json").read_text())["roles"]
        return next(role["pid"] for role in roles if role["name"] == name)

    def wait(self, launcher: subprocess.Popen[bytes], what: str, condition) -> None:
        end = time.monotonic() + LIMIT_S
        while not condition():
            if launcher.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{what}: did not happen (launcher: {launcher.poll()})")
            time.sleep(0.05)

    def tokens_per_s(self, begin_s: float, end_s: float) -> float:
        """Return the tokens/s of the batches in this time."""
        cut = [
            row for row in self.rows("orchestrator", "batch") if begin_s < row["time_s"] <= end_s
        ]
        return sum(sum(row["staleness_counts"]) for row in cut) / (end_s - begin_s)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--kills", type=int, default=2)
    parser.add_argument("--wire", default="files", choices=("files", "nccl", "nixl"))
    parser.add_argument("--manifest")
    parser.add_argument("--wide", action="store_true", help="kill the second node of one engine")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    base = args.manifest or (WIDE_BASE if args.wide else BASE)
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder), manifest(base, args.kills, args.wire, args.wide))
        if code := run.start("init").wait():
            raise SystemExit(code)
        launcher = run.start("rl")
        try:
            names = ["headless.0"] if args.wide else ["inference.1", "inference.0"]
            losses, ordinary = measure(run, launcher, args.kills, names)
        finally:
            launcher.send_signal(signal.SIGTERM)
            launcher.wait()
    name = "_".join(
        [
            "engine_loss",
            *["wide"] * args.wide,
            *[each for each in (base, args.wire) if each not in (BASE, WIDE_BASE, "files")],
        ]
    )
    record(
        args.out / f"{name}.json",
        figure=f"inference/{name}",
        value=statistics.median(loss["healthy_s"] for loss in losses),
        unit="s",
        goal=None,
        better="lower",
        details={
            "tokens_per_s_before": ordinary,
            "manifest": base,
            "wire": args.wire,
            "losses": losses,
        },
    )


def measure(
    run: Run, launcher: subprocess.Popen[bytes], kills: int, names: list[str]
) -> tuple[list[dict], float]:
    """Kill the processes `names` in turn. Return each loss, and the tokens/s before the first."""

    def batches() -> int:
        return len(run.rows("orchestrator", "batch"))

    run.wait(launcher, "a warm run", lambda: batches() > WARM_STEPS)
    begin_s = time.time()
    time.sleep(30.0)
    ordinary = run.tokens_per_s(begin_s, time.time())
    losses: list[dict] = []
    for number in range(kills):
        killed_s, name = time.time(), names[number % len(names)]
        os.kill(run.pid(name), signal.SIGKILL)
        run.wait(
            launcher,
            "an engine that serves again",
            lambda number=number: len(run.rows("orchestrator", "engine_healthy")) > number,
        )
        healthy = run.rows("orchestrator", "engine_healthy")[number]
        updates = [row for row in run.rows("orchestrator", "update") if row["time_s"] > killed_s]
        have = batches()
        run.wait(launcher, "batches of both engines", lambda have=have: batches() > have + 1)
        lost = run.rows("orchestrator", "batch")[-1]["dropped"].get(
            "engine_gone", 0
        )  # total until the newest batch
        losses.append({
            "killed": name,
            "fenced_s": run.rows("orchestrator", "engine_fenced")[number]["time_s"] - killed_s,
            "started_again_s": run.rows("launcher", "engine_restart")[number]["time_s"] - killed_s,
            "healthy_s": healthy["time_s"] - killed_s,
            "version": healthy["version"],
            "tokens_per_s_meanwhile": run.tokens_per_s(killed_s, healthy["time_s"]),
            "longest_pause_s": max((row["pause_s"] for row in updates), default=None),
            "rollouts_lost": lost - sum(loss["rollouts_lost"] for loss in losses),
        })  # fmt: skip
    return losses, ordinary


if __name__ == "__main__":
    main()
