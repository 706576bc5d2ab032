"""Weights in FP8 on a wire: an engine that quantizes what it decodes holds the sent bytes."""

import pytest
import torch

from orrery.kernels.fp8.quantize import reference_quantize_weight
from orrery.manifest.errors import OrreryError
from orrery.wire.weight_wire import WeightPublisher, read_weights
from orrery.wire.weight_wire.fp8_blocks import (
    SCALE,
    SliceDecoder,
    decode,
    decoded,
    in_blocks,
    plain_tensors,
    with_scales,
)
from orrery.wire.weight_wire.plan import Slice, TensorInfo, aligned_bytes, cut, in_bucket, shape_of


def weight(n=384, k=512, seed=0):
    """Return blocks of very different sizes, some around vLLM's least greatest number, one zero."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, k, generator=generator)
    sizes = 10.0 ** torch.randint(-6, 3, (n // 128, k // 128), generator=generator)
    x *= sizes.repeat_interleave(128, 0).repeat_interleave(128, 1)
    x[:128, :128] = 0
    for row, top in enumerate((0.95e-4, 0.98e-4, 0.999e-4)):
        block = x[row * 128 : (row + 1) * 128, 128:256]
        block *= top / block.abs().max()
    return x.bfloat16()


def same(found, wanted):
    values = (each.value.view(torch.uint8) for each in (found, wanted))
    return torch.equal(*values) and torch.equal(found.scale, wanted.scale)


def test_decoded_weights_quantize_to_the_sent_values_and_scales():
    for seed in range(8):
        sent = reference_quantize_weight(weight(seed=seed))
        assert same(reference_quantize_weight(decode(*sent)), sent)


def test_published_weights_in_fp8_take_half_the_bytes_and_arrive(tmp_path):
    x, norm = weight(), torch.ones(512, dtype=torch.bfloat16)
    sent = reference_quantize_weight(x)
    both = [("x" + SCALE, sent.scale), ("x", sent.value)]
    for parts in (both, both[::-1]):
        publisher = WeightPublisher(tmp_path / parts[0][0], shard_bytes=1)  # a file a tensor
        published = publisher.publish(1, [*parts, ("norm", norm)])
        assert published.fingerprints.keys() == {"x", "x" + SCALE, "norm"}
        found = dict(decoded(read_weights(published.path)))
        assert found.keys() == {"x", "norm"} and found["x"].dtype == torch.bfloat16
        assert same(reference_quantize_weight(found["x"]), sent)
    assert sent.value.nbytes + sent.scale.nbytes < 0.501 * x.nbytes


@pytest.mark.parametrize(("kept", "lacks"), [("x", "x_scale_inv"), ("x" + SCALE, "x")])
def test_a_missing_part_is_named(kept, lacks):
    sent = reference_quantize_weight(weight())
    tensor = sent.value if kept == "x" else sent.scale
    with pytest.raises(OrreryError, match=f"tensor '{lacks}' is missing"):
        dict(decoded([(kept, tensor)]))


@pytest.mark.parametrize("max_bytes", [1 << 20, 40_000, 300])
def test_slices_cut_anywhere_decode_to_the_whole_tensor(max_bytes):
    sent = reference_quantize_weight(weight())
    tensors = [
        TensorInfo("x" + SCALE, (3, 4), "float32"),
        TensorInfo("x", (384, 512), "float8_e4m3fn"),
        TensorInfo("norm", (512,), "bfloat16"),
    ]
    assert [each.dtype for each in plain_tensors(tensors)] == ["bfloat16", "bfloat16"]
    whole = {"x": (((0, 128), (0, 512)), ((128, 384), (0, 512))), "norm": (((0, 512),),)}
    needs = with_scales(whole, tensors)
    assert list(needs) == ["x" + SCALE, "x", "norm"]
    assert needs["x" + SCALE] == (((0, 1), (0, 4)), ((1, 3), (0, 4)))
    held = {"x": sent.value, "x" + SCALE: sent.scale, "norm": torch.ones(512).bfloat16()}
    bucket, slices, offset = torch.zeros(1 << 20, dtype=torch.uint8), [], 0
    for name, boxes in needs.items():
        for box in (part for each in boxes for part in cut(each, held[name].itemsize, max_bytes)):
            part = held[name][tuple(slice(*side) for side in box)]
            in_bucket(bucket, offset, shape_of(box), part.dtype).copy_(part)
            slices.append(Slice(name, box, offset))
            offset += aligned_bytes(box, part.itemsize)
    decoder = SliceDecoder({each.name: each for each in tensors}, torch.device("cpu"))
    scales, values, others = decoder.divide(slices)
    assert {each.name for each in others} == {"norm"}
    wide = decoder.decode(scales, values, bucket)
    found = torch.full((384, 512), torch.nan, dtype=torch.bfloat16)
    for place in decoder.widened(values):
        part = in_bucket(wide, place.offset, shape_of(place.box), torch.bfloat16)
        found[tuple(slice(*side) for side in place.box)] = part
    assert torch.equal(found, decode(*sent))


def test_parts_of_blocks_are_refused():
    assert in_blocks(((2, 3), (128, 384), (0, 256))) == ((2, 3), (1, 3), (0, 2))
    with pytest.raises(ValueError, match=r"\[\(0, 64\), \(0, 128\)\] .* is not whole blocks"):
        in_blocks(((0, 64), (0, 128)))
