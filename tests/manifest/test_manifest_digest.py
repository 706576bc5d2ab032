"""The digest of files, as a shell computes it."""

import hashlib
import subprocess

from orrery.manifest.publish import sha256_of


def test_the_digest_of_one_file_is_its_own_and_of_several_that_of_their_lines(tmp_path):
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    for name in names:
        (tmp_path / name).write_bytes(name.encode() * 1000)
    files = [tmp_path / name for name in names]
    assert sha256_of(files[:1]) == hashlib.sha256(files[0].read_bytes()).hexdigest()
    in_a_shell = subprocess.run(
        "sha256sum model-*.safetensors | sha256sum",
        shell=True,
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert sha256_of(files) == sha256_of(files[::-1]) == in_a_shell.stdout.split()[0]


def test_another_byte_or_another_name_is_another_digest(tmp_path):
    one, two, three = (tmp_path / name for name in "abc")
    for path in (one, two, three):
        path.write_text("same")
    before = sha256_of([one, two])
    assert sha256_of([one, three]) != before
    two.write_text("Same")
    assert sha256_of([one, two]) != before
