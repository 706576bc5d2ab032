"""The canary against stand-in engines: the fleet's reaction to log-probs unlike the trainer's."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from orchestrator_engine_stand_in import HELD, StandIn, served
from replaced import replaced

from orrery.manifest.check import check
from orrery.orchestrator.engines.client import Canary
from orrery.orchestrator.engines.messages import START_VERSION, UpdateFailed, WeightsDiffer
from orrery.orchestrator.engines.pool import EnginePool
from orrery.wire.fingerprint import digest
from orrery.wire.rendezvous import canary_tokens
from orrery.wire.weight_wire import Published, WeightPublisher, WeightWatch

REPOSITORY = Path(__file__).resolve().parents[2]
FINGERPRINTS = {name: int(value, 16) for name, (value, _) in HELD.items()}
KNOWN = (-1.0, -2.0, -3.0)
PUBLISHED = Published(3, "/", FINGERPRINTS, digest(FINGERPRINTS), KNOWN)
CANARY = Canary((4, 5, 6, 7), 0.1)
ASKED = {
    "request_id": "canary-3",
    "token_ids": [4, 5, 6, 7],
    "cache_salt": "canary-3",
    "sampling_params": {
        "max_tokens": 1,
        "temperature": 1.0,
        "prompt_logprobs": 0,
        "output_kind": 2,
        "detokenize": False,
    },
}


async def update(engines, canary=CANARY, published=PUBLISHED, then=lambda fleet, error: None):
    """Bring the stand-ins to `published`; return the report or the exception."""
    async with served(engines) as urls, EnginePool(urls, urls[0], canary=canary) as fleet:
        try:
            outcome = await fleet.update(published)
        except UpdateFailed as error:
            outcome = error
        return outcome, fleet.is_proving, fleet.version


async def test_each_engine_is_asked_itself_after_it_has_resumed():
    engines = [StandIn(canary=[-1.0, -2.0, -3.03]), StandIn(canary=list(KNOWN))]
    report, is_proving, version = await update(engines)
    assert version == 3 and not is_proving and report.canary_s > 0
    assert report.canary_difference in (pytest.approx(0.01, rel=1e-4), 0.0)  # of the slowest engine
    for engine in engines:
        assert engine.paths()[-2:] == ["/resume", "/inference/v1/generate"]
        assert engine.asked[-1][1] == ASKED


async def test_rollouts_may_start_once_all_engines_have_resumed_and_before_the_canary():
    engines, seen = [StandIn(canary=list(KNOWN)), StandIn(canary=list(KNOWN))], []

    def on_resumed():
        seen.append([engine.paths()[-1] for engine in engines])

    async with served(engines) as urls, EnginePool(urls, urls[0], canary=CANARY) as fleet:
        await fleet.update(PUBLISHED, on_resumed)
    [paths] = seen
    assert "/resume" in paths and set(paths) <= {"/resume", "/inference/v1/generate"}


async def test_an_engine_that_computes_something_else_ends_the_run_and_is_paused_again():
    # Both pass attestation.
    engines = [StandIn(canary=list(KNOWN)), StandIn(canary=[-1.0, -2.0, -4.0])]
    error, is_proving, version = await update(engines)
    assert isinstance(error, WeightsDiffer) and version == START_VERSION
    assert (
        "engine 1: with version 3 its log-probs of the canary are 0.333 "
        "from the trainer's on average" in str(error)
    )
    assert "trainer.mismatch.canary_logprob_difference = 0.1" in str(error)
    assert is_proving, "or a batch of its tokens could be cut before the run has ended"
    assert (
        engines[1].paths()[-1] == "/pause?mode=keep&clear_cache=false"
        and engines[0].paths()[-1] == "/inference/v1/generate"
    )


@pytest.mark.parametrize("given", [[], [-1.0, -2.0], [-1.0, -2.0, float("nan")]])
async def test_an_engine_that_gives_too_few_log_probs_or_none_that_are_numbers_ends_the_run(given):
    error, _, version = await update([StandIn(canary=given)])
    assert isinstance(error, UpdateFailed) and "engine 0" in str(error) and version == START_VERSION


async def test_an_engine_that_refuses_the_canary_ends_the_run():
    error, _, _ = await update([StandIn(fail={"/inference/v1/generate": (400, {"error": "no"})})])
    assert (
        "engine 0 did not answer the canary of version 3: "
        "engine 0 refused request 'canary-3': no (HTTP 400)" in str(error)
    )


@pytest.mark.parametrize(
    ("canary", "published"),
    [(None, PUBLISHED), (CANARY, Published(3, "/", FINGERPRINTS, PUBLISHED.digest))],
)
async def test_without_a_bound_or_a_trainer_nothing_is_asked(canary, published):
    engine = StandIn()
    report, _, _ = await update([engine], canary, published)
    assert report.canary_difference is None and engine.paths()[-1] == "/resume"


def test_the_log_probs_travel_with_the_version(tmp_path):
    torch = pytest.importorskip("torch")
    publisher = WeightPublisher(tmp_path / "wire")
    publisher.publish(1, [("a", torch.zeros(2))], KNOWN)
    assert WeightWatch(tmp_path / "wire").latest().canary == KNOWN


def test_every_process_of_a_run_draws_the_same_tokens_and_they_fit():
    manifest = check(json.loads((REPOSITORY / "manifests/reverse_text.json").read_text()), "test")
    tokens = canary_tokens(manifest)
    assert (
        tokens == canary_tokens(manifest)
        and len(tokens) == 32
        and 0 <= min(tokens) <= max(tokens) < manifest.model.vocab_size
    )
    assert tokens != canary_tokens(manifest.model_copy(update={"seed": manifest.seed + 1}))
    short = replaced(manifest, "inference", max_model_len_tokens=8)
    assert len(canary_tokens(short)) == 7
    assert Canary.of(manifest) == Canary(
        tokens, manifest.trainer.mismatch.canary_logprob_difference
    )
    unbound = replaced(manifest, "trainer.mismatch", canary_logprob_difference=None)
    assert Canary.of(unbound) is None
    assert replace(CANARY, bound=1.0) != CANARY
