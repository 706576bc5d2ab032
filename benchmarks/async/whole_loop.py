"""How fast is the whole loop? Tokens a second end to end, with what engines and trainer did meanwhile, for one shape of hardware.

    python benchmarks/async/whole_loop.py --shape h200_2            write whole_loop_h200_2.json
    python benchmarks/async/whole_loop.py --shape h200_2 --gate     measure, and fail where the recorded value is missed; nothing is written

- The run is `asynchrony_<shape>`: random weights, answers of drawn lengths, in `--runs DIR` or run now.
- The gate: tokens a second not below the recorded by more than TOLERANCE, the trainer waits for no more than half of that more of the time,
  and updates pause engines no longer than by five times as much. On shared processors times say little, so a CPU's is wide.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from shapes import Numbers, numbers, ran_with, run

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

HERE = Path(__file__).resolve().parent
TOLERANCE = {"cpu": 0.5, "h200_1": 0.1, "h200_2": 0.1, "h200_2_fp8": 0.1, "h200_4": 0.1, "h200_8": 0.1}  # share of the recorded value


def found_worse(measured: Numbers, before: dict[str, Any], tolerance: float) -> list[str]:
    """A sentence for each figure that is beyond its limit; prints all of them."""
    worse = []
    for name, now, was, limit, is_least in (
        ("tokens/s", measured.tokens_per_s, before["value"], before["value"] * (1 - tolerance), True),
        (
            "share of the time that the trainer waits",
            measured.trainer_waits,
            before["trainer_waits"],
            before["trainer_waits"] + tolerance / 2,
            False,
        ),
        (
            "seconds of an update's pause",
            measured.update_pause_s,
            before["update_pause_s"],
            before["update_pause_s"] * (1 + 5 * tolerance),
            False,
        ),
    ):
        side = "least" if is_least else "most"
        print(f"{name}: {now:.4g}, recorded {was:.4g}, at {side} {limit:.4g}")
        if (now < limit) if is_least else (now > limit):
            worse.append(f"{name}: {now:.4g}, and recorded allows {limit:.4g} at {side}")
    return worse


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=TOLERANCE, default="cpu")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    recorded = HERE / f"whole_loop_{options.shape}.json"
    if options.gate and not recorded.exists():
        raise SystemExit(f"error: {recorded.name}: nothing is recorded for this shape; measure it without --gate first")
    data = run(f"asynchrony_{options.shape}", options.runs)
    measured = numbers(data)
    if options.gate:
        record_before = json.loads(recorded.read_text())
        if record_before["details"]["run"] != data.run_dir.name:
            raise SystemExit(
                f"error: {recorded.name} is of {record_before['details']['run']} and this is {data.run_dir.name}, another manifest: "
                "their figures are not to be compared; measure without --gate to record this one"
            )
        if worse := found_worse(measured, record_before["rows"][0], TOLERANCE[options.shape]):
            raise SystemExit("\n".join(f"error: {one}; find what became slower, or record it anew" for one in worse))
        return
    record(
        options.out / recorded.name,
        figure=f"whole loop, trained tokens a second ({options.shape})",
        value=measured.tokens_per_s,
        unit="tokens/s",
        goal=None,
        better="higher",
        rows=[measured.row(options.shape)],
        details={"run": data.run_dir.name, "gate_tolerance": TOLERANCE[options.shape], "versions": ran_with(data)},
    )


if __name__ == "__main__":
    main()
