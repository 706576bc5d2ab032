"""Run the tests that only GPUs can run, and record their outcome.

They cover kernels, rings and exchanged experts, layouts over NCCL, offloads, checkpoints and
flight recorders. Each group is a process with a time limit; past it the group counts as one failed
test. Skipped tests are counted apart. With `--only` the other groups' rows stay as they are.

    python benchmarks/trainer/gpu_checks.py                       # one GPU does, two do more
    python benchmarks/trainer/gpu_checks.py --only layouts flight_recorders
    python benchmarks/trainer/gpu_checks.py --check               # collect the tests, anywhere
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from dataclasses import dataclass, field
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.identity import commit
from record import ROOT, hardware, parser_of, record

RECORD = Path(__file__).with_name("gpu_checks.json")
TRAINER = "tests/trainer"
GROUPS: dict[str, tuple[int, list[str]]] = {  # name: (limit in seconds, arguments of pytest)
    "kernels": (420, ["tests/kernels"]),
    "ring_and_experts": (120, [f"{TRAINER}/test_trainer_one_gpu.py"]),
    "optimizers": (60, [f"{TRAINER}/test_trainer_optim.py", "-k", "same_bits"]),
    "layouts": (280, [f"{TRAINER}/test_trainer_gpu.py", "-k", "layout"]),
    "offloads": (150, [f"{TRAINER}/test_trainer_gpu.py", "-k", "state"]),
    "checkpoints": (150, [f"{TRAINER}/test_trainer_gpu.py", "-k", "checkpoint"]),
    "flight_recorders": (200, ["tests/launcher/test_launcher_ranks.py", "-k", "h200"]),
}
# The project's settings of pytest name plugins that a GPU host lacks.
PYTEST = "-m pytest -c /dev/null --rootdir . --import-mode=importlib -p no:cacheprovider -q -rs"


@dataclass
class Outcome:
    """The tests of one group, by name. `failed` has the first and last line of each error."""

    seconds: float = 0.0
    passed: list[str] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)
    skipped: list[str] = field(default_factory=list)


def environment() -> dict[str, str]:
    """Return this process's environment, with the folders of the tests' helpers on PYTHONPATH."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    paths = [str(ROOT / one) for one in settings["pythonpath"]]
    return os.environ | {"PYTHONPATH": os.pathsep.join([*paths, os.environ.get("PYTHONPATH", "")])}


def run(name: str) -> Outcome:
    seconds, words = GROUPS[name]
    begin = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "junit.xml"
        command = [sys.executable, *PYTEST.split(), "--junitxml", str(report), *words]
        process = subprocess.Popen(command, cwd=ROOT, env=environment(), start_new_session=True)
        try:
            process.wait(seconds)
            outcome = read(report)
        except subprocess.TimeoutExpired:
            outcome = Outcome(failed={name: f"took more than {seconds} s"})
            os.killpg(process.pid, signal.SIGKILL)  # ends pytest's ranks too
            process.wait()
    outcome.seconds = time.monotonic() - begin
    return outcome


def read(report: Path) -> Outcome:
    """Read pytest's report. Without one the group has failed."""
    outcome = Outcome()
    if not report.is_file():
        return Outcome(failed={"all": "pytest ended without a report"})
    for case in ElementTree.parse(report).getroot().iter("testcase"):
        name = case.get("name", "")
        bad = next((child for child in case if child.tag in ("failure", "error")), None)
        if bad is not None:
            said = (bad.get("message") or "").strip().split("\n")
            outcome.failed[name] = " … ".join(dict.fromkeys((said[0][:150], said[-1][:150])))
        elif case.find("skipped") is not None:
            outcome.skipped.append(name)
        else:
            outcome.passed.append(name)
    return outcome


def keep(outcomes: dict[str, Outcome], path: Path = RECORD) -> None:
    """Write these outcomes, and keep the recorded rows of other groups."""
    before = {}
    if path.is_file():
        before = {row["variant"]: row for row in json.loads(path.read_text())["rows"]}
    rows = {name: before[name] for name in GROUPS if name in before}
    for name, each in outcomes.items():
        rows[name] = {
            "variant": name,
            "value": len(each.passed),
            "unit": "tests",
            "seconds": round(each.seconds, 1),
            "failed": each.failed,
            "passed": each.passed,
            "skipped": each.skipped,
            "commit": commit(ROOT, ".", ":!benchmarks/**/*.json"),
            "hardware": hardware(),
        }
    passed, failed = (sum(len(row[word]) for row in rows.values()) for word in ("passed", "failed"))
    if not passed + failed:
        return
    record(
        path,
        figure="checks on GPUs that pass, of those that ran",
        value=passed / (passed + failed),
        unit="share",
        goal=1.0,
        better="higher",
        details={"gpus": torch.cuda.device_count(), "passed": passed, "failed": failed},
        rows=[rows[name] for name in GROUPS if name in rows],
    )


def main() -> int:
    parser = parser_of(__doc__)
    names = list(GROUPS)
    parser.add_argument(
        "--only", nargs="+", choices=names, default=names, metavar="GROUP", help=", ".join(names)
    )
    parser.add_argument("--check", action="store_true", help="collect the tests and run none")
    args = parser.parse_args()
    if args.check:
        command = [sys.executable, *PYTEST.split(), "--collect-only"]
        runs = [
            subprocess.run([*command, *GROUPS[name][1]], cwd=ROOT, env=environment())
            for name in args.only
        ]
        return max(run.returncode for run in runs)
    if not torch.cuda.is_available():
        raise SystemExit(
            "no GPU here: the checks for CPUs run with `make test`; --check shows what would run"
        )
    outcomes: dict[str, Outcome] = {}
    for name in args.only:
        outcomes[name] = run(name)
        keep(outcomes)
    for name, each in outcomes.items():
        counts = f"{len(each.passed):3} pass, {len(each.failed)} fail, {len(each.skipped)} skipped"
        print(f"{name:20} {counts}, {each.seconds:.0f} s")
        for test, why in each.failed.items():
            print(f"    {test}: {why}")
    return 1 if any(each.failed for each in outcomes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
