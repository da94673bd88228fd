"""Recordings that are longer than a model takes: cut by voice activity, transcribed in pieces, scored as a whole."""
