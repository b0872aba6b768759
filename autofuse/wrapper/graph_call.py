"""A captured graph as one generated Python function around an execution plan.

In: the text that `graph_call_builder` has generated, in this run or an earlier one. Out: a `Program` with two functions
of the graph's inputs, ``call`` and ``timed_call`` (which also measures each node). Both take the nodes' callables from
a plan. A node on the CPU is measured with the clock; for a node on a GPU the plan's timer is started and stopped.
Guarantee: a call does one look-up for all nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from autofuse.debug import Level, tell
from autofuse.dynamo_skip import define
from autofuse.fusion.node import FusionNode
from autofuse.ir.shape import Dim
from autofuse.strategies.joint_attention import AttentionPass, Pair, backward_call
from autofuse.wrapper.below_autograd import NAMES

if TYPE_CHECKING:
    from autofuse.codegen.in_place import Pairs


@dataclass(frozen=True)
class NodeSlot:
    """One fusion node or group of a program: the graph values that it reads and returns."""

    node: FusionNode
    symbols: tuple[Dim, ...]  # the node's s0, s1, ... in the graph's symbols
    device: torch.device  # the device of all its tensors
    members: tuple[int, ...] = ()  # of a group: the slots that run while it has no callable of its own
    is_group: bool = False
    half: AttentionPass | None = None  # of an attention in training, whose node holds both passes
    half_number: int = 0


@dataclass(frozen=True)
class Program:
    """Generated code of one graph."""

    slots: tuple[NodeSlot, ...]  # of the nodes, then of the groups
    symbols: tuple[str, ...]  # the graph's free symbols, in the order of a plan's key
    call: Callable[..., Any]  # call(plans, miss, args): plans by key, miss(key) -> plan where there is none
    timed_call: Callable[..., Any]  # timed_call(plans, miss, args, times): times[i] += seconds of CPU node i
    source: str
    # Of each half of an attention: the slots that do not run in calls that the plan counts as skipped for it.
    skips: tuple[tuple[int, ...], ...] = ()
    reuse: Mapping[int, Pairs] = field(
        default_factory=dict
    )  # of slots: outputs written into the memory of a dead input
    constants: Mapping[str, Any] = field(default_factory=dict)  # objects that the source reads by name
    native: str = ""  # text of the function that writes a plan down for the runner in C; "" where none can be
    writer: list[Callable[..., None]] = field(default_factory=list)  # this function, once it was needed
    one_by_one: str = "is on a CPU"  # why no CUDA graph replays it; "" where one may, see `wrapper.replayable`


def link(
    slots: tuple[NodeSlot, ...],
    symbols: tuple[str, ...],
    source: str,
    skips: tuple[tuple[int, ...], ...],
    reuse: Mapping[int, Pairs],
    constants: Mapping[str, Any],
    native: str = "",
    one_by_one: str = "is on a CPU",
) -> Program:
    """The source as functions. A constant that is a `Pair` stands for its backward half."""
    namespace: dict[str, Any] = {"torch": torch, "clock": perf_counter, **NAMES}
    namespace |= {name: backward_call(c) if isinstance(c, Pair) else c for name, c in constants.items()}
    define(source, "graph", namespace)
    tell(Level.SOURCE, lambda: f"generated call of a graph:\n{source}")
    call, timed_call = namespace["call"], namespace["timed_call"]
    return Program(slots, symbols, call, timed_call, source, skips, reuse, constants, native, one_by_one=one_by_one)
