"""Tests type the pages' commands, and the example of a site file is valid."""

import re
import tomllib
from pathlib import Path

import pytest

from orrery.launcher.site import Site

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs/cluster.md").read_text()
EXAMPLE = ROOT / "docs/site.example.toml"

# a command of docs/cluster.md → the file that types it on the simulated cluster, and what it types
TYPED = {
    "bash locks/install.sh login": ("tests/cluster/copy.sh", "bash locks/install.sh login"),
    ". .venv/bin/activate": ("tests/cluster/cluster.sh", "$CHECKOUT/.venv/bin:"),
    "cp docs/site.example.toml site.toml": ("tests/cluster/copy.sh", '>"$checkout/site.toml"'),
    "snakemake -s pipelines/images.smk --cores all cpu": (
        "tests/cluster/test.sh",
        "snakemake --snakefile pipelines/images.smk --cores all",
    ),
    "orrery doctor": ("tests/cluster/test_cluster_pipeline.py", 'cluster.run("orrery", "doctor"'),
    "orrery plan glm5_shape_smoke": (
        "tests/cluster/test_cluster_pipeline.py",
        'cluster.run("orrery", "plan"',
    ),
    "orrery plan glm5_shape_smoke --write plan": (
        "tests/launcher/test_launcher_cli.py",
        '"plan", "glm5_shape_smoke", "--write", "plan"',
    ),
    "snakemake --profile slurm -n glm5_run": (
        "tests/cluster/test_cluster_pipeline.py",
        'cluster.run(*SLURM, "-n", "glm5_run"',
    ),
    "snakemake --profile slurm reverse_text": (
        "tests/cluster/test_cluster_pipeline.py",
        'fresh("reverse_text")',
    ),
    "orrery status": ("tests/cluster/test_cluster_pipeline.py", 'run.user("orrery", "status"'),
    "orrery logs reverse_text trainer -f": (
        "tests/cluster/test_cluster_pipeline.py",
        '"orrery", "logs", "reverse_text", "trainer", "-f"',
    ),
    "orrery export reverse_text": (
        "tests/cluster/test_cluster_pipeline.py",
        'cluster.run("orrery", "export", "reverse_text"',
    ),
    "orrery stop reverse_text --checkpoint": (
        "tests/cluster/test_cluster_pipeline.py",
        '"--checkpoint"',
    ),
    "orrery stop reverse_text": (
        "tests/cluster/test_cluster_pipeline.py",
        'run.user("orrery", "stop"',
    ),
}


def commands(page: str) -> list[str]:
    blocks = re.findall(r"^```\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    return [
        line.split(" #")[0].strip()
        for block in blocks
        for line in block.splitlines()
        if line.strip()
    ]


def test_every_command_of_the_page_about_clusters_is_typed_by_a_test():
    assert sorted(commands(PAGE)) == sorted(TYPED)


@pytest.mark.parametrize("command", TYPED)
def test_the_test_that_is_named_types_it(command):
    path, words = TYPED[command]
    assert words in (ROOT / path).read_text()


def test_the_example_of_a_site_is_one():
    site = Site.model_validate(tomllib.loads(EXAMPLE.read_text()))
    assert (
        site.slurm.partition == "gpu"
        and site.containers.images == "images"
        and site.network.interface == "ib0"
    )


def test_the_example_of_a_site_names_every_key_and_its_default():
    """With its comments uncommented the example gives an equal site, so it shows true defaults."""
    shown = re.sub(r"^# (\w+ = )", r"\1", EXAMPLE.read_text(), flags=re.MULTILINE)
    raw = tomllib.loads(shown)
    raw.pop("environment")
    plain = Site.model_validate(tomllib.loads(EXAMPLE.read_text()))
    assert Site.model_validate(raw) == plain
    for table in ("slurm", "containers", "network", "roles"):
        assert set(raw[table]) == set(type(getattr(plain, table)).model_fields)


def test_the_page_on_architecture_lists_the_imports_between_rooms():
    rows = re.findall(
        r"^\| `(\w+)` \| [^|]+ \| ([\w, –]+) \|$",
        (ROOT / "docs/architecture.md").read_text(),
        flags=re.MULTILINE,
    )
    stated = {room: set(others.split(", ")) - {"–"} for room, others in rows}
    found = {}
    for folder in (ROOT / "packages/orrery").glob("*/"):
        texts = [path.read_text() for path in folder.rglob("*.py")]
        names = re.findall(r"^\s*(?:from|import) orrery\.(\w+)", "\n".join(texts), re.MULTILINE)
        found[folder.name] = set(names) - {folder.name, "manifest", "runtime"}
    found.pop("__pycache__", None)
    assert stated == found
