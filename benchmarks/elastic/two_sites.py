"""Train two sites of N GPUs each on one host: FSDP inside a site, int8 between the sites.

    python benchmarks/elastic/two_sites.py --gpus 4            2 sites × 2; --gpus 2: 2 sites × 1
    python benchmarks/elastic/two_sites.py --gpus 4 --cpu      the same ranks on a CPU, no record
    python benchmarks/elastic/two_sites.py --gpus 4 --dry-run  print commands and manifests

- Goals: weights of both sites have equal digests after every round, and a site's GPUs hold no
  more memory than those of the same training without other sites (`TOLERANCE`).
- Memory is the highest `memory.used` of nvidia-smi, sampled every `SAMPLE_S` seconds.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from elastic.text import write
from gpu_memory import peaks, smi
from orrery.elastic.certificates import make_authority, make_site
from orrery.manifest.identity import load, run_dir, run_id
from orrery.manifest.publish import sha256
from record import ROOT, device, parser_of, record
from workspace import linked

NAMES, PORTS, RUN = ("oslo", "lima"), 29600, "elastic_text"
FOLDER = ROOT / "build/two_sites"
LIMIT_S, SAMPLE_S, NUM_STEPS = 400.0, 0.2, 50
TOLERANCE, MIN_ROUNDS = 0.01, 4
LINKED = ("jsonnet", "locks", "packages", "pyproject.toml")


def manifests(num_ranks: int, accelerator: str) -> dict[str, dict[str, Any]]:
    """Return the manifests of elastic_text with `num_ranks` per site, for two sites and for one."""
    text = (ROOT / f"manifests/{RUN}.json").read_text()
    sites, alone = json.loads(text), json.loads(text)
    for run in (sites, alone):
        run["hardware"] |= {"accelerator": accelerator, "devices_per_node": 2 * num_ranks}
        run["trainer"]["mesh"]["dp_shard"] = num_ranks
        run["stages"]["sft"]["num_steps"] = NUM_STEPS
        if accelerator != "cpu":
            run["trainer"]["compute_dtype"] = run["inference"]["dtype"] = "bfloat16"
            run["python_lock_sha256"] = sha256(ROOT / "locks/cuda.txt")
    elastic = {"min_sites": 2, "max_sites": 2, "quorum": 1, "voters": 1, "codec": "int8_block"}
    sites["trainer"]["elastic"] |= elastic
    alone["trainer"]["elastic"] = None
    alone["name"] = f"{RUN}_alone"
    return {RUN: sites, alone["name"]: alone}


def address(name: str, num_ranks: int) -> str:
    return f"127.0.0.1:{PORTS + (2 + 2 * num_ranks) * NAMES.index(name)}"


def orrery(*words: str) -> list[str]:
    return [sys.executable, "-m", "orrery.launcher.cli", *words]


def join(name: str, num_ranks: int) -> list[str]:
    own, first = address(name, num_ranks), address(NAMES[0], num_ranks)
    files = str(FOLDER / "certificates")
    return orrery("join", RUN, first, "--listen", own, "--name", name, "--certificates", files)


def prepare(runs: dict[str, dict[str, Any]]) -> None:
    shutil.rmtree(FOLDER, ignore_errors=True)
    write(FOLDER / f"datasets/{RUN}.jsonl")
    certificates = FOLDER / "certificates"
    certificates.mkdir()
    for name in (*NAMES, "alone"):
        linked(FOLDER / name, *LINKED)
        (FOLDER / name / "manifests").mkdir()
        (FOLDER / name / "datasets").symlink_to(FOLDER / "datasets")
        for run, fields in runs.items():
            (FOLDER / name / f"manifests/{run}.json").write_text(json.dumps(fields))
    identity = run_id(load(FOLDER / f"{NAMES[0]}/manifests/{RUN}.json"))
    make_authority(certificates, identity[:12])
    for name in NAMES:
        make_site(certificates, name, ["127.0.0.1"])


def used_mib() -> dict[int, int]:
    return {gpu: int(used) for gpu, (used,) in enumerate(smi("--query-gpu=memory.used"))}


def run_all(commands: dict[str, list[str]], num_ranks: int) -> list[int]:
    """Run each command in its site's folder on its own GPUs. Return the highest MiB by GPU."""
    started = {}
    with peaks(used_mib, SAMPLE_S) as most:
        try:
            for number, (name, command) in enumerate(commands.items()):
                gpus = range(number * num_ranks, (number + 1) * num_ranks)
                environment = os.environ | {"CUDA_VISIBLE_DEVICES": ",".join(map(str, gpus))}
                with (FOLDER / f"{name}.log").open("ab") as log:
                    started[name] = subprocess.Popen(
                        command,
                        cwd=FOLDER / name,
                        env=environment,
                        stdout=log,
                        stderr=log,
                        start_new_session=True,
                    )
            for name, process in started.items():
                if code := process.wait(LIMIT_S):
                    shown = (FOLDER / f"{name}.log").read_text(errors="replace")[-3000:]
                    raise SystemExit(f"error: {name} ended with {code}:\n{shown}")
        finally:
            for process in started.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGTERM)
    return list(most.values())


def rounds(name: str) -> dict[int, dict[str, Any]]:
    manifest = load(FOLDER / name / f"manifests/{RUN}.json")
    path = run_dir(FOLDER / name / "runs", manifest) / "metrics/trainer.0.jsonl"
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return {row["round"]: row for row in found if row.get("event") == "round"}


def check_bits(first: dict[int, dict[str, Any]], second: dict[int, dict[str, Any]]) -> int:
    """Return the number of exchanged rounds. Raise SystemExit if the sites' weights differ."""
    differ = [n for n in first if n not in second or first[n]["digest"] != second[n]["digest"]]
    if differ or first.keys() != second.keys():
        raise SystemExit(f"error: weights of the sites differ after rounds {differ or 'of one'}")
    exchanged = sum(len(row["members"]) == 2 and any(row["weights"]) for row in first.values())
    if exchanged < MIN_ROUNDS:
        raise SystemExit(f"error: {exchanged} exchanged rounds; the goal is {MIN_ROUNDS}")
    return exchanged


def accelerator(options: argparse.Namespace) -> str:
    """Return the manifests' accelerator: this host's GPU, or h200 in a dry run without a GPU."""
    if options.cpu:
        return "cpu"
    found = device()
    if found == "cpu" and not options.dry_run:
        raise SystemExit(f"error: --gpus {options.gpus}: this host has no GPU; type --cpu")
    return "h200" if found == "cpu" else found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--gpus", type=int, choices=(2, 4, 8), default=4, help="of both sites")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    num_ranks = options.gpus // 2
    runs = manifests(num_ranks, accelerator(options))
    if options.dry_run:
        for name in NAMES:
            print(" ".join(join(name, num_ranks)))
        print(json.dumps({name: run["trainer"] for name, run in runs.items()}, indent=2))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("error: stopped by SIGTERM"))
    prepare(runs)
    steps = {name: orrery("run", RUN, "init") for name in NAMES}
    run_all(steps, num_ranks)
    together = run_all({name: join(name, num_ranks) for name in NAMES}, num_ranks)
    exchanged = check_bits(*(rounds(name) for name in NAMES))
    print(f"{exchanged} rounds with equal weights on both sites")
    for stage in ("init", "sft"):
        alone = run_all({"alone": orrery("run", f"{RUN}_alone", stage)}, num_ranks)
    if options.cpu:
        return
    added = max(together[: options.gpus]) / max(alone[:num_ranks]) - 1
    record(
        options.out / f"two_sites_{options.gpus}.json",
        figure=f"device memory that a second site adds, 2 sites × {num_ranks}",
        value=added,
        unit="of the memory alone",
        goal=TOLERANCE,
        better="lower",
        details={
            "equal_rounds": exchanged,
            "together_mib": together,
            "alone_mib": alone,
            "reduced": f"the text run, {NUM_STEPS} steps; its weights are small beside CUDA's own",
        },
    )
    if added > TOLERANCE:
        raise SystemExit(f"error: a second site adds {added:.1%} memory; goal {TOLERANCE:.0%}")


if __name__ == "__main__":
    main()
