"""Weights to disk and back, and what is refused on the way."""

import hashlib
import json

import pytest
import torch
from replaced import replaced
from safetensors.torch import load_file, save_file

from orrery.manifest.errors import OrreryError
from orrery.manifest.publish import sha256_of
from orrery.models import build, hf_folder, weights

families = pytest.mark.parametrize(
    ("family", "tied"),
    [
        ("qwen3", True),
        ("qwen3", False),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("llama", True),
        ("glm4_moe", False),
        ("glm5", False),
    ],
)

MOE_IN_BLOCKS = {
    "num_experts": 3,
    "num_experts_per_token": 2,
    "expert_intermediate_size": 130,
    "normalize_top_k": True,
    "num_dense_layers": 1,
    "num_shared_experts": 1,
    "score": "sigmoid",
    "routed_scale": 1.0,
}


@pytest.fixture
def saved(make_model, tmp_path):
    """A tied dense model, saved."""
    model = make_model()
    module = build(model)
    weights.initialize(module, model)
    weights.save(module, model, tmp_path)
    return model, module, tmp_path


def tamper(directory, change):
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


@families
@pytest.mark.parametrize("max_file_bytes", [weights.MAX_FILE_BYTES, 20_000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_round_trip_is_bitwise(family, tied, max_file_bytes, dtype, make_model, tmp_path):
    model = make_model(family, tie_embeddings=tied)
    module, again = build(model, dtype), build(model, dtype, "meta")
    weights.initialize(module, model)
    weights.save(module, model, tmp_path, max_file_bytes)
    weights.load(again, tmp_path)
    for (name, before), (_, after) in zip(
        module.named_parameters(), again.named_parameters(), strict=True
    ):
        assert torch.equal(before, after), name
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == str(dtype).removeprefix(
        "torch."
    )
    files = sorted(path.name for path in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (max_file_bytes == weights.MAX_FILE_BYTES)
    if len(files) > 1:
        index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
        assert sorted(set(index["weight_map"].values())) == files
        assert index["metadata"]["total_size"] == sum(
            t.nbytes for _, t in weights.named_hf_tensors(module)
        )


@families
def test_names_on_disk_are_one_tensor_an_expert_and_the_stream_equals_the_file(
    family, tied, make_model, tmp_path
):
    model = make_model(family, tie_embeddings=tied)
    module = build(model)
    weights.initialize(module, model)
    weights.save(module, model, tmp_path)
    on_disk, streamed = (
        load_file(tmp_path / "model.safetensors"),
        dict(weights.named_hf_tensors(module)),
    )
    assert on_disk.keys() == streamed.keys()
    assert all(torch.equal(on_disk[name], tensor) for name, tensor in streamed.items())
    assert ("lm_head.weight" in on_disk) == (not tied)
    assert ("model.layers.1.mlp.experts.5.down_proj.weight" in on_disk) == (model.moe is not None)


def test_saving_again_over_shards_leaves_none_of_them_and_no_temporary_file(saved):
    model, module, directory = saved
    weights.save(module, model, directory, max_file_bytes=20_000)
    (directory / "tokenizer.json").write_text("{}")
    weights.save(module, model, directory)
    assert sorted(path.name for path in directory.iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_save_that_dies_leaves_no_directory_that_loads(saved, monkeypatch):
    model, module, directory = saved

    def die(*_args, **_kwargs):
        raise OSError("no space left on device")

    monkeypatch.setattr(hf_folder, "save_file", die)
    with pytest.raises(OSError):
        weights.save(module, model, directory)
    with pytest.raises(OrreryError, match=r"no config\.json"):
        weights.load(build(model), directory)


def test_a_missing_tensor_is_named(saved):
    model, _, directory = saved
    tamper(directory, lambda tensors: tensors.pop("model.layers.1.self_attn.q_norm.weight"))
    with pytest.raises(
        OrreryError, match=r"has no tensor model\.layers\.1\.self_attn\.q_norm\.weight"
    ):
        weights.load(build(model), directory)


def test_an_unexpected_tensor_is_named(saved):
    model, _, directory = saved
    tamper(directory, lambda tensors: tensors.update({"model.layers.9.bias": torch.zeros(3)}))
    with pytest.raises(OrreryError, match=r"lacks: model\.layers\.9\.bias"):
        weights.load(build(model), directory)


def test_a_misshaped_tensor_is_named_with_both_shapes_and_nothing_is_loaded(saved):
    model, _, directory = saved
    tamper(directory, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    module = build(model)
    with pytest.raises(
        OrreryError, match=r"model\.norm\.weight is \[31\], but the manifest's model needs \[32\]"
    ):
        weights.load(module, directory)
    assert all(parameter.isnan().all() for parameter in module.parameters())


def test_a_tied_head_that_another_writer_stored_is_no_surprise(saved):
    model, module, directory = saved
    tamper(
        directory,
        lambda tensors: tensors.update(
            {"lm_head.weight": tensors["model.embed_tokens.weight"].clone()}
        ),
    )
    again = build(model)
    weights.load(again, directory)
    assert torch.equal(again.lm_head_weight, module.lm_head_weight)


def test_broken_and_absent_files_are_sentences(saved, tmp_path):
    model, _, directory = saved
    (directory / "model.safetensors").write_bytes(b"\x00" * 100)
    with pytest.raises(OrreryError, match="not a readable safetensors file"):
        weights.load(build(model), directory)
    (directory / "model.safetensors").unlink()
    with pytest.raises(OrreryError, match=r"neither model\.safetensors"):
        weights.load(build(model), directory)
    with pytest.raises(OrreryError, match=r"no config\.json"):
        weights.load(build(model), tmp_path / "nowhere")


def test_initial_weights_are_normal_with_the_manifests_std_and_follow_its_seed(make_model):
    model = make_model(vocab_size=2000, tie_embeddings=False)
    one, same, other = (build(model) for _ in range(3))
    weights.initialize(one, model)
    weights.initialize(same, model)
    weights.initialize(other, replaced(model, "init", seed=4))
    for (name, a), (_, b), (_, c) in zip(
        one.named_parameters(), same.named_parameters(), other.named_parameters(), strict=True
    ):
        assert torch.equal(a, b), name
        if name.endswith("norm.weight"):
            assert (a == 1).all()
        else:
            assert not torch.equal(a, c)
            assert abs(a.std() / model.init.std - 1) < 0.1 and abs(a.mean()) < 0.02, name
    assert not torch.equal(one.lm_head.weight, one.embed_tokens.weight)


def test_a_mixture_starts_from_the_same_attention_as_a_dense_network(make_model):
    dense_model, sparse_model = make_model("qwen3"), make_model("qwen3_moe")
    dense, sparse = build(dense_model), build(sparse_model)
    weights.initialize(dense, dense_model)
    weights.initialize(sparse, sparse_model)
    assert torch.equal(
        dense.layers[1].self_attn.q_proj.weight, sparse.layers[1].self_attn.q_proj.weight
    )
    experts = sparse.layers[0].mlp.experts.gate_up_proj
    assert not torch.equal(experts[0], experts[1])


def test_pretrained_weights_are_loaded_only_if_their_digest_is_the_manifests(saved):
    model, module, directory = saved
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    fields = model.model_dump()
    fields["init"] = {
        "kind": "pretrained",
        "path": str(directory),
        "revision": "main",
        "sha256": digest,
    }
    pretrained = type(model).model_validate(fields)
    again = build(pretrained)
    weights.initialize(again, pretrained)
    assert torch.equal(again.embed_tokens.weight, module.embed_tokens.weight)
    fields["init"]["sha256"] = "0" * 64
    with pytest.raises(OrreryError, match=r"model\.init\.sha256"):
        weights.initialize(again, type(model).model_validate(fields))


def test_two_models_of_one_shape_in_several_files_have_two_digests(make_model, tmp_path):
    digests = []
    for seed in (1, 2):
        model, directory = (
            make_model(init={"kind": "random", "seed": seed, "std": 0.1}),
            tmp_path / str(seed),
        )
        weights.write_initial(model, directory, torch.float32, max_file_bytes=20_000)
        digests.append(sha256_of(sorted(directory.glob("model-*.safetensors"))))
    one, two = (tmp_path / seed / hf_folder.INDEX_FILE for seed in "12")
    assert one.read_bytes() == two.read_bytes()  # the index lacks the tensors' values
    init = {
        "kind": "pretrained",
        "path": str(tmp_path / "2"),
        "revision": "main",
        "sha256": digests[0],
    }
    with pytest.raises(
        OrreryError,
        match=rf"model\.init\.sha256 {digests[0]}: the weights in .*/2 have digest {digests[1]}\. "
        "Write ",
    ):
        weights.initialize(build(model), make_model(init=init))
    module = build(model)
    weights.initialize(module, make_model(init={**init, "sha256": digests[1]}))
    shards = {
        name: tensor
        for path in (tmp_path / "2").glob("model-*")
        if path.suffix != ".json"
        for name, tensor in load_file(path).items()
    }
    assert torch.equal(module.embed_tokens.weight, shards["model.embed_tokens.weight"])


def test_the_files_that_are_loaded_are_those_that_the_digest_is_of(saved, make_model, tmp_path):
    """A single file beside the files of an index: it is loaded, and so it is named."""
    model, module, directory = saved
    other = make_model(init={"kind": "random", "seed": 9, "std": 0.1})
    weights.write_initial(other, tmp_path / "other", torch.float32, max_file_bytes=20_000)
    for path in (tmp_path / "other").glob("model*"):
        path.rename(directory / path.name)
    init = {
        "kind": "pretrained",
        "path": str(directory),
        "revision": "main",
        "sha256": sha256_of([directory / "model.safetensors"]),
    }
    again = build(model)
    weights.initialize(again, make_model(init=init))
    assert torch.equal(again.embed_tokens.weight, module.embed_tokens.weight)
    index = hashlib.sha256((directory / hf_folder.INDEX_FILE).read_bytes()).hexdigest()
    with pytest.raises(OrreryError, match=r"model\.init\.sha256"):
        weights.initialize(again, make_model(init={**init, "sha256": index}))


def test_wrapped_blocks_keep_their_names_on_disk(make_model):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    module = build(make_model())
    names = [hf.name for hf in weights.hf_tensors(module)]
    module.layers[0] = checkpoint_wrapper(module.layers[0])
    module.layers[1] = torch.compile(module.layers[1])
    assert [hf.name for hf in weights.hf_tensors(module)] == names


def test_a_choice_bias_stays_float32_beside_bfloat16_weights(make_model, tmp_path):
    model = make_model("glm4_moe")
    module, again = build(model, torch.bfloat16), build(model, torch.bfloat16, "meta")
    weights.initialize(module, model)
    with torch.no_grad():
        module.layers[1].mlp.gate.expert_bias.copy_(torch.arange(6) * 1.001)
    weights.save(module, model, tmp_path)
    assert (
        load_file(tmp_path / "model.safetensors")[
            "model.layers.1.mlp.gate.e_score_correction_bias"
        ].dtype
        == torch.float32
    )
    weights.load(again, tmp_path)
    assert torch.equal(again.layers[1].mlp.gate.expert_bias, torch.arange(6) * 1.001)


def test_stored_rotations_are_passed_over(make_model, tmp_path):
    model = make_model("llama")
    module, again = build(model), build(model)
    weights.initialize(module, model)
    weights.save(module, model, tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    tamper(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3)}))
    weights.load(again, tmp_path)
    assert torch.equal(again.embed_tokens.weight, module.embed_tokens.weight)


@families
@pytest.mark.parametrize("max_file_bytes", [weights.MAX_FILE_BYTES, 20_000])
def test_initial_weights_are_written_without_a_network_as_a_network_would_save_them(
    family, tied, max_file_bytes, make_model, tmp_path
):
    model = make_model(family, tie_embeddings=tied)
    module = build(model, torch.bfloat16)
    weights.initialize(module, model)
    weights.save(module, model, tmp_path / "saved", max_file_bytes)
    num_parameters = weights.write_initial(
        model, tmp_path / "written", torch.bfloat16, max_file_bytes
    )
    assert num_parameters == sum(parameter.numel() for parameter in module.parameters())
    saved, written = (
        {path.name: path.read_bytes() for path in (tmp_path / name).iterdir()}
        for name in ("saved", "written")
    )
    assert saved == written and (len(saved) == 2) == (max_file_bytes == weights.MAX_FILE_BYTES)


def test_a_pretrained_folder_is_written_again_in_the_manifests_precision(saved, tmp_path):
    model, module, directory = saved
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    init = {"kind": "pretrained", "path": str(directory), "revision": "main", "sha256": digest}
    pretrained = type(model).model_validate({**model.model_dump(), "init": init})
    weights.write_initial(pretrained, tmp_path / "again", torch.bfloat16)
    again = load_file(tmp_path / "again" / "model.safetensors")
    for name, tensor in weights.named_hf_tensors(module):
        assert torch.equal(again[name], tensor.to(torch.bfloat16)), name
    with pytest.raises(OrreryError, match=r"model\.init\.sha256"):
        weights.write_initial(
            type(model).model_validate(
                {**model.model_dump(), "init": {**init, "sha256": "0" * 64}}
            ),
            tmp_path / "no",
            torch.bfloat16,
        )


def test_weights_drawn_on_the_device_for_a_benchmark_have_the_std_and_norms_of_one(make_model):
    module = build(make_model("glm4_moe", vocab_size=2000), torch.bfloat16, "meta")
    weights.initialize_on_device(module, std=0.1, seed=1)
    assert abs(module.embed_tokens.weight.float().std() / 0.1 - 1) < 0.05
    assert (module.norm.weight == 1).all() and (module.layers[0].self_attn.q_proj.bias == 0).all()
    assert (module.layers[1].mlp.gate.expert_bias == 0).all() and not any(
        parameter.isnan().any() for parameter in module.parameters()
    )


def test_others_may_read_what_the_umask_lets_them(tmp_path):
    hf_folder.write_file(tmp_path / "model.safetensors", {"a": torch.zeros(2)})
    plain = tmp_path / "plain"
    plain.touch()
    assert (tmp_path / "model.safetensors").stat().st_mode == plain.stat().st_mode


def quantized(tensors):
    """Replace matrices of two layers by FP8 blocks of 128 × 128 with their scales."""
    wanted = {}
    for name in [name for name, one in tensors.items() if ".layers." in name and one.dim() == 2]:
        rows, columns = tensors[name].shape
        scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
        value = tensors[name].to(torch.float8_e4m3fn)
        wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
        wanted[name] = value.float() * wide
        tensors[name], tensors[f"{name}_scale_inv"] = value, scale
    return wanted


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_checkpoint_in_fp8_blocks_is_read_as_its_numbers(dtype, make_model, tmp_path):
    sizes = {"hidden_size": 144, "intermediate_size": 200, "moe": MOE_IN_BLOCKS}
    model = make_model("glm5", **sizes)
    module, wanted = build(model), {}
    weights.initialize(module, model)
    weights.save(module, model, tmp_path)
    tamper(tmp_path, lambda tensors: wanted.update(quantized(tensors)))
    again = build(model, dtype)
    weights.load(again, tmp_path)
    assert len(wanted) > 20
    for name, tensor in weights.named_hf_tensors(again):
        if name in wanted:
            assert torch.equal(tensor, wanted[name].to(dtype)), name


def test_fp8_without_scales_or_with_misshaped_ones_is_a_sentence(saved):
    model, _, directory = saved
    tamper(directory, quantized)
    name = "model.layers.1.mlp.up_proj.weight_scale_inv"
    tamper(directory, lambda tensors: tensors.update({name: torch.ones(2, 1)}))
    needed = rf"{name} is \[2, 1\], but the manifest's model needs \[1"
    with pytest.raises(OrreryError, match=needed):
        weights.load(build(model), directory)
    tamper(directory, lambda tensors: tensors.pop(name))
    with pytest.raises(OrreryError, match=f"has a tensor in FP8, but not its scales {name}"):
        weights.load(build(model), directory)


def test_an_index_that_names_no_files_is_one_sentence(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {"a": 1}}')
    with pytest.raises(OrreryError, match="not a safetensors index"):
        hf_folder.weight_files(tmp_path)
