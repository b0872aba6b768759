"""A candidate for an optimizer step, as the daemon and its worker speak of it.

In: a variant, and a kernel where it is generated. Out: plain values for the pipe, and back.
"""

from __future__ import annotations

import base64
from collections.abc import Mapping
from dataclasses import dataclass

from autofuse.ir.records import EAGER, Candidate, KernelRecord


@dataclass(frozen=True)
class StepCandidate:
    """An implementation of a step."""

    variant: str  # "eager": what the script asked for; only generated kernels have a binary
    binary: bytes = b""
    name: str = ""  # the kernel's name, as profilers show it
    digest: str = ""  # digest of its compile key

    @classmethod
    def of(cls, candidate: Candidate, kernel: KernelRecord | None) -> StepCandidate:
        if kernel is None:
            return cls(candidate.variant)
        return cls(candidate.variant, kernel.binary, kernel.name, kernel.key.digest)

    def to_json(self) -> dict[str, str]:
        binary = base64.b64encode(self.binary).decode()
        return {"variant": self.variant, "binary": binary, "name": self.name, "digest": self.digest}

    @classmethod
    def from_json(cls, data: Mapping[str, str]) -> StepCandidate:
        return cls(data["variant"], base64.b64decode(data["binary"]), data["name"], data["digest"])


AS_ASKED = StepCandidate(EAGER)
