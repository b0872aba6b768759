"""How slow Python is on this machine: what a capture is expected to take is scaled by it.

Out: a factor, 1.0 on the machine that the default costs are from. A capture is pure Python work, and machines differ by
a factor of three: GPT-2 of 12 layers was traced in 35 s by AOTAutograd on an AMD EPYC and in 88 on a shared Xeon (2
cores each, torch 2.13). Before the first capture on this machine, we time the same kind of work: a small graph is
built, copied and printed as code.
"""

from __future__ import annotations

import functools
from time import perf_counter

import torch
from torch import fx

_NODES = 100
_TRIALS = 3  # the fastest counts: the first one fills caches
_REFERENCE_SECONDS = 3e-3  # of a trial, where a capture takes 0.025 s an operator


@functools.cache
def slowness() -> float:
    """This machine's factor. Takes 10 ms, once per process."""
    return min(_trial() for _ in range(_TRIALS)) / _REFERENCE_SECONDS


def _trial() -> float:
    began = perf_counter()
    graph = fx.Graph()
    value = graph.placeholder("x")
    for _ in range(_NODES):
        value = graph.call_function(torch.add, (value, 1))
    graph.output(value)
    copy, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in graph.nodes:
        copies[node] = copy.node_copy(node, copies.__getitem__)
    copy.lint()
    copy.python_code("self")
    return perf_counter() - began
