"""Plain text as SFT data: every token once, by shard."""

import json
from itertools import islice
from pathlib import Path

import pytest
from replaced import replaced

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.publish import sha256, sha256_of_data
from orrery.manifest.schema import Manifest, TextData
from orrery.manifest.shards import DATA_SUMS, SUMS, write_data_sums
from orrery.tasks.chat import Renderer, write_tokenizer
from orrery.trainer.sft_data import Texts, load_examples, open_examples, text_order

MANIFEST = load(Path(__file__).parents[2] / "manifests/elastic_text.json")
TEXTS = ["one", "a longer text", "", "the fourth", "x" * 40]


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> Path:
    write_tokenizer(MANIFEST.model, folder := tmp_path_factory.mktemp("tokenizer"))
    return folder


def data(folder: Path, rows: list[dict], **changes) -> TextData:
    path = folder / "text.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = {"path": str(path), "sha256": sha256_of_data(path), "num_shards": 2}
    return MANIFEST.sft.data.model_copy(update=found | changes)


def opened(folder: Path, tokenizer: Path, max_tokens: int = 16) -> Texts:
    rows = [{"text": text} for text in TEXTS]
    return Texts(data(folder, rows), "stages.sft.data", Renderer(tokenizer), max_tokens)


def test_every_token_and_the_end_of_every_document_is_trained_once(tmp_path, tokenizer):
    renderer = Renderer(tokenizer)
    end = renderer.stop_token_ids[0]
    for text, index in zip(TEXTS, range(5), strict=True):
        columns = opened(tmp_path, tokenizer).columns([index])
        trained = columns.token["token_id"][columns.token["trained"]]
        assert trained.tolist() == [*renderer.encode(text), end]
        assert columns.lengths.max() <= 16
        assert not columns.token["trained"][columns.offsets[:-1]].any()


def test_parts_of_a_long_document_overlap_by_one_token_of_context(tmp_path, tokenizer):
    columns = opened(tmp_path, tokenizer).columns([1, 4])
    assert columns.lengths.tolist() == [15, 16, 16, 12]
    ids, offsets = columns.token["token_id"], columns.offsets
    assert ids[offsets[2] - 1] == ids[offsets[2]]


def test_shards_hold_every_document_once_in_another_order_each_epoch(tmp_path, tokenizer):
    texts = opened(tmp_path, tokenizer)
    assert sorted([*texts.documents(0), *texts.documents(1)]) == list(range(5))
    order = list(islice(text_order(range(100), 1, 0, 0), 200))
    assert sorted(order[:100]) == sorted(order[100:]) == list(range(100))
    assert order[:100] != order[100:] and order[:100] != list(range(100))
    assert list(islice(text_order(range(100), 1, 0, 130), 20)) == order[130:150]
    assert list(islice(text_order(range(100), 1, 1, 0), 100)) != order[:100]


def test_a_malformed_row_or_changed_file_gives_one_sentence(tmp_path, tokenizer):
    field = "stages.sft.data"
    odd = data(tmp_path, [{"text": "fine"}, {"words": "no"}])
    with pytest.raises(OrreryError, match=r"column: .*text.jsonl:2 has no text in 'text'; choose"):
        open_examples(MANIFEST, odd, field, tokenizer).check(range(2))
    strange = data(tmp_path, [{"text": "naïve"}])
    with pytest.raises(OrreryError, match=r"text.jsonl:1: model.tokenizer.alphabet has no 'ï'"):
        open_examples(MANIFEST, strange, field, tokenizer).check(range(1))
    with pytest.raises(OrreryError, match=r"sft.data.sha256: .*text.jsonl has"):
        open_examples(MANIFEST, odd.model_copy(update={"sha256": "0" * 64}), field, tokenizer)
    few = data(tmp_path, [{"text": "one"}], num_shards=2)
    with pytest.raises(OrreryError, match=r"num_shards 2: shard 1 has no document; set it to at"):
        open_examples(MANIFEST, few, field, tokenizer).documents(1)


def test_documents_can_be_compared_with_validation_data(tmp_path, tokenizer):
    chats = opened(tmp_path, tokenizer).chats
    assert len(chats) == 5 and chats[3].messages[0].content == "the fourth"
    assert chats[3].where.endswith("text.jsonl:4")


FILES = ["train-0.jsonl", "train-1.jsonl", "train-2.jsonl", "test.jsonl"]


@pytest.fixture
def folder(tmp_path) -> Path:
    """A fetched dataset of four files with two documents each."""
    (made := tmp_path / "words").mkdir()
    for number, name in enumerate(FILES):
        rows = [{"text": letter * 5} for letter in "abcdefgh"[2 * number : 2 * number + 2]]
        (made / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_data_sums(made, {name: sha256(made / name) for name in FILES})
    (made / SUMS).write_text("# dataset owner/words at 0123\n")
    return made


def by_file(folder: Path, **changes) -> TextData:
    found = {"path": str(folder), "split": "train", "sha256": sha256_of_data(folder)}
    fields = {"num_shards": 2, "shard_by": "file"}
    return MANIFEST.sft.data.model_copy(update=found | fields | changes)


def with_data(data: TextData) -> Manifest:
    return replaced(MANIFEST, "stages.sft", data=data)


def texts_of(spec: Manifest, tokenizer: Path, shard: int | None) -> list[str]:
    found = load_examples(spec, tokenizer)
    return [found.text(index) for index in found.documents(shard)]


def test_a_site_with_the_files_of_its_shard_trains_the_documents_of_a_whole_folder(
    folder, tokenizer
):
    spec = with_data(by_file(folder))
    whole = [texts_of(spec, tokenizer, shard) for shard in (0, 1)]
    assert whole == [[each * 5 for each in "abef"], [each * 5 for each in "cd"]]
    (folder / "train-0.jsonl").unlink()
    assert texts_of(spec, tokenizer, 1) == whole[1]
    command = r"Type `orrery fetch dataset owner/words@0123 --shard 0/2`, or `orrery join` with"
    with pytest.raises(OrreryError, match=rf"lacks train-0.jsonl of shard 0 of 2. {command}"):
        texts_of(spec, tokenizer, 0)


def test_a_wrong_file_or_list_of_a_shard_gives_one_sentence(folder, tokenizer):
    spec = with_data(by_file(folder))
    sums = (folder / DATA_SUMS).read_text()
    (folder / DATA_SUMS).write_text(sums.replace("train-2", "train-9"))
    with pytest.raises(OrreryError, match=r"sft.data.path: .*train-2.jsonl has another sha256"):
        load_examples(spec, tokenizer)
    (folder / "train-2.jsonl").unlink()
    with pytest.raises(OrreryError, match=r"sft.data.sha256: .*words has .*, the manifest says"):
        load_examples(spec, tokenizer)
    (folder / DATA_SUMS).write_text(sums)
    (folder / "train-1.jsonl").write_text("{}\n")
    command = r"type `orrery fetch dataset owner/words@0123 --shard 1/2`"
    with pytest.raises(OrreryError, match=rf"train-1.jsonl has another sha256 .* and {command}"):
        load_examples(spec, tokenizer)


def test_the_whole_data_is_needed_where_documents_are_not_divided_by_file(folder, tokenizer):
    spec, plain = with_data(by_file(folder)), with_data(by_file(folder, shard_by=None))
    alone = replaced(spec, "trainer", elastic=None)
    assert len(load_examples(alone, tokenizer)) == len(load_examples(plain, tokenizer)) == 6
    (folder / "train-2.jsonl").unlink()
    for each in (alone, plain):
        with pytest.raises(OrreryError, match=r"Type `orrery fetch dataset owner/words@0123`$"):
            load_examples(each, tokenizer)
    assert len(load_examples(spec, tokenizer)) == 4


def test_shards_by_file_need_files(folder, tokenizer):
    many = with_data(by_file(folder, num_shards=4))
    with pytest.raises(OrreryError, match="num_shards 4: shard 3 has no document; set it to at mo"):
        texts_of(many, tokenizer, 3)
    one = folder / "train-0.jsonl"
    alone = with_data(by_file(folder, path=str(one), sha256=sha256(one), split=None))
    with pytest.raises(OrreryError, match=r'sft.data.shard_by "file": needs a folder of `orrery'):
        load_examples(alone, tokenizer)
    with pytest.raises(OrreryError, match=r"has no 'dev'. Choose from test, train"):
        load_examples(with_data(by_file(folder, split="dev")), tokenizer)
