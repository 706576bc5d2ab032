"""The exchange by torch.distributed: rows in expert order go to their experts' ranks, are put in expert order there, and come back.

T tokens here · K experts a token · M = T·K rows here · N rows of this rank's experts, from all ranks · R ranks · E experts · D hidden

1. Rows in order of (expert, slot), so that each rank's rows are one run of them.
2. Counts travel first: torch's all-to-all wants the lengths of runs on the host. That is the one wait of the host for the device, and the
   device meanwhile puts rows in order. The backward pass knows the lengths and waits for nothing, and so does a recomputation.
3. Rows and scores travel, arrive in order of (source rank, expert, slot), and are put in order of (expert, source rank, slot).
4. What experts make of them goes the same way back; a token sums its rows in the order of its slots.

Every order is a stable sort: the same bits every time.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn

from orrery.kernels.expert_rows import combine_rows, gather_rows, order_slots, plan
from orrery.trainer.parallel import recomputation
from orrery.trainer.parallel.expert_parallel.rows import exchange_rows


class TorchExchange(nn.Module):
    def __init__(self, group: dist.ProcessGroup, num_experts: int) -> None:
        super().__init__()
        self.group, self.num_experts = group, num_experts

    @torch.compiler.disable
    def forward(
        self, x_TD: Tensor, score_TK: Tensor, expert_TK: Tensor, experts: nn.Module
    ) -> Tensor:
        rows = plan(expert_TK, self.num_experts)
        known = recomputation.recall()
        asked = self._ask(rows.ends_E) if known is None else None
        x_MD, score_M = gather_rows(x_TD, rows), order_slots(score_TK, rows)
        arriving_RE, (sent, arriving) = (
            known if asked is None else recomputation.keep((asked[0], asked[1].wait()))
        )
        x_ND, score_N = exchange_rows((x_MD, score_M), sent, arriving, self.group)

        local_E = torch.arange(arriving_RE.shape[1], device=x_TD.device).expand_as(arriving_RE)
        expert_N = local_E.flatten().repeat_interleave(
            arriving_RE.flatten(), output_size=sum(arriving)
        )
        here = plan(expert_N[:, None], arriving_RE.shape[1])
        y_ND = experts(gather_rows(x_ND, here), order_slots(score_N[:, None], here), here.ends_E)
        (y_MD,) = exchange_rows((combine_rows(y_ND, here),), arriving, sent, self.group)
        return combine_rows(y_MD, rows)

    def _ask(self, ends_E: Tensor) -> tuple[Tensor, "Lengths"]:
        """Rows that arrive, by source rank and expert of this rank; and lengths of runs on their way to the host."""
        counts_E = ends_E.diff(prepend=ends_E.new_zeros(1)).long()
        arriving_E = torch.empty_like(counts_E)
        dist.all_to_all_single(arriving_E, counts_E, group=self.group)
        counts_RE, arriving_RE = (
            counts.view(self.group.size(), -1) for counts in (counts_E, arriving_E)
        )
        return arriving_RE, Lengths(torch.stack((counts_RE.sum(1), arriving_RE.sum(1))))


class Lengths:
    """Numbers on their way from the device to the host, which does other things until it needs them."""

    def __init__(self, numbers: Tensor) -> None:
        self._event = None
        if numbers.is_cuda:
            self._numbers = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True).copy_(
                numbers, non_blocking=True
            )
            self._event = torch.cuda.Event()
            self._event.record()
        else:
            self._numbers = numbers

    def wait(self) -> list[list[int]]:
        if self._event is not None:
            self._event.synchronize()
        return self._numbers.tolist()
