"""KTO: preference optimisation of language models on answers that are good or bad, without pairs."""
