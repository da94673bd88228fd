"""Losses of embeddings and rerankers: functions of tensors, summed and not averaged."""
