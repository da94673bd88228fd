"""What is taken out before anything is shown to others."""

from __future__ import annotations

from luthier.common.secrets import command_without_secrets, without_secrets


def test_secrets_go_wherever_they_stand() -> None:
    given = {
        "hub_token": "a",
        "tokens": 5,
        "b": [{"api_key": "c"}],
        "url": "https://me:pw@host/x",
        "new_tokens": ["<x>"],
    }
    assert without_secrets(given) == {
        "hub_token": "(left out)",
        "tokens": 5,
        "b": [{"api_key": "(left out)"}],
        "url": "https://host/x",
        "new_tokens": ["<x>"],
    }
    assert without_secrets({"path": "x", "secret": "y"}, text=str.upper) == {"path": "X", "secret": "(left out)"}


def test_a_command_line_keeps_all_but_secrets() -> None:
    given = "luthier train x task.api_key=abc --hub-token abc data.train=https://me:abc@host/a.jsonl train.steps=3"
    given += " data.batch.tokens=4096 --tokenizer path"
    told = command_without_secrets(given)
    assert "abc" not in told
    assert told.endswith("train.steps=3 data.batch.tokens=4096 --tokenizer path")
    assert "https://host/a.jsonl" in told
