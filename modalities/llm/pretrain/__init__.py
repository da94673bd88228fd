"""Continued pretraining of language models on texts."""
