"""Draw the report's figures.

Figure functions return None without data. Their docstrings are the captions.
"""

from collections import defaultdict
from collections.abc import Sequence
from heapq import heappush, heappushpop
from statistics import median
from typing import Any

import plotly.graph_objects as go

from orrery.observe.report.data import (
    POINTS,
    RunData,
    Span,
    Table,
    Thinning,
    extremes,
    largest,
    means,
    piece_size,
    same_weights,
)
from orrery.runtime.timing import duration

TRAINER, ENGINE, ORCHESTRATOR, REFERENCE = "#2f6fde", "#1f9d6b", "#c2701c", "#8a8f98"
HELD_OUT = TRAINER, ORCHESTRATOR, "#6a5acd", "#d64545", "#e0b33a", REFERENCE
SAYS: dict[Thinning, str] = {
    means: "Each point is the mean of up to {} rows.",
    extremes: "The lowest and the highest of each {} rows are drawn.",
    largest: "The largest difference of each {} versions is drawn.",
}
SPAN_COLORS = {
    "forward_backward": TRAINER,
    "optimizer": "#7ba5f0",
    "publish": "#b08ae0",
    "checkpoint": "#6a5acd",
    "wait": "#e3e6ea",
    "generate": ENGINE,
    "update": "#d64545",
    "evaluation": "#e0b33a",
    "batch": ORCHESTRATOR,
    "pack": "#e09a5b",
    "send": "#f0c9a4",
}


def _figure(x: str, y: str, **axes) -> go.Figure:
    figure = go.Figure()
    figure.update_layout(
        template="plotly_white",
        height=300,
        margin={"l": 62, "r": 16, "t": 34, "b": 46},
        font={"family": "system-ui, sans-serif", "size": 13},
        legend={"orientation": "h", "y": 1.02, "yanchor": "bottom", "x": 0},
        hovermode="x unified",
        xaxis_title=x,
        yaxis_title=y,
        **axes,
    )
    return figure


def _scatter(
    figure: go.Figure, xs: Sequence[Any], ys: Sequence[Any], thin: Thinning, **style: Any
) -> None:
    xs, ys = _thinned(figure, xs, ys, thin)
    if len(xs) == 1 and style.get("mode") == "lines":
        style["mode"] = "lines+markers"
    figure.add_scatter(x=xs, y=ys, **style)


def _thinned(
    figure: go.Figure, xs: Sequence[Any], ys: Sequence[Any], thin: Thinning
) -> tuple[Sequence[Any], Sequence[Any]]:
    if len(xs) <= POINTS:
        return xs, ys
    _say(figure, SAYS[thin], piece_size(len(xs), thin))
    return thin(xs, ys)


def _say(figure: go.Figure, sentence: str, number: int = 0) -> None:
    said = figure.layout.meta or {}
    figure.update_layout(meta={**said, sentence: max(number, said.get(sentence, 0))})


def about(doc: str, figure: go.Figure) -> str:
    notes = [
        sentence.format(f"{number:,}") for sentence, number in (figure.layout.meta or {}).items()
    ]
    return " ".join([*doc.partition("\n")[0].split(), *notes])


def _line(
    figure: go.Figure,
    rows: Table,
    key: str,
    name: str,
    color: str,
    thin: Thinning,
    shape: str = "linear",
) -> None:
    points = [(step, value) for step, value in rows.each("step", key) if value is not None]
    line = {"color": color, "width": 2, "shape": shape}
    xs, ys = [x for x, _ in points], [y for _, y in points]
    _scatter(figure, xs, ys, thin, name=name, line=line, mode="lines")


def _since(start_s: float, end_s: float) -> tuple[float, str]:
    hours = (end_s - start_s) / 3600
    if hours < 24:
        return 1.0, "seconds"
    return (3600.0, "hours") if hours < 24 * 7 else (86400.0, "days")


def reward(run: RunData) -> go.Figure | None:
    """Mean reward of training batches and of held-out rollouts, without failed rollouts."""
    if not run.batches and not run.evaluations:
        return None
    columns = [table.column("reward_mean") for table in (run.batches, run.evaluations)]
    rewards = [each for column in columns for each in column if each is not None]
    figure = _figure("step", "mean reward", yaxis_range=[min([0, *rewards]), max([1.02, *rewards])])
    if run.batches:
        _line(figure, run.batches, "reward_mean", "training batch", ENGINE, means)
    by_task = defaultdict(list)
    for task, version, mean in run.evaluations.each("task", "version", "reward_mean"):
        by_task[task].append((version, mean))
    for index, (task, points) in enumerate(by_task.items()):
        xs, ys = [version for version, _ in points], [mean for _, mean in points]
        line = {"color": HELD_OUT[index % len(HELD_OUT)], "width": 2}
        style = {"mode": "lines+markers", "line": line, "marker": {"size": 8}}
        _scatter(figure, xs, ys, means, name=f"held-out {task}", **style)
    return figure


def warm_start(run: RunData) -> go.Figure | None:
    """Cross-entropy during SFT on training and validation examples."""
    if not run.sft and not run.validation:
        return None
    figure = _figure("SFT step", "nats a token", yaxis_rangemode="tozero")
    _line(figure, run.sft, "loss", "trained examples", TRAINER, means)
    if run.validation:
        _line(figure, run.validation, "validation_loss", "validation", ORCHESTRATOR, means)
    return figure


def staleness(run: RunData) -> go.Figure | None:
    """Trained tokens by their age in policy versions."""
    counts: dict[int, int] = defaultdict(int)
    for each in run.batches.column("staleness_counts"):
        for behind, tokens in enumerate(each or ()):
            counts[behind] += tokens
    if not counts:
        return None
    bound = run.manifest.orchestrator.max_off_policy_steps
    figure = _figure("policy versions behind", "trained tokens")
    figure.update_xaxes(dtick=1, range=[-0.5, max(bound, *counts) + 0.6])
    figure.add_bar(x=list(counts), y=list(counts.values()), marker_color=ENGINE, name="tokens")
    figure.add_vline(
        x=bound + 0.5,
        line={"color": "#d64545", "dash": "dash"},
        annotation_text=f"bound {bound}",
        annotation_position="top",
    )
    return figure


def versions(run: RunData) -> go.Figure | None:
    """Policy versions in each batch, and rollouts that mix versions."""
    if not run.batches:
        return None
    figure = _figure("step", "count", yaxis_rangemode="tozero")
    rows, mixed = run.batches, "rollouts that mix versions"
    _line(figure, rows, "num_versions", "versions in the batch", ENGINE, extremes, shape="hv")
    _line(figure, rows, "num_mixed_rollouts", mixed, ORCHESTRATOR, extremes)
    return figure


def agreement(run: RunData) -> go.Figure | None:
    """Largest log-prob difference between trainer and engine (equal weights), and mismatch KL."""
    if not run.rl:
        return None
    figure = _figure("policy version that was trained", "nats", yaxis_type="log")
    figure.update_yaxes(exponentformat="power")
    kl = [(step - 1, value) for step, value in run.rl.each("step", "mismatch_kl") if value]
    name = "mismatch KL, all trained tokens, stale ones too"
    xs, ys = [x for x, _ in kl], [y for _, y in kl]
    _scatter(figure, xs, ys, extremes, name=name, line_color=ORCHESTRATOR)
    same, name = same_weights(run), "max |Δ log-prob|, same weights"
    xs, ys = [x for x, _ in same], [y for _, y in same]
    marker = {"color": TRAINER, "size": 8}
    _scatter(figure, xs, ys, largest, name=name, mode="markers", marker=marker)
    if run.manifest.trainer.param_dtype == "float32":
        figure.add_hline(y=1e-4, line={"color": "#d64545", "dash": "dash"})
        # On log axes, plotly places annotations by exponent, but lines by value.
        place = {"x": 1, "xref": "paper", "y": -4, "xanchor": "right", "yanchor": "bottom"}
        figure.add_annotation(text="1e-4", showarrow=False, font_color="#d64545", **place)
    return figure


def entropy(run: RunData) -> go.Figure | None:
    """Mean entropy of the policy's next-token distribution."""
    if not run.rl:
        return None
    figure = _figure("step", "nats a token", yaxis_rangemode="tozero")
    _line(figure, run.rl, "entropy", "policy entropy", TRAINER, means)
    return figure


def throughput(run: RunData) -> go.Figure | None:
    """Tokens a second: sampled by engines, and read by the trainer (with prompts)."""
    if not run.rl:
        return None
    figure = _figure("step", "tokens / s", yaxis_rangemode="tozero")
    _line(figure, run.batches, "generated_tokens_per_s", "generated", ENGINE, means)
    _line(figure, run.rl, "tokens_per_s", "trainer", TRAINER, means)
    return figure


def admission(run: RunData) -> go.Figure | None:
    """Rollouts in flight, their limit, and the use of engines' caches."""
    if not run.admission:
        return None
    times_s = run.admission.column("time_s")
    unit_s, unit = _since(times_s[0], times_s[-1])
    figure = _figure(unit, "rollouts", yaxis_rangemode="tozero")
    figure.update_layout(
        yaxis2={
            "overlaying": "y",
            "side": "right",
            "range": [0, 1.02],
            "title": "cache in use",
            "showgrid": False,
        }
    )
    for key, name, color, shape in (
        ("limit", "limit", REFERENCE, "hv"),
        ("num_in_flight", "in flight", ENGINE, "linear"),
    ):
        line = {"color": color, "width": 2, "shape": shape}
        xs = [(time_s - times_s[0]) / unit_s for time_s in times_s]
        _scatter(
            figure, xs, run.admission.column(key), extremes, name=name, mode="lines", line=line
        )
    for engine, rows in sorted(run.engines.items()):
        xs = [(time_s - times_s[0]) / unit_s for time_s in rows.column("time_s")]
        style = {"mode": "lines", "line": {"width": 1}, "yaxis": "y2"}
        _scatter(
            figure, xs, rows.column("kv_usage"), extremes, name=f"cache of engine {engine}", **style
        )
    return figure


def step_parts(run: RunData) -> go.Figure | None:
    """Time of each trainer step by part. The axis ends at twice the median, as the first step \
    waits for the engines.
    """
    if not run.rl:
        return None
    usual_s = median(run.rl.column("step_time_s"))
    figure = _figure("step", "seconds", barmode="stack", bargap=0.1, yaxis_range=[0, 2 * usual_s])
    for key, name, color in (
        ("forward_backward_s", "forward + backward", TRAINER),
        ("optimizer_s", "optimizer", SPAN_COLORS["optimizer"]),
        ("publish_s", "publish weights", SPAN_COLORS["publish"]),
        ("wait_s", "wait for the batch", "#d5dae1"),
    ):
        xs, ys = _thinned(figure, run.rl.column("step"), run.rl.column(key), means)
        figure.add_bar(x=xs, y=ys, name=name, marker_color=color)
    if len(run.rl) > POINTS:
        figure.update_traces(marker_line_width=0).update_layout(bargap=0)
    return figure


def timeline(run: RunData) -> go.Figure | None:
    """Activity of every role over time, in the newest attempt."""
    if not run.spans:
        return None
    start, since = min(span.start_s for span in run.spans), _newest_part(run.spans)
    drawn = [span for span in run.spans if since is None or span.end_s > since]
    figure = _figure(
        "seconds since the first span of the RL stage", "", barmode="overlay", bargap=0.25
    )
    figure.update_layout(height=110 + 46 * len({span.role for span in drawn}), hovermode="closest")
    if since is not None:
        _say(figure, _what_is_cut(drawn, since - start))
        figure.update_xaxes(
            title="seconds of the part shown", range=[0, max(span.end_s for span in drawn) - since]
        )
        start = since
    by_name = defaultdict(list)
    for span in drawn:
        by_name[span.name].append(span)
    for name in sorted(
        by_name, key=lambda name: list(SPAN_COLORS).index(name) if name in SPAN_COLORS else 99
    ):
        spans = by_name[name]
        figure.add_bar(
            orientation="h",
            name=name.replace("_", " "),
            y=[span.role for span in spans],
            base=[span.start_s - start for span in spans],
            x=[span.end_s - span.start_s for span in spans],
            marker={"color": SPAN_COLORS.get(name, REFERENCE), "line": {"width": 0}},
            customdata=[span.step for span in spans],
            hovertemplate=f"{name}, step %{{customdata}}: %{{x:.3f}} s<extra>%{{y}}</extra>",
        )
    figure.update_yaxes(categoryorder="category descending")
    return figure


def _newest_part(spans: Sequence[Span]) -> float | None:
    """Return the time after which no role has over POINTS spans, or None to draw all."""
    newest: dict[str, list[float]] = defaultdict(list)
    for span in spans:
        heap = newest[span.role]
        if len(heap) <= POINTS:
            heappush(heap, span.end_s)
        else:
            heappushpop(heap, span.end_s)
    return max((heap[0] for heap in newest.values() if len(heap) > POINTS), default=None)


def _what_is_cut(drawn: Sequence[Span], after_s: float) -> str:
    steps = [
        span.step for span in drawn if span.role.startswith("trainer.") and span.step is not None
    ]
    which = f", steps {min(steps)} to {max(steps)}" if steps else ""
    return f"Only the newest part{which}: from {duration(after_s)} after the stage's first span on."


def processors(run: RunData) -> go.Figure | None:
    """CPU use of every process and its children. 100 % is one core."""
    if not run.processors:
        return None
    times_s = {role: rows.column("time_s") for role, rows in run.processors.items()}
    start_s = min(each[0] for each in times_s.values())
    unit_s, unit = _since(start_s, max(each[-1] for each in times_s.values()))
    figure = _figure(unit, "% of one core", yaxis_rangemode="tozero")
    for role, rows in sorted(run.processors.items()):
        xs = [(time_s - start_s) / unit_s for time_s in times_s[role]]
        _scatter(figure, xs, rows.column("cpu_percent"), means, name=role, mode="lines")
    return figure
