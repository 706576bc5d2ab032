"""Compare planned speed and memory of the RL stage (`orrery plan`) with the run's measurements."""

from collections.abc import Callable
from statistics import mean, median

from orrery.manifest.budget.run import plan_run
from orrery.manifest.budget.table import GIB, in_seconds
from orrery.manifest.errors import OrreryError
from orrery.observe.report.columns import Table
from orrery.observe.report.data import RunData

WARM = 2  # number of first rows of each metric that are left out, because these steps compile
# Parts of the planned memory that torch's peak of allocated bytes does not count.
NOT_ALLOCATED = ("fragmentation", "context", "communication buffers")


def comparison(run: RunData) -> list[tuple[str, str, str]]:
    """Return rows of texts (name, planned figure, measured figure).

    The plan is for rollouts of the run's mean length. A measured figure is a median over steps or
    weight updates. Return [] if the run cannot be planned or has at most WARM steps.
    """
    tokens = _values(run.rl, "num_tokens")
    if not tokens:
        return []
    try:
        budget = plan_run(run.manifest, mean(tokens) / run.manifest.orchestrator.rollouts_per_batch)
    except OrreryError:
        return []
    trainer = budget.roles[0].memory
    allocated = sum(size for kind, size in trainer.items() if kind not in NOT_ALLOCATED)
    parts = (_values(run.rl, part) for part in ("forward_backward_s", "optimizer_s"))
    computing = [sum(pair) for pair in zip(*parts, strict=True)]

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
            / budget.step_s,  # of the whole step, as engines wait for a slower trainer
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
            "trainer's peak of allocated memory",
            allocated,
            _values(run.rl, "peak_bytes"),
            lambda value: f"{value / GIB:,.1f} GiB",
        ),
    ]


def _values(table: Table, key: str) -> list[float]:
    return [value for value in table.column(key)[WARM:] if value is not None]
