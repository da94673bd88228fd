"""Which head stands on a model of NeMo's, and how it is searched: NeMo's own searches, as the evaluation asks."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

from ....common.errors import RecipeError
from .aed import Aed
from .config import NemoEvaluate
from .files import AED
from .heads import Ctc, Head, Hybrid, Transducer


def head_of(nemo: Any, name: str, joint_batch: int | None, evaluate: NemoEvaluate) -> Head:
    """The decoder of a model, set up as the evaluation asks.

    Args:
        nemo: NeMo's model.
        name: its class.
        joint_batch: as of `Transducer`.
        evaluate: beams and NeMo's settings of decoding.
    """
    hybrid = "Hybrid" in name
    if evaluate.decoder == "ctc" and not hybrid:
        raise RecipeError("only hybrids have a CTC head besides", where="evaluate.decoder", given=name)
    _set_decoding(nemo, evaluate, name)
    if name == AED:
        return Aed(nemo, evaluate.max_new_tokens)
    if hybrid:
        return Hybrid(nemo, joint_batch, evaluate.decoder == "ctc")
    return Ctc(nemo) if "CTC" in name else Transducer(nemo, joint_batch)


def _set_decoding(nemo: Any, evaluate: NemoEvaluate, name: str) -> None:
    """Decode as the evaluation asks; the configuration, which is saved, stays as it was."""
    from omegaconf import OmegaConf, open_dict

    hybrid, aed = "Hybrid" in name, name == AED
    by_ctc = evaluate.decoder == "ctc" or ("CTC" in name and not hybrid)
    place = nemo.cfg.aux_ctc if hybrid and by_ctc else nemo.cfg
    before = deepcopy(place.decoding)
    section: Any = OmegaConf.create(OmegaConf.to_container(OmegaConf.merge({}, before), resolve=True))
    if evaluate.num_beams > 1:
        section.strategy = "beam" if aed else "beam_batch" if by_ctc else "malsd_batch"
        OmegaConf.update(section, "beam.beam_size", evaluate.num_beams, force_add=True)
    elif not str(section.get("strategy", "")).startswith("greedy"):
        section.strategy = "greedy_batch"
    for key, value in evaluate.decoding:
        OmegaConf.update(section, key, value, force_add=True)
    more: dict[str, Any] = {} if aed else {"verbose": False}
    if hybrid:
        more["decoder_type"] = "ctc" if by_ctc else "rnnt"
    try:
        nemo.change_decoding_strategy(section, **more)
    except (ValueError, NotImplementedError, ImportError, OSError) as error:
        raise RecipeError(f"NeMo refuses this decoding: {error}", where="evaluate.decoding") from error
    with open_dict(place):
        place.decoding = before
