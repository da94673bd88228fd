"""Rerankers: query and document read together (cross-encoders), and language models that answer yes or no."""
