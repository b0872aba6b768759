"""What a run gained, lost and cost, in sentences: the terminal and the HTML page print the same.

In: a ``Report`` with a run. Out: a ``Verdict``, and the totals as (name, words). Guarantee: a missing gain, or one that
was not measured, is said to be so, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from autofuse.ir.reasons import in_words
from autofuse.ir.steps import PAIR_WINDOW, held_out_one_in
from autofuse.report import wording
from autofuse.report.report import NodeLine, Report, tuning_cost
from autofuse.report.statistics import MIN_PAIRS_FOR_INTERVAL
from autofuse.report.strictness import StrictCost

MAX_MEMORY = 4
MAX_GIVEN_UP = 3
MISSING_PARTS = (
    "no_compiler",
    "no_triton",
    "store_unusable",
    "daemon_unusable",
)  # kinds of notices: nothing can be fused


@dataclass(frozen=True)
class Verdict:
    """Whether a run gained, in a sentence."""

    kind: Literal["gain", "loss", "none"]  # "none": no gain, or none that was measured
    claim: str
    evidence: str = ""  # the rest of the sentence: against what, how sure

    @property
    def sentence(self) -> str:
        return self.claim + self.evidence


def verdict(report: Report) -> Verdict:
    """What a run gained. ``report`` has a run."""
    totals, speedup = report.totals, report.totals.speedup
    if not totals.fused_calls:
        steps = [line for line in report.nodes if line.fused_calls]  # an optimizer's, which belong to no graph
        said = _steps_alone(steps) if steps else "Nothing ran fused."
        return Verdict("none", f"{said} {_why_nothing_fused(report)}")
    if speedup.median is None:
        return Verdict(
            "none",
            f"Gain not measured: no held-out eager step of a hot shape lies within {PAIR_WINDOW} calls of a routed "
            f"one. {_ended_early(report) or 'A longer run measures it.'}",
        )
    span = wording.interval(speedup.low, speedup.high)
    said = f" (95 % interval {span}, {wording.plural(speedup.pairs, 'comparison')})" if span else ""
    if not span:
        said = f" (only {wording.plural(speedup.pairs, 'comparison')}: {MIN_PAIRS_FOR_INTERVAL} make an interval)"
    if speedup.is_gain:
        return Verdict("gain", f"{wording.times(speedup.median)} faster steps", f" than eager{said}")
    if speedup.high is not None and speedup.high < 1.0:
        return Verdict("loss", f"No gain: steps run at {wording.times(speedup.median)} of eager's speed", said)
    return Verdict("none", f"No gain: {wording.times(speedup.median)} is not distinguishable from eager", said)


def balance(report: Report) -> str:
    """``cost 26.9 s, saved 7.9 s``: what capture and tuning took so far, and what the steps since have brought."""
    totals, run = report.totals, report.run
    assert run is not None
    cost = totals.capture_seconds + tuning_cost(run.mode, totals.tuning_seconds, totals.paused_seconds)
    saved, speedup = totals.seconds_saved, totals.speedup
    if saved is None:
        return f"cost {wording.seconds(cost)}, saving not measurable"
    if saved >= 0 and not speedup.is_gain:
        return f"cost {wording.seconds(cost)}, saving not certain"
    return f"cost {wording.seconds(cost)}, {'saved' if saved >= 0 else 'lost'} {wording.seconds(abs(saved))}"


def facts(report: Report) -> Iterator[tuple[str, str]]:
    """The totals of a run as (name, words)."""
    totals = report.totals
    yield "steps", f"{totals.steps:,} ({_measured(report)})"
    calls = totals.fused_calls + totals.unfused_calls
    fused = f"{totals.fused_calls:,} of {calls:,} ran fused kernels ({wording.percent(totals.fused_share)})"
    yield "node calls", fused if calls else "none: no graph was captured"
    if report.decided is not None and report.decided.sentence:
        yield "decisions", report.decided.sentence
    if report.live_races is not None:
        yield "on real calls", report.live_races.sentence
    for kernel in report.decided.given_up[:MAX_GIVEN_UP] if report.decided is not None else ():
        yield "given up", f"{kernel.node} ({kernel.bucket}): {kernel.detail}"
    yield "cost", _cost(report)
    yield "saved", _saved(report)
    overhead = totals.observer_overhead_percent
    yield "observer", "–" if overhead is None else f"{overhead:.2f} % of the run's time"
    if report.strict is not None:
        yield "strict", _strict(report.strict)
    yield "memory", _memory(report)


def whole_share(report: Report) -> str:
    """What part of a step all nodes together are, and what the rest is; empty where no node has a share."""
    share = min(1.0, sum(line.time_share for line in report.nodes))
    if share <= 0:
        return ""
    rest = "the rest is operators that are in no node, Python and autograd"
    return f"All nodes together take {wording.percent(share)} of a step; {rest}."


def _steps_alone(steps: Sequence[NodeLine]) -> str:
    """Which optimizers' steps ran fused in a run in which no node of a graph did."""
    some = ", ".join(f"{line.operations} ({wording.times(line.speedup)} when it was tuned)" for line in steps)
    return f"Only the optimizer's step ran fused: {some}."


def _ended_early(report: Report) -> str:
    """That the script failed, and after how many steps."""
    code = report.run.totals.exit_code if report.run is not None else None
    return (
        f"The script ended with exit code {code} after {wording.plural(report.totals.steps, 'step')}." if code else ""
    )


def _why_nothing_fused(report: Report) -> str:
    """Of the nodes of graphs."""
    run = report.run
    assert run is not None
    for row in report.events:
        if row.event.kind in MISSING_PARTS:
            return wording.sentence(row.event.message.rstrip("."))
    if report.queue.open:
        waiting = f"{wording.plural(report.queue.open, 'kernel is', 'kernels are')} still to be tuned in the background"
        if is_uncaptured(report):  # it is of an optimizer's step
            return f"{_why_uncaptured(report)} {waiting}."
        return f"{waiting}; the next run uses what is found."
    if report.queue.failed:
        failed = wording.plural(report.queue.failed, "request")
        return f"{failed} for tuning failed; autofuse explain NODE says why, autofuse tune --again tries anew."
    if any(not line.fused_calls for line in report.nodes):
        if run.mode == "off":
            return "Tuning was off, and the store has no winner for this run's nodes."
        if any(line.decision == "fused" for line in report.nodes):
            return "Its kernels were found too late for it; the next run uses them."
        if not any(line.variant for line in report.nodes):
            return "None of its nodes has been tuned yet."
        return "Eager's own kernels won for every node that was tuned."
    if any(root.state == "captured" for root in report.roots):
        return "The captured graphs hold no operators that can be fused."
    if report.roots:
        return _why_uncaptured(report)
    return "No call of an nn.Module was seen."


def is_uncaptured(report: Report) -> bool:
    """Whether modules were seen, and none is captured."""
    return bool(report.roots) and not any(root.state == "captured" or root.capture_seconds for root in report.roots)


def _why_uncaptured(report: Report) -> str:
    root = report.roots[0]
    return f"No module was captured ({root.name}: {in_words(root.reason, wording.ROOT_REASONS)})."


def _measured(report: Report) -> str:
    totals = report.totals
    if not totals.routed_steps:
        return "none timed with fused kernels"
    one_in = report.run.steps_one_in if report.run is not None else 1
    routed = f"{_about(one_in)}{totals.routed_steps:,} with fused kernels"
    return f"timed: {routed}, {_about(held_out_one_in(one_in))}{totals.held_out_steps:,} held out in eager"


def _about(one_in: int) -> str:
    return "about " if one_in > 1 else ""


def _cost(report: Report) -> str:
    run = report.run
    assert run is not None
    totals = report.totals
    how = {"background": " beside the script", "wait": " while the script waited", "after": " after the script"}
    seconds = tuning_cost(run.mode, totals.tuning_seconds, totals.paused_seconds) or totals.tuning_seconds
    tuning = f"tuning {wording.seconds(seconds)}" if seconds else "no tuning"
    causes: dict[str, float] = {}
    for root in report.roots:
        for cause, seconds in root.capture_causes:
            causes[cause] = causes.get(cause, 0.0) + seconds
    capture = f"capture {wording.seconds(totals.capture_seconds)}{wording.causes(causes.items())}"
    return f"{capture}, {tuning}" + (how.get(run.mode, "") if seconds else "")


def _saved(report: Report) -> str:
    totals = report.totals
    if totals.seconds_saved is None:
        return "not measurable"
    if totals.seconds_saved <= 0:
        return f"nothing: {wording.seconds(-totals.seconds_saved)} lost"
    when = (
        f"paid for its cost by step {totals.break_even_step:,}"
        if totals.break_even_step is not None
        else "has not paid for its cost yet"
    )
    return f"{wording.seconds(totals.seconds_saved)}, {when}"


def _strict(cost: StrictCost) -> str:
    if not cost.refused_nodes:
        return "no faster kernel was refused for its bits"
    them = wording.plural(cost.refused_nodes, "node")
    saved = "" if cost.step_us is None else f", {wording.microseconds(cost.step_us)} a step are given up for that"
    return f"faster kernels of {them} were refused, as they are not eager's to the bit{saved}"


def _memory(report: Report) -> str:
    if not report.memory:
        if (report.run.settings if report.run else {}).get("observe.memory"):
            return "no two steps of one shape, in eager and with settled kernels, could be compared"
        return "not measured; autofuse run --set observe.memory=on measures a step's peak"
    names = len(report.memory) > 1
    return "\n".join(
        f"{line.name + ': ' if names else ''}a step's tensors peak at {wording.nbytes(line.routed_bytes)}, "
        f"{line.ratio:.2f} of eager's {wording.nbytes(line.eager_bytes)}"
        for line in report.memory[:MAX_MEMORY]
    )
