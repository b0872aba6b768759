"""The page of the design documents names a test in each row, and their names are public, with docstrings."""

from __future__ import annotations

import inspect
import re

import pytest

import autofuse
from scripts.generate_docs import ROOT

ROWS = [
    [cell.strip() for cell in line.strip("|").split(" | ")]
    for line in (ROOT / "docs/seeds.md").read_text().splitlines()
    if line.startswith("| ") and not line.startswith(("| requirement", "|---"))
]
NAMES = {
    "FusionNode": ("can_fuse_with", "add_operation", "get_fused_signature", "validate_fusion"),
    "FusionCandidateAnalyzer": (
        *("find_fusible_operations", "analyze_benefit", "is_shape_preserving", "requires_runtime_shape_check"),
    ),
    "FusionBenefit": ("should_fuse",),
    "RuntimeShapeInjector": ("inject_shape_check", "generate_shape_dispatch", "generate_generic_fallback"),
    "FusionKernelGenerator": ("generate_fused_kernel", "generate_generic_kernel", "can_generate_specialized"),
    "FusionConfig": (),
    "FusionDetector": ("detect", "apply"),
    "FusionEngine": ("fuse", "register_pattern", "get_fusion_stats"),
    "FusionGraph": ("add_node", "can_fuse", "optimize"),
    "FusionOpportunity": (),
    "FusionOptimizer": (
        *("set_enabled", "set_min_tensor_size", "enable_pattern", "detect_opportunities", "apply_fusions", "get_stats"),
    ),
    "FusionPattern": ("matches",),
    "SymbolicShape": ("broadcast",),
}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row[0][:40])
def test_a_row_names_a_file_and_a_test_or_what_is_not_met(row: list[str]) -> None:
    requirement, where, test = row
    if test == "-":
        assert where.startswith("not met: ")
        return
    assert re.search(r"`tests/[\w/]+\.py: test_\w+`", test) or test == "the same test", requirement
    assert "`" in where and not where.startswith("not met")


@pytest.mark.parametrize("name", NAMES)
def test_a_name_of_the_documents_is_public_and_says_what_it_does(name: str) -> None:
    found = getattr(autofuse, name)
    assert found.__doc__ and not found.__doc__.startswith(f"{name}(")
    methods = dict(inspect.getmembers(found, inspect.isfunction))
    assert set(NAMES[name]) <= set(methods)
    own = [m for m in methods.values() if m.__module__.startswith("autofuse.") and not m.__name__.startswith("_")]
    assert not [m.__qualname__ for m in own if not inspect.getdoc(m)]
