"""vLLM's disk tier with a bound, behind vLLM's own manager of tiers, without an engine."""

import mmap
import os
import time
from types import SimpleNamespace

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(120)]

BLOCK = mmap.PAGESIZE
CHUNKS = 16  # blocks in host memory
WITHIN_S = 20.0


def spec():
    """The fields of an engine's offloading that a tier reads: one group, one rank."""
    parallel = SimpleNamespace(
        tp_size=1, pp_size=1, pcp_size=1, dcp_size=1, rank=0, is_parallelism_agnostic=True
    )
    config = SimpleNamespace(
        model=SimpleNamespace(name="m", dtype="float32"),
        cache=SimpleNamespace(tokens_per_hash=32), parallel=parallel,
        groups=[SimpleNamespace(tokens_per_block=32, layer_names=["0"])],
        canonical_layout=False, replicated_layout=False,
    )  # fmt: skip
    return SimpleNamespace(
        config=config,
        blocks_per_chunk=1,
        kv_events_config=SimpleNamespace(enable_kv_cache_events=False),
    )


class Tiers:
    """Host memory of CHUNKS blocks, and a disk of `max_blocks` behind it."""

    def __init__(self, folder, max_blocks):
        from vllm.v1.kv_offload.base import ScheduleEndContext
        from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
        from vllm.v1.kv_offload.tiering.manager import (
            CPUPrimaryTierOffloadingManager,
            TieringOffloadingManager,
        )

        from orrery.inference import kv_tiers  # noqa: F401  # names the tier

        self.folder, self.end = folder, ScheduleEndContext((), ())
        memory = memoryview(mmap.mmap(-1, CHUNKS * BLOCK)).cast("B", (CHUNKS, BLOCK))
        region = SimpleNamespace(create_kv_memoryview=lambda: memory, cleanup=lambda: None)
        host = CPUPrimaryTierOffloadingManager(CHUNKS, region)
        config = {"type": "orrery_disk", "root_dir": str(folder), "max_bytes": max_blocks * BLOCK}
        self.disk = SecondaryTierFactory.create_secondary_tier(config, memory, spec())
        self.memory, self.manager = memory, TieringOffloadingManager(host, [self.disk])

    def request(self, name):
        from vllm.v1.kv_offload.base import ReqContext

        context = ReqContext(name)
        self.manager.on_new_request(context)
        return context

    def compute(self, name, keys):
        """A request whose blocks go to host memory, and from there to the disk."""
        context = self.request(name)
        stored = self.manager.prepare_store(keys, context)
        for key, place in zip(stored.keys_to_store, stored.store_spec.chunk_ids, strict=True):
            self.memory.cast("B")[place * BLOCK : (place + 1) * BLOCK] = key[:1] * BLOCK
        self.manager.complete_store(keys, context)
        self.manager.on_request_finished(context)
        self.forget()

    def forget(self):
        """Host memory is empty; the disk is not."""
        self.manager.reset_cache()
        self.manager.on_schedule_end(self.end)

    def look(self, key, context, before_load=lambda: None):
        """The final word of a lookup, as a scheduler asks for it: step after step, until it is a
        hit or a miss.
        """
        from vllm.v1.kv_offload.base import LookupResult

        limit_s = time.monotonic() + WITHIN_S
        while True:
            result = self.manager.lookup(key, context)
            if result in (LookupResult.HIT, LookupResult.MISS):
                return result is LookupResult.HIT
            if self.manager._pending_load_submissions:
                before_load()
            self.manager.on_schedule_end(self.end)
            assert time.monotonic() < limit_s, "the request waits for ever"
            time.sleep(0.005)

    def found(self, keys):
        context = self.request(f"look-{time.monotonic_ns()}")
        found = [self.look(key, context) for key in keys]
        self.manager.on_request_finished(context)
        self.forget()
        return found

    def files(self):
        return sorted(path for path in self.folder.rglob("*.bin*"))


def keys_of(*numbers):
    from vllm.v1.kv_offload.base import make_offload_key

    return [make_offload_key(bytes([number]) * 32, 0) for number in numbers]


@pytest.fixture
def tiers(tmp_path):
    made = []

    def make(max_blocks):
        made.append(Tiers(tmp_path, max_blocks))
        return made[-1]

    yield make
    for each in made:
        each.disk.shutdown()


def test_the_disk_holds_its_bound_and_the_blocks_that_were_used_last(tiers):
    made = tiers(max_blocks=8)
    made.compute("a", keys_of(1, 2, 3, 4))
    made.compute("b", keys_of(5, 6, 7, 8))
    assert made.found(keys_of(1, 2)) == [True, True]
    made.compute("again", keys_of(3))
    made.compute("c", keys_of(9, 10, 11, 12))
    assert len(made.files()) == 8
    assert made.found(keys_of(*range(1, 13))) == [
        number in (1, 2, 3, 8, 9, 10, 11, 12) for number in range(1, 13)
    ]


def test_what_a_killed_engine_left_is_found_again_within_the_bound(tiers):
    before = tiers(max_blocks=8)
    for number in range(1, 9):
        before.compute(str(number), keys_of(number))
    for age, path in enumerate(before.files()):
        os.utime(path, ns=(10**18 - age, 10**18 - age))
    after = tiers(max_blocks=4)
    assert after.found(keys_of(*range(1, 9))) == [True] * 4 + [False] * 4


def test_a_block_whose_file_went_between_its_lookup_and_its_load_is_missing_and_holds_nobody_up(
    tiers,
):
    made = tiers(max_blocks=8)
    made.compute("a", keys_of(1, 2))
    [first] = [path for path in made.files() if path.name.startswith("0101")]
    context = made.request("b")
    assert (
        made.look(keys_of(1)[0], context, before_load=lambda: first.unlink(missing_ok=True))
        is False
    )
    assert made.look(keys_of(2)[0], context) is True
    place = made.manager.prepare_load(keys_of(2), context)
    [place] = place.chunk_ids
    assert bytes(made.memory.cast("B")[place * BLOCK : (place + 1) * BLOCK]) == b"\x02" * BLOCK
    made.manager.complete_load(keys_of(2), context)
    made.manager.on_request_finished(context)
    made.forget()
    made.compute("c", keys_of(1))
    assert made.found(keys_of(1, 2)) == [True, True]
