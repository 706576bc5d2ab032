"""Render a run's report as one self-contained HTML page, and its summary line."""

import json
from collections.abc import Callable
from pathlib import Path
from statistics import mean, median

from jinja2 import Environment, StrictUndefined
from plotly.offline import get_plotlyjs

from orrery.manifest.budget.run import RunBudget, plan_run
from orrery.manifest.budget.table import GIB, in_seconds
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import canonical_json, run_id
from orrery.observe.report import figures
from orrery.observe.report.data import (
    RunData,
    Table,
    reading,
    same_weights,
    shares,
    unfinished,
    without_signal,
)
from orrery.runtime.timing import duration

LEARNING = (
    ("Reward", figures.reward),
    ("Warm start", figures.warm_start),
    ("Entropy", figures.entropy),
)
ASYNCHRONY = (
    ("Activity of each role", figures.timeline),
    ("Staleness of trained tokens", figures.staleness),
    ("Versions", figures.versions),
)
SPEED = (
    ("Throughput", figures.throughput),
    ("Parts of a step", figures.step_parts),
    ("Admission", figures.admission),
    ("Processors", figures.processors),
)
SECTIONS = (
    ("Learning", LEARNING),
    ("Asynchrony", ASYNCHRONY),
    ("Agreement of trainer and engine", (("Log-probs", figures.agreement),)),
    ("Speed", SPEED),
)
WIDE = {figures.reward, figures.timeline, figures.agreement, figures.admission, figures.processors}
MAX_PAIRS = 8
MAX_ROUNDS = 500
POOR_REWARD = 0.5


def summary(run: RunData, wall_s: float, page: Path) -> str:
    before, after = (run.result.get(key, {}).get("reward_mean") for key in ("before", "after"))
    reward = "not evaluated"
    if before is not None and after is not None:
        reward = f"held-out reward {after:.2f} ({before:.2f} before RL)"
    counts = [_left_out(run), _timed_out(run), _without_signal(run), _stopped_early(run)]
    parts = [reward, *filter(None, counts), duration(wall_s), f"report: {page}"]
    return f"{run.manifest.name}: {', '.join(parts)}"


def _left_out(run: RunData) -> str:
    policies = [(when, run.result.get(when, {})) for when in ("before", "after")]
    if not any(policy.get("num_failed") for _, policy in policies):
        return ""
    counts = [
        f"{policy['num_failed']} of {policy['num_failed'] + policy['num_rollouts']} {when} RL"
        for when, policy in policies
    ]
    return f"without failed rollouts: {' and '.join(counts)}"


def _timed_out(run: RunData) -> str:
    nums = {when: run.result.get(when, {}).get("num_timeouts", 0) for when in ("before", "after")}
    counts = " and ".join(f"{num} {when} RL" for when, num in nums.items())
    return f"timed out: {counts}" if any(nums.values()) else ""


def _without_signal(run: RunData) -> str:
    share = without_signal(run)
    if share is None:
        return ""
    is_poor = run.result.get("after", {}).get("reward_mean", 0.0) < POOR_REWARD
    hint = " (logs/orchestrator.0.log says what to change)" if share > 0.5 and is_poor else ""
    return f"{share:.0%} of training rollouts without signal{hint}"


def _stopped_early(run: RunData) -> str:
    for row in run.stopped_early[-1:]:
        reached = f"a held-out reward reached stop_at {row['stop_at']:g}"
        reached += f", {row['reward_mean']:.2f} at the end"
        return f"RL ended early after step {row['version']} of {row['num_steps']} ({reached})"
    return ""


def _tiles(run: RunData, wall_s: float) -> list[tuple[str, str]]:
    tiles = []
    if run.result:
        before, after = (run.result[when]["reward_mean"] for when in ("before", "after"))
        what = ", ".join(filter(None, ["held-out reward, before → after RL", _left_out(run)]))
        tiles.append((f"{before:.2f} → {after:.2f}", what))
    for row in run.stopped_early[-1:]:
        tiles.append((f"{row['version']} of {row['num_steps']}", _stopped_early(run)))
    if run.batches:
        tiles += _batch_tiles(run)
    if differences := same_weights(run):
        what = "max |Δ log-prob| trainer − engine, same weights"
        worst = max(found for _, found in differences)
        tiles.append((f"{worst:.1e}", f"{what}, at {len(differences)} versions"))
    if spent := shares(run.spans):
        busy = f"{spent.engine_busy:.0%} · {spent.trainer_busy:.0%}"
        tiles.append((busy, "share of RL time in which the engine · the trainer was busy"))
        overlapped = f"{spent.overlapped:.0%}"
        tiles.append((overlapped, "share of the trainer's busy time in which an engine was busy"))
    if run.engine_restarts:
        tiles.append((str(len(run.engine_restarts)), "times an engine was lost and started again"))
    for row in run.refused_sites:
        num_dropped = row["num_held"] + row["num_waiting"]
        what = f"of site {row['site']} were dropped, and the site is refused: {row['why']}"
        tiles.append((f"{num_dropped} rollouts", what))
    what = "all stages, all attempts"
    if missing := unfinished(run):
        what = f"finished stages, all attempts; not yet {', '.join(missing)}"
    tiles.append((duration(wall_s), what))
    return tiles


def _batch_tiles(run: RunData) -> list[tuple[str, str]]:
    orchestrator, num_versions = run.manifest.orchestrator, run.batches.column("num_versions")
    oldest = str(max(run.batches.column("staleness_max")))
    bound = orchestrator.max_off_policy_steps
    tiles = [(oldest, f"oldest trained token, versions behind (bound {bound})")]
    if (share := without_signal(run)) is not None:
        empty = run.batches.column("num_zero_advantage")
        whole = f"{empty.count(orchestrator.rollouts_per_batch)} of {len(empty)} batches"
        what = "of training rollouts carried no signal (equal rewards in their group)"
        tiles.append((f"{share:.0%}", f"{what}; {whole} had no signal"))
    in_training = str(dict(_drops(run)).get("timeout", 0))
    means = "each a reward of 0" if orchestrator.on_timeout == "zero" else "left out"
    held_out = f"held-out rollouts {_timed_out(run) or 'timed out: none'}"
    tiles.append((in_training, f"training rollouts timed out ({means}); {held_out}"))
    mixed = f"{sum(num > 1 for num in num_versions)} of {len(num_versions)}"
    return [*tiles, (mixed, "batches with tokens of several versions")]


def _drops(run: RunData) -> list[tuple[str, int]]:
    last = {attempt: dropped or {} for attempt, dropped in run.batches.each("attempt", "dropped")}
    reasons = sorted({reason for dropped in last.values() for reason in dropped})
    return [(reason, sum(one.get(reason, 0) for one in last.values())) for reason in reasons]


def _pairs(run: RunData) -> list[dict]:
    by_problem: dict[tuple, dict[str, dict]] = {}
    for row in run.evaluated:
        by_problem.setdefault((row["task"], row["problem"]), {}).setdefault(row["policy"], row)
    return [pair for pair in by_problem.values() if pair.keys() >= {"before", "after"}][:MAX_PAIRS]


def _rounds(run: RunData) -> list[tuple[int, str, str, int, str, str]]:
    """Return (round, sites, tokens of each site, bytes sent, loss, seconds) per weight exchange."""
    tables = {"sft": run.sft, "rl": run.rl}
    losses = {
        (stage, step): loss
        for stage, table in tables.items()
        for step, loss in table.each("step", "loss")
        if loss is not None
    }
    found = []
    for row in run.rounds[-MAX_ROUNDS:]:
        loss = losses.get((row["stage"], row["step"]))
        tokens = " · ".join(f"{each:,}" for each in row["weights"])
        shown = "" if loss is None else f"{loss:.3f}"
        sites = row.get("names") or row["members"]  # old runs have no names
        values = " ".join(sites), tokens, row["num_bytes"], shown
        found.append((row["round"], *values, f"{row['sync_s']:.2f}"))
    return found


def render(run: RunData, wall_s: float) -> str:
    sections, plots = [], 0
    for title, entries in SECTIONS:
        drawn = []
        for caption, draw in entries:
            with reading(f"metrics/, for the figure {caption!r}"):
                figure = draw(run)
            if figure is not None:
                plots += 1
                html = figure.to_html(
                    full_html=False,
                    include_plotlyjs=False,
                    div_id=f"figure-{plots}",
                    config={"displayModeBar": False, "responsive": True},
                )
                about = figures.about(draw.__doc__ or "", figure)
                drawn.append(
                    {"caption": caption, "about": about, "html": html, "wide": draw in WIDE}
                )
        if drawn:
            sections.append({"title": title, "figures": drawn})
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["duration"] = duration
    template = environment.from_string((Path(__file__).parent / "page.html").read_text())
    planned = comparison(run)
    with reading("metrics/ or rollouts/evaluate.jsonl"):
        return template.render(
            name=run.manifest.name,
            run_id=run_id(run.manifest),
            plotly=get_plotlyjs(),
            tiles=_tiles(run, wall_s),
            sections=sections,
            drops=_drops(run),
            num_batches=len(run.batches),
            pairs=_pairs(run),
            stages=sorted(run.stages.items(), key=lambda item: item[1]["started_s"]),
            planned=planned,
            rounds=_rounds(run),
            pauses_s=run.updates.column("pause_s"),
            manifest=json.dumps(json.loads(canonical_json(run.manifest)), indent=2),
        )


WARM = 2  # first steps, left out because they compile
# planned memory that `torch.cuda.max_memory_allocated` does not count
NOT_ALLOCATED = ("fragmentation", "context", "communication buffers")


def comparison(run: RunData) -> list[tuple[str, str, str]]:
    """Return (name, plan, measured median) rows. The plan uses the run's mean rollout length."""
    with reading("metrics/"):
        steps = _values(run.rl, "num_tokens")
        tokens = mean(steps) / run.manifest.orchestrator.rollouts_per_batch if steps else 0
    if not tokens:
        return []
    try:
        tokens = min(tokens, run.manifest.inference.max_model_len_tokens)
        budget = plan_run(run.manifest, tokens, run.network)
    except OrreryError:
        return []
    with reading("metrics/"):
        return _compared(run, budget)


def _compared(run: RunData, budget: RunBudget) -> list[tuple[str, str, str]]:
    trainer = budget.roles[0].memory
    allocated = sum(size for kind, size in trainer.items() if kind not in NOT_ALLOCATED)
    parts = (_values(run.rl, part) for part in ("forward_backward_s", "optimizer_s"))
    computing = [sum(pair) for pair in zip(*parts, strict=True)]

    def seconds(name: str) -> list[float]:
        spans = (span for span in run.spans if span.name == name and span.role == "trainer.0")
        return [span.end_s - span.start_s for span in spans]

    def row(
        what: str, planned: float, measured: list[float], form: Callable[[float], str]
    ) -> list[tuple[str, str, str]]:
        return [(what, form(planned), form(median(measured)))] if measured else []

    return [
        *row("step", budget.step_s, _values(run.rl, "step_time_s"), in_seconds),
        *row("step of the trainer alone", budget.trainer_s["step"], computing, in_seconds),
        *row(
            "sampled tokens a second",
            run.manifest.orchestrator.rollouts_per_batch
            * budget.tokens["sampled"]
            / budget.step_s,  # a step's time, because engines wait for a slower trainer
            _values(run.batches, "generated_tokens_per_s"),
            lambda value: f"{value:,.0f}",
        ),
        *row(
            "mean staleness in steps",
            budget.staleness,
            _values(run.batches, "staleness_mean"),
            lambda value: f"{value:.1f}",
        ),
        *row(
            "weight update",
            budget.update["seconds"],
            _values(run.updates, "pause_s"),
            in_seconds,
        ),
        *row(
            "wait for a checkpoint",
            budget.checkpoint["waits_s"],
            seconds("checkpoint"),
            in_seconds,
        ),
        *row(
            "checkpoint's way to disk",
            budget.checkpoint["writes_s"],
            seconds("checkpoint_write"),
            in_seconds,
        ),
        *row(
            "trainer's peak of allocated memory",
            allocated,
            _values(run.rl, "peak_bytes"),
            lambda value: f"{value / GIB:,.1f} GiB",
        ),
    ]


def _values(table: Table, key: str) -> list[float]:
    return [value for value in table.column(key)[WARM:] if value is not None]
