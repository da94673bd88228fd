"""Data as the model sees them, before a training: in the terminal, as a page, in numbers."""
