"""What draws the completions of a rollout."""
