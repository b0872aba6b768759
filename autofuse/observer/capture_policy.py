"""When to capture a root, and which calls stay on the original module: pure functions of numbers.

In: what a root cost so far, what capture is expected to cost, what earlier runs found. Out: ``CaptureAdvice`` with a
reason code, and the held-out calls.
Guarantee: torch-free, no clock, and no random stream but its own: the script's generators are never touched.

Capture is bought like skis: rent (run eager) until the rent paid is so much that the price, wrongly guessed as it may
be, is a small share of it, then buy (`Budget`). A short script never pays; a long one pays little.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import sqrt
from statistics import median

from autofuse.errors import SettingsError
from autofuse.ir.reasons import RootReason, in_words, words_of
from autofuse.ir.records import RootRecord

# A capture takes up to so many times what is expected (`capture_cost`); where this very root's is known, less.
MARGIN = 1.5
KNOWN_MARGIN = 1.2
KEPT_SLOWDOWN = 1.15  # at most, for a trace of an earlier run: a known script does not begin slowly
# A capture that is as good as free, on a machine of usual speed: taken at once where the last run was long enough.
_TRIFLE_SECONDS = 1.0
_SOON = 0.5  # of a run like the last one, within which such a capture has to pay
_USUAL_SAVING = 0.25  # of a root's time in eager: models gain 1.2 to 2.1x, 1.4 in the mean
_CALLS_TO_JUDGE_SIZE = 3
_CALLS_TO_SETTLE_SIZE = 20

_NEAR = 6  # calls before a held-out one, with which it is compared
_MANY_CALLS = 50  # free at a time where nothing is held out

UNTUNED = "slower_untuned"  # lost, but not with all of its kernels
_FINAL_IN_EARLIER_RUNS = ("capture_failed", "slower_than_eager", "no_gain")


@dataclass(frozen=True)
class Budget:
    """What captures may cost: at any step the run has taken at most ``max_slowdown`` times what eager takes.

    Let E be what all steps so far would have taken in eager, L what they took longer: captures, and captured steps that
    lose. P is what the next capture is expected to take, at most m P in truth. It begins only where
    L + m P <= (s - 1) E. So when it is over, at most s E has passed; later steps take at most s times eager's, for what
    loses is released.
    """

    spent_seconds: float  # E
    lost_seconds: float  # L
    max_slowdown: float  # s

    def needed(self, predicted_seconds: float, margin: float) -> float:
        """What E has to be for one more capture."""
        share = self.max_slowdown - 1.0
        lost = self.lost_seconds + margin * predicted_seconds
        return lost / share if share > 0.0 else float("inf")

    def allows(self, predicted_seconds: float, margin: float = MARGIN) -> bool:
        return self.spent_seconds >= self.needed(predicted_seconds, margin)


@dataclass(frozen=True)
class CaptureAdvice:
    """Capture this root now, or not, and why."""

    capture: bool
    reason: str  # "paid_off", "known_to_pay", "at_once", "not_yet", "not_observed", "too_small", "too_expensive", ...
    detail: str  # a sentence for people
    predicted_seconds: float = 0.0
    final: bool = False  # the root stays eager for good; no need to ask again


def may_trace_again(spent_seconds: float, predicted_seconds: float, budget: Budget) -> bool:
    """Whether one more graph of a captured root is worth its trace.

    ``spent_seconds``: in eager, by calls that fit none of its graphs.
    """
    return spent_seconds >= predicted_seconds and budget.allows(predicted_seconds)


def advise_capture(
    *,
    spent_seconds: float,
    predicted_seconds: float | None,
    budget: Budget,
    calls: int,
    step_seconds: float | None = None,
    factor: float = 1.0,
    min_root_us: float = 200.0,
    max_seconds: float = 120.0,
    failures: int = 0,
    max_failures: int = 1,
    at_once: bool = False,
    at_first_call: bool = False,
    uses_known: bool = False,
    min_calls: int = 2,
    call_us: float | None = None,
    known: RootRecord | None = None,
    known_seconds: float | None = None,
    has_kept_trace: bool = False,
    run_seconds: float = 0.0,
) -> CaptureAdvice:
    """Should this root be captured before its next call?

    ``spent_seconds``: eager time in the root so far, backward included; ``predicted_seconds``: what its capture is
    expected to take, None while unknown; ``budget``: of all roots; ``calls``: finished calls; ``step_seconds``: eager
    time of a step like the present one, where known; ``factor``: how slow captures are on this machine; ``at_once``:
    someone waits for the capture (``--tune wait``), so do not rent, but see ``min_calls`` calls for what their shapes
    tell; ``at_first_call``: the graph itself is asked for, whatever it costs; ``uses_known``: so is what the store has
    (``--frozen``); ``call_us``: typical time of a call where known, otherwise the mean; ``known``: what earlier runs
    found out about this root, ``known_seconds``: what its capture is expected to take for that reason;
    ``has_kept_trace``: one of them has left its trace; ``run_seconds``: since the script began, imports included.
    """
    if failures >= max_failures:
        return CaptureAdvice(False, "capture_failed", f"{failures} failed captures", final=True)
    if at_first_call:
        return CaptureAdvice(True, "first_call", "capture.at_once is set")
    was_captured = known is not None and (
        known.state == "captured" or (has_kept_trace and known.reason == UNTUNED and known_seconds is not None)
    )
    is_known = was_captured and known_seconds is not None
    reason = "known_to_pay"
    if was_captured and has_kept_trace:
        reason, budget = "kept_trace", replace(budget, max_slowdown=min(budget.max_slowdown, KEPT_SLOWDOWN))
    predicted = (known_seconds if is_known else predicted_seconds) or 0.0
    if known is not None and known.state == "eager" and known.reason in _FINAL_IN_EARLIER_RUNS:
        why = in_words(known.reason, words_of(RootReason))
        detail = f"an earlier run left it eager ({why}): {known.detail}".rstrip(": ")
        return CaptureAdvice(False, known.reason, detail, predicted, final=True)
    if was_captured:
        if not calls:
            return CaptureAdvice(False, "not_yet", "a few calls tell how long a run like the last one takes", predicted)
        if at_once or uses_known:
            return CaptureAdvice(True, reason, "", predicted)
    if calls >= _CALLS_TO_JUDGE_SIZE:
        typical_us = spent_seconds / calls * 1e6 if call_us is None else call_us
        if typical_us < min_root_us:
            detail = f"{typical_us:.0f} us a call, below {min_root_us:.0f} us a graph call costs more than it can save"
            return CaptureAdvice(False, "too_small", detail, predicted, final=calls >= _CALLS_TO_SETTLE_SIZE)
    if predicted > max_seconds:
        detail = f"capture is expected to take {predicted:.0f} s, more than {max_seconds:.0f} s"
        return CaptureAdvice(False, "too_expensive", detail, predicted, final=True)
    if known is not None and was_captured:
        if step_seconds is None and has_kept_trace and calls:
            step_seconds = spent_seconds / calls
        if step_seconds is None:
            return CaptureAdvice(False, "not_yet", "a few calls tell how long a run like the last one takes", predicted)
        saved = _saving(known) * max(known.calls - calls, 0) * step_seconds
        is_trifle = predicted <= factor * _TRIFLE_SECONDS
        if has_kept_trace:  # what it loses is weighed against all that the run has taken
            run = replace(budget, spent_seconds=run_seconds - budget.lost_seconds)
            is_trifle = run.allows(predicted, KNOWN_MARGIN)
        if is_known and is_trifle and _SOON * saved >= predicted:
            detail = f"expected to take {predicted:.1f} s, which a run as long as the last one soon pays for"
            return CaptureAdvice(True, reason, detail, predicted)
        # Captured by order, or too late to pay. Rent would be paid for nothing, unless this run turns out to be longer.
        if calls < known.calls and saved < predicted:
            detail = (
                f"{known.calls} calls, as many as in the last captured run, would save about {saved:.1f} s, "
                f"capture is expected to take {predicted:.1f} s"
            )
            return CaptureAdvice(False, "not_yet", detail, predicted)
    if at_once:
        if calls >= min_calls:
            detail = f"after {calls} calls"
            return CaptureAdvice(True, reason if is_known else "at_once", detail, predicted)
        return CaptureAdvice(False, "not_yet", f"{calls} of {min_calls} calls seen", predicted)
    if not is_known and predicted_seconds is None:
        return CaptureAdvice(False, "not_observed", "no step was sampled yet", predicted)
    needed = max(predicted, budget.needed(predicted, KNOWN_MARGIN if is_known else MARGIN))
    if spent_seconds >= predicted and budget.spent_seconds >= needed:
        detail = f"{budget.spent_seconds:.1f} s spent in eager, capture is expected to take {predicted:.1f} s"
        return CaptureAdvice(True, reason if reason == "kept_trace" else "paid_off", detail, predicted)
    detail = (
        f"{budget.spent_seconds:.1f} s of {needed:.1f} s in eager that are to pay for a capture of {predicted:.1f} s"
    )
    return CaptureAdvice(False, "not_yet", detail, predicted)


def _saving(known: RootRecord) -> float:
    """The share of its time in eager that a root saves once it is captured."""
    if known.state != "captured":
        return 0.0
    return max(1.0 - 1.0 / known.gain, 0.0) if known.gain else _USUAL_SAVING


def advise_release(ratios: Sequence[float], is_short: bool, release_factor: float) -> str | None:
    """Why a captured root should go back to eager: "slower_than_eager", "no_gain", or None to keep it.

    ``ratios``: eager's time over the captured graph's, one for each held-out call; ``release_factor``: a loss of less
    is not worth a change. Where calls are short (``is_short``) the overhead is what is left of a small gain, and eager
    has it without a risk. A median alone says too little: over a dozen calls on a busy machine that of a root which
    gains 5 % falls below 1 in one case of six. So the calls that lost count too: two standard deviations more of them
    than half for the one reason, one for the other.
    """
    gain, lost = median(ratios), _lost(ratios)
    if gain < 1.0 / release_factor and lost >= 2.0:
        return "slower_than_eager"
    if is_short and gain < 1.0 and lost >= 1.0:
        return "no_gain"
    return None


def is_unsure(ratios: Sequence[float]) -> bool:
    """Whether it takes more held-out calls to tell which is faster, the captured graph or eager (`advise_release`)."""
    return abs(_lost(ratios)) < 2.0


def _lost(ratios: Sequence[float]) -> float:
    """By how many of a fair coin's standard deviations more than half of the held-out calls were the faster ones."""
    return (2 * sum(ratio < 1.0 for ratio in ratios) - len(ratios)) / sqrt(len(ratios))


class HeldOut:
    """Which calls run the original module, so that the gain is always measured and never assumed.

    One call in every ``round(1 / share)``, at a place in that stretch that a hash of (seed, stretch) picks: evenly
    spread, not in step with anything periodic in the script, and the same in every run. Never the first calls.
    """

    def __init__(self, share: float, seed: int = 0, skip_first: int = 8) -> None:
        if not 0.0 <= share <= 0.5:
            raise SettingsError(f"capture.held_out_share must be between 0 and 0.5, found {share}")
        self.period = max(2, round(1.0 / share)) if share else 0
        self._seed = seed
        self._skip_first = skip_first
        self._calls = 0  # so far
        self._upcoming = -1  # the held-out call of the present stretch or of the next one

    def next(self) -> bool:
        """Is the next call held out? Counts the call."""
        call = self._calls
        self._calls += 1
        if call < self._skip_first or not self.period:
            return False
        if call % self.period == 0 or self._upcoming < 0:
            stretch = call // self.period
            self._upcoming = stretch * self.period + self._place(stretch)
        return call == self._upcoming

    def free(self) -> int:
        """Coming calls of which none is held out, as far as that is settled."""
        if not self.period:
            return self._skip_first + _MANY_CALLS
        end = -(-self._calls // self.period) * self.period  # where the next stretch begins, whose place is not settled
        return (self._upcoming if self._upcoming >= self._calls else end) - self._calls

    def skip(self, calls: int) -> None:
        """Count calls that ``free`` has promised."""
        self._calls += calls

    def takes(self, call: int) -> bool:
        """Is the call with this running number (from 0) held out?"""
        if not self.period or call < self._skip_first:
            return False
        stretch, place = divmod(call, self.period)
        return self._place(stretch) == place

    def _place(self, stretch: int) -> int:
        digest = hashlib.blake2b(f"{self._seed}:{stretch}".encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") % self.period


class Confirmation:
    """When more calls are held out: after the kernels in use have changed, until enough pairs tell what that gained.

    A loser would else stay for hundreds of calls, and a short run would end without a measured gain. A few times a
    root, so that plans which never stop changing do not keep it on eager; where the pairs leave it open, ``extensions``
    times as many follow, since twelve find a loss of 5 % on a machine that scatters by 10 % in half of the cases only.
    """

    def __init__(self, pairs: int = 12, every: int = 5, calm: int = 8, times: int = 3, extensions: int = 3) -> None:
        self._pairs, self._every, self._calm, self._extensions = pairs, every, calm, extensions
        self._times_left = times
        self._generation: int | None = None
        self._calls = 0  # since the kernels last changed
        self._is_begun = False
        self._left = 0  # pairs
        self._extensions_left = 0

    def extend(self) -> None:
        """The pairs so far leave it open which is faster."""
        if not self._left and self._extensions_left:
            self._left = self._pairs
            self._extensions_left -= 1

    @property
    def is_over(self) -> bool:
        """No call is held out until the kernels change."""
        return not self._left

    def next(self, generation: int, has_pair: bool) -> bool:
        """Is the next call held out? ``generation`` changes with the kernels; ``has_pair``: calls to compare with."""
        if generation != self._generation:
            self._generation, self._calls = generation, 0
            self._left = self._pairs if self._times_left else 0
            self._extensions_left, self._is_begun = self._extensions if self._left else 0, False
        if not self._left:
            return False
        self._calls += 1
        if self._calls <= self._calm or self._calls % self._every or not has_pair:
            return False
        if not self._is_begun:
            self._times_left -= 1
            self._is_begun = True
        self._left -= 1
        return True


class Held(Enum):
    """What a call is for."""

    NO = "no"  # the captured graph
    COLD = "cold"  # the original module, not to be compared: caches and branch predictors are full of the graph's code
    COMPARED = "compared"  # the original module
    RESTING = "resting"  # the original module, while the graph loses and kernels for it are still to come


class HeldOutCalls:
    """Which calls of a root run the original module: a share of all, more of them while new kernels are confirmed.

    Where calls are short, a single one between calls of the graph finds none of its code in the caches and is slower
    by what a released module would never pay; so a held-out call is followed by another one, which is compared, and
    every second occasion of the share is left out.
    """

    def __init__(self, share: float, pairs: int) -> None:
        self._share = HeldOut(share)
        self._pairs = pairs
        self._times = 3 if share else 0
        self._confirmations: dict[int, Confirmation] = {}  # of each magnitude of sizes, for each is judged by itself
        self._last: dict[int, int] = {}  # call of each magnitude
        self._calls = 0
        self._follows = False
        self._skips = False

    def next(self, generation: int, is_new: bool, has_pair: bool, is_short: bool, magnitude: int = 0) -> Held:
        """What the next call is for.

        ``generation`` changes with the kernels; ``is_new``: its shape has not run yet; ``magnitude``: of its sizes.
        """
        self._calls += 1
        self._last[magnitude] = self._calls
        if self._follows:
            self._follows = False
            return Held.COMPARED if has_pair else Held.COLD
        is_taken = self._share.next() and (has_pair or not is_new)
        if is_taken and is_short:
            self._skips = not self._skips
            is_taken = self._skips
        if not (is_taken or self._confirmation(magnitude).next(generation, has_pair)):
            return Held.NO
        self._follows = is_short
        return Held.COLD if is_short else Held.COMPARED

    def _confirmation(self, magnitude: int) -> Confirmation:
        found = self._confirmations.get(magnitude)
        if found is None:
            found = self._confirmations[magnitude] = Confirmation(self._pairs, times=self._times)
        return found

    def confirm_anew(self, magnitude: int = 0) -> None:
        """Calls of a magnitude run the graph again, which ran the original module for a while."""
        self._confirmations.pop(magnitude, None)

    def extend(self, magnitude: int = 0) -> None:
        """More calls are needed to confirm the present kernels, once those foreseen are over; a few times."""
        self._confirmation(magnitude).extend()

    def free(self) -> int:
        """Coming calls that `next` need not be asked about: they run the graph, and none lies near a held-out one."""
        if self._follows:
            return 0
        for magnitude, confirmation in self._confirmations.items():
            if not confirmation.is_over and self._last.get(magnitude, 0) > self._calls - _MANY_CALLS:
                return 0
        return max(0, self._share.free() - _NEAR)

    def skip(self, calls: int) -> None:
        """Count calls that ``free`` has promised."""
        self._share.skip(calls)
