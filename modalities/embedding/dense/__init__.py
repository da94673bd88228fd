"""Embedding models that give one vector for a text."""
