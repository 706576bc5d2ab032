"""Train one of several DiLoCo sites that share a model (`orrery.elastic`).

- Sites exchange weight updates in rounds. The steps between two rounds are a phase.
- After a round, each rank copies its state (a snapshot) into shared memory. Sites that join or lag
  behind fetch snapshots.
- With port P in `listen` of `site.json`, etcd uses P and P + 1. Rank i of R serves snapshots at
  P + 2 + i, and exchanges updates at P + 2 + R + i.
"""

import shutil
import time
import uuid
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Self, TypeVar

import msgspec
import numpy as np
import torch

from orrery.elastic.certificates import Certificates
from orrery.elastic.codecs import CODECS, codec
from orrery.elastic.etcd_site import EtcdSite
from orrery.elastic.exchange import ErrorFeedback, exchange, layer_buckets
from orrery.elastic.keeper import KeeperOptions, SnapshotKeeper
from orrery.elastic.ledger import Behind, Ledger, ShardMap
from orrery.elastic.links import PeerLinks
from orrery.elastic.loop import Floats, OuterLoop, OuterOptimizer, RoundRow, make_fragments
from orrery.elastic.membership import EpochLog, RoundPace
from orrery.elastic.snapshots import (
    FetchFailed,
    check_room,
    copy_state,
    fetch_state,
    read_header,
    snapshot_dir,
)
from orrery.elastic.types import (
    NO_ROUND,
    ElasticError,
    LeaseLost,
    OuterRound,
    SiteMember,
    Terms,
    end_rewind,
    read_place,
)
from orrery.manifest.identity import commit, run_id
from orrery.manifest.schema import Elastic
from orrery.manifest.schema.trainer import host_bytes, snapshot_bytes
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import SHARED_MEMORY, memory_prefix
from orrery.runtime.timing import scaled
from orrery.trainer.heartbeat import io_stall_s
from orrery.trainer.host_memory import available_bytes, host_number
from orrery.trainer.learner import Learner
from orrery.trainer.optim import named_state
from orrery.trainer.site_weights import LearnerWeights, WorldRanks
from orrery.wire.checkpoints import is_due

FETCH_S = 60.0
PHASE_S = 24 * 3600.0  # time limit for other sites' steps between two rounds
ROUNDS = "rounds.json"
T = TypeVar("T")
# (last round, its state digest, ids of members or addresses of snapshot servers)
STANDING: type[tuple[int, str, list[str]]] = tuple[int, str, list[str]]


class HeldRound(msgspec.Struct, frozen=True):
    """A checkpoint's last round, and the number of documents trained from each data shard."""

    round: int
    shards: ShardMap
    tokens: list[int] = []  # tokens or steps since each fragment's last exchange


class SiteTraining:
    """Exchange updates with other sites. `resumed`: folder of the loaded checkpoint.

    The next step reads data shard `shard` from document `start`.
    """

    def __init__(
        self, ctx: RoleContext, learner: Learner, spec: Elastic, resumed: Path | None = None
    ) -> None:
        self._ctx, self._learner, self._spec = ctx, learner, spec
        self._ranks = WorldRanks(learner.world, self._limit_s())
        self._weights = LearnerWeights(learner)
        self._place = read_place(ctx.run_dir)
        self._run = run_id(ctx.manifest)
        self._files = Certificates.of(Path(self._place.certificates), self._place.name)
        self._member = SiteMember("", "", 0)
        self._stack = ExitStack()
        self._site: EtcdSite | None = None  # None except on rank 0
        self._codec = codec(spec.codec)
        self._feedback: ErrorFeedback | None = None
        if spec.error_feedback:
            self._feedback = ErrorFeedback(self._weights.num_parameters)
        optimizer = OuterOptimizer(spec.outer.lr, spec.outer.momentum, spec.outer.nesterov)
        self._layers = layer_buckets(self._weights.sizes)
        fragments = make_fragments(self._layers, spec.fragments) if spec.fragments > 1 else ()
        hosts = learner.world.all_gather(host_number())
        self._ranks_here = hosts.count(host_number())
        self._free_bytes = available_bytes() // self._ranks_here  # before OuterLoop allocates
        times = "", spec.store_timeout_s
        self._loop = OuterLoop(
            optimizer, self._weights, None, self._exchange, *times, self._ranks, fragments
        )
        learner.outer_momentum = self._weights.filled(
            self._loop.state.momentum, learner.outer_momentum
        )
        learner.outer_start = self._weights.filled(self._loop.state.start, learner.outer_start)
        sft = ctx.manifest.stages.sft if ctx.stage == "sft" else None
        data = getattr(sft, "data", None)
        self._shards = ShardMap([0] * getattr(data, "num_shards", spec.max_sites))
        self._phase = spec.inner_steps // spec.fragments
        self._num_steps = (sft or ctx.manifest.stages.rl).num_steps
        # A round exchanges one fragment. Rounds after the last step exchange the fragments left.
        self._num_rounds = self._num_steps // self._phase + spec.fragments - 1
        self._step_documents = sft.examples_per_batch if sft else 0
        self._held, self._holders = NO_ROUND, dict[str, int]()
        if resumed is not None:
            held = _read_json(resumed / "trainer" / ROUNDS, HeldRound, "resume another checkpoint")
            self._held, self._holders = held.round, held.shards.holders
            self._shards = msgspec.structs.replace(held.shards, holders={})
            if learner.outer_start:
                self._loop.fragment_tokens = held.tokens
        self._is_restarted = False  # True if no present member was in the resumed round
        self._is_resumed_rl = ctx.stage == "rl" and self._held > NO_ROUND
        self._inner_begin_s = time.monotonic()

    @property
    def shard(self) -> int:
        return self._shards.holders[self._member.id]

    @property
    def start(self) -> int:
        num_beyond = self._learner.step - self._step_of(self._loop.round - 1)
        return self._shards.trained[self.shard] + num_beyond * self._step_documents

    def _step_of(self, number: int) -> int:
        return (number - self._shards.num_idle) * self._phase

    @property
    def _last(self) -> int:
        return self._num_rounds + self._shards.num_idle

    @property
    def next_round_step(self) -> int:
        sent = (self._learner.step // self._phase + 1) * self._phase
        return sent + self._delay(sent)

    def __enter__(self) -> Self:
        """Join the run. In SFT and at the start of RL, also finish a round."""
        waiting = self._ctx.health.waiting("the other sites", deadline_s=self._limit_s())
        with waiting, ExitStack() as on_failure:
            on_failure.callback(self._stack.close)
            self._open()
            if self._held == NO_ROUND or not self._learner.outer_start:
                self._loop.read_weights()
            self._loop.round = self._held + 1
            self._join()
            if self._ctx.stage == "rl" and self._loop.round > 0:
                self._copy(self._loop.round - 1, self._loop.digest())
            else:
                self._finish_round()
                check_own_shard(self._place.shard, self._shards.holders.get(self._member.id))
            self._is_restarted = False
            on_failure.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Leave the run. After the last round, first wait for late sites."""
        with self._stack:
            if kind is None and self._is_over:
                with self._ctx.health.waiting("late sites", deadline_s=self._limit_s()):
                    self._ranks.from_first(self._await_late, bool)

    def _await_late(self) -> bool:
        assert self._site is not None
        return await_late(self._site.log, self._member.id, scaled(self._spec.grace_s))

    @property
    def _is_over(self) -> bool:
        return self._ctx.stage == "sft" and self._loop.round > self._last

    def after_step(self, num_tokens: int) -> None:
        self._loop.count(num_tokens if self._spec.weights == "tokens" else 1)
        beyond = self._learner.step % self._phase
        if beyond == 0 and self._delay(self._learner.step):
            self._loop.send()
        elif beyond == (self._spec.delay_steps if self._loop.is_in_flight else 0):
            with self._ctx.health.waiting("a round with other sites", deadline_s=self._limit_s()):
                self._finish_round()
                while self._learner.step == self._num_steps and self._loop.round <= self._last:
                    self._finish_round()

    def _delay(self, step: int) -> int:
        """Return the steps from sending an update to applying the round's result.

        It is 0 at checkpoints, at the last step and in RL, because published weights are final.
        """
        is_sft = self._ctx.stage == "sft"
        if not is_sft or step == self._num_steps or is_due(step, self._ctx.manifest, "sft"):
            return 0
        return self._spec.delay_steps

    def checkpoint_files(self) -> dict[str, bytes]:
        held = HeldRound(self._loop.round - 1, self._shards, self._loop.fragment_tokens)
        return {ROUNDS: msgspec.json.encode(held)}

    def _finish_round(self) -> None:
        inner_s, row = time.monotonic() - self._inner_begin_s, self._round()
        if row is None:
            self._copy(self._loop.round - 1, self._loop.digest())
            return
        is_exchanged = len(row.members) > 1 and any(row.weights)
        if self._feedback is not None and is_exchanged:
            self._feedback.commit(self._loop.state.fragments[self._loop.fragment_of(row.round)])
        self._shards.num_idle += row.round > 0 and not any(row.weights)
        step = min(self._step_of(row.round), self._num_steps)
        num_documents = self._phase * self._step_documents * (row.round > 0)
        num_begun = self._delay(step) * self._step_documents
        self._shards.finish_round(row.members, num_documents, num_begun)
        if self._ctx.stage == "sft" and not step <= self._learner.step < step + self._phase:
            self._learner.step = step
        self._copy(row.round, row.digest)
        if self._ranks.is_first:
            self._record(row, inner_s)
        self._inner_begin_s = time.monotonic()

    def _round(self) -> RoundRow | None:
        """Do the next round. Return None after SFT's last round."""
        while not self._is_over:
            try:
                if self._loop.is_in_flight:
                    return self._loop.apply(self._spec.delay_merge)
                return self._loop.exchange(has_weight=not self._is_restarted)
            except Behind as behind:
                # A site that missed only this round adds its update to the next.
                self._take_state(keeps_delta=behind.committed == self._loop.round)
            except LeaseLost as error:
                self._ctx.log.warning("left behind: %s; joining again", error)
                self._join()
        return None

    def _exchange(self, delta: Floats, outer_round: OuterRound, rank: int) -> int:
        buckets: Sequence[slice] = self._layers
        if self._spec.fragments > 1:
            buckets = self._loop.state.fragments[self._loop.fragment_of(outer_round.number)]
        stats = exchange(
            delta,
            outer_round,
            rank,
            self._links,
            self._codec,
            self._spec.topology,
            error_feedback=self._feedback,
            buckets=buckets,
            timeout_s=self._spec.exchange_timeout_s,
        )
        return stats.bytes_sent

    def _record(self, row: RoundRow, inner_s: float) -> None:
        own = {"own": self._member.id[:8], "shard": self.shard, "start": self.start}
        record_round(self._ctx, self._learner.step, row, own | {"inner_s": inner_s})

    def _open(self) -> None:
        spec, place, files = self._spec, self._place, self._files
        rank, size = self._learner.world.rank, self._learner.world.size
        host, _, text = place.listen.rpartition(":")
        port, is_founder = int(text or 0), place.join == place.listen
        snapshots, links_port = (f"{host}:{port + 2}", port + 2 + size) if host else ("", 0)
        self._folder = SHARED_MEMORY / f"{memory_prefix(self._ctx.run_dir)}site-{rank}"
        check_listens(place.listen, size - self._ranks_here)
        count = (spec.snapshots.keep + 1) * self._ranks_here
        check_room(SHARED_MEMORY, snapshot_bytes(*self._sizes()), count)
        self._links = PeerLinks(self._run, files, host, links_port, shard=rank)
        self._stack.callback(self._links.close)
        keeping = keeper_options(spec, self._folder, host, port + 2 + rank, files)
        self._keeper = self._stack.enter_context(SnapshotKeeper(keeping))
        self._member = SiteMember("", host, self._links.port, place.shard, place.name)
        if self._ranks.is_first:
            self._site = self._stack.enter_context(
                EtcdSite(
                    self._run,
                    self._ctx.run_dir / "site",
                    place.listen,
                    files,
                    "" if is_founder else place.join,
                    pace=pace_of(spec),
                    snapshots=snapshots,
                    heartbeat_s=spec.heartbeat_s,
                    dead_s=spec.dead_after_s,
                    store_s=spec.store_timeout_s,
                    coordinators=spec.voters,
                )
            )
            self._loop.rounds = self._site.membership
            self._site.membership.measured = self._links.speeds
            self._site.links = self._links

    def _sizes(self) -> tuple[int, int]:
        """Return this rank's number of trained parameters and optimizer bytes."""
        return self._weights.num_parameters, sum(tensor.nbytes for tensor in self._inner())

    def _join(self) -> None:
        """Join with a new site id, and fetch the newest state if it is missing.

        A resumed RL site keeps its weights until the next round, because engines sample from them.
        """
        held = self._loop.round - 1
        digest = self._loop.digest() if held > NO_ROUND else ""
        site_id = self._ranks.from_first(lambda: uuid.uuid4().hex, str)
        self._member = msgspec.structs.replace(self._member, id=site_id)

        def join() -> tuple[int, str, list[str]]:
            assert self._site is not None
            check_open(self._site.log.read().ledger, self._spec, held)
            terms = self._terms(held, digest)
            self._site.membership.join(self._member, terms)
            end_rewind(self._ctx.run_dir, self._place)
            view = self._site.log.read()
            row = view.ledger.committed
            members = sorted(view.ledger.ids & view.live)
            return view.ledger.last, row.digest if row else "", members

        last, found, members = self._ranks.from_first(join, STANDING)
        self._loop.site_id = site_id
        if not self._holders.keys().isdisjoint(members):
            self._shards.holders = self._holders
        elif self._ctx.stage == "sft":
            self._is_restarted = bool(self._holders)
        self._holders, self._place = {}, msgspec.structs.replace(self._place, rewinds=False)
        waits = self._is_resumed_rl and last > held
        if (last, found) != (held, digest) and not waits:
            self._take_state(keeps_delta=False)

    def _terms(self, held: int, digest: str) -> Terms:
        assert self._site is not None
        is_first = self._site.log.read().ledger.terms is None
        return Terms(
            manifest=self._run,
            code=commit(Path(__file__).parents[3]),
            codec=self._spec.codec,
            memory_bytes=host_bytes(self._spec, *self._sizes()) if is_first else self._free_bytes,
            codecs=tuple(CODECS),
            round=held,
            digest=digest,
            rewinds=self._place.rewinds,
        )

    def _inner(self) -> list[torch.Tensor]:
        return [each[2] for each in named_state(self._learner.optimizer, self._learner.weights)]

    def _copy(self, number: int, digest: str) -> None:
        state, learner = self._loop.state, self._learner
        parts = {"theta": state.start.data, "momentum": state.momentum.data}
        for index, tensor in enumerate(self._inner()):
            parts[f"inner.{index}"] = tensor.detach().cpu().reshape(-1).numpy().data
        facts = {"step": learner.step, "shards": msgspec.to_builtins(self._shards)}
        block_bytes = self._spec.snapshots.block_bytes
        copy_state(self._folder, number, digest, parts, facts, block_bytes)
        self._keeper.copied()

    def _take_state(self, keeps_delta: bool) -> None:
        """Fetch the newest round's state from other sites. All ranks fetch the same round.

        With `keeps_delta`, keep this site's update, token counts and optimizer state.
        """
        rank, snapshot = self._learner.world.rank, None
        folder = self._folder.with_name(f"{self._folder.name}-taken")
        limit_s = scaled(self._spec.store_timeout_s)  # time limit in which no block arrives
        end_s = time.monotonic() + limit_s
        while snapshot is None:
            number, digest, donors = self._ranks.from_first(self._newest, STANDING)
            peers = [_shifted(donor, rank) for donor in donors]
            found, failure = None, ("", 0)
            try:
                found = fetched(folder, number, digest, peers, self._files)
            except FetchFailed as error:
                failure = str(error), error.num_fetched
            failures = [each for each in self._ranks.gather(failure, tuple[str, int]) if each[0]]
            if any(num_fetched for _, num_fetched in failures):
                end_s = time.monotonic() + limit_s
            if not failures:
                assert found is not None
                snapshot = found
                bits = self._loop.digest_of(*_outer_state(snapshot))
                check_bits(bits, digest, f"round {number} from {', '.join(peers)}")
            elif time.monotonic() > end_s:
                raise ElasticError(failures[0][0])
        self._load(snapshot, number, keeps_delta)
        shutil.rmtree(snapshot.parent)

    def _newest(self) -> tuple[int, str, list[str]]:
        assert self._site is not None
        ledger = self._site.log.read().ledger
        return ledger.last, ledger.committed.digest if ledger.committed else "", self._site.donors()

    def _load(self, snapshot: Path, number: int, keeps_delta: bool) -> None:
        loop, state, facts = self._loop, self._loop.state, read_header(snapshot).facts
        stepped = {loop.fragment_of(each) for each in range(loop.round, number + 1)}
        missed = tuple(part for each in sorted(stepped) for part in state.fragments[each])
        loop.round = number + 1
        self._shards = msgspec.convert(facts["shards"], ShardMap)
        keeps_delta &= not self._is_over
        if keeps_delta:
            for part, values in self._weights.parts(missed):
                np.subtract(state.start[part], values, out=state.delta[part])
        state.start[:], state.momentum[:] = _outer_state(snapshot)
        state.forget()
        if keeps_delta:
            np.subtract(state.start, state.delta, out=state.delta)
            self._weights.write(state.delta, missed)
        else:
            self._weights.write(state.start)
            loop.fragment_tokens = [0] * len(state.fragments)
            _read_inner(snapshot, self._inner())
        if self._ctx.stage == "sft":
            self._learner.step = facts["step"]

    def _limit_s(self) -> float:
        spec = self._spec
        limit_s = spec.store_timeout_s + spec.exchange_timeout_s + spec.grace_s
        return scaled(PHASE_S + limit_s) + io_stall_s(self._learner.world.size)


def record_round(ctx: RoleContext, step: int, row: RoundRow, own: dict[str, Any]) -> None:
    names = [each.name for each in row.members]
    ids = {"members": [each.id[:8] for each in row.members], "names": names}
    ctx.metrics.write(step, event="round", **(msgspec.to_builtins(row) | ids | own))
    ctx.log.info(
        "round %d: %d sites (%s), %d bytes sent, %.2f s, weights %s",
        *(row.round, len(names), ", ".join(names), row.num_bytes, row.sync_s, row.digest[:16]),
    )


def check_own_shard(wanted: int | None, found: int | None) -> None:
    if wanted not in (None, found):
        raise ElasticError(
            f"--shard {wanted}: another site trains it; join with a free shard, or without --shard"
        )


def keeper_options(
    spec: Elastic, folder: Path, host: str, port: int, files: Certificates
) -> KeeperOptions:
    return KeeperOptions(
        str(folder),
        keep=spec.snapshots.keep,
        host=host,
        port=port,
        certificates=(str(files.authority), str(files.certificate), str(files.key)),
        linger_s=spec.dead_after_s,
    )


def pace_of(spec: Elastic) -> RoundPace:
    return RoundPace(
        founders=spec.min_sites,
        quorum=spec.quorum,
        grace_s=spec.grace_s,
        exchange_s=spec.exchange_timeout_s,
        max_sites=spec.max_sites,
    )


def fetched(
    folder: Path, number: int, digest: str, peers: list[str], certificates: Certificates
) -> Path:
    """Fetch the state of round `number`. Remove older unfinished fetches."""
    for left in folder.glob("*round_*"):
        if snapshot_dir(folder, number).name not in left.name:
            shutil.rmtree(left, ignore_errors=True)
    return fetch_state(
        lambda: peers, lambda: (number, digest), folder, certificates, scaled(FETCH_S)
    )


def await_late(log: EpochLog, site_id: str, limit_s: float) -> bool:
    """Wait while live sites join, because they may fetch the state of member `site_id`.

    Return False after `limit_s`, or if etcd fails.
    """
    end_s = log.now_s() + limit_s
    try:
        view = log.read()
        while site_id in view.ledger.ids and any(
            each.member.id in view.live for each in view.ledger.joining
        ):
            if (left_s := end_s - log.now_s()) <= 0:
                return False
            view = log.wait(view, left_s)
    except ElasticError:
        return False
    return True


def check_open(ledger: Ledger, spec: Elastic, held: int) -> None:
    if spec.admission == "closed" and ledger.last > NO_ROUND and held == NO_ROUND:
        raise ElasticError(
            "trainer.elastic.admission 'closed': the run has begun, and admits no site; set it "
            "to 'open' in a new run"
        )


def check_listens(listen: str, num_elsewhere: int) -> None:
    if listen and num_elsewhere:
        raise ElasticError(
            f"--listen {listen}: a site listens on one host, and {num_elsewhere} ranks of this "
            "site are on other hosts; join without --listen, or train this site on one host"
        )


def check_bits(found: str, digest: str, source: str) -> None:
    if found != digest:
        raise ElasticError(
            f"recovery: the state of {source} differs from the run's; restart the sites at "
            "these addresses, then join again"
        )


def _outer_state(snapshot: Path) -> tuple[Floats, Floats]:
    """Return a snapshot's weights θ and outer momentum, each f32[n]."""
    theta, momentum = (
        np.memmap(snapshot / name, np.float32, mode="r") for name in ("theta", "momentum")
    )
    return theta, momentum


@torch.no_grad()
def _read_inner(snapshot: Path, tensors: Sequence[torch.Tensor]) -> None:
    for index, tensor in enumerate(tensors):
        data = np.fromfile(snapshot / f"inner.{index}", dtype=np.uint8)
        flat = torch.from_numpy(data).view(tensor.dtype)
        tensor.copy_(flat.view(tensor.shape))


def _shifted(donor: str, rank: int) -> str:
    host, _, port = donor.rpartition(":")
    return f"{host}:{int(port) + rank}"


def _read_json(path: Path, kind: type[T], remedy: str) -> T:
    try:
        return msgspec.json.decode(path.read_bytes(), type=kind)
    except (OSError, msgspec.MsgspecError) as error:
        raise ElasticError(
            f"{path}: cannot be read ({error}), and trainer.elastic needs it; {remedy}"
        ) from error
