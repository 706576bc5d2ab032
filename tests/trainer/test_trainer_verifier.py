"""The verifier recomputes log-probs of a published version, with entropies and variances."""

import subprocess
import sys

import numpy as np
import torch
from trainer_cases import make_learner, manifest, write_start_weights

from orrery.manifest.identity import canonical_json
from orrery.models.weights import named_hf_tensors
from orrery.wire.recompute import MODULE, Recompute, Recomputed, frame, read_frame
from orrery.wire.weight_wire import WeightPublisher


def test_the_verifier_agrees_with_the_trainer_and_says_that_a_version_is_gone(tmp_path):
    spec = manifest()
    learner = make_learner(spec, write_start_weights(spec, tmp_path / "start"))
    network = learner.policy.network
    wire = WeightPublisher(tmp_path / "versions")
    folder = wire.publish(0, named_hf_tensors(network)).path
    tokens = np.random.default_rng(0).integers(0, spec.model.vocab_size, 90).astype(np.int32)
    asked = Recompute(folder, tokens[:5].tobytes(), tokens[5:].tobytes(), 0.7)
    path = tmp_path / "manifest.json"
    path.write_bytes(canonical_json(spec))
    frames = frame(asked) + frame(Recompute(f"{folder}9", *(asked.prompt, asked.token_ids, 1.0)))
    command = [sys.executable, "-m", MODULE, str(path)]
    done = subprocess.run(command, input=frames, capture_output=True, timeout=60, check=True)
    answers = tmp_path / "answers"
    answers.write_bytes(done.stdout)
    with answers.open("rb") as stream:
        found, gone = read_frame(stream, Recomputed), read_frame(stream, Recomputed)
        assert read_frame(stream, Recomputed) is None
    logprob, entropy, variance = found.arrays()
    with torch.no_grad():
        ends = torch.tensor([0, 90], dtype=torch.int32)
        whole = torch.from_numpy(tokens.astype(np.int64))
        hidden = network(whole, torch.arange(90), ends)[4:-1]
        heat = torch.full((85,), 0.7)
        expected = network.log_probs(hidden, whole[5:], heat, 64)
        logits = network.logits(whole, torch.arange(90), ends)[4:-1] / 0.7
    np.testing.assert_allclose(logprob, expected[0], rtol=0, atol=1e-5)  # float32 rounding
    np.testing.assert_allclose(entropy, expected[1], rtol=0, atol=1e-5)
    p = logits.double().softmax(1)
    spread = (p * p.log().square()).sum(1) - (p * p.log()).sum(1).square()
    np.testing.assert_allclose(variance, spread, rtol=1e-4, atol=1e-6)
    assert gone == Recomputed()
