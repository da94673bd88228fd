"""Distillation: a language model learns the next-token distributions of another one."""
