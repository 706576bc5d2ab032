"""Tokens to expert order and back, and the activation between an expert's two products.

T tokens · K experts a token · M = T·K routed rows · E experts · D hidden · I expert intermediate

A mixture of experts is
    rows = plan(expert_TK, E); x_MD = gather_rows(x_TD, rows); score_M = order_slots(score_TK, rows)
    act_MI = swiglu_rows(grouped_matmul(x_MD, gate_up_E2ID, rows.ends_E), score_M)
    out_TD = combine_rows(grouped_matmul(act_MI, down_EDI, rows.ends_E), rows)

`reference.py` is plain autograd, `dispatch.py` the public functions, `plain.py` the `aten` backend,
`operators.py` and `triton.py` the Triton backend. No host syncs, no atomics: results are bitwise
reproducible.
"""

from orrery.kernels.expert_rows.dispatch import (
    Plan,
    combine_rows,
    gather_rows,
    order_slots,
    plan,
    swiglu_rows,
)

__all__ = ["Plan", "combine_rows", "gather_rows", "order_slots", "plan", "swiglu_rows"]
