"""Strategies for a group of operations: which of them a library's kernel runs, and how the rest is cut into kernels."""
