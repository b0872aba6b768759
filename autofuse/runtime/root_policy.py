"""When a root is captured: what its observed calls say, what earlier runs found out, what the budget allows.

In: the observed calls of a root. Out: advice, with its reason and what a capture is expected to cost. The rule is
`observer.capture_policy.advise_capture`, here is what it goes by; the root acts.
"""

from __future__ import annotations

import statistics
import sys
from collections import deque

import torch

from autofuse.ir.records import RootRecord
from autofuse.observer.capture_cost import DYNAMO_SECONDS, KEPT_SHARE, RootTraits, kept_trace_seconds, model_seconds
from autofuse.observer.capture_policy import UNTUNED, CaptureAdvice, CaptureFacts, advise_capture
from autofuse.observer.release_policy import ReleasePolicy
from autofuse.observer.root_tracker import Target
from autofuse.runtime.root_services import RootServices
from autofuse.runtime.root_traits import traits_of
from autofuse.runtime.step_clock import Account

# After so many calls of one and the same shape, a waiting run takes it for the only one.
CALLS_OF_ONE_SHAPE = 3
LOST = ("slower_than_eager", "no_gain")  # reasons that later runs go by
BY_SIZE = ("too_small", UNTUNED, *LOST)  # reasons that say nothing of much larger calls
_FIRST_CALLS, _MORE = 32, 1.02  # advice is asked for at each of these, then when so many times the time was spent,
_ADVICE_SHARE = 1e-3  # and not before it takes no more of that than this
KNOWN_REACH = 16  # so many times as large a call is taken for one that an earlier run knew


class RootPolicy:
    """What is known of a root before it is captured."""

    def __init__(self, services: RootServices, key: str, account: Account, verdicts: ReleasePolicy) -> None:
        self._traits: RootTraits | None = None
        self.model_seconds = 0.0  # what its capture is expected to take on a machine of the usual speed
        self.predicted_seconds = 0.0
        self._factor = 1.0  # how slow captures were thought to be when the last one was weighed
        self.trace_bytes = 0  # of what an earlier run has traced, 0 for nothing
        self._has_looked_back = False  # what earlier runs have left is known
        self._services = services
        self._context = services.context
        self._clock = services.tools.clock
        self._key = key
        self._account = account
        self._verdicts = verdicts
        self._seen: object = None  # when the traits were looked for last
        self.observed_calls = 0  # since the root was opened
        self._observed_elements = deque[int](maxlen=16)  # of the last of them
        self._is_reopened = False  # for sizes that nothing was known of
        self._spent_before = 0.0  # in eager, when it was opened
        self._spent_at_advice = 0.0  # in eager since then, when advice was asked for last
        self._is_due_again = False
        self._took = deque[float](maxlen=9)  # seconds, to find advice

    @property
    def is_asked(self) -> bool:
        """Whether the person wants captures whatever they cost."""
        settings = self._context.settings
        return self._context.mode == "wait" or settings.run.frozen or settings.capture.at_once

    @property
    def last_elements(self) -> int:
        """How large the last observed call was."""
        return self._observed_elements[-1]

    def observe(self, elements: int) -> None:
        self.observed_calls += 1
        self._observed_elements.append(elements)

    def is_due(self) -> bool:
        """Whether to ask for advice: at each of the first calls, then where more time was spent. It takes 100 us.

        At two calls then: time is added when a call has ended, so the first is always the one after a long one.
        """
        spent = self._account.ledger.eager_seconds - self._spent_before
        pause = 2.0 * statistics.median(self._took) / _ADVICE_SHARE if self._took else 0.0
        has_grown = spent >= max(_MORE * self._spent_at_advice, self._spent_at_advice + pause)
        is_due = has_grown or self._is_due_again or self.observed_calls <= _FIRST_CALLS
        self._is_due_again = has_grown
        if has_grown:
            self._spent_at_advice = spent
        return is_due

    def reopen(self) -> None:
        """All that is known is of other sizes: these pay for a capture of their own, as those of a new root do."""
        self._is_reopened = True
        self._spent_before = self._account.ledger.eager_seconds
        self._spent_at_advice = 0.0
        self.observed_calls = 0
        self._observed_elements.clear()

    def reach(self, is_small: bool) -> int:
        """How large calls may be that a refusal for their size is about, in elements."""
        known = self._services.known.get(self._key)
        # A store of an older version does not tell how large the calls were that it knows of.
        times = 1 if is_small or (known is not None and known.judged_elements) else KNOWN_REACH
        return times * round(statistics.median(self._observed_elements))

    def advise(self, module: Target, failures: int) -> CaptureAdvice:
        observer = self._services.observer
        if not self._has_looked_back and (self.is_asked or self._context.store_thread.is_ready):
            self._look_back(module)
        if not self._has_looked_back:
            return CaptureAdvice(False, "not_yet", "what earlier runs have left is still being read")
        began = self._clock()
        typical = observer.typical_seconds(self._key)
        known, self._factor = self._find_known(), self._services.cost_factor()
        self._find_model_seconds(module)
        advice = advise_capture(self._facts(failures, typical, known))
        self.predicted_seconds = advice.predicted_seconds
        took = self._clock() - began
        self._took.append(took)
        observer.spend(took)
        return advice

    def _facts(self, failures: int, typical: float | None, known: RootRecord | None) -> CaptureFacts:
        """``typical``: seconds of a call; ``known``: what earlier runs found out about calls like the present one."""
        context, capture, ledger = self._context, self._context.settings.capture, self._account.ledger
        smallest_inference = min(capture.min_root_us, capture.min_inference_root_us)
        return CaptureFacts(
            spent_seconds=ledger.eager_seconds - self._spent_before,
            predicted_seconds=self.model_seconds * self._factor or None,
            budget=self._services.budget(),
            calls=self.observed_calls - 1,
            call_us=typical * 1e6 if typical is not None else None,
            step_seconds=ledger.times.busy(self.last_elements),
            run_seconds=self._clock() - context.launched,
            factor=self._factor,
            failures=failures,
            known=known,
            known_seconds=self._known_seconds(known),
            has_kept_trace=self.trace_bytes > 0,
            at_first_call=capture.at_once,
            # At once, but not blind: a first trace of one shape only would be thrown away at the next.
            at_once=context.mode == "wait",
            min_calls=1 if self._services.observer.dynamic_dims(self._key) else CALLS_OF_ONE_SHAPE,
            uses_known=context.settings.run.frozen,
            min_root_us=capture.min_root_us if torch.is_grad_enabled() else smallest_inference,
            max_seconds=capture.max_seconds,
            max_failures=capture.max_failures,
        )

    def _look_back(self, module: Target) -> None:
        """Find out what earlier runs have left. It is read while the script imports; until then calls are observed."""
        self._has_looked_back = True
        context, began = self._context, self._clock()
        context.store_thread.wait_ready(2.0)
        self.trace_bytes = context.trace_bytes(self._key) if isinstance(module, torch.nn.Module) else 0
        self._account.ledger.lose("imports", self._clock() - began)

    def _find_model_seconds(self, module: Target) -> None:
        capture = self._context.settings.capture
        observer = self._services.observer
        is_first = "autofuse.pipeline" not in sys.modules  # it comes with a process's first graph
        seen = observer.sampled_steps(self._key), observer.dynamic_dims(self._key), is_first, torch.is_grad_enabled()
        if seen == self._seen:
            return
        self._seen = seen
        self._traits = traits_of(module, observer, self._key, capture.min_blocks)
        if self._traits is not None:
            self.model_seconds = model_seconds(self._traits, capture.predicted_seconds_per_op, is_first)
        elif self._key in self._services.known:
            self.model_seconds = self._services.known[self._key].model_seconds

    def _known_seconds(self, known: RootRecord | None) -> float | None:
        """What its capture took in an earlier run, or what is left of that where its graphs or its trace are kept."""
        if self.trace_bytes:
            # Where a trace was made, it says nothing of what reading one takes.
            was_read = known is not None and known.reason == "kept_trace" and known.capture_seconds
            if known is not None and was_read:
                return known.capture_seconds
            dynamo = 0.0 if "torch._dynamo" in sys.modules else DYNAMO_SECONDS
            return self._factor * (kept_trace_seconds(self.trace_bytes) + dynamo)
        if known is None or known.state != "captured" or not known.capture_seconds:
            return None
        is_kept_now = not known.kept_graphs and self._context.graphs_folder is not None
        return known.capture_seconds * (KEPT_SHARE if is_kept_now else 1.0)

    def _find_known(self) -> RootRecord | None:
        """What earlier runs found out, where it is about calls like the present one."""
        known = None if self._is_reopened else self._services.known.get(self._key)
        if known is None or known.state != "eager" or known.reason not in LOST or not known.judged_elements:
            return known
        self._verdicts.lose_up_to(known.judged_elements)
        if self._verdicts.is_lost(self.last_elements):
            return known
        self._is_reopened = True
        return None
