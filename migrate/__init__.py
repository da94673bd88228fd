"""Recipes from the YAML files of other tools: one file a tool with a table of its keys, and one engine."""
