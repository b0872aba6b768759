"""Triton, where it is installed, is imported for its interpreter: kernels for GPUs are checked on CPU tensors.

Before torch, which imports Triton too. Compilers of Triton run in processes of their own.
"""

from autofuse.codegen.triton.interpret import import_interpreted

import_interpreted()
