"""The checklist: ten questions, and to each the answers that were found, with the reason and the next step."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from rich.markup import escape
from rich.table import Table

from ..console import console
from ..errors import LuthierError

log = logging.getLogger(__name__)

State = Literal["pass", "fail", "n/a"]

QUESTIONS: Mapping[str, str] = {
    "model": "Do the model and its tokenizer load?",
    "data": "Is the data whole, apart from what it is judged by, and does the right part of it carry loss?",
    "training": "Does a short training behave?",
    "cost": "Is there enough memory, disk and time?",
    "resume": "Is a saved checkpoint equal, and does a run go on as if it had never stopped?",
    "devices": "Do two devices compute what one does?",
    "export": "Does what is trained become what is served?",
    "metric": "Can the metric that decides be computed?",
    "regression": "Would it be seen if the model forgets?",
    "environment": "Can the run be repeated?",
}
"""What is asked, in the order in which it is shown."""

NEXT: Mapping[str, str] = {
    "model": "see that model.path names a model of this kind, whole on the disk",
    "data": "look at the rows that are named, and at `luthier inspect`",
    "training": "look at `luthier inspect`, then at optim and model",
    "cost": "lower data.batch, set train.gradient_checkpointing, or see `luthier estimate` for what fits",
    "resume": "run `luthier verify-resume`, which shows where the runs part",
    "devices": "train on one device until this is understood",
    "export": "export a checkpoint of a short run with `luthier export` before a long one is paid for",
    "metric": "look at data.validation and the section evaluate",
    "regression": "add data.regression",
    "environment": "see `luthier doctor`",
}
"""What to do about a failure that does not say it itself."""


@dataclass(frozen=True)
class Answer:
    """One answer to a question.

    Args:
        question: key of `QUESTIONS`.
        name: what was looked at.
        state: how it came out.
        found: what was found, or the reason.
        do: the next step; "" after a pass.
    """

    question: str
    name: str
    state: State
    found: str
    do: str = ""


class NotApplicable(Exception):
    """Raised by a step that has nothing to look at here.

    Args:
        reason: why.
        do: what would make it apply.
    """

    def __init__(self, reason: str, do: str = ""):
        super().__init__(reason)
        self.reason, self.do = reason, do


@dataclass
class Checklist:
    """The answers so far."""

    answers: list[Answer] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        return all(answer.state != "fail" for answer in self.answers)

    def ask(self, question: str, name: str, step: Callable[[], tuple[Any, str]]) -> Any:
        """Take one step; it gives (result, what was found), or raises. None if it did not pass."""
        try:
            result, found = step()
        except NotApplicable as nothing:
            self.answers.append(Answer(question, name, "n/a", nothing.reason, nothing.do))
        except LuthierError as error:
            self.answers.append(Answer(question, name, "fail", error.told, error.do or NEXT[question]))
        except Exception as error:  # of a library: the check is there to say so, and to look at the rest
            log.debug("%s", name, exc_info=True)
            first = (str(error).strip().splitlines() or [""])[0]
            self.answers.append(
                Answer(question, name, "fail", f"{type(error).__name__}: {first}".rstrip(": "), NEXT[question])
            )
        else:
            self.answers.append(Answer(question, name, "pass", found))
            return result
        return None

    def finish(self) -> None:
        """Questions that could not be asked, as an answer before them failed, are said to be open."""
        failed = next((answer.name for answer in self.answers if answer.state == "fail"), "")
        for question in QUESTIONS:
            if not any(answer.question == question for answer in self.answers):
                reason = f"not asked, as '{failed}' failed"
                self.answers.append(Answer(question, question, "n/a", reason, "mend that first"))

    def state(self, question: str) -> State:
        """How a question came out: the worst of its answers; one that only does not apply stays aside."""
        states = {answer.state for answer in self.answers if answer.question == question}
        return "fail" if "fail" in states else "pass" if "pass" in states else "n/a"

    def as_dict(self) -> dict[str, Any]:
        """For machines: each question with its state and its answers."""
        questions = [
            {
                "question": key,
                "asks": text,
                "state": self.state(key),
                "answers": [
                    {name: value for name, value in asdict(answer).items() if name != "question"}
                    for answer in self.answers
                    if answer.question == key
                ],
            }
            for key, text in QUESTIONS.items()
        ]
        return {"passed": self.passed, "questions": questions}

    def show(self) -> None:
        """Print the questions in their order, each with its answers."""
        table = Table("check", "", "found", show_lines=False)
        colours = {"pass": "green", "fail": "red", "n/a": "yellow"}
        for question, text in QUESTIONS.items():
            table.add_row(f"[bold]{question}[/bold]", "", f"[bold]{text}[/bold]")
            for answer in (one for one in self.answers if one.question == question):
                found = escape(answer.found) + (f"\n[bold]do:[/bold] {escape(answer.do)}" if answer.do else "")
                colour = colours[answer.state]
                table.add_row(f"  {escape(answer.name)}", f"[{colour}]{answer.state}[/{colour}]", found)
            table.add_section()
        console.print(table)
