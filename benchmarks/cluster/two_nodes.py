"""Lose one of two Slurm nodes on one host, and check the run after Slurm has requeued its job.

- A node is a network namespace with its own host name, processes, shared memory and half of the
  host's GPUs (`gpu_slurm.sh` with NODES=2). NCCL connects the nodes over sockets.
- `replay`: one node runs engines, one trains and replays the engines' expert routes. The goal is 0
  lost, repeated or wrong batches (`faults/kills.py`) and 0 tokens without routes.
- `sft`: both nodes train. The goal is 0 lost steps.
- The second node loses power after a checkpoint, and boots again once Slurm reports it as down.

    python benchmarks/cluster/two_nodes.py replay            # as root, with eight GPUs
    python benchmarks/cluster/two_nodes.py replay --pair     # two GPUs
    python benchmarks/cluster/two_nodes.py replay --smoke    # without GPUs, no record

Both rows need Slurm: `ORRERY_SLURM_FOLDER=/srv/orrery-nodes gpu_slurm.sh install`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from faults.kills import History, checked
from orrery.manifest.identity import load, run_dir
from orrery.runtime.run_directory import whole_checkpoints
from record import ROOT, parser_of, record

STAGES = {"replay": "rl", "sft": "sft"}
UNITS = {
    "replay": "batches lost, trained twice or wrong, and tokens without routes",
    "sft": "steps",
}
SCRIPT = ROOT / "benchmarks/cluster/gpu_slurm.sh"
FOLDER = Path(os.environ.setdefault("ORRERY_SLURM_FOLDER", "/srv/orrery-nodes"))
LOST, FIRST_STEP = "gpu2", 3
LIMIT_S = 270.0
# Largest log-prob difference on equal weights. In bfloat16, trainer and engines round differently.
SAME_WEIGHTS = {"float32": 1e-4, "bfloat16": 1.0}


def slurm(*words: str) -> str:
    env = {**os.environ, "SLURM_CONF": str(FOLDER / "etc/slurm.conf")}
    return subprocess.run(words, env=env, capture_output=True, text=True).stdout.strip()


def wait(what: str, started: "subprocess.Popen[bytes]", condition: Callable[[], bool]) -> float:
    """Wait until `condition()` holds. Return the time."""
    end_s = time.monotonic() + LIMIT_S
    while not condition():
        if started.poll() is not None or time.monotonic() > end_s:
            raise SystemExit(f"error: {what}: did not happen (snakemake: {started.poll()})")
        time.sleep(0.2)
    return time.time()


def lose(history: History, stage: str, started: "subprocess.Popen[bytes]") -> dict[str, Any]:
    """Cut the power of a node, boot it again, and return what was seen until the next step."""

    def is_far() -> bool:
        steps = [row["step"] for row in history.trained(stage)]
        saved = [one.step for one in whole_checkpoints(history.folder, stage)]
        return bool(saved) and max(steps, default=0) > max(FIRST_STEP, *saved)

    wait("a step after a checkpoint", started, is_far)
    before, lost_s = history.trained(stage), time.time()
    subprocess.run(("bash", str(SCRIPT), "crash", LOST), check=True)
    wait(
        "Slurm misses the node",
        started,
        lambda: slurm("sinfo", "-h", "-n", LOST, "-o", "%T").startswith("down"),
    )
    missed_s = time.time()
    subprocess.run(("bash", str(SCRIPT), "start", LOST), check=True)
    attempt = max(row["attempt"] for row in before)

    def again() -> list[int]:
        return [row["step"] for row in history.trained(stage) if row["attempt"] > attempt]

    resumed_s = wait("the stage trains again", started, lambda: bool(again()))
    return {
        "step_before": max(row["step"] for row in before),
        "first_step_after": min(again()),
        "missed_after_s": missed_s - lost_s,
        "trains_again_after_s": resumed_s - lost_s,
    }


def found(row: str, history: History) -> dict[str, Any]:
    """Return the defects of the finished stage, all with the goal 0."""
    rows = history.trained(STAGES[row])
    if row == "replay":
        counts = checked(history, SAME_WEIGHTS[history.what.inference.dtype])
        replayed = [one for one in rows if one.get("routes_missing") is not None]
        if len(replayed) < len(rows):
            raise SystemExit(f"error: {len(rows) - len(replayed)} steps replayed no routes")
        missing = sum(one["routes_missing"] for one in replayed)
        names = ("lost", "twice", "wrong_versions")
        return {name: counts[name] for name in names} | {"routes_missing": missing}
    assert history.what.stages.sft is not None
    steps = range(1, history.what.stages.sft.num_steps + 1)
    return {"lost": len(set(steps) - {one["step"] for one in rows})}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("row", choices=STAGES)
    parser.add_argument("--pair", action="store_true", help="a GPU a node, in its own record")
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    kind = "_cpu" if options.smoke else "_pair" if options.pair else ""
    name = f"two_nodes_{options.row}{kind}"
    stage, manifest = STAGES[options.row], load(ROOT / f"manifests/{name}.json")
    history = History(run_dir(ROOT / "runs", manifest), manifest)
    os.environ |= {"NODES": "2"} | ({"CPUS": "64"} if options.smoke else {})
    marker = (history.folder / f"stages/{stage}/DONE").relative_to(ROOT)
    if marker.exists():
        raise SystemExit(
            f"error: {marker.parents[2]}: {stage} has finished; remove this folder, and try again"
        )
    begin_s = time.monotonic()
    subprocess.run(("bash", str(SCRIPT), "up"), check=True)
    try:
        started = subprocess.Popen(("bash", str(SCRIPT), "run", str(marker)), cwd=ROOT)
        seen = lose(history, stage, started)
        if code := started.wait(LIMIT_S):
            raise SystemExit(f"error: {name} ended with code {code}; read {history.folder}/logs")
    finally:
        subprocess.run(("bash", str(SCRIPT), "down"))
    defects = found(options.row, history)
    seen |= defects | {"seconds": time.monotonic() - begin_s}
    print(json.dumps(seen, indent=2))
    if options.smoke:
        return
    record(
        options.out / f"{name}.json",
        figure=f"{name} after the loss of one of two nodes",
        value=sum(defects.values()),
        unit=UNITS[options.row],
        goal=0,
        better="lower",
        details=seen
        | {
            "layers": manifest.model.num_layers,
            "gpus_a_node": manifest.hardware.devices_per_node,
        },
    )


if __name__ == "__main__":
    main()
