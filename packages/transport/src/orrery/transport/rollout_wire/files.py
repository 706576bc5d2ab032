"""Rollouts through files: one safetensors file a micro-batch, in a folder that both ends see.

- The sender makes `rollouts/wire/<session>/`; the session is in its url, so batches of an earlier sender are never read.
- A batch is `step_<n>/rank_<r>.micro_<m>.safetensors`, then the marker `step_<n>/BATCH.json`, last. Ranks with the same micro-batches
  have hard links to the same files.
  Each file is closed before the next is begun: whoever sees the marker sees the data, on a network file system too.
- A receiver asks by writing `ask.rank_<r>.json`: the step it wants and the last that it has whole; the sender removes a
  batch that all ranks have. Files carry a hash of the run's token, never the token: asks that do not decode or carry another
  hash are not believed, and a receiver whose token has not the hash of `wire.json` does not read.
"""

import asyncio
import hashlib
import hmac
import logging
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec

from orrery.manifest.errors import OrreryError, RunFailed
from orrery.transport import nfs, safetensors_columns
from orrery.transport.columns import Columns
from orrery.transport.rollout_wire.contract import Batch, ReceivedBatch
from orrery.transport.token import run_token

PROTOCOL = 1
POLL_S = 0.01
GONE_S = 5.0  # a batch that is not seen for so long after it was announced is gone

log = logging.getLogger(__name__)


class Ask(msgspec.Struct):
    protocol: int
    token_sha256: str
    rank: int
    step: int
    received: int  # the last step that this receiver has whole, −1 before the first


class Marker(msgspec.Struct):
    step: int
    num_ranks: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]


class Wire(msgspec.Struct):
    """`wire.json`: whose wire this is, and the newest batch that was handed over."""

    token_sha256: str
    last_step: int | None


def _token_sha256(folder: Path) -> str:
    return hashlib.sha256(f"{folder.name}:{run_token()}".encode()).hexdigest()


def _write(path: Path, message: msgspec.Struct) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(msgspec.json.encode(message))
    aside.rename(path)


class FilesSender:
    """See `contract.RolloutSender`. `host` and `port` are not used."""

    def __init__(self, run_dir: Path, host: str, port: int, num_ranks: int, keep: int = 1) -> None:
        self.num_ranks = num_ranks
        self.num_foreign = 0
        self._keep = keep
        wires = Path(run_dir).resolve() / "rollouts" / "wire"
        shutil.rmtree(wires, ignore_errors=True)
        self._folder = wires / secrets.token_hex(8)
        self._folder.mkdir(parents=True)
        self.url = f"file://{self._folder}"
        self._missing: dict[int, set[int]] = {}
        self._last_step: int | None = None
        self._wanted = -1
        self._foreign: dict[str, int] = {}  # file name -> hash of what it held when it was counted
        self._token_sha256 = _token_sha256(self._folder)
        _write(self._folder / "wire.json", Wire(self._token_sha256, None))

    async def send(self, batch: Batch) -> None:
        batch.check(self.num_ranks, self._last_step)
        self._last_step = batch.step
        await self._until(lambda: len(self._missing) < self._keep)
        folder = self._folder / f"step_{batch.step}"
        folder.mkdir()
        for rank, of_rank in enumerate(batch.micro_batches):
            first = next(other for other, same in enumerate(batch.micro_batches) if same is of_rank)
            for micro_step in range(len(of_rank)):
                path = folder / f"rank_{rank}.micro_{micro_step}.safetensors"
                if first < rank:
                    os.link(folder / f"rank_{first}.micro_{micro_step}.safetensors", path)
                    continue
                try:
                    await asyncio.to_thread(
                        safetensors_columns.write,
                        path,
                        of_rank[micro_step],
                        {"step": batch.step},
                        False,
                    )
                except ValueError as error:
                    raise OrreryError(
                        f"batch {batch.step}: micro-batch {micro_step} of rank {rank} cannot be sent: {error}"
                    ) from error
        self._missing[batch.step] = set(range(self.num_ranks))
        _write(self._folder / "wire.json", Wire(self._token_sha256, batch.step))
        _write(
            folder / "BATCH.json",
            Marker(
                batch.step, self.num_ranks, len(batch.micro_batches[0]), batch.totals, batch.info
            ),
        )

    async def wanted(self, at_least: int = -1) -> int:
        await self._until(lambda: self._wanted >= at_least)
        return self._wanted

    async def drained(self, deadline_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._until(lambda: not self._missing), deadline_s)
        except TimeoutError:
            late = "; ".join(
                f"batch {step} by trainer rank {', '.join(map(str, sorted(ranks)))}"
                for step, ranks in self._missing.items()
            )
            raise RunFailed(
                f"rollout wire: waited {deadline_s:g} s for batches to be received: {late}; read logs/trainer.*.log"
            ) from None

    def close(self) -> None:
        shutil.rmtree(self._folder.parent, ignore_errors=True)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._look()
            if condition():
                return
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
        """Read every rank's ask; remove what all ranks have acknowledged."""
        for path in [self._folder / f"ask.rank_{rank}.json" for rank in range(self.num_ranks)]:
            ask = self._read(path)
            if ask is None:
                continue
            self._wanted = max(self._wanted, ask.step)
            for step in [step for step in self._missing if step <= ask.received]:
                self._missing[step].discard(ask.rank)
                if not self._missing[step]:
                    del self._missing[step]
                    shutil.rmtree(self._folder / f"step_{step}", ignore_errors=True)

    def _read(self, path: Path) -> Ask | None:
        if (data := nfs.read(path)) is None:
            return None
        try:
            ask = msgspec.json.decode(data, type=Ask)
            if (
                ask.protocol == PROTOCOL
                and 0 <= ask.rank < self.num_ranks
                and hmac.compare_digest(ask.token_sha256.encode(), self._token_sha256.encode())
            ):
                return ask
        except (msgspec.MsgspecError, RecursionError, ValueError):
            pass
        if self._foreign.get(path.name) != hash(data):
            self._foreign[path.name] = hash(data)
            self.num_foreign += 1
            log.warning("rollout wire: ignored %s: no ask of this run and protocol", path)
        return None


class FilesReceiver:
    """See `contract.RolloutReceiver`."""

    def __init__(self, run_dir: Path, url: str, rank: int) -> None:
        if not url.startswith("file://"):
            raise OrreryError(
                f"rollout wire: {url!r} is not the url of a files wire; it starts with file://"
            )
        self.rank = rank
        self.url = url
        self._folder = Path(url.removeprefix("file://"))
        self._token_sha256 = _token_sha256(self._folder)
        self._received = -1

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        self._refuse(step)
        self._ask(step)
        marker_path = self._folder / f"step_{step}" / "BATCH.json"
        end = time.monotonic() + deadline_s
        while not marker_path.exists():
            self._refuse(step)
            if time.monotonic() >= end:
                raise RunFailed(
                    f"trainer rank {self.rank} asked the orchestrator at {self.url} for batch {step}, "
                    f"but nothing came within {deadline_s:g} s; read logs/orchestrator.0.log"
                )
            time.sleep(POLL_S)
        try:
            marker = msgspec.json.decode(marker_path.read_bytes(), type=Marker)
        except (msgspec.DecodeError, FileNotFoundError) as error:
            raise RunFailed(
                f"trainer rank {self.rank}: {marker_path} is no marker of a batch ({error})"
            ) from error
        if marker.step != step or self.rank >= marker.num_ranks:
            raise RunFailed(
                f"trainer rank {self.rank} asked for batch {step}, but {marker_path} is of batch {marker.step} for {marker.num_ranks} ranks"
            )
        if marker.num_micro_batches == 0:
            self._done(step)
        return ReceivedBatch(
            step,
            self.rank,
            marker.num_micro_batches,
            marker.totals,
            marker.info,
            self._stream(marker),
        )

    def close(self) -> None:
        pass

    def _stream(self, marker: Marker) -> Iterator[Columns]:
        for micro_step in range(marker.num_micro_batches):
            path = (
                self._folder
                / f"step_{marker.step}"
                / f"rank_{self.rank}.micro_{micro_step}.safetensors"
            )
            try:
                columns, info = safetensors_columns.read(
                    path, mapped=False
                )  # the sender removes it once all have acknowledged
            except OrreryError as error:
                raise RunFailed(
                    f"trainer rank {self.rank} asked for micro-batch {micro_step} of batch {marker.step}: {error}"
                ) from error
            if info.get("step") != marker.step:
                raise RunFailed(
                    f"trainer rank {self.rank} asked for batch {marker.step}, but {path} is of batch {info.get('step')}"
                )
            if micro_step + 1 == marker.num_micro_batches:
                self._done(
                    marker.step
                )  # before the yield: a reader that stops at the last micro-batch has everything
            yield columns

    def _done(self, step: int) -> None:
        self._received = step
        self._ask(step)

    def _ask(self, step: int) -> None:
        try:
            _write(
                self._folder / f"ask.rank_{self.rank}.json",
                Ask(PROTOCOL, self._token_sha256, self.rank, step, self._received),
            )
        except FileNotFoundError:
            if self._received < step:  # else the sender has closed after the last batch, as it may
                raise RunFailed(
                    f"trainer rank {self.rank}: the rollout wire {self.url} is closed; its folder is gone"
                ) from None

    def _refuse(self, step: int) -> None:
        """Raises `RunFailed` where batch `step` must not or will never come."""
        who = f"trainer rank {self.rank} asked the orchestrator at {self.url} for batch {step} and was refused"
        path = self._folder / "wire.json"
        if (data := nfs.read(path)) is None:
            if nfs.appears(path, GONE_S):
                return  # it was being replaced; whoever waits looks again
            raise RunFailed(
                f"trainer rank {self.rank}: the rollout wire {self.url} is closed; its folder is gone"
            )
        try:
            wire = msgspec.json.decode(data, type=Wire)
        except msgspec.DecodeError as error:
            raise RunFailed(f"{who}: {path} does not decode ({error})") from error
        if not hmac.compare_digest(wire.token_sha256, self._token_sha256):
            raise RunFailed(
                f"{who}: the token is not this run's; both processes must be of one attempt"
            )
        if (
            wire.last_step is not None
            and step <= wire.last_step
            and not nfs.appears(self._folder / f"step_{step}", GONE_S)
        ):
            raise RunFailed(f"{who}: batch {step} is gone, the wire is at batch {wire.last_step}")
        held = sorted(
            int(path.parent.name.removeprefix("step_"))
            for path in self._folder.glob("step_*/BATCH.json")
        )
        skipped = [other for other in held if self._received < other < step]
        if skipped:
            raise RunFailed(
                f"{who}: batch {skipped[0]} comes first; trainer and orchestrator disagree about the next step"
            )
