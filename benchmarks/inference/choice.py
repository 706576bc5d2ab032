"""Measure the share of prompt tokens that prefill ranks find in their caches, by choice of rank.

- Real engines on CPU: one engine of two ranks prefills, another decodes, over NIXL. The model is an
  untrained mixture of experts.
- Groups of rollouts have a prompt in common. Each rollout has `TURNS` turns, and each turn repeats
  the earlier ones.
- `EngineChoice` is compared with round robin, which takes the ranks in turn.

    python benchmarks/inference/choice.py    # about 3 minutes
"""

import asyncio
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import numpy as np

from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.models import build
from orrery.models.weights import initialize, save
from orrery.orchestrator.engines.pool import EnginePool
from orrery.orchestrator.engines.requests import Chosen, EngineChoice
from record import parser_of, record

ROOT = Path(__file__).parents[2]
GROUPS, GROUP_SIZE, TURNS = 6, 4, 3
PROMPT_TOKENS, TURN_TOKENS, ANSWER_TOKENS = 256, 48, 16
START_S = 240.0


class RoundRobin(EngineChoice):
    """Take the ranks of the engines in turn."""

    def __init__(self, *args: Any, **options: Any):
        super().__init__(*args, **options)
        self._next = count()

    @contextmanager
    def using(self, token_ids: Any, salt: str, among: Any) -> Iterator[Chosen]:
        places = [address for address in self.addresses if address.engine in among]
        yield Chosen(places[next(self._next) % len(places)], cached_tokens=0)


def make_run(folder: Path) -> Manifest:
    content = json.loads((ROOT / "manifests" / "reverse_text_moe.json").read_text())
    wide = {"data_parallel": 2, "expert_parallel": True, "max_model_len_tokens": 1024}
    apart = {"num_replicas": 2, "prefill_replicas": 1, "kv_transfer": {"kind": "nixl"}}
    content["inference"] |= wide | apart | {"router": {"kind": "none"}, "kv_block_tokens": 32}
    content["model"]["max_positions"] = 1024
    content["trainer"]["memory"]["max_tokens_per_micro_batch"] = 1024
    content["stages"]["sft"] = None
    (folder / "manifest.json").write_text(json.dumps(content))
    manifest = load(folder / "manifest.json")
    import torch

    module = build(manifest.model, torch.float32, "cpu")
    initialize(module, manifest.model)
    save(module, manifest.model, folder / "weights" / "init")
    return manifest


@contextmanager
def engines(folder: Path) -> Iterator[list[str]]:
    """Run both engines. Yield their addresses."""
    words = ["--run-dir", str(folder), "--stage", "rl", "--attempt", "1", "--port", "0"]
    processes = []
    try:
        for index in (0, 1):
            with open(folder / f"engine.{index}.log", "wb") as log:
                command = [sys.executable, "-m", "orrery.inference", *words, "--index", str(index)]
                processes.append(subprocess.Popen(command, stdout=log, stderr=log))
        paths = [folder / f"stages/rl/endpoints/inference.{index}.json" for index in (0, 1)]
        end_s = time.monotonic() + START_S
        while not all(path.exists() for path in paths):
            ended = any(process.poll() is not None for process in processes)
            if ended or time.monotonic() > end_s:
                raise SystemExit((folder / "engine.0.log").read_text()[-3000:])
            time.sleep(0.2)
        yield [json.loads(path.read_text())["url"] for path in paths]
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(20)


async def measure(urls: list[str], kind: type[EngineChoice], salt: str) -> dict[str, float]:
    """Return the cached share of prompt tokens, and the seconds, of all rollouts."""
    random = np.random.default_rng(5)
    prompts = random.integers(3, 40, (GROUPS, PROMPT_TOKENS))
    added = random.integers(3, 40, (GROUPS, GROUP_SIZE, TURNS, TURN_TOKENS))
    cached: list[int] = []
    asked: list[int] = []
    async with EnginePool(urls, handovers=[{}], num_ranks=[2, 2]) as pool:
        apart = pool.disaggregated
        assert apart is not None
        apart._prefill_of, apart._decode_of = kind([2, 2]), kind([2, 2], is_decoding=True)

        async def rollout(group: int, member: int) -> None:
            tokens = prompts[group]
            for turn in range(TURNS):
                tokens = np.append(tokens, added[group, member, turn]) if turn else tokens
                found = await pool.generate(
                    tokens,
                    request_id=f"{salt}-{group}-{member}-{turn}",
                    max_tokens=ANSWER_TOKENS,
                    temperature=1.0,
                    cache_salt=salt,
                    ignore_eos=True,
                )
                cached.append(found.cached_tokens)
                asked.append(len(tokens))
                tokens = np.append(tokens, found.token_ids)

        begin_s = time.perf_counter()
        every = [(group, member) for group in range(GROUPS) for member in range(GROUP_SIZE)]
        await asyncio.gather(*(rollout(*one) for one in every))
        seconds = time.perf_counter() - begin_s
    return {"cached_share": sum(cached) / sum(asked), "seconds": seconds}


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        make_run(Path(name))
        with engines(Path(name)) as urls:
            asyncio.run(measure(urls, RoundRobin, "warm"))
            turns = asyncio.run(measure(urls, RoundRobin, "in turn"))
            chosen = asyncio.run(measure(urls, EngineChoice, "chosen"))
    shape = {"groups": GROUPS, "group_size": GROUP_SIZE, "turns": TURNS}
    record(
        args.out / "choice.json",
        figure="inference/choice",
        value=chosen["cached_share"],
        unit="share of prompt tokens",
        goal=None,
        better="higher",
        details={"chosen": chosen, "round_robin": turns, "rollouts": shape},
    )


if __name__ == "__main__":
    main()
