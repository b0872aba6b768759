"""The traces of a root: its graphs, the code for each shape, and the classes that they depend on.

In: calls that went through Dynamo. Out: code to run past Dynamo; whether the traced objects are unchanged. Guarantee:
invalid traces are dropped, with all objects that their guards hold.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch

from autofuse.observer.root_tracker import Target
from autofuse.observer.signatures import tensors_by_path
from autofuse.preserve_rng import untouched
from autofuse.runtime.roots.graph_trial import GraphTrial
from autofuse.runtime.roots.life import RootLife
from autofuse.runtime.roots.patched_classes import Classes
from autofuse.runtime.roots.services import Capturer, RootServices
from autofuse.runtime.roots.steps import Shape
from autofuse.runtime.roots.untimed import UntimedCalls
from autofuse.startup import gc_pause

if TYPE_CHECKING:
    from autofuse.capture.dynamo import CapturedRoot
    from autofuse.capture.guarded_call import DirectCall, DirectCalls

log = logging.getLogger(__name__)

# Codes that a signature has learnt: one root may stand for several modules, or take flags beside its tensors.
MAX_DIRECT = 4
MAX_LEARNT = 32
MAX_FORGOTTEN = 8  # times that replaced code is traced again; a script that replaces more stays in eager


class RootTraces:
    """Of one root."""

    def __init__(
        self, services: RootServices, name: str, trial: GraphTrial, life: RootLife, untimed: UntimedCalls
    ) -> None:
        self.key = trial.key
        self.captured: CapturedRoot | None = None
        self.capturer: Capturer | None = None  # once something is captured
        self.classes = Classes()
        self._services = services
        self._name = name
        self._trial = trial
        self._life = life
        self._untimed = untimed
        self._has_breaks = False
        self._forgotten = 0  # times that traced code or objects had changed

    def load(self) -> None:
        """The capturer. It imports Dynamo: 1 s that a script without a root worth capturing never pays."""
        with gc_pause.paused(), untouched():
            self.capturer = self._services.tools.load_capturer()
            if self.captured is None:
                self.captured = self._compile(self.capturer)

    def _compile(self, capturer: Capturer) -> CapturedRoot:
        services = self._services
        return capturer.compile_root(
            self._name, services.backend, self.key, services.context.keeper, services.plan_cache()
        )

    def dynamic_dims(self) -> tuple[tuple[str, int], ...]:
        """(argument path, dim) of each dim that had more than one size, in this run or in an earlier one."""
        known = self._services.known.get(self.key)
        seen = self._services.observer.dynamic_dims(self.key)
        return tuple(dict.fromkeys([*(known.dynamic_dims if known else ()), *seen]))

    # ---- invalid traces --------------------------------------------------------------------------------

    def forget(self) -> None:
        """Drop traces whose code or objects have changed; the root is traced again once that pays, like a new shape."""
        detail = f"{self.classes.replaced()} was replaced after it was captured"
        self._forgotten += 1
        log.info("%s: what was traced is forgotten: %s", self._name, detail)
        if self._forgotten > MAX_FORGOTTEN:
            self._life.release(f"{detail}, and others before")
        elif self._has_breaks:  # code that Dynamo has compiled after a break is not ours to drop
            self._life.release(f"{detail}, and its graph breaks")
        self.drop()

    def drop(self) -> bool:
        """Drop all traces, and all objects that their guards hold; False where there are none."""
        shapes = self._trial.shapes
        if self.captured is None or all(shape.is_new and not shape.direct for shape in list(shapes.values())):
            return False
        assert self.capturer is not None
        self.capturer.reset_root(self.captured)
        self.captured = self._compile(self.capturer)
        self._untimed.stop()
        self.classes = Classes()
        for shape in list(shapes.values()):
            shape.forget()
        self._services.context.disturbances += 1
        return True

    def end(self) -> None:
        """Let go of the script's objects when the session has ended: Python's collector does not find those that
        Dynamo keeps with code, and files that a script leaves open would not be written."""
        if self.captured is not None and self.capturer is not None:
            self.capturer.reset_root(self.captured)
            names = self.captured.direct.function.__globals__  # guards hold them in C++; Dynamo deletes them itself
            names.update(dict.fromkeys(names))

    # ---- traces ----------------------------------------------------------------------------------------

    def learn(
        self, direct: DirectCalls, shape: Shape, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """After a call through Dynamo, remember the code that it ran for the next call."""
        found: DirectCall | None = None
        try:
            found = direct.find(module, args, kwargs)
            shape.learnt += 1 if found is not None else MAX_LEARNT // 4
            self._has_breaks |= found is None
        except Exception as error:  # calls go on through Dynamo
            shape.learnt = MAX_LEARNT
            log.debug("%s: no direct calls: %s", self._name, error)
        try:
            self.note_classes(module, found)
            alive = [d for d in shape.direct if d.manager.cache_entry is not None and d is not found]
            shape.direct = (*([found] if found is not None else []), *alive)[:MAX_DIRECT]
        except (
            Exception
        ) as error:  # caught here, because the call has its result: an exception further up would run it again
            self._life.give_up(module, error)

    def note_classes(self, module: Target, direct: DirectCall | None = None) -> None:
        """Record the classes of all objects that a trace has read, of the modules that hold them, and of their members.

        After a graph break the guards of the later code are unknown to us: only the last two kinds are recorded.
        """
        kinds: set[type] = direct.types() if direct is not None else set()
        if isinstance(module, torch.nn.Module):
            for child in torch.nn.Module.modules(module):
                kinds.add(type(child))
                kinds |= {type(value) for value in vars(child).values()}
        self.classes.note([*kinds, torch.nn.Parameter])  # and so torch.Tensor

    def find_kept(self, module: Target, args: tuple[Any, ...], kwargs: dict[str, Any]) -> DirectCall | None:
        """An earlier run's trace that fits this call."""
        captured = self.captured
        if captured is None or captured.traces is None:
            return None
        direct = captured.direct.find_adopted(module, args, kwargs)
        if direct is None:
            with untouched():
                direct = captured.traces.find(module, args, kwargs, tensors_by_path(args, kwargs))
            if direct is not None:
                captured.direct.adopt(direct)
        return direct
