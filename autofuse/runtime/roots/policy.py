"""When to capture a root, by its observed calls, the findings of earlier runs, and the budget.

In: the observed calls of a root. Out: advice, with its reason and the expected cost of a capture. The rule is
`observer.capture_policy.advise_capture`; this module collects its facts, and the root acts on the advice.
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
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.step_clock import Account
from autofuse.runtime.roots.traits import traits_of

# After so many calls of a single shape, a waiting run assumes that it is the only one.
CALLS_OF_ONE_SHAPE = 3
# After so many calls in which no further dim has varied, it assumes to know all that vary. Of scripts that draw a batch
# and a length from five sizes each, a third have varied only one of them by the call in which the first one varies.
CALLS_WITHOUT_NEWS = 3
LOST = ("slower_than_eager", "no_gain")  # reasons that later runs use
BY_SIZE = ("too_small", UNTUNED, *LOST)  # reasons that do not hold for much larger calls
_FIRST_CALLS, _MORE = 32, 1.02  # advice is requested at each of these calls, then after so many times the time spent,
_ADVICE_SHARE = 1e-3  # but only once it takes no more than this share of that time
KNOWN_REACH = 16  # a call up to so many times as large counts as known from an earlier run


class RootPolicy:
    """Facts about a root before it is captured."""

    def __init__(self, services: RootServices, key: str, account: Account, verdicts: ReleasePolicy) -> None:
        self._traits: RootTraits | None = None
        self.model_seconds = 0.0  # the expected time of its capture on the reference machine
        self.predicted_seconds = 0.0
        self._factor = 1.0  # the slowness factor of captures at the last advice
        self.trace_bytes = 0  # of traces of earlier runs, 0 without any
        self._has_looked_back = False  # findings of earlier runs have been read
        self._services = services
        self._context = services.context
        self._clock = services.tools.clock
        self._key = key
        self._account = account
        self._verdicts = verdicts
        self._varying: tuple[tuple[str, int], ...] = ()  # dims
        self._last_news = 0  # the observed call in which the last of them first had another size
        self._seen: object = None  # when the traits were last computed
        self.observed_calls = 0  # since the root was opened
        self._observed_elements = deque[int](maxlen=16)  # of the last of them
        self._is_reopened = False  # for unknown sizes
        self._spent_before = 0.0  # in eager, when it was opened
        self._spent_at_advice = 0.0  # in eager since then, at the last advice
        self._is_due_again = False
        self._took = deque[float](maxlen=9)  # seconds, to find advice

    @property
    def is_asked(self) -> bool:
        """Whether the user has requested captures whatever they cost."""
        settings = self._context.settings
        return self._context.mode == "wait" or settings.run.is_frozen or settings.capture.at_once

    @property
    def last_elements(self) -> int:
        """How large the last observed call was."""
        return self._observed_elements[-1]

    def observe(self, elements: int) -> None:
        self.observed_calls += 1
        self._observed_elements.append(elements)

    def is_due(self) -> bool:
        """Whether to request advice: at each of the first calls, then after more time was spent. Advice takes 100 us.

        Then at two consecutive calls: time is added at the end of a call, so the first of them always follows a long
        call.
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
        """Start again for new sizes: they must pay for a capture of their own, as those of a new root."""
        self._is_reopened = True
        self._spent_before = self._account.ledger.eager_seconds
        self._spent_at_advice = 0.0
        self.observed_calls = 0
        self._observed_elements.clear()

    def reach(self, is_small: bool) -> int:
        """The largest calls, in elements, to which a refusal for their size applies."""
        known = self._services.known.get(self._key)
        # A store of an older version does not have the sizes of its calls.
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
        """``typical``: seconds of a call; ``known``: findings of earlier runs for calls like the present one."""
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
            # Soon, but not at the first call: a trace of one shape would be thrown away at the next shape.
            at_once=context.mode == "wait",
            min_calls=self._find_min_calls(),
            uses_known=context.settings.run.is_frozen,
            min_root_us=capture.min_root_us if torch.is_grad_enabled() else smallest_inference,
            max_seconds=capture.max_seconds,
            max_failures=capture.max_failures,
        )

    def _find_min_calls(self) -> int:
        """Finished calls after which the varying dims are assumed to be known."""
        varying = self._services.observer.dynamic_dims(self._key)
        if varying != self._varying:
            self._varying, self._last_news = varying, self.observed_calls
        return self._last_news - 1 + CALLS_WITHOUT_NEWS if varying else CALLS_OF_ONE_SHAPE

    def _look_back(self, module: Target) -> None:
        """Look up the findings of earlier runs, which are read while the script imports; until then we observe."""
        self._has_looked_back = True
        context, began = self._context, self._clock()
        context.store_thread.wait_ready(2.0)
        self.trace_bytes = context.trace_bytes(self._key) if isinstance(module, torch.nn.Module) else 0
        self._account.ledger.lose("imports", self._clock() - began)

    def _find_model_seconds(self, module: Target) -> None:
        capture = self._context.settings.capture
        observer = self._services.observer
        is_first = "autofuse.pipeline" not in sys.modules  # it is loaded with a process's first graph
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
        """The time of its capture in an earlier run, or the remaining part where its graphs or its trace are kept."""
        if self.trace_bytes:
            # The time to make a trace does not tell the time to read one.
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
        """Findings of earlier runs for calls like the present one."""
        known = None if self._is_reopened else self._services.known.get(self._key)
        if known is None or known.state != "eager" or known.reason not in LOST or not known.judged_elements:
            return known
        self._verdicts.lose_up_to(known.judged_elements)
        if self._verdicts.is_lost(self.last_elements):
            return known
        self._is_reopened = True
        return None
