"""Mistakes: one sentence each, and no file written."""

import copy
import json
import re
import sys
import tempfile
from pathlib import Path

import manifest_specs
import pytest

from orrery.manifest import cli
from orrery.manifest.check import check
from orrery.manifest.cli import app, run_app
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace, canonical_json, load
from orrery.manifest.render import render, render_all
from orrery.manifest.schema import SCHEMA_VERSION, TARGETS

with tempfile.TemporaryDirectory() as _folder:
    _workspace = manifest_specs.checkout(Path(_folder))
    GOOD, NODES, SPARSE = (
        json.loads(canonical_json(render(_workspace, name).manifest))
        for name in ("words", "words_nodes", "words_sparse")
    )

# A shape for prefill engines.
SHAPE = {
    "nodes_per_replica": 1, "tensor_parallel": 1, "data_parallel": 1, "expert_parallel": False,
    "kv_cache_bytes": 1 << 28, "max_num_sequences": 8, "max_batched_tokens": 512,
    "enforce_eager": True, "all2all_backend": "allgather_reducescatter",
    "dual_batch_overlap": False, "environment": {},
}  # fmt: skip
CHECKPOINTING = "trainer.memory.activation_checkpointing"
ADAPTERS = {"rank": 8, "alpha": 16.0, "targets": ["attention"], "seed": 1}
SGD = {"kind": "sgd", "lr": 1e-3, "momentum": 0.0, "weight_decay": 0.0}
MUON = {
    **SGD,
    "kind": "muon",
    "nesterov": True,
    "num_newton_schulz_steps": 5,
    "rest": GOOD["trainer"]["optimizer"],
}
STORE = {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 16 << 20}
ROUTER = {
    "kind": "vllm_router",
    "policy": "cache_aware",
    "balance_abs_threshold": 2,
    "balance_rel_threshold": 1.1,
}
MLA = {
    "q_lora_rank": 8,
    "kv_lora_rank": 8,
    "nope_head_dim": 12,
    "rope_head_dim": 4,
    "value_head_dim": 8,
    "indexer": {"num_heads": 2, "head_dim": 4, "top_k": 4, "types": None},
}


def broken(path, value, data=None):
    data = copy.deepcopy(GOOD if data is None else data)
    at = data
    *keys, last = [int(key) if key.isdigit() else key for key in path.split(".")]
    for key in keys:
        at = at[key]
    if value is KeyError:
        del at[last]
    else:
        at[last] = value
    return data


SPARSE_ATTENTION = broken(
    "model",
    SPARSE["model"]
    | {"family": "glm5", "num_layers": 4, "num_heads": 4, "num_kv_heads": 4, "head_dim": 16}
    | {"qk_norm": False, "mla": MLA}
    | {"moe": SPARSE["model"]["moe"] | {"score": "sigmoid", "num_shared_experts": 1}},
    SPARSE,
)
LEARNING = broken("trainer.indexer", "train", SPARSE_ATTENTION)
REPLAYING = broken("trainer.indexer_choice", "replay", SPARSE_ATTENTION)
LONG = broken("transport.routed_experts", True, REPLAYING)
LONG["model"]["max_positions"] = LONG["inference"]["max_model_len_tokens"] = 16385
LONG["trainer"]["memory"]["max_tokens_per_micro_batch"] = 1 << 15
LONG["inference"]["kv_cache_bytes"] = 1 << 30
SIGN_SGD = {"kind": "sign_sgd", "lr": 1e-3, "weight_decay": 0.0}
OFFLOADED = broken("trainer.memory.optimizer_offload", True)
SENTENCES = [
    (
        broken("trainer.optimizer.lrr", 1e-3),
        "trainer.optimizer.lrr = 0.001: there is no such field; did you mean 'lr'?",
    ),
    (
        broken("trainer.optimizer.lr", "fast"),
        'trainer.optimizer.lr = "fast": should be a valid number',
    ),
    (broken("trainer.optimizer.lr", -1), "trainer.optimizer.lr = -1: should be greater than 0"),
    (
        broken("trainer.param_dtype", "bfloat16"),
        "trainer.param_dtype 'bfloat16': a step below 1/512 of a weight is rounded away, and at "
        "a learning rate of 1e-6 no weight moves; set trainer.param_dtype to 'float32' (frozen "
        "weights beside trainer.lora are held in trainer.compute_dtype)",
    ),
    (
        broken("trainer.optimizer.beta1", 1.0),
        "trainer.optimizer.beta1 = 1.0: should be less than 1",
    ),
    (broken("trainer.optimizer.beta2", 1), "trainer.optimizer.beta2 = 1: should be less than 1"),
    (
        broken("trainer.optimizer", {**SGD, "momentum": 1.0}),
        "trainer.optimizer.momentum = 1.0: should be less than 1",
    ),
    (
        broken("trainer.optimizer", {**MUON, "momentum": 1.0}),
        "trainer.optimizer.momentum = 1.0: should be less than 1",
    ),
    (broken("seed", 1.5), "seed = 1.5: "),
    (broken("seed", True), "seed = true: should be a valid integer"),
    (broken("trainer.loss", KeyError), "trainer.loss: is missing"),
    (
        broken("trainer.schedule.kind", "cosin"),
        "trainer.schedule.kind = \"cosin\": there is no such kind; did you mean 'cosine'?",
    ),
    (
        broken("trainer.optimizer.kind", "x"),
        'trainer.optimizer.kind = "x": there is no such kind; '
        "the kinds here are adamw, muon, sgd, sign_sgd",
    ),
    (
        broken("stages.rl", None),
        "stages.rl = null: it cannot be left out; write an object with num_steps",
    ),
    (
        broken("inference.kv_offload", None),
        "inference.kv_offload = null: should be an object whose kind is one of none, tiers, "
        "mooncake",
    ),
    (
        broken("trainer.memory.activation_checkpointing", "full"),
        'trainer.memory.activation_checkpointing = "full": '
        "should be an object whose kind is one of none, full, selective, modules",
    ),
    (
        broken("model.init", {"seed": 1}),
        'model.init = {"seed": 1}: should be an object whose kind is one of random, pretrained',
    ),
    (
        broken("stages.sft.data", None),
        "stages.sft.data = null: should be an object whose kind is one of demonstrations, "
        "chat_file, dataset",
    ),
    (
        broken("trainer.mesh", None),
        "trainer.mesh = null: it cannot be left out; write an object with dp_replicate, dp_shard,",
    ),
    (
        broken("tasks.train.0", None),
        "tasks.train[0] = null: it cannot be left out; write an object with name, kind,",
    ),
    (broken("trainer.schedule.decay", 3), "trainer.schedule.decay = 3: there is no such field"),
    (
        broken("tasks.train.0.wieght", 1),
        "tasks.train[0].wieght = 1: there is no such field; did you mean 'weight'?",
    ),
    (
        broken("stages.sft.data.task.sed", 1),
        "stages.sft.data.task.sed = 1: there is no such field; did you mean 'seed'?",
    ),
    (
        broken("trainer.mesh.ep", 3),
        "trainer.mesh.ep 3: family 'qwen3' has no experts to spread; set trainer.mesh.ep to 1",
    ),
    (
        broken("trainer.mesh.ep", 3, SPARSE),
        "trainer.mesh.ep 3 does not divide dp_shard·cp = 1; choose from [1]",
    ),
    (
        broken("inference.prefill_replicas", 1),
        "inference.prefill_replicas 1 of num_replicas 1 leave no engine to decode; choose from "
        "0 to 0",
    ),
    (
        broken("inference.kv_transfer", {"kind": "none"}, NODES),
        "inference.prefill_replicas 2 must send caches to other engines; set "
        "inference.kv_transfer.kind to 'nixl' or 'mooncake', or",
    ),
    (
        broken("inference.kv_transfer", {"kind": "nixl"}),
        "inference.kv_transfer 'nixl' without engines that only prefill; set "
        "inference.prefill_replicas, or",
    ),
    (
        broken("transport.weights", "nixl", broken("inference.kv_offload", STORE)),
        "transport.weights 'nixl' with inference.kv_offload.kind 'mooncake': no engine can load "
        "both, because each has its own copy of rdma-core",
    ),
    (
        broken(
            "orchestrator.admission", {"kind": "adaptive", "min_in_flight": 9, "max_in_flight": 8}
        ),
        "orchestrator.admission.min_in_flight 9 exceeds max_in_flight 8; set it to at most that",
    ),
    (
        broken("trainer.fsdp.cpu_offload", True, OFFLOADED),
        "trainer.memory.optimizer_offload with fsdp.cpu_offload: the state lives in host memory "
        "already; set trainer.memory.optimizer_offload to false",
    ),
    (
        broken("trainer.memory.optimizer_offload_resident", 0.5),
        "trainer.memory.optimizer_offload_resident 0.5 without optimizer_offload: all state is on "
        "the device; set it to 0",
    ),
    (
        broken("stages.sft", None, broken("trainer.optimizer", SIGN_SGD, OFFLOADED)),
        "trainer.memory.optimizer_offload: no state to offload (sign_sgd); set "
        "trainer.memory.optimizer_offload to false",
    ),
    (
        broken("stages.sft.optimizer", SGD, broken("trainer.optimizer", SIGN_SGD, OFFLOADED)),
        "trainer.memory.optimizer_offload: no state to offload (sgd and sign_sgd); set "
        "trainer.memory.optimizer_offload to false",
    ),
    (
        broken("transport.weights", "adapters"),
        "transport.weights 'adapters': the trainer has no adapters; set trainer.lora, or "
        "transport.weights to 'files'",
    ),
    (
        broken("trainer.lora", {**ADAPTERS, "targets": ["attention", "experts"]}),
        "trainer.lora.targets ['experts']: family 'qwen3' with these layers has no such part; "
        "choose from ['attention', 'feed_forward']",
    ),
    (
        broken("trainer.lora", {**ADAPTERS, "targets": ["feed_forward"]}, SPARSE),
        "trainer.lora.targets ['feed_forward']: family 'qwen3_moe' with these layers has no such "
        "part; choose from ['attention', 'experts']",
    ),
    (
        broken(CHECKPOINTING, {"kind": "modules", "modules": ["norms", "router"]}),
        f"{CHECKPOINTING}.modules ['router']: family 'qwen3' with these layers recomputes none; "
        "choose from ['norms', 'attention_projections']",
    ),
    (
        broken(CHECKPOINTING, {"kind": "modules", "modules": ["norm"]}),
        f"{CHECKPOINTING}.modules[0] = \"norm\": should be 'norms', 'attention_projections', "
        "'router' or 'experts_activation'",
    ),
    (
        broken("transport.routed_experts", True),
        "transport.routed_experts: family 'qwen3' has no experts to choose; set "
        "transport.routed_experts to false",
    ),
    (
        broken("inference.expert_parallel", True, SPARSE),
        "inference.expert_parallel: the only device of an engine has all experts; set "
        "inference.expert_parallel to false, or data_parallel",
    ),
    (
        broken("inference.num_replicas", 2),
        "inference.num_replicas 2 needs a router; set inference.router.kind to 'vllm_router'",
    ),
    (
        broken("inference.router", {**ROUTER, "balance_rel_threshold": 0.9}),
        "inference.router.balance_rel_threshold = 0.9: should be greater than or equal to 1",
    ),
    (
        broken("inference.router", {**ROUTER, "policy": "round_robin"}),
        "inference.router.balance_abs_threshold 2: policy 'round_robin' ignores it; set it to "
        "null, or policy to 'cache_aware'",
    ),
    (
        broken("inference.router", {**ROUTER, "balance_rel_threshold": None}),
        "inference.router.balance_rel_threshold is null: policy 'cache_aware' reads it; set it "
        "to a number",
    ),
    (
        broken("inference.router", ROUTER, NODES),
        "inference.router 'vllm_router' with prefill_replicas 2: the orchestrator itself "
        "sends requests to a prefill and a decode engine; set inference.router.kind to "
        "'none', or",
    ),
    (
        broken("inference.tensor_parallel", 8),
        "inference.tensor_parallel 8: 4 query heads and 2 key heads do not divide among as many "
        "devices; choose from [1, 2, 4]",
    ),
    (
        broken("inference.tensor_parallel", 3, broken("model.num_heads", 6)),
        "inference.tensor_parallel 3: 6 query heads and 2 key heads do not divide among as many "
        "devices; choose from [1, 2, 6]",
    ),
    (
        broken("inference.max_num_sequences", 257),
        "inference.max_batched_tokens 256 cannot hold one token of each of "
        "inference.max_num_sequences 257; set it to at least that",
    ),
    (
        broken("inference.kv_cache_bytes", 12287),
        "inference.kv_cache_bytes 12287 cannot hold one rollout of "
        "inference.max_model_len_tokens 64, which needs 12288; set it to at least that",
    ),
    (
        broken("inference.kv_offload", {"kind": "tiers", "host_bytes": 8191, "disk_bytes": 0}),
        "inference.kv_offload.host_bytes 8191 cannot hold one rollout of "
        "inference.max_model_len_tokens 64, which needs 8192; set it to at least that, or "
        "inference.kv_offload.kind to 'none'",
    ),
    (
        broken("inference.kv_offload", {"kind": "tiers", "host_bytes": 8192, "disk_bytes": 8191}),
        "inference.kv_offload.disk_bytes 8191 cannot hold one rollout of "
        "inference.max_model_len_tokens 64, which needs 8192; set it to at least that, or to 0 "
        "for no files",
    ),
    (
        broken("inference.kv_offload", {**STORE, "segment_bytes": (16 << 20) - 1}),
        "inference.kv_offload.segment_bytes 16777215: Mooncake takes at least 16777216 of each "
        "of an engine's 1 devices, and one rollout of inference.max_model_len_tokens 64 needs "
        "8192; set it to at least 16777216, or inference.kv_offload.kind to 'none'",
    ),
    (
        broken(
            "inference.kv_offload",
            {**STORE, "segment_bytes": 16 << 20},
            broken("inference.data_parallel", 2),
        ),
        "inference.kv_offload.segment_bytes 16777216: Mooncake takes at least 16777216 of each "
        "of an engine's 2 devices",
    ),
    (
        broken("inference.kv_block_tokens", 16),
        "inference.kv_block_tokens 16: attention on cpu reads blocks of a multiple of 32 tokens; "
        "try 32",
    ),
    (
        broken("inference.kv_block_tokens", 24, broken("hardware.accelerator", "h200")),
        "inference.kv_block_tokens 24: attention on h200 reads blocks of a multiple of 16 "
        "tokens; try 32",
    ),
    (
        broken("inference.tensor_parallel", 4, broken("model.intermediate_size", 30)),
        "inference.tensor_parallel 4: model.intermediate_size 30 does not divide among as many "
        "devices; choose tensor_parallel from [1, 2]",
    ),
    (
        broken("inference.data_parallel", 3, broken("inference.tensor_parallel", 2, SPARSE)),
        "inference.data_parallel·tensor_parallel 6: model.moe.expert_intermediate_size 8 does "
        "not divide among as many devices; choose data_parallel·tensor_parallel from [1, 2, 4], "
        "or set inference.expert_parallel to true",
    ),
    (
        broken("hardware.num_nodes", 2),
        "hardware.devices_per_node 2: inference has 1 devices, which fill no whole number of "
        "nodes; try 2",
    ),
    (
        broken("trainer.mesh.dp_shard", 7, NODES),
        "hardware.devices_per_node 2: trainer has 7 devices, which fill no whole number of "
        "nodes; try 4",
    ),
    (
        broken("inference.prefill_replicas", 3, NODES),
        "hardware.devices_per_node 2: prefill has 3 devices, which fill no whole number of "
        "nodes; try 2",
    ),
    (
        broken("inference.tensor_parallel", 4, NODES),
        "inference.data_parallel·tensor_parallel = 4 does not divide hardware.devices_per_node "
        "2; choose from [1, 2], or set inference.nodes_per_replica to 2 for an engine over nodes",
    ),
    (
        broken("inference.all2all_backend", "deepep_low_latency"),
        "inference.all2all_backend 'deepep_low_latency': DeepEP exchanges tokens between GPUs of "
        "data-parallel ranks that share experts; set expert_parallel and data_parallel, or "
        "inference.all2all_backend to 'allgather_reducescatter'",
    ),
    (
        broken("inference.all2all_backend", "naive"),
        "inference.all2all_backend: vLLM 0.32 has no backend 'naive' and would run "
        "'allgather_reducescatter' in its place; set it to 'allgather_reducescatter'",
    ),
    (
        broken("inference.prefill", SHAPE | {"all2all_backend": "pplx"}),
        "inference.prefill.all2all_backend: vLLM 0.32 has no backend 'pplx' and would run "
        "'allgather_reducescatter' in its place; set it to 'allgather_reducescatter'",
    ),
    (
        broken("inference.all2all_backend", "nixl_ep"),
        "inference.all2all_backend = \"nixl_ep\": should be 'allgather_reducescatter', ",
    ),
    (
        broken("inference.dual_batch_overlap", True),
        "inference.dual_batch_overlap: vLLM overlaps no exchange of 'allgather_reducescatter'; "
        "set inference.all2all_backend to 'deepep_high_throughput' or 'deepep_low_latency', or "
        "inference.dual_batch_overlap to false",
    ),
    (
        broken("inference.max_local_prefill_tokens", 64),
        "inference.max_local_prefill_tokens 64 without engines that only prefill; set it to 0, or "
        "inference.prefill_replicas to 1 or more",
    ),
    (
        broken("inference.prefill", SHAPE),
        "inference.prefill: no engine only prefills; set inference.prefill_replicas to 1 or more, "
        "or inference.prefill to null",
    ),
    (
        broken("inference.prefill", SHAPE | {"max_batched_tokens": 4}, NODES),
        "inference.prefill.max_batched_tokens 4 cannot hold one token of each of "
        "inference.prefill.max_num_sequences 8; set it to at",
    ),
    (
        broken("inference.prefill", SHAPE | {"tensor_parallel": 4}, NODES),
        "inference.prefill.data_parallel·tensor_parallel = 4 does not divide "
        "hardware.devices_per_node 2; choose from [1, 2], or set "
        "inference.prefill.nodes_per_replica to 2 for an engine over nodes",
    ),
    (
        broken("inference.nodes_per_replica", 2, NODES),
        "inference.nodes_per_replica 2 does not divide data_parallel 1; each node has equally "
        "many data-parallel ranks, so choose from [1]",
    ),
    (
        broken("inference.nodes_per_replica", 2, broken("inference.data_parallel", 2)),
        "inference.nodes_per_replica 2: only experts span nodes; set inference.expert_parallel "
        "to true, or inference.nodes_per_replica to 1 and inference.num_replicas to more",
    ),
    (
        broken("hardware.num_nodes", 4, NODES),
        "hardware.num_nodes 4: prefill 1 + decode 2 + trainer 2 nodes are 5; set "
        "hardware.num_nodes to 5, or trainer.mesh's dp_replicate·dp_shard·cp to 2",
    ),
    (
        broken(
            "inference.kv_transfer",
            {"kind": "none"},
            broken(
                "inference.prefill_replicas",
                0,
                broken("hardware.num_nodes", 6, broken("inference.router", ROUTER, NODES)),
            ),
        ),
        "hardware.num_nodes 6: inference 3 + trainer 2 nodes are 5; set hardware.num_nodes to 5",
    ),
    (
        broken(
            "hardware",
            {"accelerator": "h200", "num_nodes": 1, "devices_per_node": 1, "shared_devices": False},
        ),
        "trainer 1 + inference 1 devices do not fit 1",
    ),
    (
        broken("model.family", "glm4"),
        "model.family = \"glm4\": should be 'qwen3', 'qwen3_moe', 'llama', 'glm4_moe', 'glm5', "
        "'deepseek_v3', 'deepseek_v32', 'kimi_k2' or 'hugging_face'",
    ),
    (broken("model.family", "glm5"), "model.family 'glm5' and moe null do not go together"),
    (
        broken("model.mla", MLA),
        "model.head_dim 8 is not mla.nope_head_dim 12 + mla.rope_head_dim 4",
    ),
    (
        broken("model.head_dim", 7),
        "model.head_dim · rotary_fraction 7 is odd, and rotary embeddings rotate pairs of numbers; "
        "try 8",
    ),
    (
        broken("model.mla", {**MLA, "nope_head_dim": 5, "rope_head_dim": 3}),
        "model.mla.rope_head_dim 3 is odd, and rotary embeddings rotate pairs of numbers; try 4",
    ),
    (
        broken("model.qk_norm", True, SPARSE_ATTENTION),
        "model.qk_norm True: family 'glm5' has False only; set it to that, or choose another",
    ),
    (
        broken("trainer.lora", ADAPTERS, SPARSE_ATTENTION),
        "trainer.lora.targets ['attention']: family 'glm5' with these layers has no such part; "
        "choose from",
    ),
    (
        broken("trainer.indexer", "train"),
        "trainer.indexer 'train': family 'qwen3' has no indexers; set trainer.indexer to 'frozen'",
    ),
    (
        broken("trainer.lora", {**ADAPTERS, "targets": ["experts"]}, LEARNING),
        "trainer.indexer 'train' with trainer.lora: engines would get no indexers, only adapters; "
        "set trainer.indexer to 'frozen'",
    ),
    (
        broken("trainer.indexer_choice", "compare"),
        "trainer.indexer_choice 'compare': family 'qwen3' has no indexers here; set "
        "trainer.indexer_choice to 'own'",
    ),
    (
        REPLAYING,
        "trainer.indexer_choice 'replay': choices of keys are sent with choices of experts; "
        "set transport.routed_experts to true, or set trainer.indexer_choice to 'own'",
    ),
    (
        LONG,
        "trainer.indexer_choice 'replay' with inference.max_model_len_tokens 16385: a choice has a "
        "bit for each token, for at most 16384 tokens; set trainer.indexer_choice to 'compare', "
        "which sends samples, or to 'own'",
    ),
    (
        broken("model.num_kv_heads", 1, SPARSE_ATTENTION),
        "model.num_kv_heads 1: latent attention has a key for each of num_heads 4; set it to that",
    ),
    (
        broken("model.mla.indexer.head_dim", 2, SPARSE_ATTENTION),
        "model.mla.indexer.head_dim 2 is less than mla.rope_head_dim 4, its rotated part; set it "
        "to at least that",
    ),
    (
        broken("model.mla.indexer.types", ["shared", "full"], SPARSE_ATTENTION),
        "model.mla.indexer.types has 2 layers, of which the first is ['shared']; name all 4 "
        "layers, the first 'full', or set it to null",
    ),
    (
        broken("model.num_mtp_layers", 1, SPARSE_ATTENTION),
        "model.num_mtp_layers 1: layers for multi-token prediction come from a pretrained "
        "checkpoint of glm4_moe, glm5, deepseek_v3, deepseek_v32, kimi_k2 only; set it to 0",
    ),
    (
        broken("model.moe.num_experts_per_token", 9, SPARSE),
        "model.moe.num_experts_per_token 9 exceeds num_experts 4; set it to at most that",
    ),
    (
        broken("model.moe.num_dense_layers", 2, SPARSE),
        "model.moe.num_dense_layers 2 exceeds model.num_layers; set it to at most 1",
    ),
    (
        broken("model.mla", {**MLA, "nope_head_dim": 4}),
        "model.family 'qwen3' and mla set do not go together",
    ),
    (
        broken("model.moe.num_shared_experts", 1, SPARSE),
        "model.moe.num_shared_experts 1: family 'qwen3_moe' has 0 only",
    ),
    (
        broken("model.moe.score", "sigmoid", SPARSE),
        "model.moe.score 'sigmoid': family 'qwen3_moe' has 'softmax' only",
    ),
    (
        broken("orchestrator.rollouts_per_batch", 9),
        "orchestrator.rollouts_per_batch 9 is not a multiple of algorithm.group_size 4; try 8",
    ),
    (
        broken("orchestrator.max_batches_ahead", 4, broken("orchestrator.max_off_policy_steps", 3)),
        "orchestrator.max_batches_ahead 4 exceeds max_off_policy_steps 3: tokens of a "
        "batch further ahead are too old; set it to at most 3",
    ),
    (
        broken("orchestrator.admission.max_in_flight", 3),
        "orchestrator.admission.max_in_flight 3 cannot hold one group of algorithm.group_size "
        "4; set it to at least that",
    ),
    (
        broken("orchestrator.sampling.max_tokens_per_turn", 64),
        "orchestrator.sampling.max_tokens_per_turn 64 leave no room for a prompt in "
        "inference.max_model_len_tokens 64; set it to less",
    ),
    *(
        (
            broken(f"tasks.{part}", 2 * GOOD["tasks"][part]),
            f"tasks.{part}: ['words'] name more than one task each; give every task another name",
        )
        for part in ("train", "evaluation")
    ),
    (broken("name", "Reverse Text"), 'name = "Reverse Text": '),
    *(
        (
            broken("name", name),
            f"name: no run is called '{name}', because a rule of the pipeline has this name",
        )
        for name in TARGETS
    ),
    (broken("python_lock_sha256", "abc"), 'python_lock_sha256 = "abc": '),
    ([], "manifest = []: "),
]


@pytest.mark.parametrize(("data", "sentence"), SENTENCES, ids=[s[:30] for _, s in SENTENCES])
def test_a_wrong_manifest_gives_one_sentence(data, sentence):
    with pytest.raises(OrreryError) as caught:
        check(data, "here")
    assert str(caught.value).startswith(f"here: {sentence}")
    assert "\n" not in str(caught.value)


def test_a_misspelt_field_is_told_before_the_field_that_it_leaves_missing():
    data = broken("trainer.optimizer.lr", KeyError, broken("trainer.optimizer.learning", 1e-3))
    with pytest.raises(OrreryError, match=r"trainer\.optimizer\.learning .*\(and 1 more error\)"):
        check(data, "here")


def test_a_cache_larger_than_the_device_is_refused():
    path = Path(__file__).parents[2] / "manifests/smollm2_demo.json"
    data = json.loads(path.read_text())
    data["inference"]["kv_cache_bytes"] = 80 * 10**9
    with pytest.raises(OrreryError, match=r"kv_cache_bytes 80000000000: one h100 has 80000000000"):
        check(data, "here")


def test_a_cache_of_one_rollout_is_counted_in_the_blocks_of_one_device(checkout):
    # 2 heads of 8 float32 in blocks of 32 tokens and a reserved one: 64 tokens are 2, 65 are 3
    def least(tokens, devices=1):
        data = broken(
            "trainer.memory.max_tokens_per_micro_batch",
            128,
            broken("inference.tensor_parallel", devices),
        )
        data["inference"] |= {"kv_cache_bytes": 1, "max_model_len_tokens": tokens}
        with pytest.raises(OrreryError) as caught:
            check(data, "here")
        needed = int(re.search(r"which needs (\d+)", str(caught.value)).group(1))
        data["inference"]["kv_cache_bytes"] = needed
        assert check(data, "here")
        return needed

    assert [least(64), least(65), least(65, devices=2), least(65, devices=4)] == [
        3 * 4096,
        4 * 4096,
        4 * 2048,
        4 * 2048,
    ]
    edited(checkout, "hardware/two_cores.libsonnet", "1048576", "12287")
    with pytest.raises(
        OrreryError, match=r"kv_cache_bytes 12287 cannot hold .* 64, which needs 12288"
    ):
        render(Workspace(checkout), "words")


def test_host_memory_holds_what_every_device_of_a_rank_keeps_of_a_rollout():
    def least(**inference):
        data = copy.deepcopy(GOOD)
        data["inference"] |= {
            "kv_offload": {"kind": "tiers", "host_bytes": 1, "disk_bytes": 0},
            **inference,
        }
        with pytest.raises(OrreryError) as caught:
            check(data, "here")
        return int(re.search(r"which needs (\d+)", str(caught.value)).group(1))

    # two key heads: two devices have one each, and of four two have the same
    assert [
        least(),
        least(tensor_parallel=2),
        least(tensor_parallel=4),
        least(data_parallel=2),
    ] == [8192, 8192, 16384, 8192]


def test_a_segment_holds_a_rollout_of_a_long_context():
    long = copy.deepcopy(GOOD)
    long["model"] |= {"max_positions": 1 << 18}
    long["trainer"]["memory"]["max_tokens_per_micro_batch"] = 1 << 18
    long["inference"] |= {
        "max_model_len_tokens": 1 << 18,
        "kv_cache_bytes": 1 << 30,
        "kv_offload": STORE,
    }
    with pytest.raises(
        OrreryError, match=r"segment_bytes 16777216: .* needs 33554432; set it to at least 33554432"
    ):
        check(long, "here")
    assert check(broken("inference.kv_offload.segment_bytes", 33554432, long), "here")


def test_a_disk_holds_a_rollouts_caches_in_whole_pages_and_twice_its_routes():
    def least(data, routed_experts=False, **inference):
        data = copy.deepcopy(data)
        data["inference"] |= {
            "kv_offload": {"kind": "tiers", "host_bytes": 1 << 20, "disk_bytes": 1},
            **inference,
        }
        data["transport"]["routed_experts"] = routed_experts
        with pytest.raises(OrreryError, match="disk_bytes") as caught:
            check(data, "here")
        needed = int(re.search(r"which needs (\d+)", str(caught.value)).group(1))
        for enough in (needed, 0):
            data["inference"]["kv_offload"]["disk_bytes"] = enough
            assert check(data, "here")
        return needed

    two_blocks = least(GOOD)
    assert [two_blocks, least(GOOD, tensor_parallel=2), least(GOOD, dtype="bfloat16")] == [
        8192,
        8192,
        8192,
    ]
    many = broken("model.moe.num_experts", 512, SPARSE)
    many["model"]["moe"]["num_experts_per_token"] = 65
    assert [least(SPARSE, True) - least(SPARSE), least(many, True) - least(many)] == [
        2 * 2 * 4096,
        2 * 2 * 2 * 4096,
    ]


def test_what_engines_do_not_cut_need_not_divide():
    for part, value, data in (
        ("intermediate_size", 30, SPARSE),  # no layer is dense
        (
            "moe",
            SPARSE["model"]["moe"] | {"expert_intermediate_size": 9},
            broken("inference.expert_parallel", True, SPARSE),
        ),
    ):
        assert check(
            broken(f"model.{part}", value, broken("inference.tensor_parallel", 4, data)), "here"
        )
    dense = broken("model.intermediate_size", 30, broken("inference.data_parallel", 4))
    assert check(dense, "here")  # a rank has all of a dense layer


def test_a_shared_expert_is_cut_as_a_dense_layer_is():
    moe = SPARSE["model"]["moe"] | {
        "num_shared_experts": 1,
        "score": "sigmoid",
        "expert_intermediate_size": 9,
    }
    data = broken(
        "model", SPARSE["model"] | {"family": "glm4_moe", "qk_norm": True, "moe": moe}, SPARSE
    )
    data["trainer"]["lora"] = {**ADAPTERS, "targets": ["feed_forward", "experts"]}
    assert check(data, "here")  # and adapted as one
    data["inference"] |= {"tensor_parallel": 2, "expert_parallel": True}
    with pytest.raises(
        OrreryError,
        match=r"model\.moe\.num_shared_experts·expert_intermediate_size 9 "
        r"does not divide .* from \[1\]",
    ):
        check(data, "here")


def test_averages_of_nothing_but_the_newest_gradient_are_allowed():
    adamw = GOOD["trainer"]["optimizer"] | {"beta1": 0.0, "beta2": 0.0}
    for optimizer in (SGD, MUON, adamw):
        assert check(broken("trainer.optimizer", optimizer), "here")


def test_state_of_one_stage_is_enough_to_offload():
    for path in ("trainer.optimizer", "stages.sft.optimizer"):
        assert check(broken(path, SIGN_SGD, OFFLOADED), "here")
    assert check(
        broken(
            "stages.sft", None, broken("trainer.optimizer", {**SGD, "momentum": 0.5}, OFFLOADED)
        ),
        "here",
    )


def test_not_a_number_is_refused():
    with pytest.raises(OrreryError, match=r"trainer\.max_grad_norm"):
        check(broken("trainer.max_grad_norm", float("nan")), "here")


def test_a_file_that_is_not_there_or_not_json_is_named(tmp_path):
    with pytest.raises(OrreryError, match="cannot be read"):
        load(tmp_path / "none.json")
    (tmp_path / "half.json").write_text("{")
    with pytest.raises(OrreryError, match="not JSON"):
        load(tmp_path / "half.json")


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A copy of the specs to break."""
    manifest_specs.checkout(tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def orrery(*argv):
    return run_app(lambda: app(list(argv), standalone_mode=False))


def edited(checkout, file, before, after):
    path = checkout / "jsonnet" / file
    text = path.read_text()
    assert before in text
    path.write_text(text.replace(before, after))


MISTAKES = {
    "a misspelt field": (
        "algorithms/groups.libsonnet",
        "beta1:",
        "bata1:",
        "trainer.optimizer.bata1 = 0.9: there is no such field; did you mean 'beta1'?",
    ),
    "a misspelt field that a run must have": (
        "runs/words.jsonnet",
        "checkpoint+: { interval_steps: 2 }",
        "checkpoint+: { interval_step: 2, interval_steps: "
        "error 'trainer.checkpoint.interval_steps: say it in the run file' }",
        "trainer.checkpoint.interval_step: there is no such field; did you mean 'interval_steps'?",
    ),
    "a missing field that a run must have": (
        "runs/words.jsonnet",
        "checkpoint+: { interval_steps: 2 }",
        "checkpoint+: { interval_steps: "
        "error 'trainer.checkpoint.interval_steps: say it in the run file' }",
        "trainer.checkpoint.interval_steps: say it in the run file (jsonnet/runs/words.jsonnet:10)",
    ),
    "a misspelt setting": (
        "runs/words_wide.jsonnet",
        "layout+::",
        "layuot+::",
        "jsonnet/runs/words_wide.jsonnet: words_wide: there is no setting layuot; did you mean "
        "'layout'?",
    ),
    "a misspelt part of a setting": (
        "runs/words_wide.jsonnet",
        "engines: 2",
        "engine: 2",
        "words_wide: layout: there is no engine; did you mean 'engines'?",
    ),
    "a setting that is like no other": (
        "runs/words_wide.jsonnet",
        "engines: 2",
        "zzz: 2",
        "layout: there is no zzz; layout has trainer_ranks, engines, prefill_engines, ",
    ),
    "a section without its plus": (
        "runs/words_wide.jsonnet",
        "trainer+: {",
        "trainer: {",
        "jsonnet/runs/words_wide.jsonnet: words_wide: trainer: replaces its defaults and lacks "
        "mesh, memory, optimizer; write `trainer+: {…}` to keep them",
    ),
    "a setting without its plus": (
        "runs/words_wide.jsonnet",
        "layout+::",
        "layout::",
        "lacks prefill_engines, devices_per_engine; write `layout+:: {…}` to keep them",
    ),
    "a mesh without its plus": (
        "runs/words_wide.jsonnet",
        "trainer+: {",
        "trainer+: { mesh: { ep: 2 },",
        "trainer.mesh: replaces its defaults and lacks dp_replicate, cp; write `mesh+: {…}`",
    ),
    "SFT without its plus": (
        "runs/words.jsonnet",
        "sft+: {",
        "sft: {",
        "words: stages.sft: replaces its defaults and lacks schedule, trained_roles, validation; "
        "write `sft+: {…}` to keep them",
    ),
    "the data of SFT without its plus": (
        "runs/words.jsonnet",
        "data+: {",
        "data: {",
        "text. If the spec has `data: {…}`, write `data+:` to keep its defaults",
    ),
    "a setting that is no number": (
        "runs/words_wide.jsonnet",
        "engines: 2",
        "engines: '2'",
        "layout.engines: must be a number, such as 2",
    ),
    "a seed that is no number": (
        "runs/words.jsonnet",
        "seed: 1,",
        "seed: 'one',",
        'words: seed = "one": should be a valid integer',
    ),
    "a wrong type": (
        "algorithms/groups.libsonnet",
        "lr: 1e-3",
        "lr: '1e-3'",
        "trainer.optimizer.lr = ",
    ),
    "a mesh that does not divide": (
        "runs/words_wide.jsonnet",
        "trainer+: {",
        "trainer+: { mesh+: { ep: 3 },",
        "trainer.mesh.ep 3: family 'qwen3' has no experts to spread; set trainer.mesh.ep to 1",
    ),
    "experts that do not divide": (
        "runs/words_sparse.jsonnet",
        "trainer+: {",
        "trainer+: { mesh+: { ep: 3 },",
        "trainer.mesh.ep 3 does not divide dp_shard·cp = 1; choose from [1]",
    ),
    "heads that do not divide": (
        "runs/words_wide.jsonnet",
        "trainer_ranks: 2, engines: 2 },\n      trainer+: {",
        "trainer_ranks: 3, engines: 2 },\n      trainer+: { mesh+: { cp: 3 },",
        "trainer.mesh.cp 3: 4 query heads and 2 key heads do not divide among as many ranks; "
        "choose cp·dp_shard from 1·3",
    ),
    "copies that do not divide": (
        "runs/words_wide.jsonnet",
        "trainer+: {",
        "trainer+: { mesh+: { dp_replicate: 3, cp: 2 },",
        "trainer.mesh.dp_replicate: 3 does not divide 2 trainer ranks; choose dp_replicate from 1",
    ),
    "ranks that do not divide": (
        "runs/words_wide.jsonnet",
        "trainer+: {",
        "trainer+: { mesh+: { cp: 4 },",
        "dp_replicate·cp = 4 does not divide 2 trainer ranks; choose cp from 1, 2",
    ),
    "a batch of broken groups": (
        "runs/words_wide.jsonnet",
        "rollouts_per_batch: 12",
        "rollouts_per_batch: 13",
        "13 is not a multiple of algorithm.group_size 4; try 12",
    ),
    "a weight of zero, which all copies of the problem have": (
        "tasks/words.libsonnet",
        "weight: 1",
        "weight: 0",
        "words: tasks.train[0].weight = 0: should be greater than 0\n",
    ),
    "a context beyond the model": (
        "tasks/words.libsonnet",
        "context_tokens:: 64",
        "context_tokens:: 512",
        "inference.max_model_len_tokens 512 exceeds model.max_positions 256; set it to at most "
        "that (in Jsonnet context_tokens)",
    ),
    "no room for a rollout": (
        "memory/plain.libsonnet",
        "micro_batch: 256",
        "micro_batch: 32",
        "32 cannot hold one rollout of inference.max_model_len_tokens 64; set it to at least that",
    ),
    "too little cache": (
        "hardware/two_cores.libsonnet",
        "1048576",
        "1024",
        "inference.kv_cache_bytes 1024 cannot hold one rollout",
    ),
    "a missing axis": (
        "runs/words.jsonnet",
        "(import 'hardware/two_cores.libsonnet') +",
        "",
        "no hardware axis",
    ),
    "an import that is not there": (
        "runs/words.jsonnet",
        "models/dense",
        "models/dens.",
        "did you mean 'models/dense.libsonnet'",
    ),
    "engines of which none decodes": (
        "runs/words_nodes.jsonnet",
        "prefill_engines: 2",
        "prefill_engines: 6",
        "inference.prefill_replicas 6 of num_replicas 6 leave no engine to decode",
    ),
    "a group of half a node": (
        "runs/words_nodes.jsonnet",
        "prefill_engines: 2",
        "prefill_engines: 3",
        "hardware.devices_per_node 2: prefill has 3 devices, which fill no whole number of nodes; "
        "try 2",
    ),
    "too few nodes": (
        "runs/words_nodes.jsonnet",
        "num_nodes: 5",
        "num_nodes: 4",
        "hardware.num_nodes 4: prefill 1 + decode 2 + trainer 2 nodes are 5; set",
    ),
    "an engine over several nodes": (
        "runs/words_nodes.jsonnet",
        "prefill_engines: 2",
        "prefill_engines: 2, devices_per_engine: 4",
        "inference.data_parallel·tensor_parallel = 4 does not divide hardware.devices_per_node 2; "
        "choose from [1, 2], or set inference.nodes_per_replica to 2 for an engine over nodes",
    ),
    "a run called like a rule of the pipeline": (
        "runs/sums.jsonnet",
        "  sums:\n",
        "  report:\n",
        "no run is called 'report'",
    ),
    "a kind of task that does not exist": (
        "tasks/words.libsonnet",
        "kind: 'reverse_text'",
        "kind: 'revers_text'",
        "jsonnet/runs/words.jsonnet: words: tasks.train[0]: task 'words': kind: there is no "
        "'revers_text'; did you mean 'reverse_text'?",
    ),
    "a misspelt arg of a task": (
        "tasks/words.libsonnet",
        "min_length",
        "min_lenght",
        "words: tasks.train[0]: task 'words': args: there is no 'min_lenght'; did you mean "
        "'min_length'?",
    ),
    "a prompt that the tokenizer cannot spell": (
        "tasks/words.libsonnet",
        "alphabet: 'abcd'",
        "alphabet: 'abcdé'",
        "words: tasks.train[0]: model.tokenizer.alphabet has no 'é'",
    ),
    "a prompt beyond the context": (
        "tasks/words.libsonnet",
        "max_length: 3",
        "max_length: 90",
        "do not fit inference.max_model_len_tokens 64",
    ),
    "broken syntax": (
        "algorithms/groups.libsonnet",
        "max_grad_norm: 1.0,",
        "max_grad_norm: 1.0",
        "jsonnet/algorithms/groups.libsonnet:",
    ),
    "a key and a name that differ": (
        "lib/named.libsonnet",
        "run { name: name }",
        "run { name: 'other' }",
        "the key is",
    ),
}


@pytest.mark.parametrize("what", MISTAKES)
def test_a_mistake_in_a_spec_is_one_line_and_writes_nothing(what, checkout, capsys):
    file, before, after, sentence = MISTAKES[what]
    edited(checkout, file, before, after)
    assert orrery("render") == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("error: ") and err.count("\n") == 1
    assert sentence in err
    assert not (checkout / "manifests").exists()


def test_an_unknown_run_is_met_with_the_nearest_name_and_writes_nothing(checkout, capsys):
    assert orrery("render", "words", "wrods") == 2
    assert (
        capsys.readouterr().err
        == "error: run 'wrods': there is no such run; did you mean 'words'?\n"
    )
    assert orrery("render", "qqq") == 2
    said = capsys.readouterr().err
    assert re.search(
        r"there is no such run; none of the \d+ runs has a similar name \(`ls manifests", said
    )
    assert len(said) < 200
    assert not (checkout / "manifests").exists()


def test_a_wrong_run_among_right_ones_leaves_what_was_written_alone(checkout, capsys):
    assert orrery("render") == 0
    before = {p.name: p.read_bytes() for p in (checkout / "manifests").iterdir()}
    edited(checkout, "algorithms/groups.libsonnet", "lr: 1e-3", "lr: 5e-4")
    edited(checkout, "tasks/sums.libsonnet", "max_turns: 3", "max_turns: 0")
    assert orrery("render") == 2
    assert {p.name: p.read_bytes() for p in (checkout / "manifests").iterdir()} == before


def test_check_names_the_stale_manifest_and_its_first_changed_field(checkout, capsys):
    assert orrery("render") == 0 and orrery("check") == 0
    capsys.readouterr()
    edited(
        checkout, "memory/plain.libsonnet", "lm_head_chunk_tokens: 64", "lm_head_chunk_tokens: 32"
    )
    assert orrery("check", "words") == 2
    err = capsys.readouterr().err
    assert "manifests/words.json: is stale (trainer.memory.lm_head_chunk_tokens: 64 → 32)" in err


def test_check_finds_a_manifest_whose_run_is_gone(checkout, capsys):
    assert orrery("render") == 0
    (checkout / "manifests" / "old_run.json").write_text(
        (checkout / "manifests" / "sums.json").read_text()
    )
    assert orrery("check") == 2
    said = capsys.readouterr().err
    assert "manifests/old_run.json: no run has this name; " in said
    assert said.endswith("type `rm manifests/old_run.json`\n")


def test_rendering_again_changes_no_file(checkout, capsys):
    assert orrery("render") == 0
    times = {p: p.stat().st_mtime_ns for p in (checkout / "manifests").iterdir()}
    assert orrery("render") == 0
    assert {p: p.stat().st_mtime_ns for p in (checkout / "manifests").iterdir()} == times


@pytest.mark.parametrize("stem", TARGETS)
def test_a_spec_file_called_like_a_rule_of_the_pipeline_is_refused(stem, checkout):
    (checkout / "jsonnet" / "runs" / "sums.jsonnet").rename(
        checkout / "jsonnet" / "runs" / f"{stem}.jsonnet"
    )
    with pytest.raises(
        OrreryError, match=rf"jsonnet/runs/{stem}\.jsonnet: the pipeline has a rule called '{stem}'"
    ):
        render_all(Workspace(checkout))


def test_check_asks_for_the_tasks_of_a_manifest_by_its_path(tmp_path, capsys):
    good, bad = tmp_path / "good.json", tmp_path / "bad.json"
    good.write_text(json.dumps(GOOD))
    bad.write_text(json.dumps(broken("tasks.evaluation.0.args.min_length", 0)))
    assert orrery("check", str(good)) == 0
    assert orrery("check", str(good), str(bad)) == 2
    err = capsys.readouterr().err
    assert (
        err.startswith(
            f"error: {bad}: tasks.evaluation[0]: task 'words': args.min_length: 0 does not fit"
        )
        and err.count("\n") == 1
    )


RANK_1024 = {**ADAPTERS, "rank": 1024}
IN_VAIN = "it cannot start: transport.weights 'adapters' with trainer.lora.rank 1024"


def test_a_manifest_that_asks_for_something_in_vain_is_refused_by_its_path(tmp_path, capsys):
    good, path = tmp_path / "good.json", tmp_path / "direct.json"
    good.write_text(json.dumps(GOOD))
    path.write_text(
        json.dumps(broken("transport.weights", "adapters", broken("trainer.lora", RANK_1024)))
    )
    assert orrery("check", str(good), str(path)) == 2
    out, err = capsys.readouterr()
    assert out == f"{good}: words is a manifest\n"
    assert err.startswith(f"error: {path}: {IN_VAIN}") and err.count("\n") == 1


def test_a_run_that_asks_for_something_in_vain_is_refused_by_name_and_noted_among_all(
    checkout, capsys
):
    lora = "lora: { rank: 1024, alpha: 8.0, targets: ['attention'], seed: 1 }"
    edited(
        checkout,
        "runs/sums.jsonnet",
        "trainer+: {",
        f"transport+: {{ weights: 'adapters' }}, trainer+: {{ {lora},",
    )
    assert orrery("render") == 0 and orrery("check", "words") == 0
    capsys.readouterr()
    assert orrery("check", "words", "sums") == 2
    assert capsys.readouterr().err.startswith(f"error: sums: {IN_VAIN}")
    assert orrery("check") == 0
    listed = capsys.readouterr().out.splitlines()
    notes = [number for number, line in enumerate(listed) if line.startswith("  note: ")]
    assert (
        len(notes) == 1
        and listed[notes[0]].startswith(f"  note: {IN_VAIN}")
        and listed[notes[0] - 1].startswith("sums ")
    )


def test_rendering_for_the_pipeline_starts_no_process(checkout, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    edited(checkout, "tasks/words.libsonnet", "kind: 'reverse_text'", "kind: 'revers_text'")
    assert len(render_all(Workspace(checkout))) == 7


def test_without_the_room_of_tasks_specs_render_unasked(checkout, monkeypatch):
    monkeypatch.setattr("orrery.manifest.cli.find_spec", lambda name: None)
    edited(checkout, "tasks/words.libsonnet", "kind: 'reverse_text'", "kind: 'revers_text'")
    assert orrery("render", "words") == 0 and (checkout / "manifests" / "words.json").is_file()


def without_weights(checkout):
    """Give every run a pretrained tokenizer without files on this machine."""
    file = checkout / "jsonnet" / "models" / "dense.libsonnet"
    away = (
        f"tokenizer: {{ kind: 'pretrained', path: '{checkout}/weights', sha256: std.sha256('') }},"
    )
    away += "\n    vocab_size: 100,"
    file.write_text(
        "".join(
            f"    {away}\n" if "tokenizer:" in line else line
            for line in file.read_text().splitlines(keepends=True)
        )
    )


def test_a_pretrained_tokenizer_that_is_elsewhere_is_not_asked_for(checkout, monkeypatch):
    without_weights(checkout)
    assert orrery("render", "words") == 0
    (checkout / "weights").mkdir()
    (checkout / "weights" / "tokenizer.json").write_text("{}")
    assert orrery("render", "words") == 2


GYM = "{ family: 'leg_counting', config: {}, split: 'train' }"
LONG = (
    "{ family: 'chain_sum', config: { min_terms: 50000000, max_terms: 50000000 }, split: 'train' }"
)
TEXT = "{ alphabet: 'ab', min_lenght: 1, max_length: 2, instruction: '', split: 'train' }"
NO_FAMILY = "reasoning-gym has no 'legcounting'; did you mean 'leg_counting'?"
NO_OPTION = (
    "args.args.config: family leg_counting has no option 'max_animal'; did you mean 'max_animals'?"
)


def few_shot(kind, args):
    return "few_shot", f"{{ kind: '{kind}', args: {args}, num_examples: 1, system: null }}"


ARGS = {
    "a misspelt arg": ("reverse_text", TEXT, "args: there is no 'min_lenght'"),
    "a family": ("reasoning_gym", GYM.replace("leg_", "leg"), f"args.family: {NO_FAMILY}"),
    "a family within few_shot": (
        *few_shot("reasoning_gym", GYM.replace("leg_", "leg")),
        f"args.args.family: {NO_FAMILY}",
    ),
    "a config within few_shot": (
        *few_shot("reasoning_gym", GYM.replace("{}", "{ max_animal: 2 }")),
        NO_OPTION,
    ),
    "a kind within few_shot": (
        *few_shot("reasoning_gim", GYM),
        "args.kind: there is no 'reasoning_gim'; did you mean 'reasoning_gym'?",
    ),
    "problems without end": (
        "reasoning_gym",
        LONG,
        "take more than 1 s of CPU time. Make them smaller",
    ),
}


def impatient_python(folder: Path) -> str:
    """Write a Python whose check of tasks allows a task 1 s instead of 6."""
    program = folder / "python"
    program.write_text(
        f"#!{sys.executable}\nimport sys, reasoning_gym\nfrom orrery.tasks import check\n"
        "assert sys.argv[1:3] == ['-m', check.__name__]\ncheck.MAX_CPU_S = 1.0\n"
        "del sys.argv[1:3]\nsys.exit(check.main())\n"
    )
    program.chmod(0o755)
    return str(program)


@pytest.mark.parametrize("what", ARGS)
def test_args_of_a_task_are_checked_without_weights(what, checkout, monkeypatch, capsys):
    kind, args, sentence = ARGS[what]
    without_weights(checkout)
    if what == "problems without end":
        monkeypatch.setattr(sys, "executable", impatient_python(checkout))
    assert orrery("render", "words") == 0
    run = checkout / "jsonnet" / "runs" / "words.jsonnet"
    capsys.readouterr()
    task = f"{{ name: 'it', kind: '{kind}', args: {args}, weight: 1.0, seed: 1, max_turns: 1 }}"
    run.write_text(
        f"local runs = {run.read_text()};\nruns {{ words+: {{ tasks+: {{ train: [{task}] }} }} }}\n"
    )
    assert orrery("check", "words") == 2
    out, err = capsys.readouterr()
    assert (
        not out
        and err.startswith("error: jsonnet/runs/words.jsonnet: words: tasks.train[0]: task 'it': ")
        and err.count("\n") == 1
    )
    assert sentence in err


def test_a_check_of_tasks_that_crashes_is_one_sentence_and_writes_nothing(
    checkout, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert orrery("render") == 2
    assert capsys.readouterr().err.startswith(
        "error: the check of tasks crashed (it ended with code 1)"
    )
    assert not (checkout / "manifests").exists()


def test_a_login_node_renders_without_the_packages_of_tasks(checkout, monkeypatch, capsys):
    monkeypatch.setattr(cli, "find_spec", {"numpy": 1, "pyarrow": 1, "reasoning_gym": 1}.get)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    assert orrery("render", "words") == 0
    assert (
        "  note: the init stage checks the tasks, as this Python lacks tokenizers\n"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("text", "kind"),
    [("[1, 2]", "a list"), ("'words'", "a text"), ("null", "null"), ("3", "a number")],
)
def test_a_spec_that_is_no_object_is_one_sentence(text, kind, checkout, capsys):
    (checkout / "jsonnet/runs/odd.jsonnet").write_text(text)
    assert orrery("check") == 2
    out, err = capsys.readouterr()
    assert not out and err == (
        f"error: jsonnet/runs/odd.jsonnet: holds {kind}, "
        "and a run file is an object of runs by name, as in jsonnet/runs/reverse_text.jsonnet\n"
    )


def test_a_spec_that_nests_too_deep_or_cannot_be_read_is_one_sentence(checkout, capsys):
    path = checkout / "jsonnet/runs/odd.jsonnet"
    path.write_text("{ odd: " + "[" * 100 + "]" * 100 + " }")
    assert orrery("check") == 2
    assert "its value is refused (values nested deeper than 64)" in capsys.readouterr().err
    path.write_text("{ odd: " + "[" * 100_000)
    assert orrery("check") == 2
    assert "jsonnet/runs/odd.jsonnet: brackets nested deeper than 500" in capsys.readouterr().err
    path.unlink()
    path.mkdir()
    assert orrery("check") == 2
    assert (
        "error: import 'runs/odd.jsonnet': this file under jsonnet/ cannot be read"
        in capsys.readouterr().err
    )


def test_an_absurd_size_in_a_spec_is_refused_at_once(checkout, capsys):
    edited(checkout, "models/dense.libsonnet", "num_heads: 4,", "num_heads: 1e15,")
    assert orrery("check", "words") == 2
    assert (
        "model.num_heads = 1000000000000000: should be less than or equal to 65536"
        in capsys.readouterr().err
    )


def test_a_manifest_of_another_version_of_the_schema_is_one_sentence_that_says_what_to_do():
    for version in (SCHEMA_VERSION - 1, SCHEMA_VERSION + 1):
        with pytest.raises(OrreryError) as error:
            check({**GOOD, "schema_version": version}, "here")
        assert str(error.value) == (
            f"here: schema_version {version}: this Orrery reads {SCHEMA_VERSION}. Type `orrery "
            "render` and begin a new run, or finish this one with the Orrery that began it"
        )


HUGE = {
    "stages.rl.num_steps": (10**30, "should be less than or equal to 1000000000"),
    "trainer.mesh.dp_shard": (10**9, "should be less than or equal to 65536"),
    "hardware.num_nodes": (10**9, "should be less than or equal to 65536"),
    "inference.num_replicas": (10**9, "should be less than or equal to 65536"),
    "model.num_heads": (10**12, "should be less than or equal to 65536"),
    "model.vocab_size": (10**12, "should be less than or equal to 16777216"),
    "orchestrator.rollout_timeout_s": (1e300, "should be less than or equal to 31536000"),
    "seed": (10**30, "should be less than or equal to 9007199254740992"),
    "name": ("a" * 5000, "should have at most 100 characters"),
}


@pytest.mark.parametrize("path", HUGE)
def test_an_absurd_size_is_refused_by_name(path):
    value, rule = HUGE[path]
    with pytest.raises(OrreryError, match=rf"here: {path} = .*: (String )?{rule}"):
        check(broken(path, value), "here")


def test_devices_that_multiply_to_more_than_a_plan_has_are_refused():
    mesh = {**GOOD["trainer"]["mesh"], "dp_replicate": 60_000, "dp_shard": 60_000}
    with pytest.raises(
        OrreryError,
        match=r"trainer.mesh.dp_replicate·dp_shard·cp = 3600000000: "
        "a trainer has at most 65536 ranks",
    ):
        check(broken("trainer.mesh", mesh), "here")
    inference = {
        **GOOD["inference"],
        "num_replicas": 60_000,
        "tensor_parallel": 60_000,
        "router": ROUTER,
    }
    with pytest.raises(OrreryError, match="at most 65536 devices together"):
        check(broken("inference", inference), "here")
