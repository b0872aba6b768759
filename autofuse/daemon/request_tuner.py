"""The tuner of one request: a node as one kernel, a node as programs of several kernels, an optimizer step.

In: a `TuneRequest`; what another host of the fleet proposes for it, or what was decided on it long ago. Out: its
`Outcome`, not stored yet.
Guarantee: parts of a node are tuned before the node, in the request's bucket; what they found is stored at once, and a
request for a part that waits in the queue is known as answered. A proposal is built, checked and raced like any
candidate; only where it cannot run or is wrong, this host searches by itself.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Sequence
from dataclasses import replace

from autofuse.codegen.templates import LOOP
from autofuse.daemon.devices import Devices
from autofuse.daemon.recheck import DAY_SECONDS
from autofuse.daemon.scheduler import Scheduler
from autofuse.daemon.tuning_results import TuningResults
from autofuse.db.old_decisions import OldDecision
from autofuse.errors import FusionError
from autofuse.ir.buckets import distance
from autofuse.ir.operation import NodeForm
from autofuse.ir.records import (
    DETAIL_CHARACTERS,
    EAGER,
    IN_ONE,
    Bucket,
    Candidate,
    Decision,
    DecisionKey,
    KernelRecord,
    ObservedShape,
    TuneRequest,
)
from autofuse.ir.shape import Dim, evaluate
from autofuse.optim.form import StepForm, form_of_request
from autofuse.optim.tune_step import StepTuning
from autofuse.settings.groups import TunerSettings
from autofuse.strategies.enumeration import PARTS, WHOLE, cut_strategies, is_group, is_large, strategies_of
from autofuse.strategies.strategy import Strategy, kernel_id
from autofuse.tuner.cases import CASE_BYTES, GPU_CASE_BYTES
from autofuse.tuner.outcome import JobLimits, Outcome
from autofuse.tuner.proposed import RACED, UNDECIDED, has_run, is_eager
from autofuse.tuner.strategy_provider import STRATEGY, StrategyBenchmarks
from autofuse.tuner.tune_node import Job

log = logging.getLogger("autofuse.daemon")

WORKER_START_SECONDS = 3.0  # CPU time of importing torch
ID_DIGITS = 16  # of a node's name, a SHA-256
NEIGHBOURS = 3  # winners of other buckets that a search starts from
CUT_BELOW = 1.15  # a node whose one kernel gains less is also tried as two kernels
PATIENT = 4.0  # beside a running script, a job may take this many times as long


class RequestTuner:
    """Tunes one request at a time."""

    def __init__(self, settings: TunerSettings, devices: Devices, scheduler: Scheduler, results: TuningResults) -> None:
        self._settings = settings
        self._devices = devices
        self._scheduler = scheduler
        self._results = results
        self._answered: set[str] = set()  # digests of keys that were tuned as parts of a group

    def was_answered(self, key: DecisionKey) -> bool:
        """Whether the key was tuned as a part of a group since it was last asked about here."""
        is_answered = key.digest in self._answered
        self._answered.discard(key.digest)
        return is_answered

    def tune(self, request: TuneRequest) -> Outcome:
        """Tune what the request asks for: a node, a group or an optimizer step.

        Raises Interrupted where the daemon is to end; NotReady, CompilerNotReady, OSError and MemoryError for problems
        that may pass; StoreError. Any other exception is the request's fault.
        """
        form = self._begin(request)
        return self._try_proposal(request, form) or self._search(request, form)

    def race_again(self, old: OldDecision) -> Outcome:
        """Race an old decision's winner alone. Where it no longer wins, or eager had won, search as `tune` does, and so
        where calls have other sizes: another kernel may be best for those.

        Raises what `tune` raises.
        """
        request, before = old.request, old.decision
        form = self._begin(request)
        outcome = None
        if before.reason == "won" and old.drift == 1.0:
            outcome = self._race_alone(request, form, LOOP, before.candidate)
            if outcome.decisions[0].reason != "won":
                self._results.note_failures(request.key, outcome)
                outcome = None
        outcome = outcome or self._search(request, form)
        if before.reason == UNDECIDED:
            words = f"raced again while no script ran; before, {before.speedup:.2f}x was not sure"
        else:
            found = f"it gained {before.speedup:.2f}x" if before.reason == "won" else "eager stayed"
            words = f"raced again {_why_again(old)}; before, {found}"
        outcome.decisions[0] = _with_words(outcome.decisions[0], words)
        return outcome

    def _begin(self, request: TuneRequest) -> NodeForm | StepForm:
        """Start the worker that a request needs, and read what it asks for."""
        provider = self._devices.provider(request.key.device)
        if provider.worker.pid is None:
            self._scheduler.rest(WORKER_START_SECONDS)
        provider.worker.start()  # the worker imports torch while the first kernels compile
        return form_of_request(request.node)

    def _search(self, request: TuneRequest, form: NodeForm | StepForm) -> Outcome:
        if isinstance(form, StepForm):
            return self._tune_step(request, form)
        if is_group(form):
            strategies = strategies_of(form, request.key.device != self._devices.cpu)
            large = [strategy for strategy in strategies if is_large(strategy, form, request.bucket)]
            if len(strategies) > len(large) == 1 and not large[0].parts:  # aten's own kernel alone is left
                detail = "a matmul by itself, of fewer operations than a call of another kernel costs"
                return Outcome([Decision.of(None, request, Candidate(EAGER), "too_small", detail)])
            return self._tune_strategies(request, form, large)
        outcome = self._tune_kernel(request, form)
        if _may_cut(outcome.decisions):
            strategies = cut_strategies(form)
            if strategies:
                outcome = _with_cuts(outcome, self._tune_strategies(request, form, strategies, outcome))
        return outcome

    def _try_proposal(self, request: TuneRequest, form: NodeForm | StepForm, printer: str = LOOP) -> Outcome | None:
        """The outcome of the candidate that another host has chosen, without a search; None where there is none."""
        proposal = self._results.proposal(request.key)
        if proposal is None:
            return None
        candidate, words = proposal.candidate, "as another host of the fleet found"
        if is_eager(candidate) and proposal.reason in RACED:
            self._results.judge(request.key, "adopted", f"{words}, eager stays")
            return Outcome([Decision.of(None, request, candidate, proposal.reason, words)])
        outcome = self._race_alone(request, form, printer, candidate)
        decision = outcome.decisions[0]
        if not has_run(outcome):
            why = decision.detail or decision.reason
            log.info("a proposal of the fleet was refused: %s; this host searches by itself", why)
            self._results.note_failures(request.key, outcome)
            self._results.judge(request.key, "refused", decision.detail or decision.reason)
            return None
        is_won = decision.reason == "won"
        self._results.judge(request.key, "adopted" if is_won else "overridden", decision.detail)
        outcome.decisions[0] = _with_words(decision, f"{words}, where it gained {proposal.speedup:.2f}x")
        return outcome

    def _race_alone(
        self, request: TuneRequest, form: NodeForm | StepForm, printer: str, candidate: Candidate
    ) -> Outcome:
        """The outcome of one candidate against eager, without a search."""
        if isinstance(form, StepForm):
            return self._tune_step(request, form, candidate)
        if candidate.variant == STRATEGY:
            return self._tune_strategies(request, form, self._strategies_named(request, form, candidate))
        return self._tune_kernel(request, form, printer, candidate)

    def _strategies_named(self, request: TuneRequest, form: NodeForm, candidate: Candidate) -> list[Strategy]:
        has_tiles = request.key.device != self._devices.cpu
        known = strategies_of(form, has_tiles) if is_group(form) else cut_strategies(form)
        return [strategy for strategy in known if candidate.config == ((STRATEGY, strategy.name),)]

    def _tune_step(self, request: TuneRequest, form: StepForm, proposed: Candidate | None = None) -> Outcome:
        provider = self._devices.provider(request.key.device)
        limits, compilers = self._limits(request), provider.compilers()
        rest = self._scheduler.rest
        return StepTuning(request, form, provider.backend, provider.worker, limits, rest, compilers, proposed).run()

    def _tune_kernel(
        self, request: TuneRequest, form: NodeForm, printer: str = LOOP, proposed: Candidate | None = None
    ) -> Outcome:
        """Tune a node as one kernel; ``printer``: the name of the kernel's template; ``proposed``: only this one."""
        provider = self._devices.provider(request.key.device)
        winners = self._results.winners(request.key)
        key, bucket = request.key, request.bucket
        bench = provider.bench(key.fusion_id, form, key.threads, bucket, printer, key.is_strict)
        nearest = sorted(winners, key=lambda bucket: distance(bucket, request.bucket))
        seeds = list(dict.fromkeys(winners[bucket] for bucket in nearest))[:NEIGHBOURS]
        return Job(request, bench, self._limits(request), seeds, self._scheduler.clock, proposed).run()

    def _tune_strategies(
        self, request: TuneRequest, form: NodeForm, strategies: Sequence[Strategy], whole: Outcome | None = None
    ) -> Outcome:
        """Race strategies of several kernels. ``whole``: the outcome of the node as one kernel, if it was tuned so."""
        provider = self._devices.provider(request.key.device)

        def tune_part(part: NodeForm, printer: str, sizes: Sequence[Dim]) -> KernelRecord | None:
            if whole is not None and part.text() == form.text():
                return next((k for k in whole.kernels), None)
            return self._part_winner(request, form, part, printer, sizes)

        bench = StrategyBenchmarks(
            provider, request.key.fusion_id, form, request.key.threads, request.bucket, strategies, tune_part
        )
        # All strategies are in one wave, for they are few, and built already. In waves of the usual four, rewrites to
        # extern kernels would fill the first; by its times another wave would hardly ever seem to pay, and generated
        # matmuls would not be tried.
        limits = replace(self._limits(request), trials=len(strategies), wave=len(strategies))
        outcome = Job(request, bench, limits, (), self._scheduler.clock).run()
        outcome.decisions = [replace(d, detail=_strategies_detail(d, outcome, strategies)) for d in outcome.decisions]
        if whole is None and parts_lost(outcome):
            stays = Candidate(EAGER, IN_ONE)
            outcome.decisions = [
                replace(d, candidate=stays) if d.candidate.variant == EAGER else d for d in outcome.decisions
            ]
        return outcome

    def _part_winner(
        self, request: TuneRequest, form: NodeForm, part: NodeForm, printer: str, sizes: Sequence[Dim]
    ) -> KernelRecord | None:
        """The kernel of a part in the request's bucket, from a stored decision or tuned now; None where eager wins.

        What was undecided in an earlier job is raced again. If it is so still, its kernel is given out all the same:
        the race of the strategies with it inside decides whether it is of use.
        """
        own = part_request(request, form, part, printer, sizes)
        known = self._results.last_decision(own.key, own.bucket)
        kernel = self._results.kernel_of(known) if known is not None else None
        if known is None or known.reason == UNDECIDED or (known.compile_key and kernel is None):
            outcome = self._try_proposal(own, part, printer) or self._tune_kernel(own, part, printer)
            self._results.write(own, outcome)
            self._answered.add(own.key.digest)
            found = [d for d in outcome.decisions if d.bucket == own.bucket]
            kernel = (self._results.kernel_of(found[-1]) if found else None) or outcome.unsure
        return kernel

    def _limits(self, request: TuneRequest) -> JobLimits:
        tuner = self._settings
        # Beside a script most of the time is spent waiting for a core.
        seconds = tuner.job_seconds * (1.0 if self._scheduler.is_urgent() else PATIENT)
        is_gpu = request.key.device.startswith("cuda:")
        return JobLimits(
            tuner.trials,
            tuner.rounds,
            tuner.margin,
            seconds,
            self._devices.memory_bytes(request.key.device),
            GPU_CASE_BYTES if is_gpu else CASE_BYTES,
        )


def is_genuine(request: TuneRequest) -> bool:
    """Whether a request names the node and the bucket that it holds.

    Of another host's request: else its kernel would be stored here under the name of a node of this host's scripts.
    """
    try:
        form = form_of_request(request.node)
    except (FusionError, ValueError, TypeError, KeyError):
        return False
    named = request.key.fusion_id
    digest = form.fusion_id if isinstance(form, StepForm) else hashlib.sha256(form.text().encode()).hexdigest()
    return len(named) >= ID_DIGITS and digest.startswith(named) and request.bucket.label == request.key.bucket


def _why_again(old: OldDecision) -> str:
    """Why a sure decision is raced again, in words."""
    if old.drift != 1.0:
        return f"because calls have {old.drift:.2f} times the sizes"
    if old.decision.raced_threads:
        return "because others used the cores"
    return f"after {old.age_seconds / DAY_SECONDS:.0f} days"


def _with_words(decision: Decision, words: str) -> Decision:
    return replace(decision, detail=f"{words}; {decision.detail}"[:DETAIL_CHARACTERS])


def part_request(
    request: TuneRequest, form: NodeForm, part: NodeForm, printer: str, sizes: Sequence[Dim]
) -> TuneRequest:
    """The request of a part, whose bucket and shapes follow from the node's by the part's ``sizes``."""

    def at(values: Sequence[int]) -> tuple[int, ...]:
        named = dict(zip(form.symbols, values, strict=True))
        return tuple(evaluate(size, named) for size in sizes)

    # Sizes grow with the symbols, so the ends of the node's ranges give the ends of the part's ranges.
    ends = zip(at([r[0] for r in request.bucket.ranges]), at([r[1] for r in request.bucket.ranges]), strict=True)
    bucket = Bucket(tuple(ends))
    calls: dict[tuple[int, ...], int] = {}
    for shape in request.shapes:
        values = at(shape.symbol_values)
        calls[values] = calls.get(values, 0) + shape.calls
    key = replace(request.key, fusion_id=kernel_id(part, printer), bucket=bucket.label)
    shapes = tuple(ObservedShape(values, n) for values, n in sorted(calls.items(), key=lambda i: -i[1]))
    return replace(request, key=key, node=part.to_json(), bucket=bucket, shapes=shapes)


def _may_cut(decisions: Sequence[Decision]) -> bool:
    """Whether one kernel gains so little that two might gain more, or may not be used while one of two might."""
    known = [d for d in decisions if d.reason in ("won", "no_gain", "below_margin", "undecided", "not_bit_equal")]
    return bool(known) and (known[0].reason == "not_bit_equal" or known[0].speedup < CUT_BELOW)


def parts_lost(outcome: Outcome) -> bool:
    """Whether the group's kernels, with aten's matmuls between them (PARTS), are certainly slower than eager."""
    parts = [m for m in outcome.measurements if dict(m.candidate.config).get(STRATEGY) == PARTS]
    return any(m.speedup_high is not None and m.speedup_high < 1.0 for m in parts)


def _strategies_detail(decision: Decision, outcome: Outcome, strategies: Sequence[Strategy]) -> str:
    """The text of a decision among strategies, with the speedup of each other one."""
    gains = {str(dict(m.candidate.config)[STRATEGY]): m.speedup for m in outcome.measurements if m.speedup is not None}
    chosen = dict(decision.candidate.config).get(STRATEGY)
    others = sorted(((name, gain) for name, gain in gains.items() if name != chosen), key=lambda item: -item[1])
    seen = ", ".join(f"{name} {gain:.2f}x" for name, gain in others)
    words = next((strategy.detail for strategy in strategies if strategy.name == chosen), "")
    first = f"{chosen} {gains[chosen]:.2f}x" if chosen in gains else ""
    compared = "; ".join(part for part in (first, f"the others: {seen}" if seen else "") if part)
    return "; ".join(part for part in (words, compared, decision.detail) if part)


def _with_cuts(whole: Outcome, cut: Outcome) -> Outcome:
    """The decision for one kernel, or for the cut into two where one has won; all measurements are kept."""
    merged = Outcome(list(whole.decisions), [*whole.measurements, *cut.measurements], list(whole.kernels))
    first = cut.decisions[0]
    chosen = dict(first.candidate.config).get(STRATEGY)
    if first.reason == "won" and chosen != WHOLE:
        merged.kernels += cut.kernels
        merged.decisions = [first]
    else:
        merged.decisions[0] = replace(merged.decisions[0], detail=f"{merged.decisions[0].detail}; cuts: {first.detail}")
    return merged
