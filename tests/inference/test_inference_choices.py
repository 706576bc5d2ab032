"""Keys that an engine's indexers chose, from vLLM's buffers to what the trainer reads."""

import base64
import io
import sys
from types import ModuleType

import numpy as np
import torch

from orrery.inference.patches import vllm_routes
from orrery.inference.patches.registry import CHOICE_TOKENS
from orrery.inference.patches.vllm_routes import sample_positions
from orrery.kernels.key_bits import compare_sample, engine_keys
from orrery.manifest.schema.manifest import SAMPLED_KEYS
from orrery.wire.routed_experts import RouteShape, column, split, split_choices

NUM_TOKENS, TOP_K, LENGTH = 40, 4, 45
SHAPE = RouteShape(num_layers=2, top_k=3, num_experts=300, num_dense_layers=1)


class Indexer(torch.nn.Module):
    def __init__(self, prefix):
        super().__init__()
        self.k_cache = ModuleType("cache")
        self.k_cache.prefix = prefix


class Capturer:
    """The parts of vLLM's `RoutedExpertsCapturer` that the patch reads."""

    def __init__(self):
        self.device_buffer = torch.randint(0, 300, (64, 3, 3), dtype=torch.int32)
        self.shape_per_token, self.output_dtype_name = (3, 3), "uint16"

    def snapshot_routing_data(self, num_tokens):
        return self.device_buffer[:num_tokens].to(torch.uint16)


def engine(monkeypatch, positions, length=LENGTH):
    """Return a capturer after a patched engine has chosen `positions`, by the cache's name."""
    worker, attention = ModuleType("worker"), ModuleType("attention")
    worker.RoutedExpertsCapturer = Capturer
    worker.bind_routed_experts_capturer = lambda model, capturer: None
    attention.DeepseekV32Indexer = Indexer
    attention.sparse_attn_indexer = lambda hidden, prefix, buffer: buffer
    monkeypatch.setitem(sys.modules, "vllm.distributed.aux_output_connector", worker)
    monkeypatch.setitem(sys.modules, "vllm.models.deepseek_v32", attention)
    worker.worker, attention.attention = worker, attention
    monkeypatch.setenv(CHOICE_TOKENS, str(length))
    monkeypatch.setattr(vllm_routes, "CHUNK_ROWS", 16)
    vllm_routes.capture_choices()
    vllm_routes.capture_choices()  # a second call has no effect
    capturer = worker.RoutedExpertsCapturer()
    model = torch.nn.ModuleList(Indexer(prefix) for prefix in positions)
    hidden = torch.zeros(NUM_TOKENS, 8)
    worker.bind_routed_experts_capturer(model, capturer)
    for prefix, chosen in positions.items():
        found = attention.sparse_attn_indexer(hidden, prefix, chosen)
        assert found is chosen
    return capturer


def test_the_trainer_reads_the_keys_that_an_engine_chose(monkeypatch):
    torch.manual_seed(0)
    last = torch.arange(NUM_TOKENS, dtype=torch.int32)
    score = torch.rand(2, NUM_TOKENS, NUM_TOKENS).masked_fill(last > last[:, None], -1)
    best = score.topk(TOP_K, dim=-1)
    chosen = best.indices.int().masked_fill(best.values < 0, -1)
    buffer = torch.full((2, 64, TOP_K), -1, dtype=torch.int32)  # vLLM's has room for more tokens
    buffer[:, :NUM_TOKENS] = chosen
    capturer = engine(monkeypatch, {"layers.1": buffer[0], "layers.4": buffer[1]})
    rows = capturer.snapshot_routing_data(NUM_TOKENS).numpy()
    num_bytes = 3 * 3 * 2 + 2 * 6
    assert capturer.shape_per_token == rows.shape[1:] == (1, num_bytes)
    assert capturer.output_dtype_name == rows.dtype == "uint8"
    file = io.BytesIO()
    np.save(file, rows[:-1])
    answer = b'{"routed_experts":"' + base64.b64encode(file.getvalue()) + b'"}'
    sent = column(NUM_TOKENS, [split(answer, 0)[1]], RouteShape(1, num_bytes, 256))
    routes, bits = split_choices(sent, SHAPE, 2, "batch 1")
    assert np.array_equal(routes[:-1], capturer.device_buffer[: NUM_TOKENS - 1].numpy())
    own = torch.full((NUM_TOKENS, TOP_K), 7, dtype=torch.int32)
    own[:, 1:] = -1
    for index in range(2):
        # The document begins at key 100, as in a pack.
        begin = torch.full_like(last, 100)
        mine = own.masked_fill(own == 7, 107)
        keys, counts = engine_keys(torch.from_numpy(bits[:, index]), mine, begin, begin + last)
        expected = chosen[index].sort(dim=1).values + 100
        is_known = (last >= TOP_K) & (last < NUM_TOKENS - 1)
        assert torch.equal(keys[is_known], expected[is_known])
        assert torch.equal(keys[~is_known], mine[~is_known])
        num_same = (expected[is_known] == 107).sum()
        assert counts.tolist() == [is_known.sum(), is_known.sum() * TOP_K - num_same]


def test_bits_that_are_no_choice_of_the_query_are_unknown():
    own = torch.zeros(3, 2, dtype=torch.int32)
    first, last = torch.zeros(3, dtype=torch.int32), torch.full((3,), 4, dtype=torch.int32)
    bits = torch.tensor([[0b100001], [0b10011], [0b11]], dtype=torch.uint8)  # beyond, three, two
    keys, counts = engine_keys(bits, own, first, last)
    assert keys.tolist() == [[0, 0], [0, 0], [0, 1]] and counts[0] == 1


def test_the_trainer_compares_a_sample_of_the_keys_that_an_engine_chose(monkeypatch):
    torch.manual_seed(0)
    num_keys = 16
    last = torch.arange(NUM_TOKENS, dtype=torch.int32)
    score = torch.rand(NUM_TOKENS, NUM_TOKENS).masked_fill(last > last[:, None], -1)
    best = score.topk(num_keys, dim=-1)
    chosen = best.indices.int().masked_fill(best.values < 0, -1)
    capturer = engine(monkeypatch, {"layers.1": chosen, "layers.4": chosen}, length=0)
    rows = capturer.snapshot_routing_data(NUM_TOKENS).numpy()
    _, bytes_ = split_choices(rows, SHAPE, 2, "batch 1")
    sample = torch.from_numpy(np.ascontiguousarray(bytes_).view(np.int32))[:, 1]
    is_known = last >= num_keys - 1
    assert sample.shape == (NUM_TOKENS, SAMPLED_KEYS) and (sample[~is_known] == -1).all()
    for token in range(num_keys - 1, NUM_TOKENS):
        assert len({*sample[token].tolist()} & {*chosen[token].tolist()}) == SAMPLED_KEYS
    begin = torch.full_like(last, 100)  # the document begins at key 100, as in a pack
    own = torch.where(chosen < 0, -1, chosen + 100)
    num_valid = int((last >= num_keys).sum())
    assert compare_sample(sample, own, begin, begin + last).tolist() == [num_valid, 0]
    own[:, : num_keys // 2] = -1
    num_differ = compare_sample(sample, own, begin, begin + last)[1] / (num_valid * num_keys)
    assert 0.3 < num_differ < 0.7
    for wrong in (sample.clamp(max=3), sample + NUM_TOKENS, torch.zeros_like(sample)):
        assert compare_sample(wrong, own, begin, begin + last)[0] == 0


def test_each_key_of_a_choice_is_sampled_equally_often():
    torch.manual_seed(0)
    order = torch.rand(20_000, 64).argsort(dim=1)[:, :16].int()  # chosen keys in random order
    sample = sample_positions(order).view(torch.int32)
    of_column = (order[:, None] == sample[..., None]).float().argmax(dim=2)
    share = torch.bincount(of_column.flatten(), minlength=16) / of_column.numel()
    assert torch.allclose(share, torch.full((16,), 1 / 16), rtol=0.1)
