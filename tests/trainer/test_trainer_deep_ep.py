"""Calls of DeepEP match its published interface.

The table holds the parameters of deep_ep/buffer.py in https://github.com/deepseek-ai/DeepEP,
release v1.2.1 (commit 9af0e0d0). Version 2.1.0 (commit dd758caf, deep_ep/buffers/legacy.py) adds a
parameter to `Buffer.__init__`.
"""

import inspect
import sys
from inspect import Parameter, Signature

import deep_ep_fake
import pytest
import torch

from orrery.models.layers import Experts
from orrery.trainer.parallel import expert_parallel
from orrery.trainer.parallel.expert_parallel import make_exchange

TAIL = "config previous_event async_finish allocate_on_comm_stream"
# (parameters without default, parameters with default, number of returned values)
PUBLISHED = {
    "__init__": (
        "self group",
        "num_nvl_bytes num_rdma_bytes low_latency_mode num_qps_per_rank "
        "allow_nvlink_for_low_latency_mode allow_mnnvl explicitly_destroy comm",
        0,
    ),
    "set_num_sms": ("new_num_sms", "", 0),
    "get_dispatch_config": ("num_ranks", "", 1),
    "get_combine_config": ("num_ranks", "", 1),
    "get_dispatch_layout": (
        "self topk_idx num_experts",
        "previous_event async_finish allocate_on_comm_stream",
        5,
    ),
    "dispatch": (
        "self x",
        "handle num_tokens_per_rank num_tokens_per_rdma_rank is_token_in_rank "
        f"num_tokens_per_expert topk_idx topk_weights expert_alignment num_worst_tokens {TAIL}",
        6,
    ),
    "combine": ("self x handle", f"topk_weights bias {TAIL}", 3),
}
NEWER_INIT = PUBLISHED["__init__"][1].replace(" comm", " enable_shrink comm")
VERSIONS = {
    "1.2.1": PUBLISHED,
    "2.1.0": PUBLISHED | {"__init__": ("self group", NEWER_INIT, 0)},
}


def signature(required: str, optional: str) -> Signature:
    kind = Parameter.POSITIONAL_OR_KEYWORD
    return Signature(
        [Parameter(name, kind) for name in required.split()]
        + [Parameter(name, kind, default=None) for name in optional.split()]
    )


def shape(of: Signature) -> list[tuple]:
    return [(each.name, each.kind, each.default is each.empty) for each in of.parameters.values()]


class OneRank:
    """A process group of one rank."""

    def rank(self):
        return 0

    def size(self):
        return 1


@pytest.fixture
def calls(monkeypatch):
    """Return the list of all calls of the stand-in: method, arguments, result."""
    seen = []

    def recording(name):
        method = inspect.getattr_static(deep_ep_fake.Buffer, name)
        is_static = isinstance(method, staticmethod)
        run = method.__func__ if is_static else method

        def recorded(*args, **options):
            result = run(*args, **options)
            seen.append((name, args, options, result))
            return result

        return staticmethod(recorded) if is_static else recorded

    monkeypatch.setitem(sys.modules, "deep_ep", None)  # removes the stand-in after the test
    deep_ep_fake.install()
    for name in PUBLISHED:
        monkeypatch.setattr(deep_ep_fake.Buffer, name, recording(name))
    monkeypatch.setattr(deep_ep_fake.Buffer, "num_sms", 20)
    monkeypatch.setattr(deep_ep_fake.Buffer, "_trade", lambda self, parcels: parcels)
    yield seen
    expert_parallel._buffer.cache_clear()


def test_the_stand_in_has_just_the_published_parameters():
    for name, (required, optional, _) in PUBLISHED.items():
        found = inspect.signature(inspect.getattr_static(deep_ep_fake.Buffer, name))
        assert shape(found) == shape(signature(required, optional)), name


@pytest.mark.parametrize("version", VERSIONS)
def test_calls_of_an_exchange_bind_to_the_published_parameters(calls, version):
    experts = Experts(4, 16, 8)
    for weight in experts.parameters():
        torch.nn.init.normal_(weight, generator=torch.Generator().manual_seed(1))
    x_TD = torch.randn(5, 16, generator=torch.Generator().manual_seed(2), requires_grad=True)
    score_TK = torch.rand(5, 2, generator=torch.Generator().manual_seed(3), requires_grad=True)
    expert_TK = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 0], [1, 3]])
    exchange = make_exchange("deepep", OneRank(), 4, num_sms=24)
    exchange(x_TD, score_TK, expert_TK, experts).sum().backward()
    assert x_TD.grad is not None and score_TK.grad is not None
    assert {name for name, *_ in calls} == set(PUBLISHED)
    assert [name for name, *_ in calls].count("dispatch") == 2  # forward and backward
    for name, args, options, result in calls:
        required, optional, num_values = VERSIONS[version][name]
        signature(required, optional).bind(*args, **options)
        if num_values > 1:
            assert len(result) == num_values, name
