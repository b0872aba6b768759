"""The script's side of optimizer steps: each step runs the winner of its tuning.

In: a call of a functional optimizer of torch, one per parameter group, from `optim_hook`. Out: the same update, by the
winner. Guarantee: states are torch's own, so ``state_dict`` is unchanged. Calls that kernels cannot run (sparse or
complex tensors, tensor learning rates, gradient scalers, tensors with different layouts or devices) go to torch
unchanged, and so does everything after a failure. Ranks of a job change to a winner at the same step, or never. Version
counters move as torch moves them. CUDA graph capture records torch's own functions.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from autofuse.gpu.capturing import is_capturing
from autofuse.gpu.devices import CPU
from autofuse.ir.records import EAGER, Bucket, Decision, DecisionKey, Event, NodeUse, ObservedShape, TuneRequest
from autofuse.ir.strict import is_strict
from autofuse.job_ranks import told_ranks
from autofuse.optim.calls import ExternCall, StepCall, make_call
from autofuse.optim.form import DTYPES, StepForm, flags_of
from autofuse.optim.tensors import NOT_MADE, look_in_c, written
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.rank_agreement import Agreement, Ranks, current_ranks, fingerprint
from autofuse.runtime.run_context import RunContext
from autofuse.wrapper.native_library import Runner

STATIC = Bucket(())
DEVICES = ("cpu", "cuda")
# Groups that are kept. New tensors make a new group, and some scripts make new tensors again and again. Others step
# each tensor by itself, as soon as it has its gradient: they alternate between hundreds of groups.
MOST_GROUPS = 4096
STEPS_BEFORE_TUNING = {"wait": 1, "background": 3, "after": 2}  # steps of a group: the first makes its states
# Arguments that torch treats apart from plain steps.
UNUSUAL = ("has_complex", "has_sparse_grad", "capturable", "differentiable", "grad_scale", "found_inf")


class Group:
    """One parameter group, while its steps are alike."""

    def __init__(self, form: StepForm, device: torch.device, number: int) -> None:
        """``number``: of earlier groups of this form."""
        self.form = form
        self.device = device
        self.number = number
        self.steps = 0
        self.fused_steps = 0
        self.is_broken = False
        self.is_posted = False
        self.is_settled = False  # ``wait`` mode: the script need not pause for it again
        self.decision: Decision | None = None
        self.call: StepCall | None = None
        self.ready: tuple[Decision, StepCall] | None = None  # a winner that other ranks may not have yet
        self.agreement: Agreement | None = None


class OptimizerRouter:
    """All optimizer steps of a process."""

    def __init__(
        self, context: RunContext, kernels: DeviceKernels, wait_for: Callable[[list[TuneRequest]], None]
    ) -> None:
        """``wait_for(requests)`` pauses the script until these are tuned."""
        self._context = context
        self._kernels = kernels
        self._wait_for = wait_for
        self.groups: dict[tuple[Any, ...], Group] = {}
        self._let_go: dict[StepForm, tuple[int, int]] = {}  # steps, and fused steps, of evicted groups
        self._made: Counter[StepForm] = Counter()  # groups so far: by it ranks know each other's groups
        self._ranks: Ranks | None = None
        self._has_told = False  # that the ranks of this job cannot agree

    @staticmethod
    def look_in_c(runner: Runner) -> None:
        """Look at the tensors of steps in C from now on."""
        look_in_c(runner.look)

    def step(self, algorithm: str, original: Callable[..., None], arguments: dict[str, Any]) -> bool:
        """Make the step; False where torch must make it."""
        try:
            group = self.group_of(algorithm, arguments)
        except Exception as error:
            self._context.report_fallback("optimizer_unknown", "an optimizer's step stays torch's own", error)
            return False
        return group is not None and self._step(group, original, arguments)

    # ---- one step ------------------------------------------------------------------------------------

    def group_of(self, algorithm: str, arguments: Mapping[str, Any]) -> Group | None:
        """The group of these arguments; None for a step that is left to torch."""
        params = arguments["params"]
        if not params or any(_is_given(arguments.get(name)) for name in UNUSUAL):
            return None
        flags = flags_of({k: v for k, v in arguments.items() if not isinstance(v, torch.Tensor)})
        asked = next((name for name in ("foreach", "fused") if arguments.get(name)), "")
        # Threads that train one model have gradients of their own, so they need tables of their own.
        ends = params[0].data_ptr(), params[-1].data_ptr()
        key = (algorithm, flags, asked, len(params), ends, threading.get_ident())
        group = self.groups.get(key)
        if group is None:
            device = params[0].device
            if device.type not in DEVICES:
                return None
            dtype = str(params[0].dtype).removeprefix("torch.")
            if dtype not in DTYPES:
                return None
            steps = arguments.get("state_steps") or ()
            counters = "device" if any(t.device.type != "cpu" for t in steps) else "host"
            sizes = tuple(p.numel() for p in params)
            form = StepForm(algorithm, flags, dtype, sizes, asked, device.type, counters)
            self._kernels.use_device(device)
            known = next((g for g in self.groups.values() if g.form == form and g.device == device), None)
            if len(self.groups) >= MOST_GROUPS:
                self._let_oldest_go()
            group = self.groups[key] = Group(form, device, self._made[form])
            self._made[form] += 1
            if any(p.device != device for p in params):
                self._leave(group, f"expected all parameters on {device}, found some elsewhere")
            if known is not None:
                group.is_posted, group.is_settled = known.is_posted, known.is_settled
        return group

    def _let_oldest_go(self) -> None:
        oldest = self.groups.pop(next(iter(self.groups)))
        steps, fused = self._let_go.get(oldest.form, (0, 0))
        self._let_go[oldest.form] = steps + oldest.steps, fused + oldest.fused_steps

    def _step(self, group: Group, original: Callable[..., None], arguments: dict[str, Any]) -> bool:
        """Whether the step was made."""
        group.steps += 1
        if group.is_broken:
            return False
        if group.device != CPU and is_capturing():
            return False
        try:
            if group.decision is None:
                self._look_up(group, original, arguments)
            call = group.call
            if call is None:
                return False
            problem = call.pack(arguments, self._kernels.threads)
            if problem is not None:
                if problem != NOT_MADE:
                    self._leave(group, problem)
                return False
            if not isinstance(call, ExternCall):
                call.run()  # an exception of it comes before anything is written
        except Exception as error:
            group.is_broken = True
            self._context.report_fallback("optimizer_failed", f"{group.form.label} stays torch's own", error)
            return False
        if isinstance(call, ExternCall):
            call.run()  # exceptions of torch's own function, and its partial writes, are torch's as usual
        # torch's own fused kernels on a CPU move no version counters either (2.13).
        torch.autograd.graph.increment_version(written(group.form, arguments))
        group.fused_steps += 1
        return True

    def _leave(self, group: Group, problem: str) -> None:
        """Leave the group to torch for good; this is no failure, torch's step is the default."""
        group.is_broken = True
        event = Event("optimizer_left", f"{group.form.label} stays torch's own: {problem}")
        self._context.store_thread.post_event(event)

    def _look_up(self, group: Group, original: Callable[..., None], arguments: Mapping[str, Any]) -> None:
        """Find the group's winner, and take it once all ranks of the job can."""
        if group.ready is None:
            decision = self._decision(group)
            if decision is not None and decision.candidate.variant == EAGER and decision.compile_key is None:
                group.decision = decision
                return
            call = self._make_call(group, original, decision) if decision is not None else None
            group.ready = (decision, call) if decision is not None and call is not None else None
        self._ranks = self._ranks or current_ranks()
        if self._ranks is not None:
            group.agreement = group.agreement or Agreement(self._ranks, f"{group.form.fusion_id}/{group.number}")
            ready = _name(group.ready[0]) if group.ready is not None else ""
            held = [*arguments["params"], *(arguments.get("state_steps") or ())]
            if not group.agreement.is_due(group.steps, ready, lambda: fingerprint(held)):
                return
        elif group.ready is not None and self._cannot_agree():
            return
        if group.ready is not None:
            group.decision, group.call = group.ready

    def _cannot_agree(self) -> bool:
        """Whether other ranks step replicas of their own, and there is no store by which all could change at one step.

        Strict runs need none: their kernels' results are torch's to the bit.
        """
        told = None if is_strict(self._context.versions) else told_ranks()
        if told is not None and not self._has_told:
            self._has_told = True
            text = (
                f"optimizers' steps stay torch's own: {told.variable} tells of {told.size} ranks, and without a "
                "process group of torch.distributed they cannot agree on a step at which to change"
            )
            self._context.store_thread.post_event(Event("optimizer_left", text))
        return told is not None

    def _decision(self, group: Group) -> Decision | None:
        table, fusion_id = self._kernels.catalogue.table, group.form.fusion_id
        place = self._kernels.catalogue.backends.place(group.device)
        if place is None:
            return None
        decision = table.find(fusion_id, (), place)
        if decision is None:
            self._wait(group)
            decision = table.find(fusion_id, (), place)
        return decision

    def _make_call(self, group: Group, original: Callable[..., None], decision: Decision) -> StepCall | None:
        """None while the kernel has not been read yet."""
        if decision.compile_key is None:
            return ExternCall(group.form, original, decision.candidate.variant, group.device)
        entry = self._kernels.catalogue.shelf.entry(decision.compile_key, group.device)
        return make_call(group.form, entry, group.device) if entry is not None else None

    def _wait(self, group: Group) -> None:
        if self._context.mode == "wait" and not group.is_settled and group.steps > STEPS_BEFORE_TUNING["wait"]:
            group.is_settled = True
            self._wait_for(self.requests())

    # ---- requests and reports ----------------------------------------------------------------------------

    def requests(self) -> list[TuneRequest]:
        """Hot steps without a decision that have not been requested."""
        context, kernels = self._context, self._kernels
        found: dict[str, TuneRequest] = {}
        for group in list(self.groups.values()):
            place = kernels.tunable(group.device)
            hot = group.steps >= STEPS_BEFORE_TUNING.get(context.mode, 1)
            if place is None or group.is_broken or group.is_posted or not hot:
                continue
            if kernels.catalogue.table.find(group.form.fusion_id, (), place) is not None:
                continue
            group.is_posted = True
            form = group.form
            key = DecisionKey(form.fusion_id, STATIC.label, place.key, place.threads, context.versions)
            found[key.digest] = TuneRequest(
                key=key,
                node=form.node(),
                bucket=STATIC,
                shapes=(ObservedShape((), group.steps),),
                calls=group.steps,
                unfused_us=20.0 * len(form.sizes),
                estimated_speedup=2.0,
                run_id=context.store_thread.run_id,
            )
        return list(found.values())

    def uses(self) -> list[NodeUse]:
        """How the steps were used, for the report."""
        sums: dict[StepForm, tuple[int, int]] = dict(self._let_go)
        for group in list(self.groups.values()):
            steps, fused = sums.get(group.form, (0, 0))
            sums[group.form] = steps + group.steps, fused + group.fused_steps
        return [
            NodeUse(
                form.fusion_id, form.node(), form.label, form.operations, STATIC, steps, fused, 0.0, 0.0,
                (ObservedShape((), steps),),
            )
            for form, (steps, fused) in sums.items()
        ]  # fmt: skip


def _name(decision: Decision) -> str:
    """What ranks call a winner. A variant of torch's own is compiled for several processors, so it needs theirs."""
    return decision.compile_key or f"{decision.candidate.variant} on {decision.key.device}"


def _is_given(value: Any) -> bool:
    """Whether an argument is given. Not by comparison: ``found_inf`` is a tensor, and a tensor of 0 equals False."""
    return value is not None and value is not False
