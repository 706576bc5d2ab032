"""Write arithmetic.jsonl: sums, products, equations, divisors and word problems of reasoning-gym.

    python examples/problems/generate.py examples/problems/arithmetic.jsonl

- A line is {"question", "answer", "family"}. Every answer is one whole number.
- No question stands twice. The lines follow from SEED and from the release of reasoning-gym.
- The mix suits SmolLM2-135M: it can learn one digit, and two digits or several steps hardly.
"""

import argparse
import json
import random
import re
from pathlib import Path
from typing import Any

import reasoning_gym

SEED = 1
PLUS_MINUS = {"operators": ("+", "-"), "operators_weights": [0.5, 0.5]}
MIX: list[tuple[str, int, dict[str, Any]]] = [  # family, number of lines, config
    ("chain_sum", 130, dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)),
    ("chain_sum", 600, dict(min_terms=3, max_terms=3, min_digits=1, max_digits=1)),
    ("chain_sum", 300, dict(min_terms=2, max_terms=2, min_digits=2, max_digits=2)),
    ("products", 60, dict(min_terms=2, max_terms=2, min_digits=1, max_digits=1)),
    ("products", 240, dict(min_terms=2, max_terms=2, min_digits=1, max_digits=2)),
    ("simple_equations", 400, dict(max_terms=2, max_value=9) | PLUS_MINUS),
    ("gcd", 270, dict(max_value=30)),
    ("leg_counting", 60, dict(min_animals=1, max_animals=1, max_instances=4)),
    ("leg_counting", 150, dict(min_animals=2, max_animals=2, max_instances=3)),
    ("gsm_symbolic", 30, {}),
]


def lines() -> list[dict[str, Any]]:
    rows: dict[str, dict[str, Any]] = {}
    for number, (family, count, config) in enumerate(MIX):
        seed, wanted = SEED * 1000 + number, len(rows) + count
        for item in reasoning_gym.create_dataset(family, seed=seed, size=100 * count, **config):
            if len(rows) == wanted:
                break
            row = {"question": " ".join(item["question"].split()), "answer": item["answer"]}
            if re.fullmatch(r"-?\d+", row["answer"]):
                rows.setdefault(row["question"], {**row, "family": family})
        assert len(rows) == wanted, f"{family}: too few different questions"
    return random.Random(SEED).sample(list(rows.values()), len(rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("file", type=Path)
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in lines())
    parser.parse_args().file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
