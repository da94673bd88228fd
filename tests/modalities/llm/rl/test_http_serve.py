"""transformers' own server: our client speaks to it; an engine it can't be, as it takes and gives text alone."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf

from luthier.modalities.llm.rl.engines.engine import Sampling
from luthier.modalities.llm.rl.engines.http import HttpEngine, HttpSection
from luthier.modalities.llm.rl.engines.servers import Vllm
from luthier.modalities.llm.rl.web import Client, ServerError

pytest.importorskip("uvicorn")
pytest.importorskip("fastapi")
pytest.importorskip("openai")


@pytest.fixture(scope="module")
def folder(model_of) -> Path:
    found: Path = model_of("llama")
    return found


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    options = ["--port", str(port), "--device", "cpu"]
    process = subprocess.Popen(
        [sys.executable, "-m", "transformers.cli.transformers", "serve", str(folder), *options],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"},
    )
    found = f"http://127.0.0.1:{port}"
    try:
        for _ in range(1200):
            try:
                urllib.request.urlopen(f"{found}/health", timeout=5).close()
                break
            except OSError:
                assert process.poll() is None, "the server has ended"
                time.sleep(0.1)
        yield found
    finally:
        process.kill()
        process.wait()


def test_text_is_completed_as_by_transformers_itself(url: str, folder: Path) -> None:
    request = {"model": str(folder), "prompt": "What of Rome?", "max_tokens": 8, "temperature": 0}
    found: Any = Client(url).post("/v1/completions", request)
    model = hf.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = hf.AutoTokenizer.from_pretrained(folder)
    ids = tokenizer("What of Rome?", return_tensors="pt").input_ids
    made = model.generate(ids, max_new_tokens=8, do_sample=False)[0, ids.shape[1] :]
    assert found["choices"][0]["text"] == tokenizer.decode(made, skip_special_tokens=True)
    assert Client(url).get("/health") == {"status": "ok"}


def test_it_is_refused_as_an_engine_at_once(url: str, folder: Path, tmp_path: Path) -> None:
    """It knows no token ids and no log-probabilities, and its weights have no version."""
    with pytest.raises(ServerError, match="answers 400") as refusal:
        Client(url).post("/v1/completions", {"model": str(folder), "prompt": [5, 6, 7], "max_tokens": 4})
    assert "prompt must be a string" in str(refusal.value)
    with pytest.raises(ServerError, match="answers 404"):
        Vllm(Client(url)).complete([5, 6, 7], Sampling(4, (0,)), 0, "any")

    class Saved:
        def save_pretrained(self, directory: Path) -> None:
            hf.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(directory)

        def named_weights(self) -> Iterator[Any]:
            return iter(())

    engine = HttpEngine(HttpSection(urls=(url,), patience=60), tmp_path)
    started = time.monotonic()
    with pytest.raises(ServerError, match="answers 404"):
        engine.update(1, Saved())
    assert time.monotonic() - started < 30, "it is not waited for"
    with pytest.raises(ServerError):
        engine.generate([np.array([5, 6], np.int32)], Sampling(4, (0,)), [[1]])
