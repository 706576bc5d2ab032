"""Latent and sparse attention against transformers, gradient by gradient, and recomputed."""

import json
from functools import partial

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from orrery.kernels import sparse_index_fp8
from orrery.kernels.attention import Documents
from orrery.manifest.errors import OrreryError
from orrery.models import axis, build, weights
from orrery.models.causal_lm import TransformerBlock
from orrery.models.families import FAMILIES
from orrery.models.hf_folder import check_config
from orrery.models.latent_attention import rotate_pairs, train_indexers
from orrery.models.layers import rotary_angles
from orrery.trainer.parallel.blocks import recomputation_contexts

LENGTHS = [9, 30, 1, 14]
YARN = {
    "kind": "yarn",
    "factor": 4.0,
    "fast_turns": 4.0,
    "slow_turns": 1.0,
    "angle_scale": 1.0,
    "score_scale": 1.0,
    "original_max_positions": 16,
}
CASES = {
    "deepseek v3": {"family": "deepseek_v3", "num_experts": 16, "rope_scaling": YARN},
    "deepseek v3.2": {"family": "deepseek_v32", "num_experts": 16, "rope_scaling": YARN},
    "sparse": {"num_layers": 3},
    "shared choices": {
        "num_layers": 4,
        "indexer": {"types": ["full", "shared", "full", "shared"]},
    },
    "dense": {"num_layers": 3, "indexer": {"top_k": 64}},
}
cases = pytest.mark.parametrize("fields", CASES.values(), ids=CASES)


def close(found, wanted):
    """Return whether they differ by less than 1e-5 of the norm: float32 sums in another order."""
    return (found - wanted).norm() <= 1e-5 * wanted.norm()


@pytest.fixture(params=["plain", "fp8"])
def scores(request, monkeypatch):
    """Let indexers score in floating point, or in FP8 as vLLM does (on a GPU by DeepGEMM)."""
    monkeypatch.setattr(sparse_index_fp8, "supports", lambda *_: request.param == "fp8")
    torch.compiler.reset()
    return request.param


def drawn(make_model, fields):
    model = make_model(**{"family": "glm5", **fields})
    module = build(model)
    weights.initialize(module, model)
    return model, module


@cases
def test_logits_and_all_gradients_of_a_pack_are_those_of_transformers(
    fields, make_model, make_pack, tmp_path
):
    transformers = pytest.importorskip("transformers")
    model, module = drawn(make_model, fields)
    weights.save(module, model, tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    pack = make_pack(LENGTHS)
    ours = module.lm_head.logits(module(*pack))
    begins = pack[2][:-1].tolist()
    alone = [pack[0][a : a + n][None] for a, n in zip(begins, LENGTHS, strict=True)]
    wanted = torch.cat([theirs(ids).logits[0] for ids in alone])
    assert close(ours, wanted)
    grad = torch.randn(wanted.shape, generator=torch.Generator().manual_seed(0))
    (ours * grad).sum().backward()
    (wanted * grad).sum().backward()
    expected = dict(theirs.named_parameters())
    for name, parameter in module.named_parameters():
        hf = "lm_head.weight" if name == "lm_head.weight" else f"model.{name}"
        if ".indexer." in name:
            assert not parameter.requires_grad
            assert parameter.grad is None and expected[hf].grad is None
        else:
            assert close(parameter.grad, expected[hf].grad), name


def blocks_of(module, pack, run):
    """Return the hidden states of all blocks, called by `run`, and each block's choice."""
    token_ids, positions, cu_seqlens = pack
    angles = rotary_angles(positions, 6, module.config.rope_theta, torch.float32)
    hidden, chosen, choices = module.embed_tokens(token_ids), None, []
    for layer in module.layers:
        hidden, _, chosen = run(layer, hidden, angles, Documents(cu_seqlens, 30), None, chosen)
        choices.append(chosen and chosen.chosen_TK)
    return hidden, choices


def test_a_shared_layer_attends_to_the_choice_of_the_layer_before_it(make_model, make_pack):
    types = ["full", "shared", "full", "shared"]
    _, module = drawn(make_model, {"num_layers": 4, "indexer": {"types": types}})
    _, choices = blocks_of(module, make_pack(LENGTHS), TransformerBlock.__call__)
    assert choices[0] is choices[1] and choices[2] is choices[3]
    assert not torch.equal(choices[0], choices[2])
    assert [layer.self_attn.indexer is None for layer in module.layers] == [False, True] * 2


def test_a_recomputed_block_keeps_its_choice_and_gives_the_same_gradients(
    scores, make_model, make_pack
):
    _, module = drawn(make_model, {"num_layers": 2})
    select = torch.ops.orrery.select_keys.default
    pack, found, calls = make_pack(LENGTHS), [], []
    plain = torch.ops.orrery.sparse_mla.default
    context = partial(recomputation_contexts, frozenset({select, plain}))
    again = partial(checkpoint, use_reentrant=False, context_fn=context)
    for run in (TransformerBlock.__call__, again):
        module.zero_grad()
        with Counted(calls):
            hidden, _ = blocks_of(module, pack, run)
            hidden.square().sum().backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert calls.count(select) == 2 + 2, "one choice a block, plain and recomputed alike"
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Counted(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self, calls):
        super().__init__()
        self.calls = calls

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("family", ["glm5", "deepseek_v32"])
def test_a_config_names_the_router_that_vllm_builds(make_model, family):
    """Without these fields vLLM has no bias of experts, and scores by softmax."""
    config = FAMILIES[family].hf_config(make_model(family))
    assert (config["topk_method"], config["scoring_func"]) == ("noaux_tc", "sigmoid")


def test_kimi_k2_is_read_as_published(make_model, tmp_path):
    model = make_model("kimi_k2", rope_scaling=YARN)
    module = build(model)
    weights.initialize(module, model)
    weights.save(module, model, tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    assert config["model_type"] == "kimi_k2" and config["topk_method"] == "noaux_tc"
    published = {"auto_map": {"AutoConfig": "configuration_deepseek.DeepseekV3Config"}}
    published["quantization_config"] = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    del config["rope_scaling"]["rope_type"], config["head_dim"], config["qk_head_dim"]
    file.write_text(json.dumps(config | published))
    check_config(model, tmp_path)
    init = {"kind": "random", "seed": 3, "std": 0.2}
    own, reason = axis.model_of(tmp_path, init, model.tokenizer.model_dump())
    assert own == model and reason is None
    file.write_text(json.dumps(config | {"n_group": 8}))
    with pytest.raises(OrreryError, match="says n_group 8, but this family supports only 1"):
        check_config(model, tmp_path)


@pytest.mark.parametrize("top_k", [8, 64])
def test_a_block_is_one_graph_to_the_compiler(top_k, scores, make_model, make_pack):
    _, module = drawn(make_model, {"num_layers": 2, "indexer": {"top_k": top_k}})
    pack = make_pack(LENGTHS)
    wanted, _ = blocks_of(module, pack, TransformerBlock.__call__)
    compiled = torch.compile(TransformerBlock.forward, fullgraph=True, backend="aot_eager")
    found, _ = blocks_of(module, pack, compiled)
    assert close(found, wanted)


def test_the_plain_formula_of_latent_attention_without_absorption(make_model, make_pack):
    """Sparse attention to all keys equals dense attention: the two paths check each other."""
    _, dense = drawn(make_model, {"indexer": {"top_k": 64}})
    _, sparse = drawn(make_model, {"indexer": {"top_k": 29}})
    pack = make_pack([30, 7])
    far = dense(*pack)[:29] - sparse(*pack)[:29], dense(*pack)[:29]
    assert far[0].norm() <= 1e-5 * far[1].norm(), "29 keys of at most 29 are all keys"


TRAINED = {
    "top-k below": {"num_layers": 3},
    "top-k above": {"num_layers": 3, "indexer": {"top_k": 64}},
    "shared": {
        "num_layers": 4,
        "indexer": {"types": ["full", "shared", "shared", "full"]},
    },
    "shared, top-k above": {
        "num_layers": 3,
        "indexer": {"top_k": 64, "types": ["full", "shared", "full"]},
    },
    "deepseek v3.2": {"family": "deepseek_v32", "num_experts": 16, "rope_scaling": YARN},
}


def naive_losses(module, pack):
    """Return each indexer's loss in float64: KL(attention ‖ softmax of its scores).

    It is summed over queries and averaged over the layers that share the choice. Attention and
    scores are whole matrices [T, T], made from each layer's detached input.
    """
    token_ids, positions, cu_seqlens = pack
    documents, mla = Documents(cu_seqlens, 30), module.config.mla
    turned = rotary_angles(
        positions, 6, module.config.rope_theta, torch.float64, module.config.rope_scaling
    )
    document = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    is_past = (document[:, None] == document) & torch.ones(sum(LENGTHS), sum(LENGTHS)).tril().bool()
    hidden, choice, scores, served = module.embed_tokens(token_ids), None, [], []
    for layer in module.layers:
        attention, x = layer.self_attn, layer.input_layernorm(hidden).detach()
        q_compressed = attention.q_a_layernorm(attention.q_a_proj(x)).detach()
        if (indexer := attention.indexer) is not None:
            q = indexer.wq_b(q_compressed).unflatten(-1, (-1, 12))
            k = indexer.k_norm(indexer.wk(x))[:, None]
            q, k = (
                torch.cat((indexer.rotate(one[..., :6], turned), one[..., 6:]), -1)
                for one in (q, k)
            )
            weights_proj = indexer.weights_proj(x) * (q.shape[1] * 12) ** -0.5
            products = torch.einsum("tji,si->tjs", q, k[:, 0]).relu()
            score = torch.einsum("tj,tjs->ts", weights_proj, products)
            score = score.masked_fill(~is_past, -torch.inf)
            worst = score.sort(dim=1, descending=True).values[:, : mla.indexer.top_k][:, -1:]
            is_chosen = is_past & (score >= worst)
            scores.append(score.masked_fill(~is_chosen, -torch.inf))
            served.append([])
        with torch.no_grad():
            q_nope, q_rope = (
                attention.q_b_proj(q_compressed).unflatten(-1, (-1, 16)).split((10, 6), -1)
            )
            latent, k_rope = attention.kv_a_proj_with_mqa(x).split((20, 6), -1)
            k_nope = attention.kv_b_proj(attention.kv_a_layernorm(latent)).unflatten(-1, (4, -1))
            q = torch.cat((q_nope, rotate_pairs(q_rope, turned)), -1)
            k_rope = rotate_pairs(k_rope[:, None], turned).expand(-1, 4, -1)
            k = torch.cat((k_nope[..., :10], k_rope), -1)
            logits = torch.einsum("thk,shk->hts", q, k) * attention.scale
            served[-1].append(logits.masked_fill(~is_chosen, -torch.inf).softmax(-1).sum(0) / 4)
            hidden, _, choice = layer(hidden, turned, documents, None, choice)
    losses = []
    for score, attentions in zip(scores, served, strict=True):
        log_q = score.log_softmax(-1).masked_fill(score.isneginf(), 0.0)
        each = [torch.xlogy(p, p).sum() - (p * log_q).sum() for p in attentions]
        losses.append(torch.stack(each).mean())
    return losses


@pytest.mark.parametrize("family", ["glm5", "deepseek_v32"])
def test_choices_in_fp8_are_those_of_vllms_steps(family, make_model, make_pack, monkeypatch):
    monkeypatch.setattr(sparse_index_fp8, "supports", lambda *_: True)
    model, module = drawn(make_model, {"family": family, "num_layers": 1, "num_experts": 16})
    module.layers[0].self_attn.indexer.k_norm.bias.data.normal_()
    pack = make_pack(LENGTHS)
    _, (chosen_TK,) = blocks_of(module, pack, TransformerBlock.__call__)
    attention, indexer = module.layers[0].self_attn, module.layers[0].self_attn.indexer
    x_TD = module.layers[0].input_layernorm(module.embed_tokens(pack[0]))
    angles = rotary_angles(pack[1], 6, model.rope_theta, torch.float32)

    def rounded(x_THI):
        """Rotate with the rotary embedding of attention, and round each head to FP8."""
        x_THI = indexer._rotate(x_THI, angles)  # columns in another order, with equal products
        scale = 2.0 ** torch.ceil(torch.log2(x_THI.abs().amax(-1, keepdim=True) / 448.0))
        return (x_THI / scale).to(torch.float8_e4m3fn).float() * scale

    q_TC = attention.q_a_layernorm(attention.q_a_proj(x_TD))
    q_TJI = rounded(indexer.wq_b(q_TC).unflatten(-1, (indexer.indexer.num_heads, -1)))
    k_TI = rounded(indexer.k_norm(indexer.wk(x_TD))[:, None])[:, 0]
    weight_TJ = indexer.weights_proj(x_TD)
    score_TS = torch.einsum("tj,tjs->ts", weight_TJ, (q_TJI @ k_TI.T).relu())
    begin = 0
    for length in LENGTHS:
        for t in range(begin, begin + length):
            best = score_TS[t, begin : t + 1].topk(min(t + 1 - begin, indexer.indexer.top_k))
            assert set((best.indices + begin).tolist()) == set(chosen_TK[t].tolist()) - {-1}
        begin += length


@pytest.mark.parametrize("fields", TRAINED.values(), ids=TRAINED)
@pytest.mark.parametrize("is_recomputed", [False, True])
def test_indexers_learn_attention_and_nothing_else_learns_from_them(
    fields, is_recomputed, make_model, make_pack
):
    pack = make_pack(LENGTHS)
    model, frozen = drawn(make_model, fields)
    _, module = drawn(make_model, fields)
    train_indexers(module)
    if is_recomputed:
        for layer in module.layers:
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    for one in (frozen, module):
        (one(*pack).square().sum() + (one.indexer_kl or 0.0)).backward()
    assert frozen.indexer_kl is None
    exact = build(model, torch.float64)
    exact.load_state_dict(module.state_dict())
    train_indexers(exact)
    losses = naive_losses(exact, pack)
    assert close(module.indexer_kl, sum(losses).detach())
    sum(losses).backward()
    wanted = {name: one.grad for name, one in exact.named_parameters() if ".indexer." in name}
    without = dict(frozen.named_parameters())
    assert len(wanted) == 5 * len(losses)
    for name, parameter in module.named_parameters():
        if name in wanted:
            assert (parameter.grad - wanted[name]).norm() <= 1e-5 * wanted[name].norm(), name
        elif name != "lm_head.weight":  # not called, so without a gradient
            assert torch.equal(parameter.grad, without[name].grad), name
    with torch.no_grad():
        module(*pack)
    assert module.indexer_kl is None, "without gradients nothing is computed for the loss"


def test_a_block_with_a_learning_indexer_is_one_graph(scores, make_model, make_pack):
    _, module = drawn(make_model, {"num_layers": 2, "indexer": {"types": ["full", "shared"]}})
    pack, found = make_pack(LENGTHS), []
    train_indexers(module)
    for is_compiled in (False, True):
        module.zero_grad()
        if is_compiled:
            for layer in module.layers:
                layer.forward = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")
        (module(*pack).square().sum() + module.indexer_kl).backward()
        found.append([p.grad.clone() for p in module.parameters() if p.grad is not None])
    assert all(close(one, other) for one, other in zip(*reversed(found), strict=True))
