"""`FusionBenefit`: what fusing a node is expected to gain, before anything is measured.

In: a node and likely sizes. Out: bytes, launches and an estimated speedup from a roofline of the device.
The estimate only orders the queue and filters; decisions come from measurements.
"""

from __future__ import annotations

from dataclasses import dataclass

from autofuse.fusion.cost import matmul_flops
from autofuse.fusion.graph import FusionGraph
from autofuse.fusion.node import FusionNode
from autofuse.ir.operation import ValueRef

# A 2-core server processor, measured 2026-11: eager's dispatch, one core's copy rate, one core's arithmetic.
LAUNCH_US = 4.0
BYTES_PER_US = 8_000.0
FLOPS_PER_US = 8_000.0


@dataclass(frozen=True)
class FusionBenefit:
    """Expected gain of one node (seed: operator fusion with dynamic shapes)."""

    estimated_speedup: float  # unfused time / fused time, by the model
    memory_saved: int  # bytes that no longer go through memory, a call
    kernel_count_reduction: int  # launches saved, a call
    complexity_score: float  # operations weighted by cost; a large score compiles and spills more

    def should_fuse(self, threshold: float) -> bool:
        """Whether the estimated speedup reaches the threshold (1.0 = no loss)."""
        return self.estimated_speedup >= threshold


def estimate_benefit(node: FusionNode, graph: FusionGraph | None = None) -> FusionBenefit:
    """The benefit at the graph's hints (or 64 for each unknown symbol)."""
    local = FusionGraph(node.operations, node.inputs, node.outputs, graph.hints if graph else None)
    unfused_bytes = sum(local.operation_bytes(op) for op in node.operations)
    flops = sum(local.operation_flops(op) for op in node.operations)
    # Libraries' matmuls are as fast as they can be; what is element-wise keeps its operands in registers.
    matmul = sum(matmul_flops(local, op) or 0.0 for op in node.operations)
    reads: dict[str, int] = {}  # of each tensor, most bytes that a kernel reads, directly or through views
    for op in node.kernels:
        for ref in op.inputs:
            name = local.base(ref).name
            if name in node.inputs:
                whole = local.nbytes(node.inputs[name])
                limit = local.bytes_read(op, ref) if local.is_table(op, ref) else whole
                reads[name] = max(reads.get(name, 0), min(whole, limit))
    fused_bytes = sum(reads.values())
    fused_bytes += sum(local.nbytes(local.spec(ref)) for ref in node.outputs)
    kernels = len(node.kernels)
    # The kernel time is the larger of moving the bytes and doing the arithmetic.
    unfused_us = kernels * LAUNCH_US + max(unfused_bytes / BYTES_PER_US, flops / FLOPS_PER_US)
    fused_us = LAUNCH_US + max(fused_bytes / BYTES_PER_US, (flops + matmul) / 2 / FLOPS_PER_US)
    return FusionBenefit(
        estimated_speedup=unfused_us / fused_us,
        memory_saved=max(0, unfused_bytes - fused_bytes),
        kernel_count_reduction=max(0, kernels - 1),
        complexity_score=sum(1.0 + _weight(local, ref) for op in node.kernels for ref in [ValueRef(op.name)]),
    )


def _weight(graph: FusionGraph, ref: ValueRef) -> float:
    op = graph.by_name[ref.name]
    elements = max(1, graph.numel(graph.spec(ref)))
    return graph.operation_flops(op) / elements / 10.0
