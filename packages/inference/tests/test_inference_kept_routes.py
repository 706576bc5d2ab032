"""Routes that vLLM 0.26 keeps by place, kept by the hashes of their blocks: in memory, on disk, and back on the device."""

import time

import numpy as np
import pytest

from orrery.inference.patches.vllm_0_26_routes import KeptRoutes
from orrery.inference.routes_on_disk import FOLDER, FOLDER_BYTES

BLOCK, NUM_BLOCKS, LAYERS, TOP_K = 4, 6, 3, 2
KEYS = [f"{place:064x}" for place in range(NUM_BLOCKS)]


@pytest.fixture
def slots():
    return np.random.default_rng(0).integers(0, 128, (NUM_BLOCKS * BLOCK, LAYERS, TOP_K)).astype(np.uint8)


def blocks(slots):
    return slots.reshape(NUM_BLOCKS, BLOCK, LAYERS, TOP_K)


def test_blocks_come_back_elsewhere_with_the_routes_that_they_had_when_they_were_kept(slots):
    routes, before = KeptRoutes(slots, BLOCK, max_blocks=3), blocks(slots).copy()
    routes.keep((KEYS[place], place) for place in (0, 1, 2))
    slots[:] = 7  # other requests have their places
    routes.put_back([5, 3], routes.read([KEYS[0], KEYS[2]]).result())
    np.testing.assert_array_equal(blocks(slots)[[5, 3]], before[[0, 2]])
    assert (blocks(slots)[[0, 1, 2, 4]] == 7).all()


def test_a_block_that_was_computed_again_has_its_newer_routes(slots):
    routes, before = KeptRoutes(slots, BLOCK, max_blocks=3), blocks(slots).copy()
    routes.keep([(KEYS[0], 0)])
    routes.keep([(KEYS[0], 1)])
    routes.put_back([5], routes.read([KEYS[0]]).result())
    np.testing.assert_array_equal(blocks(slots)[5], before[1])


def test_what_was_not_used_for_longest_is_forgotten_and_a_prompt_is_known_up_to_the_first_gap(slots):
    routes = KeptRoutes(slots, BLOCK, max_blocks=3)
    routes.keep((KEYS[place], place) for place in (0, 1, 2))
    routes.read([KEYS[0]]).result()
    routes.keep([(KEYS[3], 3)])
    assert [routes.num_known([key]) for key in KEYS] == [1, 0, 1, 1, 0, 0]
    assert routes.num_known([KEYS[0], KEYS[2], KEYS[1], KEYS[3]]) == 2
    assert routes.num_known([]) == 0


def test_routes_on_disk_outlive_memory_and_process_and_unknown_ones_are_no_expert(slots, tmp_path, monkeypatch):
    monkeypatch.setenv(FOLDER, str(tmp_path))
    monkeypatch.setenv(FOLDER_BYTES, str(1 << 20))
    before = blocks(slots).copy()
    routes = KeptRoutes(slots, BLOCK, max_blocks=2)
    routes.keep((KEYS[place], place) for place in range(4))
    limit_s = time.monotonic() + 10
    while routes.num_known(KEYS[:4]) < 4:
        assert time.monotonic() < limit_s
        time.sleep(0.01)
    for each in (routes, KeptRoutes(slots, BLOCK, max_blocks=2)):
        slots[:] = 7
        each.put_back([0, 1, 2, 3, 4], each.read([*KEYS[:4], KEYS[5]]).result())
        np.testing.assert_array_equal(blocks(slots)[:4], before[:4])
        assert (blocks(slots)[4] == 255).all() and (blocks(slots)[5] == 7).all()


def test_routes_of_many_experts_take_two_bytes(slots):
    wide = slots.astype(np.uint16) + 300
    routes, before = KeptRoutes(wide, BLOCK, max_blocks=2), blocks(wide).copy()
    routes.keep([(KEYS[1], 1)])
    routes.put_back([4, 5], routes.read([KEYS[1], KEYS[2]]).result())
    np.testing.assert_array_equal(blocks(wide)[4], before[1])
    assert (blocks(wide)[5] == 65535).all()
