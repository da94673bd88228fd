"""Online reinforcement learning without a critic: GRPO and its relatives, RLOO, REINFORCE++."""
