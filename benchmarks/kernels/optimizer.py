"""Time an optimizer step on one device: AdamW, AdamW with state in host memory, Muon on experts.

- AdamW: 2 billion float32 weights in a dense model's shapes, with and without clipping. The step
  moves 28 bytes a weight: it reads weight, gradient and two states and writes all but the gradient.
- Offloaded state: the whole step until all state is back on the host. The bound is the longest of
  fetching all state, sending it back, and the update, each alone.
- Muon: one layer of Qwen3-30B-A3B's experts (128 × [2·768, 2048] and 128 × [2048, 768]).
- Checked first: steps with and without offload are bitwise equal, Muon's direction equals torch's.

    python benchmarks/kernels/optimizer.py [--device cpu --scale 0.002]
"""

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[1]))
from timing import copy_out

from orrery.manifest.schema import AdamW, Muon
from orrery.trainer.optim import BucketedOptimizer, clip, gradient_norm, make_optimizer
from orrery.trainer.parallel.world import World
from record import parser_of, record

LAYER = [(4096, 2048), (2048, 2048), (6144, 2048), (6144, 2048), (2048, 6144), (2048,), (2048,)]
VOCABULARY = (151_936, 2048)
EXPERTS = {"gate_up_proj": (128, 1536, 2048), "down_proj": (128, 2048, 768)}
BYTES_A_WEIGHT = 28
ADAMW = AdamW(kind="adamw", lr=1e-4, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.1)
MUON = Muon(
    kind="muon",
    lr=1e-4,
    momentum=0.95,
    nesterov=True,
    weight_decay=0.1,
    num_newton_schulz_steps=5,
    rest=ADAMW,
)


def dense(num_weights: float, device: torch.device) -> nn.Module:
    """Return blocks with at least `num_weights` weights and random gradients."""
    policy, count = nn.Module(), 0
    shapes: list[tuple[int, ...]] = [VOCABULARY] if num_weights > 1e9 else []
    while count + sum(map(numel, shapes)) < num_weights:
        shapes += LAYER
    for index, shape in enumerate(shapes):
        weight = nn.Parameter(torch.randn(shape, device=device))
        weight.grad = torch.randn(shape, device=device)
        policy.register_parameter(f"w{index}", weight)
    return policy


def numel(shape: tuple[int, ...]) -> int:
    return int(torch.Size(shape).numel())


def timed(run: Callable[[], Any], device: torch.device, repeats: int = 5) -> float:
    """Return the median seconds of `run` until the device is idle, after one warm-up run."""
    found = []
    for _ in range(repeats + 1):
        synchronize(device)
        begin = time.perf_counter()
        run()
        synchronize(device)
        found.append(time.perf_counter() - begin)
    return statistics.median(found[1:])


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def adamw(policy: nn.Module, device: torch.device) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of the step without offload, and its seconds."""
    weights, world = list(policy.parameters()), World(0, 1, device, None)
    num_bytes = BYTES_A_WEIGHT * sum(weight.numel() for weight in weights)
    optimizer = make_optimizer(policy, ADAMW)
    torchs = torch.optim.AdamW(weights, lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def clip_apart() -> None:
        divisor = clip(gradient_norm(weights, world), 1.0)
        torch._foreach_div_([weight.grad for weight in weights], divisor)
        optimizer.step()

    step_s = timed(optimizer.step, device)
    rows = [
        row("adamw", step_s, bytes_per_s=num_bytes / step_s),
        row("adamw, torch.optim", timed(torchs.step, device)),
        row("norm alone", timed(lambda: gradient_norm(weights, world), device)),
        row(
            "adamw with clipping",
            timed(lambda: optimizer.step(clip(gradient_norm(weights, world), 1.0)), device),
        ),
        row("adamw, clipping as a pass of its own", timed(clip_apart, device)),
    ]
    return rows, step_s


def row(variant: str, seconds: float, **more: Any) -> dict[str, Any]:
    return {"variant": variant, "value": seconds, "unit": "s", **more}


def check_bits(num_weights: float, device: torch.device) -> None:
    """Exit unless three steps with and three without offload are bitwise equal."""
    torch.manual_seed(1)
    plain = dense(num_weights, device)
    other = nn.Module()
    for name, weight in plain.named_parameters():
        twin = nn.Parameter(weight.detach().clone())
        twin.grad = weight.grad.clone()
        other.register_parameter(name, twin)
    one, two = make_optimizer(plain, ADAMW), make_optimizer(other, ADAMW, offload=True)
    for _ in range(3):
        one.step()
        two.prefetch()
        two.step()
    for (name, a), b in zip(plain.named_parameters(), other.parameters(), strict=True):
        if not torch.equal(a, b):
            raise SystemExit(
                f"{name}: three steps with offloaded state differ from three without "
                f"by up to {(a - b).abs().max():.2e}"
            )
        for key, state in one.state[a].items():
            if not torch.equal(state.cpu(), two.state[b][key].cpu()):
                raise SystemExit(f"{name}: state {key} differs where it is offloaded")


def offloaded(
    policy: nn.Module, update_s: float, device: torch.device
) -> tuple[list[dict[str, Any]], float, dict[str, Any]]:
    """Return the rows of the offloaded step, its time over its bound, and the bound's parts."""
    begin = time.perf_counter()
    optimizer: BucketedOptimizer = make_optimizer(policy, ADAMW, offload=True)
    pin_s = time.perf_counter() - begin
    memory_before = torch.cuda.memory_allocated(device) if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    step_s = timed(optimizer.step, device, repeats=3)
    peak = torch.cuda.max_memory_allocated(device) - memory_before if device.type == "cuda" else 0
    hosts = [
        block for bucket in optimizer.state.values() for block in bucket.values() if block.ndim
    ]
    num_bytes = sum(block.nbytes for block in hosts)
    in_s, out_s, both_s = transfers(hosts, device)
    bound_s = max(in_s, out_s, update_s)
    details = {
        "state_bytes_each_way": num_bytes,
        "fetch_all_alone_s": in_s,
        "send_all_back_alone_s": out_s,
        "both_at_once_s": both_s,
        "update_alone_s": update_s,
        "bound_s": bound_s,
        "state_on_device_peak_bytes": peak,
        "pinning_s": pin_s,
    }
    over_bound, both = step_s / bound_s, "fetch and send back at once, no update"
    speed = num_bytes / step_s
    rows = [
        row("adamw, offloaded state", step_s, bytes_per_s_each_way=speed, over_bound=over_bound),
        row(both, both_s, bytes_per_s_each_way=num_bytes / both_s),
    ]
    return rows, over_bound, details


def transfers(hosts: list[torch.Tensor], device: torch.device) -> tuple[float, float, float]:
    """Return seconds to copy `hosts` to the device, back, and both ways at once."""
    largest = max(block.numel() for block in hosts)
    into, out_of = torch.empty(largest, device=device), torch.empty(largest, device=device)
    cuda = device.type == "cuda"
    inward, outward = (torch.cuda.Stream(device) if cuda else None for _ in range(2))

    def fetch() -> None:
        with torch.cuda.stream(inward):
            for block in hosts:
                into[: block.numel()].copy_(block.view(-1), non_blocking=True)

    def send() -> None:
        with torch.cuda.stream(outward):
            for block in hosts:
                block.view(-1).copy_(out_of[: block.numel()], non_blocking=True)

    def both() -> None:
        fetch()
        send()

    in_s, out_s, both_s = (timed(run, device, 2) for run in (fetch, send, both))
    return in_s, out_s, both_s


def muon(scale: float, device: torch.device) -> tuple[list[dict[str, Any]], float]:
    """Return the rows of a step on expert stacks, and the difference from torch's Muon."""
    policy = nn.Module()
    policy.layers = nn.ModuleList([nn.Module()])
    experts = nn.Module()
    policy.layers[0].experts = experts
    flop = 0.0
    for name, (num, rows, columns) in EXPERTS.items():
        num = max(int(num * min(scale, 1.0)), 1)
        weight = nn.Parameter(torch.randn(num, rows, columns, device=device))
        weight.grad = torch.randn_like(weight)
        experts.register_parameter(name, weight)
        parts = 2 if name == "gate_up_proj" else 1
        short, long = sorted((rows // parts, columns))
        flop_a_step = 4 * short * short * long + 2 * short**3
        flop += num * parts * MUON.num_newton_schulz_steps * flop_a_step

    torchs_weight = nn.Parameter(experts.down_proj.detach()[0].clone())
    torchs_weight.grad = experts.down_proj.grad[0].clone()
    before = torchs_weight.detach().clone()
    optimizer = make_optimizer(policy, MUON)
    optimizer.step()
    torch.optim.Muon(
        [torchs_weight], lr=1e-4, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    ).step()
    off = (experts.down_proj.detach()[0] - torchs_weight).norm() / (torchs_weight - before).norm()
    if off > 0.05:  # five iterations amplify the rounding of products to bfloat16 (0.4 %)
        raise SystemExit(f"Muon's step differs from torch's by {off:.1%} of its length")
    seconds = timed(optimizer.step, device, repeats=3)
    variant = "muon, a layer's experts of Qwen3-30B-A3B"
    return [row(variant, seconds, flop_per_s=flop / seconds)], off.item()


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--scale", type=float, default=1.0, help="share of the sizes, for a trial")
    parser.add_argument("--output", type=Path, default=Path(__file__).with_suffix(".json"))
    args = parser.parse_args()
    device = torch.device(args.device)
    check_bits(3e8 * args.scale, device)
    release(device)
    policy = dense(2e9 * args.scale, device)
    num_weights = sum(weight.numel() for weight in policy.parameters())
    rows, update_s = adamw(policy, device)
    release(device)
    more, over_bound, details = offloaded(policy, update_s, device)
    rows += more
    del policy
    release(device)
    more, off = muon(args.scale, device)
    rows += more
    record(
        args.output,
        figure="an AdamW step with state in host memory, over the longest of fetching, "
        "sending back and updating",
        value=over_bound,
        unit="×",
        goal=1.15,
        better="lower",
        details={
            "num_weights": num_weights,
            **details,
            "offloaded_bits_equal": True,
            "muon_relative_difference_from_torch": off,
        },
        rows=rows,
    )
    copy_out(args.output)
    for each in rows:
        print({key: round(x, 5) if isinstance(x, float) else x for key, x in each.items()})


if __name__ == "__main__":
    main()
