"""Sharded over two processes (FSDP2 on gloo), a model is the model that one process has.

Each test starts this file as two ranks: `python test_models_sharded.py <rank> <directory>`, which `main` below is.
"""

import gc
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method

from orrery.manifest.schema import Model
from orrery.models import build, fsdp_methods, fsdp_units, weights
from orrery.models.placement import box_of

WORLD_SIZE = 2
GEMMA2 = {
    "model_type": "gemma2",
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "sliding_window": 6,
    "tie_word_embeddings": True,
}


def score_and_gradients(module, pack):
    token_ids, positions, cu_seqlens = pack
    logprob, entropy = module.score(token_ids, positions, cu_seqlens, token_ids.roll(-1), torch.full((len(token_ids),), 0.7), 5)
    (logprob.mean() + 0.1 * entropy.mean()).backward()
    return logprob.detach(), entropy.detach()


def gradients(module):
    return {
        f"grad.{name}": (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad).contiguous()
        for name, p in module.named_parameters()
    }


def main(rank: int, directory: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), WORLD_SIZE), rank=rank, world_size=WORLD_SIZE)
    compute(rank, directory)
    gc.collect()  # the modules hold the process group, whose threads must not outlive the interpreter
    dist.destroy_process_group()


def compute(rank: int, directory: Path) -> None:
    mesh = dist.init_device_mesh("cpu", (WORLD_SIZE,), mesh_dim_names=("dp_shard",))
    model = Model.model_validate_json((directory / "model.json").read_text())
    tensors = load_file(directory / "pack.safetensors")

    def sharded():
        module = build(model, torch.float32, "meta")
        policy = MixedPrecisionPolicy(cast_forward_inputs=False)
        for unit in fsdp_units(module):
            fully_shard(unit if len(unit) > 1 else unit[0], mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
        for method in fsdp_methods(module):
            register_fsdp_forward_method(module, method)
        return module

    drawn, loaded = sharded(), sharded()
    weights.initialize(drawn, model)
    weights.load(loaded, directory / "whole")
    for (name, a), (_, b) in zip(drawn.named_parameters(), loaded.named_parameters(), strict=True):
        assert torch.equal(a.to_local(), b.to_local()), name
    weights.save(loaded, model, directory / "from_ranks", max_file_bytes=20_000)
    logprob, entropy = score_and_gradients(loaded, (tensors["token_ids"], tensors["positions"], tensors["cu_seqlens"]))
    outcome = {"logprob": logprob, "entropy": entropy, **gradients(loaded)}
    slices = {f"{hf.name}@{','.join(f'{a}:{b}' for a, b in box)}": t.contiguous() for hf, box, t in weights.named_hf_slices(loaded)}
    save_file(slices, directory / f"slices_{rank}.safetensors")
    save_file(outcome, directory / f"outcome_{rank}.safetensors")


@pytest.mark.parametrize(
    ("family", "tied", "num_layers"),
    [("qwen3", True, 2), ("qwen3", False, 1), ("qwen3_moe", False, 2), ("hugging_face", True, 2)],
    ids=["tied", "untied", "mixture", "hugging_face"],
)
def test_two_ranks_have_the_weights_scores_gradients_and_files_of_one(family, tied, num_layers, make_model, make_pack, tmp_path):
    # 61 words and 5 experts: neither divides by two ranks
    fields = {
        "moe": {
            "num_experts": 5,
            "num_experts_per_token": 2,
            "expert_intermediate_size": 12,
            "normalize_top_k": True,
            "num_dense_layers": 0,
            "num_shared_experts": 0,
            "score": "softmax",
            "routed_scale": 1.0,
        }
    }
    if family == "hugging_face":
        fields = {"hf_config": GEMMA2}
    model = make_model(family, tie_embeddings=tied, num_layers=num_layers, **(fields if family != "qwen3" else {}))
    module, pack = build(model), make_pack([7, 9, 4])
    weights.initialize(module, model)
    weights.save(module, model, tmp_path / "whole")
    (tmp_path / "model.json").write_text(model.model_dump_json())
    save_file(dict(zip(("token_ids", "positions", "cu_seqlens"), pack, strict=True)), tmp_path / "pack.safetensors")

    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(rank), str(tmp_path)],
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(WORLD_SIZE)
    ]
    try:
        for rank in ranks:
            output, _ = rank.communicate(timeout=100)
            assert rank.returncode == 0, output
    finally:
        for rank in ranks:
            rank.kill()

    logprob, entropy = score_and_gradients(module, pack)
    expected = {"logprob": logprob, "entropy": entropy, **gradients(module)}
    for rank in range(WORLD_SIZE):
        actual = load_file(tmp_path / f"outcome_{rank}.safetensors")
        assert actual.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(actual[name], tensor, rtol=1e-5, atol=1e-6, msg=lambda text, name=name: f"{name}: {text}")

    again = build(model)
    weights.load(again, tmp_path / "from_ranks")
    for (name, before), (_, after) in zip(module.named_parameters(), again.named_parameters(), strict=True):
        assert torch.equal(before, after), name

    whole = dict(weights.named_hf_tensors(module))
    covered = {name: torch.zeros(tensor.shape, dtype=torch.int8) for name, tensor in whole.items()}
    for rank in range(WORLD_SIZE):
        for key, tensor in load_file(tmp_path / f"slices_{rank}.safetensors").items():
            name, _, box = key.partition("@")
            where = tuple(slice(*map(int, side.split(":"))) for side in box.split(","))
            assert torch.equal(whole[name][where], tensor), key
            covered[name][where] += 1
    assert all((count == 1).all() for count in covered.values())


@pytest.mark.parametrize("size", [1, 3, 8, 13])
@pytest.mark.parametrize("num_parts", [1, 2, 4, 5])
def test_boxes_divide_a_dimension_as_torch_chunk_does(size, num_parts):
    chunks = torch.arange(size).chunk(num_parts)
    for part in range(num_parts):
        (start, stop), other = box_of((size, 7), [(False, 0, num_parts, part)])
        expected = chunks[part].tolist() if part < len(chunks) else []
        assert list(range(start, stop)) == expected and other == (0, 7)


def test_a_strided_axis_divides_what_the_axes_to_its_right_have_left():
    # mesh (fsdp 2, expert parallel 4) over 16 experts: expert parallel cut first, so fsdp rank 1 of ep rank 2 holds 10 and 11
    assert box_of((16,), [(True, 0, 2, 1), (False, 0, 4, 2)]) == ((10, 12),)
    assert box_of((16,), [(False, 0, 2, 1), (False, 0, 4, 2)]) == ((12, 14),)


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
