"""The states of a root, and its transitions.

In: the findings of its other parts. Out: its state with a reason code and a readable detail; messages to the observer
and the user. Guarantee: every change of state is one of the methods below, and none of them runs a call.

=========  =========  ==============  ================================================================================
from       to         by              why
=========  =========  ==============  ================================================================================
observing  captured   `capture`       it pays, or was asked for
observing  eager      `decline`       advice that is final, for all calls or for those of some sizes
observing  eager      `keep_equal`    ranks that compute the same values must not differ
captured   eager      `lose`          steps of all sizes lost to held-out ones
captured   eager      `release`       what was traced is no more what it was
captured   eager      `find_nothing`  no part of it could be traced
any        eager      `fail`          it could not be captured
any        eager      `give_up`       bookkeeping of ours has failed
captured   observing  `reopen`        no trace of an earlier run fits
eager      observing  `reopen_sizes`  a call of a size that nothing is known of
=========  =========  ==============  ================================================================================
"""

from __future__ import annotations

import contextlib
from typing import Literal

from autofuse.debug import Level, tell
from autofuse.ir.reasons import RootReason, in_words, words_of
from autofuse.observer.capture_policy import UNTUNED, CaptureAdvice
from autofuse.observer.release_policy import Loss
from autofuse.observer.root_tracker import Target
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.services import RootServices
from autofuse.runtime.roots.untimed import UntimedCalls
from autofuse.runtime.roots.unwatched import CountedCalls

State = Literal["observing", "captured", "eager"]


class RootLife:
    """Of one root. Calls read ``state``; only the methods change it."""

    def __init__(
        self, services: RootServices, name: str, trial: GraphTrial, unwatched: CountedCalls, untimed: UntimedCalls
    ) -> None:
        self.state: State = "observing"
        self.reason, self.detail = "not_yet", ""
        self.failures = 0  # captures that failed
        self._services = services
        self._context = services.context
        self._key = trial.key
        self._name = name
        self._trial = trial
        self._unwatched = unwatched
        self._untimed = untimed
        self._decided: tuple[str, str] | None = None  # why it was left in eager before; valid until it is captured

    def _move(self, state: State, reason: str | None = None, detail: str = "") -> None:
        """``reason``, ``detail``: None keeps those that the last advice has set."""
        before, self.state = self.state, state
        if reason is not None:
            self.reason, self.detail = reason, detail
        self._trial.is_on = state == "captured"
        self._unwatched.stop()
        tell(Level.ROUTES, lambda: f"{self._name}: {before}, now {state}: {self._why()}")

    def _why(self) -> str:
        words = in_words(self.reason, words_of(RootReason))
        return f"{words} ({self.detail})" if self.detail else words

    # ---- observed --------------------------------------------------------------------------------------

    def note(self, advice: CaptureAdvice) -> None:
        """Note why it is not captured yet, or is about to be."""
        self.reason, self.detail = advice.reason, advice.detail

    def await_kernels(self) -> None:
        """Keep observing: there is no kernel that a graph could run."""
        self.reason = "nothing_to_run"
        self.detail = "no kernel is stored for this device, and none can be made for it"

    def reopen(self) -> None:
        """Observe again: it was captured for a trace of an earlier run, but none fits, and tracing costs more."""
        self._move("observing", "not_yet", "no trace of an earlier run fits")
        self._services.observer.reopen(self._key)

    def reopen_sizes(self) -> None:
        """Observe again, for new sizes. Until it is captured, later runs read what is known of the other sizes."""
        self._decided = self._decided or (self.reason, self.detail)
        self._move("observing", "not_yet")
        self._services.observer.reopen(self._key)

    # ---- captured --------------------------------------------------------------------------------------

    def capture(self) -> None:
        """From now on, calls run the trace."""
        self._move("captured")
        self._decided = None
        self._services.observer.decide(self._key)

    # ---- in eager --------------------------------------------------------------------------------------

    def decline(self) -> None:
        """Stay in eager, as the last advice says."""
        self._move("eager")
        self._services.observer.decide(self._key)

    def keep_equal(self) -> None:
        """Stay in eager: other ranks compute the same values, and may not run the same kernels at the same step."""
        self._move("eager", "several_ranks", "")
        self._services.observer.decide(self._key)

    def lose(self, loss: Loss, elements: int, is_all: bool) -> None:
        """Captured steps lose to held-out ones at calls of about so many elements; ``is_all``: at all sizes."""
        detail = f"captured steps take {1 / loss.gain:.2f}x of eager's"
        if is_all:
            # The loss of an untuned graph tells nothing about the tuned graph: the next run may capture it again.
            self._move("eager", UNTUNED if self._services.tuning.has_open() else loss.reason, detail)
        else:
            self.detail = f"calls of about {elements} elements stay in eager: {detail}"
            tell(Level.ROUTES, lambda: f"{self._name}: {self.detail}")

    def release(self, detail: str) -> None:
        """Run its modules in eager from now on: the traced code or objects have changed."""
        self._move("eager", "code_replaced", detail)
        self._context.say_once("code_replaced", f"{self._name} goes on in eager: {detail}")

    def find_nothing(self, detail: str) -> None:
        """Stay in eager: Dynamo has made no graph of it, and calls through Dynamo cost more than eager's.

        ``detail``: what breaks its graphs.
        """
        self._move("eager", "no_graph", detail)
        self._services.observer.decide(self._key)

    def fail(self, error: BaseException, from_kept: bool) -> None:
        """``from_kept``: graphs of an earlier run failed; they are dropped, and the next run traces again."""
        error = getattr(error, "inner_exception", None) or error  # Dynamo's own message says little
        self.failures += 1
        text = f"{type(error).__name__}: {str(error).strip().splitlines()[0][:300] if str(error) else ''}"
        self._move("eager", "kept_graph_failed" if from_kept else "capture_failed", text)
        if from_kept and (kept := self._context.notes_folder) is not None:
            kept.prune(0)
        self._services.observer.decide(self._key)
        self._context.report_fallback("capture_failed", f"{self._name} stays eager: it could not be captured", error)

    def give_up(self, module: Target, error: BaseException) -> None:
        """Release the module: autofuse's own bookkeeping has failed."""
        with contextlib.suppress(Exception):
            self._move("eager", "bookkeeping_failed", f"{type(error).__name__}: {error}"[:300])
            self._untimed.stop()
            if self._services.tracker.is_installed:
                self._services.tracker.release(module).is_final = True
            self._context.report_fallback(
                "bookkeeping_failed", f"{self._name} stays eager: autofuse failed to watch it", error
            )
            self._services.observer.decide(self._key)

    # ---- for later runs --------------------------------------------------------------------------------

    def told(self) -> tuple[State, str, str]:
        """State, reason and detail for the root's record."""
        if self.state == "captured":
            if self._trial.is_resting:
                return "eager", UNTUNED, "captured steps are slower as long as kernels are still to be tuned"
        elif self._decided is not None:  # unknown sizes do not invalidate what is known of other sizes
            return "eager", *self._decided
        return self.state, self.reason, self.detail
