"""A small network that says what a picture shows: trained on drawn shapes, it judges pictures that a model has made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from .drawn import COLOURS, SHAPES, STYLES, Drawing, draw, drawings

QUESTIONS: dict[str, tuple[str, ...]] = {
    "shape": tuple(SHAPES), "colour": tuple(COLOURS), "ground": tuple(COLOURS), "style": STYLES,
}  # fmt: skip


class Judge(nn.Module):
    """Answers [B, number of answers] to each question about pictures in [-1, 1], [B, 3, 32, 32]."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        for inside, outside in ((3, 24), (24, 48), (48, 64)):
            layers += [nn.Conv2d(inside, outside, 3, padding=1), nn.BatchNorm2d(outside), nn.ReLU(), nn.MaxPool2d(2)]
        self.body = nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 16, 128), nn.ReLU())
        self.heads = nn.ModuleDict({name: nn.Linear(128, len(known)) for name, known in QUESTIONS.items()})

    def forward(self, pictures: Tensor) -> dict[str, Tensor]:
        body = self.body(pictures)
        return {name: head(body) for name, head in self.heads.items()}


def tensor(images: Sequence[Any]) -> Tensor:
    """Pillow images as [B, 3, 32, 32] in [-1, 1]."""
    values = np.stack([np.asarray(image) for image in images])
    return torch.from_numpy(values).permute(0, 3, 1, 2).float() / 127.5 - 1


def train(seed: int = 0, steps: int = 400, told: Callable[[int, int], None] | None = None) -> Judge:
    """A judge trained on drawings of all kinds, a little noisy and blurred as generated pictures are."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        rng = np.random.default_rng([seed, 1])
        known = [*drawings(), *drawings("pastel")]
        chosen = [known[i] for i in rng.integers(len(known), size=3000)]
        data = tensor([draw(drawing, rng) for drawing in chosen])
        answers = _answers(chosen)
        judge = Judge()
        optimizer = torch.optim.AdamW(judge.parameters(), lr=2e-3)
        for step in range(steps):
            at = torch.randint(len(data), (64,))
            part = data[at] + 0.1 * torch.rand([]) * torch.randn(64, 3, 32, 32)
            if step % 2:
                part = nn.functional.avg_pool2d(part, 3, stride=1, padding=1, count_include_pad=False)
            said = judge(part)
            loss = torch.stack([nn.functional.cross_entropy(said[name], answers[name][at]) for name in QUESTIONS]).sum()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            if told:
                told(step + 1, steps)
    return judge.eval()


def _answers(asked: Sequence[Drawing]) -> dict[str, Tensor]:
    return {
        name: torch.tensor([known.index(getattr(drawing, name)) for drawing in asked])
        for name, known in QUESTIONS.items()
    }


@torch.no_grad()
def judged(judge: Judge, images: Sequence[Any], asked: Sequence[Drawing]) -> dict[str, float]:
    """Share of pictures that show what was asked for: for each question, and for all of them at once (`all`)."""
    said, answers = judge(tensor(images)), _answers(asked)
    right = {name: said[name].argmax(1) == answers[name] for name in QUESTIONS}
    right["all"] = torch.stack(list(right.values())).all(0)
    return {name: float(values.float().mean()) for name, values in right.items()}
