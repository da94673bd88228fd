"""Online reinforcement learning with a critic: PPO."""
