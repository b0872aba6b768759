"""Ways to run a group of operations: which of them one vendor's kernel does, and how the rest is cut into kernels."""
