"""The doctor on a machine with GPUs: judgements of fake answers of torch and nvidia-smi."""

import json
import re
import sys
from pathlib import Path

import pytest

from orrery.launcher import process
from orrery.launcher.doctor import NEEDS_DRIVER, PROBE, _ask, examine_gpus, judge_gpus
from orrery.launcher.doctor_judge import GIB, Answer, Finding
from orrery.launcher.process import check_packages
from orrery.manifest.errors import OrreryError

ROOT = Path(__file__).parents[2]
H100, A100, V100 = (
    ["NVIDIA H100 80GB HBM3", [9, 0]],
    ["NVIDIA A100-SXM4-40GB", [8, 0]],
    ["Tesla V100", [7, 0]],
)


def judged(
    *devices: list, no_peer: list | None = None, driver: str = "590.44", free: float = 79.0
) -> dict[str, Finding]:
    listed = [[*device, int(free * GIB), 80 * GIB] for device in devices]
    probed = json.dumps({"error": "", "devices": listed, "no_peer": no_peer or []})
    smi = f"{driver}\n" * len(devices)
    findings = judge_gpus(Answer(0, smi, ""), Answer(0, probed, ""))
    return {one.what: one for one in findings}


def test_two_idle_gpus_of_one_kind_need_no_remedy():
    found = judged(H100, H100)
    assert [one.remedy for one in found.values()] == [""] * 4
    assert found["GPUs"].found == "2 × NVIDIA H100 80GB HBM3"
    assert found["GPU memory"].found == "79.0 of 80.0, 79.0 of 80.0 GiB free"
    assert found["driver"].found == "590.44" and "between all" in found["peer access"].found


def test_gpus_of_different_kinds_name_the_devices_to_take():
    finding = judged(A100, H100, H100)["GPUs"]
    assert finding.found == "1 × NVIDIA A100-SXM4-40GB, 2 × NVIDIA H100 80GB HBM3"
    assert finding.remedy.endswith(
        "type `export CUDA_DEVICE_ORDER=PCI_BUS_ID CUDA_VISIBLE_DEVICES=1,2`"
    )
    assert finding.is_required  # every run for GPUs refuses such a machine


def test_what_is_worse_without_ending_a_run_is_a_note():
    found = judged(H100, H100, H100, no_peer=[[0, 2], [2, 0]], free=60)
    assert found["peer access"].found == "none between 0-2"
    assert "device 0, 1, 2; `nvidia-smi` lists them" in found["GPU memory"].remedy
    assert not found["peer access"].is_required and not found["GPU memory"].is_required


def test_a_gpu_without_bfloat16_is_refused():
    finding = judged(H100, V100)["GPUs"]
    assert finding.is_required and "leave out device 1 (7.0)" in finding.remedy


def test_a_driver_that_is_too_old_is_the_one_finding():
    found = judged(H100, driver="535.104.05")
    assert list(found) == ["driver"] and f"{NEEDS_DRIVER} or newer" in found["driver"].remedy
    text = (ROOT / "locks/install.sh").read_text()
    assert re.findall(r"^NEEDS_DRIVER=(\S+)", text, re.MULTILINE) == [NEEDS_DRIVER]


@pytest.mark.parametrize(
    ("probed", "says"),
    [
        (
            Answer(0, '{"error": "Found no NVIDIA driver\\n here", "devices": []}', ""),
            "driver here",
        ),
        (Answer(0, '{"error": "", "devices": []}', ""), "torch sees no device"),
        (Answer(1, "", "ImportError: libcudart"), "libcudart"),
        (Answer(-11, "", ""), "exit code -11"),
    ],
)
def test_a_machine_without_a_device_is_told_so_in_one_sentence(probed, says):
    (finding,) = judge_gpus(Answer(None, "", "nvidia-smi: not found"), probed)
    assert says in finding.found and "--gpus all" in finding.remedy and finding.is_required


def test_the_environment_decides_whether_gpus_are_examined(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    there, missing = Answer(0, "590.44\n590.44\n", ""), Answer(None, "", "not found")
    (finding,) = examine_gpus(lambda *_, **__: there)
    assert "HARDWARE=cuda" in finding.remedy and not finding.is_required
    for broken in (Answer(9, "", "it failed"), Answer(0, "No devices were found\n", "")):
        (finding,) = examine_gpus(lambda *_, answer=broken, **__: answer)
        said = (broken.out + broken.said).strip()
        assert f"ends with code {broken.code} ({said})" in finding.found
        assert "driver" in finding.remedy and not finding.is_required
    (tmp_path / "hardware").write_text("cuda\n")
    asked = []

    def ask(*argv: str, **_: float) -> Answer:
        asked.append(argv)
        return missing

    assert examine_gpus(ask)[0].is_required
    assert asked[-1] == (sys.executable, "-c", PROBE)


def test_a_machine_without_gpus_is_told_what_only_a_gpu_node_can_check(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    (note,) = examine_gpus(lambda *_, **__: Answer(None, "", "not found"))
    assert not note.is_required
    for unchecked in ("driver", "device kinds", "GPU memory", "peer access"):
        assert unchecked in note.found
    assert "`make setup HARDWARE=cuda && .venv/bin/orrery doctor` on a GPU node" in note.remedy


def test_a_run_for_other_hardware_than_the_packages_are_for_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    for needs_gpus in (True, False):
        check_packages("demo", needs_gpus)  # carried packages have no marker
    (tmp_path / "hardware").write_text("cuda\n")
    monkeypatch.setattr(process, "missing_gpu", lambda: None)
    check_packages("demo", needs_gpus=True)
    said = r"for hardware cpu, .*`make setup HARDWARE=cpu`.*`orrery render demo --on-this-machine`"
    with pytest.raises(OrreryError, match=said):
        check_packages("demo", needs_gpus=False)


@pytest.mark.parametrize("needs_gpus", [True, False])
def test_packages_for_gpus_on_a_machine_without_a_driver_are_refused(
    needs_gpus, tmp_path, monkeypatch
):
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    (tmp_path / "hardware").write_text("cuda\n")
    said = r"this machine has no NVIDIA driver \(no `nvidia-smi`\). Type `orrery doctor`"
    with pytest.raises(OrreryError, match=said):
        check_packages("demo", needs_gpus)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(OrreryError, match="CUDA_VISIBLE_DEVICES is empty"):
        check_packages("demo", needs_gpus)
    (tmp_path / "hardware").write_text("cpu\n")
    if not needs_gpus:
        check_packages("demo", needs_gpus)


def test_the_probe_prints_json_where_torch_finds_no_device():
    answer = _ask(sys.executable, "-c", PROBE, within_s=120)
    assert answer.code == 0, answer.said
    found = json.loads(answer.out)
    assert set(found) == {"error", "devices", "no_peer"}
    assert found["error"] or found["devices"]
