"""Our llama with the real weights of SmolLM2-135M-Instruct, against transformers.

Skipped if the packages that contain and read the weights are not installed. Nothing is downloaded.
"""

import hashlib
from pathlib import Path

import pytest
import smollm2
import torch

from orrery.manifest.identity import load
from orrery.models import build, weights
from orrery.models.hf_folder import check_config

pytestmark = pytest.mark.skipif(
    bool(smollm2.missing()), reason=f"not installed: {', '.join(smollm2.missing())}"
)

SIZES = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_layers": 30,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "max_positions": 8192,
    "rope_theta": 100000.0,
    "rms_norm_eps": 1e-5,
}
DOCUMENTS = [
    "The capital of France is Paris. The capital of Italy is",
    "def fibonacci(n):\n    return n if n < 2 else",
    "1, 2, 3, 5, 8, 13, 21,",
]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    directory = tmp_path_factory.mktemp("smollm2")
    return directory, smollm2.convert(directory)


@pytest.fixture(scope="module")
def ours(theirs, make_model):
    directory, _ = theirs
    digest = hashlib.sha256((directory / "model.safetensors").read_bytes()).hexdigest()
    model = make_model(
        "llama",
        **SIZES,
        init={"kind": "pretrained", "path": str(directory), "revision": "main", "sha256": digest},
    )
    module = build(model, torch.float32, "meta")
    weights.initialize(module, model)
    return module


def test_the_manifest_computes_what_the_folder_says(theirs):
    check_config(
        load(Path(__file__).parents[2] / "manifests" / "smollm2_smoke.json").model, theirs[0]
    )


def test_logits_of_a_pack_of_real_text_are_those_of_transformers(theirs, ours):
    from transformers import AutoTokenizer

    directory, network = theirs
    tokens = [
        torch.tensor(AutoTokenizer.from_pretrained(directory)(text)["input_ids"])
        for text in DOCUMENTS
    ]
    lengths = torch.tensor([len(one) for one in tokens])
    with torch.no_grad():
        expected = torch.cat([network(one[None]).logits[0] for one in tokens])
    positions = torch.cat([torch.arange(length) for length in lengths.tolist()])
    logits = ours.logits(
        torch.cat(tokens), positions, torch.tensor([0, *lengths.tolist()]).cumsum(0).to(torch.int32)
    )
    assert expected.abs().max() > 10  # it is a trained model
    print(
        "largest difference",
        (logits - expected).abs().max().item(),
        "largest logit",
        expected.abs().max().item(),
    )
    assert (logits - expected).abs().max() <= 1e-4
    last = int(expected[lengths[0] - 1].argmax())
    assert AutoTokenizer.from_pretrained(directory).decode([last]).strip() == "Rome"
