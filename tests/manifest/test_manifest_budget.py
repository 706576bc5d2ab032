"""Test the plan of memory and time: refusals with remedies, measured engines, the table."""

import json
import math
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orrery.manifest.budget import engine, table
from orrery.manifest.budget.activations import sparse_backward_bytes
from orrery.manifest.budget.options import fitting_fields, memory_doubts, memory_misfits
from orrery.manifest.budget.parameters import count_parameters
from orrery.manifest.budget.run import RoleBudget, plan_run, spread_lengths
from orrery.manifest.budget.table import engine_layouts, trainer_layouts
from orrery.manifest.budget.trainer_memory import Workload, plan_memory
from orrery.manifest.budget.trainer_time import (
    COLLECTIVES_SHARE,
    Links,
    links,
    step_bytes,
    step_s,
)
from orrery.manifest.check import with_values
from orrery.manifest.devices import DEVICES, SPARSE_PAIRS, rates_of, usable_bytes
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.plan import check_supported, notes
from orrery.manifest.schema.inference import token_bytes

ROOT = Path(__file__).resolve().parents[2]
RUNS = sorted((ROOT / "manifests").glob("*.json"))


def run(name, **sections):
    values = {path.replace("__", "."): value for path, value in sections.items()}
    return with_values(load(ROOT / "manifests" / f"{name}.json"), values)


@pytest.mark.parametrize("path", RUNS, ids=lambda path: path.stem)
def test_every_shipped_run_fits_and_has_a_table_of_100_columns(path):
    manifest = load(path)
    budget = plan_run(manifest)
    assert not budget.misfits
    lines = list(table.lines(budget))
    assert max(map(len, lines)) <= 100
    assert budget.step_s > 0 and all(sum(role.memory.values()) > 0 for role in budget.roles)
    json.dumps(budget.as_json(), allow_nan=False)


def test_wrong_edits_are_refused_with_remedies_that_hold():
    edits = {"inference__quantization": "none", "trainer__fsdp__reduce_gradients": "step"}
    sentences = list(memory_misfits(run("glm5_run", **edits)))
    assert len(sentences) == 2
    assert "inference.quantization: 'fp8' frees 50.4 GiB" in sentences[0]
    assert "trainer.fsdp.reduce_gradients: 'micro_batch' instead of 'step'" in sentences[1]
    for edit, role in zip(edits, ("trainer", "inference"), strict=True):
        (text,) = memory_misfits(run("glm5_run", **{edit: edits[edit]}))
        assert not text.startswith(role)


def test_the_flagships_step_is_planned_in_less_than_four_minutes():
    budget = plan_run(run("glm5_run"))
    assert budget.tokens["all"] == 32768 and budget.step_s < 240 < budget.longest_step_s
    assert budget.step_s < budget.spread_step_s < 240
    assert budget.assumptions[0].startswith("all rollouts have 32,768 tokens, their mean")


@pytest.mark.parametrize("mean", [2, 100, 4096, 32768, 65536, 120_000, 131_072])
def test_lengths_that_spread_keep_their_mean_and_the_greatest_length(mean):
    found = spread_lengths(mean, 131_072, 64)
    assert found == sorted(found) and found[0] > 0 and found[-1] <= 131_072
    assert sum(found) / 64 == pytest.approx(mean, rel=0.01)
    if mean == 4096:  # far below the greatest: an exponential's mean square is twice the square
        assert sum(each * each for each in found) / 64 == pytest.approx(2 * mean**2, rel=0.1)


def test_gathers_of_all_tokens_are_planned_slower_than_an_exchange_by_expert():
    manifest = run("glm5_run")
    rates, decode = replace(rates_of("h200"), link_bytes=450e9), manifest.inference

    def seconds(backend, tokens=16.0, **shape):
        inference = decode.model_copy(update={"all2all_backend": backend, **shape})
        return engine.exchange_s(manifest.model, inference, tokens, 1, rates, 50e9)

    plain, low, high = (
        seconds(backend)
        for backend in ("allgather_reducescatter", "deepep_low_latency", "deepep_high_throughput")
    )
    assert low < plain / 3 and high == pytest.approx(low, rel=1e-9)  # eight experts, eight nodes
    # 64 ranks' tokens for 75 layers, twice: over eight network links of a node, 63 ring steps
    whole = 2 * 64 * 16 * 6144 * 2
    start = engine.COLLECTIVE_S + 7 * engine.NETWORK_STEP_S + 56 * engine.LINK_STEP_S
    assert plain == pytest.approx(75 * (whole * 7 / 8 / 400e9 + 2 * start))
    two_nodes = {"nodes_per_replica": 2, "data_parallel": 16}
    assert seconds("deepep_high_throughput", 4096, **two_nodes) == pytest.approx(
        seconds("deepep_low_latency", 4096, **two_nodes) / 4, rel=0.02
    )
    assert seconds("deepep_low_latency", data_parallel=1, nodes_per_replica=1) == 0.0


def test_overlap_of_half_batches_hides_the_shorter_of_exchange_and_computation():
    fields = {"inference__all2all_backend": "deepep_low_latency"}
    plain, overlapped = (
        plan_run(run("glm5_run", inference__dual_batch_overlap=is_on, **fields))
        for is_on in (False, True)
    )
    assert overlapped.engines["decode_step_s"] < 0.8 * plain.engines["decode_step_s"]


def test_deepep_has_buffers_for_the_tokens_of_a_step_at_all_experts():
    plain = run("glm5_run").inference
    model, sizes = run("glm5_run").model, []
    for tokens in (256, 8192):
        fields = {"all2all_backend": "deepep_low_latency", "max_batched_tokens": tokens}
        planned = engine.memory(model, plain.model_copy(update=fields), True, False)
        sizes.append(planned["communication buffers"])
    per_token = 4 * 256 * (2 * 6144 + 4 * 48)
    assert sizes[1] - sizes[0] == per_token * (8192 - 256) > 90 << 30


def test_prefill_engines_compute_the_samples_of_earlier_turns_again():
    several = plan_run(run("glm5_run"))
    assert any("earlier turns' samples again" in text for text in several.assumptions)
    local = plan_run(run("glm5_run", inference__max_local_prefill_tokens=4096))
    assert several.engines["prefill_s"] > 100 * local.engines["prefill_s"] > 0


def test_a_group_that_waits_for_its_longest_rollout_trains_older_tokens():
    budget = plan_run(run("glm5_run"))
    assert 2 * budget.staleness < budget.spread_staleness < 30


def test_a_mean_above_the_longest_rollout_is_refused():
    with pytest.raises(OrreryError, match=r"--tokens 200000: .* 131072; type at most that"):
        plan_run(run("glm5_run"), 200_000)


def test_a_suggested_cache_fits_by_the_whole_plan():
    large = run("glm5_run", inference__kv_cache_bytes=120 << 30)
    (text,) = memory_misfits(large)
    size = int(text.split("kv_cache_bytes: ")[1].split()[0])
    smaller = run("glm5_run", inference__kv_cache_bytes=size)
    assert not list(memory_misfits(smaller)) and not list(memory_doubts(smaller))


def test_a_group_prefills_its_prompt_once():
    alone, group = (
        plan_run(run("glm4_5_air_8", orchestrator__algorithm__group_size=size)).engines["step_s"]
        for size in (2, 16)
    )
    assert group < alone


def test_groups_that_grow_too_old_have_a_line_with_the_bound_that_keeps_them():
    fields = {"orchestrator__max_off_policy_steps": 8}
    budget = plan_run(run("glm5_run", **fields))
    assert budget.too_old["groups"] > 0.5
    (line,) = (text for text in table.lines(budget) if "too old" in text)
    bound = int(budget.too_old["steps"])
    assert f"max_off_policy_steps {bound} keeps all" in line
    for most in (bound, 30):
        fields["orchestrator__max_off_policy_steps"] = most
        assert plan_run(run("glm5_run", **fields)).too_old["groups"] == 0
    assert plan_run(run("asynchrony_h200_2_synchronous")).too_old["groups"] == 0


def test_lengths_that_spread_cost_dense_attention_and_caches_more():
    budget = plan_run(run("qwen3_30b_a3b_131k"))
    assert 1.3 * budget.step_s < budget.spread_step_s < budget.longest_step_s


def test_a_plan_of_several_turns_says_what_it_assumes_of_them():
    said = "up to 3 turns; caches hold earlier turns, tools take no time"
    assert said in plan_run(run("calculator")).assumptions
    assert not any("turns" in text for text in plan_run(run("reverse_text")).assumptions)


def test_a_cache_that_leaves_no_room_for_weights_is_refused_by_check_and_at_the_start():
    large = run("qwen3_30b_a3b_16k", inference__kv_cache_bytes=120 << 30)
    with pytest.raises(OrreryError, match=r"inference: .* 56\.9 GiB .* or inference\.kv_cache_b"):
        check_supported(large)
    (text,) = memory_misfits(large)
    smaller = int(text.split("kv_cache_bytes: ")[1].split()[0])
    assert not list(memory_misfits(run("qwen3_30b_a3b_16k", inference__kv_cache_bytes=smaller)))


def test_pairs_of_sparse_attention_count_once_for_each_of_a_chunk():
    manifest = load(ROOT / "manifests/glm5_run.json")
    model, trainer = manifest.model, manifest.trainer
    chosen, heads = model.latent.indexer.top_k, model.num_heads
    queries = SPARSE_PAIRS // chosen
    row = 2 * (model.latent.kv_lora_rank + model.latent.rope_head_dim)
    pair = row + 2 * heads
    chunk = queries * chosen * pair
    for number in (queries // 2, queries, 8 * queries):  # row numbers of all pairs exist
        expected = chosen * (min(number, queries) * pair + 4 * number)
        assert sparse_backward_bytes(model, trainer, number) == expected
    exact = trainer.model_copy(update={"compute_dtype": "float32"})
    assert sparse_backward_bytes(model, exact, queries) == 0
    plans = [
        plan_memory(model, trainer, Workload(tokens, tokens, 1), 2**37)
        for tokens in (queries * trainer.mesh.cp, 2 * queries * trainer.mesh.cp)
    ]
    more = [plan.moments["block 0, backward"]["recomputation"] for plan in plans]
    assert more[1] - chunk == 2 * (more[0] - chunk)


def test_roles_on_one_device_must_fit_together():
    alone = run("smollm2_problems_seed_1", inference__kv_cache_bytes=60 << 30)
    assert not list(memory_misfits(alone))
    both = run("smollm2_problems_seed_1", inference__kv_cache_bytes=74 << 30)
    (text,) = memory_misfits(both)
    assert text.startswith("trainer of stage") and "beside the engine" in text


def test_a_run_whose_plan_exceeds_the_device_but_may_fit_gets_a_note():
    sure = run("smollm2_problems_seed_1", inference__kv_cache_bytes=40 << 30)
    assert not list(memory_doubts(sure)) and not fitting_fields(sure)
    for cache in range(60, 74):
        doubtful = run("smollm2_problems_seed_1", inference__kv_cache_bytes=cache << 30)
        if doubts := list(memory_doubts(doubtful)):
            break
    (text,) = doubts
    assert "by its plan needs" in text and "so it may run out of memory" in text
    check_supported(doubtful)
    assert f"  note: {text}" in notes(doubtful)
    changed = with_values(doubtful, fitting_fields(doubtful))
    assert not list(memory_doubts(changed))


def test_the_engines_memory_is_within_a_tenth_of_the_measured_process():
    path = ROOT / "benchmarks" / "async" / "memory_h100.json"
    rows = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    measured = rows["smollm2_problems_seed_1"]["peak_bytes"]["orrery.inference"]
    manifest = run("smollm2_problems_seed_1")
    planned = engine.memory(manifest.model, manifest.inference, True, False)
    assert sum(planned.values()) == pytest.approx(measured, rel=0.1)


def test_a_devices_share_of_the_weights_follows_tensor_and_expert_parallel():
    model, inference = run("glm5_run").model, run("glm5_run").inference
    inference = inference.model_copy(update={"tensor_parallel": 8, "data_parallel": 1})
    alone = inference.model_copy(update={"tensor_parallel": 1, "expert_parallel": False})
    whole, experts = engine.weight_bytes(model, alone)
    share, own_experts = engine.weight_bytes(model, inference)
    assert own_experts == pytest.approx(experts / 8)
    assert whole / 8 < share < whole / 7  # narrow projections and indexers stay whole


def test_shorter_rollouts_make_a_shorter_step_and_more_fits_into_the_cache():
    manifest = run("qwen3_30b_a3b_131k")
    long, short = plan_run(manifest, tokens=131072), plan_run(manifest)
    assert long.step_s == long.longest_step_s == short.longest_step_s
    assert short.step_s < long.step_s / 4
    assert short.engines["sequences_a_rank"] > long.engines["sequences_a_rank"]
    assert short.tokens == {"all": 32768, "prompt": 1024, "sampled": 31744}


@pytest.mark.parametrize("name", ["smollm2_demo", "qwen3_4b_16k"])
def test_proposed_layouts_can_start_keep_the_devices_and_come_fastest_first(name):
    manifest = run(name)
    now = plan_run(manifest)
    trainers, engines = trainer_layouts(manifest, None), engine_layouts(manifest, None)
    assert trainers and engines
    assert trainers[0].seconds <= now.trainer_s["step"]
    assert engines[0].seconds <= now.engines["step_s"]
    for found in (trainers, engines):
        assert [one.seconds for one in found] == sorted(one.seconds for one in found)
        for one in found:
            check_supported(one.manifest)
            assert one.role.total_bytes < now.capacity_bytes
            old, new = now.roles, plan_run(one.manifest).roles
            assert [role.num_devices for role in new] == [role.num_devices for role in old]
            assert one.manifest.trainer.optimizer == manifest.trainer.optimizer
            assert one.manifest.orchestrator == manifest.orchestrator


def test_layouts_of_separate_prefill_engines_vary_their_number():
    manifest = run("glm5_run")
    shapes = list(table._shapes(manifest))
    prefills = {shape["inference.prefill_replicas"] for shape in shapes}
    assert prefills == {1, 2, 3, 4}
    for shape in shapes:
        decoding = shape["inference.num_replicas"] - shape["inference.prefill_replicas"]
        each = shape["inference.tensor_parallel"] * shape["inference.data_parallel"]
        assert decoding * each + 16 * shape["inference.prefill_replicas"] == 128


def test_layouts_fit_into_host_memory_and_keep_nothing_that_is_recomputed(monkeypatch):
    monkeypatch.setattr(table, "SIZES", (1,))
    monkeypatch.setattr(table, "EVERY", (1,))
    manifest = run("glm5_run")
    large, small = (trainer_layouts(manifest, None, None, size) for size in (8e12, 1.5e12))
    assert large[0].seconds < small[0].seconds
    assert large[0].role.host_bytes > 1.5e12 >= small[0].role.host_bytes
    for one in large + small:
        checkpointing = one.manifest.trainer.memory.activation_checkpointing
        assert "projections" not in getattr(checkpointing, "keep", ())


def test_a_search_shows_no_slower_layout_if_the_run_fits():
    found = [
        table.Proposal(seconds, RoleBudget("trainer", 1, {}, 0, 0, 0), {"a": 1}, None)
        for seconds in (5.0, 12.0)
    ]
    assert "1. 5 s" in "".join(table._proposals("trainer", 10.0, True, found))
    (_, none) = table._proposals("trainer", 5.0, True, found)
    assert none == "  none is faster than the run as it is"
    assert "2. 12 s" in "".join(table._proposals("trainer", 5.0, False, found))


def test_replicas_prefill_engines_and_a_slow_network_cost_time(monkeypatch):
    mesh = {"dp_replicate": 2, "dp_shard": 2, "cp": 1, "ep": 1}
    replicated = run("asynchrony_h200_4").trainer.model_copy(
        update={"mesh": run("asynchrony_h200_4").trainer.mesh.model_copy(update=mesh)}
    )
    model, rates = run("asynchrony_h200_4").model, rates_of("h200")
    link = links(replicated, rates, 4, 5e10)
    seconds = [
        step_s(model, replicated, 1, [4096], rates, each)["step"]
        for each in (link, replace(link, all=1e30))
    ]
    assert seconds[0] > seconds[1]
    apart = plan_run(run("h200_prefill_decode"))
    assert apart.traffic_bytes["caches to decode engines"] > 0
    fast, slow = (plan_run(run("glm5_run"), network=network) for network in (50e9, 5e9))
    assert (
        slow.engines["prefill_tokens_per_s_of_a_rank"]
        < (fast.engines["prefill_tokens_per_s_of_a_rank"])
    )
    monkeypatch.setattr(table, "SIZES", (1,))  # a search of fewer layouts
    slow, fast = (
        trainer_layouts(run("qwen3_30b_a3b_16k_sft"), None, network)[0] for network in (5e9, 50e9)
    )
    assert slow.seconds > fast.seconds


def test_collectives_beside_kernels_slow_them():
    manifest, rates = run("qwen3_4b_16k"), rates_of("h200")
    model, trainer = manifest.model, manifest.trainer
    link = links(trainer, rates, 8, 5e10)
    beside, alone = (
        step_s(model, trainer, 2, [16384, 16384], rates, each)
        for each in (link, Links(*5 * (math.inf,)))
    )
    assert beside["communication"] == 0 < beside["communication in all"]
    share = COLLECTIVES_SHARE * beside["communication in all"]
    kernels = ("dense products", "attention", "lm head", "elementwise", "sharding copies")
    before, after = (sum(one[kind] for kind in kernels) for one in (alone, beside))
    assert after == pytest.approx(before + share)


def test_adapters_of_experts_cost_time_beside_their_products():
    manifest, rates = run("qwen3_30b_a3b_lora_16k"), rates_of("h200")
    model, alone = manifest.model, Links(*5 * (math.inf,))
    few, both = (
        step_s(
            model,
            manifest.trainer.model_copy(
                update={"lora": manifest.trainer.lora.model_copy(update={"targets": targets})}
            ),
            1,
            [16384],
            rates,
            alone,
        )["grouped products"]
        for targets in (("attention",), ("attention", "experts"))
    )
    # Rows of gate, up and down projections: four times as many bytes as their inputs and outputs.
    moe = model.mixture
    width = 2 * model.hidden_size + 3 * moe.expert_intermediate_size
    rows = 16384 * model.num_layers * moe.num_experts_per_token
    assert both - few == pytest.approx(2 * 4 * rows * width / rates.memory_bytes)


def test_offloaded_state_waits_without_copies_beside_the_passes():
    manifest, rates = run("qwen3_30b_a3b_16k_offload"), rates_of("h200")
    beside, after = (
        step_s(manifest.model, manifest.trainer, 2, [16384] * 2, rates, streams_state=streams)
        for streams in (True, False)
    )
    assert beside["optimizer"] < after["optimizer"]


def test_a_prefill_engine_whose_plan_exceeds_the_device_gets_a_note():
    manifest = run("glm5_run")
    for cache in range(20, 120):
        prefill = manifest.inference.prefill.model_copy(update={"kv_cache_bytes": cache << 30})
        inference = manifest.inference.model_copy(update={"prefill": prefill})
        doubtful = manifest.model_copy(update={"inference": inference})
        if doubts := list(memory_doubts(doubtful)):
            break
    (text,) = doubts
    assert text.startswith("inference.prefill: by its plan a device needs")


def test_a_search_finds_a_layout_for_a_trainer_that_does_not_fit():
    large = run("qwen3_4b_16k", trainer__memory__max_tokens_per_micro_batch=16384 * 16)
    assert list(memory_misfits(large))
    (first, *_) = trainer_layouts(large, None)
    assert not list(memory_misfits(first.manifest))


def test_a_run_on_cpus_has_nothing_to_search():
    with pytest.raises(OrreryError, match="take a hardware axis with GPUs"):
        list(table.search(run("reverse_text"), None, None))


def test_a_slower_network_slows_updates_and_gathers_over_nodes():
    manifest = run("glm5_run")
    fast, slow = plan_run(manifest, network=50e9), plan_run(manifest, network=1e9)
    assert slow.update["seconds"] > 10 * fast.update["seconds"]
    assert slow.trainer_s["communication"] > fast.trainer_s["communication"]


def test_an_update_shards_experts_over_an_engines_devices_with_and_without_expert_parallel():
    together, apart = (
        plan_run(run("qwen3_30b_a3b_16k_wide", inference__expert_parallel=is_parallel)).update
        for is_parallel in (True, False)
    )
    assert run("qwen3_30b_a3b_16k_wide").inference.data_parallel > 1
    assert together == apart


def test_tensor_parallel_engines_receive_whole_caches_and_one_copy_of_latent_caches():
    wide = {"tensor_parallel": 4, "num_replicas": 4, "prefill_replicas": 2, "expert_parallel": True}
    edits = {f"inference__{field}": value for field, value in wide.items()}
    name, what = "qwen3_30b_a3b_16k_prefill_decode", "caches to decode engines"
    alone, together = plan_run(run(name)), plan_run(run(name, **edits))
    assert run(name).inference.tensor_parallel == 1
    assert together.traffic_bytes[what] == alone.traffic_bytes[what]
    manifest = run("glm5_run")
    latent = manifest.inference.model_copy(update={"tensor_parallel": 2, "data_parallel": 32})
    halved = manifest.model_copy(update={"inference": latent})
    assert plan_run(halved).traffic_bytes[what] == plan_run(manifest).traffic_bytes[what]


def test_only_layers_with_an_indexer_cache_its_keys_in_fp8_with_a_scale():
    manifest = run("glm5_run")
    model, inference = manifest.model, manifest.inference
    latent, keys = 78 * (512 + 64) * 2, 128 + 4
    assert token_bytes(model, inference) == latent + 78 * keys
    indexer = model.latent.indexer.model_copy(update={"types": ["full"] * 20 + ["shared"] * 58})
    mla = model.latent.model_copy(update={"indexer": indexer})
    shared = model.model_copy(update={"mla": mla})
    assert token_bytes(shared, inference) == latent + 20 * keys
    rates = rates_of("h200")
    steps = [  # contexts above top_k, so that a longer one reads only more keys
        engine.decode_s(one, inference, 64, context, rates, 50e9)
        for one in (model, shared)
        for context in (100_000, 200_000)
    ]
    read = (steps[1] - steps[0], steps[3] - steps[2])
    assert read == pytest.approx([64 * 1e5 * n * keys / rates.memory_bytes for n in (78, 20)])


def test_collectives_are_counted_by_link():
    found = run("glm5_run")
    counted = count_parameters(found.model, None)
    mesh = found.trainer.mesh.model_copy(
        update={"dp_replicate": 1, "dp_shard": 16, "cp": 1, "ep": 8}
    )
    trainer = found.trainer.model_copy(update={"mesh": mesh})

    def moved(per_node):
        return step_bytes(found.model, trainer, counted, 1, 1e6, per_node)

    one_node, two = moved(16), moved(8)
    assert all(by_link["network"] == 0 for by_link in one_node.values())
    experts = sum(unit.trained_experts + unit.frozen_experts for unit in counted.units)
    values = counted.total - experts
    # Each of two gathers sends every weight to all other ranks of its group, in bfloat16.
    assert one_node["gathers of weights"]["links"] == pytest.approx(
        2 * 2 * (15 * values + experts), rel=1e-6
    )
    for name, by_link in two.items():
        assert sum(by_link.values()) == pytest.approx(sum(one_node[name].values()))
    # Two rings cross between nodes: of each weight once a node, of experts on each of 8 ranks.
    assert two["gathers of weights"]["network"] == pytest.approx(
        2 * 2 * (15 * values / 8 + experts), rel=1e-6
    )
    assert two["expert parallel"]["network"] == 0 < two["expert parallel"]["links"]


def test_the_plan_says_which_memory_another_ep_changes():
    [(name, kinds)] = plan_run(run("glm5_run")).other_ep.items()
    assert name == "with ep 1" and kinds["gathered weights"] > 0
    without = [n for n in ("qwen3_8b_8k", "reverse_text") if plan_run(run(n)).other_ep]
    assert without == []


def test_ranks_that_shard_an_expert_share_no_network_card_of_a_node():
    trainer, rates = run("glm5_run").trainer, rates_of("h200")
    found = links(trainer, rates, devices_per_node=8, network=10e9)
    assert (found.shards, found.experts, found.ep, found.all) == (80e9, 10e9, 350e9, 10e9)
    alone = links(run("qwen3_30b_a3b_16k").trainer, rates, devices_per_node=8, network=10e9)
    assert alone.shards == alone.experts == rates.collective_bytes


def test_every_device_has_rates_and_only_measured_ones_have_a_file():
    h200 = rates_of("h200")
    for name, device in DEVICES.items():
        rates = rates_of(name)
        assert 0 < rates.dense_flops <= device.bf16_flops and usable_bytes(name) > 0
        assert (rates.source == h200.source) == (name == "h200")


def test_fp8_weights_on_gpus_without_fp8_units_save_memory_but_no_time():
    fp8 = rates_of("a100_80gb")
    assert fp8.fp8_flops == fp8.dense_flops > 0
    edits = {"hardware__accelerator": "a100_80gb", "inference__kv_cache_bytes": 8 << 30}
    narrow, plain = (
        plan_run(run("asynchrony_h200_1", **edits, inference__quantization=kind))
        for kind in ("fp8", "none")
    )
    rate = "prefill_tokens_per_s_of_a_rank"
    assert narrow.engines[rate] == plain.engines[rate]
    assert narrow.roles[1].memory["weights"] < plain.roles[1].memory["weights"]


def test_steps_in_fp8_are_planned_within_a_tenth_of_the_measured_ones():
    record = ROOT / "benchmarks/trainer/fp8_layers.json"
    measured = {row["variant"]: row["value"] for row in json.loads(record.read_text())["rows"]}
    for part, name, layers, document, fp8 in (
        ("dense", "qwen3_8b_8k", 12, 8192, ["attention", "feed_forward"]),
        ("mixture", "qwen3_30b_a3b_16k", 5, 16_384, ["attention", "experts"]),
    ):
        model = run(name).model.model_copy(update={"num_layers": layers, "fp8": fp8})
        trainer = run(name, trainer__fsdp__reshard_after_forward=False).trainer
        mesh = trainer.mesh.model_copy(update={"dp_shard": 1})
        trainer = trainer.model_copy(update={"mesh": mesh})
        lengths = [document] * (16_384 // document)
        seconds = step_s(model, trainer, 1, lengths, rates_of("h200"))
        tokens_per_s = measured[f"{part}: {name}, {layers} layers, FP8"]
        assert 16_384 / seconds["step"] == pytest.approx(tokens_per_s, rel=0.1)


def test_planning_imports_no_torch():
    code = (
        "import sys; from orrery.manifest.budget import run, table, options; "
        "sys.exit('torch' in sys.modules or 'numpy' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


@pytest.mark.parametrize(
    ("offload", "prefill", "decode"),
    [
        ({"kind": "tiers", "host_bytes": 200 << 30, "disk_bytes": 1 << 40}, 4, 8),  # per rank
        ({"kind": "mooncake", "protocol": "rdma", "segment_bytes": 200 << 30}, 1 / 2, 1 / 8),
    ],
)
def test_a_node_of_a_wide_engine_holds_the_offloaded_caches_of_its_own_ranks(
    offload, prefill, decode
):
    transfer = {"kind": "mooncake", "protocol": "rdma"}
    edits = {"inference__kv_offload": offload, "inference__kv_transfer": transfer}
    edits["trainer__indexer_choice"] = "own"
    roles = {role.role: role for role in plan_run(run("glm5_run", **edits)).roles}
    for name, times in (("prefill", prefill), ("decode", decode)):
        assert roles[name].host_bytes == roles[name].pinned_bytes == times * (200 << 30)
        assert roles[name].scratch_bytes == times * offload.get("disk_bytes", 0)


def test_a_node_of_a_wide_engine_reads_its_experts_and_all_other_weights():
    manifest = run("glm5_run")
    found = plan_run(manifest).loading
    prefill, decode = (found[name]["bytes"] for name in ("prefill", "decode"))
    experts = (prefill - decode) / (1 / 2 - 1 / 8)  # engines of 2 and of 8 nodes
    whole = 2 * count_parameters(manifest.model, manifest.trainer.lora).total
    assert decode + experts * 7 / 8 == pytest.approx(whole)
    assert found["trainer"]["bytes"] == pytest.approx(whole / 12)
