"""Run cuDNN attention on Hopper and later."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from orrery.kernels.attention.layout import (
    AttentionBackend,
    Gradients,
    Layout,
    Output,
    Saved,
    has_signatures,
)

log = logging.getLogger("orrery.kernels.attention")

_DENSE_SIGNATURES = {
    "_scaled_dot_product_cudnn_attention": "query key value attn_bias compute_log_sumexp "
    "dropout_p is_causal return_debug_mask scale",
    "_scaled_dot_product_cudnn_attention_backward": "grad_out query key value out logsumexp "
    "philox_seed philox_offset attn_bias cum_seq_q cum_seq_k max_q max_k dropout_p is_causal scale",
}

_LENGTH_MULTIPLE = 256


# cuDNN is not thread-safe, and backward passes run in other threads.
_lock = threading.Lock()


def runs_on(q: Tensor) -> bool:
    """Return whether cuDNN supports q. False in deterministic mode."""
    return (
        q.is_cuda
        and not torch.are_deterministic_algorithms_enabled()
        and q.dtype in (torch.bfloat16, torch.float16)
        and q.shape[-1] <= 128
        and q.shape[-1] % 8 == 0
        and torch.cuda.get_device_capability(q.device) >= (9, 0)
        and torch.backends.cudnn.is_available()
    )


class CudnnDense(AttentionBackend):
    """torch's cuDNN operator, for documents of equal length.

    Lengths must be multiples of 256, because cuDNN plans new shapes slowly.
    """

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        num_q, num_k = q.shape[0], k.shape[0]
        # cuDNN aligns causal masks top left, `Layout` bottom right. They agree if num_q == num_k.
        agrees = not layout.causal or num_q == num_k
        recurs = num_q % (_LENGTH_MULTIPLE * max(layout.num_documents, 1)) == 0
        fits = agrees and recurs and layout.is_dense(num_q, num_k)
        return runs_on(q) and fits and has_signatures(_DENSE_SIGNATURES)

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
        q_NHLD, k_NGMD, v_NGMD = (_batch(x, layout.num_documents) for x in (q_THD, k_SGD, v_SGD))
        out_NHLD, lse_NHL1, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(
            q_NHLD, k_NGMD, v_NGMD, None, True, 0.0, layout.causal, False, scale=layout.scale
        )
        lse_NHL = lse_NHL1.reshape(out_NHLD.shape[:3])
        return _packed(out_NHLD), lse_NHL.transpose(0, 1).reshape(q_THD.shape[1], q_THD.shape[0])

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        dout_NHLD, q_NHLD, k_NGMD, v_NGMD, out_NHLD = (
            _batch(x, layout.num_documents) for x in (dout_THD, q_THD, k_SGD, v_SGD, out_THD)
        )
        lse_NHL = lse_HT.unflatten(1, (layout.num_documents, -1)).transpose(0, 1).contiguous()
        tensors = (dout_NHLD, q_NHLD, k_NGMD, v_NGMD, out_NHLD, lse_NHL[..., None])
        # used only with dropout
        rng_state = torch.zeros((), dtype=torch.int64, device=q_THD.device)
        lengths = (q_NHLD.shape[2], k_NGMD.shape[2])
        options = (rng_state, rng_state, None, None, None, *lengths, 0.0, layout.causal)
        gradients = torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
            *tensors, *options, scale=layout.scale
        )
        dq_THD, dk_SGD, dv_SGD = (_packed(x) for x in gradients)
        return dq_THD, dk_SGD, dv_SGD


def _batch(x_THD: Tensor, num_documents: int) -> Tensor:
    return x_THD.unflatten(0, (num_documents, -1)).transpose(1, 2)


def _packed(x_NHLD: Tensor) -> Tensor:
    return x_NHLD.transpose(1, 2).flatten(0, 1)


@cache
def load_library() -> Any:
    """Return the `cudnn` package, or None if it is missing or too old."""
    try:
        import cudnn

        cudnn.pygraph.sdpa_backward, cudnn.diagonal_alignment.TOP_LEFT  # noqa: B018
    except Exception as error:
        log.info(
            "attention of packed documents runs without cuDNN: %s: %s "
            "(`pip install nvidia-cudnn-frontend`)",
            *(type(error).__name__, error),
        )
        return None
    return cudnn


class CudnnPacked(AttentionBackend):
    """NVIDIA's optional `cudnn` package, for packed documents.

    Sizes are rounded up, so that similar shapes share an execution plan.
    """

    def supports(self, q: Tensor, k: Tensor, layout: Layout) -> bool:
        agrees = layout.is_self_attention or not layout.causal
        return runs_on(q) and agrees and k.shape[0] > 0 and load_library() is not None

    def forward(self, q_THD: Tensor, k_SGD: Tensor, v_SGD: Tensor, layout: Layout) -> Output:
        shape = PlanShape.of(q_THD, k_SGD, layout)
        out_THD = torch.empty_like(q_THD)
        lse_TH = q_THD.new_empty(q_THD.shape[:2], dtype=torch.float32)
        data = {"q": q_THD, "k": k_SGD, "v": v_SGD, "o": out_THD, "stats": lse_TH}
        _run(_plan(shape, False), shape, layout, data)
        lse_HT = lse_TH.t().contiguous()
        if not layout.is_self_attention:
            alone_T = _without_keys(layout.cu_seqlens_q, layout.cu_seqlens_k, q_THD.shape[0])
            out_THD.masked_fill_(alone_T[:, None, None], 0.0)
            lse_HT.masked_fill_(alone_T, -torch.inf)
        return out_THD, lse_HT

    def backward(self, dout_THD: Tensor, saved: Saved, layout: Layout) -> Gradients:
        q_THD, k_SGD, v_SGD, out_THD, lse_HT = saved
        shape = PlanShape.of(q_THD, k_SGD, layout)
        dq_THD, dk_SGD, dv_SGD = (torch.empty_like(x) for x in (q_THD, k_SGD, v_SGD))
        data = {"q": q_THD, "k": k_SGD, "v": v_SGD, "o": out_THD, "do": dout_THD}
        data |= {"stats": lse_HT.t().contiguous(), "dq": dq_THD, "dk": dk_SGD, "dv": dv_SGD}
        _run(_plan(shape, True), shape, layout, data)
        if not layout.is_self_attention:
            cu_q, cu_k = layout.cu_seqlens_q, layout.cu_seqlens_k
            dq_THD.masked_fill_(_without_keys(cu_q, cu_k, q_THD.shape[0])[:, None, None], 0.0)
            unread_S = _without_keys(cu_k, cu_q, k_SGD.shape[0])
            for gradient_SGD in (dk_SGD, dv_SGD):
                gradient_SGD.masked_fill_(unread_S[:, None, None], 0.0)
        return dq_THD, dk_SGD, dv_SGD


class PlanShape(NamedTuple):
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
    def of(cls, q_THD: Tensor, k_SGD: Tensor, layout: Layout) -> "PlanShape":
        return cls(
            num_documents=1 << max(layout.num_documents - 1, 0).bit_length(),
            max_q=round_up(layout.max_q),
            max_k=round_up(layout.max_k),
            total_q=round_up(q_THD.shape[0]),
            total_k=round_up(k_SGD.shape[0]),
            num_heads=q_THD.shape[1],
            num_groups=k_SGD.shape[1],
            head_dim=q_THD.shape[2],
            causal=layout.causal,
            scale=layout.scale,
            dtype=q_THD.dtype,
            device=q_THD.device,
        )


def round_up(count: int) -> int:
    """Return `count` rounded up to 128, 192, 256, 384, 512, …"""
    power = max(128, 1 << max(count - 1, 0).bit_length())
    return power * 3 // 4 if power > 128 and count <= power * 3 // 4 else power


def _without_keys(cu_seqlens_q: Tensor, cu_seqlens_k: Tensor, num_q: int) -> Tensor:
    """Return bool [T], true for queries without keys. cuDNN leaves their outputs undefined."""
    empty_N = cu_seqlens_k.diff() == 0
    return empty_N.repeat_interleave(cu_seqlens_q.diff(), output_size=num_q)


class ExecutionPlan(NamedTuple):
    graph: Any
    tensors: dict[str, Any]
    workspace_bytes: int


@lru_cache(maxsize=256)
def _plan(shape: PlanShape, backward: bool) -> ExecutionPlan:
    cudnn = load_library()
    with _ready(shape.device) as handle:
        builder = _GraphBuilder(cudnn, shape, handle)
        if backward:
            builder.add_backward()
        else:
            builder.add_forward()
        graph = builder.graph
        graph.validate()
        graph.build_operation_graph()
        graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
        graph.check_support()
        graph.build_plans()
        return ExecutionPlan(graph, builder.tensors, graph.get_workspace_size())


class _GraphBuilder:
    def __init__(self, cudnn: Any, shape: PlanShape, handle: Any) -> None:
        self.shape, self.types = shape, cudnn.data_type
        half = {torch.bfloat16: self.types.BFLOAT16, torch.float16: self.types.HALF}
        self.io = half[shape.dtype]
        options = {} if handle is None else {"handle": handle}
        options |= dict.fromkeys(("intermediate_data_type", "compute_data_type"), self.types.FLOAT)
        self.graph = cudnn.pygraph(io_data_type=self.io, **options)
        self.tensors: dict[str, Any] = {}
        for name in ("lengths_q", "lengths_k"):
            self._add_integers(name, shape.num_documents, self.types.INT32)
        for name in ("q_offsets", "k_offsets", "stats_offsets"):
            self._add_integers(name, shape.num_documents + 1, self.types.INT64)
        self.options = {
            "attn_scale": shape.scale,
            "use_padding_mask": True,
            "seq_len_q": self.tensors["lengths_q"],
            "seq_len_kv": self.tensors["lengths_k"],
        }
        if shape.causal:
            self.options["diagonal_alignment"] = cudnn.diagonal_alignment.TOP_LEFT
            self.options["diagonal_band_right_bound"] = 0

    def add_forward(self) -> None:
        inputs = {name: self._input(name) for name in ("q", "k", "v")}
        out, stats = self.graph.sdpa(
            name="attention", **inputs, generate_stats=True, **self.options
        )
        self._set_output("o", out)
        dim, stride = self._stats_dims()
        stats.set_output(True).set_data_type(self.types.FLOAT).set_dim(dim).set_stride(stride)
        stats.set_ragged_offset(self.tensors["stats_offsets"])
        self.tensors["stats"] = stats

    def add_backward(self) -> None:
        inputs = {name: self._input(name) for name in ("q", "k", "v", "o")}
        dim, stride = self._stats_dims()
        stats = self.graph.tensor(name="stats", dim=dim, stride=stride, data_type=self.types.FLOAT)
        stats.set_ragged_offset(self.tensors["stats_offsets"])
        self.tensors["stats"] = stats
        gradients = self.graph.sdpa_backward(
            name="attention_backward",
            **inputs,
            dO=self._input("do"),
            stats=stats,
            max_total_seq_len_q=self.shape.total_q,
            max_total_seq_len_kv=self.shape.total_k,
            **self.options,
        )
        for name, gradient in zip(("dq", "dk", "dv"), gradients, strict=True):
            self._set_output(name, gradient)

    def _add_integers(self, name: str, count: int, data_type: Any) -> None:
        sizes = {"dim": [count, 1, 1, 1], "stride": [1, 1, 1, 1]}
        self.tensors[name] = self.graph.tensor(name=name, **sizes, data_type=data_type)

    def _input(self, name: str) -> Any:
        dim, stride, offsets = self._dims(name)
        tensor = self.graph.tensor(name=name, dim=dim, stride=stride, data_type=self.io)
        tensor.set_ragged_offset(offsets)
        self.tensors[name] = tensor
        return tensor

    def _set_output(self, name: str, tensor: Any) -> None:
        dim, stride, offsets = self._dims(name)
        tensor.set_output(True).set_data_type(self.io).set_dim(dim).set_stride(stride)
        tensor.set_ragged_offset(offsets)
        self.tensors[name] = tensor

    def _dims(self, name: str) -> tuple[list[int], list[int], Any]:
        shape, is_key = self.shape, name in ("k", "v", "dk", "dv")
        heads, longest = shape.num_heads, shape.max_q
        if is_key:
            heads, longest = shape.num_groups, shape.max_k
        row = heads * shape.head_dim
        dim = [shape.num_documents, heads, longest, shape.head_dim]
        offsets = self.tensors["k_offsets" if is_key else "q_offsets"]
        return dim, [longest * row, shape.head_dim, row, 1], offsets

    def _stats_dims(self) -> tuple[list[int], list[int]]:
        heads, longest = self.shape.num_heads, self.shape.max_q
        return [self.shape.num_documents, heads, longest, 1], [heads * longest, 1, heads, 1]


def _run(plan: ExecutionPlan, shape: PlanShape, layout: Layout, data: dict[str, Tensor]) -> None:
    cu_q, lengths_q = _pad_documents(layout.cu_seqlens_q, shape.num_documents)
    cu_k, lengths_k = cu_q, lengths_q
    if not layout.is_self_attention:
        cu_k, lengths_k = _pad_documents(layout.cu_seqlens_k, shape.num_documents)
    elements = (shape.num_heads * shape.head_dim, shape.num_heads)
    q_offsets, stats_offsets = _elements(shape.device, *elements) * cu_q
    (k_offsets,) = _elements(shape.device, shape.num_groups * shape.head_dim) * cu_k
    data = data | {"q_offsets": q_offsets, "k_offsets": k_offsets, "stats_offsets": stats_offsets}
    data |= {"lengths_q": lengths_q, "lengths_k": lengths_k}
    workspace = data["q"].new_empty(max(plan.workspace_bytes, 1), dtype=torch.uint8)
    with _ready(shape.device) as handle:
        tensors = {plan.tensors[name]: tensor for name, tensor in data.items()}
        plan.graph.execute(tensors, workspace, handle=handle)


def _pad_documents(cu_seqlens: Tensor, num_documents: int) -> tuple[Tensor, Tensor]:
    missing = num_documents + 1 - len(cu_seqlens)
    if missing:
        cu_seqlens = torch.cat((cu_seqlens, cu_seqlens[-1:].expand(missing)))
    cu_seqlens = cu_seqlens.to(torch.int32)
    return cu_seqlens, cu_seqlens.diff()


@cache
def _elements(device: torch.device, *elements: int) -> Tensor:
    return torch.tensor(elements, dtype=torch.int64, device=device)[:, None]


@contextmanager
def _ready(device: torch.device) -> Iterator[Any]:
    with torch.cuda.device(device), _lock:
        handle = _handle(device)
        load_library().set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
        yield handle


@cache
def _handle(device: torch.device) -> Any:
    return load_library().create_handle()
