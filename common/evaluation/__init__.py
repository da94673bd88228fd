"""Evaluation: the same suite during training and from a checkpoint alone."""
