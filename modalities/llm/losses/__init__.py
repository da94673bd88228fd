"""Losses of preferences, rewards and distillation: plain functions of log-probabilities, scores and logits."""
