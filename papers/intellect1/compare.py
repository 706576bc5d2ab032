"""Compare INTELLECT-1's published values (arXiv 2412.01152) with runs and records of this checkout.

    python papers/intellect1/compare.py

Loss is that of `spec.jsonnet` at simulated sites, for three seeds, as in
`benchmarks/elastic/diloco.py`. The other values come from records under benchmarks/elastic.
A value holds or fails if the 95 % interval of its seeds lies within or beyond the bound. Otherwise
it is inconclusive. A record of one machine has one value. "not comparable" names the reason.
"""

import json
import math
import sys
from pathlib import Path
from statistics import mean, stdev

import _gojsonnet

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from elastic.diloco import Plan, every
from orrery.elastic.loop import OuterOptimizer
from orrery.manifest.schema import Manifest
from record import ROOT, record

SEEDS = (1, 2, 3)
T_95 = 4.303  # of Student's t with two degrees of freedom
HERE = Path(__file__).parent


def read_spec() -> Manifest:
    text = _gojsonnet.evaluate_file(
        str(HERE / "spec.jsonnet"), jpathdir=[str(ROOT / "jsonnet"), str(ROOT)]
    )
    return Manifest.model_validate_json(text)


def losses() -> dict[str, list[float]]:
    """Return by published name the differences of loss in %, one a seed."""
    run = read_spec()
    elastic, sft = run.trainer.elastic, run.sft
    assert elastic is not None
    outer = OuterOptimizer(elastic.outer.lr, elastic.outer.momentum, elastic.outer.nesterov)
    num_rounds = sft.num_steps // elastic.inner_steps
    plan = Plan(elastic.inner_steps, num_rounds, 300, 1, num_rounds, elastic.min_sites)
    kinds = ("synchronous", "float32", elastic.codec)
    arms = tuple((kind, kind, sft.optimizer.lr, outer) for kind in kinds)
    found = every(SEEDS, arms, plan)
    last = {kind: [found[seed][kind][-1] for seed in SEEDS] for kind in kinds}

    def above(one: str, other: str) -> list[float]:
        return [100 * (a / b - 1) for a, b in zip(last[one], last[other], strict=True)]

    return {
        "int8_loss": above(elastic.codec, "float32"),
        "diloco_loss": above("float32", "synchronous"),
    }


def records() -> dict[str, list[float]]:
    def read(name: str) -> dict:
        return json.loads((ROOT / f"benchmarks/elastic/{name}.json").read_text())

    codecs = {row["variant"]: row for row in read("codecs")["rows"]}
    native = codecs["int8_codebook native"]
    shares = {
        row["variant"].split(",")[0]: row["value"]
        for row in read("utilisation")["rows"]
        if row["variant"].endswith("one exchange")
    }
    elastic = read_spec().trainer.elastic
    assert elastic is not None
    return {
        "fewer_bytes": [elastic.inner_steps * native["ratio"]],
        "quantiser": [native["value"] / codecs["torch operators, ±3σ"]["value"]],
        "utilisation_usa": [shares["USA"]],
        "utilisation_eu": [shares["USA and EU"]],
        "utilisation_global": [shares["global"]],
        "outer_step": [read("utilisation")["details"]["a_round"]["outer_step_s"]],
        "dead_site": [read("failover")["value"]],
    }


def verdict(published: dict, values: list[float]) -> str:
    """Return holds, fails, inconclusive or not comparable."""
    if "reason" in published:
        return "not comparable"
    middle = mean(values)
    wide = T_95 * stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    low, high = middle - wide, middle + wide
    least, most = -math.inf, math.inf
    if published.get("at_least"):
        least = published["value"]
    elif published.get("at_most"):
        most = published["value"]
    else:
        most = published["value"] + published["within"]
        # A loss may be lower than published.
        least = published["value"] - published["within"] if published["unit"] != "%" else -math.inf
    if low >= least and high <= most:
        return "holds"
    return "fails" if high < least or low > most else "inconclusive"


def main() -> None:
    published = json.loads((HERE / "published.json").read_text())
    measured = records() | losses()
    rows, unmeasured = [], []
    for each in published:
        values = measured.get(each["name"], [])
        found = verdict(each, values)
        shown = f"{mean(values):.4g}" if values else "none"
        print(f"{each['text']}: published {each['value']:g} {each['unit']}, here {shown}: {found}")
        row = {"variant": each["text"], "unit": each["unit"], "verdict": found, "published": each}
        if values:
            rows.append(row | {"value": mean(values), "values": values})
        else:
            unmeasured.append(row)
    record(
        Path(__file__).with_suffix(".json"),
        figure="published values of INTELLECT-1 that hold here",
        value=sum(row["verdict"] == "holds" for row in rows),
        unit=f"of {len(published)}",
        goal=None,
        better="higher",
        rows=rows,
        details={"seeds": SEEDS, "unmeasured": unmeasured},
    )


if __name__ == "__main__":
    main()
