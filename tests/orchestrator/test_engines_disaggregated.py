"""Disaggregated prefill with stand-in engines: routing, given-back blocks and lost engines."""

import asyncio

import numpy as np
import pytest

from orrery.orchestrator.engines.disaggregated import DisaggregatedEngines
from orrery.orchestrator.engines.messages import EngineGone, Generation, GenerationFailed
from orrery.orchestrator.engines.requests import EngineChoice

WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


class StandIn:
    """Answers once `go` is set, or fails with `error`; an abort ends what has not answered."""

    def __init__(self, name, kv_transfer=None):
        self.name, self.kv_transfer, self.asked, self.aborts = name, kv_transfer, [], []
        self.kept_no_longer, self.not_read, self.error = [], [], None
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, token_ids, **options):
        self.asked.append(options)
        await self.go.wait()
        if self.error is not None:
            raise self.error
        n = options["max_tokens"]
        reason = "abort" if options["request_id"] in self.aborts else "length"
        return Generation(
            options["request_id"],
            np.arange(n, dtype=np.int32),
            np.zeros(n, np.float32),
            np.zeros(n, np.int32),
            reason,
            64,
            (),
            self.kv_transfer
            and self.kv_transfer | {"remote_request_id": f"{self.name}-{options['request_id']}"},
        )

    async def abort(self, request_ids):
        self.aborts += request_ids
        self.go.set()

    async def keep_no_longer(self, names):
        self.kept_no_longer += names

    async def read_no_more(self, kv_engine_id):
        self.not_read.append(kv_engine_id)


def ask(apart, name="r", timeout_s=10.0, prompt=(1, 2, 3), **options):
    return apart.generate(
        prompt,
        request_id=name,
        max_tokens=5,
        temperature=0.7,
        cache_salt="9",
        timeout_s=timeout_s,
        **options,
    )


async def test_both_engines_get_the_prompt_under_one_salt_and_the_second_samples():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    generation = await ask(DisaggregatedEngines([prefill, decode], [{}]), stop_token_ids=(4,))
    assert len(generation.token_ids) == 5 and generation.cached_tokens == 64
    (first,), (second,) = prefill.asked, decode.asked
    assert (first["max_tokens"], first["cache_salt"], first["ignore_eos"]) == (1, "9", True)
    assert first["kv_transfer"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (second["max_tokens"], second["cache_salt"], second["stop_token_ids"]) == (5, "9", (4,))
    assert second["kv_transfer"] == WHERE | {"remote_request_id": "p-r"}


async def test_mooncakes_engines_are_told_one_name_for_the_transfer():
    prefill, decode = StandIn("p"), StandIn("d")
    await ask(
        DisaggregatedEngines(
            [prefill, decode], [{"kv_engine_id": "e", "kv_bootstrap": "http://h:1"}]
        )
    )
    first, second = prefill.asked[0]["kv_transfer"], decode.asked[0]["kv_transfer"]
    assert first["transfer_id"] == second["transfer_id"]
    assert (second["remote_engine_id"], second["remote_bootstrap_addr"]) == ("e", "http://h:1")


async def test_a_request_that_is_given_up_while_it_prefills_is_read_for_one_token():
    for how in ("abort", "cancel"):
        prefill, decode = StandIn("p", WHERE), StandIn("d")
        prefill.go.clear()
        apart = DisaggregatedEngines([prefill, decode], [{}])
        task = asyncio.create_task(ask(apart))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        if how == "abort":
            apart.abort(["r", "of another engine"])
            prefill.go.set()
            generation = await task
            assert generation.finish_reason == "abort" and len(generation.token_ids) == 0
        else:
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            prefill.go.set()
        await apart.close()
        [asked] = decode.asked
        assert (
            asked["request_id"],
            asked["max_tokens"],
            asked["kv_transfer"]["remote_request_id"],
        ) == ("r-given-back", 1, "p-r")
        assert prefill.aborts == []


async def test_a_request_whose_time_is_over_with_its_prompt_fails_and_its_blocks_are_given_back():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    apart = DisaggregatedEngines([prefill, decode], [{}])
    with pytest.raises(
        GenerationFailed,
        match=r"request 'r': p used all 0 s for the prompt, so no time is left to decode",
    ):
        await ask(apart, timeout_s=0.0)
    await apart.close()
    [asked] = decode.asked
    assert (asked["request_id"], asked["max_tokens"]) == ("r-given-back", 1)


async def test_a_request_that_is_given_up_while_it_decodes_is_aborted_there():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    decode.go.clear()
    apart = DisaggregatedEngines([prefill, decode], [{}])
    task = asyncio.create_task(ask(apart))
    while not decode.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await apart.close()
    assert decode.aborts == ["r"] and prefill.aborts == []


TURN = np.arange(256)


def chosen(choice, tokens, among=(0, 1), salt="0"):
    with choice.using(tokens, salt, among) as found:
        return found.address


def test_a_turn_goes_where_the_last_one_is_cached_and_a_new_prompt_where_least_is_owed():
    choice = EngineChoice([1, 2])
    with choice.using(TURN, "0", [0, 1]) as first:
        assert first.address == (0, 0) and choice.owed_tokens == [256, 0, 0]
        with choice.using(TURN + 1000, "0", [0, 1]) as second:
            assert second.address == (1, 0)
            assert chosen(choice, TURN + 2000) == (1, 1)
        more = np.append(TURN, range(100))
        with choice.using(more, "0", [0, 1]) as third:
            assert third.address == (0, 0)  # 100 tokens and 256 owed there, 356 tokens elsewhere
            assert chosen(choice, more) == (1, 0)  # 36 tokens and 356 owed, 356 tokens elsewhere
    assert choice.owed_tokens == [0, 0, 0]
    assert chosen(choice, TURN) == (0, 0) and chosen(choice, TURN + 1000) == (1, 0)
    assert chosen(choice, TURN + 1000, salt="1") == (0, 0)  # another version's cache is of no use
    assert chosen(choice, TURN + 2000, among=[0]) == (0, 0)  # the engine that has it is not serving


def test_an_answer_is_cached_with_its_prompt_and_an_ended_engine_caches_nothing():
    choice = EngineChoice([1, 1], is_decoding=True)
    choice.holds(np.append(TURN, TURN), "0", choice.addresses[1])
    with choice.using(TURN, "0", [0]):
        assert choice.owed_tokens == [256, 0]
    assert chosen(choice, np.append(TURN, TURN)) == (1, 0)
    choice.forget(1)
    assert chosen(choice, np.append(TURN, TURN)) == (0, 0)


async def test_a_group_shares_one_prefill_and_each_rank_gets_its_requests():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    prefill.go.clear()
    apart = DisaggregatedEngines([prefill, decode], [{}], num_ranks=[2, 1])
    group = [asyncio.create_task(ask(apart, f"r{i}", prompt=TURN)) for i in range(3)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert [asked["request_id"] for asked in prefill.asked] == ["r0"]
    prefill.go.set()
    await asyncio.gather(*group)
    assert len(prefill.asked) == len(decode.asked) == 3
    assert [asked["rank"] for asked in prefill.asked] == [0, 0, 0]
    assert "rank" not in decode.asked[0]


async def test_a_decode_engine_computes_a_short_prompt_and_the_rest_of_a_turn_itself():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    apart = DisaggregatedEngines([prefill, decode], [{}], max_local_prefill_tokens=64)
    await ask(apart, "short", prompt=TURN[:64])
    assert not prefill.asked and "kv_transfer" not in decode.asked[0]
    await ask(apart, "long", prompt=TURN)
    await ask(apart, "turn", prompt=np.append(TURN, range(64)))
    await ask(apart, "long turn", prompt=np.append(TURN, range(1, 66)))
    await ask(apart, "first of its salt", prompt=TURN + 1)
    found = [asked["request_id"] for asked in prefill.asked]
    assert found == ["long", "long turn", "first of its salt"]


async def test_a_decode_engine_computes_no_prompt_whose_routes_only_a_prefill_engine_has():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    apart = DisaggregatedEngines([prefill, decode], [{}], max_local_prefill_tokens=64)
    for member in range(2):  # a group whose prompt the decode engine computes
        await ask(apart, f"short {member}", prompt=TURN[:64], routes_from=0)
    assert not prefill.asked and [asked["routes_from"] for asked in decode.asked] == [0, 0]
    prefill.go.clear()
    long = (ask(apart, f"long {member}", prompt=TURN + 1, routes_from=0) for member in range(2))
    reading = asyncio.gather(*long)  # a group whose prompt the decode engine reads
    await asyncio.sleep(0)
    prefill.go.set()
    await reading
    await ask(apart, "turn", prompt=np.append(TURN + 1, range(64)), routes_from=256)
    assert [asked["request_id"] for asked in prefill.asked] == ["long 0", "long 1"]


# Engines that are lost


class Fleet:
    """Two engines of each part, of which the fleet learns when it looks that they are gone."""

    def __init__(self, handovers):
        self.engines = [StandIn("p0", WHERE), StandIn("p1", WHERE), StandIn("d2"), StandIn("d3")]
        self.admitted, self.gone = {0, 1, 2, 3}, set()
        self.apart = DisaggregatedEngines(self.engines, handovers, self.admitted, self.look)

    async def look(self):
        self.admitted -= self.gone

    def die(self, index):
        self.gone.add(index)
        self.engines[index].error = EngineGone(f"{self.engines[index].name} is gone")
        self.engines[index].go.set()

    async def ask_twice(self, index):
        """Two requests, once engine `index` has them and does not answer."""
        self.engines[index].go.clear()
        others = self.admitted - {0, index}
        self.admitted -= others  # so that no other engine gets one
        tasks = [asyncio.create_task(ask(self.apart, name)) for name in ("a", "b")]
        while len(self.engines[index].asked) < 2:
            await asyncio.sleep(0)
        self.admitted |= others
        return tasks


def mooncakes():
    return [{"kv_engine_id": f"e{index}", "kv_bootstrap": f"http://h:{index}"} for index in (0, 1)]


@pytest.mark.parametrize("handovers", [[{}, {}], mooncakes()], ids=["nixl", "mooncake"])
async def test_a_decode_engine_that_dies_costs_its_requests_and_their_blocks_are_kept_no_longer(
    handovers,
):
    fleet = Fleet(handovers)
    first, second = await fleet.ask_twice(2)
    names = [
        each["kv_transfer"].get("transfer_id", f"p0-{each['request_id']}")
        for each in fleet.engines[2].asked
    ]
    second.cancel()  # nobody wants this answer any more; its blocks are kept all the same
    with pytest.raises(asyncio.CancelledError):
        await second
    fleet.die(2)
    with pytest.raises(EngineGone, match="d2 is gone"):
        await first
    await fleet.apart.close()
    assert (
        sorted(fleet.engines[0].kept_no_longer) == sorted(names)
        and fleet.engines[1].kept_no_longer == []
    )
    assert len((await ask(fleet.apart, "c")).token_ids) == 5 and len(fleet.engines[3].asked) == 1


async def test_a_request_that_fails_alone_leaves_the_blocks_to_an_engine_that_may_yet_read_them():
    fleet = Fleet([{}, {}])
    fleet.engines[2].error = GenerationFailed("refused")
    with pytest.raises(GenerationFailed, match="refused"):
        await ask(fleet.apart)
    await fleet.apart.close()
    assert fleet.engines[0].kept_no_longer == []


@pytest.mark.parametrize(("index", "kept_no_longer"), [(0, []), (2, ["p0-a"])])
async def test_no_decode_engine_is_asked_if_an_engine_was_restarted_during_the_prefill(
    index, kept_no_longer
):
    fleet = Fleet([{}, {}])
    prefill, decode = fleet.engines[0], fleet.engines[2]
    prefill.go.clear()
    task = asyncio.create_task(ask(fleet.apart, "a"))
    while not prefill.asked:
        await asyncio.sleep(0)
    fleet.engines[index] = StandIn("the next incarnation, which serves already")
    prefill.go.set()
    with pytest.raises(EngineGone, match="was lost while the cache of request 'a' was handed over"):
        await task
    await fleet.apart.close()
    assert decode.asked == fleet.engines[2].asked == [] and prefill.kept_no_longer == kept_no_longer


async def test_decode_engines_learn_once_of_an_ended_prefill_engine_and_read_from_its_next():
    fleet = Fleet(mooncakes())
    fleet.apart.ended(2)  # a decode engine: nobody reads from it
    fleet.apart.ended(0)
    fleet.apart.ended(0)
    fleet.apart.returned(0, {"kv_engine_id": "e0 again", "kv_bootstrap": "http://h:9"})
    await fleet.apart.close()
    assert [engine.not_read for engine in fleet.engines] == [[], [], ["e0"], ["e0"]]
    await ask(fleet.apart)
    assert fleet.engines[2].asked[0]["kv_transfer"]["remote_engine_id"] == "e0 again"


async def test_without_an_engine_of_one_part_nothing_is_served():
    fleet = Fleet([{}, {}])
    fleet.admitted -= {2, 3}
    assert not fleet.apart.is_serving
    with pytest.raises(EngineGone, match="no prefill engine or no decode engine"):
        await ask(fleet.apart)
    assert fleet.engines[0].asked == []
