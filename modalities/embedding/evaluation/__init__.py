"""Evaluation of embedding models and rerankers: from what a model makes of all examples to metrics by slice."""
