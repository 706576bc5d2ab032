"""Measure on one large GPU which one-GPU runs fit a card of 24, 48 or 80 GB.

    python benchmarks/async/memory_cap.py gsm8k --spare smollm2_problems_seed_1

- A run trains a few steps without a limit. If the device's peak exceeds a card's size, the run
  trains again, and the trainer's allocator is capped at what the engine leaves of that card.
- Peaks are nvidia-smi's values for GPU 0, read twice a second: in all and for each role.
- 1 GB is 10^9 bytes, so a real card of "24 GB" has more memory than this script assumes.
- A RUN is a checked-in manifest's name or a manifest's file. It gets the hardware of run `--spare`.
- If a run's weights are not on this machine, it gets random weights and the tokenizer of `--spare`.
  Its answers then have the maximum length. If its data are not, it gets the tasks of `--spare`.
- `memory_<device>.json` has the share of runs that fit 80 GB, and for each run the smallest card
  that it fits. Recorded rows of runs that are not on the command line are kept.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orrery.manifest.schema import Manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from gpu_memory import peaks, smi
from record import ROOT, device, parser_of, record
from workspace import whole_workspace

HERE = Path(__file__).resolve().parent
GB = 10**9
CONTEXT_BYTES = 700_000_000  # of CUDA and its libraries in the trainer, outside its allocator
ROLES = ("orrery.trainer", "orrery.inference")
LIMIT_S = 420.0
HOOK = """
import os, sys
if "orrery.trainer" in sys.orig_argv:
    share = os.environ["ORRERY_CAP_SHARE"]
    conf = f"expandable_segments:True,per_process_memory_fraction:{share}"
    os.environ["PYTORCH_ALLOC_CONF"] = conf
"""


def role_of(pid: int) -> str:
    """Return the role whose process or descendant has this id, otherwise "other"."""
    while pid > 1:
        try:
            words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            break
        if found := [word for word in words if word in ROLES]:
            return found[0]
        pid = parent
    return "other"


def used_bytes() -> dict[str, int]:
    """Return the bytes in use: on GPU 0 as `device`, and by each role's processes."""
    used = {"device": int(smi("--id=0", "--query-gpu=memory.used")[0][0]) * 2**20}
    for pid, mib in smi("--id=0", "--query-compute-apps=pid,used_memory"):
        if mib.isdigit():
            role = role_of(int(pid))
            used[role] = used.get(role, 0) + int(mib) * 2**20
    return used


def manifest_of(name: str) -> dict[str, Any]:
    path = Path(name) if name.endswith(".json") else ROOT / "manifests" / f"{name}.json"
    return json.loads(path.read_text())


def shortened(name: str, steps: int, spare: str) -> tuple[dict[str, Any], list[str]]:
    """Return the run's manifest with few steps, and which of its files were missing."""
    run, other, lacks = manifest_of(name), manifest_of(spare), list[str]()
    run["hardware"] = other["hardware"]
    init = run["model"]["init"]
    if init["kind"] == "pretrained" and not (ROOT / init["path"]).exists():
        lacks.append("weights")
        run["model"]["init"] = {"kind": "random", "seed": run["seed"], "std": 0.02}
        run["model"]["tokenizer"] = other["model"]["tokenizer"]
    paths = [
        source["path"]
        for side in run["tasks"].values()
        for use in side
        if isinstance(source := use["args"].get("source"), dict)
    ]
    if not all((ROOT / path).exists() for path in paths):
        lacks.append("data")
        run["tasks"] = other["tasks"]
    run["name"] = f"memory_{run['name']}"
    run["stages"]["sft"] = None
    run["stages"]["rl"]["num_steps"] = steps
    run["stages"]["evaluate"]["num_problems"] = 8
    run["orchestrator"]["drop_zero_advantage_groups"] = False  # random weights earn no reward
    run["orchestrator"]["evaluation"].update(interval_steps=steps, num_problems=8)
    run["trainer"]["checkpoint"]["interval_steps"] = steps
    return Manifest.model_validate(run).model_dump(mode="json"), lacks


def train(manifest: dict[str, Any], share: float | None) -> tuple[bool, dict[str, int], str]:
    """Run init and rl. Return whether they ended well, the peaks, and the last line of output."""
    with tempfile.TemporaryDirectory(prefix="orrery-memory-") as work:
        folder = whole_workspace(Path(work), manifest)
        env = dict(os.environ)
        if share is not None:
            (folder / "hook").mkdir()
            (folder / "hook" / "sitecustomize.py").write_text(HOOK)
            path = filter(None, [f"{folder}/hook", env.get("PYTHONPATH")])
            env |= {"PYTHONPATH": os.pathsep.join(path), "ORRERY_CAP_SHARE": f"{share:.4f}"}
        with peaks(used_bytes, 0.5) as most:
            for stage in ("init", "rl"):
                argv = [sys.executable, "-m", "orrery.launcher.cli", "run", manifest["name"], stage]
                try:
                    done = subprocess.run(
                        argv, cwd=work, env=env, capture_output=True, text=True, timeout=LIMIT_S
                    )
                except subprocess.TimeoutExpired as late:
                    last = (late.stdout or b"").decode(errors="replace").strip().splitlines()[-1:]
                    said = f"{stage} took longer than {LIMIT_S:g} s: {' '.join(last)[-500:]}"
                    return False, most, said
                if done.returncode:
                    break
        lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
        errors = [line for line in lines if "error" in line] or lines[-1:] or [""]
        return done.returncode == 0, most, errors[-1][:500]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    """Return the row of one run. Raise SystemExit if it does not train without a limit."""
    manifest, lacks = shortened(name, options.steps, options.spare)
    total = int(smi("--id=0", "--query-gpu=memory.total")[0][0]) * 2**20
    ended, free, said = train(manifest, None)
    if not ended:
        raise SystemExit(f"error: {name}: it does not train without a limit: {said}")
    print(f"{name}: without a limit {json.dumps(free)}", flush=True)
    cards: dict[str, Any] = {}
    for card in sorted(options.cards, reverse=True):
        limit = card * GB
        if free["device"] <= limit:
            cards[f"{card}"] = {"fits": True, "capped": False, "peak_bytes": free["device"]}
            continue
        left = limit - free.get("orrery.inference", 0) - CONTEXT_BYTES
        if left <= 0:
            cards[f"{card}"] = {"fits": False, "capped": False, "why": "the engine alone is larger"}
            break
        ended, peak, said = train(manifest, left / total)
        fits = ended and peak["device"] <= limit
        why = "" if ended else said
        row = {"fits": fits, "capped": True, "trainer_bytes": left, "why": why}
        cards[f"{card}"] = row | {"peak_bytes": peak.get("device")}
        print(f"{name}, {card} GB: {json.dumps(cards[f'{card}'])}", flush=True)
        if not fits:
            break
    fitting = [int(card) for card, row in cards.items() if row["fits"]]
    return {
        "variant": manifest["name"].removeprefix("memory_"),
        "value": min(fitting) if fitting else None,
        "unit": "GB",
        "better": "lower",
        "goal": None,
        "peak_bytes": free,
        "kv_cache_bytes": manifest["inference"]["kv_cache_bytes"],
        "lora": manifest["trainer"]["lora"] is not None,
        "replaced": lacks,
        "cards": cards,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("names", nargs="+", metavar="RUN")
    parser.add_argument("--cards", type=int, nargs="+", default=[24, 48, 80], metavar="GB")
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--spare", required=True, metavar="RUN")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    start_s, rows = time.monotonic(), []
    for name in options.names:
        rows.append(measure(name, options))
        print(f"{name}: {json.dumps(rows[-1])}; {time.monotonic() - start_s:.0f} s", flush=True)
    named = {row["variant"] for row in rows}
    if (recorded := HERE / f"memory_{device()}.json").is_file():
        before = json.loads(recorded.read_text())["rows"]
        rows = [row for row in before if row["variant"] not in named] + rows
    record(
        options.out / recorded.name,
        figure=f"One-GPU runs that fit a card of {max(options.cards)} GB, on one {device()}",
        value=sum(row["value"] is not None for row in rows) / len(rows),
        unit="share",
        goal=1.0,
        better="higher",
        rows=rows,
        details={"steps": options.steps, "cards_gb": options.cards},
    )


if __name__ == "__main__":
    main()
