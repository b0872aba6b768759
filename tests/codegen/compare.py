"""The criterion for every generated kernel: nearer to float64 than twice eager, and NaN and Inf where eager has them.

In: a kernel's outputs, eager's, and the float64 reference, on one input or on as many as it takes to tell an error that
is too large from luck. Out: what is wrong, in words.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch

from autofuse.tuner.verify import Inaccurate, Wrong, judge

ULPS = 4  # libmvec's erf and log are within 4 units in the last place
ULPS_FLOAT64 = 64  # eager is its own reference there, so its error counts as 0


def problems(
    found: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    loose: bool = False,
) -> list[str]:
    """What is wrong with outputs; empty where they pass. ``loose`` takes NaN for Inf and Inf for NaN."""
    return [str(error) for error in wrong_outputs(found, eager, reference, loose)]


Answers = tuple[Sequence[torch.Tensor], Sequence[torch.Tensor], Sequence[torch.Tensor]]


def problems_of_draws(draw: Callable[[int], Answers], loose: bool = False) -> list[str]:
    """As ``problems``, of what ``draw`` gives for one number after the other, by the rule of the tuner's verifier."""

    def once(number: int) -> None:
        wrong = wrong_outputs(*draw(number), loose)
        if wrong:
            raise max(wrong, key=lambda error: error.times if isinstance(error, Inaccurate) else math.inf)

    try:
        judge(once)
    except Wrong as error:
        return [str(error)]
    return []


def wrong_outputs(
    found: Sequence[torch.Tensor],
    eager: Sequence[torch.Tensor],
    reference: Sequence[torch.Tensor],
    loose: bool = False,
) -> list[Wrong]:
    """As ``problems``, as errors: of one draw, so that an error which is `Inaccurate` may be chance."""
    wrong: list[Wrong] = []
    for n, (ours, theirs, exact) in enumerate(zip(found, eager, reference, strict=True)):
        if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
            wrong.append(Wrong(f"output {n}: {ours.shape} {ours.dtype}, eager has {theirs.shape} {theirs.dtype}"))
        elif not ours.is_floating_point():
            if not torch.equal(ours, theirs):
                wrong.append(Wrong(f"output {n}: {(ours != theirs).sum()} of {ours.numel()} integers differ"))
        else:
            wrong += _compare(f"output {n}: ", ours, theirs, exact, loose)
    return wrong


def _compare(name: str, ours: torch.Tensor, theirs: torch.Tensor, exact: torch.Tensor, loose: bool) -> list[Wrong]:
    a, b, x = ours.double(), theirs.double(), exact.double()
    wrong: list[Wrong] = []
    # Where eager itself disagrees with float64 (gelu(inf) is NaN in float32), either answer is right.
    kind = torch.isfinite if loose else _kind
    if ((kind(a) != kind(b)) & (kind(a) != kind(x))).any():
        places = [t.isnan().sum().item() for t in (a, b, x)] + [t.isinf().sum().item() for t in (a, b, x)]
        text = "NaN in {} places, eager in {} (float64 {}); Inf in {}, eager in {} ({})".format(*places)
        wrong.append(Wrong(name + text))
    finite = a.isfinite() & b.isfinite() & x.isfinite()
    if finite.any():
        scale = x[finite].abs().max().item()
        info = torch.finfo(ours.dtype)
        bound = 2 * (b - x)[finite].abs().max().item() + (ULPS if ours.dtype != torch.float64 else ULPS_FLOAT64) * max(
            info.eps * scale, info.smallest_normal
        )
        error = (a - x)[finite].abs().max().item()
        if error > bound:
            text = f"error {error:.3g} is over {bound:.3g} (eager {(b - x)[finite].abs().max().item():.3g})"
            wrong.append(Inaccurate(name + text, error / bound))
    return wrong


def _kind(t: torch.Tensor) -> torch.Tensor:
    """0 finite, 1 NaN, 2 Inf, -2 -Inf."""
    return t.isnan() * 1 + (t == float("inf")) * 2 - (t == float("-inf")) * 2
