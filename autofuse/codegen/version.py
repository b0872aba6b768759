"""What a decision depends on besides the device: the versions of torch and of our code generators."""

from __future__ import annotations

import functools
import importlib.metadata

# Part of every decision key. Raise it where equal nodes get text with other results or another speed, so that they are
# decided on anew.
CODEGEN_VERSION = "25"


@functools.cache
def versions() -> str:
    """The versions as decision keys hold them: "torch 2.13, codegen 7". Scripts and daemons agree; imports no torch."""
    minor = ".".join(importlib.metadata.version("torch").split(".")[:2])
    return f"torch {minor}, codegen {CODEGEN_VERSION}"
