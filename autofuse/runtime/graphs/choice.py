"""The choice for a node in one shape, and the protocol by which routers query their session.

In: nothing; these are the types that router and catalogue share. Out: `Choice`, `RouterHost`. Guarantee: neither side
needs to import the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from autofuse.wrapper.node_call import Entry, NodeCall

if TYPE_CHECKING:
    from autofuse.runtime.graphs.live_races import LiveRaces
    from autofuse.runtime.graphs.plans import NodeState, Plan
    from autofuse.runtime.graphs.step_records import GraphCall, RecordedGraph


@dataclass(frozen=True)
class Choice:
    """What the catalogue says about a node in one shape."""

    known: bool  # a decision exists, for or against fusing
    entry: Entry | None = None  # the loaded kernel of the winner, None for eager
    tag: str = ""  # tells one kernel from another
    in_one: bool = False  # eager for a whole group: its parts lost to eager's operations in their order


UNKNOWN = Choice(known=False)


class RouterHost(Protocol):
    """The queries of the router. All are answered from memory; only `settle_plan` and `keeps_own` may block."""

    @property
    def threads(self) -> int: ...

    @property
    def live_races(self) -> LiveRaces | None:
        """Of kernels on the script's own calls; None where they are not raced there."""

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice: ...

    def node_failed(self, node: NodeState, problem: str) -> None: ...

    def settle_plan(self, plan: Plan) -> bool:
        """Called before a plan that may still change runs; True once it need not be called again."""

    def new_plan(self, plan: Plan) -> None: ...

    def sample_due(self, graph: RecordedGraph) -> bool:
        """Whether this call of a graph is timed; asked at each call."""

    def note_call(self, call: GraphCall) -> None:
        """A timed call has ended."""

    def note_timed(self, has_held: bool) -> None:
        """A timed call on a CPU has ended, which took longer than others; ``has_held``: nodes were held out in it."""

    def keeps_own(self, node: NodeState, fused: NodeCall, tag: str) -> bool:
        """Whether a library's operator in the node is faster in the script than the kernel, whose races were against
        the operator's unfused form."""

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall: ...
