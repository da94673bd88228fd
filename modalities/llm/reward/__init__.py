"""Reward models: language models with a head that scores answers."""
