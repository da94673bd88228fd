"""Hard-negative mining: documents that a model takes for relevant to a query, though they are not."""
