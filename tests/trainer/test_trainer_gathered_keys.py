"""Test the order, memory and work of latent keys that context-parallel ranks gather."""

import math
import subprocess
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trainer_cases
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from trainer_cases import MEMORY, manifest

from orrery.kernels.attention import Documents
from orrery.manifest.budget.activations import activation_bytes
from orrery.manifest.budget.parameters import hardware_flops
from orrery.models.causal_lm import TransformerBlock
from orrery.models.latent_attention import LatentAttention
from orrery.models.layers import rotary_angles
from orrery.trainer.parallel import blocks, gathered_keys
from orrery.trainer.parallel.context_parallel import contiguous, zigzag_of_whole
from orrery.trainer.parallel.gathered_keys import GatheredKeys, KeyOrder

LENGTHS = [1, 2, 3, 21, 5, 8, 1, 13, 64]
cases = pytest.mark.parametrize("size", [2, 3, 4])


def order(size, rank, is_latent, lengths=LENGTHS):
    """Return this rank's `KeyOrder`, all ranks' shards, and the offsets of padded documents."""
    shards = [zigzag_of_whole(lengths, size, each) for each in range(size)]
    offsets = torch.from_numpy(shards[rank].cu_seqlens)
    documents = Documents(offsets, int(offsets.diff().max()))
    found = KeyOrder.of(documents, len(shards[rank].source), size, rank, is_latent)
    return found, shards, offsets.tolist()


def padded_stream(lengths, offsets):
    """Return the token at each index of the padded stream. Padding repeats a document's last."""
    begin, stream = 0, []
    for length, first, last in zip(lengths, offsets, offsets[1:], strict=False):
        stream += [begin + min(place, length - 1) for place in range(last - first)]
        begin += length
    return np.array(stream)


@cases
def test_gathered_keys_stand_in_the_order_of_whole_padded_documents(size):
    for rank in range(size):
        found, shards, offsets = order(size, rank, is_latent=True)
        gathered = np.concatenate([shard.source for shard in shards])
        stream = padded_stream(LENGTHS, offsets)
        assert (gathered[found.row] == stream).all()
        assert (stream[found.last] == shards[rank].source).all()
        begins = [max(b for b in offsets if b <= last) for last in found.last.tolist()]
        assert found.first.tolist() == begins


@cases
def test_dense_queries_read_their_document_up_to_themselves(size):
    """In each piece, the i-th last query reads the keys up to the i-th last."""
    for rank in range(size):
        found, shards, offsets = order(size, rank, is_latent=False)
        gathered = np.concatenate([shard.source for shard in shards])[found.row]
        stream = padded_stream(LENGTHS, offsets)
        places = order(size, rank, is_latent=True)[0]
        q, k = found.queries.cu_seqlens.tolist(), found.keys.cu_seqlens.tolist()
        assert len(q) == len(k) == 2 * len(LENGTHS) + 1 and q[-1] == len(shards[rank].source)
        assert found.queries.max_seqlen == max(np.diff(q))
        assert found.keys.max_seqlen >= max(np.diff(k))
        for piece in range(2 * len(LENGTHS)):
            for back in range(1, q[piece + 1] - q[piece] + 1):
                query = q[piece + 1] - back
                first, last = places.first[query], places.last[query]
                read = gathered[k[piece] : k[piece + 1] - back + 1]
                assert (read == stream[first : last + 1]).all()


@cases
def test_parts_cover_all_keys_read_and_repeat_no_row_inside_one(size):
    for rank in range(size):
        found, _, _ = order(size, rank, is_latent=False)
        places = torch.cat([place for _, place in found.parts]).sort().values
        assert (places == torch.arange(len(found.row))).all()
        for rows, place in found.parts:
            assert len(rows.unique()) == len(rows)
            assert (found.row[place] == rows).all()


@pytest.mark.parametrize("lengths", [[131_072], [70_000, 40_000, 3000, 900, 17]])
def test_ranks_score_equally_many_keys_as_contiguous_shares_would_not(lengths):
    def scored(rank):
        found, _, _ = order(4, rank, is_latent=True, lengths=lengths)
        return int((found.last.long() - found.first + 1).sum())

    def contiguously(rank):
        place = contiguous(lengths, 4, rank).source
        begins = np.append(0, np.cumsum(lengths))[:-1]
        return int((place - begins[np.searchsorted(begins, place, side="right") - 1] + 1).sum())

    work = [scored(rank) for rank in range(4)]
    assert max(work) == min(work)
    other = [contiguously(rank) for rank in range(4)]
    assert max(other) > 1.3 * sum(other) / 4


@pytest.mark.parametrize("name", ["context_rank.py", "glm5_rank.py"])
def test_the_benchmarks_of_a_rank_run_and_four_ranks_equal_one(name):
    script = Path(__file__).parents[2] / "benchmarks" / "trainer" / name
    ran = subprocess.run(
        [sys.executable, script, "--smoke"], capture_output=True, text=True, timeout=300
    )
    assert ran.returncode == 0, ran.stderr


class Alone:
    """Replace torch.distributed on rank 0: gathers repeat its tensor, all-to-all returns it."""

    def __init__(self, size):
        self.num_ranks = size

    def size(self):
        return self.num_ranks

    def rank(self):
        return 0

    def all_gather_into_tensor(self, out, local, **_):
        torch.cat([local] * self.num_ranks, out=out)
        return self

    def all_to_all_single(self, arriving, leaving, **_):
        arriving.copy_(leaving)
        return self

    def wait(self):
        pass


TOKENS = 48  # tokens of each rank
LATENT = {
    **trainer_cases.GLM5,
    "num_layers": 1,
    "mla": {
        **trainer_cases.GLM5["mla"],
        "indexer": {**trainer_cases.GLM5["mla"]["indexer"], "types": None},
    },
    "moe": {**trainer_cases.GLM5["moe"], "num_dense_layers": 1},
}
EXPANDED = {**LATENT, "family": "deepseek_v3", "mla": {**LATENT["mla"], "indexer": None}}
EXPANDED["moe"] = {**LATENT["moe"], "num_experts": 16}
NETWORKS = {"sparse": LATENT, "expanded": EXPANDED}
KEEPING = {"kind": "selective", "keep": ["attention"]}


def one_layer(model, size, checkpointing, monkeypatch):
    """Return the manifest, a layer, and a function that runs it as rank 0 of `size`."""
    memory = {**MEMORY, "activation_checkpointing": checkpointing}
    mesh = {"cp": size, "cp_style": "dsa"}
    spec = manifest(model=model, mesh=mesh, trainer={"memory": memory})
    layer = LatentAttention(spec.model, 0)
    if size > 1:
        group = Alone(size)
        monkeypatch.setattr(gathered_keys, "dist", group)
        layer.keys = GatheredKeys(group, keeps="attention" in spec.trainer.kept)
    offsets = torch.tensor([0, 16 * size, 48 * size], dtype=torch.int32)
    documents = Documents(offsets, 32 * size)
    angles = rotary_angles(torch.arange(TOKENS), 4, 1e4, torch.float32)

    def run(x):
        return layer(x, angles, documents)[0]

    options = blocks.checkpoint_options(spec.trainer, spec.model)
    if checkpointing["kind"] != "none":
        return spec, layer, lambda x: checkpoint(run, x, use_reentrant=False, **options)
    return spec, layer, run


def saved_bytes(layer, run):
    weights = {weight.untyped_storage().data_ptr() for weight in layer.parameters()}
    held = {}

    def hold(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights and tensor.is_floating_point():
            held[storage.data_ptr()] = storage.nbytes()
        return tensor

    x = torch.randn(TOKENS, 32, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(hold, lambda tensor: tensor):
        out = run(x)
    return sum(held.values()), out


@pytest.mark.parametrize("network", NETWORKS)
def test_a_rank_keeps_as_many_more_bytes_as_the_plan_says(network, monkeypatch):
    """Compare 4 ranks with 2: a rank has as many tokens, but keeps the keys of all ranks."""
    found, planned = [], []
    for size in (2, 4):
        spec, layer, run = one_layer(NETWORKS[network], size, {"kind": "none"}, monkeypatch)
        num_bytes, out = saved_bytes(layer, run)
        found.append(num_bytes)
        planned.append(TOKENS * activation_bytes(spec.model, spec.trainer, 0).kept)
        out.sum().backward()
    assert found[1] - found[0] == planned[1] - planned[0]


@pytest.mark.parametrize("network", NETWORKS)
def test_kept_keys_are_as_large_as_the_plan_says_and_are_not_gathered_again(network, monkeypatch):
    model, again = NETWORKS[network], []
    spec, _, run = one_layer(model, 4, KEEPING, monkeypatch)
    kept, keep = [], blocks.keep

    def count(answer):
        kept.extend(answer)
        return keep(answer)

    monkeypatch.setattr(gathered_keys.blocks, "keep", count)
    out = run(torch.randn(TOKENS, 32, requires_grad=True))
    num_bytes = sum(one.nbytes for one in kept)
    monkeypatch.setattr(Alone, "all_gather_into_tensor", lambda *_, **__: again.append(1))
    out.sum().backward()
    assert not again
    planned = [
        activation_bytes(
            spec.model,
            manifest(
                model=model,
                mesh={"cp": cp, "cp_style": "dsa"},
                trainer={"memory": {**MEMORY, "activation_checkpointing": KEEPING}},
            ).trainer,
            0,
        ).kept
        for cp in (1, 4)
    ]
    assert num_bytes == TOKENS * (planned[1] - planned[0])


@pytest.mark.parametrize("network", NETWORKS)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_products_of_a_rank_are_those_of_the_plan(network, size, monkeypatch):
    """Torch's counter does not see the kernels of attention and of the indexer's scores."""
    spec, layer, run = one_layer(NETWORKS[network], size, {"kind": "none"}, monkeypatch)
    x = torch.randn(TOKENS, 32, requires_grad=True)
    operators = torch.ops.orrery
    mapping = {
        operators.head_products: lambda x, weight, *_, **more: 2 * math.prod(x) * weight[2],
        operators.head_products_backward: lambda _, x, weight, **more: 4 * math.prod(x) * weight[2],
    }
    with FlopCounterMode(display=False, custom_mapping=mapping) as counter:
        run(x).sum().backward()
    lengths = [16 * size, 32 * size]
    indexer = spec.model.mla.indexer
    others = 0  # FLOPs of the indexer's projections, forward only
    if indexer is not None:
        sizes = (layer.indexer.wq_b, layer.indexer.wk, layer.indexer.weights_proj)
        others = 2 * TOKENS * sum(one.weight.numel() for one in sizes)
    planned = hardware_flops(spec.model, spec.trainer, lengths).projections / size
    feed_forward = 6 * TOKENS * 3 * 32 * 48
    assert counter.get_total_flops() - others == planned - feed_forward


@pytest.mark.parametrize("network", NETWORKS)
def test_a_compiled_layer_has_the_gradients_of_an_eager_one(network, monkeypatch):
    """Compiled graphs break at exchanges of keys, and checkpointing recomputes them."""
    found = {}
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    for compiled in (False, True):
        torch.manual_seed(0)
        spec, layer, _ = one_layer(NETWORKS[network], 4, {"kind": "full"}, monkeypatch)
        block = TransformerBlock(spec.model, 0)
        block.self_attn = layer
        policy = SimpleNamespace(network=SimpleNamespace(layers=[block], config=spec.model))
        trainer = spec.trainer.model_copy(update={"compile": compiled})
        torch._dynamo.reset()
        blocks.apply(policy, trainer)
        offsets = torch.tensor([0, 64, 192], dtype=torch.int32)
        angles = rotary_angles(torch.arange(TOKENS), 4, 1e4, torch.float32)
        x = torch.randn(TOKENS, 32, requires_grad=True)
        out, *_ = block.forward(x, angles, Documents(offsets, 128))
        out.square().sum().backward()
        gradients = [one.grad for one in block.parameters() if one.grad is not None]
        found[compiled] = [out.detach(), x.grad, *gradients]
    for one, other in zip(found[True], found[False], strict=True):
        assert (one - other).norm() <= 1e-5 * other.norm()
