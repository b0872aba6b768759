"""`FusionOptimizer`: fusion in the whole process: its switches, its sums (seed: automatic operator fusion).

In: what a script sets, the settings of each session, graphs with their opportunities. Out: the limits that planning
goes by; nodes; statistics of all that was planned.
Guarantee: the engine of every session goes through the optimizer of the process, so a switch holds for each graph that
is captured from then on; graphs that are captured already stay as they are. A switch that nobody set leaves the
settings as they are. What runs a script without autofuse at all (AUTOFUSE_DISABLE) is stronger than any switch here.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from autofuse.fusion.config import FusionConfig
from autofuse.fusion.detector import AppliedFusions, FusionDetector, FusionOpportunity
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.patterns import FusionPattern, register_pattern, registered_patterns
from autofuse.fusion.stats import FusionStats
from autofuse.locks import make_lock


class FusionOptimizer:
    """Detects and applies fusions under switches of its own. `FusionOptimizer.shared` is that of the process."""

    def __init__(self) -> None:
        self._lock = make_lock()  # guards the sums
        self._values: dict[str, Any] = {}  # fields of `FusionConfig` that are set
        self._patterns: dict[str, None] = {}  # names of patterns that apply, whatever the settings name
        self._stats = FusionStats()

    @staticmethod
    def shared() -> FusionOptimizer:
        """The one that sessions of this process use."""
        return _SHARED

    # ---- switches ----------------------------------------------------------------------------------

    def set_enabled(self, enabled: bool) -> None:
        """Fuse, or run graphs on eager's kernels, whatever ``fusion.enabled`` says.

        Steps of optimizers have a switch of their own, ``fusion.enable_optimizer``.
        """
        self._set("enabled", enabled)

    def set_min_tensor_size(self, elements: int) -> None:
        """Make no fusion whose largest tensor has fewer elements, whatever ``fusion.min_tensor_size`` says.

        Raises SettingsError for a size below 0.
        """
        self._set("min_tensor_size", elements)

    def enable_pattern(self, pattern: FusionPattern) -> None:
        """Fuse a pattern first, also where ``fusion.enabled_patterns`` names others; registered where it is not yet.

        Raises FusionError for another pattern of its name.
        """
        if pattern not in registered_patterns():
            register_pattern(pattern)
        self._patterns[pattern.name] = None

    def reset(self) -> None:
        """Leave everything to the settings again, and reset the sums. Patterns stay registered."""
        self._values, self._patterns = {}, {}
        with self._lock:
            self._stats = FusionStats()

    def _set(self, name: str, value: Any) -> None:
        self._values = {**self._values, name: getattr(FusionConfig(**{name: value}), name)}

    @property
    def switches(self) -> dict[str, Any]:
        """What is set here, by name; what a plan depends on beside its graph and the settings."""
        return {**self._values, **({"patterns": tuple(self._patterns)} if self._patterns else {})}

    def config_for(self, config: FusionConfig | None = None) -> FusionConfig:
        """The limits of a planner with those values in place that are set here."""
        config = config or FusionConfig()
        values = dict(self._values)
        if self._patterns and config.enabled_patterns is not None:
            values["enabled_patterns"] = tuple(dict.fromkeys((*config.enabled_patterns, *self._patterns)))
        return FusionConfig.of(config, **values) if values else config

    # ---- planning ----------------------------------------------------------------------------------

    def detect_opportunities(
        self, graph: FusionGraph, apart: Sequence[Collection[str]] = (), detector: FusionDetector | None = None
    ) -> list[FusionOpportunity]:
        """What of a graph may be fused, the largest estimated speedup first (`FusionDetector.detect`).

        ``detector``: that of a session's engine; one with the switches and the registered patterns if None.
        """
        return (detector or self._detector()).detect(graph, apart)

    def apply_fusions(
        self, graph: FusionGraph, opportunities: Sequence[FusionOpportunity], detector: FusionDetector | None = None
    ) -> AppliedFusions:
        """The nodes of opportunities, in program order, and what they gain, which is counted here too.

        The graph stays as it is. ``detector``: the one that found them. Raises FusionError as `FusionDetector.apply`.
        """
        applied = (detector or self._detector()).apply(graph, opportunities)
        self.count(applied.stats)
        return applied

    def _detector(self) -> FusionDetector:
        patterns = sorted(registered_patterns(), key=lambda pattern: -pattern.priority)
        return FusionDetector(self.config_for(), patterns)

    # ---- statistics --------------------------------------------------------------------------------

    def count(self, stats: FusionStats) -> None:
        """A graph was planned, or brought back as an earlier run planned it."""
        with self._lock:
            self._stats += stats

    def get_stats(self) -> dict[str, Any]:
        """Sums of all graphs: ``total_fusions``, ``average_speedup`` (estimated, not measured), ``patterns_used`` (how
        often each), and what `FusionEngine.get_fusion_stats` has; bytes are those of one call of each graph."""
        with self._lock:
            stats = self._stats
        return {"total_fusions": stats.applied, "average_speedup": stats.mean_speedup, **stats.summary()}


_SHARED = FusionOptimizer()
