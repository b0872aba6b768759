"""Graphs whose gradients are sparse tensors, which AOTAutograd's traces have as dense ones, or cannot have.

In: a graph of Dynamo's. Out: whether an operator in it was asked for a sparse gradient. Guarantee: nothing is traced.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

# The place of ``sparse`` among the arguments.
_SPARSE: dict[Any, int] = {F.embedding: 6, torch.embedding: 4, F.embedding_bag: 7, torch.embedding_bag: 5}


def has_sparse_gradients(module: fx.GraphModule) -> bool:
    """Whether a table of embeddings, or what a gather reads, gets a sparse gradient."""
    return any(_is_sparse(node) for node in module.graph.nodes if node.op in ("call_function", "call_method"))


def _is_sparse(node: fx.Node) -> bool:
    if node.kwargs.get("sparse_grad"):
        return True
    place = _SPARSE.get(node.target)
    if place is None:
        return False
    return bool(node.args[place] if len(node.args) > place else node.kwargs.get("sparse", False))
