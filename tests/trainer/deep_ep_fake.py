"""A stand-in for `deep_ep.Buffer` on CPUs, through pickled objects over gloo.

As in https://github.com/deepseek-ai/DeepEP (deep_ep/buffer.py): `dispatch` sends each token once to
each rank with experts for it, with its choices as that rank counts them, −1 elsewhere. `combine`
sends rows back and sums them. Each is the other's gradient. test_trainer_deep_ep.py compares the
parameters with the published ones. The assertions are DeepEP's own.
"""

import importlib.machinery
import sys
import types

import torch
import torch.distributed as dist


class Config:
    def get_nvl_buffer_size_hint(self, hidden_bytes, num_ranks):
        return hidden_bytes * num_ranks

    def get_rdma_buffer_size_hint(self, hidden_bytes, num_ranks):
        raise AssertionError("NVSHMEM is disabled during compilation")


class Buffer:
    num_sms = 20

    @staticmethod
    def set_num_sms(new_num_sms):
        assert new_num_sms % 2 == 0
        Buffer.num_sms = new_num_sms

    def __init__(
        self,
        group,
        num_nvl_bytes=0,
        num_rdma_bytes=0,
        low_latency_mode=False,
        num_qps_per_rank=24,
        allow_nvlink_for_low_latency_mode=True,
        allow_mnnvl=False,
        explicitly_destroy=False,
        comm=None,
    ):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    @staticmethod
    def get_dispatch_config(num_ranks):
        return Config()

    get_combine_config = get_dispatch_config

    def get_dispatch_layout(
        self,
        topk_idx,
        num_experts,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert topk_idx.is_contiguous() and topk_idx.dtype == torch.int64
        owner = topk_idx // (num_experts // self.size)
        is_in_rank = torch.stack([(owner == rank).any(1) for rank in range(self.size)], dim=1)
        return (
            is_in_rank.sum(0),
            None,
            torch.bincount(topk_idx.flatten(), minlength=num_experts),
            is_in_rank,
            None,
        )

    def dispatch(
        self,
        x,
        handle=None,
        num_tokens_per_rank=None,
        num_tokens_per_rdma_rank=None,
        is_token_in_rank=None,
        num_tokens_per_expert=None,
        topk_idx=None,
        topk_weights=None,
        expert_alignment=1,
        num_worst_tokens=0,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.is_contiguous()
        if handle is not None:
            assert topk_idx is None and topk_weights is None
            return (
                torch.cat(self._trade([x[tokens] for tokens in handle[0]])),
                None,
                None,
                None,
                None,
                None,
            )
        assert num_tokens_per_rank is not None and is_token_in_rank is not None
        assert topk_idx.is_contiguous() and topk_weights.is_contiguous()
        assert topk_weights.dtype == torch.float32
        num_local = len(num_tokens_per_expert) // self.size
        sent = [is_token_in_rank[:, rank].nonzero().flatten() for rank in range(self.size)]
        parcels = []
        for rank, tokens in enumerate(sent):
            here = topk_idx[tokens] // num_local == rank
            parcels.append(
                (
                    x[tokens],
                    torch.where(here, topk_idx[tokens] % num_local, -1),
                    torch.where(here, topk_weights[tokens], 0),
                    len(tokens),
                )
            )
        rows, experts, scores, counts = zip(*self._trade(parcels), strict=True)
        experts = torch.cat(experts)
        per_expert = torch.bincount(experts[experts >= 0], minlength=num_local).tolist()
        return (
            torch.cat(rows),
            experts,
            torch.cat(scores),
            per_expert,
            (sent, list(counts), len(x)),
            None,
        )

    def combine(
        self,
        x,
        handle,
        topk_weights=None,
        bias=None,
        config=None,
        previous_event=None,
        async_finish=False,
        allocate_on_comm_stream=False,
    ):
        assert x.is_contiguous()
        assert topk_weights is None or (
            topk_weights.is_contiguous() and topk_weights.dtype == torch.float32
        )
        sent, counts, num_tokens = handle

        def summed(values):
            total = values.new_zeros(num_tokens, *values.shape[1:])
            for tokens, part in zip(sent, self._trade(list(values.split(counts))), strict=True):
                total[tokens] += part
            return total

        return summed(x), None if topk_weights is None else summed(topk_weights), None

    def _trade(self, parcels):
        """Parcel i to rank i; from each rank, its parcel for this one."""
        everybodys = [None] * self.size
        dist.all_gather_object(everybodys, parcels, self.group)
        return [theirs[self.rank] for theirs in everybodys]


def install():
    module = types.ModuleType("deep_ep")
    module.__spec__, module.Buffer = importlib.machinery.ModuleSpec("deep_ep", None), Buffer
    sys.modules["deep_ep"] = module
