"""One real vLLM on CPU with a tiny dense model and tied embeddings, driven through `EnginePool`."""

import asyncio
import os
import re
import signal
import socket
import tempfile
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import torch
from direct_trainer import damaged_on_its_way, direct_trainer, end_half_way, our_logprobs
from inference_servers import (
    DENSE,
    await_published,
    engine,
    family,
    free_port,
    in_flight,
    in_shared_memory,
    listening,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)
from msgspec import structs

from orrery.manifest.identity import load
from orrery.models.weights import named_hf_tensors
from orrery.orchestrator.engines.client import Canary, EngineClient, update_engine
from orrery.orchestrator.engines.messages import (
    START_VERSION,
    EngineGone,
    GenerationFailed,
    UpdateFailed,
    UpdateInterrupted,
    WeightsDiffer,
)
from orrery.runtime import run_directory
from orrery.wire.weight_wire import (
    DIRECT_KINDS,
    Published,
)

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine]
torch.set_num_threads(1)

PROMPT = [3, 4, 5, 6, 7, 8]
# float32 in both. The engine packs weights and orders sums differently. At these large random
# logits, runs of the same weights differ by about 1e-5.
TOLERANCE = 1e-4


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("engine") / "run", DENSE)


@pytest.fixture(scope="module")
def server(run_dir):
    with engine(run_dir) as (process, url):
        yield process, url


class Policies:
    """Versions in order, each with other random weights."""

    def __init__(self, run_dir, publisher):
        self.manifest = load(run_dir / "manifest.json")
        self.publisher = publisher
        self.newest = 0

    def start(self):
        return make_module(self.manifest, seed=7)

    def publish(self) -> tuple[Published, torch.nn.Module]:
        self.newest += 1
        module = make_module(self.manifest, seed=100 + self.newest)
        return self.publisher.publish(self.newest, named_hf_tensors(module)), module


@pytest.fixture(scope="module")
def policies(run_dir, publisher):
    return Policies(run_dir, publisher)


def drive(url, scenario, leases=None):
    return with_fleet(scenario, [url], leases=leases)


async def sample(
    fleet, request_id, prompt=PROMPT, max_tokens=24, temperature=0.7, cache_salt="x", **options
):
    return await fleet.generate(
        prompt,
        max_tokens=max_tokens,
        temperature=temperature,
        cache_salt=cache_salt,
        request_id=request_id,
        **options,
    )


def test_the_first_weights_give_our_logprobs_and_carry_the_start_version(server, policies):
    generation = drive(server[1], lambda fleet: sample(fleet, "first"))
    assert generation.token_ids.dtype == np.int32 and generation.logprobs.dtype == np.float32
    assert len(generation.token_ids) == len(generation.logprobs) == len(generation.versions) == 24
    assert generation.finish_reason == "length"
    assert (generation.versions == START_VERSION).all()
    assert (
        np.abs(our_logprobs(policies.start(), PROMPT, generation, 0.7) - generation.logprobs).max()
        <= TOLERANCE
    )


def test_a_canary_proves_an_engine_and_names_one_that_computes_another_policy(server, policies):
    canary = Canary(tuple(range(3, 43)), 1e-3)

    def known(module):
        ids = torch.tensor(canary.token_ids)
        hidden = module(ids, torch.arange(len(ids)), torch.tensor([0, len(ids)], dtype=torch.int32))
        rows = torch.log_softmax((hidden @ module.lm_head_weight.T).float(), -1)[:-1]
        return tuple(rows.gather(1, ids[1:, None]).squeeze(1).detach().tolist())

    async def scenario(fleet):
        published, module = policies.publish()
        await sample(
            fleet,
            "caches it",
            prompt=list(canary.token_ids),
            cache_salt=f"canary-{published.version}",
        )
        report = await fleet.update(structs.replace(published, canary=known(module)))
        assert report.canary_difference <= TOLERANCE and not fleet.is_proving
        # Arrives and is attested, but the trainer computes other log-probs.
        published, _ = policies.publish()
        says = rf"engine 0: with version {published.version} its log-probs of the canary are [\d.]+"
        says += " from"
        with pytest.raises(WeightsDiffer, match=says):
            await fleet.update(structs.replace(published, canary=known(policies.start())))
        assert fleet.is_proving
        await fleet.engines[0].resume()

    with_fleet(scenario, [server[1]], canary=canary)


@pytest.fixture(params=DIRECT_KINDS)
def kind(request):
    if request.param == "nixl":
        # Beside torch for CUDA 13 it wants another package.
        pytest.importorskip(
            "nixl",
            reason="NOT TESTED: weights over NIXL, which is not installed here",
            exc_type=ImportError,
        )
    return request.param


def test_slices_of_a_direct_wire_go_in_between_two_tokens_of_a_request_and_are_attested(
    server, policies, tmp_path, kind
):
    policies.newest += 1
    version, module = policies.newest, make_module(policies.manifest, seed=300)

    async def scenario(fleet):
        published = await asyncio.to_thread(publish, version, module)
        [flight] = await in_flight(
            fleet, lambda part: sample(fleet, f"in-flight-{kind}-{part}", max_tokens=300)
        )
        report = await fleet.update(published)
        return (
            published,
            report,
            await fleet.fingerprints(),
            await flight,
            await sample(fleet, f"after-{kind}"),
        )

    with direct_trainer(tmp_path / "wire", kind) as publish:
        published, report, held_by, flight, after = drive(server[1], scenario, publish.leases)
    again = asyncio.run(publish.leases.start_transfer(published, ["engine 0"]))
    assert again is None, "the trainer has gone on"
    assert {name: each.fingerprint for name, each in held_by[0].items()} == published.fingerprints
    assert sum(report.attested.values()) == len(published.fingerprints)
    assert flight.finish_reason == "length" and len(flight.token_ids) == 300
    assert (np.diff(flight.versions) >= 0).all() and flight.versions[-1] == version
    assert (after.versions == version).all()
    assert np.abs(our_logprobs(module, PROMPT, after, 0.7) - after.logprobs).max() <= TOLERANCE


def test_a_bit_that_flips_on_a_direct_wire_names_its_tensor_before_any_token(
    server, policies, tmp_path, kind
):
    policies.newest += 1
    version, module = policies.newest, make_module(policies.manifest, seed=302)

    num_sampled = []  # after each damaged take

    async def scenario(fleet):
        published = await asyncio.to_thread(publish, version, module)
        [flight] = await in_flight(
            fleet,
            lambda part: sample(
                fleet, f"over-damage-{kind}-{part}", max_tokens=450, ignore_eos=True
            ),
        )
        for tensor, how in (
            ("model.layers.1.mlp.down_proj.weight", "as_consumed"),
            ("model.norm.weight", "resident"),
        ):
            with (
                damaged_on_its_way(tensor),
                pytest.raises(
                    WeightsDiffer,
                    match=(
                        rf"engine 0: tensor '{tensor}' \(attested {how}\) differs from .* "
                        rf"version {version};"
                    ),
                ),
            ):
                await fleet.update(published)
            [held] = (await fleet.fingerprints()).values()
            assert [
                name
                for name, each in held.items()
                if each.fingerprint != published.fingerprints[name]
            ] == [tensor]
            num_sampled.append((await fleet.metrics())[0].generation_tokens_total)
        assert num_sampled[0] == num_sampled[1] and not flight.done()
        await fleet.update(published)
        return await flight, await sample(fleet, f"after-damage-{kind}")

    with direct_trainer(tmp_path / "wire", kind) as publish:
        flight, after = drive(server[1], scenario, publish.leases)
    assert (
        flight.finish_reason == "length"
        and (np.diff(flight.versions) >= 0).all()
        and flight.versions[-1] == version
    )
    assert np.abs(our_logprobs(module, PROMPT, after, 0.7) - after.logprobs).max() <= TOLERANCE


def test_an_engine_whose_take_another_ends_half_way_takes_the_version_again_without_it(
    server, policies, tmp_path
):
    """The other engine, in this process, ends after its first slices, when both are half-way."""
    policies.newest += 1
    version, module = policies.newest, make_module(policies.manifest, seed=301)

    async def scenario(fleet):
        [engine] = fleet.engines
        published = await asyncio.to_thread(publish, version, module)
        claimed = await publish.leases.start_transfer(published, ["engine 0", "engine 1"])
        await engine.pause()
        ending = asyncio.to_thread(end_half_way, claimed, "engine 1")
        taken, _ = await asyncio.gather(
            engine.update_weights(claimed), ending, return_exceptions=True
        )
        nothing = await engine.fingerprints()
        again = await publish.leases.start_transfer(claimed, ["engine 0"])
        report = await update_engine(engine, again)
        publish.leases.release()
        return (
            taken,
            nothing,
            report,
            await engine.fingerprints(),
            published,
            await sample(fleet, "after-a-loss"),
        )

    with direct_trainer(tmp_path / "wire") as publish:
        taken, nothing, report, held_by, published, after = drive(
            server[1], scenario, publish.leases
        )
    assert isinstance(taken, UpdateInterrupted) and nothing == {}
    assert {
        name: each.fingerprint for name, each in held_by.items()
    } == published.fingerprints and report.version == version
    assert np.abs(our_logprobs(module, PROMPT, after, 0.7) - after.logprobs).max() <= TOLERANCE


def test_an_update_puts_exactly_the_published_weights_in_and_attests_every_tensor(server, policies):
    published, module = policies.publish()

    async def scenario(fleet):
        report = await fleet.update(published)
        return report, (await fleet.fingerprints())[0], await sample(fleet, "after-update")

    report, held, generation = drive(server[1], scenario)
    assert report.version == published.version and report.digest == published.digest
    assert sum(report.attested.values()) == len(published.fingerprints)
    assert {name: each.fingerprint for name, each in held.items()} == published.fingerprints
    assert held["model.embed_tokens.weight"].how == held["model.norm.weight"].how == "resident"
    assert held["model.layers.0.self_attn.q_proj.weight"].how == "as_consumed"
    assert (generation.versions == published.version).all()
    assert (
        np.abs(our_logprobs(module, PROMPT, generation, 0.7) - generation.logprobs).max()
        <= TOLERANCE
    )


@pytest.mark.parametrize("share", [None, "group"])
def test_requests_in_flight_go_on_through_an_update_and_each_token_says_its_version(
    server, policies, share
):
    before = policies.newest or START_VERSION
    published, _ = policies.publish()

    async def scenario(fleet):
        def request(part):
            return sample(
                fleet,
                f"flight-{part}",
                [*PROMPT, 0 if share else int(part[0])],
                max_tokens=450,
                temperature=1.0,
                ignore_eos=True,
                share=share and f"{share}{part[1:]}",
            )

        running = await in_flight(fleet, *[request] * 6)
        await fleet.update(published)
        return await asyncio.gather(*running)

    for generation in with_fleet(scenario, [server[1]], max_samples=3):
        assert len(generation.token_ids) == 450 and generation.finish_reason == "length"
        assert set(generation.versions.tolist()) == {before, published.version}
        assert (np.diff(generation.versions) >= 0).all()


def test_the_prefix_cache_is_shared_within_a_salt_and_never_across_salts(server):
    prompt = [(7 * i) % 48 for i in range(200)]

    async def scenario(fleet):
        salts = ["v1", "v1", "v2"]
        return [
            await sample(fleet, f"salt-{i}", prompt, max_tokens=2, cache_salt=salt)
            for i, salt in enumerate(salts)
        ]

    cold, warm, other = drive(server[1], scenario)
    assert cold.cached_tokens == 0 and other.cached_tokens == 0
    assert warm.cached_tokens == 192  # whole blocks of 32


def test_seeded_requests_whose_prompts_are_prefilled_in_parts_sample_as_they_would_alone(server):
    # Together more than a step's tokens.
    prompts = [[(7 * i + 3 * k) % 48 for k in range(300 + i)] for i in range(8)]

    async def scenario(fleet):
        alone = [
            await sample(fleet, f"alone-{i}", prompt, 8, seed=i, cache_salt=f"alone-{i}")
            for i, prompt in enumerate(prompts)
        ]
        return alone, await asyncio.gather(
            *(
                sample(fleet, f"crowd-{i}", prompt, 8, seed=i, cache_salt=f"crowd-{i}")
                for i, prompt in enumerate(prompts)
            )
        )

    for one, other in zip(*drive(server[1], scenario), strict=True):
        assert one.token_ids.tolist() == other.token_ids.tolist()


def test_a_stop_token_ends_a_request_and_is_part_of_it(server):
    async def scenario(fleet):
        free = await sample(fleet, "free", max_tokens=8, temperature=0.0)
        stop = int(free.token_ids[3])
        return (
            free,
            stop,
            await sample(fleet, "stopped", max_tokens=8, temperature=0.0, stop_token_ids=[stop]),
        )

    free, stop, stopped = drive(server[1], scenario)
    first = free.token_ids.tolist().index(stop)
    assert stopped.token_ids.tolist() == free.token_ids[: first + 1].tolist()
    assert stopped.finish_reason == "stop"


def test_an_aborted_request_returns_what_there_is(server):
    async def scenario(fleet):
        names = []

        def request(part):
            names.append(f"abandoned-{part}")
            return sample(fleet, names[-1], max_tokens=490, ignore_eos=True)

        [running] = await in_flight(fleet, request)
        await fleet.abort([names[-1], "never-existed"])
        return await running

    generation = drive(server[1], scenario)
    assert generation.finish_reason == "abort"
    assert len(generation.token_ids) == len(generation.versions) == len(generation.logprobs) < 490


def test_calls_that_share_a_request_get_samples_of_their_own_when_these_end(server, policies):
    async def scenario(fleet):
        published, module = policies.publish()
        await fleet.update(published)
        options = {"cache_salt": "shared", "temperature": 0.7, "share": "group"}
        return module, await asyncio.gather(
            *(sample(fleet, f"shared-{i}", max_tokens=24, **options) for i in range(5))
        )

    module, generations = with_fleet(scenario, [server[1]], max_samples=3)
    assert sorted(each.sample for each in generations) == [0, 0, 1, 1, 2]
    assert len({tuple(each.token_ids.tolist()) for each in generations}) == 5
    for each in generations:
        assert (each.versions == policies.newest).all() and each.finish_reason == "length"
        assert np.abs(our_logprobs(module, PROMPT, each, 0.7) - each.logprobs).max() <= TOLERANCE


def test_a_sample_that_ends_first_is_answered_first_and_an_abort_by_name_ends_the_others(server):
    async def scenario(fleet):
        ended, first = [], asyncio.Event()

        def deliver(generation):
            ended.append(generation)
            first.set()

        # All 48 tokens are about equally likely, so samples meet the stop token many steps apart.
        request = asyncio.create_task(
            fleet.generate_each(
                PROMPT, 16, deliver, max_tokens=400, temperature=1.0, cache_salt="s",
                request_id="first", stop_token_ids=(0,),
            )
        )  # fmt: skip
        await asyncio.wait_for(first.wait(), 60)
        num_first = len(ended)
        await request
        ended.clear()
        first.clear()
        request = asyncio.create_task(
            fleet.generate_each(
                PROMPT, 4, deliver, max_tokens=480, temperature=1.0, cache_salt="s",
                request_id="long", ignore_eos=True,
            )
        )  # fmt: skip
        while (await fleet.metrics())[0].running < 4:
            await asyncio.sleep(0.005)
        await fleet.abort(["long"])
        await request
        return num_first, [each.finish_reason for each in ended]

    num_first, reasons = drive(server[1], scenario)
    assert num_first < 16 and reasons == ["abort"] * 4


def test_a_request_that_the_engine_refuses_fails_alone_and_says_why(server):
    async def scenario(fleet):
        with pytest.raises(GenerationFailed, match=r"too-long.*600 prompt tokens"):
            await sample(fleet, "too-long", [1] * 600)
        return await sample(fleet, "fine")

    assert len(drive(server[1], scenario).token_ids) == 24


def test_one_flipped_byte_in_a_published_file_is_caught_and_its_tensor_named(server, policies):
    published, _ = policies.publish()
    flip_byte(published, "model.layers.1.mlp.down_proj.weight")

    async def scenario(fleet):
        with pytest.raises(
            UpdateFailed,
            match=r"engine 0: tensor 'model\.layers\.1\.mlp\.down_proj\.weight' .* differs",
        ):
            await fleet.update(published)
        return await fleet.health()

    assert drive(server[1], scenario) == [True]


def test_a_truncated_file_fails_the_update_by_name_and_a_whole_one_heals_the_engine(
    server, policies
):
    damaged, _ = policies.publish()
    (file,) = Path(damaged.path).glob("*.safetensors")
    os.truncate(file, file.stat().st_size - 5)
    published, module = policies.publish()

    async def scenario(fleet):
        with pytest.raises(UpdateFailed, match=r"tensor '[\w.]+' is cut off in .*safetensors"):
            await fleet.update(damaged)
        assert await fleet.health() == [True]
        assert await fleet.fingerprints() == {0: {}}
        await fleet.update(published)
        return await sample(fleet, "healed")

    generation = drive(server[1], scenario)
    assert (generation.versions == published.version).all()
    assert (
        np.abs(our_logprobs(module, PROMPT, generation, 0.7) - generation.logprobs).max()
        <= TOLERANCE
    )


def test_a_version_that_lacks_a_tensor_fails_the_update_by_name(server, policies):
    missing = "model.layers.0.self_attn.k_proj.weight"
    module = make_module(policies.manifest, seed=1)
    policies.newest += 1
    tensors = ((name, tensor) for name, tensor in named_hf_tensors(module) if name != missing)
    incomplete = policies.publisher.publish(policies.newest, tensors)
    published, _ = policies.publish()

    async def scenario(fleet):
        with pytest.raises(UpdateFailed, match=rf"tensor '{missing}' is missing"):
            await fleet.update(incomplete)
        await fleet.update(published)  # the failed update may leave NaN, and tests below sample

    drive(server[1], scenario)


def test_an_engine_that_nobody_started_is_gone():
    async def scenario(fleet):
        assert await fleet.health() == [False]
        with pytest.raises(EngineGone, match=r"engine 0 is gone"):
            await sample(fleet, "nobody")

    drive(f"http://127.0.0.1:{free_port()}", scenario)


def test_servers_listen_on_loopback_only(server):
    assert listening(server[0]) == {"127.0.0.1"}


# The tests below end servers: first the shared server, then a server whose parts are killed.


def test_sigterm_ends_a_busy_server_and_its_children_in_three_seconds_and_leaves_no_shared_memory(
    server, run_dir
):
    process, url = server
    members = family(process)
    assert len(members) == 2  # the server and its engine core: no worker process
    # At its end vLLM asks other holders of the port for their command lines. A zombie would give a
    # traceback in the log.
    held = {
        connection.laddr.port
        for connection in members[1].net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    }
    assert urlsplit(url).port not in held
    assert list(Path(tempfile.gettempdir()).glob(f"{run_directory.start_prefix(run_dir, 0)}*"))

    async def scenario(fleet):
        [running] = await in_flight(
            fleet, lambda part: sample(fleet, f"cut-off-{part}", max_tokens=490, ignore_eos=True)
        )
        mapped = in_shared_memory(members)
        took_s = await asyncio.to_thread(stop, process)
        await asyncio.gather(running, return_exceptions=True)
        return took_s, mapped

    took_s, mapped = drive(url, scenario)
    assert took_s < 3
    assert not [member for member in members if alive(member)]
    assert not list(Path(tempfile.gettempdir()).glob(f"{run_directory.start_prefix(run_dir)}*"))
    assert not [
        path.name
        for path in Path("/dev/shm").iterdir()
        if not path.name.startswith("orrery-") and named_by(path, members)
    ]
    assert not [path.name for path in mapped if path.exists()]


def test_a_killed_engine_core_ends_the_server_and_a_killed_server_the_engine_core(
    run_dir, tmp_path
):
    first = start_role("orrery.inference", run_dir, 1)
    interface, address = another_interface()
    second = start_role("orrery.inference", run_dir, 2, interface=interface)
    try:
        await_published(run_dir, "inference", 1, first)
        url = await_published(run_dir, "inference", 2, second)
        assert url.startswith(f"http://{address}:")
        assert listening(second) == {address}
        core = family(first)[1]
        core.kill()
        assert first.wait(5) == 1
        assert (
            "error: inference 1: the engine core died"
            in (run_dir / "logs/orrery.inference.1.log").read_text()
        )

        orphans = family(second)[1:]
        os.kill(second.pid, signal.SIGKILL)
        second.wait(5)
        end = time.monotonic() + 5
        while any(alive(orphan) for orphan in orphans) and time.monotonic() < end:
            time.sleep(0.02)
        assert not [orphan for orphan in orphans if alive(orphan)]
    finally:
        for process in (first, second):
            if process.poll() is None:
                process.kill()
                process.wait()
        # Left by the killed server.
        run_directory.remove_folders(
            run_directory.start_prefix(run_dir), Path(tempfile.gettempdir())
        )


def another_interface() -> tuple[str, str]:
    """Return name and IPv4 address of an interface, loopback only if there is no other."""
    up = {name for name, state in psutil.net_if_stats().items() if state.isup}
    every = {
        name: one.address
        for name, each in psutil.net_if_addrs().items()
        for one in each
        if one.family == socket.AF_INET
    }
    return next(
        ((name, address) for name, address in every.items() if name in up and name != "lo"),
        ("lo", "127.0.0.1"),
    )


def alive(process: psutil.Process) -> bool:
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def named_by(path: Path, members: list[psutil.Process]) -> bool:
    """vLLM and torch name much of their shared memory by process id."""
    return bool({str(member.pid) for member in members} & set(re.findall(r"[0-9]+", path.name)))


def flip_byte(published: Published, name: str) -> None:
    """Change one bit of one element of `name` in the published file, in place."""
    import json

    (file,) = Path(published.path).glob("*.safetensors")
    with file.open("r+b") as opened:
        header_bytes = int.from_bytes(opened.read(8), "little")
        start, _ = json.loads(opened.read(header_bytes))[name]["data_offsets"]
        opened.seek(8 + header_bytes + start + 17)
        byte = opened.read(1)[0]
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 1]))


def test_an_engine_client_closes_cleanly_without_having_been_used():
    asyncio.run(EngineClient("http://127.0.0.1:1").close())
