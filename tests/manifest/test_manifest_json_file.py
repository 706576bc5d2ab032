"""Broken JSON files: each is refused with one sentence, and no reader blocks."""

import json
import os

import pytest

from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.json_file import MAX_BYTES, MAX_DEPTH, parse_json, read_as, read_object

TEXTS = [
    (b"", "not JSON"),
    (b'{"a": 1', "not JSON"),
    (b'{"a": "\xff"}', "byte 7 is not UTF-8"),
    (b"[" * 100_000, f"values nested deeper than {MAX_DEPTH}"),
    (b"[" * (MAX_DEPTH + 1) + b"]" * (MAX_DEPTH + 1), f"values nested deeper than {MAX_DEPTH}"),
    (b'{"a": NaN}', "a number that is not finite"),
    (b'{"a": 1e999}', "a number that is not finite"),
    (b'{"a": ' + b"9" * 5000 + b"}", "not JSON"),
    (b'{"a\\u0000": 1}', "a text with a NUL character"),
    (b'{"a": ["\\ud800"]}', "a text with half a surrogate pair"),
    (b"[1, 2]", "holds a list, and an object is expected"),
]


@pytest.mark.parametrize(
    "text, sentence", TEXTS, ids=[sentence[:24] + str(i) for i, (_, sentence) in enumerate(TEXTS)]
)
def test_what_is_no_object_of_json_is_one_sentence_with_the_remedy(tmp_path, text, sentence):
    path = tmp_path / "a.json"
    path.write_bytes(text)
    with pytest.raises(OrreryError, match=sentence) as error:
        read_object(path, "write it again")
    assert str(error.value).startswith(f"{path}: ") and str(error.value).endswith(
        "; write it again"
    )


def test_the_deepest_value_that_is_read_is_read():
    value = parse_json(b"[" * MAX_DEPTH + b"]" * MAX_DEPTH)
    assert json.dumps(value).count("[") == MAX_DEPTH


def test_what_is_no_regular_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "loop").symlink_to("loop")
    with open(tmp_path / "large", "wb") as file:
        file.truncate(MAX_BYTES + 1)
    sentences = {
        "pipe": "no regular file",
        "folder": "a folder",
        "loop": "symbolic links",
        "large": "bytes",
        "none": "No such file",
    }
    for name, sentence in sentences.items():
        with pytest.raises(OrreryError, match=f"{name}: cannot be read .*{sentence}"):
            load(tmp_path / name)


def test_a_value_of_another_type_is_named_by_its_field(tmp_path):
    path = tmp_path / "digests.json"
    path.write_text('{"a": {"b": 1}}')
    assert read_as(path, dict[str, dict[str, int]], "") == {"a": {"b": 1}}
    path.write_text('{"a": {"b": "1"}}')
    with pytest.raises(
        OrreryError, match=r"digests\.json: a\.b: should be a valid integer; remove it"
    ):
        read_as(path, dict[str, dict[str, int]], "remove it")
