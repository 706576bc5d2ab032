"""One real vLLM on CPU whose weights are FP8 in blocks of 128 × 128, made anew by vLLM from what
each update brings.
"""

import asyncio
from functools import partial

import numpy as np
import pytest
import torch
from direct_trainer import direct_trainer, our_logprobs
from fp8_engine import BLOCK, whole
from inference_servers import (
    DENSE,
    await_published,
    make_module,
    make_run,
    start_role,
    stop,
    with_fleet,
)

from orrery.manifest.identity import load
from orrery.models.fp8 import SentWeights
from orrery.models.weights import named_hf_tensors

pytestmark = [pytest.mark.timeout(150), pytest.mark.engine]
torch.set_num_threads(1)

PROMPT = [3, 4, 5, 6, 7, 8]
LARGEST = torch.finfo(torch.float8_e4m3fn).max
# Every tensor has whole blocks, so fused tensors have the same blocks.
MODEL = DENSE | {"hidden_size": 128, "intermediate_size": 256, "num_kv_heads": 4}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return make_run(tmp_path_factory.mktemp("fp8") / "run", MODEL, inference={"dtype": "bfloat16"})


@pytest.fixture(scope="module")
def server(run_dir):
    process = start_role("fp8_engine", run_dir, 0)
    try:
        yield await_published(run_dir, "inference", 0, process)
    finally:
        stop(process)


@torch.no_grad()
def rounded(module):
    """The same module with projections as FP8 holds them."""
    for name, weight in module.named_parameters():
        if weight.ndim == 2 and not any(word in name for word in ("embed", "lm_head")):
            rows, columns = (size // BLOCK for size in weight.shape)
            blocks = weight.view(rows, BLOCK, columns, BLOCK)
            scales = blocks.abs().amax(dim=(1, 3)) / LARGEST
            numbers = (
                (blocks * (1.0 / scales)[:, None, :, None])
                .to(torch.float8_e4m3fn)
                .view(weight.shape)
            )
            weight.copy_(whole(numbers, scales))
    return module


async def sample(fleet, request_id):
    return await fleet.generate(
        PROMPT, max_tokens=24, temperature=0.7, cache_salt=request_id, request_id=request_id, seed=5
    )


def error(module, generation):
    return np.abs(our_logprobs(module, PROMPT, generation, 0.7) - generation.logprobs).mean()


KINDS = ["files", "nccl", "files in FP8", "nccl in FP8"]


@pytest.mark.parametrize("kind", KINDS)
def test_an_update_is_rounded_as_the_first_weights_are(server, run_dir, publisher, tmp_path, kind):
    """There and back: the weights that the engine started with sample the same tokens again, to the
    last bit of their log-probs. Weights that travel in FP8 have these bits, too.
    """
    manifest, first_version = load(run_dir / "manifest.json"), 1 + 2 * KINDS.index(kind)
    wire, _, is_fp8 = kind.partition(" ")
    if is_fp8:
        model = manifest.model.model_copy(update={"fp8": ["attention", "feed_forward"]})
        manifest = manifest.model_copy(update={"model": model})

    def tensors(module):
        return SentWeights(module).encoded(named_hf_tensors(module))

    async def scenario(fleet, publish):
        found = [(None, await sample(fleet, f"{kind}-start"))]
        for version, module in enumerate(
            (make_module(manifest, seed=100), make_module(manifest, seed=7)), first_version
        ):
            published = await asyncio.to_thread(publish, version, module)
            report = await fleet.update(published)
            held = (await fleet.fingerprints())[0]
            assert {name: each.fingerprint for name, each in held.items()} == published.fingerprints
            assert sum(report.attested.values()) == len(published.fingerprints)
            found.append((module, await sample(fleet, f"{kind}-{version}")))
        return found

    if wire == "files":
        found = with_fleet(
            lambda fleet: scenario(
                fleet, lambda *what: publisher.publish(what[0], tensors(what[1]))
            ),
            [server],
        )
    else:
        with direct_trainer(tmp_path / "wire") as publish:
            play = partial(scenario, publish=publish)
            found = with_fleet(play, [server], leases=publish.leases)
    (_, start), (other, there), (same, back) = found
    assert (there.versions == first_version).all() and (back.versions == first_version + 1).all()
    # bfloat16's error remains. FP8 layers of a module round activations, these engines do not.
    for generation, module in () if is_fp8 else ((there, other), (back, same)):
        assert error(module, generation) > 1.2 * error(rounded(module), generation)
    assert back.token_ids.tolist() == start.token_ids.tolist() != there.token_ids.tolist()
    assert back.logprobs.tobytes() == start.logprobs.tobytes()
