"""Check and time sparse latent attention on one GPU: 64 heads, key width 576, value width 512.

First the forward and backward passes of each backend are compared with the float32 reference on few
queries. Two runs must have equal bits. Then 4,096 queries that read 2,048 keys each are timed. They
are the last tokens of a document of 8,192 to 131,072 keys. The keys read are random, or (`local`)
half recent and half the same for all queries. The last rows vary the tile sizes. The bound is the
larger of two times: FLOPs at 650 TFLOP/s, and moving each tensor once at 4.2 TB/s. No row starts
after `--seconds`. A failed row records its error.

    python benchmarks/kernels/sparse_mla.py
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import (
    BYTES,
    GEMM_FLOPS,
    guarded,
    limited_run,
    milliseconds,
    record_row,
    relative_error,
    seconds,
)

from orrery.kernels import flash_mla, sparse_mla_hopper
from orrery.kernels.sparse_mla import HAS_TRITON, Backend, reference_sparse_mla, sparse_mla

# TFLOP/s of the fastest backend at 131,072 keys. The recorded value is the backward pass, random.
GOALS = {
    "forward, random": 520.0,
    "forward, local": 570.0,
    "backward, random": 300.0,
    "backward, local": 400.0,
}
TOLERANCE = 1.5e-2  # relative. Probabilities, logit and key gradients round to bfloat16 (2⁻⁹ each)
SCALE = 256**-0.5


class Shape(NamedTuple):
    queries: int
    keys: int
    top_k: int
    heads: int = 64
    width: int = 576
    value_width: int = 512

    @property
    def forward_flops(self) -> float:
        return 2.0 * self.queries * self.heads * self.top_k * (self.width + self.value_width)

    @property
    def backward_flops(self) -> float:
        per_key = 3 * self.width + 2 * self.value_width
        return 2.0 * self.queries * self.heads * self.top_k * per_key

    def bound_ms(self, flops: float, num_passes: int) -> float:
        """Return the least time of `flops` FLOPs and of memory traffic, whichever is longer.

        `num_passes` 1 (forward) moves q, kv, out and indices once, 2 (backward) also gradients.
        """
        rows = self.queries * self.heads * (self.width + self.value_width) + self.keys * self.width
        num_bytes = 2 * num_passes * rows + 4 * self.queries * self.top_k
        return 1e3 * max(flops / GEMM_FLOPS, num_bytes / BYTES)


CHECKED = (
    Shape(33, 300, 128),
    Shape(24, 300, 128, heads=128),
    Shape(70, 200, 40, 16, 96, 64),
    Shape(64, 8_192, 2_048),
)
TIMED = (Shape(4_096, 8_192, 2_048), Shape(4_096, 32_768, 2_048), Shape(4_096, 131_072, 2_048))
RANK = Shape(32_768, 131_072, 2_048)  # one of four context-parallel ranks
SMOKE = Shape(8, 40, 16, 16, 48, 32)

FORWARD_TILES = ((64, 16, 2), (32, 8, 2), (32, 8, 3))
BACKWARD_TILES: dict[str, tuple[Any, ...]] = {
    "pairs": ((64, 64, 4, 2), (64, 64, 4, 4), (64, 32, 4, 3), (128, 64, 4, 2), (128, 32, 4, 3)),
    "sums": ((4, 1024, 4, 3), (4, 1024, 2, 3), (2, 1024, 2, 3), (16, 64, 1, 3), (4, 512, 2, 3)),
    "queries": ((64, 128, 4, 3), (64, 128, 8, 3)),
    "chunk_rows": (2**21, 2**23),
}


def example(shape: Shape, kind: str, device: str) -> list[Tensor]:
    """Return q [queries, heads, width], kv [keys, width], the output's gradient and key indices.

    Queries are the last tokens of one document. `kind` is that of `chosen`.
    """
    generator = torch.Generator(device).manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(*sizes, generator=generator, device=device).bfloat16()

    queries, keys, top_k = shape[:3]
    rows = (queries, shape.heads)
    return [
        normal(*rows, shape.width),
        normal(keys, shape.width),
        normal(*rows, shape.value_width),
        chosen(queries, keys, top_k, kind, generator),
    ]


def chosen(queries: int, keys: int, top_k: int, kind: str, generator: torch.Generator) -> Tensor:
    """Return key indices, i32 [queries, top_k].

    `kind` "distinct" never repeats a key, and −1 fills the rest. "random" may repeat keys. "local"
    has the query's most recent keys, and as many that all queries share.
    """
    device = generator.device
    last = torch.arange(keys - queries, keys, device=device)[:, None]
    if kind == "distinct":
        noise = torch.rand(queries, keys, generator=generator, device=device)
        noise = noise.masked_fill(torch.arange(keys, device=device) > last, 2.0)
        value, index = noise.topk(top_k, largest=False)
        return torch.where(value < 2.0, index, -1).int()
    if kind == "random":
        drawn = torch.rand(queries, top_k, generator=generator, device=device)
        index = (drawn * (last + 1)).long()
    else:
        near = (last - torch.arange(top_k // 2, device=device)).clamp(min=0)
        far = torch.randperm(keys // 4, generator=generator, device=device)[: top_k // 2]
        index = torch.cat((near, far.expand(queries, -1)), dim=1)
    return index.sort(dim=1).values.int()


def outcome(function: Callable[..., Any], data: list[Tensor], width: int, **options: Any) -> Any:
    q, kv = (x.detach().requires_grad_() for x in data[:2])
    out, lse = function(q, kv, data[3], SCALE, width, **options)
    return [out.detach(), lse, *torch.autograd.grad(out, (q, kv), data[2].to(out.dtype))]


def checked(shape: Shape, backend: Backend, device: str) -> dict[str, Any]:
    data = example(shape, "distinct", device)
    wide = [x.float() if x.is_floating_point() else x for x in data]
    wanted = outcome(reference_sparse_mla, wide, shape.value_width)
    found = outcome(sparse_mla, data, shape.value_width, backend=backend)
    again = outcome(sparse_mla, data, shape.value_width, backend=backend)
    errors = [relative_error(one, other) for one, other in zip(found, wanted, strict=True)]
    same = [torch.equal(one, other) for one, other in zip(found, again, strict=True)]
    passes = all(error <= TOLERANCE for error in errors) and all(same)
    return {"unit": "largest error", "value": max(errors), "errors": errors, "passes": passes}


def forward_time(
    shape: Shape, data: list[Tensor], backend: Backend, tiles: Any = None
) -> dict[str, Any]:
    q, kv, _, indices = data
    given = (q, kv, indices, SCALE, shape.value_width)
    if tiles is None:
        ms = milliseconds(lambda: sparse_mla(*given, backend), 5)
    else:
        from orrery.kernels import sparse_mla_triton

        sizes = sparse_mla_triton.TILES._replace(forward=tiles)
        ms = milliseconds(lambda: sparse_mla_triton.forward(*given, sizes), 5)
    flops = shape.forward_flops
    return {
        "value": flops / ms / 1e9,
        "ms": ms,
        "share_of_bound": shape.bound_ms(flops, 1) / ms,
    }


def backward_call(shape: Shape, data: list[Tensor], backend: Backend, tiles: Any = None) -> Any:
    q, kv, grad, indices = data
    out, lse = sparse_mla(q, kv, indices, SCALE, shape.value_width, backend)
    if backend == "plain":
        given = (grad, q, kv, indices, out, lse, SCALE, "plain")
        return lambda: torch.ops.orrery.sparse_mla_backward(*given)
    from orrery.kernels import sparse_mla_triton

    tiles = tiles or sparse_mla_triton.TILES
    return lambda: sparse_mla_triton.backward(grad, q, kv, indices, out, lse, SCALE, tiles)


def backward_time(
    shape: Shape, data: list[Tensor], backend: Backend, tiles: Any = None
) -> dict[str, Any]:
    call = backward_call(shape, data, backend, tiles)
    ms, flops = milliseconds(call, 5), shape.backward_flops
    first, second = call(), call()
    same = all(torch.equal(one, other) for one, other in zip(first, second, strict=True))
    bound_ms = shape.bound_ms(flops, 2)
    return {
        "value": flops / ms / 1e9,
        "ms": ms,
        "share_of_bound": bound_ms / ms,
        "equal_bits": same,
    }


def parts(shape: Shape, data: list[Tensor], backend: Backend) -> dict[str, Any]:
    """Return a row: ms of device time of one backward pass, and of its 12 longest kernels."""
    call = backward_call(shape, data, backend)
    call()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    times = {event.key[:60]: event.device_time_total / 1e3 for event in profile.key_averages()}
    largest = dict(sorted(times.items(), key=lambda one: -one[1])[:12])
    return {"unit": "ms", "value": sum(times.values()), "parts": largest}


def without_hopper() -> Any:
    """Return the tiles of Triton's backward pass, which then runs at the widths of GLM-5 too."""
    from orrery.kernels.sparse_mla_triton import TILES

    return TILES._replace(uses_hopper=False)


def tuned(shape: Shape, data: dict[str, list[Tensor]], until_s: float) -> list[dict[str, Any]]:
    """Return rows that time tile sizes, for each kind of indices in `data`.

    A backward row changes one field of Triton's tiles. The last rows take the fastest of each.
    """
    rows, tiles = [], without_hopper()
    best = tiles
    for kind, tensors in data.items():
        for size in FORWARD_TILES:
            name = f"forward, triton, {kind}, tiles {size}"
            rows.append(guarded(name, until_s, forward_time, shape, tensors, "triton", size))
    for part, choices in BACKWARD_TILES.items():
        found: dict[Any, float] = {}
        for choice in (getattr(tiles, part), *choices):
            values = []
            for kind, tensors in data.items():
                name = f"backward, triton, {kind}, {part} {choice}"
                given = (shape, tensors, "triton", tiles._replace(**{part: choice}))
                rows.append(guarded(name, until_s, backward_time, *given))
                values.append(rows[-1]["value"] or 0.0)
            found[choice] = min(values) and sum(values)
        best = best._replace(**{part: max(found, key=lambda choice: found[choice])})
    for kind, tensors in data.items():
        name = f"backward, triton, {kind}, the fastest tiles"
        row = guarded(name, until_s, backward_time, shape, tensors, "triton", best)
        rows.append(row | {"tiles": repr(best)})
    print(best)
    return rows


def backward_kernel(device: str) -> str:
    """Return the backward pass's kernel at the widths of GLM-5: hopper, triton or plain."""
    if device != "cuda" or not HAS_TRITON:
        return "plain"
    q = torch.empty(1, 64, 576, dtype=torch.bfloat16, device=device)
    return "hopper" if sparse_mla_hopper.supports(q, 512) else "triton"


def check_all(backends: list[Backend], smoke: bool, device: str, until_s: float) -> list[Any]:
    rows = []
    for shape in (SMOKE,) if smoke else CHECKED:
        for backend in backends:
            if backend == "flash_mla" and shape[3:] != (64, 576, 512):
                continue
            name = f"check, {backend}, {tuple(shape)}"
            rows.append(guarded(name, until_s, checked, shape, backend, device))
    return rows


def time_all(backends: list[Backend], smoke: bool, device: str, until_s: float) -> list[Any]:
    rows, shapes = [], (SMOKE,) if smoke else TIMED
    for shape in shapes:
        for kind in ("random", "local"):
            data = example(shape, kind, device)
            where = f"{kind}, {shape.keys} keys"
            for backend in backends:
                name = f"forward, {backend}, {where}"
                rows.append(guarded(name, until_s, forward_time, shape, data, backend))
            given = (shape, data, backends[-1])
            if (kernel := backward_kernel(device)) == "hopper":
                name = f"backward, triton, {where}"
                rows.append(guarded(name, until_s, backward_time, *given, without_hopper()))
            rows.append(guarded(f"backward, {kernel}, {where}", until_s, backward_time, *given))
            if shape == TIMED[-1]:
                rows.append(guarded(f"parts, {where}", until_s, parts, *given))
    if backends[-1] == "triton" and not smoke:
        both = {kind: example(TIMED[-1], kind, device) for kind in ("random", "local")}
        rows += tuned(TIMED[-1], both, until_s)
        del both
        rank = (RANK, example(RANK, "local", device), backends[-1])
        rows.append(guarded("backward, 32768 queries", until_s, backward_time, *rank))
    return rows


def main() -> None:
    smoke, until_s, device = limited_run("sparse_mla", __doc__)
    has_gpu = device == "cuda"
    backends: list[Backend] = ["triton"] if has_gpu and HAS_TRITON else ["plain"]
    if flash_mla.load() is not None:
        backends.insert(0, "flash_mla")
    given = (backends, smoke, device, until_s)
    checks = check_all(*given)
    rows = time_all(*given)
    failed = [row["variant"] for row in checks if not row.get("passes")]
    if smoke:
        sys.exit(f"wrong: {failed}" if failed else 0)
    named = {row["variant"]: row for row in rows}
    for what, goal in GOALS.items():
        which, kind = what.split(", ")
        backend = backends[0] if which == "forward" else backward_kernel(device)
        chosen_row = named[f"{which}, {backend}, {kind}, {TIMED[-1].keys} keys"]
        chosen_row |= {"goal": goal, "better": "higher"}
    chosen_row = named[f"backward, {backward_kernel(device)}, random, {TIMED[-1].keys} keys"]
    record_row(
        Path(__file__).with_suffix(".json"),
        chosen_row,
        GOALS["backward, random"],
        figure="sparse MLA backward, 4,096 queries, random 2,048 of 131,072 keys, 64 heads",
        details={"checks": checks, "seconds": seconds()},
        rows=rows,
    )
    if failed:
        sys.exit(f"wrong: {failed}")


if __name__ == "__main__":
    main()
