"""The rule of all switches: a race that is won and, unless it is clear, a second one like it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from autofuse.ir.records import DETAIL_CHARACTERS, EAGER, Candidate, Comparison, Decision
from autofuse.tuner.comparison import CLEAR, decide
from tests.tuner.nodes import chain_form, request

MARGIN = 0.03


def compared(speedup: float, low: float, strong_low: float) -> Comparison:
    return Comparison(100.0 / speedup, 100.0, speedup, low, 2 * speedup, strong_low, 3 * speedup, 40)


LOST, WON, SURE = compared(1.2, 0.99, 0.9), compared(1.2, 1.1, 1.05), compared(1.5, 1.4, CLEAR)
BEARS_OUT = compared(1.1, 1.01, 0.9)  # the usual bound will do


@pytest.mark.parametrize(
    ("first", "second", "is_won"),
    [
        ([LOST], None, False),
        ([SURE], None, True),
        ([WON], [BEARS_OUT], True),
        ([WON], [LOST], False),
        ([SURE, LOST], None, False),
        ([SURE, WON], [SURE, BEARS_OUT], True),
        ([SURE, WON], [LOST, SURE], False),
    ],
)
def test_a_win_that_is_not_clear_is_raced_again(
    first: Sequence[Comparison], second: Sequence[Comparison] | None, is_won: bool
) -> None:
    races: list[Sequence[Comparison] | None] = []

    def again() -> Sequence[Comparison] | None:
        races.append(second)
        return second

    ruling = decide(first, MARGIN, again)
    assert ruling is not None and ruling.is_won is is_won and len(races) == (second is not None)
    assert ruling.comparisons == tuple(second or first)
    assert ruling.unconfirmed == (tuple(first) if second is not None and not is_won else ())


def test_a_second_race_without_a_result_is_no_ruling() -> None:
    assert decide([WON], MARGIN, lambda: None) is None


def test_a_decision_says_what_its_race_showed() -> None:
    asked = request(chain_form(), (24,))
    made = Decision.of(WON, asked, Candidate("c_generic"), "won", "x" * 999, compile_key="digest", trials=3)
    assert (made.key, made.bucket, made.compile_key, made.trials) == (asked.key, asked.bucket, "digest", 3)
    assert (made.unfused_us, made.fused_us, made.speedup) == (WON.eager_us, WON.median_us, WON.speedup)
    assert (made.speedup_low, made.speedup_high, len(made.detail)) == (WON.low, WON.high, DETAIL_CHARACTERS)
    nothing = Decision.of(None, asked, Candidate(EAGER), "too_small", "")
    assert (nothing.unfused_us, nothing.fused_us, nothing.speedup) == (0.0, 0.0, 1.0)
