"""The loss beside the steps of diffusers' training scripts on the same latents, noise and timesteps, forward and
gradient, and what each step is made of."""

from __future__ import annotations

from typing import Any

import diffusers as df
import numpy as np
import pytest
import torch
from peft import LoraConfig
from torch.nn import functional

from luthier.common import gradients, optim
from luthier.common.errors import ModelError, RecipeError
from luthier.modalities.diffusion import losses, noise, timesteps
from luthier.modalities.diffusion.model import full_precision, moments

LORA = ["to_q", "to_k", "to_v", "to_out.0"]
TIMES = (3, 200, 731, 999)


def forced(monkeypatch: pytest.MonkeyPatch, drawn: torch.Tensor, levels: torch.Tensor) -> None:
    """Noise and levels that our loss is to use; the latents' own draw comes from torch's generator, as there."""
    monkeypatch.setattr(noise, "drawn", lambda latents, section: drawn)
    monkeypatch.setattr(timesteps, "drawn", lambda number, section, device=None: levels)


def adapter_of(part: Any) -> dict[str, torch.Tensor]:
    return {name: value for name, value in part.named_parameters() if ".lora_" in name}


def twin(task: Any, path: str) -> Any:
    """A pipeline of diffusers with the same adapter, put in as its scripts do."""
    pipe = df.DiffusionPipeline.from_pretrained(path)
    for part in (getattr(pipe, name) for name in pipe.components):
        if isinstance(part, torch.nn.Module):
            part.requires_grad_(False)
    denoiser = getattr(pipe, task.family.denoiser)
    denoiser.add_adapter(LoraConfig(r=4, lora_alpha=8, init_lora_weights="gaussian", target_modules=LORA))
    ours = adapter_of(task.parts.denoiser)
    with torch.no_grad():
        for name, value in adapter_of(denoiser).items():
            if "lora_B" in name:
                ours[name].normal_(std=0.1)  # at 0 it would have no effect, and lora_A no gradient
            value.copy_(ours[name])
    return pipe


def pixels_of(data: Any) -> torch.Tensor:
    """As torchvision's ToTensor and Normalize([0.5], [0.5]) give them."""
    return (data["pixels"].float() / 255 - 0.5) / 0.5


def script_sd(pipe: Any, data: Any, drawn: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """train_text_to_image_lora.py"""
    latents = pipe.vae.encode(pixels_of(data)).latent_dist.sample() * pipe.vae.config.scaling_factor
    training = df.DDPMScheduler.from_config(pipe.scheduler.config)
    noisy = training.add_noise(latents, drawn, times)
    ids = pipe.tokenizer(
        data["texts"], max_length=77, padding="max_length", truncation=True, return_tensors="pt"
    ).input_ids
    said = pipe.unet(noisy, times, pipe.text_encoder(ids, return_dict=False)[0], return_dict=False)[0]
    v = training.config.prediction_type == "v_prediction"
    target = training.get_velocity(latents, drawn, times) if v else drawn
    return functional.mse_loss(said.float(), target.float(), reduction="mean")


def script_sdxl(pipe: Any, data: Any, drawn: torch.Tensor, times: torch.Tensor) -> torch.Tensor:
    """train_text_to_image_lora_sdxl.py"""
    latents = pipe.vae.encode(pixels_of(data)).latent_dist.sample() * pipe.vae.config.scaling_factor
    training = df.DDPMScheduler.from_config(pipe.scheduler.config)
    noisy = training.add_noise(latents, drawn, times)
    states, pooled = [], None
    for words, encoder in ((pipe.tokenizer, pipe.text_encoder), (pipe.tokenizer_2, pipe.text_encoder_2)):
        ids = words(data["texts"], padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids
        said = encoder(ids, output_hidden_states=True, return_dict=False)
        pooled = said[0]
        states.append(said[-1][-2])
    assert pooled is not None
    # Original size, crop (top, left), target size.
    time_ids = torch.cat([torch.tensor([[16.0, 16.0, 0.0, 0.0, 16.0, 16.0]])] * len(latents))
    said = pipe.unet(
        noisy, times, torch.cat(states, dim=-1), added_cond_kwargs={"time_ids": time_ids, "text_embeds": pooled},
        return_dict=False,
    )[0]  # fmt: skip
    return functional.mse_loss(said.float(), drawn.float(), reduction="mean")


def script_flow(pipe: Any, data: Any, drawn: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """train_dreambooth_lora_sd3.py and train_dreambooth_lora_flux.py; `index` into the scheduler's sigmas."""
    latents = pipe.vae.encode(pixels_of(data)).latent_dist.sample()
    latents = (latents - pipe.vae.config.shift_factor) * pipe.vae.config.scaling_factor
    sigmas, times = pipe.scheduler.sigmas[index].view(-1, 1, 1, 1), pipe.scheduler.timesteps[index]
    noisy = (1.0 - sigmas) * latents + sigmas * drawn
    if isinstance(pipe, df.StableDiffusion3Pipeline):
        words, _, pooled, _ = pipe.encode_prompt(data["texts"], None, None, do_classifier_free_guidance=False)
        said = pipe.transformer(
            hidden_states=noisy, timestep=times, encoder_hidden_states=words, pooled_projections=pooled,
            return_dict=False,
        )[0]  # fmt: skip
    else:
        words, pooled, text_ids = pipe.encode_prompt(data["texts"])
        b, c, h, w = noisy.shape
        said = pipe.transformer(
            hidden_states=pipe._pack_latents(noisy, b, c, h, w), timestep=times / 1000, guidance=torch.full((b,), 1.0),
            pooled_projections=pooled, encoder_hidden_states=words, txt_ids=text_ids,
            img_ids=pipe._prepare_latent_image_ids(b, h // 2, w // 2, "cpu", noisy.dtype), return_dict=False,
        )[0]  # fmt: skip
        said = pipe._unpack_latents(said, h * pipe.vae_scale_factor, w * pipe.vae_scale_factor, pipe.vae_scale_factor)
    return functional.mse_loss(said.float(), (drawn - latents).float(), reduction="mean")


SCRIPTS = {"sd": script_sd, "v": script_sd, "zero": script_sd, "sdxl": script_sdxl, "sd3": script_flow,
           "flux": script_flow}  # fmt: skip


@pytest.mark.parametrize("name", SCRIPTS)
def test_the_loss_is_that_of_diffusers_scripts(
    name: str, make_task, batch_of, pipeline_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = make_task(name)
    task.train_mode()
    pipe, data = twin(task, pipeline_of(name)), batch_of(task)
    times = torch.tensor(TIMES)
    channels = 16 if task.family.flow else 4
    drawn = torch.randn(4, channels, 8, 8, generator=torch.Generator().manual_seed(1))
    levels = (times + 0.5) / 1000
    if task.family.flow:
        # diffusers' sigmas are shifted already; ours are shifted after they are drawn.
        sigmas, shift = pipe.scheduler.sigmas[times], task._shift(torch.zeros(1, 16, 8, 8))
        levels = sigmas / (shift - (shift - 1) * sigmas)
        if pipe.scheduler.config.use_dynamic_shifting:
            monkeypatch.setattr(type(task), "_shift", lambda self, clean: 1.0)  # their script knows no such shift
            levels = sigmas
    forced(monkeypatch, drawn, levels)
    torch.manual_seed(5)
    theirs = SCRIPTS[name](pipe, data, drawn, times)
    theirs.backward()
    torch.manual_seed(5)
    ours = task.loss(data)
    assert ours.count == 4
    mean = ours.sum / ours.count
    mean.backward()
    assert float(mean.detach()) == pytest.approx(float(theirs.detach()), rel=1e-5)
    expected = adapter_of(getattr(pipe, task.family.denoiser))
    found = adapter_of(task.parts.denoiser)
    assert expected.keys() == found.keys()
    for key, value in expected.items():
        assert value.grad is not None
        assert torch.allclose(found[key].grad, value.grad, rtol=1e-3, atol=1e-6), key
        assert float(value.grad.abs().max()) > 0, key


def test_a_training_goes_as_the_script_s_does(
    make_task, batch_of, pipeline_of, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The steps of peers/diffusers_lora.py: AdamW 1e-4, weight decay 1e-2, the gradient clipped at 1."""
    task = make_task("sd", optim={"learning_rate": 1e-2, "weight_decay": 1e-2, "clip_norm": 0.05})
    task.train_mode()
    pipe, data = twin(task, pipeline_of("sd")), batch_of(task)
    trained = list(adapter_of(pipe.unet).values())
    theirs = torch.optim.AdamW(trained, lr=1e-2, betas=(0.9, 0.999), weight_decay=1e-2, eps=1e-8)
    ours = optim.optimizer(task, task.recipe.optim)
    curves: dict[str, list[float]] = {"theirs": [], "ours": []}
    for step in range(6):
        drawn = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(step))
        times = (torch.tensor(TIMES) - step).clamp(min=0)
        forced(monkeypatch, drawn, (times + 0.5) / 1000)
        torch.manual_seed(step)
        loss = script_sd(pipe, data, drawn, times)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 0.05)
        theirs.step()
        theirs.zero_grad()
        curves["theirs"].append(float(loss.detach()))
        torch.manual_seed(step)
        found = task.loss(data)
        found.sum.backward()
        gradients.finish(ours, 1 / found.count, 0.05, True)
        ours.step()
        ours.zero_grad()
        curves["ours"].append(float(found.sum.detach()) / found.count)
    assert curves["ours"] == pytest.approx(curves["theirs"], rel=1e-5)
    assert len(set(curves["ours"])) == 6


# ---------------------------------------------------------------------------------------------- weights in the loss


def test_the_weight_of_a_recipe_is_in_the_loss(make_task, batch_of, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = make_task("sd")
    weighted = make_task("sd", task={"weight": {"kind": "min_snr", "gamma": 5.0}})
    data = batch_of(plain)
    drawn = torch.randn(4, 4, 8, 8, generator=torch.Generator().manual_seed(1))
    times = torch.tensor(TIMES)
    forced(monkeypatch, drawn, (times + 0.5) / 1000)
    each = []
    monkeypatch.setattr(losses, "each_mse", lambda a, b, mask=None: each.append(_each(a, b)) or each[-1])
    torch.manual_seed(0)
    weighted_loss = weighted.loss(data)
    ratio = losses.snr(plain.products, times)
    assert torch.allclose(weighted_loss.sum, (each[0] * losses.min_snr(ratio, 5.0, "epsilon")).sum())


def _each(said: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (said - target).square().flatten(1).mean(1)


def test_masked_places_carry_no_loss(make_task, batch_of, paint, tmp_path) -> None:
    for number in range(2):
        paint(number).save(tmp_path / f"{number}.png")
        (tmp_path / f"{number}.txt").write_text("a dog")
    mask = np.zeros((16, 16), dtype=np.uint8)
    mask[:8] = 255
    from PIL import Image

    Image.fromarray(mask).save(tmp_path / "0.mask.png")
    task = make_task("sd", task={"masked": True}, data={"train": str(tmp_path)})
    data = batch_of(task, 2)
    assert data["mask"].shape == (2, 1, 8, 8)
    assert data["mask"][0, 0, :4].eq(1).all()
    assert data["mask"][0, 0, 4:].eq(0).all()
    assert data["mask"][1].eq(1).all(), "a picture without a mask counts everywhere"
    torch.manual_seed(0)
    with torch.no_grad():
        masked = float(task.loss(data).sum)
        torch.manual_seed(0)
        assert float(task.loss({**data, "mask": None}).sum) != pytest.approx(masked, rel=1e-4)
    plain = make_task("sd", data={"train": str(tmp_path)})
    assert batch_of(plain, 2)["mask"] is None


def test_gradient_checkpointing_changes_no_gradient(make_task, batch_of) -> None:
    found = []
    for checkpointing in (False, True):
        task = make_task("sd", train={"steps": 1, "gradient_checkpointing": checkpointing})
        task.train_mode()
        torch.manual_seed(1)
        with torch.no_grad():
            for name, value in adapter_of(task.parts.denoiser).items():
                value.copy_(torch.randn(value.shape, generator=torch.Generator().manual_seed(len(name))) * 0.1)
        data = batch_of(task)
        torch.manual_seed(0)
        task.loss(data).sum.backward()
        found.append({name: value.grad for name, value in adapter_of(task.parts.denoiser).items()})
    assert all(torch.allclose(found[0][name], found[1][name], rtol=1e-4, atol=1e-6) for name in found[0])


def test_frozen_parts_are_frozen_and_in_eval_mode(make_task) -> None:
    task = make_task("sd")
    task.train_mode()
    for name, parameter in task.named_parameters():
        assert parameter.requires_grad == (".lora_" in name)
    assert not task.pipe.vae.training
    assert not task.pipe.text_encoder.training
    assert not any(name.startswith(("vae", "text")) for name, _ in task.named_parameters()), "they stay off the device"


# ---------------------------------------------------------------------------------------------- the VAE


@pytest.mark.parametrize("precision", ["32", "bf16-mixed", "bf16-true"])
def test_fault_8_the_vae_computes_in_float32_whatever_the_precision(precision: str, make_task, batch_of) -> None:
    task = make_task("sd", train={"steps": 1, "precision": precision})
    if precision == "bf16-true":
        task.to(torch.bfloat16)
    assert task.pipe.vae.dtype == torch.float32
    pixels = batch_of(task)["pixels"]
    expected = task.pipe.vae.encode(pixels.float() / 127.5 - 1).latent_dist.parameters
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        found = moments(task.pipe.vae, pixels)
    assert found.dtype == torch.float32
    assert torch.equal(found, expected)
    with full_precision(torch.device("cpu")):
        assert not torch.is_autocast_enabled("cpu")


def test_fault_8_a_vae_that_gives_no_numbers_is_told(make_task, batch_of) -> None:
    task = make_task("sd")
    with torch.no_grad():
        task.pipe.vae.encoder.conv_out.weight.fill_(1e38)
    with pytest.raises(ModelError, match="no numbers"):
        task.loss(batch_of(task))


@pytest.mark.parametrize("name", ["sd", "sd3"])
def test_fault_12_latents_are_shifted_and_scaled(name: str, make_task, batch_of) -> None:
    from luthier.modalities.diffusion.model import latents

    task = make_task(name)
    config = task.pipe.vae.config
    parameters = moments(task.pipe.vae, batch_of(task)["pixels"])
    mean = parameters.chunk(2, dim=1)[0]
    expected = (mean - (config.shift_factor or 0.0)) * config.scaling_factor
    assert torch.allclose(latents(task.vae_config, parameters, sample=False), expected)
    assert (name == "sd3") == (config.shift_factor is not None)
    assert config.scaling_factor != 1.0


# ---------------------------------------------------------------------------------------------- precision


@pytest.mark.parametrize("precision", ["bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("name", ["sd", "sdxl", "sd3", "flux"])
def test_bfloat16_trains(name: str, precision: str, make_task, batch_of) -> None:
    task = make_task(name, train={"steps": 1, "precision": precision})
    if precision == "bf16-true":
        task.to(torch.bfloat16)
    task.train_mode()
    data = batch_of(task)
    with torch.autocast("cpu", torch.bfloat16, enabled=precision == "bf16-mixed"):
        loss = task.loss(data)
    loss.sum.backward()
    assert torch.isfinite(loss.sum)
    assert all(value.grad is not None for value in adapter_of(task.parts.denoiser).values())
    lower = torch.bfloat16 if precision == "bf16-true" else torch.float32
    assert {value.dtype for value in adapter_of(task.parts.denoiser).values()} == {lower}


def test_frozen_weights_in_bfloat16_change_nothing_under_autocast(make_task, batch_of, monkeypatch) -> None:
    from luthier.modalities.diffusion import adapters

    found = []
    for lower in (True, False):
        with monkeypatch.context() as patch:
            if not lower:
                patch.setattr(adapters, "lower_base", lambda part, dtype: None)
            torch.manual_seed(3)  # of the adapter's start
            task = make_task("sd", train={"steps": 1, "precision": "bf16-mixed"})
        task.train_mode()
        data = batch_of(task)
        torch.manual_seed(0)
        with torch.autocast("cpu", torch.bfloat16):
            loss = task.loss(data)
        loss.sum.backward()
        grads = {name: value.grad for name, value in adapter_of(task.parts.denoiser).items()}
        found.append((float(loss.sum.detach()), grads))
    assert found[0][0] == found[1][0]
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in found[0][1])


# ---------------------------------------------------------------------------------------------- what is refused


def test_another_family_or_no_pipeline_is_refused(make_task, tmp_path) -> None:
    with pytest.raises(ModelError, match="not a pipeline"):
        make_task(str(tmp_path))
    (tmp_path / "vae").mkdir()
    (tmp_path / "vae" / "config.json").write_text('{"block_out_channels": [1]}')
    (tmp_path / "model_index.json").write_text('{"_class_name": "AudioLDMPipeline"}')
    with pytest.raises(ModelError, match="StableDiffusionXLPipeline"):
        make_task(str(tmp_path))
    with pytest.raises(ModelError, match="no such directory"):
        make_task(str(tmp_path / "absent" / "x"))


def test_sizes_that_the_latents_can_t_have_are_refused(make_task) -> None:
    with pytest.raises(RecipeError, match="multiple of 2"):
        make_task("sd", data={"image": {"resolution": 15, "step": 3}})
    with pytest.raises(RecipeError, match="multiple of 4"):
        make_task("flux", data={"image": {"resolution": 16, "step": 2}})


def test_targets_that_the_denoiser_lacks_are_refused(make_task) -> None:
    with pytest.raises(ModelError, match=r"model\.lora\.target_modules"):
        make_task("sd", model={"lora": {"target_modules": ["q_proj"]}})
