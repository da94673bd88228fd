"""Online reinforcement learning: prompts, completions, rewards, advantages, updates, weights to the engine, again."""
