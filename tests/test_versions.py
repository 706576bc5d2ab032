"""`.python-version` is where the Python version is written; whatever names a version elsewhere names the same.

The locks pin what was resolved for it, the images bring it as /usr/bin/python3, and the flake's shells hold it (tests/test_nix.py).
"""

import re
import tomllib
from pathlib import Path

from packaging.specifiers import SpecifierSet

ROOT = Path(__file__).parents[1]
VERSION = (ROOT / ".python-version").read_text().strip()
NAMED = re.compile(r"(?:[Pp]ython|--python-version)[ =]?(3\.\d+)")
# The Python that a Debian release installs as /usr/bin/python3.
OF_DEBIAN = {"bookworm": "3.11", "trixie": "3.13"}


def versions_named(text: str) -> set[str]:
    """Python versions that a text names, also by the Debian release whose Python it takes."""
    return set(NAMED.findall(text)) | {version for release, version in OF_DEBIAN.items() if release in text}


def settings(path: str) -> dict:
    return tomllib.loads((ROOT / path).read_text())


def required_by_packages() -> dict[str, str]:
    found = sorted((ROOT / "packages").rglob("pyproject.toml"))
    assert found
    return {str(path.relative_to(ROOT)): tomllib.loads(path.read_text())["project"]["requires-python"] for path in found}


def test_the_version_file_holds_a_minor_version_and_nothing_else():
    assert re.fullmatch(r"3\.\d+\n", (ROOT / ".python-version").read_text())


def test_every_package_allows_it_and_the_rooms_allow_the_same():
    required = required_by_packages()
    assert [path for path, versions in required.items() if VERSION not in SpecifierSet(versions)] == []
    rooms = {versions for path, versions in required.items() if path.count("/") == 2}
    assert len(rooms) == 1, required


def test_ruff_and_mypy_check_for_the_oldest_version_that_the_rooms_allow():
    allowed = SpecifierSet(required_by_packages()["packages/manifest/pyproject.toml"])
    oldest = min((f"3.{minor}" for minor in range(30) if f"3.{minor}" in allowed), key=lambda version: int(version[2:]))
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
    (row,) = [line for line in (ROOT / "locks/README.md").read_text().splitlines() if line.startswith("| `cpu.txt`")]
    assert versions_named(row) == {VERSION}


def test_the_images_are_built_with_it():
    recipes = [path for path in sorted((ROOT / "containers").iterdir()) if path.suffix in {".def", ".in", ".sh"}]
    named = {recipe.name: versions_named(recipe.read_text()) for recipe in recipes}
    assert {recipe: versions for recipe, versions in named.items() if versions - {VERSION}} == {}
    assert any(named[recipe] for recipe in named if recipe.endswith(".def")), "no recipe names a Python version: this test sees nothing"


def test_the_readme_asks_for_it():
    assert versions_named((ROOT / "README.md").read_text()) == {VERSION}


def test_versions_are_found_in_the_forms_in_which_they_are_written():
    text = "python3.11-venv; Python 3.12 or --python-version 3.10; From: debian:trixie; python3 in 3.9 s"
    assert versions_named(text) == {"3.10", "3.11", "3.12", "3.13"}
