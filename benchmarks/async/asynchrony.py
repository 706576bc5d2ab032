"""Measure tokens/s of the asynchronous loop against a synchronous one with staleness bound 0.

    python benchmarks/async/asynchrony.py --shape h200_8

- Shapes are cpu, h200_1, h200_2, h200_4 and h200_8, and glm5_4 and glm5_8 with one engine of
  several ranks (jsonnet/runs/asynchrony.jsonnet).
- Weights are random. Answers have log-normal lengths, the longest over ten times the median. Both
  loops have the same problems.
- `asynchrony_<shape>.json`: the ratio of trained tokens/s after warm-up, a row per loop with the
  share of time that the trainer waits, and with FP8 the KL between engine and trainer.
- `asynchrony_<shape>.png`: the timelines of both loops on one scale.
- `--runs DIR`: read both finished runs from DIR.
"""

import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot
from shapes import SHAPES, numbers, ran_with, run

from orrery.observe.report.data import RunData

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record

HERE = Path(__file__).resolve().parent
DEFAULT_GOAL = 1.8
GOALS = {"cpu": None, "glm5_4": 3.0, "glm5_8": 3.0}
KL_GOAL = 0.005  # nats, with FP8 in engines and trainer
COLORS = {
    "generate": "#2f6fde",
    "update": "#d64545",
    "wait": "#d9dce1",
    "forward_backward": "#1f9d6b",
    "optimizer": "#0f6b47",
    "publish": "#c2701c",
}


def draw(sides: dict[str, RunData], path: Path) -> None:
    """Draw a panel per loop, with a line per role and a bar per span."""
    figure, panels = pyplot.subplots(
        len(sides), 1, figsize=(11, 2.2 + 1.5 * len(sides)), sharex=True, layout="constrained"
    )
    for (side, data), axes in zip(sides.items(), panels, strict=True):
        spans = [span for span in data.spans if span.name in COLORS]
        start = min(span.start_s for span in spans if span.name == "generate")
        roles = sorted({span.role for span in spans}, reverse=True)
        for name, color in COLORS.items():
            for line, role in enumerate(roles):
                bars = [
                    (s.start_s - start, s.end_s - s.start_s)
                    for s in spans
                    if s.name == name and s.role == role
                ]
                axes.broken_barh(
                    bars, (line - 0.4, 0.8), color=color, label=name if line == 0 else None
                )
        axes.set(
            yticks=range(len(roles)),
            yticklabels=roles,
            title=f"{side}: {numbers(data).tokens_per_s:.0f} trained tokens/s once warm",
        )
        axes.set_xlim(left=0)
        axes.spines[["top", "right"]].set_visible(False)
    panels[-1].set_xlabel("seconds since the first request")
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    figure.legend(handles, COLORS, loc="outside lower center", ncols=len(COLORS), frameon=False)
    figure.savefig(path, dpi=140, metadata={"Software": None})
    pyplot.close(figure)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=SHAPES, default="cpu")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    name = f"asynchrony_{options.shape}"
    sides = {
        "synchronous": run(f"{name}_synchronous", options.runs),
        "asynchronous": run(name, options.runs),
    }
    measured = {side: numbers(data) for side, data in sides.items()}
    rows = [each.row(side) for side, each in measured.items()]
    if sides["asynchronous"].manifest.model.fp8:
        kl = measured["asynchronous"].mismatch_kl
        limits = {"unit": "nats", "goal": KL_GOAL, "better": "lower"}
        rows.append({"variant": "mismatch KL", "value": kl, **limits})
    record(
        options.out / f"{name}.json",
        figure=f"asynchronous over synchronous loop, trained tokens a second ({options.shape})",
        value=measured["asynchronous"].tokens_per_s / measured["synchronous"].tokens_per_s,
        unit="times",
        goal=GOALS.get(options.shape, DEFAULT_GOAL),
        better="higher",
        rows=rows,
        details={
            "runs": {side: data.run_dir.name for side, data in sides.items()},
            "versions": {side: ran_with(data) for side, data in sides.items()},
            "model": f"{sides['asynchronous'].manifest.model.family}",
        },
    )
    draw(sides, options.out / f"{name}.png")


if __name__ == "__main__":
    main()
