"""Several sites that train: real learners, logs, links, snapshots and checkpoints."""

import threading
import time
from types import SimpleNamespace

import numpy as np
import pytest
from site_threads import SiteFolders, ThreadSite, begun, flat, spec_of, together
from test_trainer_stages import Stage, final_weights

from orrery.elastic.links import CONNECT_S, LinkPhase
from orrery.elastic.loop import OuterOptimizer, weighted_mean
from orrery.elastic.snapshots import FetchFailed, copy_state
from orrery.elastic.types import ElasticError, LinkBroken, read_place
from orrery.runtime.metrics import rows
from orrery.runtime.run_directory import memory_prefix, metrics_path, remove_memory
from orrery.trainer.elastic import check_listens, fetched

pytestmark = [
    pytest.mark.timeout(180),
    # A thread's connection to etcd ends with the thread.
    pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning"),
]
NESTEROV = OuterOptimizer(0.7, 0.9, True)
LORA = {"seed": 1, "rank": 2, "alpha": 4.0, "targets": ["attention"]}


@pytest.fixture
def sites(tmp_path):
    """Make sites of one rank. They leave after the test."""
    made: list[ThreadSite] = []
    folders: list[SiteFolders] = []

    def make(names="ab", stage="sft", fields=None, **elastic):
        folders.append(SiteFolders(tmp_path, spec_of(tmp_path, trainer=fields, **elastic), names))
        made.extend(ThreadSite(folders[0], name, stage) for name in names)
        return folders[0], made

    yield make
    together(*(site.leave for site in made))
    for site in made:
        remove_memory(memory_prefix(site.run_dir))


def digests(site: ThreadSite) -> list[str]:
    return [row["digest"] for row in site.rows]


def test_a_late_sites_delta_counts_in_the_next_round(sites):
    folders, (a, b) = sites(grace_s=2.0)
    together(a.enter, b.enter)
    together(a.train, b.train)
    first = a.weights()
    tokens_b = b.learn()
    delta_b = first - b.weights()
    a.train()  # the grace window passes
    second, momentum = a.weights(), flat(a.learner.outer_momentum)
    tokens_a = a.learn()
    delta_a = second - a.weights()
    late = begun(lambda: b.training.after_step(tokens_b))
    folders.until(lambda ledger: any(ledger.tokens.values()))
    together(lambda: a.training.after_step(tokens_a), lambda: late.result())
    assert a.rows[2]["members"] == a.rows[2]["members"][:1]
    assert sorted(a.rows[3]["weights"]) == sorted([tokens_a, tokens_b])
    assert digests(b)[-1] == digests(a)[-1]
    mean = weighted_mean([delta_a, delta_b], [tokens_a, tokens_b])
    expected, _ = NESTEROV.step(second, momentum, mean)
    np.testing.assert_allclose(a.weights(), expected, atol=2e-6)  # b's weights were written again


def test_a_site_late_for_the_last_round_takes_the_final_state(sites):
    folders, (late, other) = sites(num_phases=2, grace_s=3.0)
    together(late.enter, other.enter)
    together(late.train, other.train)
    tokens = late.learn()
    other.train()  # the grace window passes
    leaving = begun(other.leave)
    late.training.after_step(tokens)
    leaving.result(timeout=60)
    late.save()
    late.leave()
    late = ThreadSite(folders, "a", resumes=True)
    late.enter()
    assert np.array_equal(late.weights(), other.weights()) and len(late.rows) == 2
    assert (late.learner.step, late.training._loop.round) == (4, 3)
    late.leave()


def test_a_site_that_lost_its_lease_takes_the_newest_state_in_a_closed_run(sites):
    folders, (a, b, late) = sites("abc", admission="closed")
    together(a.enter, b.enter)
    together(a.train, b.train)
    with pytest.raises(ElasticError, match="admission 'closed': the run has begun, and admits no"):
        late.enter()
    before = b.rows[-1]["own"]
    folders.take_lease(next(m.id for m in folders.log.read().ledger.members if m.id[:8] == before))
    a.train()
    b.learn()
    again = begun(lambda: b.training.after_step(99))
    folders.until(lambda ledger: bool(ledger.tokens))
    together(a.train, again.result)
    assert digests(b)[-1] == digests(a)[-1] and b.rows[-1]["own"] != before
    assert sorted(a.rows[-1]["weights"])[0] == 0
    together(a.train, b.train)
    assert digests(b)[-1] == digests(a)[-1] and min(a.rows[-1]["weights"]) > 0


def test_a_host_without_memory_and_a_state_with_other_bits_are_refused(sites, monkeypatch):
    _, (a, b, late, small) = sites("abcd")
    together(a.enter, b.enter)

    def copy_other(folder, number, digest, parts, *facts):
        theta = np.frombuffer(parts["theta"], np.float32) + 1
        return copy_state(folder, number, digest, {**parts, "theta": theta.data}, *facts)

    with monkeypatch.context() as patch:
        patch.setattr("orrery.trainer.elastic.copy_state", copy_other)
        together(a.train, b.train)
        with pytest.raises(ElasticError, match=r"state of round 1 from .* differs from the run"):
            late.enter()
        patch.setattr("orrery.trainer.elastic.available_bytes", lambda: 1000)
        with pytest.raises(
            ElasticError, match=r"^memory: this site has 0.0 GB of host memory free"
        ):
            small.enter()


def test_a_member_that_never_connects_holds_up_the_others_while_it_has_a_lease(sites):
    folders, (a, b, c) = sites("abc")
    together(a.enter, b.enter)
    joining = begun(c.enter)
    folders.until(lambda ledger: bool(ledger.tokens))
    together(a.train, b.train, joining.result)
    gate, own = threading.Event(), c.rows[-1]["own"]

    def never(*_):
        gate.wait(60)
        raise LinkBroken(0, "never connected")

    c.training._links.begin = never
    rest = [begun(a.train), begun(b.train)]
    late = begun(c.train)
    while a.training._links._phase != LinkPhase.BEGINNING:
        time.sleep(0.02)
    begin_s = time.monotonic()
    folders.take_lease(next(m.id for m in folders.log.read().ledger.members if m.id[:8] == own))
    for each in rest:
        each.result(timeout=60)
    assert time.monotonic() - begin_s < CONNECT_S / 2
    assert digests(a)[-1] == digests(b)[-1] and len(a.rows[-1]["members"]) == 2
    del c.training._links.begin
    gate.set()
    folders.until(lambda ledger: bool(ledger.tokens))  # it takes the state and arrives
    together(a.train, b.train, late.result)
    assert digests(a)[-1] == digests(b)[-1] == digests(c)[-1]


def test_a_killed_server_of_the_log_starts_again_and_the_sites_go_on(sites):
    _, (a, b) = sites()
    together(a.enter, b.enter)
    servers = [site.training._site.server for site in (a, b)]
    (server,) = (each for each in servers if each.is_running)  # the only one of two sites
    server._process.kill()
    server._process.wait()
    begin_s = time.monotonic()
    while not server.is_running:
        assert time.monotonic() - begin_s < 10.0
        time.sleep(0.05)
    together(a.train, b.train)
    assert digests(a)[-1] == digests(b)[-1] and len(a.rows[-1]["members"]) == 2


def test_a_site_over_several_hosts_does_not_listen():
    check_listens("", 4)
    check_listens("10.0.0.1:29400", 0)
    with pytest.raises(ElasticError, match=r"^--listen 10.0.0.1:29400: .* 4 ranks of this site"):
        check_listens("10.0.0.1:29400", 4)


def test_sites_that_accept_no_connections_join_and_train(sites):
    folders, (a, b, c) = sites("abc")
    for name in "bc":
        folders.place(name, listen="")
    together(a.enter, b.enter)
    joining = begun(c.enter)  # it takes the state from a, and meets b over a
    folders.until(lambda ledger: bool(ledger.tokens))  # a later one takes part in the next round
    together(a.train, b.train, joining.result)
    together(a.train, b.train, c.train)
    assert digests(a)[-1] == digests(b)[-1] == digests(c)[-1]
    assert min(c.rows[-1]["weights"]) > 0 and len(c.rows[-1]["weights"]) == 3


def test_an_rl_site_resumes_within_a_phase_and_keeps_its_weights_and_delta(sites):
    """Engines may have sampled from the weights of a preemption's checkpoint."""
    folders, (a, b, late) = sites("abc", stage="rl")
    together(a.enter, b.enter)
    together(a.train, b.train)
    late.enter()  # without a round
    assert np.array_equal(late.weights(), a.weights())
    tokens = b.learn(1)
    b.training.after_step(tokens)
    b.save()
    saved, start = b.weights(), b.state.start.copy()
    b.leave()
    b = ThreadSite(folders, "b", "rl", resumes=True)
    b.enter()
    assert np.array_equal(b.weights(), saved) and np.array_equal(b.state.start, start)
    assert not np.array_equal(saved, start)
    tokens += (last := b.learn(1))
    ending = [begun(late.train), begun(lambda: b.training.after_step(last))]
    folders.until(lambda ledger: len(ledger.tokens) == 2)  # a round waits for no joining site
    together(a.train, *(each.result for each in ending))
    assert digests(a)[-1] == digests(b)[-1] == digests(late)[-1] and len(a.rows) == 3
    assert {0, tokens} < set(b.rows[-1]["weights"]) and np.array_equal(a.weights(), b.weights())
    b.leave()


def test_a_site_that_resumes_beside_others_knows_their_shards(sites):
    folders, (a, b) = sites()
    together(a.enter, b.enter)
    together(a.train, b.train)
    b.save()
    b.leave()
    b = ThreadSite(folders, "b", resumes=True)
    entering = begun(b.enter)
    folders.until(lambda ledger: bool(ledger.tokens))
    together(a.train, entering.result)
    assert a.training._shards == b.training._shards and a.training.shard != b.training.shard
    b.leave()


def test_a_straggler_keeps_the_delta_of_every_fragment_that_it_missed(sites):
    _, (a, b) = sites(inner_steps=2, fragments=2, grace_s=0.5)
    together(a.enter, b.enter)
    together(a.train, b.train)
    b.learn()
    delta = b.state.start - b.weights()
    a.train()
    a.train()  # without b
    b.training._take_state(keeps_delta=True)
    np.testing.assert_allclose(b.state.start - b.weights(), delta, atol=1e-6)
    assert np.array_equal(a.state.start, b.state.start)
    assert not b.training._folder.with_name(f"{b.training._folder.name}-taken").exists()


def test_a_recovery_lasts_as_long_as_blocks_arrive(sites, monkeypatch):
    _, (a, b, late) = sites("abc", stage="rl")
    together(a.enter, b.enter)
    together(a.train, b.train)
    now_s, arrived = [0.0], [1, 1, 0, 1]

    def cut(*args):
        now_s[0] += 0.8 * late.spec.trainer.elastic.store_timeout_s
        if arrived:
            raise FetchFailed("cut", arrived.pop())
        return fetched(*args)

    monkeypatch.setattr("orrery.trainer.elastic.fetched", cut)
    clock = SimpleNamespace(monotonic=lambda: now_s[0])
    monkeypatch.setattr("orrery.trainer.elastic.time", clock)
    late.enter()
    assert np.array_equal(late.weights(), a.weights())


@pytest.mark.slow
@pytest.mark.parametrize(("stage", "fragments"), [("rl", 1), ("sft", 1), ("sft", 2)])
def test_all_sites_start_again_from_checkpoints(sites, stage, fragments):
    fields = {"fragments": fragments, "inner_steps": 2 * fragments, "grace_s": 10.0}
    folders, (a, b) = sites(stage=stage, **fields)
    together(a.enter, b.enter)
    together(a.train, b.train)
    together(a.save, b.save)
    saved = [each.copy() for each in (a.state.start, a.state.momentum)]
    weights, tokens = a.weights(), list(a.training._loop.fragment_tokens)
    together(a.train, b.train)  # lost, because no checkpoint follows
    b.leave()  # while a keeps the log, or its lease would outlive it
    a.leave()
    a, b = (ThreadSite(folders, name, stage, resumes=True) for name in "ab")
    with pytest.raises(
        ElasticError, match=r"stands at round 2 .* holds the state of round 1; .*--rew"
    ):
        a.enter()
    a.leave()
    folders.place("a", rewinds=True)
    a = ThreadSite(folders, "a", stage, resumes=True)
    a.enter()
    assert not read_place(a.run_dir).rewinds  # the next start does not rewind again
    assert saved[1].any() and np.array_equal(a.weights(), weights)
    assert a.training._loop.fragment_tokens == tokens and a.learner.step == 2
    found = a.state.start, a.state.momentum
    assert all(np.array_equal(one, other) for one, other in zip(found, saved, strict=True))
    entering = begun(b.enter)
    folders.until(lambda ledger: bool(ledger.joining))
    if stage == "sft":
        folders.until(lambda ledger: bool(ledger.tokens))
        together(a.train, entering.result)
    entering.result(timeout=60)
    training = begun(b.train)  # a round does not wait for a joining site
    if stage == "rl":
        folders.until(lambda ledger: bool(ledger.tokens))
    together(a.train, training.result)
    assert digests(a)[-1] == digests(b)[-1]
    assert a.rows[-1]["round"] == (4 if stage == "sft" else 2)
    assert (a.training.start, a.learner.step) == ((24, 6) if stage == "sft" else (0, 4))
    together(b.leave, a.leave)


def test_adapters_alone_are_exchanged(sites):
    _, (a, b) = sites(fields={"lora": LORA})
    frozen = {n: w.clone() for n, w in a.learner.policy.named_parameters() if not w.requires_grad}
    together(a.enter, b.enter)
    together(a.train, b.train)
    assert digests(a) == digests(b) and len(set(digests(a))) == 2
    assert np.array_equal(a.weights(), b.weights())
    assert 4 * len(a.weights()) < a.rows[1]["num_bytes"] < 4 * len(a.weights()) + 4096
    after = dict(a.learner.policy.named_parameters())
    assert all(np.array_equal(after[name], value) for name, value in frozen.items())


def test_a_site_lost_while_a_fragment_is_in_flight_and_a_joiner_leave_equal_state(sites):
    streaming = {"inner_steps": 6, "fragments": 2, "delay_steps": 2, "delay_merge": 0.5}
    folders, (a, b, c, late) = sites("abcd", min_sites=3, **streaming)
    together(a.enter, b.enter, c.enter)

    def die(delta, outer_round, rank):
        c.training._links.begin(outer_round.epoch, rank, outer_round.number)
        folders.take_lease(c.training._member.id)
        c.training._links.close()
        raise ElasticError("killed")

    c.training._loop._exchange = die
    together(*(lambda site=site: site.train(3) for site in (a, b, c)))  # and send
    together(*(lambda site=site: site.train(2) for site in (a, b)))  # and apply
    assert len(a.rows[1]["members"]) == 2 and digests(a) == digests(b)
    assert sorted(a.training._shards.trained) == [0, 12, 12, 20]  # c trained 2 more steps
    joining = begun(late.enter)
    folders.until(lambda ledger: bool(ledger.joining))
    folders.until(lambda ledger: len(ledger.tokens) > 0)
    together(*(lambda site=site: site.train(1) for site in (a, b)))
    together(*(lambda site=site: site.train(2) for site in (a, b)))
    joining.result()
    assert 0 in a.rows[2]["weights"] and digests(late)[-1] == digests(a)[-1] == digests(b)[-1]
    assert np.array_equal(late.state.start, a.state.start)
    assert not np.array_equal(a.weights(), b.weights())  # each goes on from its own


@pytest.mark.slow
def test_sites_of_two_ranks_hold_equal_bits(tmp_path):
    fields = {"error_feedback": True, "codec": "int8_block", "topology": "all_to_all"}
    fields |= {"inner_steps": 4, "fragments": 2, "delay_steps": 1, "delay_merge": 0.5}
    spec = spec_of(tmp_path, {"dp_shard": 2}, num_phases=2, **fields)
    folders = SiteFolders(tmp_path, spec, num_ranks=2)
    running = [Stage(folders.run_dir(name), "sft", 2) for name in "ab"]
    for stage in running:
        for code, error in stage.end():
            assert code == 0, error
    found = [
        [
            row
            for row in rows(metrics_path(folders.run_dir(name), "trainer.0"))
            if row.get("event") == "round"
        ]
        for name in "ab"
    ]
    assert [row["digest"] for row in found[0]] == [row["digest"] for row in found[1]]
    assert len({row["digest"] for row in found[0]}) == len(found[0]) == 6
    assert all(row["num_bytes"] > 0 for row in found[0][1:])
    one, other = (final_weights(folders.run_dir(name), "sft") for name in "ab")
    assert one == other


def test_one_of_two_sites_that_choose_a_shard_is_refused(sites):
    folders, both = sites()
    for site in both:
        folders.place(site.name, shard=1)
    made = [begun(site.enter) for site in both]
    refused = [each.exception(timeout=60.0) for each in made]
    (error,) = filter(None, refused)
    assert isinstance(error, ElasticError) and "--shard 1: another site trains it" in str(error)
    (kept,) = (site for site, failure in zip(both, refused, strict=True) if failure is None)
    assert kept.training.shard == 1 and sorted(kept.rows[0]["names"]) == ["a", "b"]
