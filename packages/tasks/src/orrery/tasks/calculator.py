"""Work out an integer expression with a calculator tool. Multi-turn.

- The model calls `calculator` with the expression as its one argument `input`, gets the value as a tool message, and then answers with the
  value alone. Three calls a turn are answered at most.
- `call_syntax`: "chat_format" leaves it to the chat format how a tool is announced and called; "text" is for models whose format has none:
  `calculator(12+7)` in the answer's text is a call, and the prompt says nothing of it (`few_shot` can show it).
- Reward: `call_reward` for at least one call that the calculator could evaluate, and the rest, 1 − `call_reward`, for the right answer.
  The partial reward is what a policy climbs on before it copies the result; 0 turns it off.
- A malformed call is no call: it ends the episode like any other final answer.
"""

import ast
import operator
import random
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from orrery.manifest.schema import Count, PositiveInt, Probability, Record
from orrery.tasks.split import Split, draw
from orrery.tasks.task import Judgement, Message, Problem, Tool, ToolCall

TOOL = Tool(
    "calculator",
    "Value of an integer expression of +, -, * and parentheses.",
    {
        "type": "object",
        "properties": {
            "input": {"type": "string", "description": "the expression, such as 12*(3+4)"}
        },
        "required": ["input"],
    },
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION_CHARS = 200
MAX_CALLS_PER_TURN = 3


def evaluate(expression: str) -> int:
    """Value of an expression of integers, + - * and parentheses. Raises ValueError on anything else."""

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
        operands = [
            str(rng.randint(0, self.args.max_operand)) for _ in range(self.args.num_operations + 1)
        ]
        return operands[0] + "".join(
            rng.choice(self.args.operators) + operand for operand in operands[1:]
        )

    def problem(self, index: int) -> Problem:
        expression = draw(self.args.split, "calculator", self.seed, index, self._expression)
        tools = (TOOL,) if self.args.call_syntax == "chat_format" else ()
        return Problem(
            index, (Message("user", expression),), answer=str(evaluate(expression)), tools=tools
        )

    def _calls(self, message: Message) -> Sequence[ToolCall]:
        if self.args.call_syntax == "chat_format" or message.role != "assistant":
            return message.tool_calls
        return [
            ToolCall(TOOL.name, {"input": expression}) for expression in text_calls(message.content)
        ]

    def reply(self, problem: Problem, messages: Sequence[Message]) -> list[Message] | None:
        calls = self._calls(messages[-1])
        return (
            [Message("tool", result(call), name=call.name) for call in calls[:MAX_CALLS_PER_TURN]]
            if calls
            else None
        )

    def judge(self, problem: Problem, messages: Sequence[Message]) -> Judgement:
        said = messages[len(problem.messages) :]
        called = any(
            not result(call).startswith("error")
            for message in said
            for call in self._calls(message)
        )
        right = (
            said[-1].role == "assistant"
            and not self._calls(said[-1])
            and said[-1].content.strip() == problem.answer
        )
        reward = self.args.call_reward * called + (1.0 - self.args.call_reward) * right
        return Judgement(reward, {"called": float(called), "exact": float(right)})

    def demonstration(self, index: int) -> list[Message]:
        problem = self.problem(index)
        expression = problem.messages[0].content
        call = Message("assistant", "", (ToolCall(TOOL.name, {"input": expression}),))
        if self.args.call_syntax == "text":
            call = Message("assistant", f"{TOOL.name}({expression})")
        return [
            *problem.messages,
            call,
            Message("tool", problem.answer, name=TOOL.name),
            Message("assistant", problem.answer),
        ]


def text_calls(text: str) -> list[str]:
    """What stands in each line of a text between its first `calculator(` and its last `)`. In time linear in the text."""
    calls = []
    for line in text.split("\n"):
        _, opened, behind = line.partition(f"{TOOL.name}(")
        expression, closed, _ = behind.rpartition(")")
        if opened and closed:
            calls.append(expression)
    return calls


def result(call: ToolCall) -> str:
    """What the calculator says to a call: a number, or a text that begins with `error`."""
    if call.name != TOOL.name:
        return "error no such tool"
    if set(call.arguments) != {"input"} or not isinstance(call.arguments["input"], str):
        return "error give one argument input"
    try:
        return str(evaluate(call.arguments["input"]))
    except ValueError:
        return "error not an expression"
