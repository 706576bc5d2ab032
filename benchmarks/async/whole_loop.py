"""How fast is the whole loop? Tokens a second end to end, with what engines and trainer did meanwhile, for one shape of hardware.

    python benchmarks/async/whole_loop.py --shape h200_2            write whole_loop_h200_2.json
    python benchmarks/async/whole_loop.py --shape h200_2 --gate     measure, and fail where the recorded value is missed; nothing is written

- The run is `asynchrony_<shape>`: random weights, answers of drawn lengths, in `--runs DIR` or run now.
- The gate: not below the recorded tokens a second by more than TOLERANCE. On shared processors times say little, so a CPU's is wide.
"""

import argparse
import json
import sys
from pathlib import Path

from shapes import numbers, ran_with, run

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import record

HERE = Path(__file__).resolve().parent
TOLERANCE = {"cpu": 0.5, "h200_1": 0.1, "h200_2": 0.1, "h200_2_fp8": 0.1, "h200_4": 0.1, "h200_8": 0.1}  # share of the recorded value


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
        before = record_before["value"]
        least = before * (1 - TOLERANCE[options.shape])
        print(f"{options.shape}: {measured.tokens_per_s:.0f} tokens/s, recorded {before:.0f}, at least {least:.0f}")
        if measured.tokens_per_s < least:
            raise SystemExit(
                f"error: {measured.tokens_per_s:.0f} tokens/s is below {least:.0f}; find what became slower, or record it anew"
            )
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
