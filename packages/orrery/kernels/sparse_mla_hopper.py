"""Run sparse MLA's backward kernel for Hopper, `sparse_mla_hopper.cu`, compiled by NVRTC."""

import ctypes
import logging
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

log = logging.getLogger("orrery.kernels.sparse_mla_hopper")

HOPPER = (9, 0)
HEADS, WIDTH, VALUE_WIDTH = 64, 576, 512
THREADS = 384
SHARED_BYTES = 28 * 8192 + 512  # 28 tiles, then lse and delta (float32) of each head
PRODUCT_COLUMNS = (32, 64, 128, 256)
OPTIONS = (b"--gpu-architecture=sm_90a", b"--std=c++17")


def supports(q_THD: Tensor, value_width: int) -> bool:
    """Return whether `pair_gradients` can run. The first call compiles it."""
    return (
        q_THD.is_cuda
        and q_THD.dtype == torch.bfloat16
        and q_THD.shape[1:] == (HEADS, WIDTH)
        and value_width == VALUE_WIDTH
        and _kernel(q_THD.device.index or 0) is not None
    )


def pair_gradients(
    q: Tensor,
    grad: Tensor,
    kv: Tensor,
    indices: Tensor,
    length: Tensor,
    lse: Tensor,
    delta: Tensor,
    place: Tensor,
    scale: float,
    grad_q: Tensor,
    pair: Tensor,
) -> None:
    """Write dq to `grad_q`, and dkv of pair (t, k) to `pair[place[t, k]]`.

    `sparse_mla_triton._pair_gradients` has the other arguments. All are contiguous. `supports` must
    be true.
    """
    kernel = _kernel(q.device.index or 0)
    tensors = (q, grad, kv, indices, length, lse, delta, place, grad_q, pair)
    values = (*(each.data_ptr() for each in tensors), scale, indices.shape[1])
    types = (*(ctypes.c_void_p for _ in tensors), ctypes.c_float, ctypes.c_int)
    stream = torch.cuda.current_stream(q.device).cuda_stream
    grid, block = (q.shape[0], 1, 1), (THREADS, 1, 1)
    driver = _bindings()[0]
    _check(driver.cuLaunchKernel(kernel, *grid, *block, SHARED_BYTES, stream, (values, types), 0))


def compiled() -> bytes:
    """Return the kernel's machine code, or raise RuntimeError with the compiler's log."""
    nvrtc = _bindings()[1]
    source = "".join(_product(n) for n in PRODUCT_COLUMNS) + Path(__file__).with_suffix(
        ".cu"
    ).read_text(encoding="utf-8")
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), b"sparse_mla_hopper.cu", 0, [], []))
    (error,) = nvrtc.nvrtcCompileProgram(program, len(OPTIONS), list(OPTIONS))
    if error:
        text = bytes(_check(nvrtc.nvrtcGetProgramLogSize(program)))
        _check(nvrtc.nvrtcGetProgramLog(program, text))
        raise RuntimeError(text.rstrip(b"\0").decode())
    binary = bytes(_check(nvrtc.nvrtcGetCUBINSize(program)))
    _check(nvrtc.nvrtcGetCUBIN(program, binary))
    return binary


def _product(columns: int) -> str:
    """Return the CUDA source of `wgmma_<columns>`, which adds a · b to `result`.

    If `accumulates` is 0, a · b replaces `result`. A transposed operand has rows of 128 bytes along
    its outer dimension.
    """
    count = columns // 2  # values per thread
    registers = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(result[{i}])' for i in range(count))
    a, b, flag, transposed_a, transposed_b = (f"%{count + i}" for i in range(5))
    return f"""
template <int TRANSPOSED_A, int TRANSPOSED_B>
__device__ __forceinline__ void wgmma_{columns}(
    float (&result)[{count}], unsigned long long a, unsigned long long b, int accumulates) {{
  asm volatile(
      "{{ .reg .pred p; setp.ne.b32 p, {flag}, 0; "
      "wgmma.mma_async.sync.aligned.m64n{columns}k16.f32.bf16.bf16 "
      "{{{registers}}}, {a}, {b}, p, 1, 1, {transposed_a}, {transposed_b}; }}"
      : {results}
      : "l"(a), "l"(b), "r"(accumulates), "n"(TRANSPOSED_A), "n"(TRANSPOSED_B));
}}
"""


@cache
def _kernel(device: int) -> Any | None:
    if torch.cuda.get_device_capability(device) != HOPPER:
        return None
    try:
        driver, _ = _bindings()
        with torch.cuda.device(device):
            torch.cuda.current_stream().synchronize()  # creates the device's context
            module = _check(driver.cuModuleLoadData(compiled()))
        kernel = _check(driver.cuModuleGetFunction(module, b"pair_gradients"))
        limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        _check(driver.cuFuncSetAttribute(kernel, limit, SHARED_BYTES))
        return kernel
    except (ImportError, OSError, RuntimeError) as error:
        log.warning("the Hopper kernel of sparse MLA cannot run, so Triton is used: %s", error)
        return None


def _bindings() -> tuple[Any, Any]:
    from cuda.bindings import driver, nvrtc

    return driver, nvrtc


def _check(result: tuple[Any, ...]) -> Any:
    error, *values = result
    if error:
        raise RuntimeError(f"a CUDA call failed: {error}")
    return values[0] if values else None
