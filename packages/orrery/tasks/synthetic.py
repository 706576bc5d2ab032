"""Define synthetic tasks: reverse text or words, calculate, sample answers of given lengths.

Reward of a reversal: correctly placed characters or words, divided by max(len(reply),
len(answer)).
"""

import ast
import hashlib
import math
import operator
import random
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field, model_validator

from orrery.manifest.schema import Count, PositiveInt, Probability, Record
from orrery.tasks.task import Judgement, Message, Problem, SingleTurn, Split, Tool, ToolCall, draw

WORDS = (
    "apple", "arm", "baby", "bank", "bird", "boat", "book", "bread", "bridge", "brother", "chair",
    "child", "church", "city", "cloud", "coat", "corn", "cup", "day", "dog", "door", "dream",
    "earth", "egg", "field", "fire", "fish", "flower", "food", "friend", "garden", "glass", "gold",
    "grass", "hand", "hat", "heart", "hill", "home", "horse", "ice", "island", "king", "lake",
    "leaf", "letter", "light", "map", "milk", "money", "moon", "mother", "music", "night", "ocean",
    "paper", "picture", "plant", "queen", "rain", "ring", "river", "road", "salt", "sand", "school",
    "sea", "ship", "shoe", "sky", "smile", "snow", "song", "star", "stone", "street", "sugar",
    "summer", "sun", "table", "teacher", "train", "tree", "village", "wall", "water", "wind",
    "window", "winter", "wood",
)  # fmt: skip
COMPARED = 512  # maximum characters in `lcs_ratio` (quadratic time)
INPUT = {"type": "string", "description": "the expression, such as 12*(3+4)"}
TOOL = Tool(
    "calculator",
    "Value of an integer expression of +, -, * and parentheses.",
    {"type": "object", "properties": {"input": INPUT}, "required": ["input"]},
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION_CHARS = 200
MAX_CALLS_PER_TURN = 3


class _Reverse(SingleTurn):
    def problem(self, index: int) -> Problem:
        raise NotImplementedError

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        return [*problem.messages, Message("assistant", problem.answer)]


class ReverseText(_Reverse):
    class Args(Record):
        alphabet: Annotated[str, Field(min_length=1)]
        min_length: Count
        max_length: Count
        instruction: str
        split: Split

        @model_validator(mode="after")
        def lengths_rise(self) -> "ReverseText.Args":
            if self.max_length < self.min_length:
                raise ValueError(
                    f"max_length {self.max_length} is below min_length {self.min_length}"
                )
            if len(set(self.alphabet)) < len(self.alphabet) or set(self.alphabet) & set(" \t\n"):
                raise ValueError(
                    f"alphabet {self.alphabet!r} must contain each character once, and no blank"
                )
            return self

    def _string(self, rng: random.Random) -> str:
        length = rng.randint(self.args.min_length, self.args.max_length)
        return "".join(rng.choice(self.args.alphabet) for _ in range(length))

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_text", self.seed, index, self._string)
        return Problem(index, (Message("user", self.args.instruction + text),), answer=text[::-1])

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        reply, answer = messages[-1].content.strip(), problem.answer
        a, b = reply[:COMPARED], answer[:COMPARED]
        lcs_ratio = 2 * longest_common_subsequence(a, b) / (len(a) + len(b))
        metrics = {"exact": float(reply == answer), "lcs_ratio": lcs_ratio}
        return Judgement(_share_in_place(reply, answer), metrics)


class ReverseWords(_Reverse):
    class Args(Record):
        min_words: PositiveInt
        max_words: PositiveInt
        instruction: str
        split: Split

        @model_validator(mode="after")
        def numbers_rise(self) -> "ReverseWords.Args":
            if not self.min_words <= self.max_words <= len(WORDS):
                raise ValueError(
                    f"min_words {self.min_words} must be at most max_words {self.max_words}, and "
                    f"max_words at most {len(WORDS)}"
                )
            return self

    def _text(self, rng: random.Random) -> str:
        return " ".join(rng.sample(WORDS, rng.randint(self.args.min_words, self.args.max_words)))

    def problem(self, index: int) -> Problem:
        text = draw(self.args.split, "reverse_words", self.seed, index, self._text)
        answer = " ".join(reversed(text.split()))
        return Problem(index, (Message("user", self.args.instruction + text),), answer=answer)

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        reply, answer = messages[-1].content.split(), problem.answer.split()
        return Judgement(_share_in_place(reply, answer), {"exact": float(reply == answer)})


def _share_in_place(reply: Sequence[str], answer: Sequence[str]) -> float:
    num_right = sum(a == b for a, b in zip(reply, answer, strict=False))
    return num_right / max(len(reply), len(answer))


def longest_common_subsequence(a: str, b: str) -> int:
    row = [0] * (len(b) + 1)
    for x in a:
        diagonal = 0
        for j, y in enumerate(b, 1):
            diagonal, row[j] = row[j], diagonal + 1 if x == y else max(row[j], row[j - 1])
    return row[-1]


class Lengths(SingleTurn):
    """Sample answers of given lengths, to measure speed.

    All answers to a problem have one log-normal length. The reward is a hash of the answer, so
    rewards differ within a group.
    """

    class Args(Record):
        median_tokens: PositiveInt
        sigma: Annotated[float, Field(ge=0.0, le=10.0)]
        max_tokens: PositiveInt
        prompt_words: Count

        @model_validator(mode="after")
        def median_is_reached(self) -> "Lengths.Args":
            if self.median_tokens > self.max_tokens:
                raise ValueError(
                    f"median_tokens {self.median_tokens} exceeds max_tokens {self.max_tokens}. "
                    f"Lower it to {self.max_tokens} or less"
                )
            return self

    def problem(self, index: int) -> Problem:
        rng = random.Random(f"lengths/{self.seed}/{index}")
        drawn = round(self.args.median_tokens * math.exp(rng.gauss(0.0, self.args.sigma)))
        words = " ".join(
            "".join(rng.choice("abcdefghijkl") for _ in range(4))
            for _ in range(self.args.prompt_words)
        )
        num_tokens = min(max(drawn, 1), self.args.max_tokens)
        return Problem(index, (Message("user", words),), answer=None, exact_tokens=num_tokens)

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        text = messages[-1].content.encode(errors="replace")
        digest = hashlib.blake2b(text, digest_size=2).digest()
        return Judgement(int.from_bytes(digest, "big") / 65535, {})


def evaluate(expression: str) -> int:
    def value(node: ast.AST) -> int:
        match node:
            case ast.Constant(value=int(number)) if not isinstance(number, bool):
                return number
            case ast.BinOp(left=left, op=op, right=right) if type(op) in OPERATORS:
                return OPERATORS[type(op)](value(left), value(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -value(operand)
        raise ValueError("not an expression")

    if len(expression) > MAX_EXPRESSION_CHARS or not re.fullmatch(r"[0-9+*() -]+", expression):
        raise ValueError("not an expression")
    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, MemoryError, RecursionError) as error:
        raise ValueError("not an expression") from error


class Calculator:
    """Evaluate an integer expression with a calculator tool, in several turns.

    - The model calls the tool, gets the value as a tool message, and must reply only the value.
    - `call_syntax`: "chat_format" for the chat template's calls, "text" for `calculator(12+7)`.
    - Reward: `call_reward` for a valid call, plus 1 − `call_reward` for the right answer.
    """

    class Args(Record):
        max_operand: PositiveInt
        num_operations: Count
        operators: Annotated[str, Field(pattern=r"^[-+*]+$")]
        call_reward: Probability
        call_syntax: Literal["chat_format", "text"]
        split: Split

    def __init__(self, args: Args, seed: int) -> None:
        self.args, self.seed = args, seed

    def _expression(self, rng: random.Random) -> str:
        num_operands, most = self.args.num_operations + 1, self.args.max_operand
        first, *others = [str(rng.randint(0, most)) for _ in range(num_operands)]
        return first + "".join(rng.choice(self.args.operators) + operand for operand in others)

    def problem(self, index: int) -> Problem:
        expression = draw(self.args.split, "calculator", self.seed, index, self._expression)
        tools = (TOOL,) if self.args.call_syntax == "chat_format" else ()
        answer = str(evaluate(expression))
        return Problem(index, (Message("user", expression),), answer=answer, tools=tools)

    def _calls(self, message: Message) -> Sequence[ToolCall]:
        if self.args.call_syntax == "chat_format" or message.role != "assistant":
            return message.tool_calls
        return [ToolCall(TOOL.name, {"input": text}) for text in text_calls(message.content)]

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        calls = self._calls(messages[-1])[:MAX_CALLS_PER_TURN]
        return [Message("tool", result(call), name=call.name) for call in calls] or None

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        turns = messages[len(problem.messages) :]
        last = turns[-1]
        called = any(
            not result(call).startswith("error")
            for message in turns
            for call in self._calls(message)
        )
        is_answer = last.role == "assistant" and not self._calls(last)
        right = is_answer and last.content.strip() == problem.answer
        reward = self.args.call_reward * called + (1.0 - self.args.call_reward) * right
        return Judgement(reward, {"called": float(called), "exact": float(right)})

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        expression = problem.messages[0].content
        call = Message("assistant", "", (ToolCall(TOOL.name, {"input": expression}),))
        if self.args.call_syntax == "text":
            call = Message("assistant", f"{TOOL.name}({expression})")
        value = Message("tool", problem.answer, name=TOOL.name)
        return [*problem.messages, call, value, Message("assistant", problem.answer)]


def text_calls(text: str) -> list[str]:
    calls = []
    for line in text.split("\n"):
        _, opened, behind = line.partition(f"{TOOL.name}(")
        expression, closed, _ = behind.rpartition(")")
        if opened and closed:
            calls.append(expression)
    return calls


def result(call: ToolCall) -> str:
    if call.name != TOOL.name:
        return "error no such tool"
    if set(call.arguments) != {"input"} or not isinstance(call.arguments["input"], str):
        return "error give one argument input"
    try:
        return str(evaluate(call.arguments["input"]))
    except ValueError:
        return "error not an expression"
