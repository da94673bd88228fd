"""An exercise that needs only packages: all-MiniLM-L6-v2 learns to find the documentation of Python's functions by
their names and signatures, and a reranker learns to order what it finds."""
