"""Luthier tunes models of every modality on one training core."""

__version__ = "0.1.0"
