"""Runs a small program under plain python and in each state that a module can be in under autofuse.

In: a function that takes a `Run` and shows what a person would see. Out: all of that: what was shown, printed, warned
of, how it ended, the random generators afterwards; and how far its modules came, for a test to hold.

``python``: no session. ``cold``: watched, never captured. ``captured``: from the first call on, on eager's kernels.
``tuned``: the same, with each kernel that can be generated in its place. ``grouped``: and products and convolutions
in another way than aten's, where there is one. ``released``: given up at the third call. ``warm``: on the trace that an
earlier run has kept.
"""

from __future__ import annotations

import contextlib
import io
import random
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import pytest
import torch
import torch._decomp.decompositions_for_jvp  # these two warn when they are imported, of whatever comes first
import torch.utils.mkldnn
from torch.nn.modules import module as all_modules

import autofuse
from autofuse.capture import dynamo
from autofuse.codegen.generator import FusionKernelGenerator
from autofuse.codegen.templates import LOOP
from autofuse.errors import AutofuseError
from autofuse.ir.operation import NodeForm
from autofuse.observer.release_policy import Loss
from autofuse.runtime.graphs.choice import Choice
from autofuse.runtime.kernels.catalogue import Catalogue
from autofuse.runtime.roots.root import Root
from autofuse.runtime.session import Session
from autofuse.sessions import start_session
from autofuse.settings.layers import load
from autofuse.strategies.enumeration import PARTS, strategies_of
from autofuse.strategies.strategy import kernel_id
from autofuse.wrapper.strategy_call import LoadedStrategy
from tests.semantics.conftest import AT_ONCE
from tests.semantics.seen import seen

Target = TypeVar("Target", bound=Callable[..., Any])
STATES = ("captured", "cold", "tuned", "grouped", "released", "warm")
CAPTURED = tuple(state for state in STATES if state != "cold")
NOT_RELEASED = tuple(state for state in CAPTURED if state != "released")
ROUNDED = ("tuned", "grouped")  # sums are reordered
# What a program's modules come to run when they are captured and tuned.
KERNELS, GRAPHS, EAGER = "kernels", "graphs", "eager"


@dataclass(frozen=True)
class Program:
    """One row of the table."""

    run: Callable[[Run], None]
    comes_to: str  # KERNELS; GRAPHS: nothing in them can be generated; EAGER: no graph runs
    is_kept: bool  # its trace serves the next run
    is_slow: bool  # seconds in each state
    rounds: str  # why its numbers are eager's within rounding only, where eager's kernels run, too; "": they are equal
    precision: torch.dtype  # the least that it computes in
    differs: str  # why what it shows is not eager's; "" where it is
    differs_in: Sequence[str]  # the states in which it is not: all that run captured graphs, if nothing else is said

    @property
    def name(self) -> str:
        return self.run.__name__

    @property
    def states(self) -> tuple[str, ...]:
        return STATES if self.is_kept else STATES[:-1]


def program(
    comes_to: str = KERNELS,
    is_kept: bool = False,
    is_slow: bool = False,
    rounds: str = "",
    precision: torch.dtype = torch.float32,
    differs: str = "",
    differs_in: Sequence[str] = CAPTURED,
) -> Callable[[Callable[[Run], None]], Program]:
    """Makes a row of a function."""
    return lambda run: Program(run, comes_to, is_kept, is_slow, rounds, precision, differs, differs_in)


@dataclass
class Run:
    """What a program is given: where it shows things, and the one door that a script has to name by itself."""

    folder: Path
    optimize: Callable[[Any], Any]  # of functions; modules are found
    shown: list[Any] = field(default_factory=list)

    def show(self, name: str, *values: Any) -> None:
        self.shown.append((name, seen(values[0] if len(values) == 1 else values)))

    def raises(self, name: str, function: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """Shows what a call raises; or that it raises nothing."""
        try:
            function(*args, **kwargs)
        except Exception as error:
            self.shown.append((name, seen(error)))
        else:
            self.shown.append((name, "nothing raised"))


@dataclass
class Reached:
    """How far the modules of a program came."""

    graphs: int = 0  # calls of graphs
    kernels: int = 0  # calls of generated kernels
    released: int = 0  # roots that were given up
    read: int = 0  # traces of an earlier run


def play(row: Program, state: str, folder: Path) -> tuple[Any, Reached]:
    """What a program shows in a state, and how far its modules came."""
    if state == "warm":
        with session_in("captured", folder, keeps=True):
            _play(row, autofuse.optimize, folder)  # whose graphs and traces the next session reads
    with session_in(state, folder, keeps=state == "warm") as reached:
        found = _play(row, (lambda target: target) if state in ("python", "cold") else autofuse.optimize, folder)
    return found, reached


def _play(row: Program, optimize: Callable[[Any], Any], folder: Path) -> Any:
    run = Run(folder, optimize)
    out, err = io.StringIO(), io.StringIO()
    ending: Any = "ended"
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)
    with (
        warnings.catch_warnings(record=True) as said,
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        _as_it_was(),
    ):
        warnings.simplefilter("always")
        try:
            row.run(run)
        except Exception as error:
            ending = seen(error)
        generators = (seen(torch.get_rng_state()), repr(random.getstate()), repr(np.random.get_state()))
    warned = tuple((w.category.__name__, str(w.message)) for w in said)
    return (
        *(("shown", tuple(run.shown)), ("printed", out.getvalue()), ("said", err.getvalue())),
        *(("warned", warned), ("ended", ending), ("generators", generators)),
    )


@contextlib.contextmanager
def _as_it_was() -> Iterator[None]:
    """A program leaves no hooks behind; switches of torch are put back."""
    torch.set_warn_always(True)  # what torch says once in a process, it would say to the first who comes
    before = torch.get_default_dtype(), torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    try:
        yield
    finally:
        torch.set_warn_always(False)
        torch.set_default_dtype(before[0])
        torch.set_num_threads(before[1])
        torch.use_deterministic_algorithms(before[2])
        torch.set_grad_enabled(True)
    for name in ("_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks"):
        assert not getattr(all_modules, name)


@contextlib.contextmanager
def session_in(state: str, folder: Path, keeps: bool) -> Iterator[Reached]:
    reached = Reached()
    torch._dynamo.reset()
    if state == "python":
        yield reached
        return
    cold = {"CAPTURE_AT_ONCE": "false", "CAPTURE_MIN_ROOT_US": "1e9", "CAPTURE_MIN_INFERENCE_ROOT_US": "1e9"}
    settings = {**AT_ONCE, "CAPTURE_KEEP_GRAPHS": str(keeps).lower(), "STORE": str(folder / "store.sqlite3")}
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (settings | (cold if state == "cold" else {})).items():
            patch.setenv(f"AUTOFUSE_{name}", value)
        read = dynamo.graphs_read()
        session = start_session(load(), "test")
        if state in ROUNDED:
            patch.setattr(Catalogue, "choose", _all_generated(session, state == "grouped"))
        if state == "released":
            patch.setattr(Root, "call", _given_up(Root.call, reached))
        try:
            yield reached
        finally:
            plans = [plan for router in session.context.routers for plan in router.all_plans()]
            reached.graphs = sum(router.calls() for router in session.context.routers)
            reached.kernels = sum(plan.fused_calls(node) for plan in plans for node in plan.nodes)
            reached.read = dynamo.graphs_read() - read
            session.finish(None)
            torch._dynamo.reset()


def _all_generated(session: Session, in_groups: bool) -> Callable[..., Choice]:
    """A catalogue in which each node has its kernel, made when it is asked for; ``in_groups``: or its group has."""

    def choose(self: Any, fusion_id: str, values: Sequence[int], device: torch.device) -> Choice:
        slots = [slot for router in list(session.context.routers) for slot in router.program.slots]
        slot = next(slot for slot in slots if slot.node.fusion_id == fusion_id)
        if slot.is_group:
            entry = _another_way(slot.node.form) if in_groups and slot.half is None else None
        else:
            entry = _kernel(slot.node.form) if slot.half is None else None
        return Choice(known=True, entry=entry, tag="generated" if entry is not None else "")

    return choose


@cache
def _generator() -> FusionKernelGenerator:
    return FusionKernelGenerator()


@cache
def _kernel(form: NodeForm) -> Any:
    """The entry of a node's kernel with default settings, None where none can be generated."""
    try:
        return _generator().generate_generic_kernel(form).load().entry
    except AutofuseError:
        return None


@cache
def _another_way(form: NodeForm) -> LoadedStrategy | None:
    """A way of a group other than one by one, None where there is no other."""
    strategies = [strategy for strategy in strategies_of(form) if strategy.name != PARTS]
    if not strategies:
        return None
    strategy = strategies[int(kernel_id(form, LOOP), 16) % len(strategies)]
    entries = [_kernel(part.node.form) for part in strategy.kernels]
    for index in reversed(range(len(entries))):
        if entries[index] is None:
            strategy = strategy.without(index)
            del entries[index]
    return LoadedStrategy(strategy, tuple(entries))


def _given_up(call: Callable[..., Any], reached: Reached) -> Callable[..., Any]:
    """Roots that lose after their second call."""

    def counted(self: Root, module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.calls >= 2 and self.state == "captured":
            self.trial.verdicts.lose_up_to(1 << 60)
            self.lose(next(iter(self.trial.shapes.values())), Loss("slower_than_eager", 0.5, frozenset()), True, True)
            reached.released += 1
        return call(self, module, args, kwargs)

    return counted
