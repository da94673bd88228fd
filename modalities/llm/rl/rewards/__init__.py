"""Rewards of online reinforcement learning: numbers that say how good an answer is."""
