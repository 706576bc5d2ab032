"""`orrery bench trainer`: requests, batches, phases of a trace, and a run on two CPU ranks."""

import importlib.util
import json
import shlex
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import trainer_cases
from forked_roles import ForkedRole, import_before
from trainer_cases import PRELOADED, manifest, rank_environment

from orrery.manifest.budget.parameters import model_flops
from orrery.manifest.budget.trainer_time import IDLE_SHARE, MUON_SHARE
from orrery.manifest.devices import Rates
from orrery.manifest.errors import OrreryError, RunFailed
from orrery.manifest.identity import pretty_json
from orrery.manifest.json_file import read_as
from orrery.trainer import host_memory
from orrery.trainer.bench import (
    ROWS,
    Options,
    balanced_experts,
    given_options,
    make_request,
    micro_batches,
    rates,
    report,
)
from orrery.trainer.bench import __main__ as bench_main
from orrery.trainer.bench import rank as bench_rank
from orrery.trainer.bench.__main__ import (
    as_arguments,
    check_devices,
    find_manifest,
    float32_bytes,
    measure,
    parser,
    resolve_options,
)
from orrery.trainer.bench.rank import KINDS, divide_step, host_copies, kind_of
from orrery.trainer.bench.report import expected
from orrery.trainer.loss import COMPONENTS
from orrery.trainer.policy import count_members

ROOT = Path(__file__).resolve().parents[2]
MOE = {**trainer_cases.MOE, "num_experts": 8}


def test_fewer_devices_shrink_the_shards_and_the_experts_with_them_and_are_named():
    asked = make_request(
        manifest(mesh={"dp_shard": 4, "cp": 2, "ep": 8}, model={"family": "qwen3_moe", "moe": MOE}),
        Options(devices=4),
    )
    assert (asked.num_devices, asked.trainer.mesh.dp_shard, asked.trainer.mesh.ep) == (4, 2, 4)
    assert asked.overrides == {"trainer.mesh.dp_shard": [4, 2], "trainer.mesh.ep": [8, 4]}
    with pytest.raises(
        OrreryError, match=r"--devices: 3 is no multiple of dp_replicate·cp = 2; choose from 2, 4"
    ):
        make_request(manifest(mesh={"cp": 2}), Options(devices=3))


def test_a_mesh_that_was_asked_for_is_taken_or_refused():
    spec = manifest(mesh={"dp_shard": 4, "ep": 2}, model={"family": "qwen3_moe", "moe": MOE})
    for mesh, devices, sentence in (
        (
            '{"ep": 4}',
            2,
            r"trainer\.mesh\.ep 4 does not divide dp_shard·cp = 2; choose from \[1, 2\]",
        ),
        (
            '{"dp_shard": 2}',
            1,
            r"trainer\.mesh\.dp_shard 2: --devices 1 needs 1; leave out dp_shard, or --devices",
        ),
    ):
        with pytest.raises(OrreryError, match=f"^{sentence}$"):
            make_request(spec, Options(mesh=mesh, devices=devices))
        whole = {
            **spec.trainer.mesh.model_dump(mode="json"),
            "dp_shard": devices,
            **json.loads(mesh),
        }
        with pytest.raises(OrreryError, match=f"^{sentence}$"):
            make_request(spec, Options(trainer=json.dumps({"mesh": whole}), devices=devices))
    assert make_request(spec, Options(mesh='{"cp": 2}', devices=2)).overrides == {
        "trainer.mesh.dp_shard": [4, 1],
        "trainer.mesh.cp": [1, 2],
    }


def test_what_is_named_as_changed_is_what_runs():
    spec = manifest(model={"max_positions": 4096})
    most = spec.trainer.memory.max_tokens_per_micro_batch
    assert make_request(spec, Options(document_tokens=999_999)).overrides == {}
    shorter = make_request(spec, Options(document_tokens=8))
    assert (shorter.document_tokens, shorter.overrides) == (
        8,
        {"inference.max_model_len_tokens": [min(most, spec.inference.max_model_len_tokens), 8]},
    )
    twice = make_request(
        spec, Options(memory='{"max_tokens_per_micro_batch": 16}', tokens_per_micro_batch=2 * most)
    )
    assert (
        twice.tokens_per_micro_batch == twice.trainer.memory.max_tokens_per_micro_batch == 2 * most
    )
    assert twice.overrides["trainer.memory.max_tokens_per_micro_batch"] == [most, 2 * most]
    same = json.dumps(
        {"compile": spec.trainer.compile, "fsdp": spec.trainer.fsdp.model_dump(mode="json")}
    )
    assert (
        make_request(
            spec,
            Options(trainer=same, memory=f'{{"max_tokens_per_micro_batch": {most}}}', loss="sft"),
        ).overrides
        == {}
    )


def test_an_option_that_the_schema_refuses_is_one_sentence():
    with pytest.raises(OrreryError, match=r"--memory: .*activation_offlod"):
        make_request(manifest(), Options(memory='{"activation_offlod": true}'))
    changed = make_request(manifest(), Options(memory='{"activation_offload": true}'))
    assert changed.trainer.memory.activation_offload and list(changed.overrides) == [
        "trainer.memory.activation_offload"
    ]


@pytest.mark.parametrize("lengths", ["fixed", "variable"])
def test_every_micro_batch_is_full_and_repeats(lengths):
    asked = make_request(
        manifest(),
        Options(lengths=lengths, micro_batches=3, tokens_per_micro_batch=60, document_tokens=16),
    )
    batches = micro_batches(asked, 2, 1)
    assert [batch.num_tokens for batch in batches] == [60] * 3 and max(
        batch.lengths.max() for batch in batches
    ) <= 16
    assert (len({*np.concatenate([batch.lengths[:-1] for batch in batches])}) > 1) == (
        lengths == "variable"
    )
    again, other = micro_batches(asked, 2, 1), micro_batches(asked, 2, 0)
    assert (again[0].token["token_id"] == batches[0].token["token_id"]).all()
    assert not (other[0].token["token_id"] == batches[0].token["token_id"]).all()


GEMMA = {
    "num_heads": 4,
    "num_kv_heads": 2,
    "family": "hugging_face",
    "hf_config": trainer_cases.GEMMA2,
}


def test_micro_batches_of_a_model_that_pads_are_full_with_their_padding():
    asked = make_request(
        manifest(model=GEMMA),
        Options(lengths="variable", micro_batches=8, tokens_per_micro_batch=60, document_tokens=16),
    )
    for batch in micro_batches(asked, 2, 1):
        assert 30 < len(batch.lengths) * batch.lengths.max() <= 60


def measured(model, lengths):
    """The report of a step of 2 s that computed documents of these lengths."""
    options = Options(
        device="cpu",
        lengths="variable",
        steps=1,
        warmup=1,
        tokens_per_micro_batch=60,
        document_tokens=16,
    )
    step = {"step_s": 2.0, "lengths": lengths, "metrics": {}}
    bytes_of = dict.fromkeys(
        (
            "peak_allocated_bytes",
            "peak_reserved_bytes",
            "allocated_bytes",
            "num_allocation_retries",
        ),
        0,
    )
    counted = {
        "num_parameters": 1,
        "num_trained_parameters": 1,
        "device": "cpu",
        "device_bytes": 1 << 30,
        "build_s": 1.0,
    }
    phase = {
        "by_kind": dict.fromkeys(KINDS, 0.0),
        "by_pass": {},
        "step_s": 2.0,
        "communication_total_s": 0.0,
    }
    read = {
        "memory": bytes_of,
        "memory_before_steps": bytes_of,
        "clocks": {},
        "phases": phase,
        "host_copies": {},
    }
    answer = {"steps": [step], "warmup": [step], **counted, **read}
    return report.result(make_request(manifest(model=model), options), [answer], {}, 1.0)


def test_tokens_are_counted_as_they_were_computed_and_not_with_their_padding():
    lengths = [10, 3, 2]
    padded, packed = measured(GEMMA, lengths), measured({}, lengths)
    assert (padded["tokens_per_s_per_device"], padded["tokens_per_step"]) == (7.5, 15)
    assert packed["true_flops_per_token"] == pytest.approx(
        model_flops(manifest().model, lengths, False).total / 15
    )


def test_a_network_of_transformers_has_no_utilisation_and_the_table_says_so(monkeypatch, capsys):
    monkeypatch.setattr(report, "accelerator_of", lambda name: "h200")
    for model, counted in (({}, True), (GEMMA, False)):
        found = measured(model, [10, 3, 2])
        assert {found[key] is not None for key in (*report.WORK, "expected_s")} == {counted}
        report.show(found)
        assert ("FLOPs of this model family are not counted" in capsys.readouterr().out) == (
            not counted
        )


@pytest.mark.parametrize(("loss", "trained"), [("sft", ("cross_entropy",)), ("rl", COMPONENTS)])
def test_a_loss_trains_its_components_on_every_token_but_the_first_of_a_document(loss, trained):
    asked = make_request(
        manifest(), Options(loss=loss, tokens_per_micro_batch=64, document_tokens=16)
    )
    (batch,) = micro_batches(asked, 0, 0)
    members = {name: 60 if name in trained else 0 for name in COMPONENTS}
    assert count_members(batch) == {**members, "num_tokens": 64}


def test_balanced_routing_gives_every_expert_equally_many_different_tokens():
    model = manifest(model={"family": "qwen3_moe", "moe": MOE}).model
    experts = balanced_experts(model, 32)
    assert experts.shape == (32, 2, 2) and (experts[:, :, 0] != experts[:, :, 1]).all()
    assert (np.bincount(experts[:, 1].reshape(-1), minlength=8) == 8).all()


def _event(cat, name, begin, duration, tid=1, **args):
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": float(begin),
        "dur": float(duration),
        "tid": tid,
        "args": args,
    }


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
        _event(
            "kernel",
            "cudnn_generated_fort_native_sdpa_sm90_flash_fprop",
            10,
            20,
            tid=7,
            correlation=1,
        ),
        _event("kernel", "ncclDevKernel_AllGather_RING_LL", 20, 30, tid=8, correlation=2),
        _event("kernel", "nvjet_tst_128x256_64x4_2x1_v_bz_TNT", 40, 20, tid=7, correlation=3),
        _event("kernel", "triton_poi_fused_mm_silu_0", 50, 20, tid=9, correlation=4),
        _event("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 70, 5, tid=9, correlation=5),
    ]
    found = divide_step(events, "orrery.step")
    micro = {kind: round(seconds * 1e6, 6) for kind, seconds in found.by_kind.items() if seconds}
    assert micro == {
        "attention": 20,
        "communication": 10,
        "dense products": 15,
        "elementwise": 15,
        "copies": 5,
        "idle": 35,
    }
    assert found.step_s == pytest.approx(100e-6) and found.communication_total_s == pytest.approx(
        30e-6
    )
    assert (
        set(found.by_pass["backward"]) == {"dense products"}
        and "attention" in found.by_pass["forward"]
    )


def test_copies_into_gathers_are_shardings_whatever_their_kernel_is_called():
    copies = (
        "void at::native::multi_tensor_apply_kernel<at::native::TensorListMetadata<2>, CopyFunctor"
    )
    events = [
        _event("user_annotation", "orrery.step", 0, 100),
        _event("user_annotation", "FSDP::pre_forward (layers.0)", 0, 10),
        _event("user_annotation", "FSDP::all_gather (layers.0)", 1, 8),
        _event("cpu_op", "aten::_foreach_copy_", 2, 3),
        _event("cuda_runtime", "cudaLaunchKernel", 3, 1, correlation=1),
        _event("cuda_runtime", "cudaLaunchKernelExC", 6, 1, correlation=2),
        _event("user_annotation", "Optimizer.step", 40, 20),
        _event("cuda_runtime", "cudaLaunchKernel", 45, 1, correlation=3),
        _event("kernel", copies, 10, 20, tid=7, correlation=1),
        _event("kernel", "ncclDevKernel_AllGather_RING_LL", 30, 10, tid=8, correlation=2),
        _event("kernel", copies, 50, 30, tid=7, correlation=3),
    ]
    found = divide_step(events, "orrery.step")
    micro = {kind: round(seconds * 1e6, 6) for kind, seconds in found.by_kind.items() if seconds}
    assert micro == {"sharding copies": 20, "communication": 10, "optimizer": 30, "idle": 40}
    assert set(found.by_pass["forward"]) == {"sharding copies", "communication"}


@pytest.mark.parametrize(
    ("name", "around", "kind"),
    [
        (
            "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel<"
            "cutlass::gemm::GroupProblemShape",
            (),
            "grouped products",
        ),
        ("sm90_xmma_gemm_bf16", ("orrery::grouped_matmul",), "grouped products"),
        (
            "sm90_xmma_gemm_bf16",
            ("autograd::engine::evaluate_function: _ChunkedTokenLogprobBackward",),
            "lm head",
        ),
        (
            "void at::native::split_with_sizes_copy_out_contiguous_no_cast_kernel",
            (),
            "sharding copies",
        ),
        ("void at::native::elementwise_kernel", ("FSDP::all_gather_copy_out",), "sharding copies"),
        (
            "void at::native::multi_tensor_apply_kernel<CopyFunctor",
            ("FSDP::all_gather (layers.3)", "aten::_foreach_copy_"),
            "sharding copies",
        ),
        ("void at::native::multi_tensor_apply_kernel<FusedAdamMathFunctor", (), "optimizer"),
        ("void at::native::elementwise_kernel", ("Optimizer.step",), "optimizer"),
        ("_spread_rows", (), "expert rows"),
        ("ncclDevKernel_ReduceScatter_Sum_f32", ("FSDP::post_backward_reduce",), "communication"),
        ("triton_red_fused_add_mean_rsqrt_3", (), "elementwise"),
    ],
)
def test_a_kernel_is_known_by_its_name_or_by_who_launched_it(name, around, kind):
    assert kind_of(name, around) == kind


def test_host_operators_count_the_time_outside_of_others():
    events = [
        _event("user_annotation", "orrery.step", 0, 100),
        _event("cpu_op", "aten::linear", 10, 50),
        _event("cpu_op", "aten::mm", 20, 30),
        _event("cpu_op", "aten::add", 50, 10),  # begins where its neighbour ends
    ]
    micro = {
        kind: round(seconds * 1e6, 6)
        for kind, seconds in divide_step(events, "orrery.step").by_kind.items()
        if seconds
    }
    assert micro == {"dense products": 30, "elementwise": 20, "idle": 50}


def test_a_run_that_has_a_row_is_measured_as_the_row_is():
    def taken(name, *words):
        return resolve_options(name, parser().parse_args([name, *words]))

    spec = importlib.util.spec_from_file_location(
        "rows", ROOT / "benchmarks" / "trainer" / "rows.py"
    )
    benchmark = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(benchmark)
    assert set(ROWS) <= set(benchmark.ROWS)
    for name, row in benchmark.ROWS.items():
        # With no option the run measures the row of its name.
        assert (name == row.manifest) == (not row.options)
        options, _ = taken(row.manifest, *row.options)
        assert options.loss == ("sft" if row.peer else "rl")  # torchtitan trains on the SFT loss
    assert taken("qwen3_30b_a3b_16k_offload") == (
        Options(micro_batches=8, steps=3, warmup=2),
        ROWS["qwen3_30b_a3b_16k_offload"],
    )
    assert taken("qwen3_30b_a3b_16k", "--loss", "rl", "--steps", "4") == (Options(steps=4), {})
    assert taken("reverse_text", "--no-compile") == (Options(compile=False), {})
    every = Options(loss="sft", micro_batches=2, compile=True, mesh='{"ep": 2}', device="cpu")
    assert resolve_options(
        "other", parser().parse_args(["other", *shlex.split(as_arguments(given_options(every)))])
    ) == (every, {})


def bench(tmp_path, spec, *words):
    """Run `orrery.trainer.bench` in a fork of this process. Its ranks are new processes."""
    path, out, err = (tmp_path / name for name in ("manifest.json", "out", "err"))
    path.write_text(pretty_json(spec))
    for stream in (out, err):
        stream.write_text("")
    words = [str(path), "--json", str(tmp_path / "result.json"), *words]
    import_before(*PRELOADED)
    process = ForkedRole("orrery.trainer.bench", words, out, rank_environment(), errors=err)
    try:
        code = process.wait(100)
    finally:
        process.kill()
    return SimpleNamespace(returncode=code, stdout=out.read_text(), stderr=err.read_text())


def test_two_ranks_measure_and_say_everything(tmp_path):
    spec = manifest(mesh={"dp_shard": 4}, model={"family": "qwen3_moe", "moe": MOE})
    given = [
        "--devices",
        "2",
        "--steps",
        "2",
        "--warmup",
        "1",
        "--routing",
        "balanced",
        "--profile",
        str(tmp_path / "traces"),
    ]
    done = bench(tmp_path, spec, *given)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(
        "tiny: measured with --devices 2 --steps 2 --warmup 1 --lengths fixed "
        "--routing balanced --loss rl --micro-batches 1\n"
    )
    result = json.loads((tmp_path / "result.json").read_text())
    assert (
        result["overrides"] == {"trainer.mesh.dp_shard": [4, 2]}
        and "not as the manifest says: trainer.mesh.dp_shard 2, not 4" in done.stdout
    )
    assert result["tokens_per_step"] == 128 and len(result["steps_s"]) == 2
    # The median of the quotients, as the record says.
    assert result["tokens_per_s_per_device"] == pytest.approx(
        np.median([64 / seconds for seconds in result["steps_s"]])
    )
    divided = result["phases"]
    # Sums of the same float64 differences.
    assert sum(divided["by_kind"].values()) == pytest.approx(divided["step_s"], rel=1e-9)
    assert {"grouped products", "lm head", "optimizer"} <= {
        kind for kind, seconds in divided["by_kind"].items() if seconds
    }
    assert all(result["metrics"][f"loss_{name}"] for name in COMPONENTS)
    assert (tmp_path / "traces" / "tiny.trace.json.gz").stat().st_size > 0


def test_a_manifest_for_other_hardware_and_a_rank_that_fails_are_one_sentence(tmp_path):
    spec = manifest(
        hardware={
            "accelerator": "h200",
            "num_nodes": 1,
            "devices_per_node": 2,
            "shared_devices": False,
        }
    )
    done = bench(tmp_path, spec)
    assert done.returncode == 2 and done.stderr.count("\n") == 1
    assert (
        "tiny: is for h200 and this machine has no GPU; add --device cpu to measure on the CPU"
        in done.stderr
    )
    spec = manifest(
        trainer={
            "optimizer": {
                "kind": "adamw",
                "lr": 1e30,
                "beta1": 0.9,
                "beta2": 0.99,
                "eps": 1e-8,
                "weight_decay": 1.0,
            }
        }
    )
    done = bench(tmp_path, spec, "--steps", "1", "--warmup", "3")
    assert (
        done.returncode == 1
        and done.stderr.startswith("error: step ")
        and done.stderr.count("\n") == 1
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--json", "{tmp}"],
            r"--json: {tmp} is a folder; name a file in it, such as {tmp}/result\.json",
        ),
        (
            ["--json", "/proc/x/result.json"],
            r"--json: nothing can be written in /proc/x \(.+\); name a file in a writable folder",
        ),
        (
            ["--json", "/proc/result.json"],
            r"--json: nothing can be written in /proc \(.+\); name a file in a writable folder",
        ),
        (
            ["--profile", "/proc/x"],
            r"--profile: nothing can be written in /proc/x \(.+\); name a writable folder",
        ),
        (
            ["--profile", "{tmp}/manifest.json"],
            r"--profile: nothing can be written in {tmp}/manifest\.json \(.+\); "
            "name a writable folder",
        ),
    ],
)
def test_a_place_that_takes_no_result_is_refused_before_any_rank_starts(
    words, sentence, tmp_path, monkeypatch
):
    path = tmp_path / "manifest.json"
    path.write_text(pretty_json(manifest()))
    monkeypatch.setattr(bench_main, "run_ranks", lambda *rest: pytest.fail("ranks were started"))
    with pytest.raises(OrreryError, match="^" + sentence.format(tmp=tmp_path) + "$"):
        measure(
            parser().parse_args(
                [str(path), "--device", "cpu", *(word.format(tmp=tmp_path) for word in words)]
            )
        )


def test_a_trace_that_cannot_be_kept_costs_neither_table_nor_record(tmp_path, monkeypatch, capsys):
    path, record = tmp_path / "manifest.json", tmp_path / "result.json"
    path.write_text(pretty_json(manifest()))
    monkeypatch.setattr(bench_main, "run_ranks", lambda *rest: [])
    monkeypatch.setattr(report, "result", lambda *rest: {"name": "tiny"})
    monkeypatch.setattr(report, "show", lambda result: print("the table"))
    arguments = parser().parse_args(
        [str(path), "--device", "cpu", "--json", str(record), "--profile", str(tmp_path / "traces")]
    )
    with pytest.raises(FileNotFoundError, match=r"trace\.json"):  # the fake ranks wrote none
        measure(arguments)
    assert json.loads(record.read_text()) == {
        "name": "tiny"
    } and capsys.readouterr().out.splitlines()[1:] == ["the table"]


def test_a_rank_that_runs_out_beside_torchs_allocator_says_so_too(tmp_path, monkeypatch):
    asked = make_request(manifest(), Options(device="cpu"))
    for text in ("Cuda failure 2 'out of memory'", "else"):

        def fails(*_, text=text):
            raise RuntimeError(text)

        monkeypatch.setattr(bench_rank, "make_learner", fails)
        if text == "else":
            with pytest.raises(RuntimeError, match="else"):
                bench_rank.measure(asked, 0, tmp_path)
        else:
            said = bench_rank.measure(asked, 0, tmp_path)["out_of_memory"]
            head = "rank 0 ran out of device memory while its model was being built; "
            assert said.startswith(head)


def test_what_a_cpu_cannot_hold_is_refused_before_any_rank_starts(monkeypatch):
    monkeypatch.setattr(host_memory, "available_bytes", lambda: 24 << 30)
    with pytest.raises(
        OrreryError,
        match=r"qwen3_30b_a3b_16k: its weights.* take 455 GiB in float32 .* "
        "add --devices 1 --layers 1",
    ):
        check_devices(make_request(find_manifest("qwen3_30b_a3b_16k"), Options(device="cpu")))
    check_devices(make_request(find_manifest("reverse_text"), Options(device="cpu")))


def test_what_a_cpu_must_hold_follows_the_optimizer():
    def num_bytes(optimizer):
        return float32_bytes(
            make_request(
                manifest(), Options(device="cpu", trainer=json.dumps({"optimizer": optimizer}))
            )
        )

    plain, momentum = (
        {"kind": "sgd", "lr": 0.1, "momentum": value, "weight_decay": 0.0} for value in (0.0, 0.9)
    )
    adamw = manifest().trainer.optimizer.model_dump(mode="json")
    assert [num_bytes(each) / num_bytes(plain) for each in (plain, momentum, adamw)] == [
        1.0,
        1.5,
        2.0,
    ]


def test_a_device_of_unknown_rates_has_no_expected_times():
    asked = make_request(find_manifest("qwen3_0_6b_16k"), Options(devices=1))
    assert expected(asked, [asked.document_tokens], "h200")["step"] > 0.1
    assert expected(asked, [asked.document_tokens], None) is None


REST = {"lr": 1e-6, "weight_decay": 0.0}
ADAMW = {"kind": "adamw", "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, **REST}
MUON = {
    "kind": "muon",
    "momentum": 0.95,
    "nesterov": True,
    "num_newton_schulz_steps": 5,
    "rest": ADAMW,
    **REST,
}


def expected_with(optimizer, devices=2, **options):
    options = Options(
        devices=devices, layers=12, trainer=json.dumps({"optimizer": optimizer}), **options
    )
    return expected(make_request(find_manifest("qwen3_30b_a3b_16k"), options), [16384], "h200")


def expected_s(optimizer, **options):
    return expected_with(optimizer, **options)["optimizer"]


def test_measured_rates_are_a_file_that_plans_read(tmp_path, monkeypatch, capsys):
    sizes = rates.Sizes(64, ((64, 64), (128, 64)), (2, 32, 32), (32, 128), 2, 1 << 16)
    monkeypatch.setattr(rates, "SMALL", sizes)
    monkeypatch.setattr(rates, "REPEATS", 1)
    monkeypatch.setattr(rates, "link_rates", lambda kind, num_bytes: (2e9, 1e9))
    name, found = rates.measure(torch.device("cpu"))
    rates.write(tmp_path / "rates_cpu.json", found, name)
    assert capsys.readouterr().out.endswith("it is packages/orrery/manifest/rates/cpu.json\n")
    read = read_as(tmp_path / "rates_cpu.json", Rates, "")
    assert read == found and read.source.startswith("measured on ") and read.link_bytes == 2e9
    numbers = {field: value for field, value in vars(read).items() if isinstance(value, float)}
    assert len(numbers) == 9 and numbers.pop("fp8_flops") == 0
    assert numbers.pop("attention_half_tokens") >= 0 and min(numbers.values()) > 0


def test_attentions_rates_at_two_lengths_give_the_limit_and_half_of_it(monkeypatch):
    sizes = rates.Sizes(0, (), (0, 0, 0), (256, 1024), 1, 0)
    found = iter(3.5 * 2 * 1024 * rates.HEAD * (n + 300.0) / 1e9 for n in sizes.lengths)
    monkeypatch.setattr(rates, "seconds", lambda run, device: next(found))
    limit, half = rates.attention(sizes, torch.float32, torch.device("cpu"))
    assert limit == pytest.approx(1e9) and half == pytest.approx(300.0)


def test_the_optimizers_expected_time_follows_its_kind():
    sgd, momentum = ({"kind": "sgd", "momentum": value, **REST} for value in (0.0, 0.9))
    signs, decayed = ({"kind": "sign_sgd", **REST, "weight_decay": value} for value in (0.0, 0.1))
    num_bytes = [
        40 * expected_s(one) / expected_s(ADAMW) for one in (momentum, sgd, decayed, signs)
    ]
    assert num_bytes == pytest.approx([32, 24, 32, 24])
    # 12 layers of 128 experts of three matrices 768 × 2048, and attention, halved over two.
    operations = (
        12 * (128 * 3 * _step(768, 2048) + 2 * _step(2048, 4096) + 2 * _step(512, 2048)) / 2
    )
    values = 12 * (128 * 3 * 768 * 2048 + 2 * 2048 * 4096 + 2 * 512 * 2048) / 2
    elementwise_s = (
        20 * values + expected_s(ADAMW) * 4.2e12
    ) / 4.2e12  # 60 bytes a value there, 40 elsewhere
    products_s = 5 * operations / (MUON_SHARE * 650e12)
    assert expected_s(MUON) == pytest.approx(products_s + elementwise_s, rel=1e-6)
    offload = {"memory": '{"optimizer_offload": true}'}
    assert expected_s(MUON, **offload) < expected_s(ADAMW, **offload) and expected_s(
        signs, **offload
    ) == expected_s(signs)


def test_muons_expected_time_has_its_all_to_alls_beside_offloaded_states_too():
    # Attention's matrices are cut over four. A device sends 3/4 of its parts, and of its results.
    cut_s = 2 * 2 * 12 * (2 * 4096 * 2048 + 2 * 512 * 2048) / 4 * 3 / 4 / 350e9
    muon, adamw = expected_with(MUON, devices=4), expected_with(ADAMW, devices=4)
    assert muon["communication in all"] - adamw["communication in all"] == pytest.approx(cut_s)
    assert muon["communication"] - adamw["communication"] == pytest.approx(cut_s)
    assert muon["step"] - adamw["step"] == pytest.approx(
        (muon["optimizer"] - adamw["optimizer"] + cut_s) * (1 + IDLE_SHARE)
    )
    alone, alone_adamw = expected_with(MUON, devices=1), expected_with(ADAMW, devices=1)
    assert alone["communication in all"] == alone_adamw["communication in all"] == 0.0
    offload = {"devices": 4, "memory": '{"optimizer_offload": true}'}
    muon, adamw = expected_with(MUON, **offload), expected_with(ADAMW, **offload)
    assert muon["communication in all"] - adamw["communication in all"] == pytest.approx(cut_s)
    assert muon["communication"] - adamw["communication"] == pytest.approx(cut_s)


def _step(m, n):
    return 4 * m**2 * n + 2 * m**3


def test_a_mesh_that_does_not_fit_the_network_is_refused_by_its_law():
    with pytest.raises(
        OrreryError, match=r"trainer\.mesh\.cp 3: 2 query heads .* choose cp·dp_shard from 1·1$"
    ):
        make_request(manifest(), Options(device="cpu", mesh='{"cp": 3}'))
    for options in (
        Options(mesh='{"cp": 3}', devices=8),
        Options(mesh='{"cp": 3, "dp_shard": 2}', devices=8),
    ):
        with pytest.raises(
            OrreryError,
            match=r"trainer\.mesh\.cp 3: 2 query heads .* choose cp·dp_shard from 1·8, 2·4$",
        ):
            make_request(manifest(), options)
    for cp, shards in ((1, 8), (2, 4)):
        assert (
            make_request(
                manifest(), Options(mesh=f'{{"cp": {cp}, "dp_shard": {shards}}}', devices=8)
            ).num_devices
            == 8
        )


def test_mistakes_in_options_are_sentences():
    for options, sentence in {
        Options(device="cpu", mesh="[1]"): r"--mesh: \[1\] is no JSON object",
        Options(
            device="cpu", memory='{"activation_offlod": true}'
        ): "--memory: trainer.memory.activation_offlod = true: there is no such field; "
        "did you mean 'activation_offload'?",
        Options(device="cpu", fsdp="{"): "--fsdp: Expecting property name",
        Options(
            device="cpu", document_tokens=1
        ): "--document-tokens: a document of 1 token has none to train",
    }.items():
        with pytest.raises(OrreryError, match=sentence):
            make_request(manifest(), options)


def test_short_documents_of_many_lengths_fill_a_micro_batch():
    asked = make_request(manifest(), Options(device="cpu", lengths="variable", document_tokens=2))
    (batch,) = micro_batches(asked, 0, 0)
    assert batch.num_tokens == asked.tokens_per_micro_batch


def test_the_sft_loss_is_measured_with_the_optimizer_of_its_stage():
    sgd = {"kind": "sgd", "lr": 0.1, "momentum": 0.0, "weight_decay": 0.0}
    spec = manifest(
        stages={
            "sft": {
                **manifest().stages.sft.model_dump(mode="json"),
                "optimizer": sgd,
                "max_grad_norm": 7.0,
            }
        }
    )
    found = {loss: make_request(spec, Options(loss=loss)).trainer for loss in ("sft", "rl")}
    assert (found["sft"].optimizer.kind, found["sft"].max_grad_norm) == ("sgd", 7.0)
    assert (found["rl"].optimizer.kind, found["rl"].max_grad_norm) == ("adamw", 1.0)


def test_the_trainer_itself_takes_other_values():
    lora = {"rank": 4, "alpha": 8.0, "targets": ["attention"], "seed": 1}
    asked = make_request(manifest(), Options(trainer=json.dumps({"lora": lora})))
    assert asked.trainer.lora.rank == 4 and asked.overrides == {"trainer.lora": [None, lora]}
    with pytest.raises(OrreryError, match=r"--trainer: trainer\.optimizr"):
        make_request(manifest(), Options(trainer='{"optimizr": {}}'))


def test_copies_are_hidden_where_a_kernel_computes_beside_them():
    events = [
        _event("user_annotation", "orrery.step", 0, 100),
        _event("kernel", "gemm", 10, 20, tid=7),
        _event("kernel", "ncclDevKernel_AllGather_RING_LL", 30, 20, tid=8),
        _event(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 5, 10, tid=9, bytes=100
        ),  # half of it beside the product
        _event(
            "gpu_memcpy", "Memcpy DtoH (Device -> Pinned)", 12, 3, tid=10, bytes=10
        ),  # beside the other copy
        _event(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 25, 20, tid=9, bytes=200
        ),  # mostly beside a collective alone
        _event("gpu_memcpy", "Memcpy DtoD (Device -> Device)", 60, 10, tid=7, bytes=400),
        _event(
            "gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 95, 10, tid=9, bytes=50
        ),  # the step ends in the middle of it
    ]
    found = host_copies(events, "orrery.step")
    assert set(found) == {"to host", "to device"}
    assert (found["to host"].num_bytes, found["to host"].num_copies) == (110, 2)
    assert found["to host"].seconds == pytest.approx(10e-6) and found[
        "to host"
    ].hidden_s == pytest.approx(5e-6)
    assert found["to device"].seconds == pytest.approx(25e-6) and found[
        "to device"
    ].hidden_s == pytest.approx(5e-6)
    assert host_copies(events[:1], "orrery.step") == {}


@pytest.fixture
def memory_options(monkeypatch):
    """benchmarks/trainer/memory_options.py."""
    folder = Path(__file__).resolve().parents[2] / "benchmarks"
    monkeypatch.syspath_prepend(str(folder))
    spec = importlib.util.spec_from_file_location(
        "memory_options", folder / "trainer" / "memory_options.py"
    )
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_options", module)
    spec.loader.exec_module(module)
    return module


SMI = """#!/bin/sh
case "$*" in --id=GPU-7*clocks.sm,power.draw,clocks.max.sm,power.limit*) ;; *) exit 9;; esac
echo "1700, 660.00, 1980, 700.00"
echo "1600, 680.00, 1980, 700.00"
printf "1500, 6"
exec sleep 60
"""


def test_clocks_are_read_by_another_process_until_it_is_ended(tmp_path):
    fake = tmp_path / "nvidia-smi"
    fake.write_text(SMI)
    fake.chmod(0o755)
    with (
        (tmp_path / "read").open("w+") as file,
        bench_rank.clock_reader(str(fake), "GPU-7", file.fileno()) as process,
    ):
        while (tmp_path / "read").stat().st_size < 60:
            assert process.poll() is None
    assert process.poll() is not None
    found = bench_rank.mean_clocks((tmp_path / "read").read_text())
    # The cut line does not count.
    assert found == {
        "sm_mhz": 1650.0,
        "power_w": 670.0,
        "most_sm_mhz": 1980.0,
        "power_limit_w": 700.0,
    }


def test_no_clocks_are_no_numbers():
    assert bench_rank.mean_clocks("") is None
    assert bench_rank.mean_clocks("1700, [N/A], 1980, 700.00\n") is None
    with bench_rank.read_clocks(torch.device("cpu")) as found:
        pass
    assert found == {}


def test_memory_options_differ_from_the_manifest_and_from_each_other(memory_options):
    for name, devices, layers in (
        ("tiny", 2, None),
        ("qwen3_30b_a3b_16k", 4, 12),
        ("qwen3_8b_8k", 4, 18),
    ):
        every = memory_options.variants(memory_options.SHAPES[name], devices, layers)
        assert every[0].name == memory_options.BASE and len(
            {one.request.trainer.model_dump_json() for one in every}
        ) == len(every)
        assert ("ep 4" in [one.name for one in every]) == (name == "qwen3_30b_a3b_16k")
    assert {section for _, _, changes in memory_options.CHANGES for section in changes} <= set(
        Options.__dataclass_fields__
    )


def test_memory_options_go_on_where_the_last_call_ended_and_one_that_fails_stops_none(
    memory_options, monkeypatch, tmp_path, capsys
):
    """Rows of 10 s by a clock of our own, in calls of 35 s."""
    asked, now, norms = [], [0.0], defaultdict(lambda: 0.5)

    def measure(variant, manifest, traces, limit_s):
        asked.append(variant.name)
        now[0] += 10.0
        row = {
            "variant": variant.name,
            "value": 100.0,
            "unit": "tokens/s/GPU",
            "goal": None,
            "planned_peak_bytes": 1,
            "wall_s": 10.0,
        }
        row |= {
            "peak_allocated_bytes": 1,
            "host_copies": {},
            "overrides": variant.request.overrides,
            "bench": {"metrics": {"grad_norm": norms[variant.name]}},
        }
        return (
            row | {"value": None, "error": "no memory"}
            if variant.name == "fsdp.cpu_offload"
            else row
        )

    monkeypatch.setattr(memory_options, "measure", measure)
    monkeypatch.setattr(memory_options, "ROW_S", 10.0)
    monkeypatch.setattr(memory_options.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(
        sys,
        "argv",
        ["memory_options.py", "tiny", "--devices", "2", "--limit-s", "35", "--out", str(tmp_path)],
    )
    names = [one.name for one in memory_options.variants(memory_options.SHAPES["tiny"], 2, None)]
    for _ in range(len(names) // 3 + 1):
        memory_options.main()
    assert asked == names and "every memory option is measured" in capsys.readouterr().out
    rows = {
        row["variant"]: row
        for row in json.loads((tmp_path / "memory_options_tiny.json").read_text())["rows"]
    }
    assert (
        list(rows) == names
        and rows["fsdp.cpu_offload"]["error"] == "no memory"
        and rows["muon"]["speed_ratio"] == 1.0
    )
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--again", "muon"])
    memory_options.main()
    assert asked == [*names, "muon"]
    norms["muon"] = 0.501
    with pytest.raises(
        SystemExit,
        match=r"muon: its gradients' norm is 0\.50100, "
        r"that of 'as the manifest has it' 0\.50000; one of them is wrong",
    ):
        memory_options.main()


def test_a_measurement_that_takes_too_long_says_which_ranks_have_no_result_and_their_last_words(
    tmp_path,
):
    for rank in range(3):
        (tmp_path / f"rank.{rank}.log").write_text(f"words of {rank}\n")
    (tmp_path / "rank.1.json").write_text("{}")
    sleeping = [subprocess.Popen(["sleep", "60"]) for _ in range(3)]
    try:
        with pytest.raises(
            RunFailed,
            match=r"ranks \[0, 2\] have no result yet\nrank 0 last wrote: words of 0\n"
            "rank 2 last wrote: words of 2",
        ):
            bench_main._watch(sleeping, tmp_path, time.monotonic())
    finally:
        for process in sleeping:
            process.kill()
            process.wait()
