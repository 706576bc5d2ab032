"""Prefill and decode apart, with stand-ins for the engines: who is asked for what, and what becomes of blocks that nobody wants."""

import asyncio

import numpy as np
import pytest

from orrery.transport.engine import Generation
from orrery.transport.prefill_decode import PrefillDecode, Sticky

WHERE = {"do_remote_prefill": True, "remote_block_ids": [[1, 2]]}


class StandIn:
    """Answers once `go` is set; an abort ends what has not answered."""

    def __init__(self, name, kv_transfer=None):
        self.name, self.kv_transfer, self.asked, self.aborts = name, kv_transfer, [], []
        self.go = asyncio.Event()
        self.go.set()

    async def generate(self, token_ids, **options):
        self.asked.append(options)
        await self.go.wait()
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
            self.kv_transfer,
        )

    async def abort(self, request_ids):
        self.aborts += request_ids
        self.go.set()


def ask(apart, name="r", **options):
    return apart.generate([1, 2, 3], request_id=name, max_tokens=5, temperature=0.7, cache_salt="9", timeout_s=10, **options)


async def test_both_engines_get_the_prompt_under_one_salt_and_the_second_samples():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    generation = await ask(PrefillDecode([prefill], [decode], [{}]), stop_token_ids=(4,))
    assert len(generation.token_ids) == 5 and generation.cached_tokens == 64
    (first,), (second,) = prefill.asked, decode.asked
    assert (first["max_tokens"], first["cache_salt"], first["ignore_eos"]) == (1, "9", True)
    assert first["kv_transfer"] == {"do_remote_decode": True, "do_remote_prefill": False}
    assert (second["max_tokens"], second["cache_salt"], second["stop_token_ids"], second["kv_transfer"]) == (5, "9", (4,), WHERE)


async def test_mooncakes_engines_are_told_one_name_for_the_transfer():
    prefill, decode = StandIn("p"), StandIn("d")
    await ask(PrefillDecode([prefill], [decode], [{"kv_engine_id": "e", "kv_bootstrap": "http://h:1"}]))
    first, second = prefill.asked[0]["kv_transfer"], decode.asked[0]["kv_transfer"]
    assert first["transfer_id"] == second["transfer_id"]
    assert (second["remote_engine_id"], second["remote_bootstrap_addr"]) == ("e", "http://h:1")


async def test_a_request_that_is_given_up_while_it_prefills_is_read_for_one_token():
    for how in ("abort", "cancel"):
        prefill, decode = StandIn("p", WHERE), StandIn("d")
        prefill.go.clear()
        apart = PrefillDecode([prefill], [decode], [{}])
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
        assert [(each["request_id"], each["max_tokens"], each["kv_transfer"]) for each in decode.asked] == [("r-given-back", 1, WHERE)]
        assert prefill.aborts == []


async def test_a_request_that_is_given_up_while_it_decodes_is_aborted_there():
    prefill, decode = StandIn("p", WHERE), StandIn("d")
    decode.go.clear()
    apart = PrefillDecode([prefill], [decode], [{}])
    task = asyncio.create_task(ask(apart))
    while not decode.asked:
        await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await apart.close()
    assert decode.aborts == ["r"] and prefill.aborts == []


def test_a_session_stays_and_a_new_one_goes_where_least_is_in_flight():
    sticky = Sticky(2)
    assert sticky.choose("a") == 0
    sticky.in_flight[0] += 1
    assert sticky.choose("b") == 1
    assert sticky.choose("a") == 0
