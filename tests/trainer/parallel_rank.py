"""One of several ranks that train one step in many layouts.

`parallel_rank.py FOLDER PORT NUM_RANKS RANK`. FOLDER/cases.json is {name: keywords of `manifest`}.
Layouts of four ranks run on all. Layouts of two ranks alternate between ranks 0, 1 and ranks
2, 3. Layouts of one rank are shared out. A name begins with its network. Weights are in
FOLDER/<network>. Gradients go to FOLDER/<name>.safetensors. The last line of stdout has the
results of this rank's cases.
"""

import json
import sys
from contextlib import contextmanager, nullcontext
from datetime import timedelta
from pathlib import Path

import deep_ep_fake
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from trainer_cases import make_learner, manifest, rank_device

from orrery.manifest.schema import Manifest
from orrery.models.layers import Experts, LocalExchange
from orrery.models.placement import full_tensor, local_tensor
from orrery.trainer.learner import Learner, count_totals
from orrery.trainer.parallel import activation_offload, expert_parallel
from orrery.trainer.parallel.expert_parallel import KINDS, agree_on_lengths, make_exchange
from orrery.trainer.parallel.world import World, destroy_world, init_world, make_world
from orrery.wire.columns import Columns
from orrery.wire.packing import pack

# Documents: of one token, shorter than 2·cp, odd, and as long as a micro-batch.
LENGTHS = (1, 2, 3, 21, 5, 8, 1, 13, 17, 2, 9, 30)
CANARY = (9, 11, 8, 14, 10, 12, 13)
MAX_TOKENS = 30


def copies_of(num_data_ranks: int) -> int:
    """Return how many copies of the documents give every rank more than one micro-batch."""
    return 2 if num_data_ranks > 2 else 1


def one_step(learner: Learner, columns: Columns) -> tuple[dict, dict[str, torch.Tensor]]:
    """Metrics of the step and the whole gradient before clipping; weights stay."""
    gradients = {}
    with torch.no_grad():
        for name, weight in learner.weights.items():
            if name.endswith("lora.b"):  # the initial zeros would hide gradients
                local_tensor(weight).fill_(0.05)

    def keep(*_: object) -> None:
        for name, weight in learner.weights.items():
            gradients[name] = full_tensor(weight.grad).clone()

    learner.max_grad_norm = 1e9
    learner.optimizer.step = keep
    world = learner.world
    plan = pack(columns.lengths, learner.trainer.mesh.num_data_ranks, MAX_TOKENS)[world.data_rank]
    assert len(plan) > 1
    mine = [columns.select(samples) for samples in plan]
    metrics = learner.learn(mine, len(mine), count_totals(mine, world), 1.0).metrics
    biases = torch.cat([torch.empty(0), *learner.expert_load.biases.values()])
    return metrics | {"biases": biases.tolist()}, gradients


def do(name: str, fields: dict, folder: Path, world: World) -> dict:
    from test_trainer_parallel import documents

    spec = spec_of(fields)
    if world.mesh is not None:
        world = make_world(spec.trainer.mesh, world.rank, world.device)
    learner = make_learner(spec, folder / name.partition("_")[0], world)
    copies = copies_of(spec.trainer.mesh.num_data_ranks)
    is_replayed = name.startswith("replayed")
    expert_parallel.MAX_MISSING = 0.9  # short documents have many last tokens and paddings
    with agreements() as made:
        canary = learner.logprobs(CANARY)
        metrics, gradients = one_step(learner, documents(spec, copies, is_replayed))
    if is_replayed and spec.trainer.mesh.ep > 1:
        num_layers = spec.model.num_layers - spec.model.moe.num_dense_layers
        # The canary lacks routes, so each layer's ranks agree. Later they agree for all layers.
        assert made[:2] == [(num_layers, False), (1, True)], made
        known = [index for index, (count, is_known) in enumerate(made) if count > 1 and is_known]
        assert known and all(made[index + 1 :][:1] != [(1, True)] for index in known), made
    if world.is_first:
        save_file(gradients, folder / f"{name}.safetensors")
    return metrics | {"canary": canary}


def exchanges(world: World, width: int = 6, is_fp8: bool = False) -> dict[str, list]:
    """Return by kind of exchange the output and gradients of tokens, scores and expert weights.

    "alone" is the reference: this rank's part of one LocalExchange with all experts and tokens.
    """
    deep_ep_fake.install()
    num_experts, group, seen = 8, dist.group.WORLD, {}
    num_local = num_experts // world.size
    counts = (5, 0, 11, 1)
    tokens = [routed_tokens(rank, counts[rank], width, num_experts) for rank in range(world.size)]

    def experts_of(ranks: list[int]) -> Experts:
        experts = Experts(num_local * len(ranks), width, 4 if width < 128 else width, is_fp8)
        with torch.no_grad():
            for weight in experts.parameters():
                for rank, part in zip(ranks, weight.chunk(len(ranks)), strict=True):
                    part.normal_(generator=torch.Generator().manual_seed(100 + rank))
        return experts

    x, scores, choice = tokens[world.rank]
    # Products in FP8 round blocks of rows together, so chunks change their rounding.
    in_chunks = [] if is_fp8 else [f"{backend} in chunks" for backend in KINDS]
    for kind in (*KINDS, *in_chunks, "torch with known lengths"):
        experts = experts_of([world.rank])
        inputs = [x.clone().requires_grad_(), scores.clone().requires_grad_()]
        backend = kind.partition(" ")[0]
        options = (24, 4, 3) if "chunks" in kind else (None, None)
        exchange = make_exchange(backend, group, num_experts, *options)
        if "known" in kind:
            is_missing = torch.arange(len(choice))[:, None] % 5 == 3
            ids = torch.where(is_missing, -1, choice)
            exchange.known = agree_on_lengths([ids], num_experts, group, experts.row_block)
            assert exchange.known is not None
        watch = nullcontext()
        if kind == "torch":
            watch = sent_rows(x, choice // num_local, world.size)
        elif kind == "torch in chunks":
            watch = overlapping(experts, options[2])
        with watch:
            out = exchange(*inputs, choice, experts)
            (out * torch.arange(1.0, width + 1)).sum().backward()
        seen[kind] = [out, *(leaf.grad for leaf in (*inputs, *experts.parameters()))]
    x, scores, choice = (torch.cat(parts) for parts in zip(*tokens, strict=True))
    experts = experts_of(list(range(world.size)))
    inputs = [x.requires_grad_(), scores.requires_grad_()]
    out = LocalExchange()(*inputs, choice, experts)
    (out * torch.arange(1.0, width + 1)).sum().backward()
    of_tokens = [each.split(counts)[world.rank] for each in (out, *(leaf.grad for leaf in inputs))]
    of_experts = [weight.grad.chunk(world.size)[world.rank] for weight in experts.parameters()]
    seen["alone"] = of_tokens + of_experts
    return {kind: [tensor.tolist() for tensor in tensors] for kind, tensors in seen.items()}


@contextmanager
def agreements():
    """Yield a list of (number of exchanges, whether their lengths are known) by agreement."""
    made, agree = [], expert_parallel.agree_on_lengths

    def watched(ids, *args):
        found = agree(ids, *args)
        made.append((len(ids), found is not None))
        return found

    expert_parallel.agree_on_lengths = watched
    yield made
    expert_parallel.agree_on_lengths = agree


@contextmanager
def overlapping(experts, num_chunks):
    """Fail unless a chunk's tokens leave before the experts compute the chunk before it."""
    events, send, forward = [], dist.all_to_all_single, experts.forward

    def watched_send(*args, **kwargs):
        events.append("send")
        return send(*args, **kwargs)

    def watched_forward(*args, **kwargs):
        events.append("compute")
        out = forward(*args, **kwargs)
        out.register_hook(lambda gradient: events.append("gradient"))
        return out

    dist.all_to_all_single, experts.forward = watched_send, watched_forward
    yield
    dist.all_to_all_single, experts.forward = send, forward
    # Ids, rows and scores of each chunk, then a chunk's results after its products.
    there = ["send"] + ["send"] * 3 * num_chunks + ["compute", "send"] * num_chunks
    # Results' gradients of all chunks, then gradients of rows and scores after a chunk's products.
    back = ["send"] * num_chunks + ["gradient", *["send"] * 2] * num_chunks
    assert events == there + back, events


@contextmanager
def sent_rows(x, rank_TK, size):
    """Fail unless each token travels once to each rank that it needs, and results come back."""
    rows, send = [], dist.all_to_all_single

    def watched(into, out, *args, **kwargs):
        if out.shape[1:] == x.shape[1:]:
            rows.append(len(out))
        return send(into, out, *args, **kwargs)

    dist.all_to_all_single = watched
    yield
    dist.all_to_all_single = send
    assert rows[0] == sum(len(set(ranks.tolist())) for ranks in rank_TK)
    assert len(x) < 4 or rows[0] < rank_TK.numel()


def routed_tokens(rank: int, num_tokens: int, width: int, num_experts: int) -> list[torch.Tensor]:
    """Return random tokens [T, width], scores [T, 3] and chosen experts [T, 3] of `rank`."""
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(num_tokens, width, generator=generator)
    scores = torch.rand(num_tokens, 3, generator=generator)
    choice = torch.rand(num_tokens, num_experts, generator=generator).argsort(1)[:, :3]
    return [x, scores, choice]


def spec_of(fields: dict) -> Manifest:
    """Return the manifest. FP8 is set after the check, because the check demands Hopper GPUs."""
    rest = {name: value for name, value in fields.items() if name != "fp8"}
    spec = manifest(**rest)
    model = spec.model.model_copy(update={"fp8": fields.get("fp8")})
    return spec.model_copy(update={"model": model})


def main() -> None:
    folder, port, num_ranks, rank = Path(sys.argv[1]), *map(int, sys.argv[2:])
    cases = {
        name: (fields, spec_of(fields).trainer)
        for name, fields in json.loads((folder / "cases.json").read_text()).items()
    }
    activation_offload.apply.__defaults__ = (64,)  # bytes, because these blocks are small
    store, answers = (
        dist.TCPStore("127.0.0.1", port, num_ranks, rank == 0, wait_for_workers=False),
        {},
    )
    for size in (4, 2, 1):
        part, place = divmod(rank, size)
        mine = [name for name, (_, trainer) in cases.items() if trainer.mesh.world_size == size]
        mine = mine[part :: num_ranks // size] if size <= num_ranks else []
        if mine:
            is_needed = any(cases[name][1].needs_fsdp for name in mine)
            own = dist.PrefixStore(f"{size}.{part}", store) if is_needed else None
            world = init_world(cases[mine[0]][1].mesh, place, rank_device(rank), own)
            for name in mine:
                try:
                    answers[name] = do(name, cases[name][0], folder, world)
                except BaseException as error:
                    error.add_note(f"in the case {name}")  # a failed rank shows only its last lines
                    raise
            if size == 4:
                answers["exchanges"] = exchanges(world)
                answers["exchanges in FP8"] = exchanges(world, 128, is_fp8=True)
            destroy_world(world)
    store.set(f"done.{rank}", "")
    if rank == 0:  # it serves the store, and pairs end at different times
        store.wait([f"done.{other}" for other in range(num_ranks)], timedelta(seconds=300))
    print(json.dumps(answers))


if __name__ == "__main__":
    main()
