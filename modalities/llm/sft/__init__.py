"""Supervised fine-tuning of language models on conversations and prompts."""
