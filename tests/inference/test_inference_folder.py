"""`orrery serve` and the folder that a run exports: vLLM and transformers compute the same."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from pathlib import Path

import psutil
import pytest
import torch
from inference_servers import DENSE, MIXTURE, REPOSITORY, family, free_port, make_module, make_run
from listeners import listening, undeclared

from orrery.inference.__main__ import MAX_ERROR_CHARACTERS, first_sentence
from orrery.manifest.identity import load
from orrery.tasks.chat import write_tokenizer
from orrery.trainer.export import export_policy
from orrery.trainer.parallel.world import World
from orrery.trainer.policy import Policy

PROMPT = list(range(9, 49))
TOLERANCE = 1e-4  # of float32 log-probs, as for the engines


def export(run_dir, model):
    """Write `weights/rl` as the end of the rl stage does."""
    make_run(run_dir, model | {"vocab_size": 104})  # of the character tokenizer
    spec = load(run_dir / "manifest.json")
    write_tokenizer(spec.model, run_dir / "weights" / "init")
    policy = Policy(make_module(spec, seed=11), 64)
    world = World(0, 1, torch.device("cpu"), None)
    export_policy(
        policy, world, spec.model, run_dir / "weights" / "init", run_dir / "weights" / "rl"
    )
    return run_dir / "weights" / "rl"


@pytest.fixture
def scratch():
    """A short TMPDIR: a socket's path has at most 107 characters."""
    with tempfile.TemporaryDirectory() as path:
        yield Path(path)


def serve(*words, **env):
    return subprocess.Popen(
        [sys.executable, "-m", "orrery.launcher.cli", "serve", *map(str, words)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=REPOSITORY,
        env=os.environ | env,
        # As in a terminal: a background job of a script begins with SIGINT ignored.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def ask(url, token, body):
    request = urllib.request.Request(url, json.dumps(body).encode())
    request.add_header("Content-Type", "application/json")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    with urllib.request.urlopen(request, timeout=30) as answer:
        return json.load(answer)


def logprobs_of_transformers(path):
    import transformers

    network, info = transformers.AutoModelForCausalLM.from_pretrained(
        path, output_loading_info=True
    )
    assert not any(info.values()) and network.dtype == torch.float32
    with torch.no_grad():
        every = torch.log_softmax(network(torch.tensor([PROMPT])).logits[0], -1)
    return every[:-1].gather(1, torch.tensor(PROMPT)[1:, None])[:, 0]


@pytest.mark.engine
@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("model", [DENSE, MIXTURE], ids=["dense", "mixture"])
def test_a_served_folder_has_the_logprobs_of_transformers_and_ends_with_its_children(
    tmp_path, scratch, model
):
    weights = export(tmp_path / "run", model)
    expected = logprobs_of_transformers(weights)
    file, port = tmp_path / "token", free_port()
    file.write_text("the-token\n")
    with serve(weights, "--port", port, ORRERY_TOKEN_FILE=str(file), TMPDIR=str(scratch)) as one:
        lines = [one.stdout.readline() for _ in range(5)]
        if not lines[0]:
            pytest.fail(one.stderr.read())
        assert lines[0] == f"serving {weights} at http://127.0.0.1:{port}/v1 (Ctrl-C stops)\n"
        shell = subprocess.run(["bash", "-c", "".join(lines[2:])], capture_output=True, check=True)
        assert json.loads(shell.stdout)["choices"][0]["finish_reason"] in ("stop", "length")
        url = f"http://127.0.0.1:{port}/v1/completions"
        body = {"model": "rl", "prompt": PROMPT, "max_tokens": 1, "prompt_logprobs": 0}
        [choice] = ask(url, "the-token", body)["choices"]
        rows = zip(PROMPT[1:], choice["prompt_logprobs"][1:], strict=True)
        found = torch.tensor([row[str(token)]["logprob"] for token, row in rows])
        assert expected.std() > 0.1
        assert (found - expected).abs().max() <= TOLERANCE
        for path in ("v1/models", "tokenize", "collective_rpc"):
            for token in ("", "another"):
                with pytest.raises(urllib.error.HTTPError, match="401"):
                    ask(f"http://127.0.0.1:{port}/{path}", token, {})
        [server] = psutil.Process(one.pid).children()
        assert undeclared(listening({server.pid: "serve"}), "127.0.0.1") == []
        members = family(one)
        assert len(members) == 3  # the command, the server and its engine core
        one.send_signal(signal.SIGINT)
        assert one.wait(20) == 0
        assert not [member for member in members if member.is_running()]
        assert one.stderr.read().endswith("stopped\n")
    assert not list(scratch.iterdir())


@pytest.mark.engine
@pytest.mark.slow
def test_a_folder_that_vllm_cannot_serve_is_one_sentence(tmp_path, scratch):
    weights = export(tmp_path / "run", DENSE)
    config = json.loads((weights / "config.json").read_text())
    config |= {"architectures": ["NoSuchModel"], "model_type": "no_such_model"}
    (weights / "config.json").write_text(json.dumps(config))
    with serve(weights, "--port", free_port(), TMPDIR=str(scratch)) as one:
        assert one.wait(60) == 1
        last = one.stderr.read().splitlines()[-1]
    assert last.startswith(f"error: {weights}: vLLM cannot serve this folder: ")
    assert "no_such_model" in last and len(last) < 900


def test_the_first_sentence_of_vllms_errors_is_told():
    text = "1 validation error for ModelConfig\n  Value error, Model architectures ['X'] are not "
    text += "supported [type=value_error, input_value=1]\n    For further information visit"
    assert first_sentence(ValueError(text)) == "Model architectures ['X'] are not supported"
    assert first_sentence(ValueError("\nfirst\nsecond")) == "first"
    assert len(first_sentence(OSError("x" * 9999))) == MAX_ERROR_CHARACTERS
    assert first_sentence(KeyError()) == "KeyError"
