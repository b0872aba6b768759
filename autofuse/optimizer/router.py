"""The script's side of optimizer steps: torch's functional optimizers, each replaced by one that asks what has won.

In: the calls that ``Optimizer.step`` makes, one for each parameter group. Out: the same update, by the winner.
Guarantee: states are torch's own, so ``state_dict`` is what it always was; what a kernel may not have (sparse, complex,
tensor learning rates, gradient scalers, tensors laid out unlike each other) goes to torch as the script called it, and
so does everything after a failure; version counters move as torch moves them.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from autofuse.ir.records import EAGER, Bucket, Decision, DecisionKey, Event, NodeUse, ObservedShape, TuneRequest
from autofuse.optimizer.form import ALGORITHMS, DTYPES, StepForm, flags_of
from autofuse.optimizer.tensors import NOT_MADE, Table, with_variant, written
from autofuse.runtime.backends import CPU
from autofuse.runtime.launch import Entry

if TYPE_CHECKING:
    from autofuse.runtime.session import Session

STATIC = Bucket(())
STEPS_BEFORE_TUNING = {"wait": 1, "background": 3, "after": 2}  # of a group: the first makes its states
# Arguments that torch treats apart from plain steps.
UNUSUAL = ("has_complex", "has_sparse_grad", "capturable", "differentiable", "grad_scale", "found_inf")


class Group:
    """One parameter group, as far as its steps are alike."""

    def __init__(self, form: StepForm) -> None:
        self.form = form
        self.steps = 0
        self.fused_steps = 0
        self.is_broken = False
        self.is_posted = False
        self.is_settled = False  # in ``wait`` mode: the script need not pause for it again
        self.decision: Decision | None = None
        self.entry: Entry | None = None
        self.table = Table(form)


class OptimizerRouter:
    """All optimizer steps of a process."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._originals: dict[str, Callable[..., None]] = {}
        self._groups: dict[tuple[Any, ...], Group] = {}

    def install(self) -> None:
        """Stand in for torch's functions; what cannot be replaced stays as it is."""
        for name in ALGORITHMS:
            module = importlib.import_module(f"torch.optim.{name}")
            original = getattr(module, name, None)
            if original is None or not {"params"} <= set(inspect.signature(original).parameters):
                continue
            self._originals[name] = original
            setattr(module, name, self._replacement(name, original))

    def uninstall(self) -> None:
        for name, original in self._originals.items():
            setattr(importlib.import_module(f"torch.optim.{name}"), name, original)
        self._originals = {}

    def _replacement(self, algorithm: str, original: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(original)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling():
                return original(*args, **kwargs)
            try:
                bound = signature.bind(*args, **kwargs)
                bound.apply_defaults()
                group = self._group(algorithm, bound.arguments)
            except Exception as error:
                self._session.report_fallback("optimizer_unknown", "an optimizer's step stays torch's own", error)
                group = None
            if group is None or not self._step(group, original, bound.arguments):
                original(*args, **kwargs)

        return step

    # ---- one step ------------------------------------------------------------------------------------

    def _group(self, algorithm: str, arguments: Mapping[str, Any]) -> Group | None:
        """The group that these arguments belong to, None for what is left to torch."""
        params = arguments["params"]
        if not params or any(_is_given(arguments.get(name)) for name in UNUSUAL):
            return None
        flags = flags_of({k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)})
        asked = next((name for name in ("foreach", "fused") if arguments.get(name)), "")
        # Threads that train one model have gradients of their own, so they need tables of their own.
        ends = params[0].data_ptr(), params[-1].data_ptr()
        key = (algorithm, flags, asked, len(params), ends, threading.get_ident())
        group = self._groups.get(key)
        if group is None:
            if params[0].device.type != "cpu":
                return None
            dtype = str(params[0].dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                return None
            form = StepForm(algorithm, flags, dtype, tuple(p.numel() for p in params), asked)
            known = next((g for g in self._groups.values() if g.form == form), None)
            group = self._groups[key] = Group(form)
            if known is not None:
                group.is_posted, group.is_settled = known.is_posted, known.is_settled
        return group

    def _step(self, group: Group, original: Callable[..., None], arguments: dict[str, Any]) -> bool:
        """Whether the step was made."""
        group.steps += 1
        if group.is_broken:
            return False
        try:
            if group.decision is None:
                self._look_up(group)
            decision = group.decision
            if decision is None or decision.candidate.variant == EAGER:
                return False
            problem = group.table.pack(arguments, self._session.threads)
            if problem is not None:
                if problem != NOT_MADE:
                    group.is_broken = True
                    event = Event("optimizer_left", f"{group.form.label} stays torch's own: {problem}")
                    self._session.backstage.post_event(event)  # no trouble: such a step is torch's to begin with
                return False
            if decision.compile_key is not None and not callable(group.entry):
                return False
        except Exception as error:
            group.is_broken = True
            self._session.report_fallback("optimizer_failed", f"{group.form.label} stays torch's own", error)
            return False
        # From here on nothing may go on in eager: what has begun would be done twice.
        if decision.compile_key is None:
            original(**with_variant(group.form, arguments, decision.candidate.variant))
        else:
            group.entry(*group.table.addresses)  # type: ignore[operator,misc]
        # torch's own fused kernels on a CPU move no version counters either (2.13).
        torch.autograd.graph.increment_version(written(group.form, arguments))
        group.fused_steps += 1
        return True

    def _look_up(self, group: Group) -> None:
        session = self._session
        place = session.backends.place(CPU)
        if place is None:
            return
        decision = session.table.find(group.form.fusion_id, (), place)
        if decision is None:
            self._wait(group)
            decision = session.table.find(group.form.fusion_id, (), place)
        if decision is None:
            return
        if decision.compile_key is not None:
            group.entry = session.shelf.entry(decision.compile_key, CPU)
            if group.entry is None:
                return  # not read yet
        group.decision = decision

    def _wait(self, group: Group) -> None:
        session = self._session
        if session.mode == "wait" and not group.is_settled and group.steps > STEPS_BEFORE_TUNING["wait"]:
            group.is_settled = True
            session.tuning.wait_for(self.requests())

    # ---- what is asked and told --------------------------------------------------------------------------

    def requests(self) -> list[TuneRequest]:
        """Steps that nobody has decided on and nobody has asked about, as far as they are hot."""
        session = self._session
        place = session.tunable(CPU)
        if place is None:
            return []
        found: dict[str, TuneRequest] = {}
        for group in list(self._groups.values()):
            hot = group.steps >= STEPS_BEFORE_TUNING.get(session.mode, 1)
            if group.is_posted or not hot or session.table.find(group.form.fusion_id, (), place) is not None:
                continue
            group.is_posted = True
            form = group.form
            key = DecisionKey(form.fusion_id, STATIC.label, place.key, place.threads, session.versions)
            found[key.digest] = TuneRequest(
                key=key,
                node=form.node(),
                bucket=STATIC,
                shapes=(ObservedShape((), group.steps),),
                calls=group.steps,
                unfused_us=20.0 * len(form.sizes),
                estimated_speedup=2.0,
                run_id=session.backstage.run_id,
            )
        return list(found.values())

    def uses(self) -> list[NodeUse]:
        """How the steps were used, for the report."""
        sums: dict[StepForm, tuple[int, int]] = {}
        for group in list(self._groups.values()):
            steps, fused = sums.get(group.form, (0, 0))
            sums[group.form] = steps + group.steps, fused + group.fused_steps
        return [
            NodeUse(
                form.fusion_id, form.node(), form.label, form.operations, STATIC, steps, fused, 0.0, 0.0,
                (ObservedShape((), steps),),
            )
            for form, (steps, fused) in sums.items()
        ]  # fmt: skip


def _is_given(value: Any) -> bool:
    """Not by comparison: ``found_inf`` is a tensor, and one of 0 equals False."""
    return value is not None and value is not False
