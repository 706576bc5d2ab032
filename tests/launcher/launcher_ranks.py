"""Trainer ranks as the launcher starts them, and their launcher. One rank may stop for ever.

`python launcher_ranks.py RUN_DIR STAGE NUM_RANKS DEADLINE_SCALE` is the launcher, and
`python -m launcher_ranks --run-dir …` a rank.
STUCK="1 3": rank 1 hangs in step 3. "1 3 copy": it hangs while it copies the checkpoint of step 3.
"""

import os
import sys
import time
from pathlib import Path

from orrery.launcher.site import Roles, Site
from orrery.launcher.stage import Job
from orrery.launcher.supervisor import run_stage
from orrery.manifest.identity import Workspace, load
from orrery.manifest.plan import ProcessPlan, StagePlan


def be_a_rank() -> None:
    from orrery.trainer.__main__ import main
    from orrery.trainer.checkpoint_writer import CheckpointWriter
    from orrery.trainer.learner import Learner

    learn, copy = Learner.learn, CheckpointWriter.copy

    def learn_or_stop(self: Learner, *args, **options):
        if os.environ.get("STUCK") == f"{self.world.rank} {self.step + 1}":
            time.sleep(3600)
        return learn(self, *args, **options)

    def copy_or_stop(self: CheckpointWriter, learner: Learner, *args, **options):
        if os.environ.get("STUCK") == f"{learner.world.rank} {learner.step} copy":
            time.sleep(3600)
        return copy(self, learner, *args, **options)

    Learner.learn, CheckpointWriter.copy = learn_or_stop, copy_or_stop
    main()


def launch(run_dir: Path, stage: str, num_ranks: int, deadline_scale: float) -> int:
    plan = StagePlan(
        stage,
        (),
        tuple(
            ProcessPlan("trainer", index, "launcher_ranks", 1, "itself", first_device=index)
            for index in range(num_ranks)
        ),
    )
    site = Site(roles=Roles(deadline_scale=deadline_scale))
    num_devices = (
        None if load(run_dir / "manifest.json").hardware.accelerator == "cpu" else num_ranks
    )
    outcome = run_stage(
        Job(run_dir, plan, (stage,), num_devices, None, "make demo", site, Workspace(run_dir))
    )
    print(outcome.message, file=sys.stderr)
    return outcome.exit_code


if __name__ == "__main__":
    if "--run-dir" not in sys.argv:
        raise SystemExit(
            launch(Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
        )
    be_a_rank()
