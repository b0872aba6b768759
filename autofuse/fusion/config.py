"""`FusionConfig`: what may be fused (seeds: fusion API, user control over fusion)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from autofuse.errors import SettingsError
from autofuse.ir.optable import OpKind


@dataclass(frozen=True)
class FusionConfig:
    """Limits of the planner. Raises SettingsError for a value out of range."""

    enabled: bool = True  # off: the graph runs on eager's kernels
    enable_elementwise: bool = True  # element-wise chains, activations, casts, comparisons
    enable_reduction: bool = True  # sums, softmax, norms, losses with the element-wise work around them
    enable_matmul: bool = True  # products with what follows them
    enable_conv: bool = True  # convolutions with normalisation, residual and activation
    enable_attention: bool = True  # product, softmax, product
    max_fusion_size: int = 32  # operations in one node, views not counted
    min_fusion_benefit: float = 1.0  # estimated speedup below which a node is refused
    min_tensor_size: int = 0  # elements; nodes whose largest tensor is smaller are refused
    cpu_fusion: bool = True  # per-device switches
    cuda_fusion: bool = True
    enabled_patterns: tuple[str, ...] | None = None  # names of custom patterns that apply; None: all

    def __post_init__(self) -> None:
        if self.max_fusion_size < 1:
            raise SettingsError(f"expected max_fusion_size of 1 or more, found {self.max_fusion_size}; 8 is usual")
        if not self.min_fusion_benefit > 0:
            raise SettingsError(
                f"expected min_fusion_benefit above 0 (a speedup, such as 1.1), found {self.min_fusion_benefit}"
            )
        if self.min_tensor_size < 0:
            raise SettingsError(f"expected min_tensor_size of 0 or more elements, found {self.min_tensor_size}")

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any]) -> FusionConfig:
        """Take the fields that exist; other keys are ignored."""
        names = {f.name for f in fields(cls)}
        return cls(**{k: v for k, v in values.items() if k in names})

    def device_enabled(self, device: str) -> bool:
        return {"cpu": self.cpu_fusion, "cuda": self.cuda_fusion}.get(device, False)

    def allows(self, kind: OpKind) -> bool:
        """Whether operators of this kind may be fused at all."""
        if not self.enabled:
            return False
        return {
            OpKind.POINTWISE: self.enable_elementwise,
            OpKind.CREATION: self.enable_elementwise,
            OpKind.VIEW: True,
            OpKind.PART: True,
            OpKind.MEMORY: self.enable_elementwise,
            OpKind.POOLING: self.enable_reduction,
            OpKind.REDUCTION: self.enable_reduction,
            OpKind.NORMALISATION: self.enable_reduction,
            OpKind.LOSS: self.enable_reduction,
        }.get(kind, False)
