"""Strict runs: only kernels whose results are eager's to the bit.

In: the versions that a decision depends on. Out: the same for strict runs, so that a strict run never finds a decision
of a usual one, nor a usual run one of a strict run.
"""

from __future__ import annotations

_SUFFIX = ", strict"


def strictly(versions: str) -> str:
    """The versions as keys of strict runs' decisions hold them: "torch 2.13, codegen 7, strict"."""
    return versions + _SUFFIX


def is_strict(versions: str) -> bool:
    """Whether the versions are those of a strict run."""
    return versions.endswith(_SUFFIX)
