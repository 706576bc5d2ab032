"""Who gets which cores, devices and variables."""

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orrery.launcher.process import environment, share_cores, share_devices
from orrery.launcher.site import Site
from orrery.manifest.plan import ProcessPlan, StagePlan, on_devices
from orrery.runtime import run_directory


def stage(trainers=0, engines=0, orchestrator=True, devices=1):
    made = [ProcessPlan("inference", i, "m", devices, "with_stage") for i in range(engines)]
    made += [ProcessPlan("router", 0, "m", 0, "with_stage")] * (engines > 1)
    made += [ProcessPlan("orchestrator", 0, "m", 0, "itself")] * orchestrator
    return made + [ProcessPlan("trainer", i, "m", 1, "itself") for i in range(trainers)]


def test_on_two_cores_engine_and_trainer_are_apart_and_the_others_run_anywhere():
    assert share_cores([0, 1], stage(trainers=1, engines=1)) == {
        ("trainer", 0): {0},
        ("inference", 0): {1},
    }
    assert share_cores([0, 1], stage(trainers=2, engines=2)) == {
        ("trainer", 0): {0}, ("trainer", 1): {0}, ("inference", 0): {1}, ("inference", 1): {1}
    }  # fmt: skip


def test_a_stage_without_engines_gives_the_trainers_all_cores():
    assert share_cores([0, 1], stage(trainers=1, orchestrator=False)) == {("trainer", 0): {0, 1}}
    assert share_cores([0, 1], stage(trainers=2, orchestrator=False)) == {
        ("trainer", 0): {0},
        ("trainer", 1): {1},
    }


def test_engines_alone_leave_a_core_to_the_orchestrator_when_there_is_one():
    assert share_cores([0, 1], stage(engines=1)) == {("inference", 0): {0}}
    assert share_cores([0, 1], stage(engines=2)) == {("inference", 0): {0}, ("inference", 1): {1}}


def test_one_core_is_shared_by_all():
    assert set(share_cores([5], stage(trainers=2, engines=2)).values()) == {frozenset({5})}


cores = st.sets(st.integers(0, 63), min_size=1, max_size=32)


@given(cores, st.integers(0, 5), st.integers(0, 5), st.booleans())
def test_every_computing_process_gets_cores_and_the_kinds_do_not_overlap(
    cores, trainers, engines, orchestrator
):
    processes = stage(trainers, engines, orchestrator)
    shares = share_cores(sorted(cores), processes)
    assert set(shares) == {
        (p.role, p.index) for p in processes if p.role in ("trainer", "inference")
    }
    assert all(share and share <= cores for share in shares.values())
    by_kind = {
        kind: set().union(*[share for (role, _), share in shares.items() if role == kind])
        for kind in ("trainer", "inference")
    }
    if len(cores) > 1:
        assert not by_kind["trainer"] & by_kind["inference"]
    for kind, count in (("trainer", trainers), ("inference", engines)):
        mine = [share for (role, _), share in shares.items() if role == kind]
        if mine and len(set(mine)) == count:
            assert sum(map(len, mine)) == len(set().union(*mine)), (
                "processes of a kind share cores though there are enough"
            )


def placed(processes, shared=False):
    return on_devices(StagePlan("rl", (), processes), shared).processes


def test_roles_that_share_devices_each_begin_at_the_first():
    plans = placed(stage(trainers=2, engines=1, devices=2), shared=True)
    assert share_devices("01", plans) == {
        ("inference", 0): ("0", "1"),
        ("orchestrator", 0): (),
        ("trainer", 0): ("0",),
        ("trainer", 1): ("1",),
    }
    with pytest.raises(ValueError, match="needs 2 devices, but this machine offers 1"):
        share_devices("0", plans)


def test_devices_are_shared_out_in_order_and_never_twice():
    plans = placed(stage(trainers=2, engines=2, devices=2))
    shares = share_devices("01234567", plans)
    assert (shares["inference", 1], shares["trainer", 0], shares["orchestrator", 0]) == (
        ("2", "3"),
        ("4",),
        (),
    )
    with pytest.raises(ValueError, match="needs 6 devices, but this machine offers 4"):
        share_devices("0123", plans)


def test_a_device_named_twice_serves_two_processes_and_never_one():
    plans = placed(stage(trainers=2, engines=2, devices=2))
    assert share_devices("012301", plans)["trainer", 1] == ("1",)
    with pytest.raises(
        ValueError,
        match=r"inference\.0 would get the devices 0,0 of 0,0,1,2,3,4, but a device is named twice",
    ):
        share_devices("001234", plans)


def test_the_environment_hides_accelerators_on_a_cpu_run_and_shows_a_process_its_own():
    base = {"PATH": "/bin", "OMP_NUM_THREADS": "64", "CUDA_VISIBLE_DEVICES": "4,5,6"}
    assert environment(base, Site(), "t", frozenset({0}), None)["CUDA_VISIBLE_DEVICES"] == ""
    gpu = environment(base, Site(), "t", None, ("5", "6"))
    assert (
        gpu["CUDA_VISIBLE_DEVICES"],
        gpu["PATH"],
        gpu["OMP_NUM_THREADS"],
        gpu["ORRERY_START"],
    ) == ("5,6", "/bin", "1", "t")
    many = frozenset(range(32))
    assert environment({}, Site(), "t", many, None)["OMP_NUM_THREADS"] == "4"
    shared = Site(environment={"OMP_NUM_THREADS": "1"})
    assert environment({}, shared, "t", many, None)["OMP_NUM_THREADS"] == "1"


def test_roles_reach_one_another_whatever_proxy_the_site_has():
    for base, wanted in (
        ({}, "127.0.0.1,localhost"),
        ({"no_proxy": "intranet"}, "intranet,127.0.0.1,localhost"),
    ):
        made = environment({"HTTP_PROXY": "http://proxy:3128", **base}, Site(), "t", None, None)
        assert made["NO_PROXY"] == made["no_proxy"] == wanted


def test_shared_memory_of_this_run_is_removed_and_that_of_the_same_run_elsewhere_is_not(tmp_path):
    run_dir, elsewhere, root = (
        tmp_path / "a" / "r-0123456789ab",
        tmp_path / "b" / "r-0123456789ab",
        tmp_path / "shm",
    )
    for path in (run_dir, elsewhere):
        (root / f"{run_directory.memory_prefix(path)}attempt1" / "version_3").mkdir(parents=True)
    assert [
        path.name
        for path in run_directory.remove_memory(run_directory.memory_prefix(run_dir), root)
    ] == [f"{run_directory.memory_prefix(run_dir)}attempt1"]
    kept = f"{run_directory.memory_prefix(elsewhere)}attempt1"
    assert [path.name for path in root.iterdir()] == [kept]


def test_the_weight_wire_names_its_folder_as_the_launcher_looks_for_it(tmp_path):
    weight_wire = pytest.importorskip("orrery.wire.weight_wire")
    run_dir = tmp_path / "r-0123456789ab"
    folder = weight_wire.weight_dir(run_dir, 3)
    assert folder.parent == Path("/dev/shm") and folder.name.startswith(
        run_directory.memory_prefix(run_dir)
    )
