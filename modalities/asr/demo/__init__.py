"""A demonstration that needs no downloads: speech made on the spot by espeak-ng and a small Whisper to train on it.

`prepare(folder)` in `prepare.py`, or `python -m luthier.modalities.asr.demo FOLDER`, makes both.
"""
