"""A run on Lightning's Trainer: what is built for it, and what happens after each optimizer step."""
