"""Train a mixture of experts with engines of different shapes, on this machine's simulated cluster.

- One engine prefills on a node, one decodes on two nodes, and a fourth node trains. The trainer
  replays the engines' expert routes.
- After some RL steps a process of the decode engine is killed, and the engine comes back. Later
  its second node crashes, and Slurm starts the job again on the fifth node.
- The value is the held-out reward of the trained policy.

    sudo .venv/bin/python benchmarks/cluster/wide.py    # about 15 minutes on two cores

`ORRERY_CLUSTER_KEEP=1 make test-cluster` leaves the cluster up.
"""

import json
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path += [str(Path(__file__).parents[1]), str(Path(__file__).parents[2] / "tests/cluster")]
from simulated import Cluster, Run, Terminal

from record import ROOT, parser_of, record

RUN, GOAL = "reverse_text_moe_wide", 0.8
KILL_AT, CRASH_AT = 5, 12  # RL steps before the kill and the crash
LIMIT_S = 900.0


def rl_rows(run: Run, role: str, event: str) -> list[dict[str, Any]]:
    return [row for row in run.rows(role) if row.get("event") == event]


def lose_parts(cluster: Cluster, run: Run, terminal: Terminal) -> dict[str, Any]:
    """Kill a rank of the decode engine, then crash its node. Return what was seen."""

    def wait(what: str, condition: Any) -> Any:
        return cluster.wait_until(what, condition, LIMIT_S, lambda: terminal.output[-2000:])

    def steps() -> int:
        return len(set(run.steps())) if run.is_in("rl", terminal) else 0

    wait("RL trains", lambda: steps() >= KILL_AT)
    placed = {role["name"]: role["node"] for role in run.status()["roles"]}
    node, killed_s = placed["headless.0"], time.time()
    cluster.on(node, "kill", "-9", str(run.health("headless.0")["pid"]))
    wait("the engine serves again", lambda: rl_rows(run, "orchestrator.0", "engine_healthy"))
    back_s = rl_rows(run, "orchestrator.0", "engine_healthy")[0]["time_s"] - killed_s
    wait("RL trains on", lambda: steps() >= CRASH_AT)
    attempt, crashed_s = run.status()["attempt"], time.time()
    cluster.crash(node)

    def trains_again() -> bool:
        return any(row["attempt"] > attempt and "loss" in row for row in run.rows("trainer.0"))

    wait("RL trains again", trains_again)
    again = {role["name"]: role["node"] for role in run.status()["roles"]}
    return {
        "nodes": placed,
        "nodes_after_crash": again,
        "engine_serves_again_after_kill_s": back_s,
        "next_step_after_crash_s": time.time() - crashed_s,
    }


def seen(run: Run) -> dict[str, Any]:
    """Return the rewards, and what the run's metrics say about updates and routes."""
    result = json.loads((run.path / "stages" / "evaluate" / "result.json").read_text())
    updates = [
        span
        for span in run.rows("orchestrator.0.spans")
        if span["name"] == "update" and span["stage"] == "rl"
    ]
    trained = [row for row in run.rows("trainer.0") if row.get("routes_differ") is not None]
    return {
        "reward_before": result["before"]["reward_mean"],
        "reward_after": result["after"]["reward_mean"],
        "steps": len(set(run.steps())),
        "updates": len(updates),
        "updates_with_requests_in_flight": sum(span["num_in_flight"] > 0 for span in updates),
        "steps_with_replayed_routes": len(trained),
        "routes_missing": sum(row.get("routes_missing") or 0 for row in trained),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    cluster = Cluster()
    cluster.restore()
    subprocess.run(("bash", str(ROOT / "tests/cluster/copy.sh")), check=True)
    run, begin_s = Run(cluster, RUN), time.monotonic()
    run.remove()
    try:
        terminal = run.start()
        lost = lose_parts(cluster, run, terminal)
        if terminal.wait(2 * LIMIT_S):
            raise SystemExit(f"error: {RUN} failed:\n{terminal.output[-3000:]}")
    finally:
        cluster.restore()
    found = seen(run)
    record(
        args.out / "wide.json",
        figure="cluster/wide",
        value=found["reward_after"],
        unit="held-out reward",
        goal=GOAL,
        better="higher",
        details={**found, **lost, "seconds": time.monotonic() - begin_s},
    )


if __name__ == "__main__":
    main()
