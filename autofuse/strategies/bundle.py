"""A way and the kernels of its parts as one binary of the store.

In: a way and kernel records. Out: bytes, which `wrapper.load_strategy` reads.
Guarantee: the bytes begin with a mark that no shared object and no artefact begins with; equal ways with equal kernels
have equal bytes and one compile key.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Sequence

from autofuse.ir.records import CompileKey, KernelRecord
from autofuse.strategies.strategy import LOOP, Way

MARK = b"autofuse way\n"


def pack(way: Way, kernels: Sequence[KernelRecord], target: str) -> KernelRecord:
    """The record under which a way is kept; ``target``: the device that its kernels are for."""
    rows = [[k.key.digest, k.name, base64.b64encode(k.binary).decode()] for k in kernels]
    named = json.dumps([way.to_json(), [k.key.digest for k in kernels]], sort_keys=True)
    key = CompileKey(hashlib.sha256(named.encode()).hexdigest(), "way", "", target)
    binary = MARK + json.dumps({"way": way.to_json(), "kernels": rows}, sort_keys=True).encode()
    source = "\n\n".join([describe(way), *(k.source for k in kernels)])
    return KernelRecord(key, f"af_way_{way.name}_{key.source_hash[:6]}", source, binary)


def is_bundle(binary: bytes) -> bool:
    return binary.startswith(MARK)


def describe(way: Way) -> str:
    """What a way does, step by step, as comments above the kernels' code."""
    lines = [f"{way.name}: {way.detail}" if way.detail else way.name]
    for step in way.steps:
        if isinstance(step, int):
            printer = way.parts[step].printer
            kind = "one kernel" if printer == LOOP else f"one kernel in tiles ({printer})"
            lines.append(f"  {kind}: {way.kernels[step].node.operation_names}")
        else:
            lines.append(f"  {step.target.removesuffix('.default')}")
    return "\n".join(f"// {line}" for line in lines)
