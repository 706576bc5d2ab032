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
    """Fill the folder that is the whole PATH. Return `add(name, script)` to add a program."""
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


# locks/install.sh, with a fake driver, disk and uv


@pytest.fixture
def machine(tmp_path):
    """Return a checkout's set-up beside fakes in `bin`, and `setup(*argv)` to run `make`."""
    checkout, fakes = tmp_path / "checkout", tmp_path / "bin"
    shutil.copytree(ROOT / "locks", checkout / "locks")
    fakes.mkdir()
    for name in ("Makefile", ".python-version", "pyproject.toml"):
        shutil.copy(ROOT / name, checkout)
    script = checkout / "locks/install.sh"
    text = script.read_text()
    for path in ("/proc/driver/nvidia/version", "/dev/nvidiactl"):
        assert path in text
        text = text.replace(path, str(tmp_path / Path(path).name))
    script.write_text(text)
    (checkout / "locks/system.sh").write_text("exit 0\n")
    pinned = re.search(r"^uv==(\S+)", (ROOT / "locks/uv.txt").read_text(), re.MULTILINE)
    assert pinned is not None

    def add(name: str, text: str) -> None:
        (fakes / name).write_text(f"#!{shutil.which('bash')}\n{text}\n")
        (fakes / name).chmod(0o755)

    def setup(*argv: str) -> tuple[int, str]:
        env = {"PATH": f"{fakes}:/usr/bin:/bin", "HOME": str(tmp_path)}
        command = ["make", "setup", *argv]
        done = subprocess.run(command, cwd=checkout, env=env, capture_output=True, text=True)
        said = re.sub(r"\033\[\dm", "", done.stdout + done.stderr).replace("\033[0m", "")
        return done.returncode, said

    python = f"#!{shutil.which('bash')}\necho {(ROOT / '.python-version').read_text().strip()}"
    add(
        "uv",
        f"""case "$1 $2" in
            --version*) echo "uv {pinned[1]}" ;;
            "venv "*) rm -rf .venv; mkdir -p .venv/bin
                printf '{python}\n' >.venv/bin/python; chmod +x .venv/bin/python ;;
            "pip install") [[ $* != *--require-hashes* ]] || echo "uv took ${{@: -1}}" ;;
            "cache dir") echo . ;;
        esac""",
    )
    add("df", "printf 'x\\nx 1 1 99000000 1 /\\n'")
    add("nvidia-smi", "echo NVIDIA-SMI has failed; exit 9")
    return checkout, add, setup


def driver(version: str) -> str:
    """Return a script of an nvidia-smi with two GPUs."""
    return f'[[ $1 == --query-gpu=driver_version ]] && printf "{version}\\n{version}\\n"'


def test_set_up_takes_the_lock_of_the_driver_that_it_finds(machine):
    checkout, add, setup = machine
    code, said = setup()
    assert code == 0 and "uv took locks/cpu.txt" in said
    assert "hardware cpu: no NVIDIA driver answers" in said and "HARDWARE=cuda" in said
    assert (checkout / ".venv/hardware").read_text() == "cpu\n"
    shutil.rmtree(checkout / ".venv")
    add("nvidia-smi", driver("580.65.06"))
    code, said = setup()
    assert code == 0 and "uv took locks/cuda.txt" in said
    assert "hardware cuda: NVIDIA driver 580.65.06" in said and "HARDWARE=cpu" in said
    assert (checkout / ".venv/hardware").read_text() == "cuda\n"


def test_a_container_with_devices_and_no_nvidia_smi_has_a_driver(machine, tmp_path):
    _, _, setup = machine
    (tmp_path / "version").write_text(
        "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  581.15.02  Release Build\n"
        "GCC version:  gcc version 12.2.0 (Debian 12.2.0-14)\n"
    )
    assert "hardware cpu: no NVIDIA driver answers" in setup()[1]  # the host's, and no device
    (tmp_path / "nvidiactl").touch()
    assert "hardware cuda: asked for" in setup("HARDWARE=cuda")[1]
    shutil.rmtree(machine[0] / ".venv")
    assert "hardware cuda: NVIDIA driver 581.15.02" in setup()[1]


def test_hardware_that_is_typed_wins_and_replaces_the_environment_of_the_other(machine):
    checkout, add, setup = machine
    assert setup()[0] == 0
    (checkout / ".venv/of_cpu").touch()
    code, said = setup("HARDWARE=cuda")
    assert code == 0 and "that of cpu is replaced" in said and "uv took locks/cuda.txt" in said
    assert "no NVIDIA driver answers here; everything installs" in said
    assert not (checkout / ".venv/of_cpu").exists()
    assert "uv took" not in setup("HARDWARE=cuda")[1] + setup()[1]  # all done
    (checkout / "locks/cuda.txt").touch()
    assert "hardware cuda: .venv is for cuda already" in setup()[1]
    add("nvidia-smi", driver("590.1.2"))
    assert "hardware cpu: asked for" in setup("HARDWARE=cpu")[1]


@pytest.mark.parametrize(("hardware", "version"), [("cuda", "3.12"), ("cpu", "3.11")])
def test_python_3_12_serves_the_cuda_lock_where_3_11_does_not_run(machine, hardware, version):
    _, add, setup = machine
    add("python3.11", "exit 127")  # as a shim of pyenv
    add("python3.12", "exit 0")
    assert f"Python {version} in .venv" in setup(f"HARDWARE={hardware}")[1]


REFUSALS = {
    "old": (
        driver("535.104.05"),
        "99000000",
        "",
        "the NVIDIA driver is 535.104.05, and CUDA 13 needs 580.65.06 or newer; install one "
        "and type again: make setup, or without GPUs: make setup HARDWARE=cpu",
    ),
    "older of the same branch": (driver("580.9.1"), "99000000", "", "driver is 580.9.1, and"),
    "full": (
        driver("580.65.06"),
        "9000000",
        "",
        "9000 MB are free here; the environment needs about 11000 MB",
    ),
}


@pytest.mark.parametrize("case", REFUSALS)
def test_set_up_refuses_in_one_sentence_and_leaves_nothing(machine, case):
    checkout, add, setup = machine
    nvidia_smi, free_kib, hardware, sentence = REFUSALS[case]
    add("nvidia-smi", nvidia_smi)
    add("df", f"printf 'x\\nx 1 1 {free_kib} 1 /\\n'")
    code, said = setup(*([f"HARDWARE={hardware}"] if hardware else []))
    (refusal,) = [line for line in said.splitlines() if line.startswith("setup failed: ")]
    assert code != 0 and sentence in refusal and "uv took" not in said
    assert not (checkout / ".venv").exists()


def test_make_refuses_an_unknown_kind_of_hardware(machine):
    checkout, _add, setup = machine
    code, said = setup("HARDWARE=rocm")
    assert code != 0 and "HARDWARE=rocm: choose cpu or cuda, or leave it out" in said
    assert "uv took" not in said
    assert not (checkout / ".venv").exists()


def test_a_failed_download_ends_with_the_free_space_and_is_repeated(machine):
    checkout, add, setup = machine
    uv = (checkout.parent / "bin/uv").read_text()
    add("uv", uv.replace('echo "uv took', 'echo "No space left on device" >&2; exit 2; echo "'))
    code, said = setup()
    assert code != 0 and "No space left" in said and "99000000" in said
    assert "setup failed: see uv's message above, and the free space" in said
    add("uv", uv.partition("\n")[2])
    assert "uv took locks/cpu.txt" in setup()[1]


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
    (tmp_path / "tests/all.sh").write_text(
        re.sub(r"(?m)^parts=.*$", "parts=(wire tasks rest)", script)
    )
    (tmp_path / "tests/test_rest.py").write_text(PASSES)
    env = {**os.environ, "PATH": f"{ROOT}/.venv/bin:{os.environ['PATH']}", "CI": "true"}
    env = {name: value for name, value in env.items() if name != "ALSO"}
    command = ["bash", "tests/all.sh"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert "3 parts" in done.stdout and done.stdout.count("1 passed") >= 2, "no test ran"
    assert ("SECOND TRY" in done.stdout) == (test == FAILS)
