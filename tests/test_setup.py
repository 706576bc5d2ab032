"""Set-up on a machine without some Debian packages, with fake system programs; CI after a crash."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LIBRARIES = "".join(
    f"\tlib{name} (libc6,x86-64) => x\n" for name in ("numa.so.1", "ibverbs.so.1", "curl.so.4")
)
STANDARD = ("bash", "cat", "cut", "sed", "env", "sh", "dirname")


@pytest.fixture
def system(tmp_path):
    """Fill the folder that is the whole PATH; return `add(name, script)`, which adds a program."""
    for name in STANDARD:
        (tmp_path / name).symlink_to(shutil.which(name))

    def add(name: str, script: str) -> None:
        (tmp_path / name).write_text(f"#!{shutil.which('bash')}\n{script}\n")
        (tmp_path / name).chmod(0o755)

    add("ldconfig", f"printf '{LIBRARIES}'")
    add("id", "echo 0")
    add("python3", "exit 0")
    add("g++", "exit 0")
    add("uv", "exit 1")
    add("apt-get", f'echo "apt-get $*" >>{tmp_path}/calls')
    return add


def install(tmp_path: Path, names: str = "cpu") -> tuple[int, str, list[str]]:
    """Run `locks/system.sh`; return its exit code, its error output and its calls of apt-get."""
    done = subprocess.run(
        ["bash", "locks/system.sh", names],
        cwd=ROOT,
        env={"PATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    calls = tmp_path / "calls"
    return done.returncode, done.stderr, calls.read_text().splitlines() if calls.exists() else []


def test_a_machine_that_has_everything_installs_nothing(system, tmp_path):
    assert install(tmp_path) == (0, "", [])


@pytest.mark.parametrize("sudo", [False, True], ids=["root", "sudo"])
def test_missing_packages_are_installed_where_that_needs_no_password(system, tmp_path, sudo):
    system("ldconfig", "true")
    (tmp_path / "g++").unlink()
    if sudo:
        system("id", "echo 1000")
        system("sudo", '[ "$1" = -n ] || exit 1; shift; "$@"')
    code, error, calls = install(tmp_path)
    assert (code, error) == (0, "")
    assert calls[0].startswith("apt-get update")
    assert re.fullmatch(
        r"apt-get install -y --no-install-recommends g\+\+ libnuma1 libibverbs1 libcurl4 .*",
        calls[1],
    )


def test_without_root_the_line_to_type_comes_before_anything_else(system, tmp_path):
    system("id", "echo 1000")
    system("ldconfig", "true")
    code, error, calls = install(tmp_path)
    assert code == 1 and calls == []
    assert error == (
        "setup failed: the system lacks libnuma1 libibverbs1 libcurl4; "
        "type: sudo sh -c 'apt-get update && apt-get install -y "
        "--no-install-recommends libnuma1 libibverbs1 libcurl4'\n"
    )


def test_a_system_without_apt_get_is_told_the_names(system, tmp_path):
    system("ldconfig", "true")
    (tmp_path / "apt-get").unlink()
    code, error, _ = install(tmp_path)
    assert (
        code == 1
        and "lacks libnuma1 libibverbs1 libcurl4 (Debian's names) and has no apt-get" in error
    )


def test_a_failed_installation_ends_with_a_sentence(system, tmp_path):
    system("ldconfig", "true")
    system("apt-get", "echo no network >&2; exit 100")
    code, error, _ = install(tmp_path)
    assert code == 1 and "no network" in error and "apt-get could not install them" in error


def test_a_login_node_needs_no_compiler_and_no_library(system, tmp_path):
    system("ldconfig", "true")
    (tmp_path / "g++").unlink()
    assert install(tmp_path, "login") == (0, "", [])


PASSES, FAILS, CRASHES_LATE = (
    "def test_it(): pass",
    "def test_it(): assert False",
    # Every test passes, then the process dies by a signal, as after a crash in a destructor.
    "import atexit, os\natexit.register(os.abort)\ndef test_it(): pass",
)


@pytest.mark.parametrize(
    ("test", "passes"),
    [(PASSES, True), (FAILS, False), (CRASHES_LATE, False)],
    ids=["passes", "fails", "crashes"],
)
def test_tests_pass_only_where_pytest_ends_normally_and_no_test_failed(tmp_path, test, passes):
    for folder, text in (("tests/wire", test), ("tests/tasks", PASSES)):
        (tmp_path / folder).mkdir(parents=True)
        (tmp_path / folder / "test_it.py").write_text(text)
    script = (ROOT / "tests/all.sh").read_text()
    (tmp_path / "tests/all.sh").write_text(re.sub(r"(?m)^parts=.*$", "parts=(wire tasks)", script))
    (tmp_path / "tests/test_rest.py").write_text(PASSES)
    env = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "CI": "true"}
    env = {name: value for name, value in env.items() if name != "ALSO"}
    command = ["bash", "tests/all.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert "3 parts" in done.stdout and done.stdout.count("1 passed") >= 2, "no test ran"
    assert ("SECOND TRY" in done.stdout) == (test == FAILS)
