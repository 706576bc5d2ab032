"""Bounds on the mismatch of engines and trainer: warning, end of the run, name of the engine."""

import logging

import numpy as np
import pytest
import torch
from replaced import replaced
from trainer_cases import MISMATCH, manifest

from orrery.manifest.errors import RunFailed
from orrery.trainer.learner import MIN_TOKENS, MismatchGuard
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import micro_batch
from orrery.wire.columns import Columns

WORLD = World(0, 1, torch.device("cpu"), None)
LENGTH = 1 + MIN_TOKENS // 2  # tokens of a sample; the first is the prompt


def batch(step, engines, versions, differences):
    """Return a micro-batch of one sample per engine, and the trainer's log-probs.

    These are the engines' log-probs plus `differences`.
    """
    n = len(engines)
    prompt = np.tile(np.arange(LENGTH) == 0, n)
    token = {
        "token_id": np.zeros(n * LENGTH, np.int32),
        "trained": ~prompt,
        "logprob": np.where(prompt, 0, -2).astype(np.float32),
        "version": np.where(prompt, -1, np.repeat(versions, LENGTH)).astype(np.int32),
    }
    columns = Columns(np.arange(n + 1) * LENGTH, token, {"engine": np.asarray(engines, np.int32)})
    return micro_batch(columns, step, WORLD.device), torch.tensor(differences).repeat_interleave(
        LENGTH - 1
    ) - 2.0


def guard(**bounds):
    spec = manifest(trainer={"mismatch": MISMATCH | bounds})
    spec = replaced(spec, "inference", num_replicas=4)
    return MismatchGuard(spec, WORLD, logging.getLogger("trainer.0"))


def judged(guard, step, *batches, kl=0.1):
    guard.clear()
    for each in batches:
        guard.add(*each)
    return guard.check(step, kl)


def test_an_engine_that_forges_is_named_with_its_version_though_the_batch_is_within_the_bound():
    good = [batch(9, [0, 1, 2], [8, 7, 8], [0.1, -0.1, 0.1]) for _ in range(8)]
    forged = [batch(9, [3, 3], [7, 8], [-6.0, 0.1]) for _ in range(2)]
    says = (
        rf"^step 9: log-probs of {4 * (LENGTH - 1)} tokens of engine 3 differ from the "
        rf"trainer's by 3\.05 on average, in version 7 by 6; "
        r"the mean difference of log-probs, 3\.05, is more than "
        r"trainer\.mismatch\.stop_logprob_difference = 2, so the batch is not trained"
    )
    with pytest.raises(RunFailed, match=says):
        judged(guard(), 9, *good, *forged)
    assert judged(guard(stop_logprob_difference=None), 9, *good, *forged) == pytest.approx(
        (24 * 0.1 + 2 * 6 + 2 * 0.1) / 28
    )


def test_engines_that_are_a_little_off_end_nothing_and_one_that_is_further_is_told(caplog):
    assert judged(guard(), 9, batch(9, [0, 1], [8, 8], [0.2, -0.2])) == pytest.approx(0.2)
    assert not caplog.records
    judged(guard(), 9, *[batch(9, [0, 1], [8, 6], [0.2, -1.5]) for _ in range(2)])
    [record] = caplog.records
    assert record.levelno == logging.WARNING
    assert (
        "tokens of engine 1 differ from the trainer's by 1.5 on average, in version 6 by 1.5"
        in record.message
    )
    assert "is more than trainer.mismatch.warn_logprob_difference = 1" in record.message


def test_the_kl_of_a_batch_warns_and_then_ends_the_run(caplog):
    each = [batch(9, [0, 1], [8, 8], [0.2, -0.3]) for _ in range(2)]
    judged(guard(), 9, *each, kl=3.8)
    assert "tokens of engine 1 differ from the trainer's by 0.3" in caplog.text
    assert (
        "the KL from engines to trainer, 3.8, is more than trainer.mismatch.warn_kl = 2"
        in caplog.text
    )
    with pytest.raises(
        RunFailed,
        match=r"engine 1 .* the KL from engines to trainer, 11, is more than "
        r"trainer\.mismatch\.stop_kl = 10",
    ):
        judged(guard(), 9, *each, kl=11.0)
    judged(guard(stop_kl=None), 9, *each, kl=11.0)


@pytest.mark.parametrize("engine", [-1, 4, 1 << 20])
def test_an_engine_that_does_not_name_itself_or_as_none_of_the_stage_is_told_as_unknown(engine):
    with pytest.raises(RunFailed, match="tokens of several or unknown engines"):
        judged(guard(), 9, *[batch(9, [0, engine], [8, 8], [0.1, 5.0]) for _ in range(2)])


def test_few_tokens_of_one_engine_are_judged_with_the_others():
    few = batch(9, [3], [8], [9.0])
    many = [batch(9, [0, 1, 2], [8, 8, 8], [0.1, 0.1, 0.1]) for _ in range(4)]
    assert judged(guard(), 9, few, *many) < 1
