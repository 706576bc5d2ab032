"""Define verdicts on replies of the task `dataset`. Docstrings say when the reward is 1."""

import hashlib
import json
import numbers
import re
import traceback
import types
import unicodedata
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from orrery.manifest.errors import OrreryError
from orrery.manifest.schema import Record
from orrery.manifest.schema.model import Sha256

PACKAGE = str(Path(__file__).parent)
PLACEHOLDER = "{answer}"
LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
BOXED = re.compile(r"\\boxed\s*\{\s*(?:\\text\s*\{)?\s*\(?([A-Za-z])\)?\s*\}")
# In "the answer is a bit" or "my answer: I think", "a" and "I" are not choices.
WORD = r"[aiI][ \t]++(?!(?:because|since|as|is|and|or)\b)[*_\"“$`]*+\w"
SAID = re.compile(
    r"(?i:answer|choice|option)\b[\s*]*+(?:(?i:is)\b[\s*]*+)?(?:[:=–—-][\s*]*+)?"
    rf"\(?(?!{WORD})([A-Za-z])\)?(?![A-Za-z'’])"
)
ALONE = re.compile(r"(?<![A-Za-z])\(?([B-HJ-Z]|[AI](?!\s+[a-z]))\)?(?![A-Za-z'’])")
FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.S)


class Math(Record):
    """The reply's last formula equals the answer (math-verify). `boxed` requires \\boxed{…}."""

    kind: Literal["math"]
    boxed: bool


class Exact(Record):
    """The reply, or group 1 of the last match of `pattern`, equals the answer.

    Unicode form (NFKC), whitespace amounts and final full stops are ignored.
    """

    kind: Literal["exact"]
    ignore_case: bool
    pattern: str | None

    @model_validator(mode="after")
    def _compiles(self) -> "Exact":
        if self.pattern is not None and compiled(self.pattern).groups < 1:
            raise ValueError(f"pattern {self.pattern!r} has no group. Write (…) around the answer")
        return self


class Pattern(Record):
    """Regex `pattern` matches a part of the reply. The escaped answer replaces `{answer}`."""

    kind: Literal["pattern"]
    pattern: str

    @model_validator(mode="after")
    def _compiles(self) -> "Pattern":
        if PLACEHOLDER not in self.pattern:
            raise ValueError(f"pattern {self.pattern!r} lacks {PLACEHOLDER}. Add it")
        compiled(self.pattern.replace(PLACEHOLDER, "x"))
        return self


class Choice(Record):
    """The reply chooses the answer's letter from the first `num_choices` letters."""

    kind: Literal["choice"]
    num_choices: Annotated[int, Field(ge=2, le=26)]


class JsonSchema(Record):
    """The answer is a JSON schema. The reply, or its last fenced block, is JSON that fits it."""

    kind: Literal["json_schema"]


class Python(Record):
    """`function(reply, answer, row)` in a user's Python file returns the reward."""

    kind: Literal["python"]
    path: str
    sha256: Sha256
    function: str


Verdict = Annotated[
    Math | Exact | Pattern | Choice | JsonSchema | Python, Field(discriminator="kind")
]


def compiled(pattern: str, flags: int = re.S) -> re.Pattern[str]:
    try:
        return re.compile(pattern, flags)
    except re.error as error:
        raise ValueError(f"pattern {pattern!r} is no regular expression: {error}") from error


def scorer_of(request: dict[str, Any]) -> Callable[[str], float]:
    verdict, answer = request["verdict"], request["answer"]
    match verdict["kind"]:
        case "math":
            gold = _parsed(answer)
            return lambda text: float(_equal(gold, text, verdict["boxed"]))
        case "exact":
            wanted = _normal(answer, verdict["ignore_case"])
            return lambda text: float(
                _normal(_extracted(text, verdict["pattern"]), verdict["ignore_case"]) == wanted
            )
        case "pattern":
            pattern = compiled(verdict["pattern"].replace(PLACEHOLDER, re.escape(answer)))
            return lambda text: float(pattern.search(text) is not None)
        case "choice":
            letters = LETTERS[: verdict["num_choices"]]
            if answer.strip() not in tuple(letters):
                raise ValueError(f"the answer {answer!r} is none of the letters {letters}")
            return lambda text: float(_choice(text, letters) == answer.strip())
        case "json_schema":
            return _schema_scorer(answer)
        case "python":
            function = reward_function(verdict["path"], verdict["sha256"], verdict["function"])
            return lambda text: _number(function(text, answer, request["row"]))
    raise ValueError(f"there is no verdict {verdict['kind']!r}")


def _parsed(answer: str) -> list[Any]:
    try:
        from math_verify import parse
    except ImportError as error:
        raise OrreryError(
            "verdict: math needs math-verify, which is not installed here. Type `make setup`, or "
            "choose another verdict"
        ) from error
    gold = parse(answer if "\\boxed" in answer or "$" in answer else f"${answer}$", **_UNTIMED)
    if not gold:
        raise ValueError(f"the answer {answer!r} is not a formula")
    return gold


def _equal(gold: list[Any], text: str, boxed: bool) -> bool:
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    if boxed and "\\boxed" not in text:
        return False
    latex = LatexExtractionConfig(boxed_match_priority=0)
    config = [latex] if boxed else [latex, ExprExtractionConfig()]
    return bool(verify(gold, parse(text, config, **_UNTIMED), timeout_seconds=None))


_UNTIMED: dict[str, Any] = {"parsing_timeout": None}  # `scorer_pool.py` limits the time


def _normal(text: str, ignore_case: bool) -> str:
    text = " ".join(unicodedata.normalize("NFKC", text).split()).rstrip(". ")
    return text.casefold() if ignore_case else text


def _extracted(text: str, pattern: str | None) -> str:
    if pattern is None:
        return text
    matches = list(compiled(pattern).finditer(text))
    return (matches[-1].group(1) or "") if matches else ""


def _choice(text: str, letters: str) -> str | None:
    for pattern in (BOXED, SAID, ALONE):
        found = [letter.upper() for letter in pattern.findall(text)]
        found = [letter for letter in found if letter in letters]
        if found:
            return found[-1]
    bare = text.strip(" \t\n*().:").upper()  # the reply may be "(b)."
    return bare if bare in tuple(letters) else None


def _schema_scorer(answer: str) -> Callable[[str], float]:
    import jsonschema

    try:
        schema = json.loads(answer)
        jsonschema.Draft202012Validator.check_schema(schema)
    except (ValueError, jsonschema.SchemaError) as error:
        raise ValueError(
            f"the answer is not a JSON schema: {str(error).splitlines()[0]}"
        ) from error
    validator = jsonschema.Draft202012Validator(schema)

    def score(text: str) -> float:
        fenced = FENCED.findall(text)
        try:
            return float(validator.is_valid(json.loads(fenced[-1] if fenced else text)))
        except ValueError:
            return 0.0

    return score


def _number(given: Any) -> float:
    if not isinstance(given, numbers.Real):
        raise TypeError(f"the reward is {type(given).__name__}, not a number")
    return float(given)


def told(error: Exception) -> str:
    """Describe an error and its line in user code: `KeyError: 'x' (reward.py:3)`."""
    said = f"{type(error).__name__}: {error}"
    if isinstance(error, SyntaxError):
        return f"{said.partition(' (')[0]} ({Path(error.filename or '').name}:{error.lineno})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not frame.filename.startswith(PACKAGE)]
    return f"{said} ({Path(own[-1].filename).name}:{own[-1].lineno})" if own else said


@cache
def reward_function(path: str, sha256: str, name: str) -> Callable[..., float]:
    try:
        source = Path(path).read_bytes()
    except OSError as error:
        raise OrreryError(f"path: {path}: {error.strerror}. Name your reward's file") from error
    found = hashlib.sha256(source).hexdigest()
    if found != sha256:
        raise OrreryError(
            f"sha256: {path} has {found}, the manifest says {sha256}. Write the new sha256 "
            "into the spec, or restore the old file"
        )
    module = types.ModuleType("reward")
    module.__file__ = path
    try:
        exec(compile(source, path, "exec"), module.__dict__)
    except Exception as error:
        raise OrreryError(f"path: {path} cannot be loaded: {told(error)}. Correct it") from error
    function = getattr(module, name, None)
    if not callable(function):
        raise OrreryError(f"function: {path} defines no function {name!r}. Correct the name")
    return function
