"""Measure the layout and prose of a Python tree, beside the limits of tests/test_house.py.

python tests/house.py [ROOT]              the figures
python tests/house.py ROOT --sample 40    random docstrings and comments, to be read aloud
python tests/house.py ROOT --worst 40     the texts with the most marks
"""

import argparse
import ast
import io
import random
import re
import tokenize
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

MARKS = {  # name: (pattern, most per 1000 words)
    "'what …' as a noun": (r"(?:^|[.;:,(] )[Ww]hat [a-z]", 0.3),
    "nobody, somebody, nothing": (r"\b(?:nobody|somebody|anybody|everybody|nothing)\b", 0.4),
    "who, whoever, whom": (r"\b(?:who|whoever|whom)\b", 0.2),
    "'that is', 'that has'": (r"\bthat (?:is|are|was|were|has|have|had)\b", 1.0),
    "', which', 'of which'": (
        r", (?:of |by |in |from |on |to |for )?(?:which|whose)\b",
        1.5,
    ),
    "those, the one, ones": (r"\b(?:the one|those|ones)\b", 0.6),
    "but for, else, of its own": (
        r"\b(?:but for|all the same|else|nor|thereof|of its own|of their own)\b",
        0.6,
    ),
    "a sentence that starts with 'Of'": (r"(?:^|\. )Of [a-z]", 0.0),
    "semicolons": (r";", 6.0),
}
IGNORED = re.compile(r"#\s*(type:|noqa|fmt:|-+|!)")


@dataclass
class House:
    """The measured tree. Sizes are in lines, with the place of the largest."""

    files: list[tuple[int, str]] = field(default_factory=list)
    classes: list[tuple[int, str]] = field(default_factory=list)
    functions: list[tuple[int, str]] = field(default_factory=list)
    class_names: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    wide: list[str] = field(default_factory=list)  # lines over 100 columns
    texts: list[tuple[str, str]] = field(default_factory=list)  # (place, docstring or comment)
    errors: list[tuple[str, str]] = field(default_factory=list)  # (place, error message)

    @property
    def num_words(self) -> int:
        return sum(len(text.split()) for _, text in self.texts + self.errors)

    @property
    def ambiguous(self) -> list[str]:
        """Return the class names that several files define."""
        return sorted(name for name, places in self.class_names.items() if len(places) > 1)

    def marks(self) -> dict[str, float]:
        """Return the marks per 1000 words.

        An error message has a semicolon between the fault and the remedy, which is no mark.
        """
        found: Counter[str] = Counter()
        for name, (pattern, _) in MARKS.items():
            for _, text in self.texts + (self.errors if name != "semicolons" else []):
                found[name] += len(re.findall(pattern, text, re.M))
        return {name: 1000 * found[name] / max(self.num_words, 1) for name in MARKS}


def measure(*roots: Path) -> House:
    """Measure all Python files below `roots`."""
    house = House()
    for path in (path for root in roots for path in sorted(root.rglob("*.py"))):
        text = path.read_text()
        lines = text.splitlines()
        if path.name != "__init__.py":
            house.files.append((len(lines), str(path)))
        house.wide += [f"{path}:{n}" for n, line in enumerate(lines, 1) if len(line) > 100]
        nodes = list(ast.walk(ast.parse(text)))
        house.texts += texts(path, text, nodes)
        house.errors += errors(path, nodes)
        for node in nodes:
            if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                size = ((node.end_lineno or 0) - node.lineno + 1, f"{path}:{node.name}")
                is_class = isinstance(node, ast.ClassDef)
                (house.classes if is_class else house.functions).append(size)
                if is_class:
                    house.class_names[node.name].add(str(path))
    return house


def texts(path: Path, text: str, nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the place and the text of each docstring and comment."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes:
        if isinstance(node, kinds) and (found := ast.get_docstring(node)):
            yield f"{path}:{getattr(node, 'lineno', 1)}", found
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT and not IGNORED.match(token.string):
            yield f"{path}:{token.start[0]}", token.string.lstrip("# ")


def errors(path: Path, nodes: list[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield the place and the words of each error message."""
    for node in nodes:
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            words = [n.value for n in ast.walk(node.exc) if isinstance(n, ast.Constant)]
            if said := " ".join(word for word in words if isinstance(word, str)):
                yield f"{path}:{node.lineno}", said


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("root", type=Path, nargs="?", default=Path("packages"))
    parser.add_argument("--sample", type=int, default=0)
    parser.add_argument("--worst", type=int, default=0)
    options = parser.parse_args()
    house = measure(options.root)
    print(f"files {len(house.files)}, lines {sum(size for size, _ in house.files)}")
    for name, sizes in vars(house).items():
        if name in ("files", "classes", "functions"):
            print(f"largest of {name}: {max(sizes)}")
    print(f"lines over 100 columns {len(house.wide)}, words {house.num_words}")
    print(f"class names with two meanings: {', '.join(house.ambiguous) or 'none'}")
    for name, found in house.marks().items():
        print(f"{name}, per 1000 words: {found:.2f} (at most {MARKS[name][1]})")
    long = [each for each in house.texts if len(each[1].split()) >= 6]
    worst = sorted(
        long, key=lambda each: -sum(len(re.findall(p, each[1])) for p, _ in MARKS.values())
    )
    for place, text in random.sample(long, min(options.sample, len(long))) + worst[: options.worst]:
        print(f"\n{place}\n  {text}")


if __name__ == "__main__":
    main()
