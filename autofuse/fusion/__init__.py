"""Plan: symbolic shapes, graph, rules, analyzer, benefit, engine. In: operations; out: fusion nodes and refusals.

Public names are imported when they are asked for: a run that reads what earlier ones have planned needs few of them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autofuse.preserve_rng import untouched

if TYPE_CHECKING:
    from autofuse.fusion.analyzer import FusionCandidateAnalyzer
    from autofuse.fusion.benefit import FusionBenefit
    from autofuse.fusion.config import FusionConfig
    from autofuse.fusion.detector import FusionDetector, FusionOpportunity
    from autofuse.fusion.engine import FusionEngine
    from autofuse.fusion.graph import FusionGraph
    from autofuse.fusion.node import FusionNode
    from autofuse.fusion.optimizer import FusionOptimizer
    from autofuse.fusion.patterns import FusionPattern, register_pattern
    from autofuse.ir.shape import SymbolicShape

__all__ = [
    "FusionBenefit",
    "FusionCandidateAnalyzer",
    "FusionConfig",
    "FusionDetector",
    "FusionEngine",
    "FusionGraph",
    "FusionNode",
    "FusionOpportunity",
    "FusionOptimizer",
    "FusionPattern",
    "SymbolicShape",
    "register_pattern",
]

_HOME = {
    "FusionBenefit": "autofuse.fusion.benefit",
    "FusionCandidateAnalyzer": "autofuse.fusion.analyzer",
    "FusionConfig": "autofuse.fusion.config",
    "FusionDetector": "autofuse.fusion.detector",
    "FusionEngine": "autofuse.fusion.engine",
    "FusionGraph": "autofuse.fusion.graph",
    "FusionNode": "autofuse.fusion.node",
    "FusionOpportunity": "autofuse.fusion.detector",
    "FusionOptimizer": "autofuse.fusion.optimizer",
    "FusionPattern": "autofuse.fusion.patterns",
    "SymbolicShape": "autofuse.ir.shape",
    "register_pattern": "autofuse.fusion.patterns",
}


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module 'autofuse.fusion' has no attribute {name!r}; it has {', '.join(__all__)}")
    with untouched():
        return getattr(import_module(_HOME[name]), name)
