# The pipeline init → sft → rl → evaluate → report of all checked-in runs. A stage is a job. A target is a run, or all runs of a spec file:
#     snakemake --profile local reverse_text        snakemake --profile slurm reverse_text_seeds        snakemake --profile slurm -n glm5_run
# A stage is done when its file DONE exists. A run folder's name contains the manifest's hash, so an edited spec makes a new run.
# No rule has a `log`, because Snakemake would remove the log of earlier attempts.
import sys

from orrery.launcher.pipeline import STAGES, checked_in, targets_of
from orrery.manifest.errors import OrreryError

try:
    PIPELINE = checked_in()
    for sentence in PIPELINE.broken.values():
        print(
            f"warning: {sentence}; the runs of this file are left out", file=sys.stderr
        )
    if workflow.resource_settings.nodes and PIPELINE.site.slurm is None:
        print(PIPELINE.no_slurm(), file=sys.stderr)  # the profile is for a cluster
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
