"""`orrery bench rates`: measure FLOP/s and bytes/s, for `manifest/rates/<device>.json`.

With one device, the file repeats the known link rates.
"""

import argparse
import datetime
import json
import os
import socket
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

from orrery.kernels.attention import varlen_attention
from orrery.kernels.fp8 import products
from orrery.kernels.fp8.quantize import quantize, quantize_weight
from orrery.kernels.grouped_matmul import grouped_matmul
from orrery.manifest.devices import PCIE_BYTES, Rates, accelerator_of, rates_of
from orrery.manifest.errors import OrreryError

REPEATS = 7
# A loaded GPU lowers its clock after about a second. Each figure is of `REPEATS` runs after that.
HEAT_S, RUN_S = 2.0, 0.1
NUM_LINKED = 2
HEAD = 128  # width of attention's heads


@dataclass(frozen=True)
class Sizes:
    tokens: int
    shapes: tuple[tuple[int, int], ...]  # (outputs, inputs) of matrix products
    experts: tuple[int, int, int]  # (experts, outputs, inputs)
    lengths: tuple[int, int]  # document lengths in attention
    heads: int
    copied_bytes: int


LARGE = Sizes(
    16384,
    ((4096, 4096), (12288, 4096), (4096, 12288), (2048, 2048)),
    (64, 1536, 2048),
    (2048, 16384),
    32,
    1 << 30,
)
SMALL = Sizes(512, ((512, 512), (1024, 512)), (4, 256, 256), (128, 512), 4, 1 << 24)


def main() -> None:
    parser = argparse.ArgumentParser(prog="orrery bench rates", description=__doc__)
    parser.add_argument("--device", choices=["cpu"], help="measure the CPU")
    text = "write to FILE (default: <device>.json in the current folder)"
    parser.add_argument("--out", type=Path, metavar="FILE", help=text)
    arguments = parser.parse_args()
    on_cpu = arguments.device == "cpu" or not torch.cuda.is_available()
    try:
        name, rates = measure(torch.device("cpu" if on_cpu else "cuda"))
        write(arguments.out or Path(f"{name}.json"), rates, name)
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def measure(device: torch.device) -> tuple[str, Rates]:
    on_gpu = device.type == "cuda"
    sizes, dtype = (LARGE, torch.bfloat16) if on_gpu else (SMALL, torch.float32)
    model = torch.cuda.get_device_name(device) if on_gpu else "cpu"
    name = accelerator_of(model) if on_gpu else "cpu"
    if name is None:
        raise OrreryError(f"bench rates: {model} is no device of `orrery.manifest.devices`; add it")
    torch.manual_seed(1)
    dense = [product_flops(sizes.tokens, *shape, dtype, device) for shape in sizes.shapes]
    capability = torch.cuda.get_device_capability(device) if on_gpu else (0, 0)
    fp8 = [0.0]
    if capability == products.HOPPER and products.load():
        fp8 = [fp8_flops(sizes.tokens, *shape, device) for shape in sizes.shapes]
    limit, half = attention(sizes, dtype, device)
    source = f"measured on {model}, torch {torch.__version__}, {datetime.date.today()}"
    if not on_gpu:
        source = f"measured on {torch.get_num_threads()} threads of a CPU, {datetime.date.today()}"
    linked = not on_gpu or torch.cuda.device_count() >= NUM_LINKED
    if linked:
        link, collective = link_rates(device.type, sizes.copied_bytes)
    else:
        before = rates_of(name)
        link, collective = before.link_bytes, before.collective_bytes
        source += "; links not measured"
    host = host_bytes(sizes.copied_bytes, device) if on_gpu else PCIE_BYTES
    memory = memory_bytes(sizes.copied_bytes, device)
    rates = Rates(
        source=source,
        dense_flops=statistics.median(dense),
        fp8_flops=statistics.median(fp8),
        grouped_flops=grouped_flops(sizes, dtype, device),
        attention_flops=limit,
        attention_half_tokens=half,
        memory_bytes=memory,
        link_bytes=link,
        collective_bytes=collective,
        host_link_bytes=host if on_gpu else memory,
    )
    return name, rates


def write(path: Path, rates: Rates, device: str) -> None:
    for field, value in asdict(rates).items():
        print(f"{field:24}{value if isinstance(value, str) else format(value, '.4g')}")
    try:
        path.write_text(json.dumps(asdict(rates), indent=2) + "\n")
    except OSError as error:
        raise OrreryError(
            f"--out: {path} cannot be written ({error.strerror}); name a writable file"
        ) from None
    print(f"wrote {path}; plans read it once it is packages/orrery/manifest/rates/{device}.json")


def seconds(run: Callable[[], object], device: torch.device, heat_s: float | None = None) -> float:
    """Return the seconds of a call after `heat_s` seconds of calls, on a GPU HEAT_S by default."""
    if heat_s is None:
        heat_s = HEAT_S if device.type == "cuda" else 0.0
    _timed(run, device, 1)
    calls = max(1, int(RUN_S / _timed(run, device, 1))) if heat_s else 1
    begin_s = time.perf_counter()
    while time.perf_counter() - begin_s < heat_s:
        _timed(run, device, calls)
    return statistics.median(_timed(run, device, calls) for _ in range(REPEATS))


def _timed(run: Callable[[], object], device: torch.device, calls: int) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    begin_s = time.perf_counter()
    for _ in range(calls):
        run()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return (time.perf_counter() - begin_s) / calls


def show(what: str, rate: float, unit: str) -> float:
    print(f"{what:48}{rate:10.3g} {unit}", flush=True)
    return rate


def product_flops(
    tokens: int, outputs: int, inputs: int, dtype: torch.dtype, device: torch.device
) -> float:
    x = torch.randn(tokens, inputs, dtype=dtype, device=device)
    weight = torch.randn(outputs, inputs, dtype=dtype, device=device)
    flops = 2 * tokens * outputs * inputs / seconds(lambda: x @ weight.T, device)
    return show(f"product {tokens} × {inputs} × {outputs}, {dtype}", flops, "FLOP/s")


def fp8_flops(tokens: int, outputs: int, inputs: int, device: torch.device) -> float:
    x, _ = quantize(torch.randn(tokens, inputs, dtype=torch.bfloat16, device=device))
    weight, _ = quantize_weight(torch.randn(outputs, inputs, dtype=torch.bfloat16, device=device))
    library = products.load()
    run = partial(products.product, library, x, weight, torch.bfloat16)
    flops = 2 * tokens * outputs * inputs / seconds(run, device)
    return show(f"product {tokens} × {inputs} × {outputs}, FP8", flops, "FLOP/s")


def grouped_flops(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> float:
    experts, outputs, inputs = sizes.experts
    rows = 4 * sizes.tokens
    x = torch.randn(rows, inputs, dtype=dtype, device=device)
    weight = torch.randn(experts, outputs, inputs, dtype=dtype, device=device)
    ends = torch.arange(1, experts + 1, dtype=torch.int32, device=device) * (rows // experts)
    flops = 2 * rows * outputs * inputs / seconds(lambda: grouped_matmul(x, weight, ends), device)
    return show(f"products of {experts} experts, {rows} rows", flops, "FLOP/s")


def attention(sizes: Sizes, dtype: torch.dtype, device: torch.device) -> tuple[float, float]:
    """Fit FLOP/s = limit · L / (L + half) for documents of L tokens. Return (limit, half)."""
    rates = []
    for length in sizes.lengths:
        shape = (sizes.lengths[1], sizes.heads, HEAD)
        q, k, v = (
            torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3)
        )
        ends = torch.arange(0, shape[0] + 1, length, dtype=torch.int32, device=device)

        def both(
            q: Tensor = q, k: Tensor = k, v: Tensor = v, ends: Tensor = ends, longest: int = length
        ) -> None:
            varlen_attention(q, k, v, ends, longest).sum().backward()

        flops = 3.5 * 2 * shape[0] * length * sizes.heads * HEAD
        flops /= seconds(both, device)
        rates.append(show(f"attention, documents of {length}", flops, "FLOP/s"))
    (short, long), (low, high) = sizes.lengths, rates
    slope = max(0.0, (1 / low - 1 / high) / (1 / short - 1 / long))
    limit = 1 / max(1 / high - slope / long, 0.5 / high)
    return limit, slope * limit


def memory_bytes(num_bytes: int, device: torch.device) -> float:
    source = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    rate = 2 * num_bytes / seconds(lambda: target.copy_(source), device)
    return show("copy in memory, reads and writes", rate, "bytes/s")


def host_bytes(num_bytes: int, device: torch.device) -> float:
    there = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    host = torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)
    out = num_bytes / seconds(lambda: host.copy_(there, non_blocking=True), device)
    into = num_bytes / seconds(lambda: there.copy_(host, non_blocking=True), device)
    return show("slower of the copies to and from the host", min(out, into), "bytes/s")


def link_rates(kind: str, num_bytes: int) -> tuple[float, float]:
    """Return bytes/s of a send between two devices, and of an all-gather during matmuls."""
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    context = mp.get_context("spawn")
    answers = context.SimpleQueue()
    ranks = [
        context.Process(target=_linked_rank, args=(rank, port, kind, num_bytes, answers))
        for rank in range(NUM_LINKED)
    ]
    for each in ranks:
        each.start()
    for each in ranks:
        each.join()
    if any(each.exitcode for each in ranks):
        raise OrreryError("bench rates: a process that measures links failed; read its error above")
    link, collective = answers.get()
    show("send between two devices", link, "bytes/s")
    return link, show("all-gather beside products", collective, "bytes/s")


def _linked_rank(
    rank: int, port: int, kind: str, num_bytes: int, answers: "mp.SimpleQueue"
) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    device = torch.device(kind, rank) if kind == "cuda" else torch.device(kind)
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=NUM_LINKED)
    part = torch.zeros(num_bytes, dtype=torch.uint8, device=device)
    whole = torch.empty(NUM_LINKED * num_bytes, dtype=torch.uint8, device=device)
    x = torch.ones(4096 if kind == "cuda" else 256, 4096 if kind == "cuda" else 256, device=device)

    def send() -> None:
        if rank:
            dist.recv(part, 0)
        else:
            dist.send(part, 1)

    def gather() -> None:
        work = dist.all_gather_into_tensor(whole, part, async_op=True)
        for _ in range(4):
            x @ x
        assert work is not None
        work.wait()

    warnings.filterwarnings("ignore", "`torch.distributed.all_gather_into_tensor`", FutureWarning)
    # Both ranks must make equally many calls.
    found = [num_bytes / seconds(run, device, heat_s=0) for run in (send, gather)]
    if rank == 0:
        answers.put(tuple(found))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
