"""`orrery bench trainer`: what is measured, made-up batches, phases of a trace, and a measurement on two CPU ranks."""

import json
import subprocess
import sys

import numpy as np
import pytest
import trainer_cases
from trainer_cases import manifest

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import pretty_json
from orrery.trainer.bench import phases
from orrery.trainer.bench.batches import balanced_experts, micro_batches
from orrery.trainer.bench.request import Options, request
from orrery.trainer.loss import COMPONENTS
from orrery.trainer.micro_batch import count_members

MOE = {**trainer_cases.MOE, "num_experts": 8}


def test_fewer_devices_shrink_the_shards_and_the_experts_with_them_and_are_named():
    asked = request(manifest(mesh={"dp_shard": 4, "cp": 2, "ep": 8}, model={"family": "qwen3_moe", "moe": MOE}), Options(devices=4))
    assert (asked.num_devices, asked.trainer.mesh.dp_shard, asked.trainer.mesh.ep) == (4, 2, 4)
    assert asked.overrides == {"trainer.mesh.dp_shard": [4, 2], "trainer.mesh.ep": [8, 4]}
    with pytest.raises(OrreryError, match=r"--devices: 3 is no multiple of dp_replicate·cp = 2; choose from 2, 4"):
        request(manifest(mesh={"cp": 2}), Options(devices=3))


def test_an_option_that_the_schema_refuses_is_one_sentence():
    with pytest.raises(OrreryError, match=r"--memory: .*activation_offlod"):
        request(manifest(), Options(memory='{"activation_offlod": true}'))
    changed = request(manifest(), Options(memory='{"activation_offload": true}'))
    assert changed.trainer.memory.activation_offload and list(changed.overrides) == ["trainer.memory.activation_offload"]


@pytest.mark.parametrize("lengths", ["fixed", "variable"])
def test_every_micro_batch_is_full_and_repeats(lengths):
    asked = request(manifest(), Options(lengths=lengths, micro_batches=3, tokens_per_micro_batch=60, document_tokens=16))
    batches = micro_batches(asked, 2, 1)
    assert [batch.num_tokens for batch in batches] == [60] * 3 and max(batch.lengths.max() for batch in batches) <= 16
    assert (len({*np.concatenate([batch.lengths[:-1] for batch in batches])}) > 1) == (lengths == "variable")
    again, other = micro_batches(asked, 2, 1), micro_batches(asked, 2, 0)
    assert (again[0].token["token_id"] == batches[0].token["token_id"]).all()
    assert not (other[0].token["token_id"] == batches[0].token["token_id"]).all()


@pytest.mark.parametrize(("loss", "trained"), [("sft", ("cross_entropy",)), ("rl", COMPONENTS)])
def test_a_loss_trains_its_components_on_every_token_but_the_first_of_a_document(loss, trained):
    asked = request(manifest(), Options(loss=loss, tokens_per_micro_batch=64, document_tokens=16))
    (batch,) = micro_batches(asked, 0, 0)
    assert count_members(batch) == {name: 60 if name in trained else 0 for name in COMPONENTS}


def test_balanced_routing_gives_every_expert_equally_many_different_tokens():
    model = manifest(model={"family": "qwen3_moe", "moe": MOE}).model
    experts = balanced_experts(model, 32)
    assert experts.shape == (32, 2, 2) and (experts[:, :, 0] != experts[:, :, 1]).all()
    assert (np.bincount(experts[:, 1].reshape(-1), minlength=8) == 8).all()


def _event(cat, name, begin, duration, tid=1, **args):
    return {"ph": "X", "cat": cat, "name": name, "ts": float(begin), "dur": float(duration), "tid": tid, "args": args}


def test_a_step_is_divided_among_what_ran_and_only_what_nothing_hides_is_communication():
    events = [
        _event("user_annotation", "orrery.step", 0, 100),
        _event("cpu_op", "orrery::varlen_attention_forward", 1, 2),
        _event("cuda_runtime", "cudaLaunchKernel", 2, 1, correlation=1),
        _event("cuda_runtime", "cudaLaunchKernel", 4, 1, correlation=2),
        _event("cpu_op", "autograd::engine::evaluate_function: MmBackward0", 10, 9, tid=2),
        _event("cuda_runtime", "cuLaunchKernelEx", 12, 1, tid=2, correlation=3),
        _event("cuda_runtime", "cudaLaunchKernel", 5, 1, correlation=4),
        _event("cuda_runtime", "cudaMemcpyAsync", 6, 1, correlation=5),
        _event("kernel", "cudnn_generated_fort_native_sdpa_sm90_flash_fprop", 10, 20, tid=7, correlation=1),
        _event("kernel", "ncclDevKernel_AllGather_RING_LL", 20, 30, tid=8, correlation=2),
        _event("kernel", "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 40, 20, tid=7, correlation=3),
        _event("kernel", "triton_poi_fused_mm_silu_0", 50, 20, tid=9, correlation=4),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 70, 5, tid=9, correlation=5),
    ]
    found = phases.divide(events, "orrery.step")
    micro = {kind: round(seconds * 1e6, 6) for kind, seconds in found.by_kind.items() if seconds}
    assert micro == {"attention": 20, "communication": 10, "dense products": 15, "elementwise": 15, "copies": 5, "idle": 35}
    assert found.step_s == pytest.approx(100e-6) and found.communication_total_s == pytest.approx(30e-6)
    assert set(found.by_pass["backward"]) == {"dense products"} and "attention" in found.by_pass["forward"]


@pytest.mark.parametrize(
    ("name", "around", "kind"),
    [
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel<cutlass::gemm::GroupProblemShape",
            (),
            "grouped products",
        ),
        ("sm90_xmma_gemm_bf16", ("orrery::grouped_matmul",), "grouped products"),
        ("sm90_xmma_gemm_bf16", ("autograd::engine::evaluate_function: _ChunkedTokenLogprobBackward",), "lm head"),
        ("void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel", (), "sharding copies"),
        ("void at::native::elementwise_kernel", ("FSDP::all_gather_copy_out",), "sharding copies"),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor", (), "optimizer"),
        ("void at::native::elementwise_kernel", ("Optimizer.step",), "optimizer"),
        ("_spread_rows", (), "expert rows"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", ("FSDP::post_backward_reduce",), "communication"),
        ("triton_red_fused_add_mean_rsqrt_3", (), "elementwise"),
    ],
)
def test_a_kernel_is_known_by_its_name_or_by_who_launched_it(name, around, kind):
    assert phases.kind_of(name, around) == kind


def test_host_operators_count_the_time_outside_of_others():
    events = [
        _event("user_annotation", "orrery.step", 0, 100),
        _event("cpu_op", "aten::linear", 10, 50),
        _event("cpu_op", "aten::mm", 20, 30),
        _event("cpu_op", "aten::add", 50, 10),  # begins where its neighbour ends
    ]
    micro = {kind: round(seconds * 1e6, 6) for kind, seconds in phases.divide(events, "orrery.step").by_kind.items() if seconds}
    assert micro == {"dense products": 30, "elementwise": 20, "idle": 50}


def bench(tmp_path, spec, *words):
    path = tmp_path / "manifest.json"
    path.write_text(pretty_json(spec))
    command = [sys.executable, "-m", "orrery.trainer.bench", str(path), "--json", str(tmp_path / "result.json"), *words]
    return subprocess.run(command, capture_output=True, text=True, timeout=100)


def test_two_ranks_measure_and_say_everything(tmp_path):
    spec = manifest(mesh={"dp_shard": 4}, model={"family": "qwen3_moe", "moe": MOE})
    words = ["--devices", "2", "--steps", "2", "--warmup", "1", "--routing", "balanced", "--profile", str(tmp_path / "traces")]
    done = bench(tmp_path, spec, *words)
    assert done.returncode == 0, done.stderr
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        result["overrides"] == {"trainer.mesh.dp_shard": [4, 2]}
        and "not as the manifest says: trainer.mesh.dp_shard 2, not 4" in done.stdout
    )
    assert result["tokens_per_step"] == 128 and len(result["steps_s"]) == 2
    assert result["tokens_per_s_per_device"] == pytest.approx(
        np.median([64 / seconds for seconds in result["steps_s"]])
    )  # the median of the quotients, as the record says
    divided = result["phases"]
    assert sum(divided["by_kind"].values()) == pytest.approx(divided["step_s"], rel=1e-9)  # sums of the same float64 differences
    assert {"grouped products", "lm head", "optimizer"} <= {kind for kind, seconds in divided["by_kind"].items() if seconds}
    assert all(result["metrics"][f"loss_{name}"] for name in COMPONENTS)
    assert (tmp_path / "traces" / "tiny.trace.json.gz").stat().st_size > 0


def test_a_manifest_for_other_hardware_and_a_rank_that_fails_are_one_sentence(tmp_path):
    spec = manifest(hardware={"accelerator": "h200", "num_nodes": 1, "devices_per_node": 2})
    done = bench(tmp_path, spec)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert "tiny: is for h200 and this machine has no GPU; add --device cpu to measure on the CPU" in done.stderr
    spec = manifest(trainer={"optimizer": {"kind": "adamw", "lr": 1e30, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 1.0}})
    done = bench(tmp_path, spec, "--steps", "1", "--warmup", "3")
    assert done.returncode == 1 and done.stderr.startswith("error: step ") and done.stderr.count("\n") == 1


def test_a_mesh_that_does_not_fit_the_network_is_refused_by_its_law():
    with pytest.raises(OrreryError, match=r"trainer\.mesh\.cp 3: 2 query heads .* choose from \[1, 2\]"):
        request(manifest(), Options(device="cpu", mesh='{"cp": 3}'))


def test_mistakes_in_options_are_sentences():
    for options, sentence in {
        Options(device="cpu", mesh="[1]"): r"--mesh: \[1\] is no JSON object",
        Options(
            device="cpu", memory='{"activation_offlod": true}'
        ): "--memory: trainer.memory.activation_offlod = true: there is no such field; did you mean 'activation_offload'?",
        Options(device="cpu", fsdp="{"): "--fsdp: Expecting property name",
        Options(device="cpu", document_tokens=1): "--document-tokens: a document of 1 token has none to train",
    }.items():
        with pytest.raises(OrreryError, match=sentence):
            request(manifest(), options)


def test_short_documents_of_many_lengths_fill_a_micro_batch():
    asked = request(manifest(), Options(device="cpu", lengths="variable", document_tokens=2))
    (batch,) = micro_batches(asked, 0, 0)
    assert batch.num_tokens == asked.tokens_per_micro_batch
