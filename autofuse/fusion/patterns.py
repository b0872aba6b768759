"""`FusionPattern`: a chain of operators that a user wants fused (seeds: custom fusion patterns).

In: names such as ``["mul", "add", "relu"]``. Out: chains of operations in a graph that match, as seeds
for the analyzer. Guarantee: a name that nobody knows is refused with the nearest ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from autofuse.errors import FusionError, UnknownOpError
from autofuse.fusion.graph import MATMULS, FusionGraph
from autofuse.ir.operation import Operation
from autofuse.ir.optable import OPS

FUSION_TYPES = ("elementwise", "reduction", "matmul", "conv", "attention")

# What people call operators, and what the dispatcher sees.
ALIASES: dict[str, tuple[str, ...]] = {
    "softmax": ("_softmax", "_safe_softmax"),
    "log_softmax": ("_log_softmax",),
    "layer_norm": ("native_layer_norm",),
    "rms_norm": ("_fused_rms_norm",),
    "group_norm": ("native_group_norm",),
    "batch_norm": ("_native_batch_norm_legit", "_native_batch_norm_legit_no_training", "native_batch_norm"),
    "dropout": ("dropout_scale", "native_dropout"),
    "nll_loss": ("nll_loss_forward",),
    "linear": ("linear", "addmm", "mm"),
    "matmul": ("mm", "bmm", "matmul", "addmm", "baddbmm"),
    "conv2d": ("convolution",),
    "cast": ("_to_copy",),
    "to": ("_to_copy",),
    "copy": ("clone", "copy"),
}
_KNOWN = {target.split(".")[1] for target in OPS} | set(ALIASES) | MATMULS | {"convolution", "native_dropout"}


@dataclass(frozen=True)
class FusionPattern:
    """Fuse this chain first. Raises UnknownOpError for an unknown operator, FusionError for a bad type."""

    name: str
    ops: tuple[str, ...]  # operator names in the order of the data flow, such as ("mul", "add", "relu")
    fusion_type: str = "elementwise"
    priority: int = 0  # larger first

    def __init__(self, name: str, ops: Iterable[str], fusion_type: str = "elementwise", priority: int = 0) -> None:
        chain = tuple(ops)
        if fusion_type not in FUSION_TYPES:
            raise FusionError(f"expected a fusion_type of {', '.join(FUSION_TYPES)}, found {fusion_type!r}")
        if not chain:
            raise FusionError(f"expected at least one operator in pattern {name!r}, found none; name them in ops=[...]")
        for op in chain:
            if op not in _KNOWN:
                near = difflib.get_close_matches(op, sorted(_KNOWN), n=3) or sorted(_KNOWN)[:3]
                raise UnknownOpError(
                    f"expected operators that aten knows in pattern {name!r}, found {op!r}; "
                    f"did you mean {', '.join(near)}?"
                )
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "ops", chain)
        object.__setattr__(self, "fusion_type", fusion_type)
        object.__setattr__(self, "priority", priority)

    def matches(self, graph: FusionGraph) -> list[tuple[Operation, ...]]:
        """Chains in program order, no operation in two of them; views between are skipped."""
        found: list[tuple[Operation, ...]] = []
        used: set[str] = set()
        for op in graph.operations:
            chain = self._match_from(graph, op)
            if chain and not any(o.name in used for o in chain):
                found.append(chain)
                used.update(o.name for o in chain)
        return found

    def _match_from(self, graph: FusionGraph, start: Operation) -> tuple[Operation, ...] | None:
        chain: list[Operation] = []
        candidates: Sequence[Operation] = [start]
        for wanted in self.ops:
            step = next((op for op in candidates if is_called(op, wanted)), None)
            if step is None:
                return None
            chain.append(step)
            candidates = graph.readers[step.name]
        return tuple(chain)


def is_called(op: Operation, name: str) -> bool:
    """Whether people call this operation by that name."""
    return op.short_name == name or op.short_name in ALIASES.get(name, ())
