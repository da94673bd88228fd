"""NeMo's networks: another vocabulary with what was learned kept, adapters, frozen parts, recomputed activations."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from luthier.common.errors import ModelError, RecipeError
from luthier.common.seeding import seed_everything

pytest.importorskip("nemo")

TABLES = {
    "ctc": ["decoder.decoder_layers.0.weight", "decoder.decoder_layers.0.bias"],
    "rnnt": ["decoder.prediction.embed.weight", "joint.joint_net.1.weight", "joint.joint_net.1.bias"],
}
TABLES["tdt"] = TABLES["rnnt"]
TABLES["hybrid"] = [*TABLES["rnnt"], "ctc_decoder.decoder_layers.0.weight", "ctc_decoder.decoder_layers.0.bias"]


@pytest.fixture
def other(manifest):
    """The recordings with other letters in their texts: k is new, w and e are gone."""
    rows = [json.loads(line) for line in manifest.read_text(encoding="utf-8").splitlines()]
    rows = [{**row, "text": row["text"].replace("w", "k").replace("e", "i")} for row in rows]
    file = manifest.parent / "other.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(file)


@pytest.mark.parametrize("kind", TABLES)
def test_another_vocabulary_keeps_the_rows_of_what_stays(make_task, saved_of, other, kind):
    """faults/asr.md, 15: NeMo makes all of the decoder anew (NM#8815, #15793)."""
    old = make_task(saved_of(kind))
    new = make_task(saved_of(kind), model={"vocabulary": "data"}, data={"train": other})
    before, after = old.processing.tokens.pieces, new.processing.tokens.pieces
    assert set(after) - set(before) == {"k"}
    assert set(before) - set(after) == {"w", "e"}
    ours, theirs = new.nemo.state_dict(), old.nemo.state_dict()
    for name in TABLES[kind]:
        table, kept = ours[name], theirs[name]
        for row, piece in enumerate(after):
            if piece != "k":
                assert torch.equal(table[row], kept[before.index(piece)]), (name, piece)
        further = len(kept) - len(before)  # blank, and the durations of TDT
        assert further == (4 if kind == "tdt" and "joint" in name else 1)
        assert torch.equal(table[-further:], kept[-further:]), name
        assert len(table) == len(after) + further
    rest = [name for name in ours if name not in TABLES[kind]]
    assert all(torch.equal(ours[name], theirs[name]) for name in rest)


@pytest.mark.parametrize("kind", ["ctc", "tdt", "hybrid"])
def test_what_stays_is_heard_as_before(make_task, saved_of, collated, tmp_path, other, kind):
    """The log-odds of letters that stay are unchanged, also after saving and loading."""
    tasks = [make_task(saved_of(kind)), make_task(saved_of(kind), model={"vocabulary": "data"}, data={"train": other})]
    tasks[1].save_pretrained(tmp_path)
    tasks.append(make_task(saved_of(kind), weights=tmp_path, data={"train": other}))
    found = []
    for task in tasks:
        task.eval()
        pieces = task.processing.tokens.pieces
        data = collated(tasks[0].processing)
        with torch.no_grad():
            encoded, _ = task.encode(data)
            if kind == "ctc":
                scores = task.nemo.decoder(encoder_output=encoded)
            else:
                said = torch.tensor([[pieces.index(letter) for letter in "holl"]] * len(encoded))
                predicted = task.nemo.decoder(targets=said, target_length=torch.full((len(encoded),), 4))[0]
                scores = task.nemo.joint(encoder_outputs=encoded, decoder_outputs=predicted)
        ids = [pieces.index(letter) for letter in " abdhlo"] + [len(pieces)]
        found.append(scores[..., ids] - scores[..., ids[:1]])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(found[2], found[1], rtol=0, atol=0)


def test_other_subwords_keep_the_rows_of_what_stays(make_task, saved_of, tmp_path):
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["hello world", "good old day", "hello you", "my old world"]), vocab_size=24,
        model_prefix=str(tmp_path / "tokenizer"), model_type="bpe", bos_id=-1, eos_id=-1, minloglevel=2,
    )  # fmt: skip
    old = make_task(saved_of("ctc", True))
    new = make_task(saved_of("ctc", True), model={"vocabulary": str(tmp_path)}, task={"unknown": "drop"})
    before, after = old.processing.tokens.pieces, new.processing.tokens.pieces
    shared = set(before) & set(after)
    assert 8 < len(shared) < min(len(before), len(after))
    name = "decoder.decoder_layers.0.weight"
    table, kept = new.nemo.state_dict()[name], old.nemo.state_dict()[name]
    assert all(torch.equal(table[after.index(piece)], kept[before.index(piece)]) for piece in shared)
    assert torch.equal(table[-1], kept[-1])
    (tmp_path / "saved").mkdir()
    new.save_pretrained(tmp_path / "saved")
    again = make_task(saved_of("ctc", True), weights=tmp_path / "saved", task={"unknown": "drop"})
    assert again.processing.tokens.pieces == after
    assert torch.equal(again.nemo.state_dict()[name], table)


def test_the_same_vocabulary_changes_nothing(make_task, saved_of, pieces):
    old, new = make_task(saved_of("ctc", True)), make_task(saved_of("ctc", True), model={"vocabulary": pieces})
    expected = old.nemo.state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in new.nemo.state_dict().items())


def modules(task: Any, name: str) -> dict[str, torch.nn.Module]:
    return {key: module for key, module in task.nemo.named_modules() if name in type(module).__name__}


def step(task: Any, data: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Buffers after a training step, the gradient in place."""
    seed_everything(3)
    task.train_mode()
    result = task.loss(data)
    (result.sum / result.count).backward()
    return {name: value.clone() for name, value in task.nemo.named_buffers()}


@pytest.mark.parametrize("section", [{"lora": {"rank": 2}}, {"freeze_encoder": True}])
def test_batch_statistics_of_frozen_layers_stay(make_task, saved_of, collated, section):
    """faults/asr.md, 19: in NeMo they move under an adapter although every weight is frozen."""
    frozen, trained = make_task(saved_of("ctc"), model=section), make_task(saved_of("ctc"))
    data = collated(trained.processing)
    before = {name: value.clone() for name, value in frozen.nemo.named_buffers()}
    after = step(frozen, data)
    assert modules(frozen, "BatchNorm")
    assert all(torch.equal(after[name], before[name]) for name in before)
    moved = step(trained, data)
    assert not torch.equal(moved["encoder.layers.0.conv.batch_norm.running_mean"],
                           before["encoder.layers.0.conv.batch_norm.running_mean"])  # fmt: skip
    named = {name for name, p in frozen.named_parameters() if p.grad is not None}
    assert named
    assert all(("lora_" in name) if "lora" in section else ("decoder." in name) for name in named)


def test_lora_of_a_frozen_encoder_is_outside_of_it(make_task, saved_of):
    lora = {"rank": 2, "target_modules": ["enc", "pred", "linear_q"]}
    task = make_task(saved_of("hybrid"), model={"lora": lora, "freeze_encoder": True})
    names = {name for name, p in task.named_parameters() if p.requires_grad}
    assert names
    assert all(".joint." in name for name in names)


@pytest.mark.parametrize("kind", ["ctc", "streamed"])
def test_recomputed_activations_change_nothing(make_task, saved_of, collated, kind):
    """Not the gradient, and not the batch statistics, which a second run must not move again."""
    found, runs = [], []
    for checkpointing in (False, True):
        task = make_task(saved_of(kind), train={"gradient_checkpointing": checkpointing})
        count = [0]
        task.nemo.encoder.layers[0].self_attn.linear_q.register_forward_hook(
            lambda *_, count=count: count.__setitem__(0, count[0] + 1)
        )
        buffers = step(task, collated(task.processing))
        found.append(({n: p.grad for n, p in task.named_parameters() if p.grad is not None}, buffers))
        runs.append(count[0])
    assert runs == [1, 2]
    (gradients, buffers), (same, others) = found
    assert all(torch.equal(same[name], gradients[name]) for name in gradients)
    assert all(torch.equal(others[name], buffers[name]) for name in buffers)


def test_intermediate_ctc_losses_are_nemo_s(make_task, saved_of, collated):
    """`interctc` in the model: (1 - w) of the last layer's loss and w of an earlier one's."""
    changes = {"interctc": {"loss_weights": [0.3], "apply_at_layers": [0]}}
    plain, task = make_task(saved_of("ctc")), make_task(saved_of("ctc"), model={"config": changes})
    data = collated(task.processing)
    for one in (plain, task):
        one.eval()
    with torch.no_grad():
        last, found = plain.loss(data), task.loss(data)
        encoder = plain.nemo.encoder
        layers, encoder.layers = encoder.layers, encoder.layers[:1]
        early = plain.loss(data)
        encoder.layers = layers
    assert float(found.sum) == pytest.approx(0.7 * float(last.sum) + 0.3 * float(early.sum), rel=1e-5)
    assert float(task.loss(data).sum) == pytest.approx(float(found.sum))


def test_what_makes_no_sense_is_refused(make_task, make_recipe, config_of, saved_of):
    with pytest.raises(RecipeError, match=r"model\.lora freezes"):
        make_recipe(saved_of("ctc"), model={"lora": {"rank": 2}, "vocabulary": "data"})
    with pytest.raises(ModelError, match="random weights"):
        make_task(config_of("ctc"), model={"lora": {"rank": 2}})
    with pytest.raises(ModelError, match="target_modules"):
        make_task(saved_of("ctc"), model={"lora": {"rank": 2, "target_modules": ["q_proj"]}})
    with pytest.raises(ModelError, match="ctc_reduction"):
        make_task(saved_of("ctc"), model={"config": {"ctc_reduction": "sum"}})
    with pytest.raises(ModelError, match="rnnt_reduction"):
        make_task(saved_of("hybrid"), model={"config": {"rnnt_reduction": "mean_volume"}})


def test_the_toy_s_configuration_makes_a_model(make_task, tmp_path):
    """Two halvings would leave its fastest commands without a frame for each letter."""
    import yaml

    from luthier.modalities.asr.nemo.toy import conformer_ctc

    file = tmp_path / "model.yaml"
    file.write_text(yaml.safe_dump(conformer_ctc()))
    task = make_task(str(file), model={"vocabulary": "data"})
    assert 1e6 < sum(parameter.numel() for parameter in task.parameters()) < 2e6
    assert task.processing.encoded_frames(100) == 50
