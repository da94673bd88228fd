"""The reward of programs: what passes, and what does not count as passing."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from luthier.common.errors import RecipeError
from luthier.modalities.llm.rl.rewards import code, sandbox
from luthier.modalities.llm.rl.rewards.answer import Answer
from luthier.modalities.llm.rl.rewards.config import Code
from luthier.modalities.llm.rl.rewards.rewards import Rewards

ASSERTS = ["assert double(2) == 4", "assert double('a') == 'aa'", "assert double([]) == []"]
RIGHT = "def double(x):\n    return x + x\n"


def scored(said: str | list[str], tests: Any, **options: Any) -> list[float]:
    given = [said] if isinstance(said, str) else said
    section = Code(**{"strict": False, "timeout": 5.0, **options})
    found = Rewards([section]).score([Answer("", one, 1, True, {"tests": tests}) for one in given])
    return [float(one) for one in found.total]


def fenced(source: str) -> str:
    return f"Here it is:\n```python\n{source}```\nDone."


def test_asserts() -> None:
    half = "def double(x):\n    return x * 2 if isinstance(x, int) else x\n"
    assert scored([fenced(RIGHT), fenced(half), RIGHT, "I can't."], ASSERTS) == [1, 0, 1, 0]
    assert scored(fenced(half), ASSERTS, partial=True) == pytest.approx([2 / 3])
    assert scored(fenced(RIGHT), "\n".join(ASSERTS)) == [1]
    assert scored(fenced(RIGHT), json.dumps(ASSERTS)) == [1]


def test_inputs_and_outputs() -> None:
    tests = [{"input": "2\n3\n", "output": "5\n"}, {"input": "4\n4\n", "output": "8"}]
    right, wrong = "print(int(input()) + int(input()))\n", "input(); input(); print(5)\n"
    assert scored([fenced(right), fenced(wrong)], tests) == [1, 0]
    assert scored(fenced(wrong), tests, partial=True) == [0.5]
    pairs = {"inputs": ["2\n3\n"], "outputs": ["5"]}
    assert scored(fenced(right), pairs) == scored(fenced(right), json.dumps(pairs)) == [1]
    failing = "print(int(input()) + int(input()))\nraise SystemExit(1)\n"
    assert scored(fenced(failing), tests) == [0], "it says the right thing, and fails"


CHEAT = "x = 0\n"


def test_the_last_block_after_the_thought_counts() -> None:
    first, last = "a = 1\n", "b = 2\n"
    assert code.program(f"<think>{fenced(CHEAT)}</think>{fenced(first)}and {fenced(last)}") == last
    assert code.program("<think>no</think>\nprint(1)") == "print(1)"
    assert code.program("```\nx = '```'\n```") == "x = '```'\n"


CHEATS = {
    "it ends the process": "import os\nos._exit(0)",
    "it raises SystemExit": "raise SystemExit(0)",
    "it prints what might be a mark": "print('0')\nprint('passed')\nimport os\nos.write(1, b'0\\n1\\n2\\n')",
    "it reads the input": "import sys\nprint(sys.stdin.read())",
    "it opens descriptors": "import os\nfor n in range(3, 20):\n  try: os.write(n, b'0 1 2')\n  except OSError: pass",
    "it ends it in a test": "import os\nclass double:\n  def __init__(self, x): os._exit(0)",
    "it loops": "while True: pass",
    "it floods": "def double(x):\n  while True: print('x' * 10000)",
    "it takes all memory": "x = []\nwhile True: x.append(bytearray(1 << 20))",
    "it forks": "import os\nwhile True:\n  try: os.fork()\n  except OSError: pass",
}  # fmt: skip


@pytest.mark.parametrize("name", list(CHEATS))
def test_what_is_no_solution_gets_nothing(name: str) -> None:
    assert scored(fenced(CHEATS[name] + "\n"), ASSERTS, timeout=1.0, partial=True) == [0]


def test_a_test_that_hangs_leaves_those_before_it_passed() -> None:
    source = "def double(x):\n    while x == []: pass\n    return x + x\n"
    assert scored(fenced(source), ASSERTS, timeout=1.0, partial=True) == pytest.approx([2 / 3])


@pytest.mark.parametrize("tests", [None, "", [], 5, [5], [{"input": "a"}], {"inputs": ["a"], "outputs": []}])
def test_a_row_without_tests_has_no_score(tests: Any) -> None:
    found = Rewards([Code(strict=False)]).score([Answer("", RIGHT, 1, True, {"tests": tests})])
    assert [one.answer for one in found.errors] == [0]
    assert "'tests'" in found.errors[0].reason


def test_programs_run_side_by_side() -> None:
    given = "import time\ntime.sleep(1)\n" + RIGHT
    started = time.monotonic()
    assert scored([given] * 4, ASSERTS, workers=4) == [1] * 4
    assert time.monotonic() - started < 3.5


def test_missing_isolation_is_refused_or_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(sandbox, "missing", lambda: ("the network",))
    with pytest.raises(RecipeError, match="does not keep programs from the network"):
        Rewards([Code()])
    Rewards([Code(strict=False)])
    assert "not kept from the network" in caplog.text


def test_a_sandbox_that_fails_is_not_the_answer_s_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    rewards = Rewards([Code(strict=False)])

    def fail(*given: Any) -> Any:
        raise sandbox.SandboxError("no room for another process")

    monkeypatch.setattr(sandbox, "run", fail)
    found = rewards.score([Answer("", RIGHT, 1, True, {"tests": ASSERTS})])
    assert found.errors[0].reason == "SandboxError: no room for another process"
    assert found.total[0] != found.total[0]
