"""The reward of programs: whether they pass tests, in a sandbox."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import secrets
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

from .....common.errors import RecipeError
from ...scoring import exact_match, said
from . import sandbox
from .answer import Answer, Scorer, Unscored, guarded
from .config import Code

logger = logging.getLogger(__name__)

_BLOCK = re.compile(r"^```[^\n`]*\n(.*?)^```\s*$", re.DOTALL | re.MULTILINE)

_HARNESS = """
import io, json, os, sys

def run():
    job = json.loads(sys.stdin.read())
    report = os.dup(1)
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    sys.stdin = io.StringIO()
    space = {"__name__": "answer"}
    exec(compile(job["code"], "answer.py", "exec"), space)
    for number, test in enumerate(job["tests"]):
        try:
            exec(compile(test, "test.py", "exec"), space)
        except BaseException:
            continue
        os.write(report, f"{job['secret']} {number}\\n".encode())

run()
"""
"""Prints a mark for each test that passes. The mark is made for this run and comes by standard input, so that neither
what the answer prints nor its ending the process at once counts as a pass."""


@dataclass(frozen=True, slots=True)
class Case:
    """A test of a program that reads and writes."""

    given: str
    expected: str


def code(section: Code) -> Scorer:
    """See `config.Code`.

    Raises:
        RecipeError: the system does not allow the isolation that the recipe asks for.
    """
    _check_isolation(section.strict)
    limits = sandbox.Limits(section.timeout, section.memory, section.disk, section.processes, section.output)
    workers = section.workers or os.cpu_count() or 1

    def score(answer: Answer) -> float:
        passed = _passed(program(answer.completion), tests_of(answer.row.get(section.tests), section.tests), limits)
        return sum(passed) / len(passed) if section.partial else float(all(passed))

    def scorer(answers: Sequence[Answer]) -> list[float | Unscored | None]:
        with ThreadPoolExecutor(workers, "sandbox") as pool:
            return list(pool.map(guarded, [partial(score, answer) for answer in answers]))

    return scorer


def _check_isolation(strict: bool) -> None:
    try:
        missing = sandbox.missing()
    except sandbox.SandboxError as error:
        raise RecipeError(f"programs can't be run here: {error}", where="rewards", given="kind: code") from error
    if not missing:
        return
    if strict:
        raise RecipeError(
            f"this machine does not keep programs from {'; '.join(missing)}",
            where="rewards",
            given="kind: code",
            do="run as root or allow user namespaces; or set strict: false, where nothing can be harmed",
        )
    logger.warning("programs are not kept from %s", "; ".join(missing))


def program(completion: str) -> str:
    """The program in an answer: its last fenced block, else all that follows what the model thought."""
    answer = said(completion)
    blocks = _BLOCK.findall(answer)
    return str(blocks[-1]) if blocks else answer


def tests_of(given: Any, name: str) -> list[str] | list[Case]:
    """The tests of a row, in one of the forms of `config.Code.tests`.

    Raises:
        Unscored: it has none, or of another form.
    """
    if isinstance(given, str) and given.lstrip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError):  # code may begin with a bracket too
            given = json.loads(given)
    if isinstance(given, str) and given.strip():
        return [given]
    if isinstance(given, dict) and isinstance(given.get("inputs"), list) and isinstance(given.get("outputs"), list):
        if len(given["inputs"]) != len(given["outputs"]):
            raise Unscored(f"the row's {name!r} has not as many inputs as outputs")
        pairs = zip(given["inputs"], given["outputs"], strict=True)
        given = [{"input": one, "output": other} for one, other in pairs]
    if isinstance(given, list | tuple) and given:
        if all(isinstance(one, str) for one in given):
            return list(given)
        if all(isinstance(one, dict) and isinstance(one.get("output"), str) for one in given):
            return [Case(str(one.get("input", "")), one["output"]) for one in given]
    raise Unscored(f"the row's {name!r} holds no tests: {given!r:.100}")


def _passed(source: str, tests: list[str] | list[Case], limits: sandbox.Limits) -> list[bool]:
    """Which tests a program passes."""
    codes = [test for test in tests if isinstance(test, str)]
    if codes:
        secret = secrets.token_hex(16)
        job = json.dumps({"secret": secret, "code": source, "tests": codes})
        marks = set(sandbox.run(_HARNESS, job, limits).output.splitlines())
        return [f"{secret} {number}" in marks for number in range(len(codes))]
    return [_gives(source, test, limits) for test in tests if isinstance(test, Case)]


def _gives(source: str, case: Case, limits: sandbox.Limits) -> bool:
    ended = sandbox.run(source, case.given, limits)
    return ended.how == "exited" and ended.code == 0 and exact_match(ended.output, case.expected) == 1.0
