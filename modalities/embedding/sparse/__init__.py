"""Sparse encoders: one weight for each word of the vocabulary."""
