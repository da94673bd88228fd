"""A local page to work in: recipes, runs as processes, curves and samples, comparisons, exports."""
