"""Memory options: each changes what stays on the device, and no bit of a step."""

import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint
from trainer_cases import (
    GEMMA2,
    GLM5,
    MEMORY,
    MODULES,
    MOE,
    batch_columns,
    make_learner,
    manifest,
    share,
    write_start_weights,
)

from orrery.kernels import dense_products
from orrery.kernels.attention import Documents, varlen_attention
from orrery.kernels.grouped_matmul import grouped_matmul
from orrery.manifest.budget.trainer_memory import NUM_SLOTS
from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Lora
from orrery.models import causal_lm, lora
from orrery.models.fp8 import WeightCache
from orrery.models.layers import FeedForward
from orrery.trainer.learner import count_totals
from orrery.trainer.optim import optimizer as optimizers
from orrery.trainer.optim.optimizer import StateOffload
from orrery.trainer.parallel import activation_offload, blocks
from orrery.trainer.parallel.activation_offload import ActivationOffload
from orrery.trainer.parallel.context_parallel import RingCore, UlyssesCore
from orrery.trainer.parallel.expert_parallel import DeepEpExchange, TorchExchange
from orrery.trainer.parallel.gathered_keys import GatheredKeys

GEMMA = {
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "family": "hugging_face",
    "hf_config": {**GEMMA2, "num_hidden_layers": 3},
}
MODELS = {
    "dense": {"num_layers": 3},
    "moe": {"num_layers": 3, "family": "qwen3_moe", "moe": MOE},
    "gemma": GEMMA,
}


def steps_with(tmp_path, model, compile=False, **memory):
    """Metrics and final weights of two steps of three micro-batches."""
    spec = manifest(model=model, trainer={"memory": {**MEMORY, **memory}, "compile": compile})
    start = tmp_path / "start"
    write_start_weights(spec, start)
    learner = make_learner(spec, start)
    rows = []
    for step in (1, 2):
        mine = share(batch_columns(step, 5), 1, 0, 40)
        assert len(mine) > 1
        rows.append(learner.learn(mine, len(mine), count_totals(mine, learner.world), 1.0).metrics)
    return rows, {name: weight.detach().clone() for name, weight in learner.weights.items()}


@pytest.mark.parametrize("max_tokens", [40, 200], ids=["many", "one"])
def test_streamed_state_fills_memory_that_the_plan_frees_and_changes_no_bit(
    tmp_path, monkeypatch, max_tokens
):
    fills = []

    def watch(name):
        call = getattr(StateOffload, name)

        def watched(self, room_bytes=0):
            before = self.held_bytes
            call(self, room_bytes)
            assert self.held_bytes <= max(before, room_bytes, NUM_SLOTS * self._slot_bytes)
            if name == "fill" and before != self.held_bytes:
                fills.append(self.held_bytes // self._slot_bytes)

        monkeypatch.setattr(StateOffload, name, watched)

    watch("fill")
    watch("drain")
    monkeypatch.setattr(optimizers, "OFFLOADED_BYTES", 1024)

    def steps(away):
        spec = manifest(
            model={"num_layers": 3}, trainer={"memory": {**MEMORY, "optimizer_offload": away}}
        )
        write_start_weights(spec, tmp_path / "start")
        learner = make_learner(spec, tmp_path / "start")
        for step in (1, 2, 3):
            mine = share(batch_columns(step, 5), 1, 0, max_tokens)
            learner.learn(mine, len(mine), count_totals(mine, learner.world), 1.0)
            # Copies out end beside the next step.
            assert not away or learner.optimizer.offload.held_bytes
        return {name: weight.detach().clone() for name, weight in learner.weights.items()}

    plain, streamed = steps(False), steps(True)
    for name, weight in plain.items():
        assert torch.equal(streamed[name], weight), name
    # Each block whose backward pass is done makes room for more.
    assert len(set(fills)) >= 3 and max(fills) > 2 * NUM_SLOTS


def assert_same(found, expected):
    assert found[0] == expected[0]
    for name, weight in expected[1].items():
        assert torch.equal(found[1][name], weight), name


KEPT = [["attention"], ["projections"], ["experts"], ["attention", "projections", "experts"]]


@pytest.mark.parametrize("model", MODELS)
def test_what_is_made_again_is_the_same_bits(tmp_path, model):
    plain = steps_with(tmp_path, MODELS[model])
    assert_same(
        steps_with(tmp_path, MODELS[model], activation_checkpointing={"kind": "full"}), plain
    )
    every = {"activation_checkpointing": {"kind": "full"}, "activation_checkpointing_every": 2}
    assert_same(steps_with(tmp_path, MODELS[model], **every), plain)
    for keep in KEPT:
        assert_same(
            steps_with(
                tmp_path,
                MODELS[model],
                activation_checkpointing={"kind": "selective", "keep": keep},
            ),
            plain,
        )


def compile_by(monkeypatch, backend):
    """Let torch compile by this backend, which needs no C++ compiler."""
    compile = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend=backend),
    )


def modules_of(model):
    return MODULES if "moe" in model else MODULES[:2]


@pytest.mark.parametrize("away", [False, True], ids=["", "away"])
@pytest.mark.parametrize(
    "model", [MODELS["dense"], MODELS["moe"], GLM5], ids=["dense", "moe", "glm5"]
)
def test_recomputed_modules_change_no_bit(tmp_path, model, away, pools):
    plain = steps_with(tmp_path, model, activation_offload=away)
    for modules in [*([name] for name in modules_of(model)), modules_of(model)]:
        kind = {"kind": "modules", "modules": modules}
        found = steps_with(tmp_path, model, activation_checkpointing=kind, activation_offload=away)
        assert_same(found, plain)


def test_modules_recomputed_in_compiled_blocks_change_no_bit(tmp_path, monkeypatch):
    """`test_trainer_memory_plan` compiles them for GLM-5."""
    compile_by(monkeypatch, "aot_eager_decomp_partition")
    kind = {"kind": "modules", "modules": MODULES}
    plain = steps_with(tmp_path, MODELS["moe"], compile=True)
    again = steps_with(tmp_path, MODELS["moe"], compile=True, activation_checkpointing=kind)
    assert_same(again, plain)


@pytest.mark.parametrize("away", [False, True], ids=["", "away"])
def test_attention_of_a_network_of_transformers_stays_where_it_is_to_be_kept(tmp_path, away, pools):
    """The block calls torch's own operator. Its results other than tensors stay too."""
    content = {**GEMMA2, "model_type": "llama"}
    model = {"num_heads": 4, "num_kv_heads": 2, "family": "hugging_face", "hf_config": content}

    def calls(**checkpointing):
        with torch.profiler.profile() as profiled:
            found = steps_with(
                tmp_path, model, activation_checkpointing=checkpointing, activation_offload=away
            )
        attention = [
            one
            for one in profiled.events()
            if one.name == "aten::_scaled_dot_product_flash_attention_for_cpu"
        ]
        # An operator that allocates its result computes it. Others pass a call on or recall.
        return found, sum(
            any(child.name.startswith("aten::empty") for child in one.cpu_children)
            for one in attention
        )

    plain, once = calls(kind="none")
    again, twice = calls(kind="full")
    kept, as_often = calls(kind="selective", keep=["attention"])
    assert twice == 2 * once > 0 and as_often == once
    assert_same(again, plain)
    assert_same(kept, plain)


@pytest.mark.parametrize("kind", ["none", "full"])
def test_a_network_of_transformers_is_compiled_whole_or_refused_in_a_sentence(
    tmp_path, monkeypatch, kind
):
    compile_by(monkeypatch, "aot_eager")
    experts = {
        "model_type": "granitemoe",
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "rms_norm_eps": 1e-6,
    }
    model = {
        "num_heads": 4,
        "num_kv_heads": 2,
        "family": "hugging_face",
        "hf_config": {**GEMMA2, **experts},
    }
    told = (
        r"trainer\.compile true: torch cannot compile whole blocks of "
        r"model\.hf_config\.model_type 'granitemoe' \(.*\); set trainer\."
    )
    with pytest.raises(OrreryError, match=told) as caught:
        steps_with(tmp_path, model, compile=True, activation_checkpointing={"kind": kind})
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("error", "becomes"),
    [
        (torch._dynamo.exc.FailOnRecompileLimitHit("the 65th graph"), OrreryError),
        (
            torch._dynamo.exc.BackendCompilerFailed(len, RuntimeError("CUDA out of memory"), None),
            RuntimeError,
        ),  # which has memory options
        (RuntimeError("else"), RuntimeError),
    ],
)
def test_what_the_compiler_raises_of_a_network_of_transformers_is_told_and_nothing_else(
    error, becomes
):
    with (
        pytest.raises(becomes) as caught,
        blocks.explain_compile_error(SimpleNamespace(hf_config={"model_type": "granitemoe"})),
    ):
        raise error
    assert type(caught.value) is OrreryError if becomes is OrreryError else caught.value is error


def test_a_block_of_transformers_is_one_graph(tmp_path, monkeypatch):
    torch._dynamo.reset()
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend=counter),
    )
    steps_with(tmp_path, GEMMA, compile=True, activation_checkpointing={"kind": "full"})
    assert counter.frame_count == 4  # with a window and without, for the first length and for all


def test_logits_that_stay_are_those_that_are_made_again(tmp_path, monkeypatch):
    asked, op = [], causal_lm.token_logprob
    monkeypatch.setattr(
        causal_lm,
        "token_logprob",
        lambda *args, **options: asked.append(options["keep_logits"]) or op(*args, **options),
    )
    for chunk in (5, 1000):
        again, kept = (
            steps_with(tmp_path, {}, lm_head_chunk_tokens=chunk, lm_head_keeps_logits=keeps)
            for keeps in (False, True)
        )
        assert_same(kept, again)
        half = len(asked) // 2
        assert asked == half * [False] + half * [True] and half
        asked.clear()


@pytest.fixture
def pools(monkeypatch):
    """Return the pools of host buffers, one a learner. They take tensors from 64 bytes on."""
    made = []

    class Watched(ActivationOffload):
        def __init__(self, device, min_bytes, max_in_flight):
            super().__init__(device, 64, max_in_flight)
            made.append(self.pool)

    monkeypatch.setattr(activation_offload, "ActivationOffload", Watched)
    return made


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", ["none", "full"])
def test_what_waits_in_host_memory_comes_back_as_the_same_bits(tmp_path, model, kind, pools):
    plain = steps_with(tmp_path, MODELS[model])
    away = steps_with(
        tmp_path, MODELS[model], activation_checkpointing={"kind": kind}, activation_offload=True
    )
    assert_same(away, plain)
    (pool,) = pools
    assert pool.num_bytes > 0
    free = sum(len(buffers) * size for size, buffers in pool._free.items())
    assert free == pool.num_bytes  # every buffer came back


@pytest.mark.parametrize("model", ["dense", "moe"])
def test_what_selective_checkpointing_keeps_waits_in_host_memory_too(tmp_path, model, pools):
    plain, keep = steps_with(tmp_path, MODELS[model]), ["attention", "projections", "experts"]
    for checkpointing in (
        {"kind": "full"},
        {"kind": "selective", "keep": keep[:1]},
        {"kind": "selective", "keep": keep},
    ):
        assert_same(
            steps_with(
                tmp_path,
                MODELS[model],
                activation_checkpointing=checkpointing,
                activation_offload=True,
            ),
            plain,
        )
    full, attention, every = (pool.num_bytes for pool in pools)
    assert full < attention < every
    assert all(
        sum(len(buffers) * size for size, buffers in pool._free.items()) == pool.num_bytes
        for pool in pools
    )


def test_a_compiled_block_that_is_run_again_finds_the_graphs_of_its_first_run(monkeypatch):
    """The graph is inside the checkpoint. It receives a view, and offload returns no view."""
    counter, compile = CompileCounter(), torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend=counter),
    )
    memory = {**MEMORY, "activation_checkpointing": {"kind": "full"}, "activation_offload": True}
    trainer = manifest(
        mesh={"cp": 2, "dp_shard": 1}, trainer={"compile": True, "memory": memory}
    ).trainer
    layers, device = [torch.nn.Linear(8, 8) for _ in range(2)], torch.device("cpu")
    policy = SimpleNamespace(
        network=SimpleNamespace(layers=layers, config=SimpleNamespace(family="qwen3", mla=None))
    )
    world = SimpleNamespace(device=device)
    blocks.apply(policy, trainer)
    activation_offload.apply(policy, world, trainer, min_bytes=8)
    for num_tokens in (4, 6, 9):
        x = torch.randn(num_tokens, 8, requires_grad=True)
        view = x.view_as(x)
        assert view._base is x
        layers[1](layers[0](view)).sum().backward()
        assert torch.equal(x.grad, torch.ones(num_tokens, 8) @ layers[1].weight @ layers[0].weight)
    assert counter.frame_count == 2  # of the first length, and of every other


def test_a_module_that_exchanges_tensors_of_ranks_is_in_no_graph(monkeypatch):
    counter, compile, traced = CompileCounter(), torch.compile, []
    monkeypatch.setattr(
        torch,
        "compile",
        lambda function, fullgraph: compile(function, fullgraph=fullgraph, backend=counter),
    )

    def scale(x):
        traced.append(torch.compiler.is_compiling())
        return x * 2.0

    class Exchange(torch.nn.Module):
        eager = ("forward", "send")

        def forward(self, x):
            return scale(x) + 1.0

        def send(self, x):
            return scale(x)

    class Block(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.exchange = Exchange()

        def forward(self, x):
            return self.exchange.send(self.exchange(x.sin()).cos()).sin()

    kinds = (RingCore, UlyssesCore, GatheredKeys, TorchExchange, DeepEpExchange)
    assert all(hasattr(kind, name) for kind in kinds for name in kind.eager)
    trainer = manifest(mesh={"cp": 2, "dp_shard": 1}, trainer={"compile": True}).trainer
    layers = [Block()]
    blocks.apply(SimpleNamespace(network=SimpleNamespace(layers=layers)), trainer)
    x = torch.randn(4, 8)
    assert torch.equal(layers[0](x), ((x.sin() * 2.0 + 1.0).cos() * 2.0).sin())
    assert (counter.frame_count, counter.op_count, traced) == (3, 3, [False] * 2)


def test_linear_layers_in_compiled_parts_call_an_operator_only_to_keep_its_results():
    def layers_of(keep):
        memory = {**MEMORY, "activation_checkpointing": {"kind": "selective", "keep": keep}}
        spec = manifest(mesh={"cp": 2, "dp_shard": 1}, trainer={"compile": True, "memory": memory})
        plain = torch.nn.Linear(8, 8)
        adapted = lora.AdaptedLinear(
            torch.nn.Linear(8, 8),
            Lora(rank=2, alpha=4.0, targets=["attention"], seed=1),
            torch.float32,
        )
        with torch.no_grad():
            adapted.lora.a.normal_(), adapted.lora.b.normal_()
        block = torch.nn.Sequential(plain, adapted)
        network = SimpleNamespace(layers=[block])
        blocks._name_products(SimpleNamespace(network=network), spec.trainer)
        x = torch.randn(3, 8)
        wanted = lora.F.linear(x, plain.weight, plain.bias)
        wanted = lora.F.linear(wanted, adapted.weight, adapted.bias) + adapted.lora(wanted)
        with torch.profiler.profile() as profiled:
            assert torch.equal(block(x), wanted)
        return sum(event.name == "orrery::linear" for event in profiled.events())

    assert layers_of(["attention", "projections"]) == 2
    assert layers_of(["attention"]) == 0


def test_a_trainer_that_compiles_nothing_starts_without_the_compiler():
    code = "import sys, orrery.trainer.assemble; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_kept_results_stay_though_a_compiled_part_makes_them():
    """As in a block compiled around an exchange (`cp`, `ep`). The memory plan relies on it."""
    weight, ends = (
        torch.randn(4, 16, 8, requires_grad=True),
        torch.tensor([4, 8, 12, 16], dtype=torch.int32),
    )
    exchange = torch._dynamo.disable(lambda x: x * 1.0)
    documents = Documents(torch.tensor([0, 16], dtype=torch.int32), 16)

    def experts(x):
        return torch.nn.functional.silu(grouped_matmul(exchange(x), weight, ends))

    def attend(x):
        q = exchange(x).unsqueeze(1)
        return torch.nn.functional.silu(varlen_attention(q, q, q, documents))

    def project(x):
        return torch.nn.functional.silu(dense_products.linear(exchange(x), weight[0]))

    def products_of_the_backward_pass(block, operation, mesh, *keep):
        memory = {**MEMORY, "activation_checkpointing": {"kind": "selective", "keep": keep}}
        spec = manifest(
            mesh={"dp_shard": 1, **mesh},
            model={"family": "qwen3_moe", "moe": MOE},
            trainer={"compile": True, "memory": memory},
        )
        assert spec.trainer.kept == keep
        run = partial(blocks._call_without_views, torch.compile(block, backend="aot_eager"))
        context = blocks.checkpoint_options(spec.trainer, spec.model)
        y = checkpoint(run, torch.randn(16, 8, requires_grad=True), use_reentrant=False, **context)
        with torch.profiler.profile() as profiled:
            y.sum().backward()
        return sum(event.name == operation for event in profiled.events())

    for block, operation, mesh, keep in (
        (experts, "orrery::grouped_matmul", {"cp": 2}, ["attention", "experts"]),
        (
            attend,
            "orrery::varlen_attention_forward",
            {"ep": 2, "dp_shard": 2},
            ["experts", "attention"],
        ),
        (project, "orrery::linear", {"cp": 2}, ["experts", "projections"]),
    ):
        torch._dynamo.reset()
        named, unnamed = (
            products_of_the_backward_pass(block, operation, mesh, *names)
            for names in (keep, keep[:1])
        )
        assert named < unnamed, operation


def test_host_buffers_are_used_again():
    offload = ActivationOffload(torch.device("cpu"), min_bytes=64)
    layers = [torch.nn.Linear(32, 32) for _ in range(3)]
    sizes = []
    for _ in range(4):
        x = torch.randn(16, 32, requires_grad=True)
        for layer in layers:
            x = offload.run(layer, lambda x, layer=layer: torch.tanh(layer(x)), x)
        x.sum().backward()
        sizes.append(offload.pool.num_bytes)
    assert sizes[0] > 0
    assert sizes == sizes[:1] * 4


@pytest.mark.parametrize("in_flight", [1, 3])
def test_copies_of_so_many_blocks_are_in_flight(in_flight, monkeypatch):
    offload, sent, on_device = ActivationOffload(torch.device("cpu"), 64, in_flight), [], []
    send, fetch = offload._send, offload._fetch

    def count():
        alive = [any(one.device_tensor is not None for one in tensors) for tensors in sent]
        on_device.append(sum(alive))

    def watched(activations):
        sent.append(list(activations.saved.values()))
        send(activations)

    def fetched(activations):
        fetch(activations)
        count()

    monkeypatch.setattr(offload, "_send", watched)
    monkeypatch.setattr(offload, "_fetch", fetched)
    layers = [torch.nn.Linear(32, 32) for _ in range(6)]
    x = start = torch.randn(16, 32, requires_grad=True)
    y = other = start.detach().requires_grad_()
    for number, layer in enumerate(layers):
        x = offload.run(layer, lambda x, layer=layer: torch.tanh(layer(x)), x)
        y = torch.tanh(layer(y))
        count()
        assert on_device[-1] == min(number + 1, in_flight)
    on_device.clear()
    x.sum().backward()
    y.sum().backward()
    assert torch.equal(start.grad, other.grad)
    assert on_device[0] == in_flight  # a tensor that had not left does not travel


def test_micro_batches_of_many_lengths_share_host_buffers():
    offload = ActivationOffload(torch.device("cpu"), min_bytes=64)
    layer = torch.nn.Linear(32, 32)
    for length in (64, *range(33, 64)):  # the longest first: all others fit into what it needs
        x = torch.randn(length, 32, requires_grad=True)
        offload.run(layer, lambda x: torch.tanh(layer(x)), x).sum().backward()
        gradient, leaf = x.grad, x.detach().requires_grad_()
        torch.tanh(layer(leaf)).sum().backward()
        assert torch.equal(gradient, leaf.grad)
        if length == 64:
            most = offload.pool.num_bytes
    assert 0 < offload.pool.num_bytes <= most


@pytest.mark.parametrize("is_cached", [True, False])
def test_weights_in_fp8_stay_on_the_device(is_cached):
    block = FeedForward(512, 256, is_fp8=True)
    if is_cached:
        WeightCache(nn.Sequential(block)).refresh()
    offload = ActivationOffload(torch.device("cpu"), min_bytes=1)
    x = torch.randn(4, 512, requires_grad=True)
    offload.run(block, block.forward, x)
    sides = {tuple(saved.shape) for saved in offload._last.saved.values()}
    assert sides and not sides & {(256, 512), (512, 256), (512, 512)}


def test_weights_and_what_blocks_share_stay_on_the_device():
    offload = ActivationOffload(torch.device("cpu"), min_bytes=1)
    layer, shared = torch.nn.Linear(8, 8), torch.randn(4, 8)
    packed = []
    pack = offload._pack

    def watch(group, block, others, tensor):
        result = pack(group, block, others, tensor)
        packed.append((tensor, result is tensor))
        return result

    offload._pack = watch
    offload.run(
        layer,
        lambda x, shared: (layer(x) * shared).tanh(),
        torch.randn(4, 8, requires_grad=True),
        shared,
    )
    stayed = [tensor for tensor, on_device in packed if on_device]
    assert any(tensor.data_ptr() == layer.weight.data_ptr() for tensor in stayed)
    assert any(tensor.data_ptr() == shared.data_ptr() for tensor in stayed)
    assert any(not on_device for _, on_device in packed)


@pytest.mark.parametrize(
    "said",
    [{}, {"PYTORCH_CUDA_ALLOC_CONF": "backend:native"}, {"PYTORCH_ALLOC_CONF": "backend:native"}],
)
def test_a_rank_lets_segments_grow_unless_its_environment_says_otherwise_and_before_torch_is_loaded(
    said,
):
    script = "import os, sys, orrery.trainer.__main__ as m; m.grow_segments(); "
    script += "assert 'torch' not in sys.modules; "
    script += (
        "print({name: value for name, value in os.environ.items() if name.endswith('ALLOC_CONF')})"
    )
    environment = {
        name: value for name, value in os.environ.items() if not name.endswith("ALLOC_CONF")
    }
    ran = subprocess.run(
        [sys.executable, "-c", script],
        env=environment | said,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout.strip() == str(
        said or {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    )
