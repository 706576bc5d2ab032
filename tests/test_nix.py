"""The flake: its lock belongs to it, every output evaluates, and its shells hold what they promise.

Nix runs with its store in a temporary folder and without a network. nix/stub stands in for nixpkgs,
so these tests do not show that the real tools build.
"""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NIX = shutil.which("nix")
needs_nix = pytest.mark.skipif(
    NIX is None,
    reason="nix is not on this machine; apt-get install -y --no-install-recommends nix-bin",
)
# The files that the flake reads; a copy of just these shows that it reads no others.
FILES = ["flake.nix", "flake.lock", ".python-version", "nix/stub/flake.nix"]
SYSTEMS = {"x86_64-linux", "aarch64-linux"}
SETTINGS = """
experimental-features = nix-command flakes
sandbox = false
build-users-group =
substitute = false
flake-registry =
download-attempts = 1
connect-timeout = 2
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory) -> dict[str, str]:
    """Return the environment of a Nix with its store in a temporary folder and an empty PATH."""
    folder = tmp_path_factory.mktemp("nix")
    places = {
        f"NIX_{name}_DIR": str(folder / name.lower()) for name in ("STORE", "STATE", "LOG", "CONF")
    }
    return {
        "PATH": str(folder / "bin"),
        "HOME": str(folder),
        "TMPDIR": str(folder),
        "NIX_CONFIG": SETTINGS,
        **places,
    }


@pytest.fixture
def flake(tmp_path) -> Path:
    """A copy of the flake that a test may change."""
    for name in FILES:
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, tmp_path / name)
    return tmp_path


def nix(state: dict[str, str], verb: str, *words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [NIX, *verb.split(), *words], env=state, capture_output=True, text=True, timeout=60
    )


def with_stub(flake: Path) -> list[str]:
    return ["--override-input", "nixpkgs", f"path:{flake}/nix/stub", "--no-write-lock-file"]


def evaluated(
    state: dict[str, str], flake: Path, output: str, function: str
) -> subprocess.CompletedProcess[str]:
    return nix(
        state, "eval", "--json", *with_stub(flake), f"path:{flake}#{output}", "--apply", function
    )


def in_shell(state: dict[str, str], flake: Path, shell: str, script: str) -> list[str]:
    """The lines that a bash script prints within a shell of the flake."""
    done = nix(
        state,
        "develop",
        *with_stub(flake),
        f"path:{flake}#{shell}",
        "-c",
        "/bin/bash",
        "-c",
        script,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def replace(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


def test_the_lock_pins_the_one_input_by_commit_and_content():
    nodes = json.loads((ROOT / "flake.lock").read_text())["nodes"]
    assert set(nodes) == {"root", "nixpkgs"}
    locked = nodes["nixpkgs"]["locked"]
    assert re.fullmatch("[0-9a-f]{40}", locked["rev"])
    assert re.fullmatch("sha256-[A-Za-z0-9+/]{43}=", locked["narHash"])


@needs_nix
def test_the_lock_belongs_to_the_flake(state, flake):
    assert nix(state, "flake metadata", "--no-update-lock-file", f"path:{flake}").returncode == 0
    replace(flake / "flake.nix", "nixos-unstable", "nixos-25.11")
    assert nix(state, "flake metadata", "--no-update-lock-file", f"path:{flake}").returncode != 0


@needs_nix
def test_every_output_evaluates_on_every_system(state, flake):
    done = evaluated(
        state,
        flake,
        "devShells",
        "builtins.mapAttrs (_: builtins.mapAttrs (_: shell: shell.drvPath))",
    )
    assert done.returncode == 0, done.stderr
    shells = json.loads(done.stdout)
    assert {system: set(of) for system, of in shells.items()} == {
        system: {"default", "light"} for system in SYSTEMS
    }

    done = evaluated(state, flake, "formatter", "builtins.mapAttrs (_: one: one.drvPath)")
    assert done.returncode == 0, done.stderr
    assert set(json.loads(done.stdout)) == SYSTEMS


@needs_nix
def test_a_misspelt_package_does_not_evaluate(state, flake):
    replace(flake / "flake.nix", "pkgs.go-jsonnet", "pkgs.go-jsonet")
    done = evaluated(
        state,
        flake,
        "devShells",
        "builtins.mapAttrs (_: builtins.mapAttrs (_: shell: shell.drvPath))",
    )
    assert done.returncode != 0 and "go-jsonet" in done.stderr


@needs_nix
@pytest.mark.parametrize("version", ["3.11", "3.12"])
def test_a_shell_holds_its_tools_and_the_python_of_the_version_file(state, flake, version):
    (flake / ".python-version").write_text(f"{version}\n")
    tools = [
        f"python{version}",
        "uv",
        "jsonnet",
        "jsonnetfmt",
        "git",
        "make",
        "apptainer",
        "srun",
        "sbatch",
    ]
    places = in_shell(
        state,
        flake,
        "default",
        f"type -P {' '.join(tools)}; printf '%s\\n' $UV_PYTHON $UV_PYTHON_DOWNLOADS",
    )
    assert [Path(place).name for place in places[:-2]] == tools
    assert all(place.startswith(state["NIX_STORE_DIR"]) for place in places[:-2])
    assert places[-2:] == [places[0], "never"]


@needs_nix
def test_the_light_shell_leaves_out_what_only_a_cluster_needs(state, flake):
    (only,) = in_shell(state, flake, "light", "type -P uv apptainer srun || true")
    assert Path(only).name == "uv"


@needs_nix
def test_slurm_commands_of_the_machine_come_before_those_of_the_shell(state, flake, tmp_path):
    own = tmp_path / "slurm"
    own.mkdir()
    (own / "srun").write_text("#!/bin/sh\n")
    (own / "srun").chmod(0o755)
    first, second = in_shell({**state, "PATH": str(own)}, flake, "default", "type -P srun sbatch")
    assert first == str(own / "srun") and second.startswith(state["NIX_STORE_DIR"])


@needs_nix
def test_wheels_find_the_system_libraries_and_the_library_path_of_the_caller_is_kept(state, flake):
    (line,) = in_shell(
        {**state, "LD_LIBRARY_PATH": "/usr/lib/site"}, flake, "default", "echo $LD_LIBRARY_PATH"
    )
    *libraries, last = line.split(":")
    assert last == "/usr/lib/site"
    assert [Path(library).parent.name.split("-", 1)[1] for library in libraries] == [
        "gcc-lib",
        "numactl",
        "zlib",
    ]
