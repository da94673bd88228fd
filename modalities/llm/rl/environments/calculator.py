"""An example: questions for which the policy may use a calculator."""

from __future__ import annotations

import ast
import json
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ...scoring import numeric, said
from .environment import Message, Step

_CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)
_MOST = 10**30
_OPERATIONS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
    ast.USub: operator.neg,
    ast.UAdd: operator.pos,
}


def tool_calls(content: str) -> list[dict[str, Any]]:
    """The calls in a turn, in the form that Qwen and Hermes write: `<tool_call>{"name": ..., "arguments": {...}}
    </tool_call>`.

    Raises:
        ValueError: one that is no such object.
    """
    found = []
    for text in _CALL.findall(content):
        call = json.loads(text)
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise ValueError("a call is an object with a name")
        found.append(call)
    return found


def calculate(expression: str) -> float | int:
    """The value of an expression of numbers, `+ - * / // %` and brackets.

    Raises:
        ValueError: it is anything else, or too large.
    """

    def value(node: ast.AST) -> Any:
        match node:
            case ast.Expression():
                return value(node.body)
            case ast.Constant(value=int() | float() as number) if not isinstance(number, bool):
                return _bounded(number)
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                return _bounded(_OPERATIONS[type(node.op)](value(node.left), value(node.right)))
            case ast.UnaryOp() if type(node.op) in _OPERATIONS:
                return _OPERATIONS[type(node.op)](value(node.operand))
        raise ValueError("only numbers, + - * / // % and brackets are known")

    if len(expression) > 200:
        raise ValueError("the expression is too long")
    try:
        return value(ast.parse(expression.strip(), mode="eval"))  # type: ignore[no-any-return]
    except (SyntaxError, ZeroDivisionError, OverflowError, RecursionError, MemoryError) as error:
        raise ValueError(str(error)) from error


def _bounded(number: float | int) -> float | int:
    if not abs(number) <= _MOST:  # not a number neither
        raise ValueError("too large")
    return number


class Calculator:
    """The policy may call a calculator, and then answers; it is rewarded for the right last number.

    Args:
        question: field of the row with the question.
        answer: field of the row with the number that is right.
        cost: taken from the reward for each call.
    """

    tools: Sequence[Mapping[str, Any]] = (
        {
            "type": "function",
            "function": {
                "name": "calculator",
                "description": "Computes an arithmetic expression.",
                "parameters": {
                    "type": "object",
                    "properties": {"expression": {"type": "string", "description": "such as 3 * (4 + 5)"}},
                    "required": ["expression"],
                },
            },
        },
    )

    def __init__(self, question: str = "question", answer: str = "answer", cost: float = 0.0):
        self._question, self._field, self._cost = question, answer, cost
        self._answer = ""

    def reset(self, row: Mapping[str, Any]) -> Sequence[Message]:
        self._answer = str(row[self._field])
        return [{"role": "user", "content": str(row[self._question])}]

    def step(self, message: Message) -> Step:
        content = said(str(message["content"]))
        try:
            calls = tool_calls(content)
        except ValueError as error:
            return [{"role": "tool", "content": f"error: not a tool call: {error}"}], -self._cost, False
        if not calls:
            return [], numeric(content, self._answer), True
        return [{"role": "tool", "content": self._run(one)} for one in calls], -self._cost * len(calls), False

    @staticmethod
    def _run(call: Mapping[str, Any]) -> str:
        given = call.get("arguments")
        if call["name"] != "calculator":
            return f"error: no tool {call['name']}"
        if not isinstance(given, Mapping) or not isinstance(given.get("expression"), str):
            return "error: the calculator needs an expression"
        try:
            return str(calculate(given["expression"]))
        except ValueError as error:
            return f"error: {error}"
