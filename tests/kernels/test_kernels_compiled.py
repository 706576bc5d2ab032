"""Test the machine code of Triton kernels for Hopper, compiled without a GPU.

The matrix products of sparse attention spill no registers, fit shared memory, and use wgmma.

The FP8 tests guard against a bug of ptxas 12.8. If a kernel stores a rounded tile twice, plain and
transposed, its machine code reads every second transposed byte from an unwritten register. The PTX
and the interpreter are right.
"""

import os
import re
import shutil
import subprocess
from pathlib import Path
from tempfile import NamedTemporaryFile

import pytest
import torch

triton = pytest.importorskip("triton")
if os.environ.get("TRITON_INTERPRET") == "1":
    pytest.skip("the interpreter compiles nothing", allow_module_level=True)

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402

from orrery.kernels import sparse_index_triton, sparse_mla_hopper, sparse_mla_triton  # noqa: E402
from orrery.kernels.fp8 import quantize_triton  # noqa: E402

TRITONS_OWN = Path(triton.__file__).parent / "backends/nvidia/bin"  # not on every GPU host
CUDA_PATH = os.pathsep.join([str(TRITONS_OWN), os.environ["PATH"], "/usr/local/cuda/bin"])
CUOBJDUMP = shutil.which("cuobjdump", path=CUDA_PATH) or "cuobjdump"
SHARED_BYTES = 227 * 1024  # shared memory of a thread block on Hopper
BF16, F32, I32, FP8 = "*bf16", "*fp32", "*i32", "*fp8e4nv"
POINTERS = {
    torch.bfloat16: BF16,
    torch.float32: F32,
    torch.int32: I32,
    torch.int64: "*i64",
    torch.float8_e4m3fn: FP8,
}
WRITES_NONE = ("ST", "RED", "BAR", "EXIT", "BRA", "NOP")
WRITES_PREDICATES = ("ISETP", "FSETP", "PLOP3")


def unwritten_reads(lines: list[str]) -> list[str]:
    """Return instructions that read a register before an earlier line writes it.

    A 16-bit write may keep the other half: `PRMT R5, R4, 0x7632, R5` is no read of R5. Lines after
    the last EXIT are subroutines, which may write their results at any call.
    """
    end = max((at for at, line in enumerate(lines) if line.endswith("EXIT")), default=len(lines))
    written = {"1"} | {each for line in lines[end:] for each in operands_of(line)[1]}
    found = []
    for line in lines[:end]:
        read, now_written = operands_of(line)
        if read - written:
            found.append(line)
        written |= now_written
    return found


def operands_of(line: str) -> tuple[set[str], set[str]]:
    """Return the numbers of the registers that an instruction reads and writes."""
    words = re.sub(r"^@!?U?P\w+\s+", "", line)
    name, _, rest = words.partition(" ")
    operands = [each.strip() for each in rest.split(",")]
    while operands and re.fullmatch(r"!?U?P\w", operands[0]):
        operands.pop(0)
    target = None
    if operands and not name.startswith(WRITES_NONE + WRITES_PREDICATES):
        target = re.fullmatch(r"R(\d+)", operands.pop(0))
    if name == "PRMT" and target and operands[-1].split(".")[0] == target[0]:
        operands.pop()
    read = {each for part in operands for each in re.findall(r"(?<!U)\bR(\d+)", part)}
    width = 4 if ".128" in name else 2 if re.search(r"\.64|WIDE", name) else 1
    first = int(target[1]) if target else 0
    return read, {str(first + index) for index in range(width)} if target else set()


class Compiler:
    """Replace a kernel: a launch `kernel[grid](...)` compiles the kernel without running it."""

    def __init__(self, kernel):
        self.kernel, self.compiled = kernel, []

    def __getitem__(self, grid):
        return self.launch

    def launch(self, *args, num_warps, num_stages=3, maxnreg=None, **constants):
        constants.pop("enable_fp_fusion", None)
        types = [POINTERS[x.dtype] if torch.is_tensor(x) else scalar_type(x) for x in args]
        aligned = [i for i, x in enumerate(args) if torch.is_tensor(x) or x % 16 == 0]
        names = self.kernel.arg_names
        source = ASTSource(
            fn=self.kernel,
            signature=dict(zip(names, types, strict=False)) | dict.fromkeys(constants, "constexpr"),
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
        )
        options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
        compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
        self.compiled.append(compiled)


def scalar_type(value) -> str:
    return "fp32" if isinstance(value, float) else "i32"


def stack_bytes(compiled) -> int:
    """Return the bytes of a thread's stack, for spilled registers."""
    usage = run_cuobjdump("-res-usage", compiled.asm["cubin"])
    return int(re.search(r"STACK:(\d+)", usage)[1])


def machine_code(kernel, types: dict[str, str], num_warps=8, **constants) -> list[str]:
    types = types | dict.fromkeys(constants, "constexpr")
    values = {(kernel.arg_names.index(name),): value for name, value in constants.items()}
    aligned = [i for i, kind in enumerate(types.values()) if kind != "constexpr"]
    source = ASTSource(
        fn=kernel,
        signature=types,
        constexprs=values,
        attrs={(index,): [["tt.divisibility", 16]] for index in aligned},
    )
    options = {"num_warps": num_warps}
    compiled = triton.compile(source, target=GPUTarget("cuda", 90, 32), options=options)
    return disassembled(compiled.asm["cubin"])


def run_cuobjdump(option: str, binary: bytes) -> str:
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        command = [CUOBJDUMP, option, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def disassembled(binary: bytes) -> list[str]:
    text = run_cuobjdump("-sass", binary)
    lines = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(.*?)\s*;", text)
    assert len(lines) > 100
    return lines


def test_a_read_of_an_unwritten_register_is_found():
    right = ["LDG.E.64 R4, desc[UR6][R1.64]", "PRMT R7, R4, 0x7632, R7", "@!P0 FADD R8, R5, R4"]
    assert unwritten_reads(right) == []
    wrong = ["PRMT R42, R42, 0x9910, RZ", "STS [R4+UR4], R5", "ISETP.NE.AND P0, PT, R9, RZ, PT"]
    assert unwritten_reads(right[:1] + wrong) == [wrong[0], wrong[2]]


def test_transposed_weights_come_from_written_registers():
    types = dict(weight=BF16, value=FP8, scale=F32, value_t=FP8, scale_t=F32, n="i32", k="i32")
    assert unwritten_reads(machine_code(quantize_triton._quantize_weight, types)) == []


@pytest.mark.parametrize("is_grouped", [False, True])
@pytest.mark.parametrize(("has_rows", "has_columns"), [(True, False), (False, True)])
@pytest.mark.parametrize("source", ["rows", "tokens", "activation"])
@pytest.mark.parametrize(("side", "num_warps"), [(32, 4), (64, 2), (64, 4)])
def test_rows_and_columns_come_from_written_registers(
    is_grouped, has_rows, has_columns, source, side, num_warps
):
    types = dict(x=BF16, value=FP8, scale=F32, value_t=FP8, scale_t=F32, tiles=I32)
    types |= {"token": "*i64", "score": F32}
    types |= dict.fromkeys(("num_rows", "width", "rows_stride", "length"), "i32")
    flags = dict(HAS_TOKENS=source == "tokens", HAS_SCORES=source == "activation")
    flags |= dict(SIDE=side, IS_GROUPED=is_grouped, HAS_ROWS=has_rows, HAS_COLUMNS=has_columns)
    code = machine_code(quantize_triton._quantize, types, num_warps, **flags)
    assert unwritten_reads(code) == []


SPARSE_MLA = (
    "attend",
    "delta",
    "query_gradients",
    "pair_gradients",
    "sum_pairs",
)


@pytest.mark.parametrize("num_heads", [64, 128])
def test_sparse_mla_at_true_widths_fits_hopper(num_heads, monkeypatch):
    kernels = {name: Compiler(getattr(sparse_mla_triton, f"_{name}")) for name in SPARSE_MLA}
    for name, kernel in kernels.items():
        monkeypatch.setattr(sparse_mla_triton, f"_{name}", kernel)
    q = torch.zeros(2, num_heads, 576, dtype=torch.bfloat16)
    kv, indices = torch.zeros(256, 576, dtype=torch.bfloat16), torch.zeros(2, 256).int()
    out, lse = sparse_mla_triton.forward(q, kv, indices, 0.1, 512)
    sparse_mla_triton.backward(out, q, kv, indices, out, lse, 0.1)
    for name, kernel in kernels.items():
        (compiled,) = kernel.compiled
        assert compiled.metadata.shared <= SHARED_BYTES and stack_bytes(compiled) == 0, name
        has_product = name not in ("delta", "sum_pairs")
        assert ("wgmma.mma_async" in compiled.asm["ptx"]) == has_product, name


def test_the_hopper_kernel_of_sparse_mla_compiles():
    pytest.importorskip("cuda.bindings")
    binary = sparse_mla_hopper.compiled()
    usage = re.search(r"REG:(\d+) STACK:(\d+)", run_cuobjdump("-res-usage", binary))
    assert int(usage[2]) <= 8, "at most one pair of registers spills"
    assert int(usage[1]) * sparse_mla_hopper.THREADS <= 65536
    products = [line.split()[0] for line in disassembled(binary) if line.startswith("HGMMA")]
    # Both consumers: z or dp, dq, dkv of 256 columns. Consumer 1: dkv of the last 64.
    assert len(products) == (36 + 8 + 16) + (32 + 8 + 16 + 4)


@pytest.mark.parametrize("num_heads", [32, 64])
def test_the_indexer_at_true_widths_fits_hopper(num_heads, monkeypatch):
    kernels = {}
    for name in ("_quantize", "_score", "_guess", "_collect", "_choose"):
        kernels[name] = Compiler(getattr(sparse_index_triton, name))
        monkeypatch.setattr(sparse_index_triton, name, kernels[name])
    q, k = torch.zeros(8, num_heads, 128).bfloat16(), torch.zeros(4096, 128).bfloat16()
    sparse_index_triton.quantize_index(q, *torch.zeros(2, 8, 1, 64).bfloat16(), True)
    weights, ends = torch.zeros(8, num_heads), torch.zeros(8).int()
    sparse_index_triton.select_keys(q, k, weights, ends, ends, 2048)
    for name, kernel in kernels.items():
        (compiled,) = kernel.compiled
        assert ("wgmma.mma_async" in compiled.asm["ptx"]) == (name == "_score"), name
        assert stack_bytes(compiled) == 0, name
        assert 2 * compiled.metadata.shared <= SHARED_BYTES, "two programs share a multiprocessor"
    collect = kernels["_collect"].compiled[0]
    assert collect.metadata.shared == 0, "a warp scans its scores without shared memory"
