"""What is decided about a node in one shape, and what routers ask of the session that owns them.

In: nothing; these are the words between those who route and those who know. Out: `Choice`, `RouterHost`.
Guarantee: neither side needs to import the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch

from autofuse.wrapper.node_call import Entry, NodeCall

if TYPE_CHECKING:
    from autofuse.runtime.plans import NodeState, Plan


@dataclass(frozen=True)
class Choice:
    """What the catalogue says about a node in one shape."""

    known: bool  # a decision exists, for or against fusing
    entry: Entry | None = None  # the loaded kernel of the winner, None for eager
    tag: str = ""  # tells one kernel from another
    in_one: bool = False  # eager, and a group as a whole: its parts lost against eager's operations in their order


UNKNOWN = Choice(known=False)


class RouterHost(Protocol):
    """What the router asks of the session. All of it in memory; none of it may block, but `settle_plan`."""

    @property
    def threads(self) -> int: ...

    def choose(self, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice: ...

    def node_failed(self, node: NodeState, problem: str) -> None: ...

    def settle_plan(self, plan: Plan) -> bool:
        """Called before a plan runs that may still change; True once it need not be asked again."""

    def new_plan(self, plan: Plan) -> None: ...

    def sample_due(self) -> bool: ...

    def wrap(self, node: NodeState, fused: NodeCall) -> NodeCall: ...
