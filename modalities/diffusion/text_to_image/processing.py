"""The data path of text-to-image: from pictures and captions to latents and text embeddings, as far as the cache has
them, else to pixels and texts. Runs in the data workers and holds no weights."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ....common.data.processing import Processing, Shown
from ....common.errors import BadExample, DataError, LuthierError, RecipeError
from ....common.recipe import Source
from .. import buckets, captions, class_images, images
from ..cache import TensorCache, key
from ..model import Facts, facts, tokenizer
from ..pictures import Picture, examined, pictures, unchanged
from ..sampling import png
from .config import Config


@dataclass(frozen=True)
class Encoded:
    """A picture and its caption as model input.

    Args:
        picture: what was encoded.
        crop: which part of it.
        caption: as the text encoder reads it.
        image_key, text_key: in the cache; "" without one.
        moments: mean and log-variance of the latents [2 C, h, w], from the cache.
        pixels: uint8 [3, H, W], where the cache has none.
        text: text embeddings, from the cache.
        mask: weight of each latent pixel [1, h, w], or None.
        prior: the class image beside it.
    """

    picture: Picture
    crop: buckets.Crop
    caption: str
    image_key: str = ""
    text_key: str = ""
    moments: Tensor | None = None
    pixels: Tensor | None = None
    text: Mapping[str, Tensor] | None = None
    mask: Tensor | None = None
    prior: Encoded | None = None


class ImageProcessing(Processing[Picture]):
    """What text-to-image does with pictures.

    Args:
        recipe: the resolved recipe.
        known: facts of the pipeline.
    """

    unit = "pixels"

    def __init__(self, recipe: Config, known: Facts):
        self.recipe, self.known = recipe, known
        section = recipe.data.image
        if section.step % known.step or section.step > section.resolution:
            raise RecipeError(
                "pictures of these sizes can't be latents of this model",
                where="data.image.step",
                given=section.step,
                expected=f"a multiple of {known.step}, at most the resolution ({section.resolution})",
            )
        self.sizes = buckets.sizes(section.resolution, section.step, section.max_ratio if section.buckets else 1.0)
        self.words, self.longest = tokenizer(known)
        pieces = recipe.data.captions.chunks
        if pieces > 1 and not known.family.joins:
            raise RecipeError("this model reads captions in one piece", where="data.captions.chunks", given=pieces)
        if pieces > 1:
            self.longest = pieces * (self.longest - 2) + 2
        settings = recipe.data.cache
        self.cache = TensorCache(settings.folder, int(settings.max_gb * 1e9)) if settings.folder else None
        if self.cache is not None:  # before there are data workers, each of which would read the weights
            self._kept_by = (known.vae_hash, "" if recipe.model.trains_text else known.text_hash)
        self.prior: list[Picture] = []

    @classmethod
    def of(cls, recipe: Config) -> ImageProcessing:
        """The data path of a recipe."""
        return cls(recipe, facts(recipe.model.path))

    # ------------------------------------------------------------------ examples

    def read(self, source: Source) -> Iterator[Picture | BadExample]:
        return pictures(source)

    def examine(self, example: Picture, training: bool) -> list[Picture]:
        caption = example.caption if example.caption is not None else self.recipe.data.captions.default
        if caption is None:
            raise BadExample(
                "no_caption",
                "the picture has no caption",
                where=example.where,
                do="give it one, or set data.captions.default",
            )
        found = examined(example, self.recipe.data.image, self.sizes)
        cut = self._cut(captions.varied(caption, self.recipe.data.captions, None))
        return [replace(found, caption=caption, notes={**found.notes, **({"caption tokens cut": cut} if cut else {})})]

    def contents(self, example: Picture) -> Iterable[Hashable]:
        return (example.digest,)

    def doubts(self, examples: Sequence[Picture]) -> Iterable[LuthierError]:
        empty = [one.where for one in examples if not (one.caption or "").strip()]
        if empty and self.recipe.data.captions.default is None:
            yield DataError(
                "captions are empty",
                where="data.train",
                given=f"{len(empty)} of {len(examples)} pictures, such as {empty[0]}",
                do="write them, or set data.captions.default to what they are to be",
            )

    def load_prior(self) -> None:
        """Check the class images, which training examples are accompanied by from then on."""
        section = self.recipe.data.prior
        if section is None:
            return
        found = [Picture(str(file), section.caption, file.name, "prior") for file in class_images.files(section)]
        self.prior = [examined(picture, self.recipe.data.image, self.sizes) for picture in found]

    def _cut(self, caption: str) -> int:
        """Tokens of a caption that no text encoder reads."""
        ids = self.words(caption, truncation=False, verbose=False).input_ids
        return max(0, len(ids) - self.longest)

    def notes(self, example: Picture) -> Mapping[str, int]:
        return example.notes

    def cost(self, example: Picture) -> float:
        return float(example.bucket[0] * example.bucket[1])

    def group(self, example: Picture) -> int:
        return example.bucket[0] << 16 | example.bucket[1]

    # ------------------------------------------------------------------ model input

    def encode(self, example: Picture, generator: np.random.Generator | None) -> Encoded:
        encoded = self._encode(example, example.bucket, generator)
        if generator is None or not self.prior:
            return encoded
        beside = self.prior[int(generator.integers(len(self.prior)))]
        return replace(encoded, prior=self._encode(beside, example.bucket, generator))

    def _encode(self, example: Picture, bucket: buckets.Size, generator: np.random.Generator | None) -> Encoded:
        section = self.recipe.data.image
        how = buckets.crop(example.size, bucket, generator if section.crop == "random" else None)
        if generator is not None and generator.random() < section.flip:
            how = replace(how, flip=True)
        caption = captions.varied(example.caption or "", self.recipe.data.captions, generator)
        encoded = Encoded(example, how, caption)
        if self.cache is not None:
            encoded = self._cached(encoded, self.cache)
        masked = self.recipe.task.masked and example.mask is not None
        if encoded.moments is None or masked:
            image, mask = unchanged(example, section.background)
            pixels = torch.from_numpy(buckets.cropped(image, how)) if encoded.moments is None else None
            weights = None if mask is None or not masked else torch.from_numpy(buckets.cropped(mask, how)).float() / 255
            encoded = replace(encoded, pixels=pixels, mask=self._shrunk(weights))
        return encoded

    def _cached(self, encoded: Encoded, cache: TensorCache) -> Encoded:
        image_key = key("latents", encoded.picture.digest, encoded.crop.key, self._settings)
        found = (cache.get(image_key) or {}).get("moments")
        if self.recipe.model.trains_text:
            return replace(encoded, image_key=image_key, moments=found)
        text_key = self.text_key(encoded.caption)
        return replace(
            encoded,
            image_key=image_key,
            text_key=text_key,
            moments=found,
            text=cache.get(text_key),
        )

    @property
    def _settings(self) -> str:
        """All else that decides latents."""
        return f"{self.recipe.data.image.background} {self._kept_by[0]}"

    def text_key(self, caption: str) -> str:
        """A caption's key in the cache."""
        pieces, precision = self.recipe.data.captions.chunks, self.recipe.train.precision
        return key("text", caption, pieces, precision, self._kept_by[1])

    def _shrunk(self, mask: Tensor | None) -> Tensor | None:
        """A mask [1, H, W] at the size of the latents."""
        return None if mask is None else torch.nn.functional.avg_pool2d(mask, self.known.factor)

    def collate(self, encoded: Sequence[Encoded], generator: np.random.Generator | None) -> dict[str, Any]:
        """A batch of pictures of one size; class images come after the examples, in their order.

        Returns:
            moments: mean and log-variance of latents [K, 2 C, h, w] of the K pictures that the cache has.
            pixels: uint8 [M, 3, H, W] of the others.
            cached: list of the K places in the batch.
            image_keys: cache keys of all [B], "" without a cache.
            text: embeddings of the captions that the cache has, each [K', ...].
            told: list of their places.
            texts, text_keys: all captions and their keys [B].
            sizes: what SDXL is told about size and crop [B, 6].
            mask: weight of each latent pixel [B, 1, h, w], or None.
            examples: number of examples; class images follow.
            seeds: of the evaluation's noise [B], by content.
            pictures: the Picture of each.
        """
        rows = [*encoded, *(item.prior for item in encoded if item.prior is not None)]
        cached = [at for at, item in enumerate(rows) if item.moments is not None]
        told = [at for at, item in enumerate(rows) if item.text is not None]
        found = [item.moments for item in rows if item.moments is not None]
        pixels = [item.pixels for item in rows if item.moments is None and item.pixels is not None]
        texts = [item.text for item in rows if item.text is not None]
        masks = [item.mask for item in rows]
        return {
            "moments": torch.stack(found) if found else None,
            "pixels": torch.stack(pixels) if pixels else None,
            "cached": cached,
            "image_keys": [item.image_key for item in rows],
            "text": {name: torch.stack([text[name] for text in texts]) for name in texts[0]} if texts else {},
            "told": told,
            "texts": [item.caption for item in rows],
            "text_keys": [item.text_key for item in rows],
            "sizes": torch.tensor([item.crop.conditions(item.picture.size) for item in rows], dtype=torch.float32),
            "mask": self._masks(masks, rows[0].crop.size) if any(mask is not None for mask in masks) else None,
            "examples": len(encoded),
            "seeds": [_seed(item) for item in rows],
            "pictures": [item.picture for item in rows],
            "crops": [item.crop for item in rows],
        }

    def _masks(self, masks: Sequence[Tensor | None], size: buckets.Size) -> Tensor:
        """Masks [B, 1, h, w]; a picture without one counts everywhere."""
        shape = (1, size[1] // self.known.factor, size[0] // self.known.factor)
        return torch.stack([torch.ones(shape) if mask is None else mask for mask in masks])

    def show(self, data: dict[str, Any], row: int) -> Shown:
        picture, how = data["pictures"][row], data["crops"][row]
        facts_of = {
            "picture": f"{picture.size[0]} x {picture.size[1]} pixels",
            "trained at": f"{how.size[0]} x {how.size[1]}, from ({how.left}, {how.top}) of "
            f"{how.resized[0]} x {how.resized[1]}{', mirrored' if how.flip else ''}",
            "latents": "from the cache" if row in data["cached"] else "to be encoded",
        }
        if row in data["cached"]:
            drawn = data["moments"][data["cached"].index(row)][0].cpu().numpy()
        else:
            others = [at for at in range(len(data["texts"])) if at not in data["cached"]]
            drawn = data["pixels"][others.index(row)].float().mean(0).cpu().numpy()
        return Shown(picture.where, facts_of, [(data["texts"][row], True)], images.draw(drawn))

    def beside(self, data: Any, row: int) -> Mapping[str, bytes | str]:
        """The picture as it is cropped, and the tokens of its caption."""
        from PIL import Image

        image, _ = unchanged(data["pictures"][row], self.recipe.data.image.background)
        pixels = buckets.cropped(image, data["crops"][row]).transpose(1, 2, 0)
        ids = self.words(data["texts"][row], truncation=False, verbose=False).input_ids
        read, cut = ids[: self.longest], ids[self.longest :]
        pieces = " | ".join(self.words.convert_ids_to_tokens(read))
        return {
            "caption tokens": f"{len(read)}: {pieces}",
            **({"caption tokens cut": " | ".join(self.words.convert_ids_to_tokens(cut))} if cut else {}),
            "picture.png": png(Image.fromarray(pixels)),
        }


def _seed(item: Encoded) -> int:
    """A number below 2^63 that follows from picture and caption alone."""
    text = f"{item.picture.digest} {item.picture.caption}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big") >> 1
