"""Embeddings and rerankers: bi-encoders, late interaction, sparse encoders and cross-encoders."""
