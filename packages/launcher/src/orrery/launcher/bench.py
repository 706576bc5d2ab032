"""Benchmarks: one script a figure in `benchmarks/<area>/<figure>.py`, its last result beside it as JSON; and a run's trainer by itself."""

import json
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError

TRAINER = "orrery.trainer.bench"  # a command line, like every role


@dataclass(frozen=True)
class Figure:
    """One measured number and what it should be; `goal` may be missing."""

    name: str
    variant: str
    value: float
    unit: str
    goal: float | None
    better: str
    hardware: str
    measured_at: str

    @property
    def holds(self) -> bool | None:
        """None where there is no goal."""
        if self.goal is None:
            return None
        return self.value >= self.goal if self.better == "higher" else self.value <= self.goal


def figures(root: Path) -> list[Figure]:
    """Every recorded figure, by area and name; a file that is not one is named in an `OrreryError`."""
    found = []
    for path in sorted(root.glob("**/*.json")):
        try:
            record = json.loads(path.read_text())
            rows = record.get("rows") or []
            measured = [(row.get("unit", record["unit"]), row["value"]) for row in rows]
            if not rows or (
                "value" in record and (record["unit"], record["value"]) not in measured
            ):
                rows = [{}, *rows]  # what the record itself says stands in none of them
            for row in rows:
                if row.get("unit", record["unit"]) != record["unit"]:
                    row = {"goal": None, **row}  # a record's goal is for what its own unit measures
                row = {**record, **row}
                if row["value"] is None:  # a variant that did not run, and says why
                    continue
                variant = str(row.get("variant") or row.get("name") or "")
                hardware = row.get("hardware", "")
                found.append(
                    Figure(
                        name=str(path.relative_to(root).with_suffix("")),
                        variant=variant,
                        value=float(row["value"]),
                        unit=row["unit"],
                        goal=row.get("goal"),
                        better=row.get("better", "higher"),
                        hardware=hardware
                        if isinstance(hardware, str)
                        else hardware.get("name", json.dumps(hardware)),
                        measured_at=str(row.get("measured_at", "")),
                    )
                )
        except (ValueError, KeyError, AttributeError) as error:
            raise OrreryError(
                f"{path}: not a benchmark's record ({error!r}); run its script again: `orrery bench {path.stem}`"
            ) from None
    return found


def print_table(root: Path) -> bool:
    """Print all figures against their goals; False when one misses its goal."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("figure", "variant", "value", "unit", "goal", "holds", "hardware", "measured"):
        table.add_column(column, justify="right" if column in ("value", "goal") else "left")
    every = figures(root)
    for one in every:
        goal = "" if one.goal is None else f"{'≥' if one.better == 'higher' else '≤'} {one.goal:g}"
        holds = {None: "", True: "[green]yes[/green]", False: "[red]no[/red]"}[one.holds]
        table.add_row(
            one.name,
            one.variant,
            f"{one.value:.4g}",
            one.unit,
            goal,
            holds,
            one.hardware,
            one.measured_at[:10],
        )
    Console(width=None if sys.stdout.isatty() else 200).print(table)
    return all(one.holds is not False for one in every)


def run(root: Path, figure: str) -> int:
    """Run the command that a figure's record holds, or the script of its name where nothing is recorded; its exit code."""
    record, script = root / f"{figure}.json", root / f"{figure}.py"
    recorded = sorted(str(path.relative_to(root).with_suffix("")) for path in root.glob("*/*.json"))
    if figure in recorded:
        try:
            words = _without_folders(shlex.split(json.loads(record.read_text())["command"])[1:])
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise OrreryError(
                f"{record}: no command of a benchmark's record can be read from it ({error!r}); run its script"
            ) from None
    elif script.is_file():
        words = [str(script.relative_to(root.parent))]
    else:
        near = nearest(figure, recorded)
        raise OrreryError(
            f"benchmark {figure!r}: there is no such figure; "
            + (f"did you mean {near!r}?" if near else f"there are {', '.join(recorded)}")
        )
    print(f"+ {shlex.join(['python', *words])}", flush=True)
    return subprocess.run([sys.executable, *words], cwd=root.parent).returncode


def _without_folders(words: list[str]) -> list[str]:
    """A command without what said where runs were read from, and where results were left."""
    return [
        word
        for before, word in zip(["", *words], words, strict=False)
        if not {before, word} & {"--runs", "--out"}
    ]


def trainer(words: list[str]) -> int:
    """Measure the trainer of the run that the first of `words` names; the rest are the measurement's own options. Its exit code."""
    from orrery.launcher.runs import find
    from orrery.manifest.workspace import find_workspace

    if words and not words[0].startswith("-") and not words[0].endswith(".json"):
        workspace = find_workspace()
        run = find(words[0], workspace)
        held = run.path / "manifest.json"
        words = [
            str(held if held.exists() else workspace.manifest_path(run.manifest.name)),
            *words[1:],
        ]
    return subprocess.run([sys.executable, "-m", TRAINER, *words]).returncode
