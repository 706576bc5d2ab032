"""An engine core's outputs for requests with whole answers: complete, in order, in few pieces."""

from types import SimpleNamespace

import numpy as np
import pytest
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.outputs import LogprobsLists

from orrery.inference.patches.vllm_answers import CHUNK, Held, _telling, written


def output(name, token, finish_reason=None, **fields):
    """A step's output of a request: one token, its log-prob −token, its route [token, token]."""
    logprobs = LogprobsLists(
        *(np.full((1, 1), value) for value in (token, -float(token))), np.full(1, 1)
    )
    routes = np.full((1, 1, 2), token, np.uint8)
    return EngineCoreOutput(
        name,
        [token],
        new_logprobs=logprobs,
        routed_experts=routes,
        finish_reason=finish_reason,
        **fields,
    )


def requests(*names, kind=RequestOutputKind.FINAL_ONLY, stop=None):
    return {
        name: SimpleNamespace(sampling_params=SimpleNamespace(output_kind=kind, stop=stop))
        for name in names
    }


def told(outputs, name):
    """Return (tokens, log-probs, routes) of one request from all its outputs."""
    mine = [each for each in outputs if each.request_id == name]
    tokens = [token for each in mine for token in each.new_token_ids]
    logprobs = np.concatenate([each.new_logprobs.logprobs[:, 0] for each in mine]).tolist()
    return (
        tokens,
        logprobs,
        np.concatenate([each.routed_experts for each in mine])[:, 0, 0].tolist(),
    )


def test_a_request_comes_whole_and_in_order_in_its_first_token_in_chunks_and_in_its_end():
    held, sent, running = Held(), [], requests("a", "b")
    length = 2 * CHUNK + 5
    for step in range(length):
        reason = FinishReason.LENGTH if step == length - 1 else None
        sent += [held.pass_on(0, [output("a", step, reason), output("b", step + 100)], running)]
    flat = [each for step in sent for each in step]
    assert [len(each.new_token_ids) for each in flat if each.request_id == "a"] == [
        1,
        CHUNK,
        CHUNK,
        4,
    ]
    assert told(flat, "a") == (
        list(range(length)),
        [-float(step) for step in range(length)],
        list(range(length)),
    )
    assert [each.finish_reason for each in flat if each.request_id == "a"] == [
        None,
        None,
        None,
        FinishReason.LENGTH,
    ]
    assert sent[0] and not sent[1] and "a" not in held.parts and "b" in held.parts


def test_before_a_call_all_that_is_held_goes_to_whom_it_belongs_and_requests_go_on():
    held, running = Held(), requests("a", "b")
    sent = [
        each
        for step in range(3)
        for client, name in ((0, "a"), (7, "b"))
        for each in held.pass_on(client, [output(name, step)], running)
    ]
    flushed = held.all()
    assert {
        client: [each.new_token_ids for each in outputs] for client, outputs in flushed.items()
    } == {0: [[1, 2]], 7: [[1, 2]]}
    assert not held.all() and not held.parts, "of a request that is aborted now nothing stays"
    sent += flushed[0] + held.pass_on(0, [output("a", 3)], running)
    sent += held.pass_on(0, [output("a", 4)], running) + held.pass_on(
        0, [output("a", 5, FinishReason.STOP)], running
    )
    assert told(sent, "a")[0] == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "fields",
    [{"kind": RequestOutputKind.DELTA}, {"kind": RequestOutputKind.CUMULATIVE}, {"stop": ["end"]}],
    ids=["delta", "cumulative", "stop string"],
)
def test_requests_that_are_read_as_they_grow_are_not_held(fields):
    held = Held()
    for step in range(4):
        assert len(held.pass_on(0, [output("a", step)], requests("a", **fields))) == 1


def test_log_probs_of_steps_with_requests_that_ask_for_more_are_cut_to_their_own():
    held, running = Held(), requests("a")
    sent = held.pass_on(0, [output("a", 0)], running)
    for step, width in ((1, 1), (2, 6), (3, 1)):
        one = output("a", step, FinishReason.STOP if step == 3 else None)
        rows = (np.full((1, width), step), np.full((1, width), -float(step)), np.full(1, 1))
        one.new_logprobs = LogprobsLists(*rows)
        sent += held.pass_on(0, [one], running)
    assert told(sent, "a")[:2] == ([0, 1, 2, 3], [0.0, -1.0, -2.0, -3.0])
    assert sent[-1].new_logprobs.logprobs.shape == (3, 1)


def test_an_output_that_carries_more_goes_at_once_after_what_was_held():
    held, running = Held(), requests("a")
    held.pass_on(0, [output("a", 0)], running)
    assert not held.pass_on(0, [output("a", 1)], running)
    more = output("a", 2)
    more.pooling_output = object()
    assert [each.new_token_ids for each in held.pass_on(0, [more], running)] == [[1], [2]]


def test_a_request_of_one_token_leaves_nothing_behind():
    held = Held()
    assert len(held.pass_on(0, [output("a", 0, FinishReason.STOP)], requests())) == 1
    assert not held.parts


def test_what_is_held_goes_out_before_a_call_with_the_name_of_its_weights():
    told = []
    core = SimpleNamespace(
        orrery_held=Held(),
        output_queue=SimpleNamespace(put_nowait=told.append),
        _weight_version="7",
    )
    for step in range(2):
        core.orrery_held.pass_on(3, [output("a", step)], requests("a"))
    _telling(lambda *_: told.append("handled"))(core, "not a request", None)
    (client, found), handled = told
    assert (client, [each.new_token_ids for each in found.outputs], handled) == (
        3,
        [[1]],
        "handled",
    )
    assert found.weight_version == "7"


def test_an_answer_says_tokens_logprobs_routes_and_versions():
    import base64
    import io
    import json

    logprob = {
        token: SimpleNamespace(logprob=value) for token, value in ((7, -0.5), (8, float("-inf")))
    }
    routes = np.arange(12, dtype=np.uint8).reshape(3, 2, 2)
    choice = SimpleNamespace(
        index=0, token_ids=(7, 8), finish_reason=None, logprobs=[{7: logprob[7]}, {8: logprob[8]}],
        routed_experts=routes,
        weight_versions=[SimpleNamespace(version="3", start=0, end=2)],
    )  # fmt: skip
    last = SimpleNamespace(
        outputs=[choice],
        prompt_token_ids=[1, 2],
        num_cached_tokens=1,
        kv_transfer_params={"x": [1]},
    )
    answer = json.loads(written(last, "r", last.outputs, "policy"))
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == 1 and answer[
        "kv_transfer_params"
    ] == {"x": [1]}
    found = answer["choices"][0]
    assert (found["token_ids"], found["finish_reason"]) == ([7, 8], "stop")
    assert found["logprobs"]["content"] == [
        {"token_id": 7, "logprob": -0.5},
        {"token_id": 8, "logprob": -9999.0},
    ]
    assert found["weight_versions"] == [{"version": "3", "start": 0, "end": 2}]
    assert np.array_equal(np.load(io.BytesIO(base64.b64decode(found["routed_experts"]))), routes)
    logprob[7].logprob = float("nan")
    with pytest.raises(ValueError, match="not a number"):
        written(last, "r", last.outputs)
