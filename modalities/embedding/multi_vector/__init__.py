"""Late interaction: one vector for each token."""
