"""Measure tokens/s of the whole loop, and what engines and trainer do, for a hardware shape.

    python benchmarks/async/whole_loop.py --shape h200_2            write whole_loop_h200_2.json
    python benchmarks/async/whole_loop.py --shape h200_2 --gate     compare, and write nothing

- The run is `asynchrony_<shape>` (random weights and answer lengths), read from `--runs DIR` or
  made now.
- The gate requires equal manifests, except for fields that cost no time (`COSTS_NO_TIME`). The lock
  file is such a field, because the gate shall find the cost of new package releases.
- With t = TOLERANCE, the gate allows a share t less tokens/s, t/2 more trainer waiting, and a share
  5t longer pauses for updates.
"""

import hashlib
import json
import sys
from pathlib import Path
from typing import Any

from shapes import Numbers, manifest_here, numbers, ran_with, run

from orrery.manifest.check import leaves, spelled
from orrery.manifest.schema import Manifest

sys.path.insert(0, str(Path(__file__).parents[1]))
from record import parser_of, record

HERE = Path(__file__).resolve().parent
TOLERANCE = {
    "cpu": 0.5,
    "h200_1": 0.1,
    "h200_2": 0.1,
    "h200_2_fp8": 0.1,
    "h200_4": 0.1,
    "h200_8": 0.1,
    "glm5_4": 0.1,
    "glm5_8": 0.1,
}  # share of the recorded value
# `max_sampled_ratio` acts only on dropped groups, and these runs keep all groups.
COSTS_NO_TIME = (
    "python_lock_sha256",
    "orchestrator.keep_batches",
    "orchestrator.on_timeout",
    "orchestrator.max_sampled_ratio",
    "orchestrator.evaluation.stop_at",
    *(
        f"trainer.mismatch.{bound}"
        for bound in ("warn_kl", "stop_kl", "warn_logprob_difference", "stop_logprob_difference")
    ),
    "trainer.mismatch.canary_logprob_difference",
)
LATER_FIELDS = {
    "inference.all2all_backend": "allgather_reducescatter",
    "inference.dual_batch_overlap": False,
    "inference.environment": {},
    "inference.max_local_prefill_tokens": 0,
    "inference.nodes_per_replica": 1,
    "inference.prefill": None,
    "model.fp8": None,
    "model.num_mtp_layers": 0,
    "orchestrator.guests": None,
    "trainer.attention": "auto",
    "trainer.elastic": None,
    "trainer.expert_bias_rate": None,
    "trainer.indexer": "frozen",
    "trainer.indexer_choice": "own",
    "trainer.memory.activation_checkpointing_every": 1,
    "trainer.memory.activation_offload_max_in_flight": 1,
    "trainer.memory.optimizer_offload_resident": 0.0,
    "trainer.mesh.deepep_num_sms": None,
    "trainer.mesh.deepep_token_chunk_size": None,
    "trainer.mesh.ep_chunks": 1,
}


def timed_sha256(manifest: Manifest) -> str:
    """Return the digest of all fields that cost time. Runs with equal digests are comparable."""
    fields = {spelled(path): value for path, value in leaves(manifest.model_dump(mode="json"))}
    timed = {name: value for name, value in fields.items() if name not in COSTS_NO_TIME}
    timed["schema_version"] = 1  # costs no time, and is 1 in recorded digests
    # Older records had these values without the fields, and count a shared device once per role.
    for name, value in LATER_FIELDS.items():
        if timed[name] == value:
            del timed[name]
    if timed.pop("hardware.shared_devices"):
        timed["hardware.devices_per_node"] *= 2
    return hashlib.sha256(
        json.dumps(timed, sort_keys=True, separators=(",", ":")).encode()
    ).hexdigest()


def refuse_another(manifest: Manifest, recorded: dict[str, Any], name: str) -> None:
    """Raise SystemExit if the record in file `name` is not comparable with `manifest`."""
    if timed_sha256(manifest) != recorded["details"]["timed_sha256"]:
        raise SystemExit(
            f"error: {name} is of {recorded['details']['run']}, which was another loop than "
            f"{manifest.name} is now (more differs than {' and '.join(COSTS_NO_TIME)}): their "
            "figures are not to be compared; measure without --gate to record this one"
        )


def refuse_unwarmed(recorded: dict[str, Any], name: str) -> None:
    """Raise SystemExit if the record lacks `longest_step_s`, so it may include a recompilation."""
    if "longest_step_s" not in recorded["rows"][0]:
        raise SystemExit(
            f"error: {name}: it was measured before steps that compile were refused, so a slower "
            "loop could pass; measure without --gate to record this shape anew"
        )


def found_worse(measured: Numbers, before: dict[str, Any], tolerance: float) -> list[str]:
    """Print all figures. Return a sentence for each figure beyond its limit."""
    worse = []
    for name, now, was, limit, is_least in (
        (
            "tokens/s",
            measured.tokens_per_s,
            before["value"],
            before["value"] * (1 - tolerance),
            True,
        ),
        (
            "share of the time that the trainer waits",
            measured.trainer_waits,
            before["trainer_waits"],
            before["trainer_waits"] + tolerance / 2,
            False,
        ),
        (
            "seconds of an update's pause",
            measured.update_pause_s,
            before["update_pause_s"],
            before["update_pause_s"] * (1 + 5 * tolerance),
            False,
        ),
    ):
        side = "least" if is_least else "most"
        print(f"{name}: {now:.4g}, recorded {was:.4g}, at {side} {limit:.4g}")
        if (now < limit) if is_least else (now > limit):
            worse.append(f"{name}: {now:.4g}, and recorded allows {limit:.4g} at {side}")
    return worse


def gate(shape: str, runs: Path | None) -> None:
    """Raise SystemExit if a figure is worse than recorded, or if the record is not comparable."""
    name, recorded = f"asynchrony_{shape}", HERE / f"whole_loop_{shape}.json"
    if not recorded.exists():
        raise SystemExit(
            f"error: {recorded.name}: nothing is recorded for this shape; "
            "measure it without --gate first"
        )
    before = json.loads(recorded.read_text())
    refuse_unwarmed(before, recorded.name)
    if runs is None:
        refuse_another(Manifest.model_validate(manifest_here(name)), before, recorded.name)
    data = run(name, runs)
    refuse_another(data.manifest, before, recorded.name)
    if worse := found_worse(numbers(data), before["rows"][0], TOLERANCE[shape]):
        raise SystemExit(
            "\n".join(f"error: {one}; find what became slower, or record it anew" for one in worse)
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--shape", choices=TOLERANCE, default="cpu")
    parser.add_argument("--gate", action="store_true")
    parser.add_argument("--runs", type=Path, metavar="DIR")
    parser.add_argument("--out", type=Path, metavar="DIR", default=HERE)
    options = parser.parse_args()
    if options.gate:
        gate(options.shape, options.runs)
        return
    data = run(f"asynchrony_{options.shape}", options.runs)
    measured = numbers(data)
    record(
        options.out / f"whole_loop_{options.shape}.json",
        figure=f"whole loop, trained tokens a second ({options.shape})",
        value=measured.tokens_per_s,
        unit="tokens/s",
        goal=None,
        better="higher",
        rows=[measured.row(options.shape)],
        details={
            "run": data.run_dir.name,
            "timed_sha256": timed_sha256(data.manifest),
            "gate_tolerance": TOLERANCE[options.shape],
            "versions": ran_with(data),
        },
    )


if __name__ == "__main__":
    main()
