"""Layers that processes share: outputs and gradients are those of the whole layer."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from luthier.common.strategies import sharded, tensor_parallel

SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 50, "attn_implementation": "eager",
}  # fmt: skip
MODELS = ("Llama", "Qwen3", "Qwen3-tied")
IDS = torch.arange(24).reshape(2, 12) * 7 % 50


def make(name: str) -> Any:
    torch.manual_seed(0)
    family, _, tied = name.partition("-")
    config = getattr(transformers, f"{family}Config")(**SIZES, tie_word_embeddings=bool(tied))
    return getattr(transformers, f"{family}ForCausalLM")(config)


def loss(model: nn.Module) -> torch.Tensor:
    logits = model(input_ids=IDS).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), IDS[:, 1:].flatten(), reduction="sum")


def _rank() -> None:
    """One of the processes that share the models: compares each with the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.distributed.init_process_group("gloo")
    ranks = torch.distributed.get_world_size()
    mesh = init_device_mesh("cpu", (1, ranks), mesh_dim_names=("data_parallel", "tensor_parallel"))
    found: dict[str, Any] = {}
    for name in MODELS:
        whole, cut = make(name), make(name)
        expected = loss(whole)
        expected.backward()
        tensor_parallel.apply(cut, mesh["tensor_parallel"])
        for unit in sharded.units(cut):
            fully_shard(unit, mesh=mesh["data_parallel"])
        fully_shard(cut, mesh=mesh["data_parallel"])
        elements = sum(parameter.to_local().numel() for parameter in cut.parameters())
        got = loss(cut)
        got.backward()
        gradients = {key: parameter.grad.full_tensor() for key, parameter in cut.named_parameters()}
        first = torch.distributed.get_rank() == 0
        with sharded._readable(cut, first):
            pairs = zip(whole.state_dict().values(), cut.state_dict().values(), strict=True)
            same = first and all(torch.equal(a, b) for a, b in pairs)
        with sharded._callable(cut), torch.no_grad():
            evaluated = float(loss(cut))
        found[name] = {
            "expected": float(expected),
            "loss": float(got),
            "evaluated": evaluated,
            "gradient": max(float((gradients[key] - p.grad).abs().max()) for key, p in whole.named_parameters()),
            "largest": max(float(p.grad.abs().max()) for p in whole.parameters()),
            "readable": same,
            "share": elements / sum(parameter.numel() for parameter in whole.parameters()),
        }
    if torch.distributed.get_rank() == 0:
        Path(sys.argv[1]).write_text(json.dumps(found))
    torch.distributed.destroy_process_group()


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    file = tmp_path_factory.mktemp("tensor-parallel") / "found.json"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    source = str(Path(__file__).resolve().parents[3] / "src")
    shared = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "WORLD_SIZE": "2"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    ranks = [
        subprocess.Popen(
            [sys.executable, __file__, str(file)], env={**shared, "RANK": str(rank)}, stderr=subprocess.PIPE
        )
        for rank in range(2)
    ]
    for rank in ranks:
        assert rank.wait(180) == 0, rank.stderr and rank.stderr.read().decode()[-3000:]
    result: dict[str, Any] = json.loads(file.read_text())
    return result


@pytest.mark.parametrize("name", MODELS)
def test_loss_and_gradients_are_those_of_the_whole(found: dict[str, Any], name: str) -> None:
    result = found[name]
    assert result["loss"] == pytest.approx(result["expected"], rel=1e-6)
    assert result["evaluated"] == pytest.approx(result["expected"], rel=1e-6)
    assert result["gradient"] <= 1e-5 * result["largest"]


@pytest.mark.parametrize("name", MODELS)
def test_what_is_saved_is_the_whole(found: dict[str, Any], name: str) -> None:
    assert found[name]["readable"]


@pytest.mark.parametrize("name", MODELS)
def test_a_rank_holds_about_half(found: dict[str, Any], name: str) -> None:
    whole = make(name)
    parameters = {key: parameter.numel() for key, parameter in whole.named_parameters()}
    kept = sum(size for key, size in parameters.items() if "norm" in key)  # norms are on both
    kept += parameters["model.embed_tokens.weight"] if name.endswith("tied") else 0
    total = sum(parameters.values())
    assert found[name]["share"] == pytest.approx((kept + (total - kept) / 2) / total)


def test_what_can_not_be_cut_is_refused_with_the_reason() -> None:
    assert tensor_parallel.refuse(make("Llama"), 2) is None
    assert "no tensor-parallel plan" in str(tensor_parallel.refuse(nn.Linear(2, 2), 2))
    assert "num_attention_heads (4)" in str(tensor_parallel.refuse(make("Llama"), 3))
    assert "num_key_value_heads (2)" in str(tensor_parallel.refuse(make("Llama"), 4))


def test_units_are_the_layers_the_model_may_not_split() -> None:
    model = make("Llama")
    assert [type(unit).__name__ for unit in sharded.units(model)] == ["LlamaDecoderLayer"] * 2
    plain = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(2, 2), nn.Linear(2, 2)]), "head": nn.Linear(2, 2)})
    assert sharded.units(plain) == list(plain["blocks"])


if __name__ == "__main__":
    _rank()
