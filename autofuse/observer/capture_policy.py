"""When to capture a root: a table of rules over facts about it.

In: `CaptureFacts`: the root's time so far, the expected cost of its capture, findings of earlier runs. Out:
`CaptureAdvice` with a reason code. Guarantee: torch-free, no clock, pure functions of numbers.

The rule is ski rental: rent (run eager) until the price, even if it was badly guessed, is a small share of the rent
paid; then buy (`Budget`). A short script never pays; a long one pays little.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from autofuse.ir.reasons import RootReason, in_words, words_of
from autofuse.ir.records import RootRecord

# A capture takes up to so many times what is expected (`capture_cost`); where this very root's is known, less.
MARGIN = 1.5
KNOWN_MARGIN = 1.2
KEPT_SLOWDOWN = 1.15  # for a trace of an earlier run that hardly pays in a run like the last one
# A capture that is as good as free, on a machine of usual speed: taken at once where the last run was long enough.
_TRIFLE_SECONDS = 1.0
_SOON = 0.5  # of a run like the last one, within which such a capture has to pay
_USUAL_SAVING = 0.25  # of a root's time in eager: models gain 1.2 to 2.1x, 1.4 in the mean
_CALLS_TO_JUDGE_SIZE = 3
_CALLS_TO_SETTLE_SIZE = 20

UNTUNED = "slower_untuned"  # lost, but not with all of its kernels
_FINAL_IN_EARLIER_RUNS = ("capture_failed", "no_graph", "slower_than_eager", "no_gain")


@dataclass(frozen=True)
class Budget:
    """The budget of captures: at any step the run has taken at most ``max_slowdown`` times eager's time.

    Let E be the time of all steps so far in eager, and L the time lost beyond it: captures, and captured steps that
    lose. P is the expected time of the next capture, whose true time is at most m P. It begins only where L + m P <= (s
    - 1) E. So when it is over, at most s E has passed; later steps take at most s times eager's, because losing roots
      are released.
    """

    spent_seconds: float  # E
    lost_seconds: float  # L
    max_slowdown: float  # s

    def needed(self, predicted_seconds: float, margin: float) -> float:
        """The E that one more capture needs."""
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


@dataclass(frozen=True)
class CaptureFacts:
    """Facts about a root before its next call. The defaults are those of the settings, for a new root."""

    spent_seconds: float  # in eager in the root so far, backward included
    predicted_seconds: float | None  # what its capture is expected to take, None while unknown
    budget: Budget  # of all roots
    calls: int  # finished ones
    call_us: float | None = None  # typical time of a call where known, otherwise the mean
    step_seconds: float | None = None  # eager time of a step like the present one, where known
    run_seconds: float = 0.0  # since the script began, imports included
    factor: float = 1.0  # how slow captures are on this machine
    failures: int = 0  # captures of this root that failed
    # What earlier runs have left.
    known: RootRecord | None = None  # what they found out about this root
    known_seconds: float | None = None  # what its capture is expected to take for that reason
    has_kept_trace: bool = False  # one of them has left its trace
    # What the person wants.
    at_first_call: bool = False  # the graph itself is asked for, whatever it costs
    at_once: bool = False  # someone waits for the capture (``--tune wait``): no rent, but a look at the shapes
    min_calls: int = 2  # of which that many calls tell enough
    uses_known: bool = False  # what the store has is asked for (``--frozen``)
    min_root_us: float = 200.0
    max_seconds: float = 300.0
    max_failures: int = 1

    @property
    def was_captured(self) -> bool:
        """Whether an earlier run captured it, or has left a trace that lost only because its kernels were not tuned."""
        if self.known is None:
            return False
        lost_untuned = self.has_kept_trace and self.known.reason == UNTUNED and self.known_seconds is not None
        return self.known.state == "captured" or lost_untuned

    @property
    def is_price_known(self) -> bool:
        """An earlier run has paid it."""
        return self.was_captured and self.known_seconds is not None

    @property
    def price_seconds(self) -> float:
        """The expected seconds of the capture; 0 while unknown."""
        return (self.known_seconds if self.is_price_known else self.predicted_seconds) or 0.0

    @property
    def margin(self) -> float:
        return KNOWN_MARGIN if self.is_price_known else MARGIN

    @property
    def reads_trace(self) -> bool:
        """Whether the capture would read an earlier run's trace."""
        return self.was_captured and self.has_kept_trace

    @property
    def known_reason(self) -> str:
        """Why to capture, where an earlier run did."""
        return "kept_trace" if self.reads_trace else "known_to_pay"

    @property
    def allowance(self) -> Budget:
        """The seconds that this capture may cost."""
        if not self.reads_trace:
            return self.budget
        return replace(self.budget, max_slowdown=min(self.budget.max_slowdown, KEPT_SLOWDOWN))


Rule = Callable[[CaptureFacts], CaptureAdvice | None]


def advise_capture(facts: CaptureFacts) -> CaptureAdvice:
    """Should this root be captured before its next call? The first rule that gives advice decides."""
    return next(advice for rule in RULES if (advice := rule(facts)) is not None)


def _has_failed(facts: CaptureFacts) -> CaptureAdvice | None:
    if facts.failures < facts.max_failures:
        return None
    return CaptureAdvice(False, "capture_failed", f"{facts.failures} failed captures", final=True)


def _is_asked_for(facts: CaptureFacts) -> CaptureAdvice | None:
    return CaptureAdvice(True, "first_call", "capture.at_once is set") if facts.at_first_call else None


def _has_lost_before(facts: CaptureFacts) -> CaptureAdvice | None:
    known = facts.known
    if known is None or known.state != "eager" or known.reason not in _FINAL_IN_EARLIER_RUNS:
        return None
    why = in_words(known.reason, words_of(RootReason))
    detail = f"an earlier run left it eager ({why}): {known.detail}".rstrip(": ")
    return CaptureAdvice(False, known.reason, detail, facts.price_seconds, final=True)


def _is_asked_for_again(facts: CaptureFacts) -> CaptureAdvice | None:
    """Captured in an earlier run: after a first call at once, where the person does not ask for the price."""
    if not facts.was_captured:
        return None
    if not facts.calls:
        return _await_calls(facts)
    if facts.at_once or facts.uses_known:
        return CaptureAdvice(True, facts.known_reason, "", facts.price_seconds)
    return None


def _is_too_small(facts: CaptureFacts) -> CaptureAdvice | None:
    if facts.calls < _CALLS_TO_JUDGE_SIZE:
        return None
    typical_us = facts.spent_seconds / facts.calls * 1e6 if facts.call_us is None else facts.call_us
    if typical_us >= facts.min_root_us:
        return None
    detail = f"{typical_us:.0f} us a call, below {facts.min_root_us:.0f} us a graph call costs more than it can save"
    is_final = facts.calls >= _CALLS_TO_SETTLE_SIZE
    return CaptureAdvice(False, "too_small", detail, facts.price_seconds, final=is_final)


def _is_too_expensive(facts: CaptureFacts) -> CaptureAdvice | None:
    price = facts.price_seconds
    if price <= facts.max_seconds:
        return None
    detail = f"capture is expected to take {price:.0f} s, more than {facts.max_seconds:.0f} s"
    return CaptureAdvice(False, "too_expensive", detail, price, final=True)


def _pays_in_a_run_like_the_last(facts: CaptureFacts) -> CaptureAdvice | None:
    """Captured in an earlier run: what a run of as many calls would save, against the price."""
    known, price = facts.known, facts.price_seconds
    if known is None or not facts.was_captured:
        return None
    step_seconds = facts.step_seconds
    if step_seconds is None and facts.reads_trace and facts.calls:
        step_seconds = facts.spent_seconds / facts.calls
    if step_seconds is None:
        return _await_calls(facts)
    saved = _saving(known) * max(known.calls - facts.calls, 0) * step_seconds
    if facts.is_price_known and _is_trifle(facts) and _SOON * saved >= price:
        detail = f"expected to take {price:.1f} s, which a run as long as the last one soon pays for"
        return CaptureAdvice(True, facts.known_reason, detail, price)
    # Captured by order, or too late to pay. Rent would be paid for nothing, unless this run turns out to be longer.
    if facts.calls < known.calls and saved < price:
        detail = (
            f"{known.calls} calls, as many as in the last captured run, would save about {saved:.1f} s, "
            f"capture is expected to take {price:.1f} s"
        )
        return CaptureAdvice(False, "not_yet", detail, price)
    return None


def _is_waited_for(facts: CaptureFacts) -> CaptureAdvice | None:
    """No rent is paid, but calls tell what their shapes are: a first trace of one only would soon be thrown away.

    Calls that have taken half of its price tell enough.
    """
    if not facts.at_once:
        return None
    is_dear = facts.calls > 0 and 0.0 < facts.price_seconds <= 2.0 * facts.spent_seconds
    if facts.calls < facts.min_calls and not is_dear:
        return CaptureAdvice(False, "not_yet", f"{facts.calls} of {facts.min_calls} calls seen", facts.price_seconds)
    reason = facts.known_reason if facts.is_price_known else "at_once"
    return CaptureAdvice(True, reason, f"after {facts.calls} calls", facts.price_seconds)


def _has_no_price(facts: CaptureFacts) -> CaptureAdvice | None:
    if facts.is_price_known or facts.predicted_seconds is not None:
        return None
    return CaptureAdvice(False, "not_observed", "no step was sampled yet", facts.price_seconds)


def _pays_rent(facts: CaptureFacts) -> CaptureAdvice:
    """Whether so much was spent in eager that the capture is a small share of it."""
    price, allowance = facts.price_seconds, facts.allowance
    needed = max(price, allowance.needed(price, facts.margin))
    spent = allowance.spent_seconds
    if facts.spent_seconds >= price and spent >= needed:
        detail = f"{spent:.1f} s spent in eager, capture is expected to take {price:.1f} s"
        return CaptureAdvice(True, "kept_trace" if facts.reads_trace else "paid_off", detail, price)
    detail = f"{spent:.1f} s of {needed:.1f} s in eager that are to pay for a capture of {price:.1f} s"
    return CaptureAdvice(False, "not_yet", detail, price)


# In this order; the last one always has an answer.
RULES: tuple[Rule, ...] = (
    _has_failed,
    _is_asked_for,
    _has_lost_before,
    _is_asked_for_again,
    _is_too_small,
    _is_too_expensive,
    _pays_in_a_run_like_the_last,
    _is_waited_for,
    _has_no_price,
    _pays_rent,
)


def _await_calls(facts: CaptureFacts) -> CaptureAdvice:
    detail = "a few calls tell how long a run like the last one takes"
    return CaptureAdvice(False, "not_yet", detail, facts.price_seconds)


def _is_trifle(facts: CaptureFacts) -> bool:
    """Whether a capture is as good as free; what reading a trace loses is weighed against all that the run took.

    A trace that soon pays may slow the run down as much as any capture (`Budget`): the later it is read, the less it
    saves.
    """
    if not facts.reads_trace:
        return facts.price_seconds <= facts.factor * _TRIFLE_SECONDS
    run = replace(facts.budget, spent_seconds=facts.run_seconds - facts.budget.lost_seconds)
    return run.allows(facts.price_seconds, KNOWN_MARGIN)


def _saving(known: RootRecord) -> float:
    """The share of its time in eager that a root saves once it is captured."""
    if known.state != "captured":
        return 0.0
    return max(1.0 - 1.0 / known.gain, 0.0) if known.gain else _USUAL_SAVING
