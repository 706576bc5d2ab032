"""Tokens to expert order and back, and the activation between an expert's two products.

T tokens · K experts a token · M = T·K routed rows · E experts · D hidden · I expert intermediate

    rows = sort_by_expert(expert_TK, E)
    x_MD, score_M = gather_rows(x_TD, rows), order_slots(score_TK, rows)
    act_MI = swiglu_rows(grouped_matmul(x_MD, gate_up_E2ID, rows.ends_E), score_M)
    out_TD = combine_rows(grouped_matmul(act_MI, down_EDI, rows.ends_E), rows)

No host syncs and no atomics: results are bitwise reproducible.
"""

from orrery.kernels.expert_rows.dispatch import (
    RowOrder,
    combine_rows,
    gather_rows,
    order_slots,
    sort_by_expert,
    swiglu_rows,
)

__all__ = [
    "RowOrder",
    "combine_rows",
    "gather_rows",
    "order_slots",
    "sort_by_expert",
    "swiglu_rows",
]
