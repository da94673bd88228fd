"""Targets, weights and noise: derived numbers, and diffusers' own functions, forward and gradient."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import DDPMScheduler, FlowMatchEulerDiscreteScheduler
from diffusers.training_utils import compute_density_for_timestep_sampling, compute_loss_weighting_for_sd3, compute_snr

from luthier.modalities.diffusion import captions, losses, noise, timesteps
from luthier.modalities.diffusion.sections import CaptionSection, NoiseSection, TimestepSection


@pytest.fixture
def scheduler() -> Any:
    return DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear")


def pair() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    return torch.randn(5, 4, 3, 3), torch.randn(5, 4, 3, 3), torch.tensor([0, 1, 400, 998, 999])


# ---------------------------------------------------------------------------------------------- diffusion


def test_noised_latents_and_targets_are_those_of_diffusers(scheduler: Any) -> None:
    clean, drawn, times = pair()
    products = scheduler.alphas_cumprod
    assert torch.equal(losses.diffused(clean, drawn, products, times), scheduler.add_noise(clean, drawn, times))
    velocity = losses.diffusion_target("v_prediction", clean, drawn, products, times)
    assert torch.equal(velocity, scheduler.get_velocity(clean, drawn, times))
    assert losses.diffusion_target("epsilon", clean, drawn, products, times) is drawn
    assert losses.diffusion_target("sample", clean, drawn, products, times) is clean


def test_flow_is_that_of_diffusers() -> None:
    clean, drawn, _ = pair()
    flow = FlowMatchEulerDiscreteScheduler()
    index = torch.tensor([0, 1, 500, 998, 999])
    found = losses.flowed(clean, drawn, flow.sigmas[index])
    assert torch.allclose(found, flow.scale_noise(clean, flow.timesteps[index], drawn), atol=1e-7)
    step = 1e-3
    ahead = losses.flowed(clean, drawn, flow.sigmas[index] + step)
    assert torch.allclose((ahead - found) / step, losses.flow_target(clean, drawn), atol=1e-3), "dz / ds"


def test_the_error_of_each_picture_is_a_mean_with_its_gradient() -> None:
    said, target, _ = pair()
    said.requires_grad_(True)
    each = losses.each_mse(said, target)
    expected = torch.stack([torch.nn.functional.mse_loss(a, b) for a, b in zip(said, target, strict=True)])
    assert torch.allclose(each, expected)
    (gradient,) = torch.autograd.grad(each.sum(), said)
    assert torch.allclose(gradient, 2 * (said - target).detach() / (4 * 3 * 3))


def test_a_mask_is_a_weighted_mean_whatever_its_size() -> None:
    said, target, _ = pair()
    mask = torch.zeros(5, 1, 3, 3)
    mask[:, :, 0, 0] = 1.0
    mask[1] = 1.0
    mask[2] = 0.0
    each = losses.each_mse(said, target, mask)
    assert each[0].item() == pytest.approx(float((said - target)[0, :, 0, 0].square().mean()), rel=1e-6)
    assert each[1].item() == pytest.approx(float((said - target)[1].square().mean()), rel=1e-6)
    assert each[2].item() == 0.0
    half = mask.clone()
    half[0] *= 0.5
    assert torch.allclose(losses.each_mse(said, target, half)[0], each[0]), "the weights are relative"


# ---------------------------------------------------------------------------------------------- weights


def test_the_ratio_is_that_of_diffusers(scheduler: Any) -> None:
    times = torch.arange(1000)
    assert torch.allclose(losses.snr(scheduler.alphas_cumprod, times), compute_snr(scheduler, times), rtol=1e-5)


@pytest.mark.parametrize(("kind", "divisor"), [("epsilon", lambda snr: snr), ("v_prediction", lambda snr: snr + 1)])
def test_min_snr_is_that_of_diffusers_script(scheduler: Any, kind: str, divisor: Any) -> None:
    """As `train_text_to_image_lora.py` computes it: min(snr, gamma) / snr, or / (snr + 1)."""
    times = torch.arange(1000)
    snr = compute_snr(scheduler, times)
    expected = torch.stack([snr, 5.0 * torch.ones_like(times)], dim=1).min(dim=1)[0] / divisor(snr)
    assert torch.allclose(losses.min_snr(losses.snr(scheduler.alphas_cumprod, times), 5.0, kind), expected, rtol=1e-5)


@pytest.mark.parametrize("kind", ["epsilon", "v_prediction", "sample"])
@pytest.mark.parametrize("name", ["none", "min_snr", "debiased", "p2"])
def test_fault_4_a_zero_terminal_schedule_has_finite_weights(name: str, kind: str) -> None:
    schedule = DDPMScheduler(
        beta_start=0.00085, beta_end=0.012, beta_schedule="scaled_linear", rescale_betas_zero_snr=True
    )
    products = schedule.alphas_cumprod
    assert products[-1] == 0.0
    ratio = losses.snr(products, torch.arange(1000))
    weights = losses.diffusion_weights(name, 5.0, ratio, kind)
    assert torch.isfinite(weights).all()
    assert (weights >= 0).all()
    if name == "min_snr":
        # The limits for snr -> 0: snr / snr, snr / (snr + 1), snr.
        assert weights[-1] == {"epsilon": 1.0, "v_prediction": 0.0, "sample": 0.0}[kind]


def test_debiased_and_p2() -> None:
    ratio = torch.tensor([0.0, 0.25, 1.0, 4.0, 1e6])
    assert torch.allclose(losses.debiased(ratio, "epsilon"), torch.tensor([100.0, 2.0, 1.0, 0.5, 1e-1 * 10**-0.5]))
    assert torch.allclose(losses.debiased(ratio, "v_prediction")[1:4], torch.tensor([0.8, 0.5, 0.2]))
    assert torch.allclose(losses.p2(ratio, 1.0)[:4], torch.tensor([1.0, 0.8, 0.5, 0.2]))
    assert torch.allclose(losses.p2(ratio, 2.0)[2:4], torch.tensor([0.25, 0.04]))


@pytest.mark.parametrize("name", ["sigma_sqrt", "cosmap", "none"])
def test_weights_of_flow_are_those_of_diffusers(name: str) -> None:
    levels = torch.linspace(0.01, 1, 50)
    assert torch.allclose(losses.flow_weights(name, levels), compute_loss_weighting_for_sd3(name, levels), rtol=1e-5)


def test_fault_11_both_meanings_of_prior_preservation() -> None:
    each = torch.tensor([1.0, 2.0, 3.0, 10.0, 20.0, 30.0])
    total, count = losses.preserved(each, 3, 0.5, "sum")
    assert total / count == pytest.approx(2.0 + 0.5 * 20.0), "as diffusers: instance mean + weight x prior mean"
    total, count = losses.preserved(each, 3, 0.5, "mean")
    assert total / count == pytest.approx((2.0 + 0.5 * 20.0) / 2), "as kohya: the mean of weighted losses"
    weighted = each * torch.tensor([1, 1, 1, 0.5, 0.5, 0.5])
    assert total / count == pytest.approx(float(weighted.mean()))


# ---------------------------------------------------------------------------------------------- noise and levels


def test_noise_is_plain_by_default() -> None:
    like = torch.zeros(2, 4, 8, 8)
    torch.manual_seed(3)
    expected = torch.randn_like(like)
    torch.manual_seed(3)
    assert torch.equal(noise.drawn(like, NoiseSection()), expected)


def test_offset_noise_shifts_whole_channels() -> None:
    torch.manual_seed(0)
    like = torch.zeros(200, 4, 8, 8)
    plain = torch.randn_like(like)
    shifts = noise.offset(plain, 0.5) - plain
    assert torch.allclose(shifts, shifts[:, :, :1, :1].expand_as(shifts), atol=1e-6)
    assert float(shifts[:, :, 0, 0].std()) == pytest.approx(0.5, rel=0.1)


def test_multires_noise_has_unit_size_and_is_smoother() -> None:
    torch.manual_seed(0)
    plain = torch.randn(50, 4, 16, 16)
    found = noise.multires(plain, 6, 0.5)
    assert float(found.std()) == pytest.approx(1.0, rel=1e-5)

    def neighbours(values: torch.Tensor) -> float:
        return float((values[..., 1:] * values[..., :-1]).mean())

    assert neighbours(found) > 0.1 > abs(neighbours(plain))
    assert noise.multires(torch.randn(1, 1, 1, 1).expand(2, 1, 3, 3), 6, 0.5).shape == (2, 1, 3, 3)


def test_perturbation_changes_the_input_only() -> None:
    torch.manual_seed(0)
    plain = torch.randn(100, 4, 8, 8)
    assert noise.perturbed(plain, 0.0) is plain
    assert float((noise.perturbed(plain, 0.1) - plain).std()) == pytest.approx(0.1, rel=0.05)


def test_fixed_noise_depends_on_the_seed_alone() -> None:
    torch.manual_seed(0)
    first = noise.fixed((4, 2, 2), 5)
    torch.manual_seed(1)
    assert torch.equal(noise.fixed((4, 2, 2), 5), first)
    assert not torch.equal(noise.fixed((4, 2, 2), 6), first)


@pytest.mark.parametrize("sampling", ["uniform", "logit_normal", "mode"])
def test_densities_are_those_of_diffusers(sampling: str) -> None:
    """diffusers' u is an index into sigmas that fall, so its `mode` and `logit_normal` at mean 0 are ours mirrored."""
    section = TimestepSection(sampling=sampling)  # type: ignore[arg-type]
    torch.manual_seed(0)
    found = timesteps.drawn(1000, section)
    torch.manual_seed(0)
    expected = compute_density_for_timestep_sampling(sampling, 1000, logit_mean=0.0, logit_std=1.0, mode_scale=1.29)
    assert torch.allclose(found, expected.clamp(0, 1 - 1e-6), atol=1e-6)
    assert found.min() >= 0
    assert found.max() < 1


def test_more_mean_is_more_noise_and_the_range_holds() -> None:
    torch.manual_seed(0)
    high = timesteps.drawn(1000, TimestepSection(sampling="logit_normal", mean=1.0))
    assert float(high.mean()) > 0.6
    found = timesteps.drawn(1000, TimestepSection(range=(0.2, 0.4)))
    assert 0.2 <= float(found.min()) < 0.21
    assert 0.39 < float(found.max()) < 0.4
    assert timesteps.steps(torch.tensor([0.0, 0.4999, 1 - 1e-6]), 1000).tolist() == [0, 499, 999]


def test_the_shift_is_the_scheduler_s() -> None:
    static = FlowMatchEulerDiscreteScheduler(shift=3.0)
    plain = torch.linspace(1, 1 / 1000, 1000)
    shift = timesteps.scheduler_shift(static.config, 64)
    assert torch.allclose(timesteps.shifted(plain, shift), static.sigmas, atol=1e-6)


@pytest.mark.parametrize("tokens", [256, 1024, 4096])
def test_the_shift_by_resolution_is_that_of_the_pipeline(tokens: int) -> None:
    from diffusers.pipelines.flux.pipeline_flux import calculate_shift

    flow = FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True)
    wanted = np.linspace(1.0, 1 / 20, 20)
    flow.set_timesteps(sigmas=wanted, mu=calculate_shift(tokens))
    shift = timesteps.scheduler_shift(flow.config, tokens)
    found = timesteps.shifted(torch.tensor(wanted, dtype=torch.float32), shift)
    assert torch.allclose(found, flow.sigmas[:-1].float(), atol=1e-5)


def test_levels_of_the_evaluation_are_middles() -> None:
    assert timesteps.fixed(4).tolist() == [0.125, 0.375, 0.625, 0.875]
    assert math.isclose(float(timesteps.fixed(7).mean()), 0.5, rel_tol=1e-6)


# ---------------------------------------------------------------------------------------------- captions


def test_captions_vary_in_training_only() -> None:
    section = CaptionSection(prefix="sks, ", dropout=0.5, shuffle=True, keep=1)
    assert captions.varied("a dog, grey,  big , old", section, None) == "sks, a dog, grey,  big , old"
    found = {captions.varied("a dog, grey,  big , old", section, np.random.default_rng(seed)) for seed in range(80)}
    assert "" in found
    rest = {text.removeprefix("sks, a dog, ") for text in found - {""}}
    assert rest == {"grey, big, old", "grey, old, big", "big, grey, old", "big, old, grey", "old, grey, big",
                    "old, big, grey"}  # fmt: skip


def test_dropout_has_its_share() -> None:
    generator = np.random.default_rng(0)
    section = CaptionSection(dropout=0.2)
    empty = sum(captions.varied("x", section, generator) == "" for _ in range(2000))
    assert empty / 2000 == pytest.approx(0.2, abs=0.03)
