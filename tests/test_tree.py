"""The tree passes `make check`, and no tracked file names a machine or a registry."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BIN = Path(sys.executable).parent

# A letter of each word stands in brackets, so that this file does not match its own patterns.
FOREIGN = {
    "an absolute path of somebody's machine": re.compile(
        r"(?<![\w.}$)\]*-])/(?:hom[e]|roo[t]|User[s]|wor[k]|op[t]|mn[t])/[\w.{$<]"
    ),
    "a package registry": re.compile(
        r"\b(?:py[p]i|test\.py[p]i|pythonhoste[d]|anacond[a]|condaforg[e]|npmj[s]|devp[i]|jfro[g]|artifactor[y]|nexu[s])\.\w"
        r"|\bdownload\.pytorc[h]|\bwheels\.vll[m]|//[^\s/\"']+(?:/[^\s/\"']+)*/simpl[e]\b",
        re.IGNORECASE,
    ),
    "an address with a name and password": re.compile(r"://[^\s/\"'{}@]+:[^\s/\"'{}@]+@"),
}


def passes(*command: str) -> None:
    done = subprocess.run(
        [BIN / command[0], *command[1:]], cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def tracked() -> list[Path]:
    """Return the commit's files, or without git all files except hidden and generated files."""
    listed = (
        subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
        if (ROOT / ".git").exists()
        else None
    )
    if listed is not None and listed.returncode == 0:
        return [
            path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()
        ]
    made = {"runs", "build", "dist", "__pycache__", "node_modules"}
    return [
        path
        for path in ROOT.rglob("*")
        if path.is_file()
        and not any(part in made or part.startswith(".") for part in path.relative_to(ROOT).parts)
    ]


def foreign_words(text: str) -> list[str]:
    return [
        f"line {number}: {what}: {found.group()}"
        for number, line in enumerate(text.splitlines(), 1)
        for what, pattern in FOREIGN.items()
        if (found := pattern.search(line))
    ]


def test_ruff_finds_nothing():
    passes("ruff", "check", ".")


def test_python_is_formatted():
    passes("ruff", "format", "--check", ".")


def test_the_snakefile_is_formatted():
    passes("snakefmt", "--check", "Snakefile")


def test_types_hold():
    passes("mypy")


@pytest.mark.parametrize("path", ["Snakefile", "pipelines/images.smk"])
def test_the_imports_of_snakemakes_files_work(path):
    """The cluster's images are built by one of them, and no other test reads it."""
    lines = re.findall(r"(?m)^(?:from orrery|import ).*$", (ROOT / path).read_text())
    assert any(line.startswith("from orrery") for line in lines)
    done = subprocess.run([sys.executable, "-c", "\n".join(lines)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_rooms_import_only_what_they_may():
    passes("lint-imports")


def test_no_tracked_file_names_a_registry_or_a_folder_of_one_machine():
    files = tracked()
    assert ROOT / "README.md" in files and len(files) > 100
    found = []
    for path in files:
        data = path.read_bytes()
        if b"\0" not in data:
            found += [f"{path.relative_to(ROOT)} {one}" for one in foreign_words(data.decode())]
    assert not found, "\n".join(found)


@pytest.mark.parametrize(
    "text",
    [
        "see /{}/me/notes.md".format("home"),
        'Path("/{}/main")'.format("work"),
        "cd /{}/x".format("root"),
        "--find-links /{}/wheels".format("opt"),
        "https://{}.org/project/x".format("pypi"),
        "files.{}.org".format("pythonhosted"),
        "https://mirror.example.com/a/{}/".format("simple"),
        "https://me:{}@example.com".format("secret"),
    ],
)
def test_the_search_finds_what_it_is_for(text):
    assert foreign_words(text)


def test_the_search_leaves_ordinary_text_alone():
    for text in (
        "src/orrery/work/x",
        "{folder}/home/x",
        "http://127.0.0.1:{port}/v1",
        "a simple/plain thing",
        "https://arxiv.org/abs/2505.09388",
    ):
        assert foreign_words(text) == []
