"""`python -m orrery.trainer.bench MANIFEST [options]`: measure a manifest's trainer on this machine's devices.

MANIFEST is a manifest's file, or the name of one in `manifests/` of the checkout around the working directory. What the command line
does not say is as in the row of the run's name (`rows.py`), and else by default; the first line names all of it.
"""

import argparse
import gzip
import json
import os
import shlex
import shutil
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from orrery.manifest.check import nearest
from orrery.manifest.errors import OrreryError
from orrery.manifest.identity import load
from orrery.manifest.schema import Manifest
from orrery.manifest.workspace import find_workspace
from orrery.trainer.bench.request import Options, Request, described, request
from orrery.trainer.bench.rows import ROWS


def main() -> None:
    arguments = parser().parse_args()
    try:
        measure(arguments)
    except OrreryError as error:
        print(f"error: {error}", file=sys.stderr)
        raise SystemExit(error.exit_code) from None


def measure(arguments: argparse.Namespace) -> None:
    manifest = find(arguments.manifest)
    options, row = chosen(manifest.name, arguments)
    asked = request(manifest, options)
    check_devices(asked)
    check_outputs(arguments.json, arguments.profile)
    # Imported here, so that a misspelt option does not wait for torch.
    from orrery.trainer.bench import report
    from orrery.trainer.bench.start import run_ranks

    print(
        f"{manifest.name}: measured with {words(described(options))}"
        + (f" (its row: {words(row)})" if row else ""),
        flush=True,
    )
    begin_s = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="orrery-bench-") as folder:
        answers = run_ranks(asked, Path(folder), arguments.deadline_s)
        result = report.result(asked, answers, described(options), time.monotonic() - begin_s)
        report.show(result)
        if arguments.json is not None:
            arguments.json.write_text(json.dumps(result, indent=2, allow_nan=False) + "\n")
        if arguments.profile is not None:
            keep_trace(Path(folder) / "trace.json", arguments.profile, asked)


def chosen(name: str, arguments: argparse.Namespace) -> tuple[Options, dict[str, Any]]:
    """The options of a measurement of the run `name`, and of these what only the run's row says."""
    told = {
        field: getattr(arguments, field)
        for field in Options.__dataclass_fields__
        if hasattr(arguments, field)
    }
    row = {field: value for field, value in ROWS.get(name, {}).items() if field not in told}
    return Options(**told, **row), row


def words(options: dict[str, Any]) -> str:
    """Options as the command line says them."""
    return shlex.join(
        word
        for field, value in options.items()
        for word in (
            [f"--{'' if value else 'no-'}{field}"]
            if isinstance(value, bool)
            else [f"--{field.replace('_', '-')}", str(value)]
        )
    )


def check_outputs(file: Path | None, folder: Path | None) -> None:
    """Makes the folders of what is to be written. Raises `OrreryError` where nothing can be: a measurement would be lost."""
    if file is not None:
        if file.is_dir():
            raise OrreryError(
                f"--json: {file} is a folder; name a file in it, such as {file / 'result.json'}"
            )
        if not file.exists():
            check_folder("--json", file.parent, "name a file in a folder of yours")
        elif not os.access(file, os.W_OK):
            raise OrreryError(f"--json: {file} cannot be written; name a file of yours")
    if folder is not None:
        check_folder("--profile", folder, "name a folder of yours")


def check_folder(option: str, folder: Path, instead: str) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OrreryError(
            f"{option}: nothing can be written in {folder} ({error.strerror}); {instead}"
        ) from None


def parser() -> argparse.ArgumentParser:
    default = Options()
    one = argparse.ArgumentParser(
        prog="orrery bench trainer", description=__doc__, argument_default=argparse.SUPPRESS
    )
    one.add_argument("manifest", metavar="MANIFEST")
    one.add_argument(
        "--device",
        choices=["cpu"],
        help="measure on the CPU, in float32, whatever the manifest is for",
    )
    one.add_argument(
        "--devices",
        type=positive,
        metavar="N",
        help="so many devices instead of the mesh's; dp_shard follows",
    )
    one.add_argument(
        "--steps", type=positive, metavar="N", help=f"measured (default {default.steps})"
    )
    one.add_argument(
        "--warmup", type=positive, metavar="N", help=f"before them (default {default.warmup})"
    )
    one.add_argument(
        "--lengths", choices=["fixed", "variable"], help="of documents (default fixed: the longest)"
    )
    one.add_argument(
        "--routing",
        choices=["natural", "balanced"],
        help=f"experts by the router, or all evenly (default {default.routing})",
    )
    one.add_argument(
        "--loss", choices=["sft", "rl"], help=f"which one is trained (default {default.loss})"
    )
    one.add_argument(
        "--micro-batches", type=positive, metavar="M", help="of a rank and step (default 1)"
    )
    one.add_argument(
        "--tokens-per-micro-batch",
        type=positive,
        metavar="T",
        help="instead of trainer.memory.max_tokens_per_micro_batch",
    )
    one.add_argument(
        "--document-tokens",
        type=positive,
        metavar="T",
        help="the longest document; without it the engines' context",
    )
    one.add_argument("--layers", type=positive, metavar="L", help="so many layers of the model's")
    one.add_argument(
        "--memory",
        metavar="JSON",
        help='merged over trainer.memory, as {"activation_offload": true}',
    )
    one.add_argument("--fsdp", metavar="JSON", help="merged over trainer.fsdp")
    one.add_argument("--mesh", metavar="JSON", help='merged over trainer.mesh, as {"ep": 4}')
    one.add_argument(
        "--trainer",
        metavar="JSON",
        help='merged over the trainer, as {"optimizer": {"kind": "muon", …}}',
    )
    one.add_argument(
        "--compile", action=argparse.BooleanOptionalAction, help="instead of trainer.compile"
    )
    one.add_argument(
        "--json", type=Path, default=None, metavar="FILE", help="write all that was measured there"
    )
    one.add_argument(
        "--profile",
        type=Path,
        default=None,
        metavar="FOLDER",
        help="keep the trace of the profiled step there",
    )
    one.add_argument(
        "--deadline-s",
        type=float,
        default=1800.0,
        metavar="S",
        help="after which it has failed (default 1800)",
    )
    return one


def positive(text: str) -> int:
    if (value := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{value} is not at least 1")
    return value


def find(word: str) -> Manifest:
    path = Path(word)
    if path.suffix == ".json" or path.exists():
        return load(path)
    workspace = find_workspace()
    path = workspace.manifest_path(word)
    if not path.exists():
        near = nearest(word, [one.stem for one in path.parent.glob("*.json")])
        hint = f"did you mean {near!r}?" if near else "`orrery check` lists the runs"
        raise OrreryError(f"run {word!r}: there is no {workspace.shown(path)}; {hint}")
    return load(path)


def check_devices(asked: Request) -> None:
    """Raises `OrreryError` where this machine lacks what the request is for."""
    import torch

    if asked.accelerator == "cpu":
        from orrery.trainer.host_memory import available_bytes

        needed, free = float32_bytes(asked), available_bytes()
        if needed > free:
            raise OrreryError(
                f"{asked.name}: its weights, gradients and optimizer state take {needed / 2**30:,.0f} GiB in float32 and this machine has "
                f"{free / 2**30:,.0f} GiB free; add --devices 1 --layers 1, or measure a smaller run, such as reverse_text"
            )
        return
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not found:
        raise OrreryError(
            f"{asked.name}: is for {asked.accelerator} and this machine has no GPU; add --device cpu to measure on the CPU"
        )
    if found < asked.num_devices:
        raise OrreryError(
            f"{asked.name}: is for {asked.num_devices} devices and this machine has {found}; add --devices {found}"
        )


def float32_bytes(asked: Request) -> int:
    """Of weights, and where they are trained of gradients and the optimizer's states, on all ranks of this machine."""
    from orrery.trainer.memory_plan.plan import num_states
    from orrery.trainer.memory_plan.sizes import count_parameters

    counted = count_parameters(asked.model, asked.trainer.lora)
    values = 2 * sum(unit.trained for unit in counted.units) + sum(
        unit.frozen for unit in counted.units
    )
    return (
        4
        * asked.trainer.mesh.dp_replicate
        * (values + num_states(asked.trainer.optimizer, counted))
    )


def keep_trace(trace: Path, folder: Path, asked: Request) -> None:
    with (
        trace.open("rb") as source,
        gzip.open(folder / f"{asked.name}.trace.json.gz", "wb", compresslevel=4) as target,
    ):
        shutil.copyfileobj(source, target)


if __name__ == "__main__":
    main()
