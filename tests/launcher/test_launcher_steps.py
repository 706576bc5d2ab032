"""A task of a step: its index, its devices, its log; and what the steps of one node share."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from orrery.launcher.containers import CODE, snapshot
from orrery.launcher.site import Containers, Site
from orrery.launcher.slurm import allocation as of_allocation
from orrery.launcher.slurm.allocation import allocation, step_plans
from orrery.launcher.slurm.queue import clean_environment, components
from orrery.manifest.identity import Workspace, load
from orrery.manifest.plan import NodeGroup, ProcessPlan, StagePlan, on_devices, stage
from orrery.manifest.schema import Hardware
from orrery.runtime import run_directory

ROOT = Path(__file__).parents[2]
TASK = ROOT / "packages/orrery/launcher/task.sh"
SITE = Site.model_validate(
    {
        "slurm": {
            "partition": "gpu",
            "time_limit_min": 60,
            "gpu_type": "h200",
            "cpus_per_node": 64,
            "memory_per_node_mb": 64000,
        },
        "containers": {"images": "images"},
        "network": {"interface": "eth0"},
    }
)


def task(tmp_path, devices, rank, visible="0,1,2,3,4,5,6,7", scratch=None):
    env = {"PATH": os.environ["PATH"], "SLURM_PROCID": str(rank)}
    env |= {"CUDA_VISIBLE_DEVICES": visible} if visible else {}
    show = (
        "bash",
        "-c",
        'echo "sees ${CUDA_VISIBLE_DEVICES-none} ${APPTAINERENV_CUDA_VISIBLE_DEVICES-none} as $*"',
        "role",
    )
    scratch = scratch or tmp_path / "scratch"
    done = subprocess.run(
        ["bash", TASK, "inference", "8", devices, tmp_path, scratch, "=== rl", *show],
        env=env,
        capture_output=True,
    )
    return done.returncode, (tmp_path / f"inference.{8 + rank}.log").read_text()


def test_a_task_has_its_own_index_log_and_devices(tmp_path):
    code, log = task(tmp_path, "6,2", rank=3)
    assert code == 0 and log.splitlines()[-1] == "sees 6,7 6,7 as --index 11"
    assert log.startswith("=== rl bash -c ") and log.splitlines()[0].endswith("--index 11")


def test_ranks_of_one_node_see_all_devices_of_their_role(tmp_path):
    assert task(tmp_path, "4,4", rank=2)[1].splitlines()[-1] == "sees 4,5,6,7 4,5,6,7 as --index 10"


def test_a_task_without_devices_sees_none(tmp_path):
    assert (
        task(tmp_path, "0,0", rank=0, visible="")[1].splitlines()[-1]
        == "sees none none as --index 8"
    )


@pytest.mark.skipif(os.geteuid() != 0, reason="needs a folder of somebody else's")
def test_a_scratch_folder_of_another_user_is_refused(tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    os.chown(other, 12345, 12345)
    code, log = task(tmp_path, "0,0", rank=0, scratch=other)
    assert code == 2 and "another user's folder" in log and log.count("\n") == 2


def test_the_folder_of_kernels_outlives_a_task_and_no_link_stands_in_for_it(tmp_path):
    scratch, kernels = tmp_path / "orrery-7", tmp_path / "orrery-kernels-0-image"
    for _ in range(2):
        code, log = task(tmp_path, "0,0", rank=0, scratch=f"{scratch}:{kernels}")
        assert code == 0, log
        assert kernels.stat().st_mode & 0o777 == 0o700
    kernels.rmdir()
    kernels.symlink_to(scratch)
    code, log = task(tmp_path, "0,0", rank=0, scratch=f"{scratch}:{kernels}")
    assert code == 2 and f"{kernels} on " in log and "is a link" in log


def test_engines_and_ranks_on_one_node_share_its_devices_and_none_twice():
    """4 ranks, two engines of two devices, on one node of eight."""
    processes = (
        *(ProcessPlan("inference", index, "m", 2, "with_stage") for index in range(2)),
        ProcessPlan("orchestrator", 0, "m", 0, "itself"),
        *(ProcessPlan("trainer", index, "m", 1, "itself") for index in range(4)),
    )
    one = on_devices(StagePlan("rl", (), processes, (NodeGroup("all", 0, 1),)), shared=False)
    hardware = Hardware(accelerator="h200", num_nodes=1, devices_per_node=8, shared_devices=False)
    *engines, orchestrator, ranks = step_plans(
        one, components(hardware, one, SITE.slurm), SITE.slurm
    )
    assert (
        [each.devices for each in engines] == [(0, 2), (2, 2)]
        and ranks.devices == (4, 4)
        and orchestrator.gres is None
    )
    # Every step sees the node's; task.sh takes the slice.
    assert {each.gres for each in (*engines, ranks)} == {"gpu:h200:8"}
    assert ranks.cpus_per_task * ranks.tasks_per_node <= 64 and orchestrator.cpus_per_task == 64


def wide_engine() -> StagePlan:
    """An engine of three nodes with two devices each, and one of the same shape behind it."""
    processes = []
    for engine in range(2):
        head = ProcessPlan("inference", engine, "m", 2, "with_stage", node=3 * engine)
        further = replace(head, role="headless", module="h", engine=engine)
        processes += [head] + [
            replace(further, index=2 * engine + i, node=3 * engine + i + 1, part=i + 1)
            for i in range(2)
        ]
    return StagePlan("rl", (), tuple(processes), (NodeGroup("inference", 0, 6),))


def test_an_engine_over_nodes_is_a_step_on_its_first_node_and_one_on_the_others():
    hardware = Hardware(accelerator="h200", num_nodes=6, devices_per_node=2, shared_devices=False)
    one = wide_engine()
    steps = step_plans(one, components(hardware, one, SITE.slurm), SITE.slurm)
    assert [
        (step.role, step.processes[0].index, step.first_node, step.num_nodes, step.tasks_per_node)
        for step in steps
    ] == [
        ("inference", 0, 0, 1, 1),
        ("inference", 1, 3, 1, 1),
        ("headless", 0, 1, 2, 1),
        ("headless", 2, 4, 2, 1),
    ]


@pytest.fixture
def inside(tmp_path, monkeypatch):
    """The allocation of a heterogeneous job of 4 nodes, and a fake srun."""
    one = load(ROOT / "manifests" / "glm5_shape_smoke.json")
    env = {
        "SLURM_HET_SIZE": "3",
        "SLURM_JOB_ID": "7",
        "SLURM_HET_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "1",
    }
    env |= {f"SLURM_JOB_NODELIST_HET_GROUP_{i}": names for i, names in enumerate(("a", "b", "c,d"))}
    for name, value in {
        **env,
        "SLURM_CPUS_PER_TASK": "9",
        "APPTAINER_BIND": "/etc",
        "APPTAINERENV_LD_PRELOAD": "x.so",
    }.items():
        monkeypatch.setenv(name, value)
    fake = tmp_path / "bin"
    fake.mkdir()
    (fake / "srun").write_text(
        f'#!/bin/bash\n(printf "%s\\n" "$@"; echo; env; cat) >{tmp_path}/srun.$$\n'
    )
    (fake / "srun").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}:{os.environ['PATH']}")
    monkeypatch.setattr("orrery.launcher.containers.image_of", lambda *_: Path("/images/x.sif"))
    run_dir = tmp_path / "run"
    (run_dir / "logs").mkdir(parents=True)
    return (
        allocation(SITE, SITE.slurm, one.hardware, Workspace(ROOT)),
        stage(one, "rl"),
        run_dir,
        tmp_path,
    )


def test_what_srun_is_given_holds_every_task_once_and_the_token_nowhere(inside, monkeypatch):
    monkeypatch.setenv("ORRERY_LOG_LEVEL", "debug")
    made, plan, run_dir, tmp_path = inside
    assert (made.job, made.restarts, made.nodes) == ("7", 1, (("a",), ("b",), ("c", "d")))
    tasks = made.start(plan, run_dir, 3, "s", "t0psecret")
    for one in tasks:
        assert one.wait(30)
    assert {one.name: one.node for one in tasks} == {
        "inference.0": "a", "orchestrator.0": "a", "inference.1": "b", "trainer.0": "c",
        "trainer.1": "d",
    }  # fmt: skip
    calls = [path.read_text().split("\n\n", 1) for path in tmp_path.glob("srun.*")]
    assert len(calls) == 4
    for argv, env in calls:
        words = argv.splitlines()
        variables, handed_over = env.rstrip("\n").rsplit("\n", 1)
        assert handed_over == "t0psecret" and "t0psecret" not in argv + variables
        assert "APPTAINERENV_ORRERY_LOG_LEVEL=debug" in variables
        assert "--input=all" in words and "APPTAINERENV_ORRERY_TOKEN_FILE=-" in variables
        assert {"--overlap", "--mem=0", "--export=ALL", "--kill-on-bad-exit=1", "--wait=0"} <= set(
            words
        )
        assert (
            "SLURM_CPUS_PER_TASK" not in env
            and "APPTAINER_BIND=" not in env
            and "LD_PRELOAD" not in env
        )
        assert "SLURM_JOB_ID=7" in env and "APPTAINERENV_ORRERY_INTERFACE=eth0" in env
        assert any(word.endswith(f":{CODE}:ro") for word in words)
    lists = sorted(
        word for argv, _ in calls for word in argv.splitlines() if word.startswith("--nodelist=")
    )
    assert lists == ["--nodelist=a"] * 2 + ["--nodelist=b", "--nodelist=c,d"]
    for log in run_dir.rglob("*.log"):
        assert "t0psecret" not in log.read_text()


def test_roles_without_containers_import_the_copied_code(inside, monkeypatch):
    made, plan, run_dir, tmp_path = inside
    monkeypatch.setenv("PYTHONPATH", "/mine")
    monkeypatch.setattr(of_allocation, "commit", lambda root: f"of {root}")
    where = (
        "import importlib.metadata as m, orrery.runtime.network as t; print(t.__file__);"
        "print([e.value for e in m.entry_points(group='vllm.general_plugins', name='orrery')])"
    )
    find = f'{sys.executable} -c "{where}" >{tmp_path}/found.$$'
    (tmp_path / "bin" / "srun").write_text(f"#!/bin/bash\nenv >{tmp_path}/srun.$$\n{find}\n")
    for one in replace(made, site=made.site.model_copy(update={"containers": None})).start(
        plan, run_dir, 3, "s", "t0psecret"
    ):
        assert one.wait(60)
    [code] = (run_dir / "code").iterdir()
    environments = [path.read_text() for path in tmp_path.glob("srun.*")]
    assert len(environments) == 4
    for variables in environments:
        assert f"PYTHONPATH={code}{os.pathsep}/mine\n" in variables
        assert f"ORRERY_COMMIT=of {ROOT}\n" in variables
    for found in tmp_path.glob("found.*"):
        own = f"{code}/orrery/runtime/network.py", "['orrery.inference.plugin:register']"
        assert tuple(found.read_text().splitlines()) == own


def test_an_engine_starts_again_on_its_node_as_a_step_of_the_next_incarnation(inside):
    made, plan, run_dir, tmp_path = inside
    engine = made.start(plan, run_dir, 3, "s", "t0psecret")[1]
    assert (engine.name, engine.node, engine.incarnation) == (
        "inference.1",
        "b",
        0,
    ) and engine.wait(30)
    [before] = [
        path.read_text() for path in tmp_path.glob("srun.*") if "--nodelist=b" in path.read_text()
    ]
    assert "--incarnation" not in before
    again = engine.restart()
    assert (again.name, again.node, again.incarnation) == ("inference.1", "b", 1) and again.wait(30)
    [after] = {
        path.read_text() for path in tmp_path.glob("srun.*") if "--nodelist=b" in path.read_text()
    } - {before}
    argv, env = after.split("\n\n", 1)
    assert (
        argv.endswith("--port\n0\n--incarnation\n1") and "\n=== rl, attempt 3, restart 1, " in argv
    )
    assert sorted(env.splitlines()) == sorted(before.split("\n\n", 1)[1].splitlines())


def test_the_tasks_of_one_step_start_again_together(inside):
    made, _, run_dir, _ = inside
    nodes = replace(made, nodes=(tuple("abcdef"),))
    tasks = {task.name: task for task in nodes.start(wide_engine(), run_dir, 1, "s", "t0psecret")}
    assert [tasks[f"headless.{i}"].node for i in range(4)] == ["b", "c", "e", "f"]
    first, second = (tasks[f"headless.{i}"].restart() for i in (2, 3))
    assert first.step is second.step and (first.node, second.node) == ("e", "f")
    assert first.incarnation == 1 and tasks["headless.0"].incarnation == 0


@pytest.mark.parametrize(
    ("gone", "suspected", "lost", "asked"),
    [
        ("x", ["b"], [], ["b"]),
        ("b", ["b"], ["b"], ["a", "a", "b", "b", "b", "c", "d"]),
        ("abcd", ["b"], [], ["a", "b", "b", "c", "d"]),
        ("b", [], ["b"], ["a", "a", "b", "b", "c", "d"]),
        ("cd", [], ["c", "d"], ["a", "a", "b", "c", "c", "d", "d"]),
        ("bcd", [], ["b", "c", "d"], ["a", "a", "b", "b", "c", "c", "d", "d"]),
        ("ab", [], [], ["a", "b", "c", "d"]),
    ],
)
def test_only_the_node_of_a_lost_engine_is_asked_while_it_answers(
    inside, gone, suspected, lost, asked
):
    made, _, _, tmp_path = inside
    find_node = "for word; do [[ $word == --nodelist=* ]] && node=${word#*=}; done"
    (tmp_path / "bin" / "srun").write_text(
        f"#!/bin/bash\n{find_node}\necho $node >>{tmp_path}/asked\n[[ {gone} != *$node* ]]\n"
    )
    assert made.silent_nodes(suspected) == lost
    assert sorted((tmp_path / "asked").read_text().split()) == asked


def test_a_lost_node_of_a_job_on_two_nodes_is_named(inside):
    made, _, _, tmp_path = inside
    (tmp_path / "bin" / "srun").write_text('#!/bin/bash\n[[ "$*" != *--nodelist=b* ]]\n')
    assert replace(made, nodes=(("a", "b"),)).silent_nodes() == ["b"]
    assert replace(made, nodes=(("b", "a"),)).silent_nodes() == []  # the launcher's own node


@pytest.mark.parametrize("where", ["the site says", "the job says", "nowhere"])
def test_a_job_leaves_neither_its_scratch_folder_nor_caches_of_its_run_on_a_node(
    inside, monkeypatch, where
):
    made, _, _, tmp_path = inside
    (tmp_path / "bin" / "srun").write_text(
        '#!/bin/bash\nwhile [[ $1 == --* ]]; do shift; done\nexec "$@"\n'
    )
    if where == "the job says":
        monkeypatch.setenv("TMPDIR", str(tmp_path))
    environment = {
        "the site says": {"TMPDIR": str(tmp_path)},
        "nowhere": {"TMPDIR": str(tmp_path / "not-here")},
    }.get(where, {})
    site = SITE.model_copy(
        update={
            "environment": environment,
            "containers": Containers(images="images", scratch=str(tmp_path)),
        }
    )
    (ours, ours_shared), (theirs, theirs_shared) = (
        (run_directory.start_prefix(path), run_directory.memory_prefix(path))
        for path in (tmp_path / "run-a", tmp_path / "run-b")
    )
    others = {"orrery-8", "orrery-kv-run-b-rl", f"{theirs}0-x"}
    beside = (
        ()
        if where == "nowhere"
        else ("orrery-kv-run-a-rl", "orrery-kv-run-a-evaluate", f"{ours}0-x")
    )
    for name in (*others, *beside, "orrery-7"):
        (tmp_path / name / "attempt_1").mkdir(parents=True)
    shared = tmp_path / "shared"
    shared.mkdir()
    monkeypatch.setattr(of_allocation, "SHARED_MEMORY", shared)
    for name in (
        f"{ours_shared}attempt1",
        f"vllm_offload_{ours_shared}inference.0-4",
        f"vllm_offload_{theirs_shared}inference.0-4",
    ):
        (shared / name).touch()
    replace(made, site=site).clean("orrery-kv-run-a-", ours, ours_shared)
    assert {path.name for path in tmp_path.glob("orrery-*")} == others
    assert [path.name for path in shared.iterdir()] == [
        f"vllm_offload_{theirs_shared}inference.0-4"
    ]


def test_a_snapshot_is_the_code_and_the_metadata_that_plugins_are_found_by(tmp_path):
    code = snapshot(Workspace(ROOT), tmp_path)
    assert code == snapshot(Workspace(ROOT), tmp_path)  # the same tree is the same folder
    whole = {path: path.read_bytes() for path in code.rglob("*") if path.is_file()}
    for damage in (
        lambda path: path.write_bytes(b""),
        lambda path: path.unlink(),
        lambda path: path.with_name("more.py").touch(),
    ):
        damage(code / "orrery" / "launcher" / "task.sh")
        assert snapshot(Workspace(ROOT), tmp_path) == code, (
            "a copy that is not what its name says is written anew"
        )
        assert {path: path.read_bytes() for path in code.rglob("*") if path.is_file()} == whole
    assert (code / "orrery/trainer/loop.py").read_bytes() == (
        ROOT / "packages/orrery/trainer/loop.py"
    ).read_bytes()
    assert (
        "orrery.inference.plugin:register"
        in (code / "orrery-0.1.0.dist-info/entry_points.txt").read_text()
    )
    assert not list(code.rglob("__pycache__")) and not (code / "orrery" / "__init__.py").exists()


def test_options_of_another_job_do_not_reach_slurm():
    env = {
        "SLURM_JOB_ID": "5",
        "SLURM_NTASKS": "2",
        "SBATCH_EXPORT": "NONE",
        "SLURM_CONF": "/c",
        "HOME": "/h",
        "SLURM_HET_SIZE": "2",
    }
    assert clean_environment(env) == {"SLURM_CONF": "/c", "HOME": "/h"}
    assert clean_environment(env, inside=True) == {
        "SLURM_JOB_ID": "5",
        "SLURM_CONF": "/c",
        "HOME": "/h",
        "SLURM_HET_SIZE": "2",
    }
