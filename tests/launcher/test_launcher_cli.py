"""The command line: its output, and the command to type next."""

import itertools
import json
import logging
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path
from types import SimpleNamespace

import pytest

from orrery.launcher import bench, cli, containers, describe, runs, serve, supervisor
from orrery.launcher.doctor import examine
from orrery.launcher.pipeline import checked_in
from orrery.launcher.runs import RoleStatus, Status, find, place_site
from orrery.launcher.site import Site, load_site
from orrery.launcher.supervisor import job
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import Workspace, find_workspace, id12, load
from orrery.runtime.health import HealthFile
from orrery.runtime.metrics import MetricsFile
from orrery.runtime.run_directory import done_path
from workspace import linked

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
HOST = socket.gethostname()
pytestmark = pytest.mark.timeout(60)


def orrery(capsys, *words: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of `orrery words…`, run here."""
    argv, sys.argv = sys.argv, ["orrery", *words]
    try:
        with pytest.raises(SystemExit) as leave:
            cli.main()
    finally:
        sys.argv = argv
    out, err = capsys.readouterr()
    return leave.value.code or 0, out, err


def test_all_commands_are_there(capsys):
    _, out, _ = orrery(capsys, "--help")
    commands = [
        "render",
        "check",
        "show",
        "diff",
        "explain",
        "hardware",
        "plan",
        "adopt",
        "run",
        "status",
        "logs",
        "stop",
        "report",
        "export",
        "bench",
        "fetch",
        "doctor",
    ]
    for command in commands:
        assert f" {command} " in out


def test_the_version_comes_with_its_commit(capsys, monkeypatch):
    monkeypatch.setenv("ORRERY_COMMIT", "0123abc")
    assert orrery(capsys, "--version")[:2] == (0, "orrery 0.1.0, commit 0123abc\n")


def test_a_job_makes_the_run_folder_with_its_manifest_and_says_how_to_go_on(checkout):
    made = job("reverse_text", "rl")
    assert (made.run_dir / "manifest.json").read_text() == (
        checkout / "manifests/reverse_text.json"
    ).read_text()
    assert (
        made.run_dir.parent == checkout / "runs"
        and made.num_steps == find("reverse_text").manifest.stages.rl.num_steps
    )
    assert made.resume == "snakemake --profile local reverse_text"
    assert find(made.run_dir.name).path == made.run_dir


def test_a_site_goes_on_by_its_last_join(checkout):
    addresses = "10.0.0.1:29400", "10.0.0.2:29400"
    place_site("elastic_text", *addresses, "lima", Path("certificates"), 3)
    made = job("elastic_text", "sft")
    command = f"orrery join {made.run_dir.name} 10.0.0.1:29400 --listen 10.0.0.2:29400"
    assert made.resume == f"{command} --name lima --shard 3"
    place_site("elastic_text", addresses[0], "", "site", checkout / "my keys", None)
    words = f"--certificates '{checkout}/my keys'"
    assert job("elastic_text", "sft").resume == f"{command.partition(' --')[0]} {words}"
    assert "snakemake" in job("elastic_text", "init").resume


def test_a_run_for_another_gpu_is_refused_before_its_folder_is_made(checkout, monkeypatch):
    driver = checkout / "bin" / "nvidia-smi"
    driver.parent.mkdir()
    driver.write_text("#!/bin/sh\necho 0, GPU-a, 81559, 9.0, NVIDIA H100 80GB HBM3\n")
    driver.chmod(0o755)
    monkeypatch.setenv("PATH", str(driver.parent), prepend=os.pathsep)
    with pytest.raises(OrreryError, match=r"is for NVIDIA H200 and this machine has NVIDIA H100"):
        job("asynchrony_h200_1", "rl")
    assert not (checkout / "runs").exists()
    assert job("reverse_text", "rl").num_devices is None


def test_a_full_disk_leaves_no_folder_of_a_run(checkout, monkeypatch):
    def fail(path, data):
        path.with_name(".left.tmp").write_bytes(b"")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(supervisor, "write_atomic", fail)
    with pytest.raises(OSError, match="No space left"):
        job("reverse_text", "init")
    assert not any((checkout / "runs").iterdir())
    monkeypatch.undo()
    monkeypatch.chdir(checkout)
    job("reverse_text", "init")
    (folder,) = (checkout / "runs").iterdir()
    monkeypatch.setattr(supervisor, "begin", lambda path: fail(path, b""))
    with pytest.raises(OSError, match="No space left"):
        job("reverse_text", "rl")
    assert (folder / "manifest.json").is_file()


def test_an_old_run_folder_goes_on_by_its_own_manifest(checkout):
    made = job("reverse_text", "rl")
    manifest = json.loads((checkout / "manifests/reverse_text.json").read_text())
    (checkout / "manifests/reverse_text.json").write_text(
        json.dumps({**manifest, "seed": manifest["seed"] + 1})
    )
    assert job(made.run_dir.name, "rl").resume == f"orrery run {made.run_dir.name} rl"
    assert find("reverse_text").path != made.run_dir
    shutil.rmtree(made.run_dir)
    with pytest.raises(OrreryError, match=r"now makes the run reverse_text-[0-9a-f]{12}\."):
        find(made.run_dir.name)


@pytest.mark.parametrize(
    "words", [("run", "rl"), ("status",), ("logs",), ("export",), ("stop",), ("report",)]
)
def test_a_run_folder_of_an_older_layout_is_refused_with_how_to_begin_anew_and_hides_no_other_run(
    checkout, capsys, words
):
    old, new = (job(name, "rl").run_dir for name in ("reverse_text", "calculator"))
    for path in (new, old):
        Status("rl", 4, "failed", "it broke", 1, HOST, None, time.time()).write(path)
    (old / "layout").unlink()
    command, *more = words
    for name in ("reverse_text", old.name):
        code, _, err = orrery(capsys, command, name, *more)
        assert code and "Traceback" not in err
        assert (
            f"{old}: an older release of Orrery began this run (layout 1, and this "
            f"release reads only layout 2)" in err
        )
    code, out, _ = orrery(capsys, "status")
    assert code == 0 and f"{new.name}: rl failed" in out and f"{old}: an older release" in out
    [typed] = re.findall("type `(mv .+?)`", err)
    subprocess.run(typed.split(), check=True)
    assert (
        job("reverse_text", "rl").run_dir == old
        and orrery(capsys, "status", "reverse_text")[0] == 0
    )


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (("run", "reverse_tex", "rl"), "did you mean 'reverse_text'?"),
        (
            ("run", "reverse_text", "rll"),
            "reverse_text has no such stage. Choose from init, sft, rl, evaluate, report",
        ),
        (("run", "reverse_text", "rl"), "rl: sft is not done"),
        (("status",), "no run has started here"),
        (("status", "reverse_tex"), "did you mean 'reverse_text'? If not, `orrery render"),
        (
            ("status", "nonsense"),
            "runs has a similar name (`ls manifests jsonnet/runs` lists them)",
        ),
        (("status", "text"), "did you mean "),
        (("stop", "reverse_text"), "is not running. Type"),
        (("logs", "reverse_text", "trainer"), ": no logs yet. Type `"),
        (("report", "reverse_text"), "not started"),
        (("report", "--summary", "reverse_text"), ": no report yet"),
        (("export", "reverse_text"), "not started"),
        (("serve", "reverse_text"), "RL has not written weights yet; type `snakemake"),
        (("serve", "reverse_tex"), "did you mean 'reverse_text'?"),
        (("bench",), "bench: no figure is named. Type"),
        (("bench", "a/b"), "not a known figure"),
        (("join", "elastic_text", "10.0.0.1:1", "--shard", "99"), "Type a shard from 0 to"),
    ],
)
def test_a_mistake_is_one_line_and_a_non_zero_exit(checkout, capsys, words, sentence):
    code, out, err = orrery(capsys, *words)
    assert (
        code == 2
        and out == ""
        and err.startswith("error: ")
        and err.count("\n") == 1
        and sentence in err
    )


SITE = """
[slurm]
partition = "gpu"
cpu_partition = "cpu"
time_limit_min = 30
cpus_per_node = 8
memory_per_node_mb = 12000
extra = ["--qos=long"]
[containers]
images = "images"
scratch = "/tmp"
"""


@pytest.mark.parametrize("has_containers", [True, False])
def test_an_export_at_a_site_with_slurm_is_a_small_job_that_needs_no_torch_here(
    checkout, capfd, monkeypatch, tmp_path, has_containers
):
    linked(checkout, "packages", "pyproject.toml")
    (checkout / "site.toml").write_text(
        SITE if has_containers else SITE.partition("[containers]")[0]
    )
    monkeypatch.delenv("ORRERY_SITE", raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "12")  # the shell of another job
    monkeypatch.setattr(containers, "find_image", lambda *words: checkout / "trainer.sif")
    tools = tmp_path / "tools"
    tools.mkdir()
    said = (
        "import json, os, sys; json.dump([sys.argv, 'SLURM_JOB_ID' in os.environ], "
        "open(f'{sys.argv[0]}.json', 'w'))"
    )
    after = {
        "srun": "next(i for i, word in enumerate(words) if not word.startswith('-'))",
        "apptainer": f"words.index('{checkout}/trainer.sif') + 1",
    }
    for name, begin in after.items():
        text = (
            f"#!{sys.executable}\n{said}; words = sys.argv[1:]; words = words[{begin}:]; "
            f"os.execvp(words[0], words)\n"
        )
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tools}:{os.environ['PATH']}")
    run_dir = job("reverse_text", "rl").run_dir
    code, out, err = orrery(capfd, "export", "reverse_text", "--step", "3", "--to", "out/model")
    assert (
        (code, out) == (2, "")
        and err.startswith("error: ")
        and "its rl stage has no complete checkpoint yet" in err
    )
    line, inside = json.loads((tools / "srun.json").read_text())
    assert line[1:12] == [
        *(
            "--job-name=orrery-export",
            "--partition=cpu",
            "--time=30",
            "--nodes=1",
            "--ntasks=1",
            "--cpus-per-task=2",
            "--mem=12000M",
        ),
        *(
            "--export=ALL",
            "--input=none",
            "--qos=long",
            "bash" if has_containers else sys.executable,
        ),
    ]
    assert not inside
    assert line[-7:] == [
        str(run_dir),
        "--stage",
        "rl",
        "--step",
        "3",
        "--to",
        str(checkout / "out/model"),
    ]
    if has_containers:
        binds = [word for before, word in itertools.pairwise(line) if before == "--bind"]
        scratch = line[15]
        assert (
            re.fullmatch(rf"/tmp/orrery-export-\d+-{run_dir.name}", scratch)
            and not Path(scratch).exists()
        )
        assert {str(run_dir), f"{scratch}:/tmp", str(checkout / "out")} <= set(binds) and (
            checkout / "out"
        ).is_dir()
        assert any(
            bind.startswith(f"{run_dir}/code/") and bind.endswith(":/orrery/code:ro")
            for bind in binds
        )


def test_an_export_that_stayed_on_its_node_is_told(tmp_path):
    (tmp_path / "here").mkdir()
    assert serve._check_arrived(0, tmp_path / "here") == 0 and serve._check_arrived(0, None) == 0
    assert serve._check_arrived(3, tmp_path / "there") == 3, "the job has said why"
    for there in ("there", "no/folder"):
        with pytest.raises(
            OrreryError, match=rf"^--to {tmp_path}/{there}: .*Choose a folder that all nodes share$"
        ):
            serve._check_arrived(0, tmp_path / there)


def test_a_plan_is_of_a_manifest_at_any_path_too(checkout, capsys):
    manifest = json.loads((checkout / "manifests/reverse_text.json").read_text())
    elsewhere = checkout / "c.json"
    elsewhere.write_text(json.dumps({**manifest, "stages": {**manifest["stages"], "sft": None}}))
    code, out, _ = orrery(capsys, "plan", str(elsewhere))
    assert code == 0 and re.findall(
        rf"(?m)^(\w+) of reverse_text-{id12(load(elsewhere))}: ", out
    ) == ["init", "rl", "evaluate", "report"]
    code, _, err = orrery(capsys, "plan", "missing.json")
    assert code == 2 and err.startswith("error: missing.json: ")
    assert not (checkout / "runs").exists(), "a plan makes nothing"


def test_a_plan_of_an_old_manifest_warns_that_the_spec_has_changed(checkout, capsys):
    assert orrery(capsys, "plan", "reverse_text", "rl")[::2] == (0, "")
    spec = checkout / "jsonnet/runs/reverse_text.jsonnet"
    text = spec.read_text()
    spec.write_text(text.replace("seed: 1,", "seed: 2,"))
    code, out, err = orrery(capsys, "plan", "reverse_text", "rl")
    assert code == 0 and f"rl of {find('reverse_text').path.name}: " in out
    assert err == (
        "warning: this plans the old run: manifests/reverse_text.json: differs from its spec "
        "jsonnet/runs/reverse_text.jsonnet. Type `orrery render reverse_text` to update it\n"
    )
    assert orrery(capsys, "plan", "manifests/reverse_text.json", "rl")[::2] == (0, "")
    spec.write_text(text.replace("seed: 1,", "seed: 'one',"))
    code, _, err = orrery(capsys, "plan", "reverse_text", "rl")
    assert code == 0 and err.count("\n") == 1
    assert "its spec, which cannot be rendered now: jsonnet/runs/reverse_text.jsonnet: " in err


PLANNED_SITE = """[slurm]
partition = "gpu"
time_limit_min = 60
cpus_per_node = 4
memory_per_node_mb = 16000
[containers]
images = "images"
modules = ["apptainer/1.4"]
[network]
interface = "ib0"
"""


def test_a_plan_is_written_as_the_manifest_and_the_very_commands_that_a_start_submits(
    checkout, capsys, monkeypatch
):
    (checkout / "site.toml").write_text(PLANNED_SITE)
    code, out, _ = orrery(capsys, "plan", "glm5_shape_smoke", "--write", "plan")
    stages = [
        f"{number}_{stage}.sh"
        for number, stage in enumerate(("init", "sft", "rl", "evaluate", "report"), 1)
    ]
    assert code == 0 and out.split() == [
        f"plan/{name}" for name in ("manifest.json", "plan.txt", *stages)
    ]
    assert not (checkout / "runs").exists()
    assert (
        Path("plan/manifest.json").read_bytes()
        == Path("manifests/glm5_shape_smoke.json").read_bytes()
    )
    assert "srun --het-group=2" in Path("plan/plan.txt").read_text()
    plugin = pytest.importorskip("snakemake_executor_plugin_orrery_slurm")
    executor = object.__new__(plugin.Executor)
    executor.workspace, executor._going, submitted = Workspace(checkout), [], []
    executor.site = load_site(executor.workspace)
    executor.logger, executor.report_job_submission = logging.getLogger(), lambda info: None
    monkeypatch.setattr(plugin, "images_of", lambda *given: {})
    monkeypatch.setattr(
        plugin.queue, "call", lambda *command, script: submitted.append(command) or "12"
    )
    monkeypatch.setattr(plugin.queue, "user_jobs", list)
    pipeline = checked_in(executor.workspace)
    (folder,) = pipeline.folders["glm5_shape_smoke"]
    for name in stages:
        stage = name.partition("_")[2].removesuffix(".sh")
        rule = SimpleNamespace(name=stage)
        resources = {"sbatch": pipeline.sbatch(folder, stage)}
        shell = f"orrery run {folder} {stage}"
        executor.run_job(
            SimpleNamespace(
                rule=rule, wildcards={"run": folder}, resources=resources, shellcmd=shell
            )
        )
        assert (
            Path("plan", name).read_text().splitlines()[-1] == f"exec {shlex.join(submitted[-1])}"
        )
        assert os.access(Path("plan", name), os.X_OK)
    assert len(submitted) == 5 and all(command[0] == "sbatch" for command in submitted)


def test_a_plan_ends_with_memory_and_time_over_the_sites_network(checkout, capsys):
    code, out, _ = orrery(capsys, "plan", "glm5_run")
    header = next(line for line in out.splitlines() if line.startswith("memory of a device"))
    assert code == 0 and header.split("  ")[-1].strip() == "prefill × 64"
    assert "trainer × 96" in header and "decode × 64" in header
    assert "network of 400 Gb/s a device" in out
    site = PLANNED_SITE.replace('interface = "ib0"', 'interface = "ib0"\ngbit_per_s = 40.0')
    (checkout / "site.toml").write_text(site)
    out = orrery(capsys, "plan", "glm5_run")[1]
    (note,) = (line for line in out.splitlines() if "note: trainer needs" in line)
    sentence = "memory, and slurm.memory_per_node_mb is 16000; raise it, or keep less on hosts"
    assert note.endswith(f"{sentence}, so `snakemake` refuses the run")
    assert "note: slurm.warning_s 300: a step and its checkpoint take" in out
    pipeline = checked_in(find_workspace())
    with pytest.raises(OrreryError, match=f"glm5_run: trainer needs .* {sentence}"):
        pipeline.check_targets(["glm5_run"])
    pipeline.check_targets(["reverse_text"])
    fast = json.loads(orrery(capsys, "plan", "glm5_run", "--json", "--tokens", "8192")[1])
    assert "network of 40 Gb/s a device" in fast["assumptions"]
    assert fast["tokens"]["all"] == 8192 and fast["step_s"] < fast["longest_step_s"]
    code, out, _ = orrery(capsys, "plan", "smollm2_demo", "--search")
    assert code == 0 and out.count("the fastest layouts that fit:") == 2
    code, _, err = orrery(capsys, "plan", "smollm2_demo", "--search", "--json")
    assert code == 2 and "--search cannot print JSON; leave out --json or --search" in err
    code, _, err = orrery(capsys, "plan", "reverse_text", "--search")
    assert code == 2 and err.startswith("error: hardware.accelerator 'cpu': ")


def test_a_plan_is_written_into_a_new_folder_alone_and_without_slurm_has_the_stages_commands(
    checkout, capsys
):
    Path("here").mkdir()
    assert orrery(capsys, "plan", "reverse_text", "--write", "here")[::2] == (
        2, "error: here: exists already. Remove it, or name a new folder\n"
    )  # fmt: skip
    assert not list(Path("here").iterdir())
    assert orrery(capsys, "plan", "reverse_text", "rl", "--write", "there/plan")[0] == 0
    name = find("reverse_text").path.name
    assert Path("there/plan/3_rl.sh").read_text().splitlines()[-1] == f"exec orrery run {name} rl"
    assert sorted(path.name for path in Path("there/plan").iterdir()) == [
        "3_rl.sh",
        "manifest.json",
        "plan.txt",
    ]


def test_status_shows_stages_and_what_each_waits_for_and_notices_a_dead_launcher(checkout, capsys):
    run_dir = job("reverse_text", "rl").run_dir
    for stage in ("init", "sft"):
        (run_dir / "stages" / stage).mkdir(parents=True)
        (run_dir / "stages" / stage / "DONE").write_text("{}")
    (run_dir / "checkpoints/step_10.attempt_1").mkdir(parents=True)
    (run_dir / "checkpoints/step_10.attempt_1/COMPLETE").touch()
    health = HealthFile(run_dir, "rl", "trainer", 0, 4)
    health.doing("training", step=12)
    roles = [
        RoleStatus("trainer.0", HOST, 1, 20_001, [0], "running"),
        RoleStatus("inference.0", HOST, 2, 20_002, [1], "running", None, 2),
    ]
    Status("rl", 4, "running", "", 999_999, HOST, None, time.time() - 70, roles=roles).write(
        run_dir
    )
    with health.waiting("batch 13 from orchestrator"), runs.hold_lock(run_dir):
        code, out, _ = orrery(capsys, "status")
    assert code == 0
    assert (
        re.search(r"rl running for 1 min [1-3]\d s, attempt 4", out)
        and "✓ init   ✓ sft   ▶ rl   · evaluate   · report" in out
    )
    assert re.search(r"waiting \d+ s for batch 13 from orchestrator", out) and "step 12" in out
    assert "starting · started again 2 ×" in out
    code, out, _ = orrery(capsys, "status", "reverse_text")
    assert (
        "rl its launcher died" in out
        and "✓ init   ✓ sft   ✗ rl" in out
        and "lost with its launcher" in out
        and "newest checkpoint: step 10" in out
    )
    assert "type `snakemake --profile local reverse_text` to go on" in out


def test_stop_ends_a_run_that_is_going(checkout, capsys):
    run_dir = job("reverse_text", "rl").run_dir
    (run_dir / "plan.json").write_text(
        json.dumps(
            [
                {
                    "role": "trainer",
                    "index": 0,
                    "module": "launcher_fakes",
                    "num_devices": 0,
                    "ends": "itself",
                }
            ]
        )
    )
    (run_dir / "script.json").write_text(json.dumps({"0": ["trainer", ["ready", "wait"]]}))
    env = {**os.environ, "PYTHONPATH": f"{HERE}:{os.environ.get('PYTHONPATH', '')}"}
    launcher = subprocess.Popen(
        [sys.executable, HERE / "launcher_fakes.py", "launch", run_dir],
        env=env,
        stderr=subprocess.DEVNULL,
    )
    limit = time.monotonic() + 30
    while not (run_dir / "ready.trainer.0").exists():
        assert time.monotonic() < limit
        time.sleep(0.05)
    code, out, _ = orrery(capsys, "stop", "reverse_text")
    assert code == 0 and "rl: stopped by SIGTERM" in out
    assert launcher.wait(10) == 128 + signal.SIGTERM
    assert runs.read_status(run_dir).state == "stopped"


def test_logs_choose_by_role_and_say_which_process_spoke(checkout, capsys):
    logs = job("reverse_text", "rl").run_dir / "logs"
    logs.mkdir()
    for name in ("trainer.0", "trainer.1", "router.0"):
        (logs / f"{name}.log").write_text(f"old\nof {name}\n")
    assert (
        orrery(capsys, "logs", "reverse_text", "trainer", "-n", "1")[1]
        == "trainer.0 | of trainer.0\ntrainer.1 | of trainer.1\n"
    )
    assert orrery(capsys, "logs", "reverse_text", "router.0")[1] == "old\nof router.0\n"


@pytest.mark.parametrize(
    "whole", ["", "a", "a\n", "\n\n", "a\r\nb\rc\n\nd", "é\n" * 50, "x" * 30 + "\n" + "y" * 7]
)
@pytest.mark.parametrize("num_lines", [0, 1, 2, 3, 49, 50, 51])
def test_the_last_lines_are_those_of_the_whole_log_wherever_its_blocks_end(
    tmp_path, monkeypatch, whole, num_lines
):
    monkeypatch.setattr(describe, "BLOCK_BYTES", 5)
    (tmp_path / "trainer.0.log").write_bytes(whole.encode())
    assert (
        list(describe.log_lines([tmp_path / "trainer.0.log"], num_lines, False))
        == whole.splitlines()[-num_lines:]
    )


@pytest.mark.parametrize("num_lines", [0, 3])
def test_a_log_is_never_held_whole(tmp_path, num_lines):
    path = tmp_path / "trainer.0.log"
    path.write_bytes((b"x" * 999 + b"\n") * 20_000)
    tracemalloc.start()
    num = sum(1 for _ in describe.log_lines([path], num_lines, False))
    peak_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert num == (num_lines or 20_000) and peak_bytes < 2**21


def test_following_goes_on_where_the_last_lines_ended(tmp_path, monkeypatch):
    monkeypatch.setattr(describe, "FOLLOW_S", 0.01)
    path = tmp_path / "trainer.0.log"
    path.write_text("a\nb\n")
    lines = describe.log_lines([path], 1, True)
    assert next(lines) == "b"
    with open(path, "a") as log:
        log.write("c\nd")
    assert next(lines) == "c"
    with open(path, "a") as log:
        log.write("e\n")
    assert next(lines) == "de"


def test_the_table_of_benchmarks_holds_values_against_goals(checkout, capsys):
    folder = checkout / "benchmarks" / "pipeline"
    folder.mkdir(parents=True)
    record = {
        "figure": "dry_run",
        "unit": "s",
        "goal": 5,
        "better": "lower",
        "hardware": "2 cores",
        "measured_at": "2026-01-02T03:04:05",
    }
    (folder / "dry_run.json").write_text(json.dumps({**record, "value": 1.25}))
    (folder / "both.json").write_text(
        json.dumps(
            {
                **record,
                "better": "higher",
                "rows": [{"variant": "a", "value": 4}, {"variant": "b", "value": 6}],
            }
        )
    )
    held = {(one.name, one.variant): one.holds for one in bench.figures(checkout / "benchmarks")}
    assert held == {
        ("pipeline/dry_run", ""): True,
        ("pipeline/both", "a"): False,
        ("pipeline/both", "b"): True,
    }
    code, out, _ = orrery(capsys, "bench", "--table")
    assert code == 0 and "≤ 5" in out and "1.25" in out
    parts = [
        {"variant": "one side", "value": 9, "unit": "tokens/s"},
        {"variant": "the other", "value": 1, "unit": "tokens/s"},
    ]
    # The goal is for no single row.
    (folder / "both.json").write_text(json.dumps({**record, "value": 7, "rows": parts}))
    held = {(one.name, one.variant): one.holds for one in bench.figures(checkout / "benchmarks")}
    assert held == {
        ("pipeline/dry_run", ""): True, ("pipeline/both", ""): False,
        ("pipeline/both", "one side"): None, ("pipeline/both", "the other"): None,
    }  # fmt: skip
    (folder / "bad.json").write_text("{}")
    assert "bad.json: is not a benchmark record" in orrery(capsys, "bench", "--table")[2]


def test_every_checked_in_record_with_a_goal_is_judged_by_its_own_value_and_unit():
    folder = HERE.parents[1] / "benchmarks"
    shown = {(one.name, one.value, one.unit, one.goal) for one in bench.figures(folder)}
    records = {
        str(path.relative_to(folder).with_suffix("")): json.loads(path.read_text())
        for path in folder.glob("**/*.json")
    }
    goals = {
        (name, float(one["value"]), one["unit"], one["goal"])
        for name, one in records.items()
        if one["goal"] is not None
    }
    assert goals and goals - shown == set()


def test_bench_runs_the_figures_script(checkout, capsys):
    (checkout / "benchmarks/area").mkdir(parents=True)
    (checkout / "benchmarks/area/figure.py").write_text("import sys; sys.exit(7 + len(sys.argv))")
    assert orrery(capsys, "bench", "area/figure")[0] == 8
    command = "python benchmarks/area/figure.py --shape 'of two'"
    (checkout / "benchmarks/area/of_two.json").write_text(
        json.dumps({"command": f"{command} --runs there --out elsewhere"})
    )
    code, out, _ = orrery(capsys, "bench", "area/of_two")
    assert (code, out.strip()) == (10, f"+ {command}")
    (checkout / "benchmarks/area/of_two.json").write_text("{}")
    assert "names no benchmark command" in orrery(capsys, "bench", "area/of_two")[2]
    assert "did you mean 'area/of_two'?" in orrery(capsys, "bench", "area/of_to")[2]


def test_the_doctor_says_what_to_mend(checkout):
    (checkout / "locks/cpu.txt").write_text("torch==1.0.0 \\\n    --hash=sha256:00\n")
    found = {one.what: one for one in examine(Workspace(checkout), Site())}
    assert found["torch"].remedy == "cpu.txt pins 1.0.0; type `make setup`"
    assert "answers" in found["loopback ports"].found and not found["Python"].remedy
    assert "vllm.fork_engine_core (vLLM 0.32, CpuPlatform." in found["vLLM patches"].found


def test_a_run_folder_whose_manifest_was_edited_is_refused_by_name_and_by_folder(checkout):
    made = job("reverse_text", "rl")
    path = made.run_dir / "manifest.json"
    manifest = json.loads(path.read_text())
    path.write_text(json.dumps({**manifest, "seed": manifest["seed"] + 1}))
    for word in ("reverse_text", made.run_dir.name):
        with pytest.raises(
            OrreryError,
            match=r"manifest\.json: its hash is that of reverse_text-[0-9a-f]{12}, so it was",
        ):
            job(word, "rl")


def test_a_run_that_cannot_start_is_refused_before_its_processes(checkout):
    path = checkout / "manifests" / "reverse_text.json"
    manifest = json.loads(path.read_text())
    manifest["inference"]["tensor_parallel"] = 2
    path.write_text(json.dumps(manifest))
    with pytest.raises(
        OrreryError, match=r"= 2 on cpu: an engine has one process.* Set tensor_parallel to 1"
    ):
        job("reverse_text", "sft")
    assert not (checkout / "runs").exists()


@pytest.mark.parametrize(
    ("name", "lock"),
    [("reverse_text", "cpu"), ("smollm2_reverse_words_seed_1", "cuda")],
)
def test_no_stage_of_a_run_starts_with_another_lock_than_its_manifests(checkout, name, lock):
    file = re.escape(f"locks/{lock}.txt")
    made = job(name, "init")
    assert made.plan.name == "init"
    path = checkout / f"locks/{lock}.txt"
    content = path.read_bytes()
    path.write_bytes(content + b"# newer\n")
    with pytest.raises(
        OrreryError, match=rf"{file} differs from the lock .* Type `orrery render {name}`"
    ):
        job(name, "init")
    path.write_bytes(content + b"# newer\n")
    done_path(made.run_dir, "init").parent.mkdir(parents=True)
    done_path(made.run_dir, "init").touch()
    with pytest.raises(
        OrreryError,
        match=rf"differs from the lock .* and `orrery adopt {name} {made.run_dir.name}` to copy",
    ):
        job(name, "rl")


def test_paths_of_data_are_relative_to_the_checkout_in_render_and_run(
    checkout, capsys, monkeypatch
):
    shutil.copytree(ROOT / "examples/problems", checkout / "data")
    spec = (ROOT / "examples/problems/mine.jsonnet").read_text()
    assert "'examples/problems/arithmetic.jsonl'" in spec
    (checkout / "jsonnet/runs/mine.jsonnet").write_text(spec.replace("examples/problems", "data"))
    monkeypatch.chdir(checkout / "data")
    code, out, err = orrery(capsys, "render", "mine")
    assert (code, err) == (0, "") and out.startswith("wrote manifests/mine.json\n")
    seen = []

    def run_stage(one):
        seen.append(Path.cwd())
        return SimpleNamespace(state="done", message="", requeue=False, exit_code=0)

    monkeypatch.setattr("orrery.launcher.supervisor.run_stage", run_stage)
    assert orrery(capsys, "run", "reverse_text", "init")[0] == 0
    assert seen == [checkout]


def test_what_the_system_refuses_is_one_line(checkout, capsys):
    (checkout / "runs").touch()
    code, out, err = orrery(capsys, "run", "reverse_text", "rl")
    assert (
        code == 1
        and out == ""
        and err.startswith(f"error: {checkout}/runs")
        and err.count("\n") == 1
    )


def test_status_of_sft_says_its_loss_and_the_newest_of_its_validation(checkout, capsys):
    made = job("reverse_text", "sft")
    Status("sft", 1, "stopped", "", 1, HOST, None, 100.0, 130.0).write(made.run_dir)
    assert "loss" not in orrery(capsys, "status", "reverse_text")[1]
    metrics = MetricsFile(made.run_dir, "sft", "trainer", 0, 1)
    for step in range(6):
        metrics.write(step, event="validation", validation_loss=3.0 / (step + 1))
        metrics.write(step + 1, loss=2.5 / (step + 1))
    metrics.close()
    expected = (
        "loss 0.4167 (step 6) · validation loss 1.0000 (step 2) → 0.7500 (step 3) → 0.6000 "
        "(step 4) → 0.5000 (step 5)"
    )
    assert expected in orrery(capsys, "status", "reverse_text")[1]


def test_status_of_an_elastic_run_names_the_members_of_its_newest_round(checkout, capsys):
    made = job("reverse_text", "sft")
    Status("sft", 1, "stopped", "", 1, HOST, None, 100.0, 130.0).write(made.run_dir)
    metrics = MetricsFile(made.run_dir, "sft", "trainer", 0, 1)
    metrics.write(10, loss=2.5)
    assert "round" not in orrery(capsys, "status", "reverse_text")[1]
    for number, names in enumerate((["oak", "elm", "ash"], ["oak", "ash"])):
        metrics.write(10 * number, event="round", round=number, names=names)
    assert "  round 1: 2 sites (oak, ash)\n" in orrery(capsys, "status", "reverse_text")[1]
    metrics.write(20, event="round", round=2, names=["oak"])
    metrics.close()
    assert "  round 2: 1 site (oak)\n" in orrery(capsys, "status", "reverse_text")[1]


def test_status_of_rl_says_how_many_rollouts_of_the_newest_batch_carry_no_signal(checkout, capsys):
    made = job("reverse_text", "rl")
    Status("rl", 2, "stopped", "", 1, HOST, None, 100.0, 130.0).write(made.run_dir)
    assert "signal" not in orrery(capsys, "status", "reverse_text")[1]
    for attempt, step, silent in ((1, 9, 0), (2, 7, 100), (2, 8, 576)):
        metrics = MetricsFile(made.run_dir, "rl", "orchestrator", 0, attempt)
        metrics.write(step, event="batch", num_sampled=768, num_without_signal=silent)
        metrics.close()
    assert (
        "  batch 8: 576 of 768 sampled rollouts without signal (75%)\n"
        in orrery(capsys, "status", "reverse_text")[1]
    )


def test_a_status_that_cannot_be_read_is_named_and_hides_no_other_run(checkout, capsys):
    good, bad, worse = (
        job(name, "rl").run_dir for name in ("reverse_text", "calculator", "reasoning_gym")
    )
    Status("rl", 4, "failed", "it broke", 1, HOST, None, time.time()).write(good)
    (bad / "status.json").write_text('{"stage": "rl"')
    (worse / "status.json").write_text('{"stage": "rl"}')
    code, out, err = orrery(capsys, "status")
    assert code == 2 and f"{good.name}: rl failed" in out
    for path in (bad, worse):
        assert err.count(f"error: {path}/status.json: ") == 1
        with pytest.raises(OrreryError, match="remove it and start the run again"):
            runs.read_status(path)
        code, out, told = orrery(capsys, "status", path.name)
        assert code == 2 and not out and told.startswith(f"error: {path}/status.json: ")
    assert {bad.name, worse.name} <= {
        one.what
        for one in examine(Workspace(checkout), Site())
        if one.found == "its status cannot be read"
    }


def test_a_group_shows_every_run(checkout, capsys):
    names = [f"reverse_text_seed_{seed}" for seed in (1, 2, 3)]
    assert "seed_1-" in orrery(capsys, "report", "--summary", "reverse_text_seeds")[2]
    for name in names:
        text = find(name).path / "report" / "summary.txt"
        text.parent.mkdir(parents=True)
        text.write_text(f"{name}: held-out reward 0.9\n")
    assert orrery(capsys, "report", "--summary", "reverse_text_seeds")[1].splitlines() == [
        line
        for name in names
        for line in (
            f"{name}: held-out reward 0.9",
            f"weights: `orrery export {name}` writes the weights of its newest checkpoint",
        )
    ]
    assert orrery(capsys, "status", "reverse_text_seeds")[1].count("not started") == 3


def test_hints_name_the_command_that_a_person_typed_and_one_that_goes_on_with_this_very_run(
    checkout, capsys, monkeypatch
):
    made = job("reverse_text", "rl")
    manifest = json.loads((checkout / "manifests/reverse_text.json").read_text())
    (checkout / "manifests/reverse_text.json").write_text(
        json.dumps({**manifest, "seed": manifest["seed"] + 1})
    )
    Status("rl", 1, "running", "", 999_999, HOST, None, time.time()).write(made.run_dir)
    assert (
        f"type `orrery run {made.run_dir.name} rl` to go on"
        in orrery(capsys, "status", made.run_dir.name)[1]
    )
    monkeypatch.setenv("ORRERY_RESUME", "make demo")
    assert "Type `make demo`" in orrery(capsys, "report", "--summary", "reverse_text")[2]
