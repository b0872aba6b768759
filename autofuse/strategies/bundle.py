"""Packs a strategy and the kernels of its parts into one binary for the store.

In: a strategy and kernel records. Out: bytes, which `wrapper.load_strategy` reads. Guarantee: the bytes begin with a
mark with which no shared object and no artefact begins; equal strategies with equal kernels have equal bytes and one
compile key.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence

from autofuse.codegen.templates import LOOP
from autofuse.codegen.triton.targets import total_of
from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.strategies.strategy import Strategy

MARK = b"autofuse way\n"


def pack(strategy: Strategy, kernels: Sequence[KernelRecord], target: str) -> KernelRecord:
    """The stored record of a strategy; ``target``: the device that its kernels are for."""
    rows = [[k.key.digest, k.name, base64.b64encode(k.binary).decode()] for k in kernels]
    named = json.dumps([strategy.to_json(), [k.key.digest for k in kernels]], sort_keys=True)
    key = CompileKey(hashlib.sha256(named.encode()).hexdigest(), "way", "", target)
    binary = MARK + json.dumps({"way": strategy.to_json(), "kernels": rows}, sort_keys=True).encode()
    source = "\n\n".join([describe(strategy), *(k.source for k in kernels)])
    return KernelRecord(
        key, f"af_way_{strategy.name}_{key.source_hash[:6]}", source, binary, total_of(k.resources for k in kernels)
    )


def is_bundle(binary: bytes) -> bool:
    return binary.startswith(MARK)


def has_machine_code(binary: bytes) -> bool:
    """Whether a binary holds machine code; a strategy of library calls alone runs on all processors."""
    if not is_bundle(binary):
        return True
    kernels: list[list[str]] = json.loads(binary[len(MARK) :])["kernels"]
    return any(has_machine_code(base64.b64decode(text)) for _, _, text in kernels)


def describe(strategy: Strategy) -> str:
    """The steps of a strategy, as comments above the kernels' code."""
    lines = [f"{strategy.name}: {strategy.detail}" if strategy.detail else strategy.name]
    for step in strategy.steps:
        if isinstance(step, int):
            printer = strategy.parts[step].printer
            kind = "one kernel" if printer == LOOP else f"one kernel in tiles ({printer})"
            lines.append(f"  {kind}: {strategy.kernels[step].node.operation_names}")
        else:
            lines.append(f"  {step.target.removesuffix('.default')}")
    return "\n".join(f"// {line}" for line in lines)
