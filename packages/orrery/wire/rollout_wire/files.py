"""Send rollouts through files: one safetensors file per micro-batch, in a folder that both ends
see.

- The sender makes `rollouts/wire/<session>/` and names it in its url, so a receiver never reads an
  earlier sender's batches.
- A batch is `step_<n>/rank_<r>.micro_<m>.safetensors`, then the marker `step_<n>/BATCH.json`. Files
  are closed in this order, so a reader of the marker sees the data, on NFS too. Ranks with the same
  micro-batches share files by hard links.
- A receiver asks by writing `ask.rank_<r>.json`: the wanted step, and the last step received. The
  sender removes a batch that all ranks have received.
- Asks and `wire.json` contain a hash of the run's token. Files without it are ignored or refused.
"""

import asyncio
import functools
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
from orrery.runtime.token import run_token
from orrery.wire import column_files, nfs
from orrery.wire.columns import Columns
from orrery.wire.control_socket import ControlSocket
from orrery.wire.rollout_wire.contract import Batch, ReceivedBatch, not_drained

PROTOCOL = 1
POLL_S = 0.01
GONE_S = 5.0  # delay until NFS shows an announced batch

log = logging.getLogger(__name__)


class FileAsk(msgspec.Struct):
    protocol: int
    token_sha256: str
    rank: int
    step: int
    received: int  # the last completely received step, −1 before any


class BatchMarker(msgspec.Struct):
    step: int
    num_ranks: int
    num_micro_batches: int
    totals: dict[str, int | float]
    info: dict[str, Any]


class WireState(msgspec.Struct):
    """The content of `wire.json`: the hash of the run's token, and the newest sent batch."""

    token_sha256: str
    last_step: int | None


def _token_sha256(folder: Path) -> str:
    return hashlib.sha256(f"{folder.name}:{run_token()}".encode()).hexdigest()


def _write(path: Path, message: msgspec.Struct) -> None:
    aside = path.with_name(f".{path.name}.{os.getpid()}")
    aside.write_bytes(msgspec.json.encode(message))
    aside.rename(path)


def _data_path(folder: Path, step: int, rank: int, micro_step: int) -> Path:
    return folder / f"step_{step}" / f"rank_{rank}.micro_{micro_step}.safetensors"


class FilesSender:
    """A `contract.RolloutSender`. Only `control` listens at `host` and `port`."""

    def __init__(self, run_dir: Path, host: str, port: int, num_ranks: int, keep: int = 1) -> None:
        self.num_ranks = num_ranks
        self.num_foreign = 0
        self._keep = keep
        self._address = host, port
        wires = Path(run_dir).resolve() / "rollouts" / "wire"
        shutil.rmtree(wires, ignore_errors=True)
        self._folder = wires / secrets.token_hex(8)
        self._folder.mkdir(parents=True)
        self.url = f"file://{self._folder}"
        self._missing: dict[int, set[int]] = {}
        self._last_step: int | None = None
        self._wanted = -1
        self._foreign: dict[str, int] = {}  # file name → hash of the content already counted
        self._token_sha256 = _token_sha256(self._folder)
        _write(self._folder / "wire.json", WireState(self._token_sha256, None))

    async def send(self, batch: Batch) -> None:
        step, micro_batches = batch.step, batch.micro_batches
        batch.check(self.num_ranks, self._last_step)
        self._last_step = step
        await self._until(lambda: len(self._missing) < self._keep)
        folder = self._folder / f"step_{step}"
        folder.mkdir()
        for rank, of_rank in enumerate(micro_batches):
            first = next(other for other, same in enumerate(micro_batches) if same is of_rank)
            for micro_step in range(len(of_rank)):
                path = _data_path(self._folder, step, rank, micro_step)
                if first < rank:
                    os.link(_data_path(self._folder, step, first, micro_step), path)
                    continue
                try:
                    await asyncio.to_thread(
                        column_files.write, path, of_rank[micro_step], {"step": step}, False
                    )
                except ValueError as error:
                    raise OrreryError(
                        f"batch {step}: micro-batch {micro_step} of rank {rank} cannot be sent: "
                        f"{error}"
                    ) from error
        self._missing[step] = set(range(self.num_ranks))
        _write(self._folder / "wire.json", WireState(self._token_sha256, step))
        count = len(micro_batches[0])
        marker = BatchMarker(step, self.num_ranks, count, batch.totals, batch.info)
        _write(folder / "BATCH.json", marker)

    async def wanted(self, at_least: int = -1) -> int:
        await self._until(lambda: self._wanted >= at_least)
        return self._wanted

    async def drained(self, deadline_s: float | None) -> None:
        try:
            await asyncio.wait_for(self._until(lambda: not self._missing), deadline_s)
        except TimeoutError:
            raise not_drained(deadline_s, self._missing) from None

    @functools.cached_property
    def control(self) -> ControlSocket:
        return ControlSocket(*self._address)

    def close(self) -> None:
        if "control" in self.__dict__:
            self.control.close()
        shutil.rmtree(self._folder.parent, ignore_errors=True)

    async def _until(self, condition: Callable[[], bool]) -> None:
        while True:
            self._look()
            if condition():
                return
            await asyncio.sleep(POLL_S)

    def _look(self) -> None:
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

    def _read(self, path: Path) -> FileAsk | None:
        if (data := nfs.read(path)) is None:
            return None
        try:
            ask = msgspec.json.decode(data, type=FileAsk)
            token = ask.token_sha256.encode()
            is_ours = hmac.compare_digest(token, self._token_sha256.encode())
            if is_ours and ask.protocol == PROTOCOL and 0 <= ask.rank < self.num_ranks:
                return ask
        except (msgspec.MsgspecError, RecursionError, ValueError):
            pass
        if self._foreign.get(path.name) != hash(data):
            self._foreign[path.name] = hash(data)
            self.num_foreign += 1
            log.warning("rollout wire: ignored %s: no ask of this run and protocol", path)
        return None


class FilesReceiver:
    """A `contract.RolloutReceiver` that reads files."""

    def __init__(self, run_dir: Path, url: str, rank: int) -> None:
        if not url.startswith("file://"):
            raise OrreryError(
                f"rollout wire: {url!r} is not the url of a files wire, which starts with file://"
            )
        self.rank = rank
        self.url = url
        self._folder = Path(url.removeprefix("file://"))
        self._token_sha256 = _token_sha256(self._folder)
        self._received = -1

    def receive(self, step: int, deadline_s: float) -> ReceivedBatch:
        self._check(step)
        self._ask(step)
        path = self._folder / f"step_{step}" / "BATCH.json"
        end = time.monotonic() + deadline_s
        while not path.exists():
            self._check(step)
            if time.monotonic() >= end:
                raise RunFailed(
                    f"trainer rank {self.rank} asked the orchestrator at {self.url} for batch "
                    f"{step}, but nothing came within {deadline_s:g} s. "
                    "Read logs/orchestrator.0.log"
                )
            time.sleep(POLL_S)
        try:
            marker = msgspec.json.decode(path.read_bytes(), type=BatchMarker)
        except (msgspec.DecodeError, FileNotFoundError) as error:
            raise RunFailed(
                f"trainer rank {self.rank}: {path} is no marker of a batch ({error})"
            ) from error
        if marker.step != step or self.rank >= marker.num_ranks:
            raise RunFailed(
                f"trainer rank {self.rank} asked for batch {step}, but {path} is of batch "
                f"{marker.step} for {marker.num_ranks} ranks"
            )
        count = marker.num_micro_batches
        if count == 0:
            self._done(step)
        return ReceivedBatch(
            step, self.rank, count, marker.totals, marker.info, self._stream(step, count)
        )

    def close(self) -> None:
        pass

    def _stream(self, step: int, num_micro_batches: int) -> Iterator[Columns]:
        for micro_step in range(num_micro_batches):
            path = _data_path(self._folder, step, self.rank, micro_step)
            try:
                # Do not map the file, because the sender removes acknowledged files.
                columns, info = column_files.read(path, mapped=False)
            except OrreryError as error:
                raise RunFailed(
                    f"trainer rank {self.rank} asked for micro-batch {micro_step} of batch {step}: "
                    f"{error}"
                ) from error
            if info.get("step") != step:
                raise RunFailed(
                    f"trainer rank {self.rank} asked for batch {step}, but {path} is of batch "
                    f"{info.get('step')}"
                )
            if micro_step + 1 == num_micro_batches:
                self._done(step)  # before the yield: a reader may not ask again
            yield columns

    def _done(self, step: int) -> None:
        self._received = step
        self._ask(step)

    def _ask(self, step: int) -> None:
        ask = FileAsk(PROTOCOL, self._token_sha256, self.rank, step, self._received)
        try:
            _write(self._folder / f"ask.rank_{self.rank}.json", ask)
        except FileNotFoundError:
            if self._received < step:
                raise self._closed() from None

    def _closed(self) -> RunFailed:
        return RunFailed(
            f"trainer rank {self.rank}: the rollout wire {self.url} is closed; its folder is gone"
        )

    def _check(self, step: int) -> None:
        """Raise RunFailed if batch `step` is already removed, or would skip a batch."""
        asked = (
            f"trainer rank {self.rank} asked the orchestrator at {self.url} for batch {step} "
            "and was refused"
        )
        path = self._folder / "wire.json"
        if (data := nfs.read(path)) is None:
            if nfs.appears(path, GONE_S):
                return
            raise self._closed()
        try:
            wire = msgspec.json.decode(data, type=WireState)
        except msgspec.DecodeError as error:
            raise RunFailed(f"{asked}: {path} does not decode ({error})") from error
        if not hmac.compare_digest(wire.token_sha256, self._token_sha256):
            raise RunFailed(
                f"{asked}: the orchestrator has the token of another attempt. Restart the stage"
            )
        last = wire.last_step
        is_announced = last is not None and step <= last
        if is_announced and not nfs.appears(self._folder / f"step_{step}", GONE_S):
            raise RunFailed(f"{asked}: that batch is removed, the newest batch is {last}")
        markers = self._folder.glob("step_*/BATCH.json")
        held = sorted(int(marker.parent.name.removeprefix("step_")) for marker in markers)
        skipped = [other for other in held if self._received < other < step]
        if skipped:
            raise RunFailed(
                f"{asked}: batch {skipped[0]} comes first; "
                "trainer and orchestrator disagree about the next step"
            )
