"""The GPUs of a fake `nvidia-smi`, and runs fitted to them."""

import shutil

import pytest
from manifest_specs import REPOSITORY, checkout

from orrery.manifest import cli, devices, machine
from orrery.manifest.devices import (
    DEVICES,
    device_of,
    find_device,
    rates_of,
    told_accelerator,
    usable_bytes,
)
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import id12, load
from orrery.manifest.machine import Machine, adapt, gpus, refuse_other_device, this_machine
from orrery.manifest.render import Evaluator, render

TOLD = {  # memory (MiB) and compute capability of GPUs that `DEVICES` lacks
    "Tesla V100": "16384, 7.0",
    "NVIDIA RTX 4000 SFF Ada Generation": "20475, 8.9",
    "NVIDIA GB10": "[N/A], 12.1",
}
H100, H200 = (DEVICES[key].names[0] for key in ("h100", "h200"))


@pytest.fixture
def driver(tmp_path, monkeypatch):
    """Put an `nvidia-smi` with these GPUs, or with this shell script, on an otherwise bare PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)

    def set_up(*names, script=None):
        rows = [
            f"{index}, GPU-{index}a0b, {TOLD.get(name, '81559, 9.0')}, {name}"
            for index, name in enumerate(names)
        ]
        asked = " ".join(machine.QUERY[1:])
        script = script or "\n".join(
            [f'[ "$*" = "{asked}" ] || exit 6', *(f"echo '{row}'" for row in rows)]
        )
        file = folder / "nvidia-smi"
        file.write_text(f"#!/bin/sh\n{script}\n")
        file.chmod(0o755)

    return set_up


@pytest.fixture
def workspace(tmp_path, monkeypatch):
    """The repository's specs, to write beside."""
    root = tmp_path / "checkout"
    (root / "manifests").mkdir(parents=True)
    shutil.copytree(REPOSITORY.root / "jsonnet", root / "jsonnet")
    (root / "locks").mkdir()
    for lock in ("cpu.txt", "cuda.txt"):
        shutil.copy(REPOSITORY.root / "locks" / lock, root / "locks")
    monkeypatch.chdir(root)
    monkeypatch.setattr(cli, "check_tasks", lambda manifests: [])  # tested elsewhere
    return cli.find_workspace()


def test_the_driver_tells_the_devices_and_cuda_visible_devices_chooses(driver, monkeypatch):
    assert this_machine().accelerator == "cpu"
    driver(H100, H100, H200)
    for chosen, found in [("0,1", (H100, 2)), ("2", (H200, 1)), ("0,0", (H100, 1))]:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)
        assert (this_machine().name, this_machine().num_devices) == found
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-2a")
    assert {index: gpu.name for index, gpu in gpus().items()} == {"2": H200}
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().accelerator == "cpu"


def test_devices_that_no_run_can_use_are_one_sentence(driver, monkeypatch, tmp_path):
    monkeypatch.setattr(machine, "DEVICE_FILE", tmp_path)
    with pytest.raises(OrreryError, match=r"is a GPU, and `nvidia-smi` is not installed"):
        this_machine()
    driver(H200, H100, H100)
    with pytest.raises(OrreryError, match=r"1 × NVIDIA H200 and 2 × .* CUDA_VISIBLE_DEVICES=1,2`"):
        this_machine()
    driver("Tesla V100")
    with pytest.raises(OrreryError, match=r"'Tesla V100': has compute capability 7.0, and bf"):
        this_machine()
    driver("NVIDIA GB10")
    with pytest.raises(OrreryError, match=r"'NVIDIA GB10': .* has no such device. Add a row"):
        this_machine()
    driver(script="echo no devices were found; exit 6")
    with pytest.raises(OrreryError, match=r"code 6 .no devices were found.. Type `orrery doctor`"):
        this_machine()
    driver(script="echo No devices were found")
    with pytest.raises(OrreryError, match=r"lists no GPU \(No devices were found\)\. Give this"):
        this_machine()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert this_machine().accelerator == "cpu"


def test_a_gpu_without_a_row_is_described_by_its_driver(driver, workspace, capsys):
    name = "NVIDIA RTX 4000 SFF Ada Generation"
    driver(name)
    cli.hardware()
    told = capsys.readouterr().out
    assert "(rtx_4000_sff_ada_generation_sm89_19gb): 19 GB each, compute capability 8.9. " in told
    cli.render(["smollm2_demo"], on_this_machine=True)
    adapted = "smollm2_demo_on_rtx_4000_sff_ada_generation_sm89_19gb"
    manifest = load(workspace.manifest_path(adapted))
    refuse_other_device(manifest, name)
    with pytest.raises(OrreryError, match=r"is for rtx_4000_sff_ada_generation_sm89_19gb and this"):
        refuse_other_device(manifest, "NVIDIA RTX 4000 Ada Generation")
    rates = rates_of(manifest.hardware.accelerator)
    assert rates.source.startswith("unknown device; ") and usable_bytes(
        manifest.hardware.accelerator
    ) == pytest.approx(0.99 * 19 * 2**30)
    assert rates.dense_flops == min(
        rates_of(key).dense_flops for key, one in DEVICES.items() if one.capability == (8, 9)
    )


@pytest.mark.parametrize("accelerator", ["l4_sm75_16gb", "l4_sm89_0gb", "l4_24gb", "gpu"])
def test_an_accelerator_that_describes_no_usable_device_is_refused(accelerator):
    assert find_device(accelerator) is None
    with pytest.raises(OrreryError, match=r"is no GPU. Type `orrery hardware`"):
        device_of(accelerator)


def test_rows_have_names_of_their_own_and_none_looks_like_a_description():
    names = [name for device in DEVICES.values() for name in device.names]
    assert len(set(names)) == len(names)
    assert not any(devices.TOLD.fullmatch(key) for key in DEVICES)


@pytest.mark.parametrize("names", [(), (H100,), (H200,) * 5])
def test_the_axis_of_a_machine_makes_a_run_that_fits_it(names, driver, workspace, capsys):
    if names:
        driver(*names)
    cli.hardware()
    *devices, last = capsys.readouterr().out.splitlines()
    assert last == "wrote jsonnet/hardware/this_machine.libsonnet"
    assert not names or f"{len(names)} × {names[0]}" in devices[0]
    run = """(import 'lib/named.libsonnet')({
      mine: (import 'runs/smollm2_demo.jsonnet').smollm2_demo
        + (import 'hardware/this_machine.libsonnet'),
    })"""
    file = workspace.root / "jsonnet" / "runs" / "mine.jsonnet"
    file.write_text(run)
    hardware = render(workspace, "mine").manifest.hardware
    assert hardware.accelerator == this_machine().accelerator
    assert hardware.devices_per_node == this_machine().num_devices
    assert hardware.shared_devices == (len(names) == 1)


def test_an_axis_replaces_its_own_file_and_no_other(driver, workspace):
    cli.hardware()
    driver(H100)
    cli.hardware()
    file = workspace.root / "jsonnet" / "hardware" / "cpu.libsonnet"
    before = file.read_bytes()
    with pytest.raises(OrreryError, match=r"cpu.libsonnet: exists, and this command did not write"):
        cli.hardware(file)
    assert file.read_bytes() == before
    with pytest.raises(OrreryError, match="there is no folder"):
        cli.hardware(workspace.root / "elsewhere" / "x.libsonnet")


FITTED = [
    ("asynchrony_h200_1", (H100,), (1, 1, True)),
    ("asynchrony_h200_1", (DEVICES["rtx_4090"].names[0],) * 2, (1, 1, True)),
    ("asynchrony_h200_8", (DEVICES["b200"].names[0],) * 4, (2, 2, False)),
    ("reverse_text", (H100,) * 2, (1, 1, False)),
]


@pytest.mark.parametrize(("name", "names", "found"), FITTED)
def test_a_run_on_this_machine_is_a_run_of_its_own(name, names, found, driver, workspace, capsys):
    driver(*names)
    cli.render([name], on_this_machine=True)
    accelerator = this_machine().accelerator
    adapted = f"{name}_on_{accelerator}"
    said = capsys.readouterr().out.splitlines()
    assert [line for line in said if not line.startswith("set ")] == [
        f"wrote jsonnet/runs/{adapted}.jsonnet",
        f"wrote manifests/{adapted}.json",
        f"start with `make demo RUN={adapted}`",
    ]
    cli.check([adapted])
    manifest, before = load(workspace.manifest_path(adapted)), render(workspace, name).manifest
    assert id12(manifest) != id12(before) and manifest.hardware.accelerator == accelerator
    assert manifest.stages == before.stages and manifest.tasks == before.tasks
    assert found == (
        manifest.trainer.mesh.world_size,
        manifest.inference.num_replicas,
        manifest.hardware.shared_devices,
    )
    assert manifest.inference.kv_cache_bytes < DEVICES[accelerator].memory_bytes
    capsys.readouterr()
    cli.render([adapted], on_this_machine=True)  # it fits, so it stays
    assert capsys.readouterr().out.splitlines()[0] == f"kept  manifests/{adapted}.json"


def test_a_run_that_cannot_be_fitted_is_refused_and_nothing_is_written(driver, workspace):
    before = sorted(workspace.root.rglob("*"))
    with pytest.raises(OrreryError, match=r"_fp8_on_cpu: inference.kv_cache_bytes"):
        cli.render(["smollm2_demo", "qwen3_30b_a3b_16k_fp8"], on_this_machine=True)
    with pytest.raises(OrreryError, match="needs a run"):
        cli.render(None, on_this_machine=True)
    assert sorted(workspace.root.rglob("*")) == before


def test_a_run_that_is_too_large_gets_the_value_with_which_it_fits(driver, workspace, capsys):
    (workspace.root / "jsonnet" / "runs" / "broken.jsonnet").write_text("{")
    driver(*(H100,) * 8)
    cli.render(["qwen3_8b_8k"], on_this_machine=True)
    first, *_, last = capsys.readouterr().out.splitlines()
    assert first == (
        "set trainer.memory.activation_checkpointing to {'kind': 'selective', 'keep': "
        "['attention']}, so that qwen3_8b_8k_on_h100 fits"
    )
    assert last == "start with `make demo RUN=qwen3_8b_8k_on_h100`"
    found = load(workspace.manifest_path("qwen3_8b_8k_on_h100"))
    assert found.trainer.memory.activation_checkpointing.keep == ("attention",)


def test_a_run_that_no_value_fits_is_refused_and_nothing_is_written(driver, workspace):
    driver(DEVICES["a10"].names[0])
    before = sorted(workspace.root.rglob("*"))
    said = r"qwen3_8b_8k_on_a10, not written: it cannot start: .* a device needs .* GiB and has"
    with pytest.raises(OrreryError, match=said):
        cli.render(["qwen3_8b_8k"], on_this_machine=True)
    assert sorted(workspace.root.rglob("*")) == before


def test_a_small_gpu_gets_a_small_cache():
    small = told_accelerator("NVIDIA Foo", (8, 9), 4 << 30)
    assert Machine(small, "NVIDIA Foo", 1).cache_bytes(is_shared=True) == 256 << 20


def test_edits_of_a_written_run_file_are_kept_and_an_unedited_file_is_written_anew(
    driver, workspace
):
    file = workspace.root / "jsonnet" / "runs" / "asynchrony_h200_1_on_h100.jsonnet"
    driver(H100)
    cli.render(["asynchrony_h200_1"], on_this_machine=True)
    written = file.read_text()
    assert "Overwritten by that command, unless edited (" in written.partition("\n")[0]
    driver(H100, H100)
    cli.render(["asynchrony_h200_1"], on_this_machine=True)  # the text differs, no one edited it
    assert file.read_text().partition("\n")[2] != written.partition("\n")[2]
    edited = file.read_text().replace("+ {\n", "+ {\n  seed: 7,\n", 1)
    assert "seed: 7" in edited
    file.write_text(edited)
    manifest = workspace.manifest_path("asynchrony_h200_1_on_h100").read_bytes()
    says = (
        r"asynchrony_h200_1_on_h100\.jsonnet: was edited after this command wrote it; type `orrery "
        r"render asynchrony_h200_1_on_h100` to keep the edits, or remove the file to write it anew$"
    )
    with pytest.raises(OrreryError, match=says):
        cli.render(["asynchrony_h200_1"], on_this_machine=True)
    assert file.read_text() == edited
    assert workspace.manifest_path("asynchrony_h200_1_on_h100").read_bytes() == manifest
    cli.render(["asynchrony_h200_1_on_h100"])
    assert load(workspace.manifest_path("asynchrony_h200_1_on_h100")).seed == 7
    axis = workspace.root / "jsonnet" / "hardware" / "this_machine.libsonnet"
    cli.hardware()
    axis.write_text(f"{axis.read_text()}// mine\n")
    driver(H100)
    with pytest.raises(OrreryError, match=r"; name another file, or remove the file to write"):
        cli.hardware()


def test_a_run_file_that_a_person_wrote_is_kept(driver, workspace):
    file = workspace.root / "jsonnet" / "runs" / "asynchrony_h200_1_on_h100.jsonnet"
    file.write_text("{}\n")
    driver(H100)
    with pytest.raises(OrreryError, match="exists, and this command did not write it"):
        cli.render(["asynchrony_h200_1"], on_this_machine=True)
    assert file.read_text() == "{}\n"


def test_a_manifest_for_another_device_is_refused_with_what_to_type(tmp_path):
    specs = checkout(tmp_path)
    refuse_other_device(render(specs, "words").manifest, H100)  # for CPUs: it hides the GPUs
    wide, *_ = adapt(REPOSITORY, "glm5_run", Machine("h200", H200, 1))
    one = wide.manifest.inference
    assert (one.num_devices, one.nodes_per_replica, one.prefill) == (1, 1, None)
    adapted, *_ = adapt(REPOSITORY, "asynchrony_h200_1", Machine("h200", H200, 1))
    refuse_other_device(adapted.manifest, H200)
    with pytest.raises(OrreryError) as caught:
        refuse_other_device(adapted.manifest, H100)
    assert str(caught.value) == (
        "hardware.accelerator 'h200': asynchrony_h200_1 is for NVIDIA H200 and this machine has "
        "NVIDIA H100 80GB HBM3. Type `orrery render asynchrony_h200_1 --on-this-machine` and start "
        "the run that it writes"
    )


def test_an_adapted_run_names_only_what_changes():
    _, text, _ = adapt(REPOSITORY, "asynchrony_h200_1", Machine("h100", H100, 2))
    assert "layout" not in text and "accelerator: 'h100'" in text
    assert list(Evaluator(REPOSITORY)(text)) == ["asynchrony_h200_1_on_h100"]
