"""Write plain text for the runs of several sites: short stories of a small grammar.

    python benchmarks/elastic/text.py datasets/elastic_text.jsonl

The sha256 in jsonnet/runs/elastic_text.jsonnet is that of the file with NUM_STORIES stories.
"""

import argparse
import json
import random
from pathlib import Path

NUM_STORIES = 20_000
NAMES = ("Ada", "Ben", "Cleo", "Dan", "Eva", "Finn", "Gia", "Hugo")
PLACES = ("barn", "river", "market", "forest", "harbour", "mill")
THINGS = ("apple", "lamp", "rope", "basket", "letter", "stone", "key")
VERBS = ("finds", "carries", "loses", "hides", "sells", "paints")
COLOURS = ("red", "green", "old", "small", "heavy", "bright")


def story(number: int, seed: int = 1) -> str:
    """Return story `number`: it repeats its names, things and sums, so context helps."""
    draw = random.Random(seed * 1_000_003 + number)

    def one(words: tuple[str, ...]) -> str:
        return words[int(draw.random() * len(words))]

    name, other, thing, place = one(NAMES), one(NAMES), one(THINGS), one(PLACES)
    colour = one(COLOURS)
    lines = [f"{name} walks to the {place}."]
    for _ in range(2 + int(draw.random() * 4)):
        kind = int(draw.random() * 4)
        if kind == 0:
            lines.append(f"{name} {one(VERBS)} the {colour} {thing}.")
        elif kind == 1:
            first, second = int(draw.random() * 10), int(draw.random() * 10)
            lines.append(f"{other} counts {first} and {second}, so {first + second} in all.")
        elif kind == 2:
            lines.append(f"In the {place} {other} asks {name} for the {thing}.")
        else:
            lines.append(f"The {thing} of {name} is {colour}.")
    lines.append(f"Then {other} and {name} leave the {place}.")
    return " ".join(lines)


def write(path: Path, num_stories: int = NUM_STORIES) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        for number in range(num_stories):
            file.write(json.dumps({"text": story(number)}) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("path", type=Path)
    write(parser.parse_args().path)
