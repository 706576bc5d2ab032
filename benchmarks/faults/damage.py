"""Ways to damage a file: its bytes, its text, a value of JSON, a field of Jsonnet, or its path.

A damage takes a path and a seeded `random.Random`. It rewrites the file, or puts a folder, link or
pipe at the path.
"""

import copy
import json
import os
import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Damage = Callable[[Path, random.Random], None]

NUMBERS = (
    "1e30",
    "-1",
    "0",
    "1e999",
    "1" + "0" * 30,
    "1" + "0" * 5000,
    "0.5",
    "65536",
    "1000000000",
)
ODD_JSON = (
    *NUMBERS,
    "NaN",
    "-Infinity",
    "null",
    "true",
    '""',
    '"x"',
    "[]",
    "{}",
    "[1, 2]",
    '"\\ud800"',
    '"a\\u0000b"',
    '{"kind": "no"}',
)
ODD_JSONNET = (
    "1e30", "-1", "0", "0.5", "1e15", "null", "true", "''", "'x'", "[]", "{}", "[1, 2]",
    "{ kind: 'no' }", "error 'no'", "1 / 0", "function(x) x", "'\\u0000'",
    "std.repeat('a', 100000)", "(local f(n) = [if n == 0 then 0 else f(n - 1)]; f(100))",
)  # fmt: skip
DEEP = 100_000


def text_damage(path: Path, rng: random.Random) -> None:
    """Truncate, empty, overwrite or re-encode the file's bytes."""
    data = path.read_bytes()
    at = rng.randrange(len(data) + 1)
    noise = rng.randbytes(rng.randint(1, 40))
    damaged = (
        data[:at],
        b"",
        noise,
        data[:at] + noise + data[at:],
        data[:at] + data[at + rng.randint(1, 40) :],
        data + data,
        b"\xef\xbb\xbf" + data,
        data.decode(errors="replace").encode("utf-16"),
        data[:at] + b"\0" + data[at:],
        b"[" * DEEP,
        b'{"a":' * DEEP + b"1" + b"}" * DEEP,
        b"\n" * 1000,
    )
    path.write_bytes(rng.choice(damaged))


def path_damage(path: Path, rng: random.Random) -> None:
    """Replace the file by a folder, a link or a pipe, or remove its read permission."""
    if rng.random() < 0.2:
        path.chmod(0)
        return
    path.unlink()
    put: tuple[Callable[[], object], ...] = (
        path.mkdir,
        lambda: path.symlink_to(path.name),
        lambda: path.symlink_to("nowhere"),
        lambda: path.symlink_to("/dev/zero"),
        lambda: path.symlink_to(path.parent),
        lambda: os.mkfifo(path),
        lambda: None,
    )
    rng.choice(put)()


def json_damage(path: Path, rng: random.Random) -> None:
    """Replace, remove, add or rename one value of a JSON file, or of one line of JSON lines."""
    lines = path.read_text().splitlines() if path.suffix == ".jsonl" else [path.read_text()]
    number = rng.randrange(len(lines))
    value = json.loads(lines[number])
    lines[number] = _odd_value(value, rng)
    path.write_text("\n".join(lines) + "\n")


def _odd_value(value: Any, rng: random.Random) -> str:
    value, mark = copy.deepcopy(value), "\u2603odd\u2603"
    if rng.random() < 0.1 or not value:
        return rng.choice(ODD_JSON)
    holder, key = rng.choice(list(_places(value)))
    how = rng.random()
    if how < 0.15:
        del holder[key]
    elif how < 0.25 and isinstance(holder, dict):
        holder[f"{key}s"] = holder.pop(key)
    else:
        holder[key] = mark
    odd = "[" * 200 + "]" * 200 if rng.random() < 0.05 else rng.choice(ODD_JSON)
    return json.dumps(value).replace(json.dumps(mark), odd)


def _places(value: Any) -> list[tuple[Any, Any]]:
    """Return (container, key) for every element of a JSON value."""
    found = []
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        found += [(value, key), *_places(value[key])]
    return found


def jsonnet_damage(path: Path, rng: random.Random) -> None:
    """Give one field of a Jsonnet file, or the whole file, another value or name."""
    text = path.read_text()
    fields = list(re.finditer(r"\b(\w+)(\+?::?) ([^\n{}\[\],]+)(?=[,}\]\n])", text))
    if rng.random() < 0.15 or not fields:
        path.write_text(rng.choice(ODD_JSONNET))
        return
    one = rng.choice(fields)
    name = one[1] + "s" if rng.random() < 0.15 else one[1]
    value = rng.choice(ODD_JSONNET)
    path.write_text(f"{text[: one.start()]}{name}{one[2]} {value}{text[one.end() :]}")
