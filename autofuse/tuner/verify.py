"""Correct before fast: a candidate against a float64 reference, relative to eager's own error.

In: a node, a fused callable that allocates through a given function, inputs. Out: the error ratio, or
what is wrong. Criterion: the largest and the root-mean-square error are each at most twice eager's plus
four units in the last place of the output's scale; NaN and Inf stand where eager has them; inputs are
unchanged; nothing outside of the outputs is written (guard bytes around each).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from autofuse.codegen.reference import run_unfused, to_float64, widen
from autofuse.ir.operation import NodeForm

ULPS = 4.0
TIMES_EAGER = 2.0
GUARD_BYTES = 256
GUARD = 0xA5


class Wrong(Exception):
    """The candidate's result is not acceptable; the message says how."""


@dataclass
class GuardedAllocator:
    """Allocates poisoned outputs between guard bytes."""

    blocks: list[tuple[torch.Tensor, int]]

    def __call__(self, shape: tuple[int, ...], strides: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        extent = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True)) if 0 not in shape else 0
        nbytes = extent * dtype.itemsize
        padded = -(-nbytes // 64) * 64
        block = torch.full((padded + 2 * GUARD_BYTES,), GUARD, dtype=torch.uint8)
        self.blocks.append((block, nbytes))
        inside = block[GUARD_BYTES : GUARD_BYTES + nbytes].view(dtype)
        inside.fill_(_poison(dtype))
        return torch.as_strided(inside, shape, strides)

    def check(self) -> None:
        """Raises Wrong where a guard byte changed."""
        for block, nbytes in self.blocks:
            before, after = block[:GUARD_BYTES], block[GUARD_BYTES + nbytes :]
            if bool((before != GUARD).any()) or bool((after != GUARD).any()):
                raise Wrong("wrote outside of an output")


def _poison(dtype: torch.dtype) -> Any:
    if dtype.is_floating_point:
        return float("nan")
    return True if dtype is torch.bool else 99


def verify(
    form: NodeForm,
    make_call: Callable[[GuardedAllocator], Callable[..., Any]],
    inputs: Sequence[torch.Tensor],
    symbol_values: Sequence[int],
) -> float:
    """The candidate's error over eager's own (0.0 where both are exact). Raises Wrong."""
    eager = run_unfused(form, inputs, symbol_values)
    reference = run_unfused(to_float64(form), widen(inputs), symbol_values)
    before = [t.clone() for t in inputs]
    allocator = GuardedAllocator([])
    found = make_call(allocator)(*inputs)
    found = found if isinstance(found, tuple) else (found,)
    allocator.check()
    for index, (tensor, copy) in enumerate(zip(inputs, before, strict=True)):
        if not _same_bits(tensor, copy):
            raise Wrong(f"changed input {index}")
    return max(
        (_output_error(i, e, r, f) for i, (e, r, f) in enumerate(zip(eager, reference, found, strict=True))),
        default=0.0,
    )


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    if left.is_floating_point():
        return bool(torch.equal(left.nan_to_num(nan=1e30), right.nan_to_num(nan=1e30)))
    return bool(torch.equal(left, right))


def _output_error(index: int, eager: torch.Tensor, reference: torch.Tensor, found: torch.Tensor) -> float:
    if found.shape != eager.shape or found.dtype != eager.dtype:
        raise Wrong(f"output {index} is {found.dtype}{list(found.shape)}, eager's {eager.dtype}{list(eager.shape)}")
    if not eager.numel():
        return 0.0
    if not eager.dtype.is_floating_point:
        if not torch.equal(found, eager):
            raise Wrong(f"output {index} ({eager.dtype}) differs from eager's")
        return 0.0
    e, r, f = eager.double(), reference.double(), found.double()
    # Where eager itself disagrees with float64 (gelu(inf) is NaN in float32 on some CPUs), either answer is right.
    kinds, rounded = _kind(e), _kind(reference.to(eager.dtype))
    if not bool(((_kind(f) == kinds) | (_kind(f) == rounded)).all()):
        raise Wrong(f"output {index} has NaN or Inf where eager has none, or none where eager has it")
    finite = torch.isfinite(e) & torch.isfinite(r) & torch.isfinite(f)
    if not bool(finite.any()):
        return 0.0
    e, r, f = e[finite], r[finite], f[finite]
    ulp = torch.finfo(eager.dtype).eps
    worst = 0.0
    for name, norm in (("largest", _largest), ("root-mean-square", _rms)):
        own, its, scale = norm(e - r), norm(f - r), norm(r)
        floor = max(scale * ulp, torch.finfo(eager.dtype).tiny)
        if its > TIMES_EAGER * own + ULPS * floor:
            raise Wrong(f"output {index}: {name} error {its:.3g}, eager's own {own:.3g}, scale {scale:.3g}")
        worst = max(worst, its / max(own, floor))
    return worst


def _kind(values: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 +Inf, 3 -Inf."""
    return values.isnan() * 1 + values.isposinf() * 2 + values.isneginf() * 3


def _largest(values: torch.Tensor) -> float:
    return float(values.abs().max())


def _rms(values: torch.Tensor) -> float:
    return float(values.square().mean().sqrt())
