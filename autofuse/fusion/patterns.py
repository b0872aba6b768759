"""`FusionPattern`: a chain of operators that a user wants fused (seeds: custom fusion patterns).

In: names such as ``["mul", "add", "relu"]``. Out: chains of operations in a graph that match, as seeds for the analyzer
where loops can compute them, as wishes for a group where a product or a convolution is among them. `register_pattern`
keeps patterns for all engines that ask for them, those of sessions among them.
Guarantee: a name that nobody knows is refused with the nearest ones.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from dataclasses import dataclass

from autofuse.errors import FusionError, UnknownOpError
from autofuse.fusion.graph import MATMULS, FusionGraph
from autofuse.ir.operation import Operation
from autofuse.ir.optable import OPS, OpKind, info

FUSION_TYPES = ("elementwise", "reduction", "matmul", "conv", "attention")
# What no nest of loops computes: a pattern with one of these needs a group around it.
ANCHORS = MATMULS | {"convolution"}
# Operations that an attention may have between two that its pattern names: scale, mask, their masked fill.
MOST_BETWEEN = 4

# Named for statistics and opportunities; the rules themselves need no list of patterns.
BUILTIN_PATTERNS = (
    ("add_relu", ("add", "relu")),
    ("mul_relu", ("mul", "relu")),
    ("affine_relu", ("mul", "add", "relu")),
    ("bias_gelu", ("add", "gelu")),
    ("masked_softmax", ("masked_fill", "softmax")),
    ("softmax_dropout", ("softmax", "dropout")),
    ("residual_layer_norm", ("add", "layer_norm")),
    ("cross_entropy", ("log_softmax", "nll_loss")),
)

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
_KNOWN = {target.split(".")[1] for target in OPS} | set(ALIASES) | ANCHORS | {"native_dropout"}


@dataclass(frozen=True)
class FusionPattern:
    """Fuse this chain first. Raises UnknownOpError for an unknown operator, FusionError for a bad type.

    Each operator reads what the one before it makes; views between them do not count. In a pattern of the type
    "attention", neither do element-wise operators: the scale and the mask.
    """

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
        return self._extend(graph, (start,)) if is_called(start, self.ops[0]) else None

    def _extend(self, graph: FusionGraph, chain: tuple[Operation, ...]) -> tuple[Operation, ...] | None:
        """The whole chain that begins with these; None where there is none."""
        if len(chain) == len(self.ops):
            return chain
        reached, between = graph.readers[chain[-1].name], 0
        while reached:
            for op in reached:
                found = self._extend(graph, (*chain, op)) if is_called(op, self.ops[len(chain)]) else None
                if found is not None:
                    return found
            between += 1
            if self.fusion_type != "attention" or between > MOST_BETWEEN:
                return None
            passed = [op for op in reached if info(op.target).kind is OpKind.POINTWISE]
            reached = [reader for op in passed for reader in graph.readers[op.name]]
        return None


def is_called(op: Operation, name: str) -> bool:
    """Whether people call this operation by that name."""
    return op.short_name == name or op.short_name in ALIASES.get(name, ())


# ---- for the whole process --------------------------------------------------------------------------

_registered: list[FusionPattern] = []


def register_pattern(pattern: FusionPattern, priority: int | None = None) -> None:
    """Fuse ``pattern`` first in every graph that this process captures from now on, whichever session does.

    ``priority`` replaces the pattern's own; larger goes first. Raises FusionError for a second pattern of one name.
    """
    add_pattern(_registered, pattern, priority)


def registered_patterns() -> list[FusionPattern]:
    """The list of registered patterns itself, so that its holders see later registrations."""
    return _registered


def add_pattern(patterns: list[FusionPattern], pattern: FusionPattern, priority: int | None = None) -> None:
    """Append a pattern; raises FusionError where one of its name is there."""
    if any(known.name == pattern.name for known in patterns):
        raise FusionError(f"expected a new pattern name, found {pattern.name!r} twice; rename one")
    patterns.append(
        pattern if priority is None else FusionPattern(pattern.name, pattern.ops, pattern.fusion_type, priority)
    )
