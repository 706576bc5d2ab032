# The pipeline init → sft → rl → evaluate → report of every checked-in run; one job a stage, one target a run or a group of runs:
#     snakemake --profile local reverse_text        snakemake --profile slurm reverse_text_seeds        snakemake --profile slurm -n glm5_run
# A stage is done when its DONE is there. Folders are named by the manifest's hash: an edited spec makes a new run beside the old one.
# No rule has a `log`: Snakemake would remove what the launcher has written to it in earlier stages and attempts.
import sys

from orrery.launcher.pipeline import STAGES, checked_in, targets_of
from orrery.manifest.errors import OrreryError

try:
    PIPELINE = checked_in()
    for sentence in PIPELINE.broken:
        print(
            f"warning: {sentence}; the runs of this file are left out", file=sys.stderr
        )
    if workflow.resource_settings.nodes and PIPELINE.site.slurm is None:
        print(PIPELINE.no_slurm(), file=sys.stderr)  # jobs of a cluster are asked for
    PIPELINE.check_targets(targets_of(sys.argv))
except (OrreryError, OSError) as error:
    sys.exit(f"error: {error}")


wildcard_constraints:
    run=r"[a-z0-9_]+-[0-9a-f]{12}",


for target, folders in PIPELINE.folders.items():

    rule:
        name:
            target
        input:
            expand("runs/{run}/stages/report/DONE", run=folders),


for stage in STAGES:

    rule:
        name:
            stage
        input:
            lambda wildcards, stage=stage: PIPELINE.before(wildcards.run, stage),
        output:
            f"runs/{{run}}/stages/{stage}/DONE",
        resources:
            machine=1,
            sbatch=lambda wildcards, stage=stage: PIPELINE.sbatch(wildcards.run, stage),
        params:
            job=lambda wildcards, stage=stage: PIPELINE.describe(wildcards.run, stage),
        message:
            "{params.job}"
        shell:
            "orrery run {wildcards.run} {rule}"
