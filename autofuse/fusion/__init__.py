"""Plan: symbolic shapes, graph, rules, analyzer, benefit, engine. In: operations; out: fusion nodes and refusals."""

from autofuse.fusion.analyzer import FusionCandidateAnalyzer
from autofuse.fusion.benefit import FusionBenefit
from autofuse.fusion.config import FusionConfig
from autofuse.fusion.engine import FusionEngine
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.fusion.patterns import FusionPattern, register_pattern
from autofuse.ir.shape import SymbolicShape

__all__ = [
    "FusionBenefit",
    "FusionCandidateAnalyzer",
    "FusionConfig",
    "FusionEngine",
    "FusionGraph",
    "FusionNode",
    "FusionPattern",
    "SymbolicShape",
    "register_pattern",
]
