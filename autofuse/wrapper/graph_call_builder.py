"""Generates the flat call of a captured graph (`graph_call`): first its plan (`graph_call_plan`), then its text.

In: an imported graph, its fusion nodes and groups. Out: a `Program`.
"""

from __future__ import annotations

from collections.abc import Sequence

from autofuse.capture.graph_import import ImportedGraph
from autofuse.fusion.node import FusionNode
from autofuse.strategies.groups import Group
from autofuse.strategies.joint_attention import AttentionPass
from autofuse.wrapper.graph_call import Program, link
from autofuse.wrapper.graph_call_plan import Fused, plan_call
from autofuse.wrapper.graph_call_text import call_text
from autofuse.wrapper.replayable import why_not_replayed


def build_program(
    imported: ImportedGraph,
    nodes: Sequence[FusionNode],
    groups: Sequence[Group] = (),
    halves: Sequence[AttentionPass] = (),
    is_backward: bool = False,
    reuses: bool = True,
) -> Program:
    """Generate the flat call. Raises ShapeError where a symbol is not among the inputs, or units need each other.

    ``halves``: of attentions in training; those of a backward graph run as wholes where forward saved their inputs.
    ``reuses``: whether kernels may write to inputs that are dead afterwards.
    """
    plan = plan_call(imported, Fused(nodes, groups, halves, is_backward), reuses)
    one_by_one = why_not_replayed(plan)
    source, native, constants = call_text(plan, not one_by_one)
    return link(plan.slots, plan.symbols, source, plan.skips, plan.reuse, constants, native, one_by_one)
