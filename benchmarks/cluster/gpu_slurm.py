"""Record a run that `gpu_slurm.sh run` started as Slurm jobs that request GPUs.

    ORRERY_COMMIT=… ORRERY_HARDWARE=… python benchmarks/cluster/gpu_slurm.py slurm.tar.gz RUN

- `slurm.tar.gz` is what `gpu_slurm.sh run` leaves. The value is the seconds from the submission of
  the first stage to the end of the last.
- A row per stage: seconds in the queue, seconds of the job, and the GPU that Slurm gave it.
- If a job did not complete, nothing is recorded.
"""

import json
import re
import sys
import tarfile
from datetime import datetime
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record


def fields(job: str) -> dict[str, str]:
    """Return the fields of a job as `scontrol show jobs` prints them."""
    return dict(re.findall(r"(\w+)=(\S*)", job))


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("tar", type=Path)
    parser.add_argument("run", metavar="RUN")
    options = parser.parse_args()
    with tarfile.open(options.tar) as tar:
        names = tar.getnames()
        [jobs] = [name for name in names if name.endswith("orrery-slurm/log/jobs.txt")]
        [result] = [
            name
            for name in names
            if re.search(rf"/runs/{options.run}-[0-9a-f]{{12}}/stages/evaluate/result\.json$", name)
        ]
        text, reward = ((tar.extractfile(name) or sys.exit(2)).read() for name in (jobs, result))
    stages = [
        job
        for job in map(fields, text.decode().split("\n\n"))
        if job.get("JobName", "").startswith(f"{options.run}-")
    ]
    if failed := [job["JobName"] for job in stages if job["JobState"] != "COMPLETED"]:
        raise SystemExit(f"error: {options.tar}: these jobs did not complete: {failed}")
    times = [
        {name: datetime.fromisoformat(job[name]) for name in ("SubmitTime", "StartTime", "EndTime")}
        for job in stages
    ]
    rows = [
        {
            "variant": job["JobName"].rpartition(".")[2],
            "value": (time["EndTime"] - time["StartTime"]).total_seconds(),
            "unit": "s",
            "goal": None,
            "better": "lower",
            "queued_s": (time["StartTime"] - time["SubmitTime"]).total_seconds(),
            "gres": job.get("TresPerNode", ""),
        }
        for job, time in zip(stages, times, strict=True)
    ]
    record(
        Path(__file__).with_suffix(".json"),
        figure=f"{options.run} as Slurm jobs on one GPU",
        value=(times[-1]["EndTime"] - times[0]["SubmitTime"]).total_seconds(),
        unit="s",
        goal=None,
        better="lower",
        rows=rows,
        details={"result": json.loads(reward)},
    )


if __name__ == "__main__":
    main()
