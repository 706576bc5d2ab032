"""What `orrery serve` serves, and its sentences for every mistake. The server is tested in
`tests/inference`.
"""

import json
import shlex
import socket
from pathlib import Path
from types import SimpleNamespace

import pytest

from orrery.launcher import bench, process, serve
from orrery.manifest.errors import OrreryError

RUN, SITE = SimpleNamespace(path="runs/it"), SimpleNamespace(slurm=None)


def make_folder(path, config=True, weights=True):
    path.mkdir(parents=True)
    if config:
        (path / "config.json").write_text('{"architectures": ["Qwen3ForCausalLM"]}')
    if weights:
        (path / "model.safetensors").write_bytes(b"")
    return path


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A run without weights. `find` returns it for any word."""
    run = SimpleNamespace(path=tmp_path / "one-0123456789ab")
    run.path.mkdir()
    monkeypatch.setattr(serve, "find", lambda *_: run)
    monkeypatch.setattr(serve, "resume_command", lambda *_: "make demo")
    return run


def test_a_run_serves_its_result_else_the_newest_exported_step(run):
    with pytest.raises(OrreryError, match="not written weights yet; type `make demo` to train it"):
        serve.folder_of("one", None)
    checkpoint = run.path / "checkpoints" / "step_3.attempt_1"
    checkpoint.mkdir(parents=True)
    (checkpoint / "COMPLETE").touch()
    with pytest.raises(OrreryError, match="not written weights yet; type `orrery export one`"):
        serve.folder_of("one", None)
    assert "`orrery export one`" in serve.summary_line("one", run)
    for name in ("step_9", "step_10", "step_11.partial", "sft"):
        make_folder(run.path / "weights" / name)
    assert serve.folder_of("one", None) == run.path / "weights" / "step_10"
    result = make_folder(run.path / "weights" / "rl")
    assert serve.folder_of("one", None) == result
    assert (
        serve.summary_line("one", run)
        == f"weights: {result}; type `orrery serve one` to serve them"
    )


def test_a_folder_is_served_wherever_it_is(tmp_path, monkeypatch):
    made = make_folder(tmp_path / "elsewhere")
    assert serve.check_folder(serve.folder_of(str(made), None)) == made
    monkeypatch.chdir(tmp_path)
    assert serve.folder_of("elsewhere", None) == made
    with pytest.raises(OrreryError, match=r"^a/b: no such folder. Name a run"):
        serve.folder_of("a/b", None)


@pytest.mark.parametrize(
    ("parts", "config", "sentence"),
    [
        ({"config": False}, None, "has no config.json, so it is no Hugging Face folder"),
        ({"weights": False}, None, "has no safetensors file, hence no weights"),
        ({}, {"peft_type": "LORA"}, "no architectures"),
        ({}, [], "config.json"),
    ],
)
def test_what_is_no_model_is_refused_before_vllm_is_loaded(tmp_path, parts, config, sentence):
    folder = make_folder(tmp_path / "model", **parts)
    if config is not None:
        (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(OrreryError, match=sentence):
        serve.check_folder(folder)


def test_a_port_in_use_names_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(OrreryError, match=rf"^--port {port}: .*in use.*Type `--port \d+`"):
            serve.check_port(port)
    serve.check_port(port)


def test_the_token_is_new_at_each_start_or_that_of_a_file(tmp_path, monkeypatch):
    monkeypatch.delenv("ORRERY_TOKEN_FILE", raising=False)
    first, second = serve._token(), serve._token()
    assert first != second and first[0] == first[1] and len(first[1]) == 32
    file = tmp_path / "token"
    for content, at_most in (("", 1), ("kept\n", 2)):
        file.write_text(content)
        monkeypatch.setenv("ORRERY_TOKEN_FILE", str(file))
        if at_most == 1:
            with pytest.raises(OrreryError, match=f"{file} is empty. Write a token into it"):
                serve._token()
        else:
            assert serve._token() == (f"$(cat {file})", "kept")


@pytest.mark.parametrize("template", [True, False])
def test_the_curl_command_asks_for_a_chat_if_the_model_has_a_template(tmp_path, template):
    folder = make_folder(tmp_path / "model")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x" * template}))
    lines = serve._how_to_ask("http://127.0.0.1:1", folder, "secret")
    assert ("/v1/chat/completions" in lines) == template
    body = json.loads(shlex.split(lines)[-1])
    assert body["model"] == "model" and ("messages" in body) == template


@pytest.mark.parametrize(
    ("row", "asked"),
    [
        (
            '[{"role": "system", "content": "s"}, {"role": "user", "content": "it\'s"}, ANSWER]',
            "it's",
        ),
        ('[{"role": "user", "content": "LONG"}, ANSWER]', "hello"),
        ("[ANSWER]", "hello"),
        ("broken", "hello"),
    ],
)
def test_the_curl_command_asks_a_held_out_problem_of_the_run(tmp_path, row, asked):
    folder = make_folder(tmp_path / "run" / "weights" / "rl")
    (folder / "chat_template.jinja").touch()
    rollouts = tmp_path / "run" / "rollouts"
    rollouts.mkdir()
    answer = '{"role": "assistant", "content": "a"}'
    row = row.replace("ANSWER", answer).replace("LONG", "x" * 9999)
    (rollouts / "evaluate.jsonl").write_text(f'{{"messages": {row}}}\n')
    body = json.loads(shlex.split(serve._how_to_ask("http://h:1", folder, "t"))[-1])
    assert body["messages"][-1] == {"role": "user", "content": asked}
    assert len(body["messages"]) == (2 if asked == "it's" else 1)


def test_a_folder_below_the_root_has_no_run():
    assert serve._example(Path("/model")) == [{"role": "user", "content": "hello"}]


@pytest.mark.parametrize(
    ("word", "call"),
    [
        ("bench trainer", lambda: bench.trainer(["reverse_text"])),
        ("bench rates", lambda: bench.rates([])),
        ("export", lambda: serve.write_export(RUN, "rl", None, None, None, SITE)),
    ],
)
def test_a_command_names_a_missing_torch_and_starts_nothing(word, call, monkeypatch):
    monkeypatch.setattr(process, "find_spec", lambda name: None)
    monkeypatch.setattr(process.subprocess, "run", lambda *_: pytest.fail("started"))
    with pytest.raises(OrreryError) as told:
        call()
    assert str(told.value) == (
        f"{word}: this Python lacks torch. Type `make setup`, or run this command with a Python "
        "that has them"
    )
