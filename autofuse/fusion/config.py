"""`FusionConfig`: what may be fused (seeds: fusion API, user control over fusion)."""

from __future__ import annotations

from autofuse.ir.optable import OpKind
from autofuse.settings.groups import CheckedGroup, FusionSettings

# Which switch an operator of a kind needs; views and parts of tensors cost nothing and need none.
_SWITCHES = {
    OpKind.POINTWISE: "enable_elementwise",
    OpKind.CREATION: "enable_elementwise",
    OpKind.MEMORY: "enable_elementwise",
    OpKind.INDEXED: "enable_elementwise",
    OpKind.WRITE: "enable_reduction",
    OpKind.POOLING: "enable_reduction",
    OpKind.REDUCTION: "enable_reduction",
    OpKind.NORMALISATION: "enable_reduction",
    OpKind.LOSS: "enable_reduction",
    OpKind.COMPOSITE: "enable_reduction",
}


class FusionConfig(CheckedGroup, FusionSettings):
    """Limits of the planner: the settings of fusion, and what the planner asks of them.

    Sizes are numbers of elements, a benefit is a speedup (1.1: ten per cent faster), operations are counted without
    views. Raises SettingsError for a value that is unknown or out of range. Source: `settings.groups.FusionSettings`,
    which declares each value once; ``FusionConfig.of(settings.fusion)`` is that of a run.
    """

    def device_enabled(self, device: str) -> bool:
        """Whether what runs on a type of device ("cpu", "cuda") may be fused."""
        return {"cpu": self.cpu_fusion, "cuda": self.cuda_fusion}.get(device, False)

    def allows(self, kind: OpKind) -> bool:
        """Whether operators of this kind may be fused at all."""
        if not self.enabled:
            return False
        if kind in _SWITCHES:
            return bool(getattr(self, _SWITCHES[kind]))
        return kind in (OpKind.VIEW, OpKind.PART)
