"""Tokens to expert order and back, and what an expert does between its two products. No host syncs, no atomics: the same bits every time.

T tokens · K experts a token · M = T·K routed rows · E experts · D hidden · I expert intermediate

    plan(expert_TK, E)               which slot stands at which row, and where each expert's rows end
    gather_rows(x_TD, plan)          x_MD: row m is the token of slot row_M[m]
    order_slots(score_TK, plan)      score_M: one number a slot, in row order
    swiglu_rows(gate_up_M2I, score_M)  act_MI = silu(gate) · up · score, so that the down projection's output is not needed by the backward
    combine_rows(y_MD, plan)         out_TD: for each token the sum of its K rows

A mixture is then
    rows = plan(expert_TK, E); x_MD = gather_rows(x_TD, rows)
    act_MI = swiglu_rows(grouped_matmul(x_MD, gate_up_E2ID, rows.ends_E), order_slots(score_TK, rows))
    out_TD = combine_rows(grouped_matmul(act_MI, down_EDI, rows.ends_E), rows)

- `reference.py` is plain torch with plain autograd: the referee.
- `rows.py` has a backward of its own for each, which torch.compile traces, and picks the form; `plain.py` holds its plain operations.
- `triton.py` holds the same as Triton kernels for a GPU; `operators.py` makes custom operators of them.
"""

from orrery.kernels.expert_rows.order import Plan, plan
from orrery.kernels.expert_rows.rows import combine_rows, gather_rows, order_slots, swiglu_rows

__all__ = ["Plan", "combine_rows", "gather_rows", "order_slots", "plan", "swiglu_rows"]
