"""A causal language model with transformers' own Trainer, on the batches of a recipe, padded.

Called by `gpu.py` in its process: the same weights, rows, batches, precision, activation checkpointing and compilation
as ours, attention by torch's scaled_dot_product_attention, adapters by PEFT.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch.nn.utils.rnn import pad_sequence


def train(recipe: Any, meter: Any, steps: int) -> None:
    """Train for so many steps.

    Args:
        recipe: ours.
        meter: is called as by Lightning, at the end of each step.
        steps: optimizer steps.
    """
    from transformers import AutoModelForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from luthier.common import kinds
    from luthier.common.seeding import seed_everything
    from luthier.common.task import StepResult
    from luthier.common.training import data

    processing = kinds.task(recipe.task.kind).make_processing(recipe)
    read = data.gather(recipe, processing, "train")
    assert read is not None
    rows = [example.documents[0] for example in read.examples]
    plan = data.plan(recipe, read, processing, 1, 1)
    seed_everything(recipe.train.seed)  # for the same random weights as ours
    half = recipe.train.precision == "bf16-true"
    model = AutoModelForCausalLM.from_pretrained(
        recipe.model.path, dtype=torch.bfloat16 if half else torch.float32, attn_implementation="sdpa"
    )
    model.config.use_cache = False
    if recipe.model.lora is not None:
        from peft import LoraConfig, get_peft_model

        lora = recipe.model.lora
        wanted = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, target_modules="all-linear", task_type="CAUSAL_LM")
        model = get_peft_model(model, wanted)
        if recipe.train.gradient_checkpointing:
            model.enable_input_require_grads()

    losses: list[float] = []

    class Planned(Trainer):
        """Takes the batches of the plan."""

        def get_train_dataloader(self) -> Any:
            batches = [list(batch.indices) for batch in plan.batches()]
            return torch.utils.data.DataLoader(rows, batch_sampler=batches, collate_fn=collate)

        def training_step(self, *inputs: Any, **named: Any) -> Any:
            loss = super().training_step(*inputs, **named)
            losses.append(float(loss))
            return loss

    class Watch(TrainerCallback):
        """Shows the meter what each step was made of."""

        trainer = SimpleNamespace(callbacks=[meter], accumulate_grad_batches=1)
        batches = plan.batches()

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.on_train_start(self.trainer, None)

        def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            meter.on_train_batch_start(self.trainer, None, None, state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            sizes = [len(rows[index]) for index in next(self.batches).indices]
            padded = max(sizes) * len(sizes)
            step = StepResult(losses[-1], count=1.0, items=len(sizes), real=sum(sizes), padded=padded)
            meter.on_train_batch_end(self.trainer, SimpleNamespace(last_step=step), None, None, state.global_step - 1)

    arguments = TrainingArguments(
        output_dir=str(recipe.output), max_steps=steps, per_device_train_batch_size=1, report_to="none",
        save_strategy="no", logging_strategy="no", disable_tqdm=True, learning_rate=recipe.optim.learning_rate,
        weight_decay=recipe.optim.weight_decay, bf16=recipe.train.precision == "bf16-mixed",
        gradient_checkpointing=recipe.train.gradient_checkpointing, use_cpu=not torch.cuda.is_available(),
        gradient_checkpointing_kwargs={"use_reentrant": False}, torch_compile=recipe.train.compile,
        max_grad_norm=recipe.optim.clip_norm or 0.0, optim="adamw_torch_fused",
    )  # fmt: skip
    Planned(model=model, args=arguments, train_dataset=rows, callbacks=[Watch()]).train()


def collate(documents: list[Any]) -> dict[str, torch.Tensor]:
    """input_ids, labels and attention_mask [B, T] of documents, padded to the longest."""
    ids = [torch.from_numpy(one.ids).long() for one in documents]
    labels = [torch.where(torch.from_numpy(one.trained), row, -100) for one, row in zip(documents, ids, strict=True)]
    mask = [torch.ones_like(row) for row in ids]
    return {
        "input_ids": pad_sequence(ids, batch_first=True),
        "labels": pad_sequence(labels, batch_first=True, padding_value=-100),
        "attention_mask": pad_sequence(mask, batch_first=True),
    }
