"""The engine on servers, against server processes: what they draw is what the trainer's model gives, with the weights
that they were given, whatever happens to them."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers as hf
from peft import LoraConfig, PeftModel, get_peft_model

from luthier.modalities.llm.rl.engines.engine import Completion, Sampling
from luthier.modalities.llm.rl.engines.http import HttpEngine, HttpSection
from luthier.modalities.llm.rl.engines.servers import OtherWeights
from luthier.modalities.llm.rl.web import ServerError, Unavailable

PROMPTS = [np.array(ids, np.int32) for ids in ([5, 6, 7], [300, 20, 9, 40], [17])]
SEEDS = [[1, 2], [3, 4], [5]]
SAMPLING = Sampling(max_new_tokens=6, stops=tuple(range(0, 380, 12)))


class Saved:
    """A model as the trainer would have it saved."""

    def __init__(self, model: Any):
        self.model = model

    def save_pretrained(self, directory: Path) -> None:
        self.model.save_pretrained(directory)

    def named_weights(self) -> Iterator[Any]:
        return iter(())


@pytest.fixture(scope="module")
def base(model_of) -> Path:
    found: Path = model_of("llama")
    return found


@pytest.fixture(scope="module")
def vllm(serve, base: Path) -> Any:
    return serve("vllm", str(base), "--logprobs-mode", "processed_logprobs")  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def sglang(serve, base: Path) -> Any:
    return serve("sglang", str(base))  # type: ignore[no-any-return]


def loaded(base: Path, changed: float = 0.0) -> Any:
    model = hf.AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32).eval()
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += changed * torch.randn_like(parameter)
    return model


def adapter(base: Path) -> Any:
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=16, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    return get_peft_model(loaded(base), config).eval()


def engine(urls: Sequence[str], folder: Path, server: str = "vllm", **options: Any) -> HttpEngine:
    given = {"timeout": 60, "patience": 60, "workers": 4, **options}
    return HttpEngine(HttpSection(server=server, urls=tuple(urls), **given), folder)  # type: ignore[arg-type]


def check(model: Any, made: list[list[Completion]], sampling: Sampling = SAMPLING, version: int = 1) -> None:
    """The log-probabilities are the model's, at the sampling temperature; what ended it is told and there."""
    assert [len(of) for of in made] == [len(of) for of in SEEDS]
    for prompt, of in zip(PROMPTS, made, strict=True):
        for one in of:
            assert one.version == version
            assert one.tokens.dtype == np.int32
            assert one.log_probs.dtype == np.float32
            ids = torch.from_numpy(np.concatenate([prompt, one.tokens]).astype(np.int64))[None]
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            expected = (logits / (sampling.temperature or 1.0)).log_softmax(dim=1)
            wanted = expected.gather(1, torch.from_numpy(one.tokens.astype(np.int64))[:, None])[:, 0]
            np.testing.assert_allclose(one.log_probs, wanted.numpy(), rtol=1e-4, atol=1e-4)
            assert one.finished == (int(one.tokens[-1]) in sampling.stops)
            assert one.finished or len(one.tokens) == sampling.max_new_tokens
            assert not set(one.tokens[:-1].tolist()) & set(sampling.stops)


# ------------------------------------------------------------------------------------------------ completions


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("temperature", [1.0, 0.6, 0.0])
def test_what_is_drawn_has_the_trainer_s_log_probabilities(
    server: str, temperature: float, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = engine([request.getfixturevalue(server).url], tmp_path, server)
    model = loaded(base)
    made.update(1, Saved(model))
    sampling = Sampling(SAMPLING.max_new_tokens, SAMPLING.stops, temperature)
    found = made.generate(PROMPTS, sampling, SEEDS)
    check(model, found, sampling)
    again = made.generate(PROMPTS, sampling, SEEDS)
    for one, other in zip(itertools.chain(*found), itertools.chain(*again), strict=True):
        np.testing.assert_array_equal(one.tokens, other.tokens)
    if temperature == 1.0:
        assert {one.finished for of in found for one in of} == {True, False}, "a test of both"


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_new_weights_are_used_and_old_files_go(
    server: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    made = engine([request.getfixturevalue(server).url], tmp_path / "weights", server)
    for version, change in ((1, 0.0), (2, 0.3), (3, 0.6)):
        model = loaded(base, change)
        made.update(version, Saved(model))
        check(model, made.generate(PROMPTS, SAMPLING, SEEDS), version=version)
        assert len(list((tmp_path / "weights").iterdir())) == 1


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_an_adapter_is_loaded_alone(server: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    made = engine([request.getfixturevalue(server).url], tmp_path, server)
    fresh = loaded(base)
    made.update(1, Saved(fresh))  # the tests before may have left other weights
    first = adapter(base)
    made.update(2, Saved(first))
    folder = next(tmp_path.iterdir())
    assert not (folder / "model.safetensors").exists()
    check(first, made.generate(PROMPTS, SAMPLING, SEEDS), version=2)
    with torch.no_grad():
        for name, parameter in first.named_parameters():
            if "lora_B" in name:
                parameter *= -1.5
    made.update(3, Saved(first))
    check(first, made.generate(PROMPTS, SAMPLING, SEEDS), version=3)


# ------------------------------------------------------------------------------------------------ distributions


def test_log_probabilities_of_another_distribution_are_refused(serve, vllm: Any, base: Path, tmp_path: Path) -> None:
    """vLLM gives them before temperature and filters, or after both; SGLang after the temperature alone."""
    raw = engine([serve("vllm", str(base)).url], tmp_path / "raw")
    processed = engine([vllm.url], tmp_path / "processed")
    model = loaded(base)
    for one in (raw, processed):
        one.update(1, Saved(model))
    warm = Sampling(6, SAMPLING.stops, 0.6)
    with pytest.raises(ServerError, match="--logprobs-mode processed_logprobs"):
        raw.generate(PROMPTS, warm, SEEDS)
    check(model, raw.generate(PROMPTS, SAMPLING, SEEDS))
    few = Sampling(6, SAMPLING.stops, 1.0, top_k=5)
    check(model, raw.generate(PROMPTS, few, SEEDS), few)
    with pytest.raises(ServerError, match="--logprobs-mode raw_logprobs"):
        processed.generate(PROMPTS, few, SEEDS)
    with pytest.raises(ServerError, match="temperature alone"):
        processed.generate(PROMPTS, Sampling(6, SAMPLING.stops, 0.6, top_p=0.9), SEEDS)


def test_sglang_s_are_those_of_the_temperature_with_any_filter(sglang: Any, base: Path, tmp_path: Path) -> None:
    made, model = engine([sglang.url], tmp_path, "sglang"), loaded(base)
    made.update(1, Saved(model))
    sampling = Sampling(6, SAMPLING.stops, 0.6, top_p=0.9, top_k=20)
    check(model, made.generate(PROMPTS, sampling, SEEDS), sampling)


# ------------------------------------------------------------------------------------------------ failures


@pytest.mark.parametrize("server", ["vllm", "sglang"])
@pytest.mark.parametrize("is_adapter", [False, True])
def test_a_server_killed_in_the_middle_and_started_again_gets_its_weights_anew(
    server: str, is_adapter: bool, serve, base: Path, tmp_path: Path
) -> None:
    place = serve(server, str(base), "--delay", "0.3")
    made = engine([place.url], tmp_path, server, workers=2)
    model = adapter(base) if is_adapter else loaded(base, 0.3)
    made.update(1, Saved(model))

    def restart() -> None:
        time.sleep(0.5)
        place.kill()
        place.start(wait=False)

    thread = threading.Thread(target=restart)
    thread.start()
    found = made.generate(PROMPTS, SAMPLING, SEEDS)
    thread.join()
    check(model, found)
    place.kill()


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_weights_that_another_run_loaded_are_noticed(
    server: str, base: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    url = request.getfixturevalue(server).url
    ours, theirs = (engine([url], tmp_path / name, server) for name in ("ours", "theirs"))
    model, other = loaded(base, 0.2), loaded(base, 0.5)
    ours.update(1, Saved(model))
    theirs.update(1, Saved(other))
    check(model, ours.generate(PROMPTS, SAMPLING, SEEDS))
    check(other, theirs.generate(PROMPTS, SAMPLING, SEEDS))


@pytest.mark.parametrize("server", ["vllm", "sglang"])
def test_weights_that_stay_wrong_end_it(server: str, serve, base: Path, tmp_path: Path) -> None:
    place = serve(server, str(base), "--forgetful")
    made = engine([place.url], tmp_path, server, retries=2)
    made.update(1, Saved(loaded(base)))
    with pytest.raises(OtherWeights, match="other weights"):
        made.generate(PROMPTS[:1], SAMPLING, [[1]])
    place.kill()


def test_a_server_that_is_too_slow_is_waited_for_within_bounds(serve, base: Path, tmp_path: Path) -> None:
    place = serve("sglang", str(base), "--delay", "30")
    made = engine([place.url], tmp_path, "sglang", timeout=0.5, patience=2)
    made.update(1, Saved(loaded(base)))
    started = time.monotonic()
    with pytest.raises(Unavailable, match=r"no answer within 0\.5 s"):
        made.generate(PROMPTS, SAMPLING, SEEDS)
    assert time.monotonic() - started < 15
    place.kill()


def test_a_server_that_is_away_is_waited_for_within_bounds(vllm: Any, base: Path, tmp_path: Path) -> None:
    made = engine(["http://127.0.0.1:1"], tmp_path, patience=1)
    with pytest.raises(Unavailable, match="not reached"):
        made.update(1, Saved(loaded(base)))
    with pytest.raises(ServerError, match="not reached"):
        made.generate(PROMPTS, SAMPLING, SEEDS)


def test_another_server_takes_over(serve, vllm: Any, base: Path, tmp_path: Path) -> None:
    second = serve("vllm", str(base))
    made = engine([vllm.url, second.url], tmp_path, patience=20)
    model = loaded(base, 0.1)
    made.update(1, Saved(model))
    second.kill()
    check(model, made.generate(PROMPTS, SAMPLING, SEEDS))


def test_nothing_is_drawn_before_there_are_weights(vllm: Any, tmp_path: Path) -> None:
    with pytest.raises(ServerError, match="no weights yet"):
        engine([vllm.url], tmp_path).generate(PROMPTS, SAMPLING, SEEDS)


def test_weights_that_can_t_be_loaded_are_told(sglang: Any, tmp_path: Path) -> None:
    class Nothing:
        def save_pretrained(self, directory: Path) -> None:
            (directory / "note").write_text("no model")

        def named_weights(self) -> Iterator[Any]:
            return iter(())

    with pytest.raises(ServerError, match="400"):
        engine([sglang.url], tmp_path, "sglang").update(1, Nothing())


def test_what_a_trainer_saves_can_be_read_by_peft(base: Path, tmp_path: Path) -> None:
    """The test's own adapter is one that the server would load."""
    adapter(base).save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(loaded(base), str(tmp_path))
    ids = torch.tensor([[5, 6, 7]])
    torch.testing.assert_close(again(input_ids=ids).logits, adapter(base)(input_ids=ids).logits)


# ------------------------------------------------------------------------------------------------ vLLM itself


@pytest.mark.slow
@pytest.mark.skipif("LUTHIER_VLLM" not in os.environ, reason="needs LUTHIER_VLLM, a Python that has vLLM")
def test_vllm_itself(base: Path, tmp_path: Path) -> None:
    """Whole weights, adapters and temperatures, and a server that is killed in the middle and started again."""
    config = hf.AutoConfig.from_pretrained(
        base, hidden_size=64, num_attention_heads=2, num_key_value_heads=1, head_dim=32, initializer_range=0.1
    )  # vLLM has no smaller heads
    torch.manual_seed(0)
    folder = tmp_path / "model"
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    hf.AutoTokenizer.from_pretrained(base).save_pretrained(folder)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    command = [
        os.environ["LUTHIER_VLLM"], "-m", "vllm.entrypoints.openai.api_server", "--model", str(folder), "--port", port,
        "--dtype", "float32", "--enforce-eager", "--enable-lora", "--max-model-len", "256", "--max-num-seqs", "16",
        "--logprobs-mode", "processed_logprobs",
    ]  # fmt: skip
    flags = {"VLLM_SERVER_DEV_MODE": "1", "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "1", "VLLM_CPU_KVCACHE_SPACE": "1"}
    quiet = {"HF_HUB_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}
    running: list[subprocess.Popen[bytes]] = []

    def start() -> None:
        running.append(subprocess.Popen(command, env={**os.environ, **flags, **quiet}, start_new_session=True))

    def end() -> None:
        os.killpg(running.pop().pid, signal.SIGKILL)

    def restart() -> None:
        time.sleep(0.3)
        end()
        start()

    start()
    try:
        made = engine([f"http://127.0.0.1:{port}"], tmp_path / "weights", patience=600, workers=2)
        for version, change, temperature in ((1, 0.0, 1.0), (2, 0.1, 0.6), (3, 0.05, 0.0)):
            model, sampling = loaded(folder, change), Sampling(6, SAMPLING.stops, temperature)
            made.update(version, Saved(model))
            check(model, made.generate(PROMPTS, sampling, SEEDS), sampling, version)
        made.update(4, Saved(loaded(folder)))  # what an adapter changes
        for model, version in ((adapter(folder), 5), (loaded(folder, 0.05), 6)):
            made.update(version, Saved(model))
            check(model, made.generate(PROMPTS, SAMPLING, SEEDS), version=version)
            thread = threading.Thread(target=restart)
            thread.start()
            longer = Sampling(200, SAMPLING.stops[:1])
            found = made.generate(PROMPTS, longer, SEEDS)
            thread.join()
            check(model, found, longer, version)
    finally:
        end()
