"""Blocks of cache that leave the device: host and disk tiers of one engine, and a Mooncake Store of
two.
"""

import asyncio
import shutil
import stat
import threading
from contextlib import contextmanager, suppress
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from inference_servers import MIXTURE, await_published, engine, family, make_run, start_role, stop
from network_alone import alone_in_a_network

from orrery.inference.kv_connectors import disk_folder, prepare_disk, remove_disk
from orrery.inference.kv_store import master_program
from orrery.manifest.errors import OrreryError
from orrery.orchestrator.engines.client import EngineClient
from orrery.runtime import run_directory
from orrery.wire.routed_experts import RouteShape, column

pytestmark = [pytest.mark.timeout(300), pytest.mark.engine, pytest.mark.slow]

PROMPT = np.random.default_rng(4).integers(3, 48, 330).astype(np.int32)
BLOCKS = 10 * 32  # tokens of the prompt in whole blocks
DEVICE_BLOCKS = 64
TIERS = {
    "kv_cache_bytes": DEVICE_BLOCKS << 15,
    "kv_offload": {"kind": "tiers", "host_bytes": 1 << 26, "disk_bytes": 1 << 26},
}
STORE = {"kv_offload": {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 1 << 27}}


async def ask(engine, name, salt, prompt=PROMPT, max_tokens=8, **options):
    return await engine.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=1.0,
        cache_salt=salt,
        request_id=name,
        ignore_eos=True,
        seed=5,
        **options,
    )


async def forget(engine):
    """The device's prefix cache is gone; a tier behind it is not."""
    await engine._control("/reset_prefix_cache")


async def until_found(engine, salt, name, **options):
    """Ask until a tier returns blocks, as they leave the device later. Return the last answer."""
    for attempt in range(40):
        await forget(engine)
        answer = await ask(engine, f"{name}-{attempt}", salt, **options)
        if answer.cached_tokens:
            return answer
        await asyncio.sleep(0.25)
    return answer


async def two_turns(engine, other, **options):
    """Return turns of which the second, at `other`, finds all blocks of the first one's answer.

    A turn stores its prompt's blocks too, so each attempt has a salt of its own.
    """
    for attempt in range(8):
        salt = f"turns-{attempt}"
        turn = await ask(engine, f"{salt}-1", salt, max_tokens=40, **options)
        prompt = np.concatenate([PROMPT, turn.token_ids])
        await asyncio.sleep(0.25 * attempt)
        await forget(other)
        later = await ask(other, f"{salt}-2", salt, prompt, **options)
        if later.cached_tokens == BLOCKS + 32:
            break
    assert later.cached_tokens == BLOCKS + 32
    return turn, later


def same(one, other):
    assert one.token_ids.tolist() == other.token_ids.tolist()
    assert np.abs(one.logprobs - other.logprobs).max() <= 1e-5
    np.testing.assert_array_equal(*(routes_of(each) for each in (one, other)))


def routes_of(generation):
    """Return the expert choices of all input tokens, all known, or none if none were requested."""
    num_tokens = sum(part.num_rows for part in generation.routes)
    routes = column(num_tokens, generation.routes, RouteShape(num_layers=2, top_k=2, num_experts=4))
    assert (routes < 4).all()
    return np.sort(routes, axis=-1)


async def look_behind(url):
    """Return four answers: fresh, found in host memory, with a newer salt, and found after the
    device has evicted the blocks.
    """
    async with EngineClient(url) as engine:
        fresh = await ask(engine, "fresh", "3", routes_from=0)
        found = await until_found(engine, "3", "again", routes_from=0)
        newer = await ask(engine, "newer", "4", routes_from=0)
        for i in range(2 * DEVICE_BLOCKS * 32 // len(PROMPT)):
            await ask(engine, f"other-{i}", f"other-{i}")
        evicted = await ask(engine, "evicted", "3", routes_from=0)
        turn, later = await two_turns(engine, engine, routes_from=0)
        num_known = len(routes_of(turn))
        np.testing.assert_array_equal(routes_of(later)[:num_known], routes_of(turn))
        return fresh, found, newer, evicted


def test_blocks_and_routes_come_back_from_host_memory_and_after_a_crash_from_disk(
    tmp_path,
):
    run_dir = make_run(
        tmp_path / "run",
        MIXTURE,
        inference=TIERS | {"router": {"kind": "none"}},
        routed_experts=True,
    )
    folder = disk_folder(
        SimpleNamespace(run_dir=run_dir, stage="rl", attempt=1, role="inference", index=0)
    )
    processes = []

    async def second(url):
        async with EngineClient(url) as engine:
            newest = await ask(engine, "newest", "5", routes_from=0)
            restarted = await until_found(engine, "3", "restarted", routes_from=0)
            shutil.rmtree(folder / "routes")
            await forget(engine)
            return newest, restarted, await ask(engine, "without-routes", "3", routes_from=0)

    def start():
        processes.append(start_role("orrery.inference", run_dir, 0))
        return await_published(run_dir, "inference", 0, processes[-1])

    def host_tiers():
        """Return names in shared memory and their bytes."""
        paths = run_directory.SHARED_MEMORY.glob(
            f"vllm_offload_{run_directory.role_memory_prefix(run_dir, 'inference.0')}*"
        )
        return [(path.name, path.stat().st_size) for path in paths]

    try:
        fresh, found, newer, evicted = asyncio.run(look_behind(start()))
        [(first, first_bytes)] = host_tiers()
        processes[-1].kill()
        processes[-1].wait()
        (run_dir / "stages/rl/endpoints/inference.0.json").unlink()
        newest, restarted, without_routes = asyncio.run(second(start()))
        [(second_one, second_bytes)] = host_tiers()
        stop(processes[-1])
        assert not host_tiers()
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)
        shutil.rmtree(folder.parent.parent, ignore_errors=True)
    assert first != second_one and first_bytes == second_bytes == 0, (
        "a tier that all have opened needs no name"
    )
    # A cache whose routes are not known is not used.
    assert (
        fresh.cached_tokens,
        newer.cached_tokens,
        newest.cached_tokens,
        without_routes.cached_tokens,
    ) == (0, 0, 0, 0)
    assert found.cached_tokens == evicted.cached_tokens == restarted.cached_tokens == BLOCKS
    assert len(routes_of(fresh)) == len(PROMPT) + 8 - 1
    for other in (found, newer, evicted, newest, restarted, without_routes):
        same(fresh, other)


ON_DISK = (32 << 10) + 2 * 4096  # one block: its cache, and twice the page that its routes take
SMALL_TIERS = {
    "kv_cache_bytes": 24 << 15,
    "kv_offload": {"kind": "tiers", "host_bytes": 32 << 15, "disk_bytes": 64 * ON_DISK},
    "router": {"kind": "none"},
}


def taken(folder):
    """Return the bytes of all files in `folder`. Files that disappear meanwhile do not count."""
    total = 0
    for path in folder.rglob("*"):
        with suppress(FileNotFoundError):
            status = path.stat()
            total += -(-status.st_size // 4096) * 4096 if stat.S_ISREG(status.st_mode) else 0
    return total


@contextmanager
def watched(folder):
    """Yield a list with the largest number of bytes seen in `folder`."""
    most, is_over = [0], threading.Event()

    def look():
        while not is_over.wait(0.02):
            most[0] = max(most[0], taken(folder))

    watch = threading.Thread(target=look)
    watch.start()
    try:
        yield most
    finally:
        is_over.set()
        watch.join()


def test_the_disk_holds_its_bound_while_blocks_come_back_and_what_is_oldest_is_computed(tmp_path):
    run_dir = make_run(tmp_path / "run", MIXTURE, inference=SMALL_TIERS, routed_experts=True)
    folder = disk_folder(
        SimpleNamespace(run_dir=run_dir, stage="rl", attempt=1, role="inference", index=0)
    )
    processes = []

    def start():
        processes.append(start_role("orrery.inference", run_dir, 0))
        return await_published(run_dir, "inference", 0, processes[-1])

    async def fill(url):
        """Compute three times the disk's bound. Then ask for blocks that only the disk has, and for
        the oldest blocks.
        """
        async with EngineClient(url) as engine:
            fresh = [
                await ask(engine, f"fresh-{salt}", f"{salt}", routes_from=0) for salt in range(20)
            ]
            await asyncio.sleep(1.0)  # blocks leave beside the work
            again, oldest = (
                await until_found(engine, "15", "again", routes_from=0),
                await ask(engine, "oldest", "0", routes_from=0),
            )
            # The last two answers' blocks leave too, as a kill during an eviction leaves fewer.
            await asyncio.sleep(1.0)
            return fresh, again, oldest

    async def restarted(url):
        async with EngineClient(url) as engine:
            return await until_found(engine, "15", "restarted", routes_from=0)

    try:
        url = start()
        with watched(folder) as most:
            fresh, again, oldest = asyncio.run(fill(url))
            processes[-1].kill()
            processes[-1].wait()
            at_rest = taken(folder)
            (run_dir / "stages/rl/endpoints/inference.0.json").unlink()
            after_crash = asyncio.run(restarted(start()))
            left = {path.name: path.parent for path in folder.rglob("*") if path.is_file()}
    finally:
        for process in processes:
            if process.poll() is None:
                stop(process)
        shutil.rmtree(folder.parent.parent, ignore_errors=True)
    bound = 64 * ON_DISK + 4096  # and vLLM's own config.json
    assert 0.7 * bound < at_rest <= bound
    # A look is not of one moment: meanwhile the blocks of a prompt take the places of others.
    assert most[0] <= bound + 10 * ON_DISK
    blocks = {name.removesuffix(".bin") for name in left if name.endswith(".bin")}
    assert len(blocks) >= 60 and blocks <= left.keys(), "a block on disk has its routes there"
    assert (again.cached_tokens, oldest.cached_tokens, after_crash.cached_tokens) == (
        BLOCKS,
        0,
        BLOCKS,
    )
    for one, other in ((fresh[15], again), (fresh[0], oldest), (fresh[15], after_crash)):
        same(one, other)


def test_requests_that_are_aborted_while_they_wait_and_are_computed_cost_no_engine(tmp_path):
    # A prompt takes six steps, and the cache holds two of them.
    inference = SMALL_TIERS | {"max_batched_tokens": 64}
    run_dir = make_run(tmp_path / "run", MIXTURE, inference=inference, routed_experts=True)

    async def abort_all(url):
        async with EngineClient(url) as client:
            seen = set()
            for round in range(4):
                names = [f"{round}-{i}" for i in range(8)]
                asked = [asyncio.create_task(ask(client, name, name)) for name in names]
                while (load := await client.metrics()).waiting < 2 and not all(
                    task.done() for task in asked
                ):
                    await asyncio.sleep(0.01)
                seen |= {
                    *(["waiting"] if load.waiting else []),
                    *(["running"] if load.running else []),
                }
                await asyncio.sleep(0.02 * round)
                await client.abort(names)
                await asyncio.gather(*asked, return_exceptions=True)
            return (
                seen,
                await ask(client, "after", "a", routes_from=0),
                await until_found(client, "a", "again", routes_from=0),
            )

    with engine(run_dir) as (_, url):
        seen, after, again = asyncio.run(abort_all(url))
    assert seen == {"waiting", "running"}
    assert again.cached_tokens == BLOCKS
    same(after, again)


def test_an_engine_that_is_asked_to_end_takes_its_blocks_off_the_disk_and_leaves_those_of_others(
    tmp_path,
):
    run_dir = make_run(tmp_path / "run", MIXTURE, inference=TIERS | {"router": {"kind": "none"}})
    folder = disk_folder(
        SimpleNamespace(run_dir=run_dir, stage="rl", attempt=1, role="inference", index=0)
    )
    other = folder.with_name("1")
    other.mkdir(parents=True)

    async def fill(url):
        async with EngineClient(url) as client:
            await ask(client, "fresh", "3")
            while not any(path.is_file() for path in folder.rglob("*")):
                await asyncio.sleep(0.05)

    try:
        with engine(run_dir) as (_, url):
            asyncio.run(fill(url))
        assert not folder.exists()
        assert other.is_dir()
    finally:
        shutil.rmtree(folder.parent.parent, ignore_errors=True)


def test_folders_of_a_run_go_with_its_last_engines(tmp_path):
    disks = [tmp_path / "orrery-kv-run" / "attempt_1" / index for index in "01"]
    for disk in disks:
        prepare_disk(disk)
    remove_disk(disks[0])
    assert not disks[0].exists() and disks[1].is_dir()
    remove_disk(disks[1])
    assert list(tmp_path.iterdir()) == []


def test_blocks_of_two_workers_come_back_with_routes_that_the_scheduler_knows(
    tmp_path,
):
    on_device = {"kv_cache_bytes": DEVICE_BLOCKS << 14}  # a worker has half of the heads
    wide = (
        TIERS
        | on_device
        | {
            "kv_offload": TIERS["kv_offload"] | {"disk_bytes": 0},
            "tensor_parallel": 2,
            "router": {"kind": "none"},
        }
    )
    run_dir = make_run(tmp_path / "run", MIXTURE, inference=wide, routed_experts=True)
    process = start_role("wide_engine", run_dir, 0)
    try:
        fresh, found, newer, evicted = asyncio.run(
            look_behind(await_published(run_dir, "inference", 0, process))
        )
    finally:
        stop(process)
    assert (fresh.cached_tokens, newer.cached_tokens) == (0, 0)
    assert found.cached_tokens == evicted.cached_tokens == BLOCKS
    for other in (found, newer, evicted):
        same(fresh, other)


async def share(urls):
    """The second engine finds the first engine's blocks, but not with another salt."""
    async with EngineClient(urls[0]) as one, EngineClient(urls[1]) as other:
        fresh = await ask(one, "fresh", "3")
        found = await until_found(other, "3", "found")
        newer = await ask(other, "newer", "4")
        await two_turns(one, other)
        await forget(one)
        return fresh, found, newer, await until_found(one, "3", "again")


def test_two_engines_share_a_mooncake_store_in_a_network_of_their_own(tmp_path):
    try:
        master_program()
    except OrreryError as error:
        pytest.skip(f"NOT TESTED: {error}")
    run_dir = make_run(tmp_path / "run", MIXTURE, num_replicas=2, inference=STORE)
    roles = {
        ("kv_store", 0): "orrery.inference.kv_store",
        ("inference", 0): "orrery.inference",
        ("inference", 1): "orrery.inference",
    }

    with alone_in_a_network("Mooncake listens on every interface"):
        processes = {key: start_role(module, run_dir, key[1]) for key, module in roles.items()}
        try:
            urls = {
                key: await_published(run_dir, *key, process) for key, process in processes.items()
            }
            masters_sockets = [
                each
                for member in family(processes["kv_store", 0])
                for each in member.net_connections("inet")
            ]
            answers = asyncio.run(share([urls["inference", 0], urls["inference", 1]]))
        finally:
            for process in processes.values():
                stop(process)
    fresh, found, newer, again = answers
    assert {each.laddr.ip for each in masters_sockets if each.status == psutil.CONN_LISTEN} == {
        "127.0.0.1"
    }
    assert (fresh.cached_tokens, newer.cached_tokens) == (0, 0)
    assert found.cached_tokens == again.cached_tokens == BLOCKS
    for each in answers:
        same(fresh, each)
