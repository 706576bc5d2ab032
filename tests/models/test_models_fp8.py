"""Networks with layers in FP8: which layers, the numbers of a mixture, and cached weights."""

import pytest
import torch
from torch import nn

from orrery.kernels.expert_rows import sort_by_expert
from orrery.kernels.fp8.products import fp8_linear
from orrery.kernels.fp8.quantize import quantize_weight
from orrery.manifest.budget.trainer_memory import num_fp8_weights
from orrery.models import build, weights
from orrery.models.fp8 import SentWeights, WeightCache, products
from orrery.models.layers import Experts, FeedForward, LocalExchange
from orrery.wire.weight_wire.fp8_blocks import SCALE

WIDTHS = {
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 64,
}
LATENT = {
    "num_kv_heads": 4,
    "mla": {
        **{"q_lora_rank": 128, "kv_lora_rank": 20, "value_head_dim": 64},
        **{"nope_head_dim": 40, "rope_head_dim": 24},
        "indexer": {"num_heads": 2, "head_dim": 32, "top_k": 8, "types": None},
    },
}
ALL = ["attention", "feed_forward", "experts"]


@pytest.fixture
def make_network(make_model):
    def make(family, fp8, **fields):
        latent = LATENT if family == "glm5" else {}
        model = make_model(family, fp8=fp8, **{**WIDTHS, **latent, **fields})
        if model.moe is not None:
            moe = model.moe.model_copy(update={"expert_intermediate_size": 128})
            model = model.model_copy(update={"moe": moe})
        network = build(model)
        weights.initialize(network, model)
        return network

    return make


@pytest.mark.parametrize(
    ("fp8", "count"), [(None, 0), (["attention"], 4), (["feed_forward"], 4), (ALL, 8)]
)
def test_the_manifest_names_the_layers(make_network, fp8, count):
    assert len(list(products(make_network("qwen3", fp8)))) == count


def test_latent_attention_has_two_products_in_fp8(make_network):
    network = make_network("glm5", ["attention"])
    found = {id(weight) for _, weights in products(network) for weight in weights}
    names = {name for name, weight in network.named_parameters() if id(weight) in found}
    parts = ("q_b_proj", "o_proj")
    assert names == {f"layers.{i}.self_attn.{part}.weight" for i in (0, 1) for part in parts}


@pytest.mark.parametrize("fp8", [None, ["attention"], ["feed_forward"], ["experts"], ALL])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "glm5"])
def test_the_manifest_counts_the_weights_in_fp8(make_network, family, fp8):
    network = make_network(family, fp8)
    built = sum(weight.numel() for _, weights in products(network) for weight in weights)
    assert num_fp8_weights(network.config) == built


def test_shared_experts_are_feed_forwards(make_network):
    network = make_network("glm4_moe", ["feed_forward"])
    found = [module for module in network.modules() if isinstance(module, FeedForward)]
    assert len(found) == 2 and all(each.down_fp8 == [] for each in found)
    assert not any(each.down_fp8 == [] for each in network.modules() if isinstance(each, Experts))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4_moe", "glm5"])
def test_cached_weights_change_no_bit_and_follow_an_update(make_network, make_pack, family):
    pack = make_pack([30, 7])
    plain, cached = (make_network(family, ALL) for _ in range(2))
    cached.register_forward_pre_hook(WeightCache(cached).refresh)
    for _ in range(2):
        results = []
        for network in (plain, cached):
            network.zero_grad()
            network(*pack).square().sum().backward()
            gradients = [each.grad for each in network.parameters() if each.grad is not None]
            results.append([gradient.clone() for gradient in gradients])
        assert all(torch.equal(*pair) for pair in zip(*results, strict=True))
        with torch.no_grad():
            for network in (plain, cached):
                for parameter in network.parameters():
                    parameter.mul_(1.25)
    assert all(len(parts) == 4 for parts, _ in products(cached))
    assert all(parts == [] for parts, _ in products(plain))


def test_a_cache_that_is_not_refreshed_multiplies_by_the_weights_of_before(make_network, make_pack):
    pack, network = make_pack([30]), make_network("qwen3_moe", ALL)
    cache = WeightCache(network)
    with torch.no_grad():
        cache.refresh()
        before = network(*pack)
        held = [parts[0] for parts, _ in products(network)]
        cache.refresh()
        assert all(one is parts[0] for one, (parts, _) in zip(held, products(network), strict=True))
        projection = network.layers[1].mlp.experts.down_proj
        projection.mul_(2.0)
        assert torch.equal(network(*pack), before), "the cache quantized without a refresh"
        cache.refresh()
        pairs = zip(held, products(network), strict=True)
        changed = [one is not parts[0] for one, (parts, _) in pairs]
        assert sum(changed) == 1, "only one product's weight changed"
        assert not torch.equal(network(*pack), before)


@pytest.mark.parametrize("change", ["a new parameter", "a swapped parameter of equal version"])
def test_a_cache_sees_a_replaced_weight(make_network, change):
    network = make_network("qwen3", ["feed_forward"])
    cache = WeightCache(network)
    cache.refresh()
    layer = network.layers[0].mlp
    other = nn.Parameter(layer.down_proj.weight.detach() * 2)
    if change != "a new parameter":
        while other._version < layer.down_proj.weight._version:
            with torch.no_grad():
                other.mul_(1.0)
        assert other._version == layer.down_proj.weight._version
    layer.down_proj.weight = other
    cache.refresh()
    wanted = quantize_weight(other.detach()).forward
    assert torch.equal(layer.down_fp8[0].view(torch.uint8), wanted.value.view(torch.uint8))
    assert torch.equal(layer.down_fp8[1], wanted.scale)


def test_fp8_moves_the_output_by_its_rounding(make_network, make_pack):
    """Every product of a layer rounds both sides to 3 bits, so a few percent, not none."""
    pack = make_pack([40])
    with torch.no_grad():
        exact, rounded = (make_network("qwen3_moe", fp8)(*pack) for fp8 in (None, ALL))
    error = (rounded - exact).norm() / exact.norm()
    assert 1e-3 < error < 0.2


def test_a_mixture_is_the_sum_of_its_experts_as_layers():
    torch.manual_seed(0)
    experts = Experts(3, 128, 128, is_fp8=True)
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.1)
    x, score = torch.randn(50, 128), torch.rand(50, 2)
    expert = torch.tensor([[0, 2]]).expand(50, 2)  # one expert stays empty
    found = LocalExchange()(x, score, expert, experts)
    wanted = torch.zeros(50, 128)
    for slot, e in enumerate((0, 2)):
        gate, up = fp8_linear(x, [experts.gate_up_proj[e]])[0].chunk(2, dim=1)
        act = nn.functional.silu(gate) * up * score[:, slot, None]
        wanted += fp8_linear(act, [experts.down_proj[e]])[0]
    assert (found - wanted).norm() <= 1e-6 * wanted.norm()


def test_rows_in_blocks_keep_their_order():
    expert = torch.randint(0, 6, (90, 2), generator=torch.Generator().manual_seed(0))  # 5: none
    dense, padded = sort_by_expert(expert, 5), sort_by_expert(expert, 5, block=16)
    assert torch.equal(dense.counts_E, padded.counts_E)
    assert (padded.ends_E % 16 == 0).all() and padded.row_M.shape[0] % 16 == 0
    assert padded.place_TK.max() < padded.row_M.shape[0]
    starts = [0, *padded.ends_E.tolist()]
    begin = 0
    for e, count in enumerate([*dense.counts_E.tolist(), (expert == 5).sum().item()]):
        here = slice(starts[e], starts[e] + count)
        assert torch.equal(padded.row_M[here], dense.row_M[begin : begin + count])
        begin += count
    flat = padded.place_TK.flatten()
    assert torch.equal(padded.row_M[flat], torch.arange(180))


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm5"])
def test_engines_receive_the_bytes_that_the_trainer_multiplies(make_network, family):
    network = make_network(family, ALL)
    sent = SentWeights(network)
    sent.refresh()
    named = dict(sent.encoded(weights.named_hf_tensors(network)))
    scales = {hf.name: (box, local) for hf, box, local in sent.scales()}
    values = {
        hf.name: local
        for hf, _, local in weights.named_hf_slices(network, sent.values)
        if sent.is_sent(hf)
    }
    count = {"qwen3": 2 * 7, "qwen3_moe": 2 * (4 + 6 * 3), "glm5": 2 * 2 + 3 * (2 + 6)}[family]
    assert len(values) == len(scales) == count
    for hf in weights.hf_tensors(network):
        if not sent.is_sent(hf):
            assert named[hf.name].dtype == torch.float32
            continue
        value, (box, scale) = values[hf.name], scales[hf.name + SCALE]
        assert box == tuple((0, size // 128) for size in hf.shape)
        assert torch.equal(named[hf.name].view(torch.uint8), value.view(torch.uint8))
        assert torch.equal(named[hf.name + SCALE], scale)
    # A step multiplies bfloat16 copies. Their quantized parts equal the sent parts.
    name = f"layers.0.self_attn.{'q_b_proj' if family == 'glm5' else 'q_proj'}.weight"
    own = quantize_weight(network.get_parameter(name).detach().bfloat16()).forward
    name = f"model.{name}"
    assert torch.equal(own.value.view(torch.uint8), values[name].view(torch.uint8))
    assert torch.equal(own.scale, scales[name + SCALE][1])
