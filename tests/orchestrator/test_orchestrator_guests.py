"""Engines of other sites: honest sites are used, and liars of every kind are refused."""

import asyncio
import json
import secrets
import ssl
import threading
import time
from contextlib import AsyncExitStack, suppress
from dataclasses import replace

import msgspec
import numpy as np
import pytest
from orchestrator_fakes import manifest, rollout

from orrery.elastic.certificates import make_authority, make_site
from orrery.elastic.keeper import SnapshotServer
from orrery.elastic.snapshots import HEADER, StateSnapshot, link_files, publish_copies
from orrery.elastic.types import Terms
from orrery.manifest.errors import RunFailed
from orrery.manifest.identity import canonical_json
from orrery.orchestrator.dispatch import GroupRequest, Request
from orrery.orchestrator.engines.messages import Attested, Generation, GenerationFailed
from orrery.orchestrator.groups import Group, RolloutBuffer
from orrery.orchestrator.guests.host import GuestDoor, engine_release, own_terms
from orrery.orchestrator.guests.lend import Lender
from orrery.orchestrator.guests.messages import (
    MAX_ANSWERS,
    Answers,
    Ask,
    Entered,
    Entry,
    GuestAnswer,
    GuestRefused,
    LeaseOver,
    Noted,
    SampleJob,
    Told,
)
from orrery.orchestrator.guests.pool import GuestPool
from orrery.orchestrator.guests.sites import (
    FETCH_S,
    NUM_HONEST,
    NUM_ROLLOUTS,
    HonestSpread,
    RolloutScore,
    SiteEvidence,
)
from orrery.orchestrator.scheduler import Scheduler
from orrery.orchestrator.snapshot import read as read_snapshot
from orrery.orchestrator.snapshot import write as write_snapshot
from orrery.runtime.network import adjoining_ports
from orrery.runtime.role_context import RoleContext
from orrery.runtime.run_directory import memory_prefix, remove_memory
from orrery.wire import checkpoints
from orrery.wire.recompute import Recomputed

pytestmark = pytest.mark.timeout(60)
SPEC = {
    "max_sites": 3,
    "lease_s": 5.0,
    "max_versions_behind": 1,
    "verified_share": 1.0,
    "tolerance": 4.0,
    "min_logprob_difference": 1e-3,
    "block_bytes": 1024,
}
TERMS = Terms("run", "commit", "", 0)
RELEASE = {"python": "3.11", "vllm": "1"}
VOCABULARY, STOP, MAX_TOKENS = 11, 0, 6
WEIGHTS = np.random.default_rng(0).bytes(4321)
PROMPT = np.arange(3, dtype=np.int32)


def policy(version: int) -> np.ndarray:
    """Return log-probs f32 [VOCABULARY] of a policy without memory."""
    logits = np.random.default_rng(version).normal(size=VOCABULARY) * 1.5
    return (logits - np.log(np.exp(logits).sum())).astype(np.float32)


async def recomputed(version, prompt, token_ids, temperature) -> Recomputed:
    logp = policy(version)
    p = np.exp(logp)
    entropy = -(p * logp).sum()
    ones = np.ones(len(token_ids), np.float32)
    variance = (p * (logp + entropy) ** 2).sum()
    arrays = logp[token_ids], entropy * ones, variance * ones
    return Recomputed(*(each.astype(np.float32).tobytes() for each in arrays))


def drawn(version: int, draw: np.random.Generator) -> np.ndarray:
    tokens = draw.choice(
        VOCABULARY, MAX_TOKENS, p=np.exp(policy(version)) / np.exp(policy(version)).sum()
    )
    stops = np.flatnonzero(tokens == STOP)
    return tokens[: stops[0] + 1 if len(stops) else None].astype(np.int32)


def finish(tokens: np.ndarray) -> str:
    return "stop" if tokens[-1] == STOP else "length"


class Home:
    """A pool with a spread of honest log-probs, and rows of what it noted."""

    def __init__(self, **spec) -> None:
        self.rows: list[dict] = []
        checked = manifest(guests=SPEC | spec)
        self.pool = GuestPool(checked, TERMS, RELEASE, recomputed, self.note)
        self.pool.want(4, "digest 4")
        self.draw = np.random.default_rng(0)

    def note(self, **row) -> None:
        self.rows.append(row)

    async def learn(self, num: int = NUM_HONEST) -> None:
        for _ in range(num):
            tokens = drawn(4, self.draw)
            noise = self.draw.normal(size=len(tokens)) * 1e-4
            logprobs = np.minimum(policy(4)[tokens] + noise, 0).astype(np.float32)
            versions = np.full(len(tokens), 4, np.int32)
            made = Generation("own", tokens, logprobs, versions, finish(tokens), 0)

            async def sample(made=made):
                return made

            await self.pool.draw_here(sample(), PROMPT, 1.0)
            while self.pool._own_checks:
                await asyncio.sleep(0)

    def enter(self, name: str = "lima", **entry) -> int:
        return self.pool.enter(
            name,
            Entry(**({"terms": TERMS, "release": RELEASE, "num_slots": 8} | entry)),
            time.monotonic(),
        ).lease

    def generate(self) -> "asyncio.Task[Generation | None]":
        options = {"max_tokens": MAX_TOKENS, "temperature": 1.0, "stop_token_ids": (STOP,)}
        return asyncio.create_task(self.pool.generate(secrets.token_hex(), PROMPT, **options))

    async def job(self, name: str, lease: int, version: int = 4):
        """Return a waiting call and the job that the site gets for it."""
        await self.pool.ask(name, Ask(lease, version, f"digest {version}", 0), 0)
        call = self.generate()
        told = await self.pool.ask(name, Ask(lease, version, f"digest {version}", 8), 1.0)
        return call, told.jobs[0]

    def honest(self, job, version: int = 4, **changes) -> GuestAnswer:
        tokens = drawn(version, self.draw)
        fields = {
            "id": job.id,
            "version": version,
            "token_ids": tokens.tobytes(),
            "logprobs": policy(version)[tokens].tobytes(),
            "finish_reason": finish(tokens),
        }
        return GuestAnswer(**(fields | changes))

    def refusals(self) -> list[str]:
        return [row["why"] for row in self.rows if row["event"] == "guest_refused"]


async def test_an_honest_site_is_used_and_its_tokens_carry_engine_and_version():
    home = Home()
    await home.learn()
    lease = home.enter()
    for _ in range(2 * NUM_ROLLOUTS):
        call, job = await home.job("lima", lease)
        home.pool.answer("lima", Answers(lease, (home.honest(job),)))
        made = await call
        assert made is not None and (made.versions == 4).all()
    assert made.engine == 1 and home.pool.sites["lima"].num_accepted == 2 * NUM_ROLLOUTS
    assert not home.refusals()


def other_model(home, job):
    tokens = drawn(9, home.draw)
    return home.honest(job, token_ids=tokens.tobytes(), logprobs=policy(9)[tokens].tobytes(),
                       finish_reason=finish(tokens))  # fmt: skip


def edited(home, job):
    honest = home.honest(job)
    logprobs = np.frombuffer(honest.logprobs, np.float32) - np.float32(0.1)
    return msgspec.structs.replace(honest, logprobs=logprobs.tobytes())


def one_edited(home, job):
    honest = home.honest(job)
    logprobs = np.frombuffer(honest.logprobs, np.float32).copy()
    logprobs[0] -= 0.5
    return msgspec.structs.replace(honest, logprobs=logprobs.tobytes())


def old_version(home, job):
    return msgspec.structs.replace(home.honest(job, version=3), version=4)


def not_a_number(home, job):
    honest = home.honest(job)
    logprobs = np.frombuffer(honest.logprobs, np.float32) * np.float32(np.nan)
    return msgspec.structs.replace(honest, logprobs=logprobs.tobytes())


def too_unlikely(home, job):
    honest = home.honest(job)
    logprobs = np.frombuffer(honest.logprobs, np.float32).copy()
    logprobs[-1] = -np.inf
    return msgspec.structs.replace(honest, logprobs=logprobs.tobytes())


LIES = [
    (other_model, "difference of a rollout's log-probs"),
    (edited, "the mean difference"),
    (one_edited, "difference of a rollout's log-probs"),
    (old_version, "difference of a rollout's log-probs"),
    (not_a_number, "a log-prob that is not between -50 and 0"),
    (too_unlikely, "with a log-prob that is not between"),
    (lambda home, job: home.honest(job, version=3), "version 3 instead of 4"),
    (lambda home, job: home.honest(job, token_ids=bytes(4 * 7)), "7 tokens instead of 1 to 6"),
    (lambda home, job: home.honest(job, token_ids=b"abc"), "an array of 3 bytes"),
    (lambda home, job: home.honest(job, logprobs=b""), "0 log-probs of"),
    (lambda home, job: home.honest(job, token_ids=np.array([99, 0], np.int32).tobytes(),
                                   logprobs=bytes(8), finish_reason="stop"),
     "a token outside the vocabulary"),
    (lambda home, job: home.honest(job, token_ids=np.array([5], np.int32).tobytes(),
                                   logprobs=bytes(4), finish_reason="length"),
     "finish_reason 'length' at token 1"),
]  # fmt: skip


@pytest.mark.parametrize(("lie", "sentence"), LIES, ids=[sentence for _, sentence in LIES])
async def test_a_liar_is_refused_for_good_and_its_samples_are_drawn_at_home(lie, sentence):
    home, dropped = Home(), []
    home.pool.on_refused = lambda index: dropped.append(index) or 2
    await home.learn()
    lease = home.enter()
    call, job = await home.job("lima", lease)
    with suppress(GuestRefused):
        home.pool.answer("lima", Answers(lease, (lie(home, job),)))
    assert await call is None  # the caller draws it here
    [why] = home.refusals()
    assert sentence in why and dropped == [1]
    with pytest.raises(GuestRefused, match="site lima is refused"):
        home.enter()
    with pytest.raises(GuestRefused, match="site lima is refused"):
        await home.pool.ask("lima", Ask(lease, 4, "digest 4", 1), 0)
    home.enter("oslo")  # others are not concerned


async def test_tokens_of_another_model_with_true_log_probs_are_found():
    home = Home()
    await home.learn()
    lease = home.enter()
    for _ in range(NUM_ROLLOUTS):
        call, job = await home.job("lima", lease)
        tokens = drawn(9, home.draw)  # from another model
        logprobs = policy(4)[tokens].tobytes()  # of the policy
        answer = GuestAnswer(job.id, 4, tokens.tobytes(), logprobs, finish(tokens))
        home.pool.answer("lima", Answers(lease, (answer,)))
        if await call is None:
            break
    assert home.pool.sites["lima"].num_accepted < NUM_ROLLOUTS - 1
    assert "its tokens were not drawn from the policy" in home.refusals()[0]


async def test_answers_of_a_removed_version_do_not_count():
    home = Home(verified_share=0.1)
    await home.learn()
    home.pool._num_home = home.pool._manifest.inference.max_num_sequences  # busy

    async def removed(version, *_):
        return Recomputed()

    home.pool._check = removed
    lease = home.enter()
    await home.pool.ask("lima", Ask(lease, 4, "digest 4", 8), 0)
    calls = [home.generate() for _ in range(8)]
    told = await home.pool.ask("lima", Ask(lease, 4, "digest 4", 8), 1.0)
    assert len(told.jobs) == 8
    answers = tuple(other_model(home, job) for job in told.jobs)
    home.pool.answer("lima", Answers(lease, answers))
    for ended in await asyncio.gather(*calls, return_exceptions=True):
        assert isinstance(ended, GenerationFailed) and "version 4 were removed" in str(ended)
    assert home.pool.sites["lima"].num_accepted == 0 and not home.refusals()


def scored(draw: np.random.Generator, pick) -> RolloutScore:
    """Return the score of 300 tokens, one of each of 300 policies, with true log-probs."""
    logits = draw.normal(0, 3, (300, 100))
    logp = logits - np.log(np.exp(logits).sum(1, keepdims=True))
    entropy = -(np.exp(logp) * logp).sum(1)
    variance = (np.exp(logp) * (logp + entropy[:, None]) ** 2).sum(1)
    found = logp[np.arange(300), pick(logp, entropy)].astype(np.float32)
    every = (each.astype(np.float32).tobytes() for each in (found, entropy, variance))
    return RolloutScore.of(found, Recomputed(*every))


def test_likely_tokens_that_a_few_unlikely_ones_balance_are_found():
    draw = np.random.default_rng(0)

    def honest(logp, entropy):
        return np.array([draw.choice(100, p=np.exp(row) / np.exp(row).sum()) for row in logp])

    def balanced(logp, entropy):
        tokens, excess = logp.argmax(1), logp.max(1) + entropy
        at = 300
        while excess.sum() > 0:
            at -= 1
            tokens[at] = logp[at].argmin()
            excess[at] = logp[at].min() + entropy[at]
        return tokens

    spread = HonestSpread(manifest(guests=SPEC).orchestrator.guests)
    for _ in range(NUM_HONEST):
        spread.add(scored(draw, honest))
    site, liar = SiteEvidence(), SiteEvidence()
    assert not any(site.fault(scored(draw, honest), spread) for _ in range(NUM_ROLLOUTS))
    faults = [liar.fault(scored(draw, balanced), spread) for _ in range(NUM_ROLLOUTS)]
    assert any("squared deviations sum to" in fault for fault in faults)


async def test_a_failure_at_a_site_ends_its_sample_as_one_at_home_does():
    home = Home()
    await home.learn()
    lease = home.enter()
    call, job = await home.job("lima", lease)
    home.pool.answer("lima", Answers(lease, (GuestAnswer(job.id, failure="timed out"),)))
    with pytest.raises(GenerationFailed, match="site lima: timed out"):
        await call


@pytest.mark.parametrize("is_resumed", [False, True])
def test_no_rollout_of_a_refused_site_is_trained_later(tmp_path, is_resumed):
    spec, guest = manifest(), manifest().inference.num_replicas + 2
    scheduler = Scheduler(spec)
    scheduler.wanted = 5
    scheduler.updated(0)
    requests = scheduler.start(0.0)
    requests = [each for each in requests if each.group == requests[0].group]

    def end(some):
        for each in some:
            made = rollout(each, [0, 0], reward=each.member)
            scheduler.ended(each, replace(made, engine=guest), 0.0)

    if is_resumed:
        end(requests)
        assert scheduler.buffer.num_queued == len(requests)
        write_snapshot(tmp_path, 1, 1, scheduler.snapshot(), 1.0)
        folder = checkpoints.checkpoint_dir(tmp_path, 1, 1)
        scheduler = Scheduler(spec, read_snapshot(folder, 1))
        assert scheduler.buffer.dropped == {"site_of_past_attempt": len(requests)}
    else:
        end(requests[:2])
        assert scheduler.drop_engine(guest) == 2
        end(requests[2:])  # they were being judged
        assert scheduler.buffer.dropped["site_refused"] == len(requests)
    assert not scheduler.buffer.num_queued and not scheduler.buffer.spare


async def test_a_site_that_holds_weights_of_an_earlier_attempt_is_no_liar():
    home = Home()
    lease = home.enter()
    told = await home.pool.ask("lima", Ask(lease, 12, "digest 12", 8), 0)
    assert told.version == 4 and not told.jobs and not home.refusals()


async def test_replays_and_other_sites_jobs_have_no_effect():
    home = Home()
    await home.learn()
    lima, oslo = home.enter("lima"), home.enter("oslo")
    call, job = await home.job("lima", lima)
    stolen = home.honest(job)
    await home.pool.ask("oslo", Ask(oslo, 4, "digest 4", 0), 0)
    home.pool.answer("oslo", Answers(oslo, (stolen,)))
    assert not call.done()
    first, second = home.honest(job), home.honest(job)
    home.pool.answer("lima", Answers(lima, (first, second)))
    home.pool.answer("lima", Answers(lima, (second,)))
    made = await call
    assert made.token_ids.tobytes() == first.token_ids
    home.pool.answer("lima", Answers(lima, (first,)))
    assert home.pool.sites["lima"].num_accepted == 1 and not home.refusals()
    with pytest.raises(GuestRefused, match=f"sent {MAX_ANSWERS + 1} answers at once"):
        home.pool.answer("lima", Answers(lima, (first,) * (MAX_ANSWERS + 1)))


async def test_a_lost_site_gives_its_samples_back_and_may_return():
    home = Home()
    await home.learn()
    lease = home.enter()
    call, job = await home.job("lima", lease)
    home.pool.expire(time.monotonic() + 4)
    assert not call.done()
    home.pool.expire(time.monotonic() + 6)
    assert await call is None
    with pytest.raises(LeaseOver):
        home.pool.answer("lima", Answers(lease, (home.honest(job),)))
    again = home.enter()
    call, job = await home.job("lima", again)
    home.pool.answer("lima", Answers(again, (home.honest(job),)))
    assert await call is not None


async def test_as_many_sites_fetch_a_version_as_serve_it():
    home = Home()

    async def told(name, lease, version):
        ask = Ask(lease, version, f"digest {version}", 0)
        return await home.pool.ask(name, ask, 0)

    leases = {name: home.enter(name, listen=f"{name}:1") for name in ("a", "b", "c")}
    assert (await told("a", leases["a"], -1)).version == 4
    assert (await told("b", leases["b"], -1)).version == -1
    home.pool.sites["a"].told_s -= FETCH_S
    leases["a"] = home.enter("a", listen="a:1")  # which takes no second turn
    assert (await told("a", leases["a"], -1)).version == 4
    assert (await told("b", leases["b"], -1)).version == 4
    home.pool.sites["b"].told = -1
    await told("a", leases["a"], 4)
    assert (await told("b", leases["b"], -1)).peers == ("a:1",)
    assert (await told("c", leases["c"], -1)).version == 4


async def test_a_site_with_old_weights_gets_no_jobs_and_one_with_false_weights_is_refused():
    home = Home()
    await home.learn()
    home.pool.want(6, "digest 6")
    lease = home.enter()
    old = Ask(lease, 4, "digest 4", 8)  # two versions behind
    await home.pool.ask("lima", old, 0)
    call, told = await asyncio.gather(home.generate(), home.pool.ask("lima", old, 0.1))
    assert call is None and not told.jobs
    with pytest.raises(GuestRefused, match="its weights differ from version 6"):
        await home.pool.ask("lima", Ask(lease, 6, "digest 4", 8), 0)


ENTRIES = [
    ({"terms": Terms("other", "commit", "", 0)}, "manifest: this site has other, the run run"),
    ({"terms": Terms("run", "other", "", 0)}, "code: this site has version other"),
    ({"release": {"vllm": "2"}}, "engine: this site has vllm 2, the run python 3.11, vllm 1"),
    ({"num_slots": 10**9}, "num_slots: 1000000000; send 1 to"),
    ({"listen": "http://a b"}, "--listen: is no address and port"),
    ({"listen": "10.0.0.1:70000"}, "--listen: is no address and port; type for example"),
]


@pytest.mark.parametrize(("entry", "sentence"), ENTRIES, ids=[s for _, s in ENTRIES])
async def test_a_wrong_site_is_refused_at_the_door_in_one_sentence(entry, sentence):
    home = Home()
    with pytest.raises(GuestRefused, match=sentence):
        home.enter(**entry)
    for name in ("a", "b", "c"):
        home.enter(name)
    with pytest.raises(GuestRefused, match=r"max_sites 3: that many sites already take part"):
        home.enter("d")


def test_a_refused_engine_leaves_no_rollout_in_the_buffer():
    buffer = RolloutBuffer(manifest().orchestrator)
    for number, engine in enumerate((0, 7)):
        request = GroupRequest("train", number, 0, number, 2)
        members = [rollout(Request(request, i, 0), [0, 0], reward=i) for i in range(2)]
        members[1] = replace(members[1], engine=engine)
        buffer.add(Group(request, members, num_ended=2))
    assert buffer.drop_engines(lambda each: each == 7, "why") == 2 and buffer.num_queued == 2
    assert buffer.dropped == {"why": 2}


async def post(port: int, tls: ssl.SSLContext, path: str, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, ssl=tls)
    head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\n"
    head += f"Content-Length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    answer = await reader.read()
    writer.close()
    return answer


async def test_the_door_names_a_site_by_its_certificate_and_answers_no_stranger(tmp_path):
    make_authority(tmp_path / "run", "run")
    ours, lima = make_site(tmp_path / "run", "home"), make_site(tmp_path / "run", "lima")
    make_authority(tmp_path / "others", "run")
    stranger = make_site(tmp_path / "others", "lima")
    port = adjoining_ports(1, "127.0.0.1")

    home, body = Home(), msgspec.msgpack.encode(Entry(TERMS, RELEASE, 8))
    async with AsyncExitStack() as stack:
        await stack.enter_async_context(GuestDoor(home.pool, lambda: None, "127.0.0.1", port, ours))
        with pytest.raises((ssl.SSLError, ConnectionError)):
            await post(port, stranger.client(), "/enter", body)
        assert not home.pool.sites
        answer = await post(port, lima.client(), "/enter", body)
        assert msgspec.msgpack.decode(answer.partition(b"\r\n\r\n")[2], type=Entered).lease == 1
        assert list(home.pool.sites) == ["lima"]
        for path, sent, status in (
            ("/enter", b"\xc1", b"400"),
            ("/enter", b"\x81\xa1x" + 100_000 * b"\x91", b"400"),  # nested too deeply
            ("/answer", bytes(home.pool.max_body_bytes + 1), b"413"),
            ("/other", b"", b"400"),
            ("/answer", msgspec.msgpack.encode(Answers(9, ())), b"410"),
        ):
            answer = await post(port, lima.client(), path, sent)
            assert answer.split()[1] == status
        home.pool.refused["lima"] = "it lied"
        answer = await post(port, lima.client(), "/ask", b"\xc1")
        assert answer.split()[1] == b"403" and answer.endswith(b"is refused: it lied")


class SteadyEngine:
    """The engine of a lending site. It samples from `policy` of its version."""

    name = "engine"

    def __init__(self) -> None:
        self.published, self.draw = None, np.random.default_rng(1)

    async def pause(self) -> None:
        assert self.published is None, "the version is loaded twice"

    async def update_weights(self, published) -> None:
        [file] = published.folder.glob("*.safetensors")
        assert file.read_bytes() == WEIGHTS
        self.published = published

    async def resume(self) -> None:
        pass

    async def attested(self) -> Attested:
        return Attested(self.published.digest, {})

    async def abort(self, request_ids) -> None:
        pass

    async def generate_each(self, token_ids, num_samples, deliver, *, request_id, **options):
        assert (token_ids == PROMPT).all() and options["cache_salt"] == "digest 4"
        for index in range(num_samples):
            await asyncio.sleep(0.03 * self.draw.random())
            tokens = drawn(4, self.draw)
            logprobs, versions = policy(4)[tokens], np.full(len(tokens), 4)
            made = Generation(request_id, tokens, logprobs, versions, finish(tokens), 0)
            deliver(replace(made, sample=index))


def lending_context(folder, port, checked) -> RoleContext:
    """Return the context of a site that lends an engine. Its certificates are in `folder`/run."""
    make_authority(folder / "run", "run")
    make_site(folder / "run", "lima")
    place = {"listen": "", "join": f"127.0.0.1:{port}", "name": "lima"}
    place["certificates"] = str(folder / "run")
    (folder / "lent-run").mkdir()
    (folder / "lent-run/site.json").write_text(json.dumps(place))
    (folder / "lent-run/manifest.json").write_bytes(canonical_json(checked))
    return RoleContext("orchestrator", folder / "lent-run", "rl", 0, 1, 0)


async def test_a_job_of_the_open_request_is_sampled_before_the_engine_is_updated(tmp_path):
    """The run counts such a job to the version with which the site asked."""
    ctx = lending_context(tmp_path, 1, manifest(guests=SPEC))
    is_open, told, answered, loaded = threading.Event(), [], [], []

    class Engine(SteadyEngine):
        async def update_weights(self, published):
            self.published = published
            loaded.append(published.version)

    class Site(Lender):
        async def _call(self, call, message, kind):
            if call == "enter":
                self._version, self._digest = 4, "digest 4"
                return Entered(1, "")
            if call == "answer":
                answered.extend(each.version for each in message.answers)
                return Noted()
            told.append(message.version)
            await asyncio.sleep(0.01)
            if len(told) != 2:
                return Told(5, is_over=message.version == 5 and bool(answered))
            is_open.set()
            while not self._is_draining:
                await asyncio.sleep(0.01)
            await asyncio.sleep(0.05)
            return Told(5, jobs=(SampleJob("job", PROMPT.tobytes(), MAX_TOKENS, 1.0, (), False),))

        async def _request(self, method, path, data=None):
            return msgspec.json.encode(StateSnapshot(5, "digest 5", 1024, {}))

        def _fetch(self, header, peers):
            assert is_open.wait(5)
            return tmp_path, {}

    await Site(ctx, Engine()).run()
    assert (answered, loaded) == ([4], [5])


@pytest.mark.parametrize("body", [b"\xc1", b"<html>", b"\x91" * 5000])
async def test_a_reply_that_is_not_a_doors_ends_the_site_in_one_sentence(tmp_path, body):
    class Site(Lender):
        async def _request(self, method, path, data=None):
            return body

    site = Site(lending_context(tmp_path, 1, manifest(guests=SPEC)), SteadyEngine())
    said = "127.0.0.1:1: the reply to 'ask' is not from a run"
    with pytest.raises(RunFailed, match=said):
        await site._call("ask", Ask(1, 0, "", 1), Told)
    with pytest.raises(RunFailed, match="the reply to 'weights' is not"):
        await site._renew(())


async def test_a_site_fetches_a_version_and_lends_its_engine_over_tls(tmp_path):
    port, checked = adjoining_ports(2, "127.0.0.1"), manifest(guests=SPEC)
    ctx = lending_context(tmp_path, port, checked)
    ours = make_site(tmp_path / "run", "home")
    weights, snapshots = tmp_path / "00000.safetensors", tmp_path / "snapshots"
    weights.write_bytes(WEIGHTS)
    link_files(snapshots, 4, "digest 4", [weights], block_bytes=1000)
    [newest] = publish_copies(snapshots, 2)
    blocks = SnapshotServer(snapshots, "127.0.0.1", port + 1, ours)
    threading.Thread(target=blocks.serve_forever, args=(0.02,), daemon=True).start()
    try:
        home = Home()
        pool = home.pool = GuestPool(
            checked, own_terms(checked), engine_release(), recomputed, home.note
        )
        pool.want(4, "digest 4")
        await home.learn()
        door = GuestDoor(pool, (newest / HEADER).read_bytes, "127.0.0.1", port, ours)
        async with door:
            engine = SteadyEngine()
            lending = asyncio.create_task(Lender(ctx, engine).run())
            made = None
            while made is None:
                assert not lending.done() or lending.result()
                await asyncio.sleep(0.01)
                made = await home.generate()
            assert (made.versions == 4).all() and made.engine == 1
            pool._num_home = checked.inference.max_num_sequences  # the own engine is busy
            for _ in range(4):  # no answer gets lost while others are sent
                while pool.sites["lima"].room < 8:
                    await asyncio.sleep(0.01)
                every = await asyncio.gather(*(home.generate() for _ in range(8)))
                assert None not in every
            engine.published, pool._attempt = None, "the next"
            pool._fence(pool.sites["lima"], "the run began again")
            while engine.published is None:  # an attempt's version may have other weights
                assert not lending.done() or lending.result()
                await asyncio.sleep(0.01)
            await pool.close()
            await lending
        assert not home.refusals()
    finally:
        blocks.shutdown()
        blocks.server_close()
        remove_memory(memory_prefix(tmp_path / "lent-run"))
