"""Replaces torch's functional optimizers, and imports the fused steps once they can pay.

In: the calls that ``Optimizer.step`` makes, one per parameter group. Out: the same updates, by torch or by the
`OptimizerRouter`. Guarantee: before the router is imported, a step is torch's own and costs 1 us more. Kernels and
their printers take a good half second to import. As for captures, they are imported once the script has spent as much
in torch's own steps, or has paid for a capture, or waits for tuning. Ranks of a job import them at their first step:
they count steps together.
"""

from __future__ import annotations

import functools
import importlib
import inspect
from collections.abc import Callable
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch

from autofuse.ir.records import NodeUse, TuneRequest
from autofuse.observer.script_modes import modes_are_active
from autofuse.optim.algorithms import ALGORITHMS
from autofuse.preserve_rng import untouched
from autofuse.runtime.kernels.device_kernels import DeviceKernels
from autofuse.runtime.optimizers.collected_lists import CollectedLists
from autofuse.runtime.optimizers.kept_casts import casts_are_kept, keep_casts
from autofuse.runtime.rank_agreement import group_size
from autofuse.runtime.run_context import RunContext

if TYPE_CHECKING:
    from autofuse.runtime.optimizers.router import OptimizerRouter
    from autofuse.wrapper.native_library import Runner

IMPORT_SECONDS = 0.7  # seconds to import the router's modules
# Torch's own steps must have taken so many times as long: at a fifth of a script's time it loses a twentieth at most.
RENT = 4.0
MANY_STEPS = 100


class OptimizerHook:
    """All optimizer steps of a process."""

    def __init__(
        self, context: RunContext, kernels: DeviceKernels, wait_for: Callable[[list[TuneRequest]], None]
    ) -> None:
        """``wait_for(requests)`` pauses the script until these are tuned."""
        self._context = context
        self._kernels = kernels
        self._wait_for = wait_for
        self._originals: dict[str, Callable[..., None]] = {}
        self.spent_seconds = 0.0  # seconds in torch's own steps, while there is no router
        self._failed = False
        self._lists = CollectedLists()
        self._runner: Runner | None = None
        self.router: OptimizerRouter | None = None

    def install(self) -> None:
        """Replace torch's functions, except those that cannot be replaced."""
        for name in ALGORITHMS:
            module = importlib.import_module(f"torch.optim.{name}")
            original = getattr(module, name, None)
            if original is None or not _is_plain(inspect.signature(original)):
                continue
            self._originals[name] = original
            setattr(module, name, self._replacement(name, original))

    def uninstall(self) -> None:
        for name, original in self._originals.items():
            setattr(importlib.import_module(f"torch.optim.{name}"), name, original)
        self._originals = {}
        self._lists.close()

    @property
    def is_in_c(self) -> bool:
        """Whether C does what surrounds the kernels of steps."""
        return self._lists.is_installed

    def run_in_c(self, runner: Runner) -> None:
        """Do what steps need beside their kernels in C, as soon as there are kernels."""
        self._runner = runner
        if self.router is not None:
            self.router.look_in_c(runner)
            self._lists.install(runner)

    @property
    def has_fused_steps(self) -> bool:
        """Whether kernels make steps for long enough that more is done to speed them up."""
        return self.router is not None and any(g.fused_steps >= MANY_STEPS for g in [*self.router.groups.values()])

    def requests(self) -> list[TuneRequest]:
        """Steps to be tuned."""
        return self.router.requests() if self.router is not None else []

    def uses(self) -> list[NodeUse]:
        """How the steps were used, for the report."""
        return self.router.uses() if self.router is not None else []

    def _replacement(self, algorithm: str, original: Callable[..., None]) -> Callable[..., None]:
        bind = _binder(original)

        @functools.wraps(original)
        def step(*args: Any, **kwargs: Any) -> None:
            if torch.compiler.is_compiling() or modes_are_active():
                return original(*args, **kwargs)
            if casts_are_kept() and not self._context.steps_in_autocast:
                self._context.steps_in_autocast = True
                keep_casts(args[0] if args else kwargs.get("params", ()))
            router = self.router
            if router is None and self._pays(args, kwargs):
                router = self._load()
            if router is None:
                began = perf_counter()
                try:
                    return original(*args, **kwargs)
                finally:
                    self.spent_seconds += perf_counter() - began
            arguments = bind(args, kwargs)
            if arguments is None or not router.step(algorithm, original, arguments):
                original(*args, **kwargs)  # which reports wrong arguments

        return step

    def _pays(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether to import the router; on a GPU at once, since the host's time there is not the step's."""
        context = self._context
        if self._failed or not context.store_thread.usable:  # a forked child cannot read decisions
            return False
        if self._kernels.is_loaded or context.mode == "wait" or self.spent_seconds >= RENT * IMPORT_SECONDS:
            return True
        if group_size() > 1:
            return True
        params = args[0] if args else kwargs.get("params")
        return isinstance(params, list) and bool(params) and getattr(params[0], "is_cuda", False)

    def _load(self) -> OptimizerRouter | None:
        began = perf_counter()
        try:
            with untouched():
                from autofuse.runtime.optimizers.router import OptimizerRouter

                assert self._kernels.catalogue is not None  # imports it
                self.router = OptimizerRouter(self._context, self._kernels, self._wait_for)
                if self._runner is not None:
                    self.run_in_c(self._runner)
            self._context.capture_seconds += perf_counter() - began
        except Exception as error:
            self._failed = True
            self._context.report_fallback("optimizer_unknown", "optimizers' steps stay torch's own", error)
        return self.router


def _is_plain(signature: inspect.Signature) -> bool:
    """Whether a functional optimizer can be replaced: it takes ``params``, and all arguments by their names."""
    kinds = {known.kind for known in signature.parameters.values()}
    return "params" in signature.parameters and kinds <= {
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
        inspect.Parameter.KEYWORD_ONLY,
    }


def _binder(function: Callable[..., None]) -> Callable[[tuple[Any, ...], dict[str, Any]], dict[str, Any] | None]:
    """A function that names a call's arguments, with defaults; None for wrong ones. Faster than `Signature.bind`.

    The function must not have arguments of other kinds than by position or name.
    """
    parameters = inspect.signature(function).parameters
    by_place = [name for name, known in parameters.items() if known.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
    defaults = {name: known.default for name, known in parameters.items() if known.default is not known.empty}

    def bind(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any] | None:
        placed = dict(zip(by_place, args, strict=False))
        found = {**defaults, **placed, **kwargs}
        if len(args) > len(by_place) or found.keys() != parameters.keys() or not placed.keys().isdisjoint(kwargs):
            return None
        return found

    return bind
