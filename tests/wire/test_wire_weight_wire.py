"""The files wire: versions appear whole, only rise, and stay while the publisher keeps them."""

import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file

from orrery.manifest.errors import OrreryError
from orrery.wire import nfs
from orrery.wire.fingerprint import digest, tensor_fingerprint
from orrery.wire.weight_wire import (
    WeightPublisher,
    WeightWatch,
    check_library,
    check_room,
    make_weight_sender,
    read_weights,
    remove_weight_dir,
    weight_dir,
)


def tensors(seed):
    generator = torch.Generator().manual_seed(seed)
    yield "b.weight", torch.randn(4, 3, generator=generator)
    yield "a.weight", torch.randn(5, generator=generator).to(torch.bfloat16)
    yield "norm", torch.ones(2, 2).t()


@pytest.fixture(params=(1, 2), ids=lambda param: f"{param}-nodes")
def ends(request, tmp_path, monkeypatch):
    monkeypatch.setattr("orrery.wire.weight_wire.files.SHARED_MEMORY", tmp_path / "shm")
    folder = weight_dir(tmp_path / "run", 1, request.param)
    publisher = WeightPublisher(folder, keep=2)
    yield publisher, WeightWatch(folder)
    publisher.close()


def test_what_is_read_is_what_was_published_bit_for_bit(ends):
    publisher, watch = ends
    assert watch.latest() is None
    published = publisher.publish(3, tensors(0))
    assert watch.latest() == published and published.version == 3
    read = dict(read_weights(published.path))
    assert list(read) and read.keys() == dict(tensors(0)).keys()
    for name, tensor in tensors(0):
        assert torch.equal(read[name], tensor) and read[name].dtype == tensor.dtype
        assert (
            published.fingerprints[name]
            == tensor_fingerprint(tensor)
            == tensor_fingerprint(read[name])
        )
    assert published.digest == digest(published.fingerprints)


def test_as_many_versions_stay_as_are_kept(ends):
    publisher, watch = ends
    published = [publisher.publish(version, tensors(version)) for version in range(4)]
    assert watch.latest() == published[3]
    assert [watch.version(version) is not None for version in range(4)] == [
        False,
        False,
        True,
        True,
    ]
    assert dict(read_weights(published[2].path))
    with pytest.raises(OrreryError, match="keeps only the newest versions"):
        list(read_weights(published[0].path))
    three = WeightPublisher(publisher.folder.with_name("three"), keep=3)
    assert all(
        [
            dict(read_weights(each.path))
            for each in [three.publish(version, tensors(version)) for version in range(3)]
        ]
    )


def test_a_reader_survives_the_removal_of_the_file_it_maps(ends):
    publisher, _ = ends
    reading = read_weights(publisher.publish(0, tensors(0)).path)
    first = next(reading)
    publisher.publish(1, tensors(1))
    publisher.publish(2, tensors(2))
    read = dict([first, *reading])
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors(0))


def test_versions_only_rise(ends):
    publisher, _ = ends
    publisher.publish(2, tensors(2))
    with pytest.raises(OrreryError, match="version 2 after version 2"):
        publisher.publish(2, tensors(2))


def test_a_half_written_version_is_not_seen(ends):
    publisher, watch = ends
    first = publisher.publish(0, tensors(0))

    def breaks():
        yield from tensors(1)
        raise RuntimeError("the trainer died")

    with pytest.raises(RuntimeError, match="the trainer died"):
        publisher.publish(1, breaks())
    assert watch.latest() == first
    assert publisher.publish(1, tensors(1)).version == 1


def test_tied_tensors_are_written_under_both_names(ends):
    publisher, _ = ends
    weight = torch.randn(3, 2)
    read = dict(read_weights(publisher.publish(0, [("embed", weight), ("head", weight)]).path))
    assert torch.equal(read["embed"], weight) and torch.equal(read["head"], weight)


def test_the_same_name_twice_is_refused(ends):
    publisher, watch = ends
    with pytest.raises(OrreryError, match="'w' was given twice"):
        publisher.publish(0, [("w", torch.ones(1)), ("w", torch.ones(1))])
    assert watch.latest() is None


def test_a_version_of_many_shards_is_read_whole(tmp_path):
    publisher = WeightPublisher(tmp_path / "w", shard_bytes=64)
    named = [(f"t{i}", torch.full((8,), float(i))) for i in (5, 1, 4, 2, 3)]
    published = publisher.publish(0, iter(named))
    assert len(list(published.folder.glob("*.safetensors"))) == 3
    read = dict(read_weights(published.path))
    assert read.keys() == dict(named).keys() and all(
        torch.equal(read[name], tensor) for name, tensor in named
    )


def test_a_tensor_that_reuses_its_memory_after_the_next_is_asked_for_is_published_as_it_was(
    tmp_path,
):
    """A gather buffer that every tensor passes through."""
    buffer = torch.empty(4)

    def through_one_buffer():
        for i in range(3):
            yield f"t{i}", buffer.fill_(float(i))

    published = WeightPublisher(tmp_path / "w").publish(0, through_one_buffer())
    assert [tensor[0].item() for _, tensor in read_weights(published.path)] == [0.0, 1.0, 2.0]


def test_close_leaves_nothing_in_shared_memory(ends):
    publisher, _ = ends
    publisher.publish(0, tensors(0))
    publisher.close()
    assert not publisher.folder.exists()


def test_the_folder_is_its_owners_alone_and_one_of_another_is_refused(tmp_path, monkeypatch):
    (tmp_path / "w").mkdir(mode=0o755)
    for folder in (tmp_path / "w", tmp_path / "new"):
        WeightPublisher(folder)
        assert folder.stat().st_mode & 0o777 == 0o700
    (tmp_path / "link").symlink_to(tmp_path / "w")
    with pytest.raises(OrreryError, match="link: is a link or another user's folder"):
        WeightPublisher(tmp_path / "link")
    owner = os.getuid()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    with pytest.raises(OrreryError, match="w: is a link or another user's folder"):
        WeightPublisher(tmp_path / "w")


def test_a_full_disk_is_one_sentence_that_says_how_to_enlarge_it(tmp_path):
    watch = WeightWatch(tmp_path / "w")
    script = (
        "import resource, sys, torch; from orrery.wire.weight_wire import WeightPublisher\n"
        "from orrery.manifest.errors import OrreryError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))\n"
        f"try: WeightPublisher({str(tmp_path / 'w')!r}).publish(0, [('a', torch.ones(1 << 14))])\n"
        "except OrreryError as error: print(error)"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    said = subprocess.run(
        [sys.executable, "-c", script], check=True, env=environment, capture_output=True, text=True
    ).stdout
    assert "weights cannot be written" in said and "mount -o remount,size=" in said
    assert watch.latest() is None


def test_a_marker_is_decoded_once_however_often_it_is_looked_for(tmp_path, monkeypatch):
    publisher, watch, decoded = WeightPublisher(tmp_path / "w"), WeightWatch(tmp_path / "w"), []
    monkeypatch.setattr(
        watch,
        "version",
        lambda version: decoded.append(version) or WeightWatch.version(watch, version),
    )
    for version in (0, 1):
        publisher.publish(version, [("a", torch.ones(4))])
        assert [watch.latest().version for _ in range(5)] == [version] * 5
    assert decoded == [0, 1]
    (tmp_path / "w" / "version_1.json").unlink()
    assert watch.latest().version == 0


def test_a_damaged_marker_is_named(tmp_path):
    (tmp_path / "version_7.json").write_text("{")
    with pytest.raises(OrreryError, match=r"version_7\.json: not a marker"):
        WeightWatch(tmp_path).latest()


def test_the_watch_needs_no_torch(tmp_path):
    script = (
        "import sys; from orrery.wire.weight_wire import WeightWatch\n"
        "from orrery.wire import checkpoints, packing, rendezvous, rollout_wire\n"
        f"assert WeightWatch({str(tmp_path)!r}).latest() is None; "
        "assert 'torch' not in sys.modules, 'torch was imported'"
    )
    subprocess.run(
        [sys.executable, "-c", script],
        check=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
    )


def test_on_several_nodes_versions_are_in_the_runs_folder_and_still_their_owners_alone(tmp_path):
    run_dir = tmp_path / "a-0123"
    publisher = WeightPublisher(weight_dir(run_dir, 2, num_nodes=2), keep=2)
    assert publisher.folder == run_dir / "weights" / "wire" / "attempt2"
    assert publisher.folder.stat().st_mode & 0o777 == 0o700
    remove_weight_dir(run_dir, 2, num_nodes=2)
    assert not publisher.folder.exists()


def test_data_is_on_disk_before_its_marker_is_in_place(tmp_path, monkeypatch):
    """Another node must not see a version's marker before the version."""
    events = []
    fsync, replace, rename = os.fsync, os.replace, os.rename

    def record(event, then):
        def call(*args):
            events.append(
                (
                    event,
                    os.path.basename(
                        args[-1]
                        if isinstance(args[-1], str)
                        else os.readlink(f"/proc/self/fd/{args[-1]}")
                    ),
                )
            )
            return then(*args)

        return call

    monkeypatch.setattr(os, "fsync", record("fsync", fsync))
    monkeypatch.setattr(
        os,
        "replace",
        lambda source, target: record("rename", lambda _: replace(source, target))(str(target)),
    )
    monkeypatch.setattr(
        os,
        "rename",
        lambda source, target: record("rename", lambda _: rename(source, target))(str(target)),
    )
    WeightPublisher(tmp_path / "wire").publish(1, tensors(0))
    shard, version, marker = (
        ("fsync", "00000.safetensors"),
        ("rename", "version_1"),
        ("rename", "version_1.json"),
    )
    assert events.index(shard) < events.index(version) < events.index(marker)
    assert events[events.index(version) - 1] == ("fsync", f".version_1.{os.getpid()}")
    assert events[-1] == ("fsync", "wire")


def test_a_version_that_another_node_shows_late_is_waited_for(tmp_path):
    published = WeightPublisher(tmp_path).publish(1, tensors(0))
    hidden = published.folder.rename(tmp_path / "hidden")
    threading.Timer(0.3, lambda: hidden.rename(published.folder)).start()
    assert dict(read_weights(published.path)).keys() == dict(tensors(0)).keys()


def test_what_does_not_appear_is_said_after_the_time_that_it_may_take(tmp_path, monkeypatch):
    begin = time.monotonic()
    assert not nfs.appears(tmp_path / "no" / "file", within_s=0.15)
    assert 0.15 <= time.monotonic() - begin < 5
    assert nfs.read(tmp_path / "file") is None
    with pytest.raises(IsADirectoryError):
        nfs.read(tmp_path)


def test_folders_differ_by_run_and_attempt(tmp_path, monkeypatch):
    monkeypatch.setattr("orrery.wire.weight_wire.files.SHARED_MEMORY", tmp_path)
    folders = {
        weight_dir(tmp_path / run, attempt)
        for run in ("a-0123", "b-4567", "c/a-0123")
        for attempt in (1, 2)
    }
    assert len(folders) == 6
    assert weight_dir(tmp_path / "a-0123", 1).name.startswith("orrery-0123-"), (
        "by which the launcher finds it"
    )
    weight_dir(tmp_path / "a", 1).mkdir()
    remove_weight_dir(tmp_path / "a", 1)
    remove_weight_dir(tmp_path / "a", 1)
    assert not weight_dir(tmp_path / "a", 1).exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8])
def test_a_folder_is_published_without_torch_and_has_the_fingerprints_that_torch_finds(
    tmp_path, dtype
):
    generator = torch.Generator().manual_seed(1)
    tensors = {
        "a.weight": (torch.randn(700, 513, generator=generator) * 50).to(
            dtype
        ),  # more than one chunk
        "b": torch.zeros(3, dtype=dtype),
        "empty": torch.zeros(0, 4, dtype=dtype),
    }
    folder = tmp_path / "policy"
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    wire = WeightPublisher(tmp_path / "wire")
    published = wire.publish_folder(3, folder)
    assert published.fingerprints == {
        name: tensor_fingerprint(tensor) for name, tensor in tensors.items()
    }
    assert (
        published.digest == WeightPublisher(tmp_path / "other").publish(3, tensors.items()).digest
    )
    read = dict(read_weights(published.path))
    assert all(torch.equal(read[name], tensor) for name, tensor in tensors.items())
    with pytest.raises(OrreryError, match="no weights found"):
        wire.publish_folder(4, tmp_path)
    assert WeightWatch(tmp_path / "wire").latest().version == 3


def test_a_folder_is_published_without_a_copy_and_stays_when_its_version_goes(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    policies = [Path(f"policy_{seed}") for seed in range(3)]
    for seed, policy in enumerate(policies):
        policy.mkdir()
        for name, tensor in tensors(seed):
            save_file({name: tensor.contiguous()}, policy / f"{name}.safetensors")
    wire = WeightPublisher(tmp_path / "wire", keep=2)
    before = {path: path.read_bytes() for policy in policies for path in policy.iterdir()}
    published = [wire.publish_folder(version, policy) for version, policy in enumerate(policies)]
    assert not published[0].folder.exists()
    shards = sorted(published[2].folder.iterdir())
    assert [shard.readlink() for shard in shards] == sorted(
        tmp_path / path for path in policies[2].iterdir()
    )
    wire.close()
    assert {path: path.read_bytes() for policy in policies for path in policy.iterdir()} == before


@pytest.mark.parametrize(
    ("num_nodes", "enlarge"), [(1, "mount -o remount,size="), (2, "free some there")]
)
def test_versions_that_do_not_fit_beside_one_another_are_refused_in_one_sentence(
    tmp_path, monkeypatch, num_nodes, enlarge
):
    (tmp_path / "run").mkdir()
    folder = {1: tmp_path / "shm", 2: tmp_path / "run"}[num_nodes]
    monkeypatch.setattr("orrery.wire.weight_wire.files.SHARED_MEMORY", tmp_path / "shm")
    free_bytes = {folder: 4 * 10**9}  # three versions, and the unfinished version
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=free_bytes[path]))
    check_room(tmp_path / "run", num_nodes, 3, 10**9)
    with pytest.raises(OrreryError) as refused:
        check_room(tmp_path / "run", num_nodes, 3, 10**9 + 1)
    words = (
        f"transport.weights: 'files' needs 4.00 GB in {folder} for 4 versions of 1.00 GB, "
        "but 4.00 GB are free"
    )
    assert words in str(refused.value) and enlarge in str(refused.value)


@pytest.mark.parametrize("end", ["trainer", "engine"])
def test_a_wire_without_its_package_is_refused_as_either_end_starts(tmp_path, monkeypatch, end):
    for module in ("nixl", "nixl._api"):
        monkeypatch.setitem(sys.modules, module, None)  # an import of it is an ImportError
    with pytest.raises(
        OrreryError,
        match=r"^transport\.weights 'nixl': .*\. "
        r"Install the nixl version in locks/, or set transport\.weights to 'nccl'$",
    ):
        if end == "trainer":
            make_weight_sender("nixl", tmp_path, 1, 1, "127.0.0.1", 0, 1, torch.device("cpu"))
        else:
            check_library("nixl")
    assert list(tmp_path.iterdir()) == []
    check_library("nccl")
