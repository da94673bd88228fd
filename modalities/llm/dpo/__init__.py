"""Preference optimisation of language models on pairs of answers: DPO and its relatives."""
