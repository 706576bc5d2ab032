"""Measure the build time, the size and the start-up time of images, on CPUs.

- cold: without any cache, so packages are fetched. warm: the image is built from cached packages.
- unchanged: Snakemake finds nothing to do.
- There is no result unless both builds of an image have the same sha256.
- start: median seconds of five runs of `python3 -c pass`, in the image and outside.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from orrery.manifest.publish import sha256
from record import ROOT, parser_of, record

ORDER = (
    ("base", "cpu"),
    ("base", "cuda"),
    ("orchestrator", "cpu"),
    ("trainer", "cpu"),
    ("inference", "cpu"),
)


def timed(command: Sequence[str | Path], environment: dict[str, str]) -> float:
    start = time.perf_counter()
    subprocess.run(
        command, check=True, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    return time.perf_counter() - start


def build_all(folder: Path, environment: dict[str, str]) -> dict[tuple[str, str], float]:
    """Return the build seconds by image."""
    script = ROOT / "containers/build.py"
    return {
        one: timed([sys.executable, script, "build", *one, folder], environment) for one in ORDER
    }


def start_s(image: Path | None) -> float:
    inside: list[str | Path] = (
        ["apptainer", "--silent", "exec", "--userns", "--contain", "--cleanenv", image]
        if image
        else []
    )
    return statistics.median(
        timed([*inside, "python3", "-c", "pass"], dict(os.environ)) for _ in range(5)
    )


def main() -> None:
    parser_of(__doc__).parse_args()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as name:
        work = Path(name)
        environment = {**os.environ, "UV_CACHE_DIR": str(work / "uv")}
        cold = build_all(work / "images", environment)
        first = {path.name: path for path in (work / "images").glob("*.sif")}
        (work / "again").mkdir()
        (work / "images/debian").rename(work / "again/debian")
        warm = build_all(work / "again", environment)
        second = {path.name: path for path in (work / "again").glob("*.sif")}
        if first.keys() != second.keys():
            raise SystemExit(f"not the same bytes twice: {sorted(first.keys() ^ second.keys())}")
        snakemake = [
            Path(sys.executable).with_name("snakemake"),
            "-s",
            ROOT / "pipelines/images.smk",
            "--cores",
            "all",
            "--config",
        ]
        unchanged = timed(
            [*snakemake, f"images={work / 'again'}", "--directory", ROOT, "cpu"], environment
        )
        rows = []
        for image, hardware in ORDER:
            (path,) = [
                path for file, path in second.items() if file.startswith(f"{image}-{hardware}-")
            ]
            rows.append(
                {
                    "variant": f"{hardware}/{image}",
                    "value": round(warm[image, hardware], 1),
                    "cold_s": round(cold[image, hardware], 1),
                    "size_bytes": path.stat().st_size,
                    "start_s": round(start_s(path), 3),
                    "sha256": sha256(path),
                }
            )
    record(
        Path(__file__).with_suffix(".json"),
        figure="images of the CPU roles, built again with packages at hand",
        value=sum(warm.values()),
        unit="s",
        goal=None,
        better="lower",
        details={
            "cold_s": round(sum(cold.values()), 1),
            "unchanged_s": round(unchanged, 1),
            "start_outside_s": round(start_s(None), 3),
            "apptainer": subprocess.run(
                ["apptainer", "--version"], capture_output=True, text=True
            ).stdout.strip(),
            "folder_in_memory": tempfile.gettempdir().startswith("/dev/shm"),
            "load_before": round(os.getloadavg()[0], 1),
        },
        rows=rows,
    )


if __name__ == "__main__":
    main()
