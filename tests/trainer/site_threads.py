"""Sites of one rank as threads of a test, with real logs, links and snapshots.

A test decides when each site trains and when it exchanges, so nothing depends on speed.
"""

import json
import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import torch
from trainer_cases import batch_columns, manifest, write_start_weights

from orrery.elastic.certificates import Certificates, make_authority, make_site
from orrery.elastic.etcd_log import EtcdClient, EtcdLog, SiteServices, encode
from orrery.elastic.ledger import Ledger
from orrery.elastic.loop import OuterState
from orrery.elastic.types import SitePlace
from orrery.manifest.identity import canonical_json, run_id
from orrery.manifest.publish import sha256_of_data
from orrery.runtime.metrics import rows
from orrery.runtime.role_context import parse_role
from orrery.runtime.run_directory import metrics_path
from orrery.tasks.chat import write_tokenizer
from orrery.trainer.assemble import assemble_learner
from orrery.trainer.checkpoint_writer import StageCheckpoints, resume
from orrery.trainer.elastic import SiteTraining
from orrery.trainer.learner import count_totals
from orrery.trainer.parallel.world import World

ROOT = Path(__file__).parents[2]
HOST, DEADLINE_S, INNER_STEPS = "127.0.0.1", 60.0, 2
THREADS = ThreadPoolExecutor(8)
ELASTIC = {
    "min_sites": 2,
    "max_sites": 4,
    "inner_steps": INNER_STEPS,
    "fragments": 1,
    "delay_steps": 0,
    "delay_merge": 0.0,
    "outer": {"lr": 0.7, "momentum": 0.9, "nesterov": True},
    "codec": "float32",
    "error_feedback": False,
    "topology": "ring",
    "weights": "tokens",
    "admission": "open",
    "quorum": 1,
    "voters": 1,
    "grace_s": 30.0,
    "heartbeat_s": 0.5,
    "dead_after_s": 10.0,
    "store_timeout_s": 30.0,
    "exchange_timeout_s": 60.0,
    "snapshots": {"keep": 2, "block_bytes": 1 << 20},
}


def spec_of(
    folder: Path,
    mesh: dict | None = None,
    trainer: dict | None = None,
    num_phases: int = 4,
    **elastic: Any,
):
    """Return a tiny run of several sites on text, which is written into `folder`."""
    path = folder / "text.jsonl"
    draw = np.random.default_rng(0)
    texts = ["".join(draw.choice(list("abcdefgh"), 12)) for _ in range(160)]
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    text = {"kind": "text", "path": str(path), "split": None, "column": "text", "num_shards": 4}
    text["sha256"] = sha256_of_data(path)
    plain = manifest()
    every = elastic.get("inner_steps", INNER_STEPS)
    sft = plain.sft.model_dump(mode="json") | {"data": text, "num_steps": num_phases * every}
    stages = {"sft": sft | {"examples_per_batch": 4}, "rl": {"num_steps": 2 * every}}
    fields = {"elastic": ELASTIC | elastic, **(trainer or {})}
    fields["checkpoint"] = {"interval_steps": 2 * every, "keep": 2}
    return manifest(mesh=mesh, trainer=fields, stages=stages)


def free_block(size: int) -> int:
    """Return the first of `size` free ports in a row."""
    draw = np.random.default_rng()
    while True:
        first = int(draw.integers(20_000, 30_000))
        try:
            for port in range(first, first + size):
                socket.create_server((HOST, port)).close()
        except OSError:
            continue
        return first


class SiteFolders:
    """The run folders of `names`, with weights, placements and certificates."""

    def __init__(self, folder: Path, spec: Any, names: str = "ab", num_ranks: int = 1) -> None:
        subprocess.run(["bash", "locks/system.sh", "elastic"], cwd=ROOT, check=True)
        self.folder, self.spec, self.names = folder, spec, names
        self.files = folder / "certificates"
        self.files.mkdir()
        make_authority(self.files, "run")
        for name in (*names, "test"):
            make_site(self.files, name, [HOST])
        self.listen = {name: f"{HOST}:{free_block(2 + 2 * num_ranks)}" for name in names}
        start = write_start_weights(spec, folder / "start")
        write_tokenizer(spec.model, start)
        for name in names:
            run_dir = self.run_dir(name)
            run_dir.mkdir()
            (run_dir / "manifest.json").write_bytes(canonical_json(spec))
            shutil.copytree(start, run_dir / "weights/init")
            self.place(name)
        client = EtcdClient([self.listen[names[0]]], Certificates.of(self.files, "test"), 30.0)
        self.client, self.run = client, run_id(spec)
        self.log = EtcdLog(client, self.run, 1.0, 5.0, SiteServices())

    def run_dir(self, name: str) -> Path:
        return self.folder / f"{self.folder.name}-{name}"

    def place(self, name: str, **changes: Any) -> None:
        own, first = self.listen[name], self.listen[self.names[0]]
        place = SitePlace(own, first, str(self.files), name)
        place = msgspec.structs.replace(place, **changes)
        (self.run_dir(name) / "site.json").write_bytes(msgspec.json.encode(place))

    def until(self, holds: Callable[[Ledger], bool]) -> None:
        end_s = time.monotonic() + DEADLINE_S
        while not holds(self.log.read().ledger):
            assert time.monotonic() < end_s, self.log.read()
            time.sleep(0.02)

    def take_lease(self, site_id: str) -> None:
        """Let the log forget a site, as if its heartbeats had stopped."""
        key = encode(f"orrery/{self.run}/live/{site_id}")
        self.client.call("/v3/kv/deleterange", {"key": key})


class ThreadSite:
    """A trainer of one rank. With `resumes` it starts from its newest checkpoint."""

    def __init__(
        self, folders: SiteFolders, name: str, stage: str = "sft", resumes: bool = False
    ) -> None:
        self.name, self.run_dir = name, folders.run_dir(name)
        self.spec = folders.spec
        options = ["--run-dir", str(self.run_dir), "--stage", stage]
        self.ctx = parse_role("trainer", options)
        world = World(0, 1, torch.device("cpu"), None)
        start = self.run_dir / "weights/init"
        trainer = self.spec.trainer
        self.learner = assemble_learner(self.ctx, world, start, trainer.optimizer, 1.0)
        self.resumed = resume(self.ctx, self.learner, stage) if resumes else None
        self._stack = ExitStack()

    def enter(self) -> None:
        """Join. Return after the site's first round."""
        made = SiteTraining(self.ctx, self.learner, self.spec.trainer.elastic, self.resumed)
        self.training = self._stack.enter_context(made)

    def leave(self) -> None:
        self._stack.close()

    def learn(self, num_steps: int | None = None) -> int:
        """Train without an exchange. Return the tokens."""
        num_tokens = 0
        elastic = self.spec.trainer.elastic
        for _ in range(num_steps or elastic.inner_steps // elastic.fragments):
            batch = batch_columns(self.learner.step + 1, seed=ord(self.name))
            totals = count_totals([batch], self.learner.world)
            num_tokens += self.learner.learn([batch], 1, totals, 1.0).num_tokens
        return num_tokens

    def train(self, num_steps: int | None = None) -> None:
        """Train steps, by default those of a phase, then exchange."""
        self.training.after_step(self.learn(num_steps))

    def save(self) -> None:
        with StageCheckpoints(self.ctx, self.learner, self.ctx.stage) as checkpoints:
            checkpoints.copy(self.training.checkpoint_files())
            checkpoints.write()

    @property
    def state(self) -> OuterState:
        return self.training._loop.state

    def weights(self) -> np.ndarray:
        return flat({name: each.detach() for name, each in self.learner.weights.items()})

    @property
    def rows(self) -> list[dict[str, Any]]:
        found = rows(metrics_path(self.run_dir, "trainer.0"))
        return [row for row in found if row.get("event") == "round"]


def flat(tensors: Mapping[str, torch.Tensor]) -> np.ndarray:
    return torch.cat([each.reshape(-1) for _, each in sorted(tensors.items())]).numpy().copy()


def begun(call: Callable[[], Any]) -> Future[Any]:
    return THREADS.submit(call)


def together(*calls: Callable[[], Any]) -> list[Any]:
    return [each.result(timeout=DEADLINE_S) for each in [begun(one) for one in calls]]
