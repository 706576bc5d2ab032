"""Evaluate an integer expression with a calculator tool, in several turns.

- The model calls `calculator`, gets the value as a tool message, and must reply only the value.
- `call_syntax`: "chat_format" for the chat template's tool calls, "text" for `calculator(12+7)`.
- Reward: `call_reward` for at least one valid call, plus 1 − `call_reward` for the right answer.
"""

import ast
import operator
import random
import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import Field

from orrery.manifest.schema import Count, PositiveInt, Probability, Record
from orrery.tasks.task import Judgement, Message, Problem, Split, Tool, ToolCall, draw

INPUT = {"type": "string", "description": "the expression, such as 12*(3+4)"}
TOOL = Tool(
    "calculator",
    "Value of an integer expression of +, -, * and parentheses.",
    {"type": "object", "properties": {"input": INPUT}, "required": ["input"]},
)
OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul}
MAX_EXPRESSION_CHARS = 200
MAX_CALLS_PER_TURN = 3


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
