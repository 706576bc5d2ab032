"""The report's pictures: each function takes `RunData` and returns a plotly figure, or None where there is nothing to draw."""

from collections import defaultdict
from statistics import median

import plotly.graph_objects as go

from orrery.observe.report.data import RunData, same_weights

TRAINER, ENGINE, ORCHESTRATOR, REFERENCE = "#2f6fde", "#1f9d6b", "#c2701c", "#8a8f98"
POINTS = 1000  # of a line that a long run would fill a page with
SPAN_COLORS = {
    "forward_backward": TRAINER,
    "optimizer": "#7ba5f0",
    "publish": "#b08ae0",
    "checkpoint": "#6a5acd",
    "wait": "#e3e6ea",
    "generate": ENGINE,
    "update": "#d64545",
    "evaluation": "#e0b33a",
    "cut": ORCHESTRATOR,
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


def _line(figure: go.Figure, rows: list[dict], key: str, name: str, color: str, shape: str = "linear") -> None:
    points = [(row["step"], row[key]) for row in rows if row.get(key) is not None]
    figure.add_scatter(
        x=[x for x, _ in points], y=[y for _, y in points], name=name, line={"color": color, "width": 2, "shape": shape}, mode="lines"
    )


def reward(run: RunData) -> go.Figure | None:
    """Mean reward of the rollouts trained in each batch, and held-out reward of the pinned versions."""
    if not run.batches:
        return None
    figure = _figure("step", "mean reward", yaxis_range=[0, 1.02])
    _line(figure, run.batches, "reward_mean", "training batch", ENGINE)
    by_task = defaultdict(list)
    for row in run.evaluations:
        by_task[row["task"]].append(row)
    for task, rows in by_task.items():
        figure.add_scatter(
            x=[row["version"] for row in rows],
            y=[row["reward_mean"] for row in rows],
            name=f"held-out {task}",
            mode="lines+markers",
            line={"color": TRAINER, "width": 2},
            marker={"size": 8},
        )
    return figure


def warm_start(run: RunData) -> go.Figure | None:
    """Cross-entropy during SFT: of the examples as they are trained, and of those that never are."""
    if not run.sft and not run.validation:
        return None
    figure = _figure("SFT step", "nats a token", yaxis_rangemode="tozero")
    _line(figure, run.sft, "loss", "trained examples", TRAINER)
    if run.validation:
        _line(figure, run.validation, "validation_loss", "validation", ORCHESTRATOR)
    return figure


def staleness(run: RunData) -> go.Figure | None:
    """Trained tokens by how many versions they were behind the policy that they trained."""
    counts: dict[int, int] = defaultdict(int)
    for row in run.batches:
        for behind, tokens in enumerate(row.get("staleness_counts", [])):
            counts[behind] += tokens
    if not counts:
        return None
    bound = run.manifest.orchestrator.max_off_policy_steps
    figure = _figure("policy versions behind", "trained tokens")
    figure.update_xaxes(dtick=1, range=[-0.5, max(bound, *counts) + 0.6])
    figure.add_bar(x=list(counts), y=list(counts.values()), marker_color=ENGINE, name="tokens")
    figure.add_vline(
        x=bound + 0.5, line={"color": "#d64545", "dash": "dash"}, annotation_text=f"bound {bound}", annotation_position="top left"
    )
    return figure


def versions(run: RunData) -> go.Figure | None:
    """How many policy versions sampled the tokens of each batch, and how many rollouts mix versions."""
    if not run.batches:
        return None
    figure = _figure("step", "count", yaxis_rangemode="tozero")
    _line(figure, run.batches, "num_versions", "versions in the batch", ENGINE, shape="hv")
    _line(figure, run.batches, "num_mixed_rollouts", "rollouts that mix versions", ORCHESTRATOR)
    return figure


def agreement(run: RunData) -> go.Figure | None:
    """Trainer against engine: largest log-prob difference on rollouts of the very version that scores them; mismatch KL of all tokens."""
    if not run.rl:
        return None
    figure = _figure("policy version that was trained", "nats", yaxis_type="log")
    figure.update_yaxes(exponentformat="power")
    kl = [(row["step"] - 1, row["mismatch_kl"]) for row in run.rl if row.get("mismatch_kl")]
    figure.add_scatter(
        x=[x for x, _ in kl], y=[y for _, y in kl], name="mismatch KL, all trained tokens, stale ones too", line_color=ORCHESTRATOR
    )
    same = same_weights(run)
    figure.add_scatter(
        x=[x for x, _ in same],
        y=[y for _, y in same],
        name="max |Δ log-prob|, same weights",
        mode="markers",
        marker={"color": TRAINER, "size": 8},
    )
    if run.manifest.trainer.param_dtype == "float32":
        figure.add_hline(y=1e-4, line={"color": "#d64545", "dash": "dash"})
        # plotly places annotations of a log axis by exponent, and its hline annotations do not know that
        figure.add_annotation(
            x=1, xref="paper", y=-4, text="1e-4", showarrow=False, yanchor="bottom", xanchor="right", font_color="#d64545"
        )
    return figure


def entropy(run: RunData) -> go.Figure | None:
    if not run.rl:
        return None
    figure = _figure("step", "nats a token", yaxis_rangemode="tozero")
    _line(figure, run.rl, "entropy", "policy entropy", TRAINER)
    return figure


def throughput(run: RunData) -> go.Figure | None:
    """Tokens that were generated and trained a second."""
    if not run.rl:
        return None
    figure = _figure("step", "tokens / s", yaxis_rangemode="tozero")
    _line(figure, run.batches, "generated_tokens_per_s", "generated", ENGINE)
    _line(figure, run.rl, "tokens_per_s", "trained", TRAINER)
    return figure


def admission(run: RunData) -> go.Figure | None:
    """Rollouts in flight, the limit that follows the engines' load, and how full the engines' caches are."""
    if not run.admission:
        return None
    start = run.admission[0]["time_s"]
    figure = _figure("seconds", "rollouts", yaxis_rangemode="tozero")
    figure.update_layout(yaxis2={"overlaying": "y", "side": "right", "range": [0, 1.02], "title": "cache in use", "showgrid": False})
    looks = run.admission[:: 1 + len(run.admission) // POINTS]
    for key, name, color, shape in (("limit", "limit", REFERENCE, "hv"), ("num_in_flight", "in flight", ENGINE, "linear")):
        figure.add_scatter(
            x=[row["time_s"] - start for row in looks],
            y=[row[key] for row in looks],
            name=name,
            mode="lines",
            line={"color": color, "width": 2, "shape": shape},
        )
    for engine in sorted({row["engine"] for row in run.engines}):
        rows = [row for row in run.engines if row["engine"] == engine]
        rows = rows[:: 1 + len(rows) // POINTS]
        figure.add_scatter(
            x=[row["time_s"] - start for row in rows],
            y=[row["kv_usage"] for row in rows],
            name=f"cache of engine {engine}",
            mode="lines",
            line={"width": 1},
            yaxis="y2",
        )
    return figure


def step_parts(run: RunData) -> go.Figure | None:
    """Where each step of the trainer went. The axis is cut at twice the median: the first step also waits for the engines to start."""
    if not run.rl:
        return None
    usual_s = median(row["step_time_s"] for row in run.rl)
    figure = _figure("step", "seconds", barmode="stack", bargap=0.1, yaxis_range=[0, 2 * usual_s])
    for key, name, color in (
        ("forward_backward_s", "forward + backward", TRAINER),
        ("optimizer_s", "optimizer", SPAN_COLORS["optimizer"]),
        ("publish_s", "publish weights", SPAN_COLORS["publish"]),
        ("wait_s", "wait for the batch", "#d5dae1"),
    ):
        figure.add_bar(x=[row["step"] for row in run.rl], y=[row.get(key) for row in run.rl], name=name, marker_color=color)
    return figure


def timeline(run: RunData) -> go.Figure | None:
    """What every role did, second by second, in the newest attempt."""
    if not run.spans:
        return None
    start = min(span.start_s for span in run.spans)
    figure = _figure("seconds since the first span of the RL stage", "", barmode="overlay", bargap=0.25)
    figure.update_layout(height=110 + 46 * len({span.role for span in run.spans}), hovermode="closest")
    by_name = defaultdict(list)
    for span in run.spans:
        by_name[span.name].append(span)
    for name in sorted(by_name, key=lambda name: list(SPAN_COLORS).index(name) if name in SPAN_COLORS else 99):
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


def processors(run: RunData) -> go.Figure | None:
    """CPU use of every process and of what it started, 100 % = one core."""
    rows = [row for row in run.usage if row.get("stage") == "rl"]
    if not rows:
        return None
    start = rows[0]["time_s"]
    figure = _figure("seconds", "% of one core", yaxis_rangemode="tozero")
    for role in sorted({role for row in rows for role in row["processes"]}):
        points = [(row["time_s"] - start, row["processes"][role]["cpu_percent"]) for row in rows if role in row["processes"]]
        figure.add_scatter(x=[x for x, _ in points], y=[y for _, y in points], name=role, mode="lines")
    return figure
