"""What servers of completions are asked, and what they answer: vLLM's and SGLang's own forms.

Both are sent token ids and send token ids and log-probabilities back, so nothing is tokenised twice; and both say which
weights they have, by a name that is made anew for each update, so that a server that was started again can't pass for
the one that was updated.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from ..web import Client, ServerError, Unavailable
from .engine import Sampling


@dataclass(frozen=True)
class Said:
    """One completion of a server.

    Args:
        tokens: with the one that ended it.
        log_probs: of each token, in nats.
        finished: whether it ended by itself.
    """

    tokens: list[int]
    log_probs: list[float]
    finished: bool


class OtherWeights(ServerError):
    """The server does not have the weights that were asked for.

    Args:
        has: name of those that it has, if it says.
    """

    def __init__(
        self,
        problem: str,
        *,
        where: object = None,
        has: str | None = None,
        given: object = None,
        expected: object = None,
    ):
        super().__init__(problem, where=where, given=has if given is None else given, expected=expected)
        self.has = has


class Server(Protocol):
    """A server of completions."""

    client: Client

    def load(self, folder: Path, name: str, is_adapter: bool, timeout: float) -> None:
        """Take the model or adapter of a folder that the server can read, and call it `name`."""
        ...

    def adopt(self, name: str, is_adapter: bool) -> None:
        """Go on with what another process has had it load under this name."""
        ...

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int, name: str) -> Said:
        """Complete a prompt with the weights called `name`.

        Raises:
            OtherWeights: it has others.
            Unavailable: it can't answer now.
            ServerError: it can't do what is asked.
        """
        ...


def said(tokens: Any, log_probs: Any, reason: Any, where: str) -> Said:
    """A completion, checked.

    Raises:
        Unavailable: the server broke it off.
        ServerError: it is not what was asked for.
    """
    if reason not in ("stop", "length"):
        raise Unavailable("the completion was broken off", where=where, given=f"finish reason {reason!r}")
    if not isinstance(tokens, list) or not tokens or not all(isinstance(one, int) for one in tokens):
        raise ServerError(
            "the server sends no token ids", where=where, given=f"{tokens!r:.200}", expected="vLLM 0.10.2 or SGLang"
        )
    numbers = [one for one in log_probs or [] if isinstance(one, int | float) and math.isfinite(one)]
    if len(numbers) != len(tokens):
        problem = f"the server sends {len(numbers)} log-probabilities of {len(tokens)} tokens"
        raise ServerError(problem, where=where, given=f"{log_probs!r:.200}")
    return Said(tokens, [min(0.0, float(one)) for one in numbers], reason == "stop")


class Vllm:
    """`vllm serve MODEL --logprobs-mode processed_logprobs`.

    Adapters need `--enable-lora` and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1; other weights VLLM_SERVER_DEV_MODE=1, and a
    vLLM with `/weight_info`.

    Args:
        client: of the server.
        model: name under which it serves the model; None: its first.
    """

    def __init__(self, client: Client, model: str | None = None):
        self.client, self._model = client, model
        self._adapter: str | None = None
        self._mode: str | None = None

    def load(self, folder: Path, name: str, is_adapter: bool, timeout: float) -> None:
        if is_adapter:
            before, body = self._adapter, {"lora_name": name, "lora_path": str(folder)}
            self.client.post("/v1/load_lora_adapter", body, timeout)
            self._adapter = name
            if before is not None:
                self._forget(before)
            return
        request = {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}}
        self._adapter = None
        self.client.post("/collective_rpc", request, timeout)
        self.client.post("/reset_prefix_cache", {}, timeout)  # keys and values of the weights before
        self.client.post("/update_weight_version", {"new_version": name})

    def adopt(self, name: str, is_adapter: bool) -> None:
        before, self._adapter = self._adapter, name if is_adapter else None
        if before is not None:
            self._forget(before)

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ServerError):  # one that was started again never had it
            self.client.post("/v1/unload_lora_adapter", {"lora_name": name})

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int, name: str) -> Said:
        is_adapter = name == self._adapter
        if not is_adapter:
            self._check(name)
        self._check_mode(prompt, sampling)
        choice = self._ask(prompt, sampling, seed, name if is_adapter else self._served())
        if not is_adapter:
            self._check(name)  # it may have been started again meanwhile
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs")
        return said(choice.get("token_ids"), log_probs, choice.get("finish_reason"), self.client.url)

    def _served(self) -> str:
        if self._model is None:
            listed = self.client.get("/v1/models")
            models = listed.get("data") if isinstance(listed, dict) else None
            if not models:
                raise ServerError("the server serves no model", where=self.client.url, given=f"{listed!r:.200}")
            self._model = str(models[0]["id"])
        return self._model

    def _check(self, name: str) -> None:
        if self._adapter is not None:  # such a vLLM need not know /weight_info
            raise OtherWeights("it has another adapter", where=self.client.url, has=self._adapter, expected=name)
        told = self.client.get("/weight_info")
        has = told.get("weight_version") if isinstance(told, dict) else None
        if has != name:
            raise OtherWeights("the server has other weights", where=self.client.url, has=has, expected=name)

    def _ask(self, prompt: Sequence[int], sampling: Sampling, seed: int, model: str) -> dict[str, Any]:
        request = {
            "model": model,
            "prompt": list(prompt),
            "max_tokens": sampling.max_new_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k or 0,
            "min_p": 0.0,
            "repetition_penalty": 1.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "seed": seed,
            "stop_token_ids": list(sampling.stops),
            "ignore_eos": True,  # the model's own, if it is none of these
            "logprobs": 1,
            "return_token_ids": True,
            "skip_special_tokens": False,
        }
        found = _posted(self.client, "/v1/completions", request, 404 if model == self._adapter else None)
        choices = found.get("choices") if isinstance(found, dict) else None
        if not isinstance(choices, list) or len(choices) != 1:
            raise ServerError("not one completion", where=self.client.url, given=f"{found!r:.200}")
        if found.get("model") != model:
            raise OtherWeights("answered by another", where=self.client.url, given=found.get("model"), expected=model)
        choice: dict[str, Any] = choices[0]
        if choice.get("prompt_token_ids") not in (None, list(prompt)):
            raise ServerError(
                "the server has changed the prompt", where=self.client.url, do="raise its --max-model-len"
            )
        return choice

    def _check_mode(self, prompt: Sequence[int], sampling: Sampling) -> None:
        """Refuse log-probabilities of another distribution than the whole one at the sampling temperature."""
        is_scaled = sampling.temperature not in (0.0, 1.0)
        is_filtered = sampling.top_p < 1 or sampling.top_k is not None
        if not is_scaled and not is_filtered:
            return
        if is_scaled and is_filtered:
            raise ServerError(
                "vLLM gives log-probabilities before temperature, top_p and top_k, or after all of them",
                where=self.client.url,
                do="use temperature alone, or top_p and top_k at temperature 1",
            )
        wanted = "processed" if is_scaled else "raw"
        self._mode = self._mode or self._probed(prompt, sampling.stops)
        if self._mode not in (None, wanted):
            raise ServerError(
                "the server's log-probabilities are not those of the sampling temperature's whole distribution",
                where=self.client.url,
                given=f"{self._mode}_logprobs",
                do=f"start it with --logprobs-mode {wanted}_logprobs",
            )

    def _probed(self, prompt: Sequence[int], stops: tuple[int, ...]) -> str | None:
        """Whether the temperature changes the log-probability of the most probable token; None: it is nearly 1."""
        values = []
        for temperature in (1.0, 0.5):
            choice = self._ask(prompt[:1], Sampling(1, stops, temperature), 0, self._adapter or self._served())
            top = ((choice.get("logprobs") or {}).get("top_logprobs") or [{}])[0]
            values.append(max(top.values(), default=0.0))
        if max(values) > -1e-3:
            return None
        return "raw" if abs(values[0] - values[1]) < 1e-4 * abs(values[0]) else "processed"


class Sglang:
    """`python -m sglang.launch_server --model-path MODEL`; adapters need `--enable-lora`. Its log-probabilities are
    those of the sampling temperature, unless SGLANG_RETURN_ORIGINAL_LOGPROB is set. A completion may end at the model's
    own EOS too."""

    def __init__(self, client: Client):
        self.client = client
        self._adapter: str | None = None

    def load(self, folder: Path, name: str, is_adapter: bool, timeout: float) -> None:
        if is_adapter:
            before, body = self._adapter, {"lora_name": name, "lora_path": str(folder)}
            self._done(self.client.post("/load_lora_adapter", body, timeout))
            self._adapter = name
            if before is not None:
                self._forget(before)
            return
        body = {"model_path": str(folder), "weight_version": name}
        self._done(self.client.post("/update_weights_from_disk", body | {"flush_cache": True}, timeout))

    def adopt(self, name: str, is_adapter: bool) -> None:
        before, self._adapter = self._adapter, name if is_adapter else None
        if before is not None:
            self._forget(before)

    def _done(self, told: Any) -> None:
        if not isinstance(told, dict) or told.get("success") is not True:
            raise ServerError("the server did not take the weights", where=self.client.url, given=f"{told!r:.300}")

    def _forget(self, name: str) -> None:
        with contextlib.suppress(ServerError):  # one that was started again never had it
            self.client.post("/unload_lora_adapter", {"lora_name": name})

    def complete(self, prompt: Sequence[int], sampling: Sampling, seed: int, name: str) -> Said:
        is_adapter = name == self._adapter
        request: dict[str, Any] = {
            "input_ids": list(prompt),
            "return_logprob": True,
            "sampling_params": {
                "max_new_tokens": sampling.max_new_tokens,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": -1 if sampling.top_k is None else sampling.top_k,
                "min_p": 0.0,
                "repetition_penalty": 1.0,
                "stop_token_ids": list(sampling.stops),
                "sampling_seed": seed % (1 << 31),
            },
        }
        if is_adapter:
            request["lora_path"] = name
        found = _posted(self.client, "/generate", request, 400 if is_adapter else None)
        meta = found.get("meta_info") if isinstance(found, dict) else None
        if not isinstance(meta, dict):
            raise ServerError("not a completion of SGLang", where=self.client.url, given=f"{found!r:.200}")
        if not is_adapter and meta.get("weight_version") != name:
            has = meta.get("weight_version")
            raise OtherWeights("the server has other weights", where=self.client.url, has=has, expected=name)
        if meta.get("prompt_tokens") not in (None, len(prompt)):
            raise ServerError("the server has changed the prompt", where=self.client.url, given=meta["prompt_tokens"])
        pairs = meta.get("output_token_logprobs") or []
        reason = (meta.get("finish_reason") or {}).get("type")
        return said([one[1] for one in pairs], [one[0] for one in pairs], reason, self.client.url)


def _posted(client: Client, path: str, request: dict[str, Any], refusal: int | None) -> Any:
    """The answer to a request.

    Args:
        refusal: status by which a server that was started again refuses an adapter that it does not have.
    """
    try:
        return client.post(path, request)
    except ServerError as error:
        if refusal is not None and error.status == refusal:
            raise OtherWeights("the server refuses the adapter", where=client.url, given=error) from error
        raise
