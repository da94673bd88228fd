"""Servers of completions for tests: a small transformers model behind the protocol of vLLM or of SGLang.

    python serve.py

reads lines, each a JSON list `[PROTOCOL, MODEL, PORT, OPTION, ...]`, and starts a server process for each, whose id it
prints; so the libraries are imported once. Options: `--logprobs-mode raw_logprobs|processed_logprobs`,
`--delay SECONDS`, `--forgetful`.

Written after the servers' own sources: `vllm/entrypoints/openai/completion/protocol.py`, `serve/lora`, `serve/dev/rpc`,
`serve/dev/rlhf` of vLLM, and `http_server.py`, `io_struct.py` of SGLang. It knows nothing of the code under test.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from peft import PeftModel

torch.set_num_threads(1)
LOCK = threading.Lock()


class Refusal(Exception):
    def __init__(self, status: int, message: str):
        super().__init__(message)
        self.status = status


class Model:
    """The weights that are served, and adapters by name."""

    def __init__(self, path: str):
        self.path, self.base, self.adapters, self.version = path, load(path), {}, "default"

    def sampled(self, prompt: list[int], given: dict[str, Any], adapter: str | None, scaled: bool) -> Any:
        """(tokens, log-probabilities, those of the most probable tokens, reason), without any cache."""
        model = self.base if adapter is None else self.adapters[adapter]
        generator = torch.Generator().manual_seed(given["seed"])
        ids, values, tops = list(prompt), [], []
        temperature, reason = given["temperature"], "length"
        for _ in range(given["max_tokens"]):
            with torch.no_grad():
                logits = model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].float()
            raw = logits.log_softmax(dim=0)
            log_probs = raw if temperature == 0 else (logits / temperature).log_softmax(dim=0)
            allowed = filtered(log_probs, given["top_k"], given["top_p"])
            token = int(raw.argmax() if temperature == 0 else torch.multinomial(allowed.exp(), 1, generator=generator))
            told = (allowed if scaled == "filtered" else log_probs) if scaled else raw
            ids.append(token)
            values.append(float(told[token]))
            tops.append((int(told.argmax()), float(told.max())))
            if token in given["stops"]:
                reason = "stop"
                break
        return ids[len(prompt) :], values, tops, reason


def filtered(log_probs: torch.Tensor, top_k: int, top_p: float) -> torch.Tensor:
    order = log_probs.argsort(descending=True)
    keep = torch.ones(len(log_probs), dtype=torch.bool)
    if top_k > 0:
        keep[order[top_k:]] = False
    if top_p < 1:
        sums = log_probs[order].exp().cumsum(dim=0)
        keep[order[1:][sums[:-1] >= top_p]] = False
    return log_probs.masked_fill(~keep, -float("inf")).log_softmax(dim=0)


def load(path: str) -> Any:
    return hf.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


def adapted(base_path: str, folder: str) -> Any:
    if not Path(folder, "adapter_config.json").is_file():
        raise Refusal(400, f"no adapter found in {folder}")
    return PeftModel.from_pretrained(load(base_path), folder).eval()


# ------------------------------------------------------------------------------------------------ vLLM


def vllm(model: Model, path: str, body: Any, mode: str) -> Any:
    match path:
        case "/v1/models":
            return {"object": "list", "data": [{"id": "served", "object": "model"}]}
        case "/weight_info":
            return {"weight_version": model.version}
        case "/update_weight_version":
            model.version = body["new_version"]
            return {"success": True, "new_version": model.version}
        case "/collective_rpc":
            if body["method"] != "reload_weights":
                raise Refusal(500, "no such method")
            model.base = load(body["kwargs"]["weights_path"])
            return {"results": [None]}
        case "/reset_prefix_cache":
            return ""
        case "/v1/load_lora_adapter":
            if body["lora_name"] in model.adapters:
                raise Refusal(400, f"The lora adapter '{body['lora_name']}' has already been loaded.")
            model.adapters[body["lora_name"]] = adapted(model.path, body["lora_path"])
            return f"Success: LoRA adapter '{body['lora_name']}' added successfully."
        case "/v1/unload_lora_adapter":
            if body["lora_name"] not in model.adapters:
                raise Refusal(404, f"The lora adapter '{body['lora_name']}' cannot be found.")
            del model.adapters[body["lora_name"]]
            return "Success"
        case "/v1/completions":
            return vllm_completion(model, body, mode)
    raise Refusal(404, "Not Found")


def vllm_completion(model: Model, body: Any, mode: str) -> Any:
    name = body["model"]
    if name != "served" and name not in model.adapters:
        raise Refusal(404, f"The model `{name}` does not exist.")
    given = {
        "seed": body["seed"], "temperature": body["temperature"], "max_tokens": body["max_tokens"],
        "top_k": body["top_k"], "top_p": body["top_p"], "stops": body["stop_token_ids"],
    }  # fmt: skip
    scaled: Any = "filtered" if mode == "processed_logprobs" else False
    adapter = name if name in model.adapters else None
    tokens, values, tops, reason = model.sampled(body["prompt"], given, adapter, scaled)
    choice: dict[str, Any] = {"index": 0, "text": "".join(map(str, tokens)), "finish_reason": reason}
    choice["logprobs"] = {
        "tokens": [f"token_id:{one}" for one in tokens],
        "token_logprobs": values,
        "top_logprobs": [
            {f"token_id:{token}": value, f"token_id:{best}": most}
            for token, value, (best, most) in zip(tokens, values, tops, strict=True)
        ],
    }
    if body.get("return_token_ids"):
        choice |= {"token_ids": tokens, "prompt_token_ids": body["prompt"]}
    return {"id": "cmpl-1", "object": "text_completion", "model": name, "choices": [choice]}


# ------------------------------------------------------------------------------------------------ SGLang


def sglang(model: Model, path: str, body: Any, mode: str) -> Any:
    match path:
        case "/update_weights_from_disk":
            try:
                model.base = load(body["model_path"])
            except (OSError, ValueError) as error:
                raise Refusal(400, json.dumps({"success": False, "message": str(error)})) from error
            model.version = body["weight_version"]
            return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}
        case "/load_lora_adapter":
            model.adapters[body["lora_name"]] = adapted(model.path, body["lora_path"])
            return {"success": True, "loaded_adapters": dict.fromkeys(model.adapters, "")}
        case "/unload_lora_adapter":
            if body["lora_name"] not in model.adapters:
                raise Refusal(400, json.dumps({"success": False, "error_message": "not loaded"}))
            del model.adapters[body["lora_name"]]
            return {"success": True, "loaded_adapters": {}}
        case "/generate":
            params, adapter = body["sampling_params"], body.get("lora_path")
            if adapter is not None and adapter not in model.adapters:
                raise Refusal(400, json.dumps({"error": {"message": f"LoRA adapters are not loaded: {adapter}"}}))
            given = {
                "seed": params["sampling_seed"], "temperature": params["temperature"],
                "max_tokens": params["max_new_tokens"], "top_k": params["top_k"], "top_p": params["top_p"],
                "stops": params["stop_token_ids"],
            }  # fmt: skip
            tokens, values, _, reason = model.sampled(body["input_ids"], given, adapter, True)
            meta = {
                "finish_reason": {"type": reason}, "prompt_tokens": len(body["input_ids"]),
                "completion_tokens": len(tokens), "weight_version": model.version,
                "output_token_logprobs": [[value, token, None] for value, token in zip(values, tokens, strict=True)],
            }  # fmt: skip
            return {"text": "", "output_ids": tokens, "meta_info": meta}
    raise Refusal(404, "Not Found")


# ------------------------------------------------------------------------------------------------ HTTP


def serve(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("protocol", choices=["vllm", "sglang"])
    parser.add_argument("model")
    parser.add_argument("port", type=int)
    parser.add_argument("--logprobs-mode", default="raw_logprobs")
    parser.add_argument("--delay", type=float, default=0.0)
    parser.add_argument("--forgetful", action="store_true", help="say that the weights are always the first")
    options = parser.parse_args(arguments)
    answer = {"vllm": vllm, "sglang": sglang}[options.protocol]
    model = Model(options.model)

    class Handler(BaseHTTPRequestHandler):
        def answer(self, body: Any) -> None:
            try:
                if self.path == "/health":
                    return self.give(200, "")
                if self.path in ("/v1/completions", "/generate"):
                    time.sleep(options.delay)
                with LOCK:
                    model.version = "default" if options.forgetful else model.version
                    found = answer(model, self.path, body, options.logprobs_mode)
                self.give(200, found)
            except Refusal as refusal:
                self.give(refusal.status, str(refusal))

        def do_GET(self) -> None:
            self.answer(None)

        def do_POST(self) -> None:
            self.answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def give(self, status: int, found: Any) -> None:
            is_text = isinstance(found, str)
            body = found.encode() if is_text else json.dumps(found).encode()
            self.send_response(status)
            self.send_header("Content-Type", "text/plain" if is_text else "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *given: Any) -> None:
            pass

    ThreadingHTTPServer.allow_reuse_address = True
    ThreadingHTTPServer(("127.0.0.1", options.port), Handler).serve_forever()


def main() -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for them
    for line in sys.stdin:
        number = os.fork()
        if number == 0:
            os.close(0)
            serve(json.loads(line))
        print(number, flush=True)


if __name__ == "__main__":
    main()
