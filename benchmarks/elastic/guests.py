"""Train at one site. Sample there, at three sites that come and go, and at a fourth that cheats.

    python benchmarks/elastic/guests.py              # about 20 minutes on two quiet cores
    python benchmarks/elastic/guests.py --steps 6    # a try, without a record

- Each of the three is a process of `orrery lend` with a vLLM engine, on loopback. In turn one is
  killed, and restarted after AWAY_S.
- The fourth, the liar, sends samples and log-probs of a network with other weights.
- The figure is the held-out reward after RL. Details have the first reward, the rollouts accepted
  of each site and dropped of the liar, the refusal, and the bytes that each peer served.
"""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from orrery.elastic.certificates import make_authority, make_site
from orrery.manifest.schema import Manifest
from orrery.runtime.metrics import rows as all_rows
from orrery.runtime.network import adjoining_ports
from record import ROOT, parser_of, record
from workspace import workspace_with

BASE, NAME = "reverse_text", "guests"
SITES, LIAR, HOME = ("lima", "oslo", "kyoto"), "accra", "home"
LIMIT_S, AWAY_S, LIVES_S = 1200.0, 5.0, 30.0
FEW_STEPS = 20  # fewer RL steps are a trial, without a warm start
COMMAND = [sys.executable, "-m", "orrery.launcher.cli"]


def manifest(steps: int) -> Manifest:
    content = json.loads((ROOT / "manifests" / f"{BASE}.json").read_text())
    content["name"] = NAME
    content["orchestrator"]["guests"] = {
        "max_sites": 8,
        "lease_s": 10.0,
        "max_versions_behind": 2,
        "verified_share": 0.1,
        "tolerance": 4.0,
        "min_logprob_difference": 1e-3,
        "block_bytes": 1 << 17,
    }
    content["orchestrator"]["rollouts_per_batch"] = 128
    content["orchestrator"]["max_off_policy_steps"] = 4
    content["orchestrator"]["evaluation"]["interval_steps"] = max(1, steps // 3)
    if steps < FEW_STEPS:
        content["stages"]["sft"] = None
    content["stages"]["rl"]["num_steps"] = steps
    content["trainer"]["checkpoint"]["interval_steps"] = steps
    return Manifest.model_validate(content)


class Guests:
    """The processes of the sites, and the rows that they have written."""

    def __init__(self, workspace: Path, door: str) -> None:
        self.workspace, self.door = workspace, door
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._bytes: dict[tuple[str, int], dict[str, int]] = {}  # by file and version
        self.names = {door.rpartition(":")[0] + f":{int(door.rpartition(':')[2]) + 1}": HOME}

    def start(self, name: str) -> None:
        folder = self.workspace / name
        folder.mkdir(exist_ok=True)
        listen = f"127.0.0.1:{adjoining_ports(1, '127.0.0.1')}"
        self.names[listen] = name
        with (self.workspace / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*COMMAND, "lend", NAME, self.door, "--listen", listen, "--name", name],
                cwd=self.workspace,
                env={**os.environ, "TMPDIR": str(folder)},
                stdout=log,
                stderr=log,
            )

    def kill(self, name: str) -> None:
        self.look()
        self.processes[name].kill()
        self.processes[name].wait()
        shutil.rmtree(self.workspace / name, ignore_errors=True)

    def look(self) -> None:
        for path in self.workspace.glob("*/orrery-lend-*/metrics/orchestrator.0.jsonl"):
            for row in all_rows(path):
                if row.get("event") == "lent_update":
                    self._bytes[str(path), row["version"]] = row["bytes_by_peer"]

    @property
    def served(self) -> dict[str, int]:
        """Return the bytes of blocks that each site has sent to others."""
        total: Counter[str] = Counter()
        for found in self._bytes.values():
            for peer, size in found.items():
                total[self.names.get(peer, peer)] += size
        return dict(total)

    def end(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(30)


class LyingEngine:
    """A network with other weights, in place of the engine."""

    def __init__(self, spec: Manifest) -> None:
        import torch

        from orrery.models import build
        from orrery.models.weights import initialize

        torch.set_num_threads(1)
        init = spec.model.init.model_copy(update={"seed": 12345, "std": 0.1})
        self._model = spec.model.model_copy(update={"init": init})
        self._network = build(self._model)
        initialize(self._network, self._model)

    async def abort(self, request_ids) -> None:
        pass

    async def generate_each(self, token_ids, num_samples, deliver, **options) -> None:
        for index in range(num_samples):
            deliver(replace(await self.generate(token_ids, **options), sample=index))

    async def generate(self, token_ids, *, max_tokens, temperature, stop_token_ids=(), **_):
        import numpy as np
        import torch

        from orrery.orchestrator.engines.messages import Generation

        tokens, logprobs = torch.tensor(np.array(token_ids), dtype=torch.long), []
        prompt, reason = len(tokens), "length"
        for _ in range(max_tokens):
            ends = torch.tensor([0, len(tokens)], dtype=torch.int32)
            logits = self._network.logits(tokens, torch.arange(len(tokens)), ends)[-1]
            logp = (logits / temperature).log_softmax(0)
            chosen = torch.multinomial(logp.exp(), 1)
            logprobs.append(float(logp[chosen]))
            tokens = torch.cat([tokens, chosen])
            if int(chosen) in stop_token_ids:
                reason = "stop"
                break
            await asyncio.sleep(0)
        sampled = tokens[prompt:].numpy().astype(np.int32)
        versions = np.zeros(len(sampled), np.int32)
        return Generation("", sampled, np.array(logprobs, np.float32), versions, reason, 0)


def lie(folder: Path) -> None:
    """Lend a lying engine, and end when it is refused."""
    from orrery.orchestrator.guests.lend import Lender
    from orrery.runtime.role_context import RoleContext

    class Liar(Lender):
        async def _renew(self, peers) -> None:
            header = json.loads(await self._request("GET", "/weights"))
            self._version, self._digest = header["round"], header["digest"]
            self._wake()

    ctx = RoleContext("orchestrator", folder, "rl", 0, 1, 0)
    engine: Any = LyingEngine(ctx.manifest)
    asyncio.run(Liar(ctx, engine).run())


def start_liar(run_dir: Path, workspace: Path, door: str) -> "subprocess.Popen[bytes]":
    folder = workspace / f"{LIAR}-{run_dir.name.rpartition('-')[2]}"
    folder.mkdir()
    (folder / "manifest.json").write_bytes((run_dir / "manifest.json").read_bytes())
    place = {
        "listen": "",
        "join": door,
        "name": LIAR,
        "certificates": str(workspace / "certificates"),
    }
    (folder / "site.json").write_text(json.dumps(place))
    with (workspace / f"{LIAR}.log").open("wb") as log:
        command = [sys.executable, __file__, "--lie", str(folder)]
        return subprocess.Popen(command, stdout=log, stderr=log)


def rows(run_dir: Path, event: str) -> list[dict]:
    path = run_dir / "metrics/orchestrator.0.jsonl"
    return [row for row in all_rows(path) if row.get("event") == event] if path.exists() else []


def churn(home, run_dir: Path, guests: Guests) -> tuple[int, "subprocess.Popen[bytes] | None"]:
    """Kill a site in turn until the run ends. Return the number of kills, and the liar."""
    begin_s, num_kills, next_s, liar = time.monotonic(), 0, None, None
    back: list[tuple[float, str]] = []
    while home.poll() is None:
        now_s = time.monotonic()
        if now_s - begin_s > LIMIT_S:
            raise SystemExit(f"the run did not end within {LIMIT_S:g} s; read {run_dir}/logs")
        guests.look()
        entered = {row["site"] for row in rows(run_dir, "guest_entered")}
        if next_s is None and entered >= set(SITES):
            liar, next_s = start_liar(run_dir, guests.workspace, guests.door), now_s + LIVES_S
        if next_s is not None and now_s > next_s:
            name = SITES[num_kills % len(SITES)]
            guests.kill(name)
            back.append((now_s + AWAY_S, name))
            num_kills, next_s = num_kills + 1, now_s + LIVES_S
        while back and now_s > back[0][0]:
            guests.start(back.pop(0)[1])
        time.sleep(1.0)
    return num_kills, liar


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--lie", type=Path)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent)
    args = parser.parse_args()
    if args.lie is not None:
        lie(args.lie)
        return
    with tempfile.TemporaryDirectory(prefix="guests-") as folder:
        workspace = Path(folder)
        spec = manifest(args.steps)
        run_dir = workspace_with(workspace, spec)
        found = measure(workspace, spec, run_dir)
    print(json.dumps(found, indent=2))
    if args.steps < FEW_STEPS:
        return
    idle = [name for name in SITES if not found["accepted"].get(name)]
    if idle:
        raise SystemExit(f"no record: no rollout of {', '.join(idle)} in {args.steps} --steps")
    if LIAR not in found["refusals"]:
        raise SystemExit(f"no record: {LIAR} was not refused in {args.steps} --steps")
    record(
        args.out / f"{NAME}.json",
        figure=f"elastic/{NAME}",
        value=found["rewards"][-1],
        unit="held-out reward",
        goal=None,
        better="higher",
        details=found,
    )


def measure(workspace: Path, spec: Manifest, run_dir: Path) -> dict:
    certificates = workspace / "certificates"
    certificates.mkdir()
    make_authority(certificates, NAME)
    for name in (HOME, *SITES, LIAR):
        make_site(certificates, name, ["127.0.0.1"])
    for stage in ("init", "sft")[: 1 if spec.stages.sft is None else 2]:
        subprocess.run([*COMMAND, "run", NAME, stage], cwd=workspace, check=True)
    door = f"127.0.0.1:{adjoining_ports(2, '127.0.0.1')}"
    guests = Guests(workspace, door)
    place = ["--listen", door, "--name", HOME, "--stage", "rl"]
    home = subprocess.Popen([*COMMAND, "join", NAME, door, *place], cwd=workspace)
    liar = None
    try:
        for name in SITES:
            guests.start(name)
        num_kills, liar = churn(home, run_dir, guests)
    finally:
        guests.end()
        for process in (home, *([liar] if liar else [])):
            if process.poll() is None:
                process.terminate()
                process.wait()
        for log in workspace.glob("*.log"):
            print(f"== {log.name}", *log.read_text().splitlines()[-6:], sep="\n", file=sys.stderr)
    if home.returncode:
        raise SystemExit(f"the run ended with {home.returncode}")
    counts = rows(run_dir, "guests")[-1]
    batches = rows(run_dir, "batch")
    return {
        "rewards": [row["reward_mean"] for row in rows(run_dir, "evaluation")],
        "accepted": counts["accepted"],
        "trained": len(batches) * 128,
        "dropped": counts["dropped"],
        "refusals": {row["site"]: row["why"] for row in rows(run_dir, "guest_refused")},
        "bounds": counts["bounds"],
        "kills": num_kills,
        "losses": len(rows(run_dir, "guest_lost")),
        "bytes_served": guests.served,
    }


if __name__ == "__main__":
    main()
