"""What an optimizer step costs on one device: fused AdamW with and without clipping, with state in host memory, and Muon on expert stacks.

- AdamW: 2 billion float32 weights, of the shapes of a dense model of that size. Against the memory's speed: the step reads weight, gradient
  and two states and writes all but the gradient, 28 bytes a weight.
- Offloaded state: the whole step, until everything is back on the host, against what it cannot be faster than: the longest of fetching all
  state alone, sending all back alone, and the update alone. Both directions at once, without any update, stand beside it.
- Muon: one layer of Qwen3-30B-A3B's experts (128 × [2·768, 2048] and 128 × [2048, 768]), against the multiplications of five iterations.
- Before anything is timed, offloaded steps must give the bits of steps that are not, and Muon's direction that of torch's own.

    python benchmarks/kernels/optimizer.py [--device cpu --scale 0.002]
"""

import argparse
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
from orrery.trainer.optim import Optimizer, clip, gradient_norm, make_optimizer
from orrery.trainer.parallel.world import World
from record import record

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
    """Blocks until there are `num_weights`, with random gradients."""
    policy, count = nn.Module(), 0
    shapes = [VOCABULARY] if num_weights > 1e9 else []
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
    """Median seconds of `run`, all of the device's work included; once before, unmeasured."""
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
    """Rows of the step without offload, and its seconds."""
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
    """Offloaded or not, three steps give the same bits."""
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
                f"{name}: three steps with offloaded state differ from three without by up to {(a - b).abs().max():.2e}"
            )
        for key, state in one.state[a].items():
            if not torch.equal(state.cpu(), two.state[b][key].cpu()):
                raise SystemExit(f"{name}: state {key} differs where it is offloaded")


def offloaded(
    policy: nn.Module, update_s: float, device: torch.device
) -> tuple[list[dict[str, Any]], float, dict[str, Any]]:
    """Rows of the offloaded step, its time over its bound, and what the bound is made of."""
    begin = time.perf_counter()
    optimizer: Optimizer = make_optimizer(policy, ADAMW, offload=True)
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
    rows = [
        row(
            "adamw, offloaded state",
            step_s,
            bytes_per_s_each_way=num_bytes / step_s,
            over_bound=step_s / bound_s,
        )
    ]
    rows += [
        row(
            "fetch and send back at once, no update",
            both_s,
            bytes_per_s_each_way=num_bytes / both_s,
        )
    ]
    return rows, step_s / bound_s, details


def transfers(hosts: list[torch.Tensor], device: torch.device) -> tuple[float, float, float]:
    """Seconds to copy all of `hosts` in, out, and both ways at once, through buffers on the device."""
    largest = max(block.numel() for block in hosts)
    into, out_of = torch.empty(largest, device=device), torch.empty(largest, device=device)
    cuda = device.type == "cuda"
    inward, outward = (
        (torch.cuda.Stream(device), torch.cuda.Stream(device)) if cuda else (None, None)
    )

    def fetch() -> None:
        with torch.cuda.stream(inward):
            for block in hosts:
                into[: block.numel()].copy_(block.view(-1), non_blocking=True)

    def send() -> None:
        with torch.cuda.stream(outward):
            for block in hosts:
                block.view(-1).copy_(out_of[: block.numel()], non_blocking=True)

    return (
        timed(fetch, device, 2),
        timed(send, device, 2),
        timed(lambda: (fetch(), send()), device, 2),
    )


def muon(scale: float, device: torch.device) -> tuple[list[dict[str, Any]], float]:
    """Rows of a step on expert stacks, and how far its direction is from torch's own Muon."""
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
        flop += (
            num * parts * MUON.num_newton_schulz_steps * (4 * short * short * long + 2 * short**3)
        )

    torchs_weight = nn.Parameter(experts.down_proj.detach()[0].clone())
    torchs_weight.grad = experts.down_proj.grad[0].clone()
    before = torchs_weight.detach().clone()
    optimizer = make_optimizer(policy, MUON)
    optimizer.step()
    torch.optim.Muon(
        [torchs_weight], lr=1e-4, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    ).step()
    off = (experts.down_proj.detach()[0] - torchs_weight).norm() / (torchs_weight - before).norm()
    if off > 0.05:  # bfloat16 rounds each product to 0.4 %, and five iterations amplify that
        raise SystemExit(f"Muon's step differs from torch's by {off:.1%} of its length")
    seconds = timed(optimizer.step, device, repeats=3)
    return [
        row("muon, a layer's experts of Qwen3-30B-A3B", seconds, flop_per_s=flop / seconds)
    ], off.item()


def release(device: torch.device) -> None:
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
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
        figure="an AdamW step with state in host memory, over the longest of fetching, sending back and updating",
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
        print(
            {
                key: round(value, 5) if isinstance(value, float) else value
                for key, value in each.items()
            }
        )


if __name__ == "__main__":
    main()
