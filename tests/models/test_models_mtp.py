"""Test that checkpoints carry multi-token prediction (MTP) layers unchanged."""

import hashlib
import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from orrery.manifest.errors import OrreryError
from orrery.models import axis, build, weights

NORMS = ("enorm.weight", "hnorm.weight", "shared_head.norm.weight")


def block_names(model):
    """Return the last block's tensors by name. An MTP layer has the same names and shapes."""
    with torch.device("meta"):
        network = build(model, device="meta")
    last = model.num_layers - 1
    prefix = f"model.layers.{last}."
    tensors = weights.hf_tensors(network)
    return {hf.name.removeprefix(prefix): hf for hf in tensors if hf.name.startswith(prefix)}


def mtp_layer(model):
    """Return random tensors of an MTP layer by name, in bfloat16, biases in float32."""
    size, vocab = model.hidden_size, model.vocab_size
    shapes = {name: hf.shape for name, hf in block_names(model).items()}
    shapes |= dict.fromkeys(NORMS, (size,)) | {"eh_proj.weight": (size, 2 * size)}
    shapes |= {"embed_tokens.weight": (vocab, size), "shared_head.head.weight": (vocab, size)}
    generator = torch.Generator().manual_seed(5)
    layer = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return {
        f"model.layers.{model.num_layers}.{name}": one if "bias" in name else one.bfloat16()
        for name, one in layer.items()
    }


def in_fp8(tensors):
    """Replace the matrices by FP8 blocks with scales. Return the values that a reader finds."""
    wanted = {}
    for name in list(tensors):
        value = tensors[name]
        wanted[name] = value
        if value.dim() == 2 and "eh_proj" not in name and "embed" not in name:
            rows, columns = value.shape
            scale = torch.rand(-(-rows // 128), -(-columns // 128)) + 0.5
            wide = scale.repeat_interleave(128, 0)[:rows].repeat_interleave(128, 1)[:, :columns]
            tensors[name] = value.to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale
            wanted[name] = tensors[name].float() * wide
    return wanted


@pytest.fixture(params=["glm5", "deepseek_v3"])
def published(request, make_model, tmp_path):
    """Return (model, folder) of a checkpoint that announces one MTP layer, but does not have it."""
    folder = tmp_path / "published"
    model = make_model(request.param, num_experts=16, hidden_size=144)
    module = build(model, torch.bfloat16)
    weights.initialize(module, model)
    weights.save(module, model, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_nextn_predict_layers": 1}))
    return model, folder


def add_layer(model, folder, layer):
    file = folder / "model.safetensors"
    save_file(load_file(file) | layer, file)
    init = {"kind": "pretrained", "path": str(folder), "revision": "main"}
    init["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    return type(model).model_validate({**model.model_dump(), "init": init, "num_mtp_layers": 1})


def bytes_of(tensor):
    return tensor.contiguous().view(torch.uint8)


@pytest.mark.parametrize("max_file_bytes", [weights.MAX_FILE_BYTES, 20_000])
def test_a_layer_goes_through_a_run_byte_for_byte(published, max_file_bytes, tmp_path):
    model, folder = published
    layer = mtp_layer(model)
    model = add_layer(model, folder, layer)
    start, made = tmp_path / "init", tmp_path / "made"
    weights.write_initial(model, start, torch.float32, max_file_bytes)
    module = build(model, torch.float32)
    weights.load(module, start)
    with torch.no_grad():
        module.norm.weight.add_(1)  # as a training step would
    weights.save(module, model, made, max_file_bytes, start)
    assert json.loads((made / "config.json").read_text())["num_nextn_predict_layers"] == 1
    for directory in (start, made):
        found = {}
        for file in directory.glob("*.safetensors"):
            found |= load_file(file)
        assert {name for name in found if ".layers.2." in name} == set(layer)
        for name, tensor in layer.items():
            assert found[name].dtype == tensor.dtype
            assert torch.equal(bytes_of(found[name]), bytes_of(tensor)), name
    again = build(model, torch.float32)
    weights.load(again, made)
    assert torch.equal(again.norm.weight, module.norm.weight)


def test_a_layer_in_fp8_is_carried_as_its_numbers(published, tmp_path):
    model, folder = published
    layer = mtp_layer(model)
    wanted = in_fp8(layer)
    model = add_layer(model, folder, layer)
    weights.write_initial(model, tmp_path / "init", torch.float32)
    found = load_file(tmp_path / "init" / "model.safetensors")
    assert {name for name in found if ".layers.2." in name} == set(wanted)
    for name, tensor in wanted.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    name = "model.layers.2.self_attn.o_proj.weight_scale_inv"
    file = folder / "model.safetensors"
    save_file({key: one for key, one in load_file(file).items() if key != name}, file)
    with pytest.raises(OrreryError, match=f"has a tensor in FP8, but not its scales {name}"):
        weights.write_initial(model, tmp_path / "not", torch.float32)
    assert not list((tmp_path / "not").glob("*.safetensors"))


def test_the_checkpoint_decides_how_many_layers_there_are(published, tmp_path):
    model, folder = published
    carried = add_layer(model, folder, {})
    with pytest.raises(OrreryError, match=r"has 0 layers .* Write model.num_mtp_layers: 0$"):
        weights.write_initial(carried, tmp_path / "init", torch.float32)
    add_layer(model, folder, mtp_layer(model))
    with pytest.raises(OrreryError, match=r"has 1 layers .* Write model.num_mtp_layers: 1$"):
        weights.load(build(model), folder)


@pytest.mark.parametrize("num_layers", [0, 1])
def test_a_fetched_model_has_the_layers_of_its_weights(published, num_layers):
    pytest.importorskip("transformers")
    model, folder = published
    add_layer(model, folder, mtp_layer(model) if num_layers else {})
    init = {"kind": "random", "seed": 3, "std": 0.2}
    found, reason = axis.model_of(folder, init, model.tokenizer.model_dump())
    assert reason is None and found.num_mtp_layers == num_layers
