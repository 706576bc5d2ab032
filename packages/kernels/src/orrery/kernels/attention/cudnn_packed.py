"""cuDNN's attention on packed documents of any lengths, grouped heads as they are, through NVIDIA's `cudnn` package where it is installed.

Torch's own operator takes packed documents too, but up to torch 2.13 it builds its cuDNN plan anew in every call (some 40 ms), which
no training step can pay. Here plans are kept, and few: the number of documents, the longest of them and the number of tokens are
rounded up, and the documents that this adds are empty. Needs `pip install nvidia-cudnn-frontend`, never a hard import.
"""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orrery.kernels.attention import cudnn_dense
from orrery.kernels.attention.layout import Layout

log = logging.getLogger("orrery.kernels.attention")

# A plan and a handle are for one thread at a time, and backward passes run in threads of their own.
_one_at_a_time = threading.Lock()


@cache
def library() -> Any:
    """The `cudnn` package, or None where it is not installed or knows no packed backward pass; said once."""
    try:
        import cudnn

        cudnn.pygraph.sdpa_backward, cudnn.diagonal_alignment.TOP_LEFT  # noqa: B018
    except (
        Exception
    ) as error:  # an installed package that does not load must not stop a run that can do without
        log.info(
            "packed documents run without cuDNN: %s: %s (`pip install nvidia-cudnn-frontend`)",
            type(error).__name__,
            error,
        )
        return None
    return cudnn


def supports(q: Tensor, k: Tensor, layout: Layout) -> bool:
    # cuDNN lines up a causal mask's beginnings, this room its ends: the same thing only for one set of tokens.
    return (
        cudnn_dense.runs_on(q)
        and (layout.shared or not layout.causal)
        and k.shape[0] > 0
        and library() is not None
    )


class Shape(NamedTuple):
    """What a plan is built for."""

    num_documents: int
    max_q: int
    max_k: int
    total_q: int
    total_k: int
    num_heads: int
    num_groups: int
    head_dim: int
    causal: bool
    scale: float
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, q_THD: Tensor, k_SGD: Tensor, layout: Layout) -> "Shape":
        return cls(
            num_documents=1 << max(layout.num_documents - 1, 0).bit_length(),
            max_q=rounded(layout.max_q),
            max_k=rounded(layout.max_k),
            total_q=rounded(q_THD.shape[0]),
            total_k=rounded(k_SGD.shape[0]),
            num_heads=q_THD.shape[1],
            num_groups=k_SGD.shape[1],
            head_dim=q_THD.shape[2],
            causal=layout.causal,
            scale=layout.scale,
            dtype=q_THD.dtype,
            device=q_THD.device,
        )


def rounded(count: int) -> int:
    """The least of 128, 192, 256, 384, 512, 768, … that is not below `count`."""
    power = max(128, 1 << max(count - 1, 0).bit_length())
    return power * 3 // 4 if power > 128 and count <= power * 3 // 4 else power


def forward(q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    shape = Shape.of(q_THD, k_SGD, layout)
    out_THD = torch.empty_like(q_THD)
    lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
    _run(
        _plan(shape, False),
        shape,
        layout,
        {"q": q_THD, "k": k_SGD, "v": v_SGD, "o": out_THD, "stats": lse_TH},
    )
    lse_HT = lse_TH.t().contiguous()
    if not layout.shared:
        alone_T = _without_keys(q_THD, layout)
        out_THD.masked_fill_(alone_T[:, None, None], 0.0)
        lse_HT.masked_fill_(alone_T, -torch.inf)
    return out_THD, lse_HT


def backward(
    dout_THD: Tensor,
    q_THD: Tensor,
    k_SGD: Tensor,
    v_SGD: Tensor,
    out_THD: Tensor,
    lse_HT: Tensor,
    layout: Layout,
) -> tuple[Tensor, Tensor, Tensor]:
    shape = Shape.of(q_THD, k_SGD, layout)
    dq_THD, dk_SGD, dv_SGD = (torch.empty_like(x) for x in (q_THD, k_SGD, v_SGD))
    inputs = {
        "q": q_THD,
        "k": k_SGD,
        "v": v_SGD,
        "o": out_THD,
        "do": dout_THD,
        "stats": lse_HT.t().contiguous(),
    }
    _run(_plan(shape, True), shape, layout, inputs | {"dq": dq_THD, "dk": dk_SGD, "dv": dv_SGD})
    if not layout.shared:
        dq_THD.masked_fill_(_without_keys(q_THD, layout)[:, None, None], 0.0)
        alone_S = _without_keys(
            k_SGD,
            layout._replace(cu_seqlens_q=layout.cu_seqlens_k, cu_seqlens_k=layout.cu_seqlens_q),
        )
        for gradient_SGD in (dk_SGD, dv_SGD):
            gradient_SGD.masked_fill_(alone_S[:, None, None], 0.0)
    return dq_THD, dk_SGD, dv_SGD


def _without_keys(q_THD: Tensor, layout: Layout) -> Tensor:
    """Bool [T]: the queries whose document has no keys, where a kernel's outputs are of no meaning."""
    empty_N = layout.cu_seqlens_k.diff() == 0
    return empty_N.repeat_interleave(layout.cu_seqlens_q.diff(), output_size=q_THD.shape[0])


class Plan(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


@lru_cache(maxsize=256)
def _plan(shape: Shape, backward: bool) -> Plan:
    cudnn = library()
    with _ready(shape.device) as handle:
        graph, tensors = described(cudnn, shape, backward, handle)
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return Plan(graph, tensors, graph.get_workspace_size())


def described(
    cudnn: Any, shape: Shape, backward: bool, handle: Any = None
) -> tuple[Any, dict[str, Any]]:
    """cuDNN's graph of one pass, not built yet, and its tensors by name."""
    types = cudnn.data_type
    io = {torch.bfloat16: types.BFLOAT16, torch.float16: types.HALF}[shape.dtype]
    options = {} if handle is None else {"handle": handle}
    graph = cudnn.pygraph(
        io_data_type=io,
        intermediate_data_type=types.FLOAT,
        compute_data_type=types.FLOAT,
        **options,
    )
    n, tensors = shape.num_documents, {}

    def whole_numbers(name: str, count: int, data_type: Any) -> None:
        tensors[name] = graph.tensor(
            name=name, dim=[count, 1, 1, 1], stride=[1, 1, 1, 1], data_type=data_type
        )

    for side in ("q", "k"):
        whole_numbers(f"lengths_{side}", n, types.INT32)
    for offsets in ("q_offsets", "k_offsets", "stats_offsets"):
        whole_numbers(offsets, n + 1, types.INT64)

    # The strides of one document's [heads, tokens, head size] in the packed tensor; where a document begins, its offset says.
    queries = (
        [n, shape.num_heads, shape.max_q, shape.head_dim],
        [shape.max_q * shape.num_heads * shape.head_dim],
    )
    keys = (
        [n, shape.num_groups, shape.max_k, shape.head_dim],
        [shape.max_k * shape.num_groups * shape.head_dim],
    )
    dims = {
        "q": queries,
        "k": keys,
        "v": keys,
        "o": queries,
        "do": queries,
        "dq": queries,
        "dk": keys,
        "dv": keys,
    }
    strides = {
        name: [*outer, shape.head_dim, dim[1] * shape.head_dim, 1]
        for name, (dim, outer) in dims.items()
    }
    stats_dim, stats_stride = (
        [n, shape.num_heads, shape.max_q, 1],
        [shape.num_heads * shape.max_q, 1, shape.num_heads, 1],
    )

    def given(name: str) -> Any:
        tensors[name] = graph.tensor(
            name=name, dim=dims[name][0], stride=strides[name], data_type=io
        )
        tensors[name].set_ragged_offset(
            tensors["q_offsets" if dims[name] is queries else "k_offsets"]
        )
        return tensors[name]

    def found(name: str, tensor: Any) -> None:
        tensor.set_output(True).set_data_type(io).set_dim(dims[name][0]).set_stride(strides[name])
        tensor.set_ragged_offset(tensors["q_offsets" if dims[name] is queries else "k_offsets"])
        tensors[name] = tensor

    masks = {
        "use_padding_mask": True,
        "seq_len_q": tensors["lengths_q"],
        "seq_len_kv": tensors["lengths_k"],
    }
    if shape.causal:
        masks |= {
            "diagonal_alignment": cudnn.diagonal_alignment.TOP_LEFT,
            "diagonal_band_right_bound": 0,
        }
    inputs = {name: given(name) for name in ("q", "k", "v")}
    if not backward:
        out, stats = graph.sdpa(
            name="attention", **inputs, attn_scale=shape.scale, generate_stats=True, **masks
        )
        found("o", out)
        stats.set_output(True).set_data_type(types.FLOAT).set_dim(stats_dim).set_stride(
            stats_stride
        )
        stats.set_ragged_offset(tensors["stats_offsets"])
        tensors["stats"] = stats
        return graph, tensors
    tensors["stats"] = graph.tensor(
        name="stats", dim=stats_dim, stride=stats_stride, data_type=types.FLOAT
    )
    tensors["stats"].set_ragged_offset(tensors["stats_offsets"])
    gradients = graph.sdpa_backward(
        name="attention_backward",
        **inputs,
        o=given("o"),
        dO=given("do"),
        stats=tensors["stats"],
        attn_scale=shape.scale,
        max_total_seq_len_q=shape.total_q,
        max_total_seq_len_kv=shape.total_k,
        **masks,
    )
    for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
        found(name, gradient)
    return graph, tensors


def _run(plan: Plan, shape: Shape, layout: Layout, data: dict[str, Tensor]) -> None:
    cu_q, lengths_q = _padded(layout.cu_seqlens_q, shape.num_documents)
    cu_k, lengths_k = (
        (cu_q, lengths_q) if layout.shared else _padded(layout.cu_seqlens_k, shape.num_documents)
    )
    q_offsets, stats_offsets = (
        _strides(shape.device, shape.num_heads * shape.head_dim, shape.num_heads) * cu_q
    )
    (k_offsets,) = _strides(shape.device, shape.num_groups * shape.head_dim) * cu_k
    data = data | {"q_offsets": q_offsets, "k_offsets": k_offsets, "stats_offsets": stats_offsets}
    data |= {"lengths_q": lengths_q, "lengths_k": lengths_k}
    workspace = torch.empty(
        max(plan.workspace_bytes, 1), dtype=torch.uint8, device=data["q"].device
    )
    with _ready(shape.device) as handle:
        plan.graph.execute(
            {plan.tensors[name]: tensor for name, tensor in data.items()}, workspace, handle=handle
        )


def _padded(cu_seqlens: Tensor, num_documents: int) -> tuple[Tensor, Tensor]:
    """Offsets [num_documents + 1] and lengths [num_documents], i32, with empty documents at the end."""
    missing = num_documents + 1 - len(cu_seqlens)
    if missing:
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))
    cu_seqlens = cu_seqlens.to(torch.int32)
    return cu_seqlens, cu_seqlens.diff()


@cache
def _strides(device: torch.device, *elements: int) -> Tensor:
    """i64 [len(elements), 1]: the elements a token takes in a packed tensor."""
    return torch.tensor(elements, dtype=torch.int64, device=device)[:, None]


@contextmanager
def _ready(device: torch.device) -> Iterator[Any]:
    """cuDNN's handle on this device and its current stream, for this thread alone."""
    with torch.cuda.device(device), _one_at_a_time:
        handle = _handle(device)
        library().set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        yield handle


@cache
def _handle(device: torch.device) -> Any:
    return library().create_handle()
