"""Find cache blocks of an engine on another node, through a Mooncake Store over both nodes.

- The nodes are those of `benchmarks/cluster/two_nodes.py`. Each has one engine over half of the
  GPUs. The store's master runs on the first node, its memory is on both.
- One engine answers a prompt, then the other one. The value is the share of the prompt's whole
  blocks that the second engine found in the store. Both answers must agree.
- Not covered: routes of experts and a disk segment, because the store has neither here.

    python benchmarks/inference/store.py            # eight GPUs, as two_nodes.py
    python benchmarks/inference/store.py --smoke    # without GPUs, no record
"""

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))
from cluster.two_nodes import FOLDER, SCRIPT
from orrery.manifest.identity import load, run_dir
from orrery.manifest.schema import Manifest
from orrery.orchestrator.engines.client import EngineClient
from orrery.runtime.run_directory import endpoints_dir
from record import ROOT, parser_of, record

ROLES = (("kv_store", 0, "gpu1"), ("inference", 0, "gpu1"), ("inference", 1, "gpu2"))
MODULES = {"kv_store": "orrery.inference.kv_store", "inference": "orrery.inference"}
START_S, FIND_S, NUM_PROMPTS, ANSWER_TOKENS = 240.0, 20.0, 4, 8
SAME = 1e-3  # largest log-prob difference, as cache blocks are moved unchanged


@contextmanager
def started(manifest: Manifest, folder: Path) -> Iterator[list[str]]:
    """Run the store and both engines as Slurm jobs in the block. Yield the engines' URLs."""
    environment = {**os.environ, "SLURM_CONF": str(FOLDER / "etc/slurm.conf")}
    environment["ORRERY_INTERFACE"] = "eth0"
    devices = manifest.inference.devices_per_replica
    processes, paths = [], []
    try:
        for role, index, node in ROLES:
            gpus = role == "inference" and manifest.hardware.accelerator != "cpu"
            command = ["srun", "-w", node, "-n1", "--mem=1000", "--input=none"]
            command += [f"--gres=gpu:{devices}"] if gpus else []
            command += [sys.executable, "-m", MODULES[role], "--run-dir", str(folder)]
            command += ["--stage", "rl", "--index", str(index), "--attempt", "1", "--port", "0"]
            with (folder / f"{role}.{index}.log").open("wb") as log:
                processes.append(
                    subprocess.Popen(command, cwd=ROOT, env=environment, stdout=log, stderr=log)
                )
            paths.append(endpoints_dir(folder, "rl") / f"{role}.{index}.json")
        end_s = time.monotonic() + START_S
        while not all(path.exists() for path in paths):
            if time.monotonic() > end_s or any(each.poll() is not None for each in processes):
                raise SystemExit(f"error: no store and two engines; read {folder}/*.log")
            time.sleep(0.2)
        yield [json.loads(path.read_text())["url"] for path in paths[1:]]
    finally:
        for process in reversed(processes):
            process.send_signal(signal.SIGTERM)
        for process in processes:
            process.wait()


async def find(manifest: Manifest, urls: list[str]) -> list[dict[str, Any]]:
    """Return a row per prompt. The engines take turns in answering first."""
    draw, block = np.random.default_rng(1), manifest.inference.kv_block_tokens
    length = manifest.inference.max_model_len_tokens - 2 * ANSWER_TOKENS
    rows = []

    async def ask(engine: EngineClient, prompt: Any, name: str) -> tuple[Any, float]:
        begin_s = time.monotonic()
        answer = await engine.generate(
            prompt, max_tokens=ANSWER_TOKENS, temperature=1.0, cache_salt="1", request_id=name,
            ignore_eos=True, seed=5,
        )  # fmt: skip
        return answer, time.monotonic() - begin_s

    async with EngineClient(urls[0]) as one, EngineClient(urls[1]) as other:
        for number in range(NUM_PROMPTS):
            maker, finder = (one, other) if number % 2 == 0 else (other, one)
            prompt = draw.integers(3, min(manifest.model.vocab_size, 1000), length)
            fresh, fresh_s = await ask(maker, prompt.astype(np.int32), f"fresh-{number}")
            end_s, attempt = time.monotonic() + FIND_S, 0
            while True:  # blocks may reach the store after the answer
                await finder._control("/reset_prefix_cache")
                found, found_s = await ask(finder, prompt.astype(np.int32), f"{number}-{attempt}")
                attempt += 1
                if found.cached_tokens or time.monotonic() > end_s:
                    break
            differ = float(np.abs(fresh.logprobs - found.logprobs).max())
            rows.append({
                "variant": f"prompt {number}",
                "value": found.cached_tokens / (length // block * block),
                "goal": None,
                "seconds": found_s,
                "seconds_without": fresh_s,
                "same_tokens": fresh.token_ids.tolist() == found.token_ids.tolist(),
                "logprobs_differ": differ,
            })  # fmt: skip
    return rows


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--smoke", action="store_true")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    options = parser.parse_args()
    name = "two_nodes_store" + "_cpu" * options.smoke
    manifest = load(ROOT / f"manifests/{name}.json")
    os.environ |= {"NODES": "2"} | ({"CPUS": "64"} if options.smoke else {})
    orrery = (sys.executable, "-m", "orrery.launcher.cli", "run", name, "init")
    subprocess.run(orrery, cwd=ROOT, check=True)
    subprocess.run(("bash", str(SCRIPT), "up"), check=True)
    try:
        with started(manifest, run_dir(ROOT / "runs", manifest)) as urls:
            rows = asyncio.run(find(manifest, urls))
    finally:
        subprocess.run(("bash", str(SCRIPT), "down"))
    print(json.dumps(rows, indent=2))
    is_exact = manifest.inference.dtype == "float32"
    if is_exact and any(row["logprobs_differ"] > SAME or not row["same_tokens"] for row in rows):
        raise SystemExit("error: an engine that found blocks answers otherwise")
    share = min(row["value"] for row in rows)
    if options.smoke:
        if share < 1.0:
            raise SystemExit(
                f"error: the other engine found {share:.0%} of a prompt; the goal is all"
            )
        return
    record(
        options.out / "store.json",
        figure="share of a prompt's blocks that an engine on another node found in the store",
        value=share,
        unit="share",
        goal=1.0,
        better="higher",
        rows=rows,
        details={"reduced": "4 of 48 layers; no routes, no disk segment"},
    )


if __name__ == "__main__":
    main()
