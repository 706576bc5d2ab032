"""A model sharded over four processes (FSDP2 on gloo) equals the model of one process.

Four ranks, forked by tests/trainer/ranks.py, run all `CASES` in turn.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch._dynamo  # FSDP imports it: once, before the ranks fork
import torch.distributed as dist
import transformers.models.gemma2.modeling_gemma2  # noqa: F401 (likewise)
from safetensors.torch import load_file, save_file
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard

from orrery.manifest.schema import Model
from orrery.models import build, expert_modules, fsdp_units, hf_folder, weights
from orrery.models.placement import box_of

pytestmark = pytest.mark.timeout(300)  # the first test waits until all ranks end
RANKS = Path(__file__).parents[1] / "trainer" / "ranks.py"
WORLD_SIZE = 4
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 56,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rope_theta": 50000.0,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}
# Four ranks divide neither 61 words nor 5 experts.
# Third: the dimension on which FSDP splits experts of a mesh axis.
CASES = {
    "tied": ("qwen3", {}, None),
    "untied": ("qwen3", {"tie_embeddings": False, "num_layers": 1}, None),
    "mixture": ("qwen3_moe", {"tie_embeddings": False, "num_experts": 5}, None),
    "glm": ("glm4_moe", {"tie_embeddings": False, "num_mtp_layers": 1}, None),
    "hugging_face": ("hugging_face", {"hf_config": GEMMA2}, None),
    "spread, each rank two experts": ("qwen3_moe", {"tie_embeddings": False, "num_experts": 8}, 0),
    "spread, each expert in two parts": (
        "glm4_moe",
        {"tie_embeddings": False, "num_experts": 2},
        1,
    ),
}
MTP_LAYER = {  # tensors that different ranks write to different files
    f"model.layers.2.{name}": torch.arange(60 * 50).reshape(60, 50).bfloat16()
    for name in ("eh_proj.weight", "embed_tokens.weight", "shared_head.head.weight")
}
cases = pytest.mark.parametrize("case", CASES)
computing = pytest.mark.parametrize(
    "case", [case for case, (_, _, cut) in CASES.items() if cut is None]
)


class Scorer(nn.Module):
    """Network and head behind one `forward`, FSDP's root, like the trainer's policy."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, token_ids, positions, cu_seqlens):
        hidden = self.network(token_ids, positions, cu_seqlens)
        return self.network.log_probs(
            hidden, token_ids.roll(-1), torch.full((len(token_ids),), 0.7), 5
        )


def score_and_gradients(scorer, pack):
    logprob, entropy = scorer(*pack)
    (logprob.mean() + 0.1 * entropy.mean()).backward()
    return logprob.detach(), entropy.detach()


def gradients(module):
    return {
        f"grad.{name}": (
            p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad
        ).contiguous()
        for name, p in module.named_parameters()
    }


def main() -> None:
    directory, rank = Path(sys.argv[1]), int(sys.argv[-1])
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(str(directory / "store"), WORLD_SIZE),
        rank=rank,
        world_size=WORLD_SIZE,
    )
    for case, (_, _, cut) in CASES.items():
        compute(rank, directory / case, cut)
    gc.collect()  # frees the process group before the interpreter ends, for its threads
    dist.destroy_process_group()


def sharded(model: Model, cut: int | None) -> Scorer:
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("fsdp",))
    module = build(model, torch.float32, "meta")
    policy = MixedPrecisionPolicy(cast_forward_inputs=False)
    if cut is not None:
        expert_mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("expert_fsdp", "ep"))
        for experts in expert_modules(module):
            for name, parameter in list(experts.named_parameters()):
                local = parameter.chunk(2)[0].detach()
                experts.register_parameter(
                    name,
                    nn.Parameter(
                        DTensor.from_local(local, expert_mesh["ep"], [Shard(0)], run_check=False)
                    ),
                )
            fully_shard(
                experts,
                mesh=expert_mesh["expert_fsdp"],
                mp_policy=policy,
                shard_placement_fn=lambda _: Shard(cut),
            )
    for unit in fsdp_units(module):
        fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy)
    return fully_shard(Scorer(module), mesh=mesh, mp_policy=policy)


def compute(rank: int, directory: Path, cut: int | None) -> None:
    model = Model.model_validate_json((directory / "model.json").read_text())
    scorer = sharded(model, cut)
    drawn, loaded = sharded(model, cut).network, scorer.network
    weights.initialize(drawn, model)
    weights.load(loaded, directory / "whole")
    for (name, a), (_, b) in zip(drawn.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    written, write_file = [], hf_folder.write_file
    hf_folder.write_file = lambda path, tensors: (
        written.append(path.name),
        write_file(path, tensors),
    )
    start = directory / "whole"
    weights.save(loaded, model, directory / "from_ranks", max_file_bytes=20_000, start=start)
    hf_folder.write_file = write_file
    (directory / f"written_{rank}.json").write_text(json.dumps(written))
    slices = {
        f"{hf.name}@{','.join(f'{a}:{b}' for a, b in box)}": t.clone()
        for hf, box, t in weights.named_hf_slices(loaded)
    }
    save_file(slices, directory / f"slices_{rank}.safetensors")
    if cut is None:
        tensors = load_file(directory / "pack.safetensors")
        logprob, entropy = score_and_gradients(
            scorer, (tensors["token_ids"], tensors["positions"], tensors["cu_seqlens"])
        )
        save_file(
            {"logprob": logprob, "entropy": entropy, **gradients(loaded)},
            directory / f"outcome_{rank}.safetensors",
        )


@pytest.fixture(scope="module")
def ranks(make_model, make_pack, tmp_path_factory):
    """Run four ranks. Return each case's folder, model and whole module."""
    root, wholes, pack = tmp_path_factory.mktemp("ranks"), {}, make_pack([7, 9, 4])
    for case, (family, fields, _) in CASES.items():
        model = make_model(family, **{"tie_embeddings": True, **fields})
        module = build(model.model_copy(update={"num_mtp_layers": 0}))
        weights.initialize(module, model)
        weights.save(module, model, root / case / "whole")
        if model.num_mtp_layers:
            file = root / case / "whole" / "model.safetensors"
            save_file(load_file(file) | MTP_LAYER, file)
        (root / case / "model.json").write_text(model.model_dump_json())
        save_file(
            dict(zip(("token_ids", "positions", "cu_seqlens"), pack, strict=True)),
            root / case / "pack.safetensors",
        )
        wholes[case] = root / case, model, module
    path = os.pathsep.join([str(Path(__file__).parent), *sys.path])
    forking = subprocess.Popen(
        [sys.executable, RANKS, Path(__file__).stem, root, "no port", str(WORLD_SIZE)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
    )
    try:
        code = forking.wait(240)
    finally:
        forking.terminate()  # the ranks that it forked end with it
        forking.wait()
    assert code == 0, "\n".join(path.read_text() for path in sorted(root.glob("rank_*.err")))
    return wholes


@computing
def test_ranks_have_the_scores_and_gradients_of_one(case, ranks, make_pack):
    directory, _, module = ranks[case]
    logprob, entropy = score_and_gradients(Scorer(module), make_pack([7, 9, 4]))
    expected = {"logprob": logprob, "entropy": entropy, **gradients(module)}
    for rank in range(WORLD_SIZE):
        actual = load_file(directory / f"outcome_{rank}.safetensors")
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(
                actual[name],
                tensor,
                rtol=1e-5,
                atol=1e-6,
                msg=lambda text, name=name: f"{name}: {text}",
            )


@cases
def test_ranks_write_the_weights_of_one_each_rank_its_share_of_the_files(case, ranks):
    directory, model, module = ranks[case]
    again = build(model)
    weights.load(again, directory / "from_ranks")
    for (name, before), (_, after) in zip(
        module.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(before, after), name
    if model.num_mtp_layers:
        files = (directory / "from_ranks").glob("*.safetensors")
        found = {name: one for file in files for name, one in load_file(file).items()}
        assert all(torch.equal(found[name], one) for name, one in MTP_LAYER.items())
    written = [
        json.loads((directory / f"written_{rank}.json").read_text()) for rank in range(WORLD_SIZE)
    ]
    assert sorted(name for names in written for name in names) == sorted(
        path.name for path in (directory / "from_ranks").glob("*.safetensors")
    )
    assert max(map(len, written)) - min(map(len, written)) <= 1 and len(written[1]) >= 1


@cases
def test_the_slices_of_all_ranks_are_every_tensor_once(case, ranks):
    directory, _, module = ranks[case]
    whole, buffers = dict(weights.named_hf_tensors(module)), dict(module.named_buffers())
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in whole.items()}
    for rank in range(WORLD_SIZE):
        for key, tensor in load_file(directory / f"slices_{rank}.safetensors").items():
            name, _, box = key.partition("@")
            where = tuple(slice(*map(int, side.split(":"))) for side in box.split(","))
            assert torch.equal(whole[name][where], tensor), key
            covered[name][where] += 1
    whole_on_each = {hf.name for hf in weights.hf_tensors(module) if hf.parameter_name in buffers}
    assert all(
        (count == (WORLD_SIZE if name in whole_on_each else 1)).all()
        for name, count in covered.items()
    )


@pytest.mark.parametrize("size", [1, 3, 8, 13])
@pytest.mark.parametrize("num_parts", [1, 2, 4, 5])
def test_boxes_divide_a_dimension_as_torch_chunk_does(size, num_parts):
    chunks = torch.arange(size).chunk(num_parts)
    for part in range(num_parts):
        (start, stop), other = box_of((size, 7), [(False, 0, num_parts, part)])
        expected = chunks[part].tolist() if part < len(chunks) else []
        assert list(range(start, stop)) == expected and other == (0, 7)


def test_a_strided_axis_divides_what_the_axes_to_its_right_have_left():
    # fsdp 2 × expert parallel 4 over 16 experts: EP splits first. fsdp rank 1, ep rank 2: 10, 11.
    assert box_of((16,), [(True, 0, 2, 1), (False, 0, 4, 2)]) == ((10, 12),)
    assert box_of((16,), [(False, 0, 2, 1), (False, 0, 4, 2)]) == ((12, 14),)
