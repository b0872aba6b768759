"""`FusionStats`: what fusion did to graphs, as sums that add up.

In: counts of the planner for one graph. Out: the same for several; plain values for the store; rates for people.
Guarantee: imports nothing of the planner, so that reports read it too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any


@dataclass(frozen=True)
class FusionStats:
    """Sums over graphs; bytes and launches are those of one call of each graph, at its likely sizes."""

    operations: int = 0  # that eager runs a kernel for
    applied: int = 0  # nodes made, each one kernel
    failed: int = 0  # fusions not made, each with a reason
    kernels_saved: int = 0  # launches
    memory_saved: int = 0  # bytes that no longer go through memory
    speedups: float = 0.0  # estimates of all nodes, added up
    dynamic: int = 0  # nodes with a size that is only known when they run
    patterns_used: Mapping[str, int] = field(default_factory=dict)  # name of a pattern -> how often

    def __add__(self, other: FusionStats) -> FusionStats:
        added = {
            item.name: getattr(self, item.name) + getattr(other, item.name)
            for item in fields(self)
            if item.name != "patterns_used"
        }
        used = Counter(self.patterns_used)
        used.update(other.patterns_used)
        return FusionStats(**added, patterns_used=dict(used))

    @property
    def efficiency(self) -> float:
        """Share of eager's launches that fusion saves."""
        return self.kernels_saved / self.operations if self.operations else 0.0

    @property
    def mean_speedup(self) -> float:
        """Mean of the nodes' estimates, 1.0 without nodes. Source: `fusion.benefit`; what pays is measured later."""
        return self.speedups / self.applied if self.applied else 1.0

    def summary(self) -> dict[str, Any]:
        """As `FusionEngine.get_fusion_stats` says."""
        return {
            "num_fused": self.applied,
            "efficiency": self.efficiency,
            "applied": self.applied,
            "failed": self.failed,
            "memory_saved": self.memory_saved,
            "mean_speedup": self.mean_speedup,
            "dynamic": self.dynamic,
            "patterns_used": dict(self.patterns_used),
        }

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        return {item.name: getattr(self, item.name) for item in fields(self)} | {
            "patterns_used": dict(self.patterns_used)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FusionStats:
        """Raises KeyError, TypeError and ValueError for what another version wrote otherwise."""
        numbers = {item.name: item.type for item in fields(cls) if item.name != "patterns_used"}
        values = {name: float(data[name]) if kind == "float" else int(data[name]) for name, kind in numbers.items()}
        return cls(**values, patterns_used={str(name): int(count) for name, count in data["patterns_used"].items()})  # type: ignore[arg-type]
