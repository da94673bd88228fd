"""Metrics of embeddings and rerankers: functions of embeddings, or of scores and labels."""
