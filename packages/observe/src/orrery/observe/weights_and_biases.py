"""Weights & Biases, when the site asks for it: `WANDB_PROJECT` in the environment and `wandb` installed. A key alone asks for nothing.

- One W&B run a run directory, resumed over stages and attempts; its id has the directory's place: the same run in two checkouts is two.
- Scalars are named as in TensorBoard, with the step as a value of its own (`<stage>/step`), since W&B's own step must never go back and
  a resumed attempt does.
"""

import os
from pathlib import Path

from orrery.manifest.errors import OrreryError
from orrery.observe.metrics import Row
from orrery.observe.shared_memory import place
from orrery.observe.tensorboard import named


def configured() -> bool:
    return bool(os.environ.get("WANDB_PROJECT"))


class WandbSink:
    """Raises `OrreryError` when W&B is configured but not installed."""

    def __init__(self, run_dir: Path):
        try:
            import wandb
        except ImportError:
            raise OrreryError(
                "WANDB_PROJECT is set, but wandb is not installed; type `uv pip install wandb`, or unset it"
            ) from None
        name, _, run_id = run_dir.name.rpartition("-")
        self._run = wandb.init(
            project=os.environ["WANDB_PROJECT"],
            name=run_dir.name,
            id=f"{run_id}-{place(run_dir)}",
            group=name,
            resume="allow",
            dir=str(run_dir / "metrics"),
        )
        self._defined: set[str] = set()

    def write(self, process: str, row: Row) -> None:
        step, values = named(process, row)
        if not values:
            return
        stage = str(row.get("stage"))
        if stage not in self._defined:
            self._defined.add(stage)
            self._run.define_metric(f"{stage}/*", step_metric=f"{stage}/step")
        steps = {} if step is None else {f"{stage}/step": step}
        self._run.log({**{f"{stage}/{name}": value for name, value in values.items()}, **steps})

    def close(self) -> None:
        self._run.finish(quiet=True)
