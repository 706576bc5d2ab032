"""Every file that names a Python version names that of `.python-version`.

The locks of a role hold what its extra in pyproject.toml asks for.
"""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]
VERSION = (ROOT / ".python-version").read_text().strip()
NAMED = re.compile(r"(?:[Pp]ython|--python-version)[ =]?(3\.\d+)")
# The Python that a Debian release installs as /usr/bin/python3.
OF_DEBIAN = {"bookworm": "3.11", "trixie": "3.13"}
# by lock: the installed extras of `orrery`
EXTRAS = {
    "cpu": ("login", "orchestrator", "trainer", "inference-cpu"),
    "cuda": ("login", "orchestrator", "trainer-gpu", "flash", "inference-gpu"),
    "login": ("login",),
    "orchestrator": ("orchestrator",),
    "trainer.cpu": ("trainer",),
    "trainer.cuda": ("trainer-gpu",),
    "inference.cpu": ("inference-cpu",),
    "inference.cuda": ("inference-gpu",),
}
RENDERS = "gojsonnet"  # roles only read manifests, so images lack gojsonnet


def versions_named(text: str) -> set[str]:
    """Python versions that a text names, also by the Debian release whose Python it takes."""
    return set(NAMED.findall(text)) | {
        version for release, version in OF_DEBIAN.items() if release in text
    }


def settings(path: str) -> dict:
    return tomllib.loads((ROOT / path).read_text())


def required() -> dict[str, str]:
    paths = ["pyproject.toml", "examples/count_vowels/pyproject.toml"]
    return {path: settings(path)["project"]["requires-python"] for path in paths}


def test_the_version_file_holds_a_minor_version_and_nothing_else():
    assert re.fullmatch(r"3\.\d+\n", (ROOT / ".python-version").read_text())


def test_every_package_allows_it():
    assert [
        path for path, versions in required().items() if VERSION not in SpecifierSet(versions)
    ] == []


def test_ruff_and_mypy_check_for_the_oldest_version_that_the_package_allows():
    allowed = SpecifierSet(required()["pyproject.toml"])
    oldest = min(
        (f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed),
        key=lambda version: int(version[2:]),
    )
    tools = settings("pyproject.toml")["tool"]
    assert tools["ruff"]["target-version"] == f"py{oldest.replace('.', '')}"
    assert tools["mypy"]["python_version"] == oldest


def test_the_locks_are_made_for_it_and_installed_under_it():
    for script in ("locks/lock.sh", "locks/install.sh"):
        text = (ROOT / script).read_text()
        assert "version=$(<.python-version)" in text, f"{script} does not read .python-version"
        assert versions_named(text) <= {VERSION}, script
    for lock in sorted((ROOT / "locks").glob("*.txt")):
        header = [line for line in lock.read_text().splitlines() if line.startswith("#")]
        assert versions_named("\n".join(header)) <= {VERSION}, lock.name
    (row,) = [
        line
        for line in (ROOT / "locks/README.md").read_text().splitlines()
        if line.startswith("| `cpu.txt`")
    ]
    assert versions_named(row) == {VERSION}


def pins(lock: str) -> dict[str, str]:
    return dict(re.findall(r"(?m)^([a-z0-9._-]+)==(\S+)", (ROOT / f"locks/{lock}.txt").read_text()))


def needed(extra: str) -> list[Requirement]:
    """Return what an extra of `orrery` and the extras that it contains ask for."""
    project = settings("pyproject.toml")["project"]
    found = [Requirement(one) for one in project["optional-dependencies"][extra]]
    own = [name for one in found if one.name == "orrery" for name in one.extras]
    return [one for one in found if one.name != "orrery"] + [
        one for name in own for one in needed(name)
    ]


@pytest.mark.parametrize("lock", EXTRAS)
def test_a_lock_holds_what_the_extras_of_its_roles_ask_for(lock):
    held = pins(lock)
    base = map(Requirement, settings("pyproject.toml")["project"]["dependencies"])
    asked = [*base, *(one for extra in EXTRAS[lock] for one in needed(extra))]
    asked = [one for one in asked if lock in {"cpu", "cuda", "login"} or one.name != RENDERS]
    assert len(asked) > 5
    missing = [one for one in asked if held.get(one.name, "0") not in one.specifier]
    assert [str(one) for one in missing] == []


# lock of an image → modules that a role imports there
IMPORTED = {
    "trainer.cpu": (
        "orrery.trainer.assemble",
        "orrery.trainer.loop",
        "orrery.trainer.sft",
        "orrery.trainer.export",
    ),
    "orchestrator": ("orrery.orchestrator.evaluate", "orrery.orchestrator.loop"),
    "inference.cpu": (
        "orrery.inference.router",
        "orrery.inference.plugin",
        "orrery.inference.server",
    ),
}
WITH_THE_LOCK_ALONE = """
import importlib.machinery, re, sys
from importlib.metadata import packages_distributions
held = set(sys.argv[1].split(","))
named = lambda name: re.sub("[-_.]+", "-", name).lower()
found = packages_distributions().items()
hidden = {one for one, of in found if one != "orrery" and not held & set(map(named, of))}
class Held:
    finders = list(sys.meta_path)
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in hidden:
            return None
        found = (finder.find_spec(name, path, target) for finder in self.finders)
        return next(filter(None, found), None)
    def find_distributions(self, context):
        return importlib.machinery.PathFinder.find_distributions(context)
sys.meta_path[:] = [Held()]
for module in sys.argv[2:]:
    importlib.import_module(module)
print(len(hidden))
"""


@pytest.mark.parametrize("lock", IMPORTED)
def test_a_role_imports_with_the_packages_of_its_images_lock_alone(lock):
    """The tests' environment has every package, so a missing one would fail on clusters only."""
    argv = [
        sys.executable,
        "-c",
        WITH_THE_LOCK_ALONE,
        ",".join(map(canonicalize_name, pins(lock))),
        *IMPORTED[lock],
    ]
    done = subprocess.run(argv, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) > 10, "nothing was hidden"


def test_trainer_and_engines_have_the_same_transformers_on_all_hardware():
    """Networks and tokenizers are read by it on both sides."""
    held = {
        lock: pins(lock).get("transformers")
        for lock in EXTRAS
        if lock not in {"login", "orchestrator"}
    }
    assert set(held.values()) == {pins("cpu")["transformers"]}, held


def test_what_the_locks_for_gpus_hold_compiled_for_one_cuda_is_for_that_of_torch():
    """Another build lacks its libcudart as it is imported."""
    for lock, packages in {
        "trainer.cuda": ("nixl-cu",),
        "inference.cuda": ("nixl-cu", "mooncake-transfer-engine-cuda"),
    }.items():
        held = pins(lock)
        cuda = held["nvidia-cuda-runtime"].split(".")[0]
        assert [package for package in packages if f"{package}{cuda}" not in held] == [], lock


def test_the_images_are_built_with_it():
    recipes = [
        path
        for path in sorted((ROOT / "containers").iterdir())
        if path.suffix in {".def", ".in", ".sh"}
    ]
    named = {recipe.name: versions_named(recipe.read_text()) for recipe in recipes}
    assert {recipe: versions for recipe, versions in named.items() if versions - {VERSION}} == {}
    assert any(named[recipe] for recipe in named if recipe.endswith(".def")), (
        "no recipe names a Python version: this test sees nothing"
    )


def test_the_readme_asks_for_it():
    assert versions_named((ROOT / "README.md").read_text()) == {VERSION}


def test_versions_are_found_in_the_forms_in_which_they_are_written():
    text = "python3.11-venv; Python 3.12 or --python-version 3.10; From: debian:trixie; "
    text += "python3 in 3.9 s"
    assert versions_named(text) == {"3.10", "3.11", "3.12", "3.13"}
